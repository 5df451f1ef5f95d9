"""Prompts that share steps with a call's own: those it waits for, those computed in its last step, those left behind.

A step takes what is queued, up to its token budget. So a call waits for the step in progress and then for whole steps
only, its first token waits for the prompts behind it that fit into its last step, and what is left of them when it
starts to decode stalls it in a pool that does both.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from breakeven.models.numerics import power
from breakeven.models.queueing import Moments, Wait

HIGHEST = 0.98
HELD_STEPS = 5  # in which the longest prompt ahead is looked at


class Step(NamedTuple):
    """How an engine's prefill steps are filled, shapes (n,)."""

    rate: Array  # calls per second
    service: Moments  # time a call occupies the engine, its share of what mates share included
    marginal_s: Array  # the part of it that mates do not share, mean
    marginal_s2: Array  # its second moment
    mates: Array  # prompts in a step, mean
    budget_s: Array  # time of a full token budget
    depth: Array  # pipeline stages, all of which a step passes through: these seconds are those of the first


class Joined(NamedTuple):
    """Time of the prompts behind a call's in its last step, shapes (n,)."""

    waited: Wait  # of a call that waits for others' prefill
    paused: Wait  # that came during the decode step that it found in progress


class Burst(NamedTuple):
    """What a call finds around it, shapes (n,)."""

    shorter: Array  # its wait, with what it has in common with those before it in its step, over that of one by one
    even: Array  # share of that wait that is uniform: for steps of a fixed length
    together: Joined
    left_s: Array  # prefill still to do of the others when it is done, mean
    left_s2: Array  # its second moment


def _residual_s(step: Step, load: Array) -> Array:
    r"""Time to the end of a step in progress, of steps that take all that came during the last one.

    A step takes X = f + M seconds, f fixed and M for n prompts of m each, so with load = lambda m

    .. math:: \frac{E[X^2]}{2 E[X]} = \frac{f^2 + 2 f M + M v}{2 X}, \quad
              v = \frac{E[m^2]}{E[m] (1 - \text{load}^2)} + (n - 1) m \frac{f}{X}.

    With f = 0 it is the 1/(1 + rho)-th part of the work that an arrival finds.
    """
    whole_s = step.mates * step.service.first
    moving_s = step.mates * step.marginal_s
    fixed_s = jnp.maximum(whole_s - moving_s, 0.0)
    each_s = step.marginal_s2 / step.marginal_s / (1.0 - load**2)
    each_s = each_s + (step.mates - 1.0) * step.marginal_s * fixed_s / whole_s
    return 0.5 * (fixed_s**2 + 2.0 * fixed_s * moving_s + moving_s * each_s) / whole_s


def _fitting(step: Step, came: Array) -> Wait:
    """The part of the prompts behind a call that fits into its last step, where `came` have come on average."""
    came = came + 1e-6
    mean = (1.0 + came) * step.marginal_s
    r = jnp.minimum(step.budget_s / mean, 30.0)
    none = jnp.exp(-r)
    fits = jnp.where(r < 0.05, 0.5 * r - r * r / 6.0, 1.0 - (1.0 - none) / (r + 1e-9))
    fits2 = jnp.where(r < 0.05, r * r / 3.0, 2.0 * (1.0 - (2.0 - none * (2.0 + r)) / (r + 1e-9)))
    first = mean * fits + 1e-9
    # A geometric number of prompts is exponential where it is large, one prompt where it is small.
    spread = 0.5 * (1.0 + (step.marginal_s2 / step.marginal_s**2 - 1.0 + came) / (1.0 + came))
    second = jnp.minimum(mean * mean * fits2 * spread, first * step.budget_s)
    return Wait(came / (1.0 + came), first, jnp.clip(second / (first * first) - 1.0, 0.05, 100.0))


def _joins(step: Step, servers: Array) -> Array:
    """Calls per second that come to a busy engine: to one of several only where none is idle."""
    rho = jnp.clip(step.rate * step.service.first, 1e-6, HIGHEST)
    return step.rate * power(rho, jnp.sqrt(2.0 * (servers + 1.0)) - 2.0)


def in_the_last(step: Step, servers: Array, before_s: Array, room: Array) -> tuple[Array, Array]:
    r"""(mean, variance) of the seconds that others add to the last step of a call that takes several: of those that
    come in the `before_s` until it begins, as many as fit into the `room` of its token budget. Shapes (n, nodes).

    Poisson in number, they take a together, given that there are any, with squared CV c, of which R fit

    .. math:: E[\min(A, R)] \approx (a + R - \sqrt{(a - R)^2 + 0.54\, c\, a R}) / 2,

    exact for c = 0, and for an exponential A at a = R.
    """
    came = _joins(step, servers)[:, None] * before_s + 1e-6
    some = -jnp.expm1(-came)
    many = came / some
    mean = many * step.marginal_s[:, None]
    # Squared CV of their sum, given that there are any: that of their number is 1 / many - (1 - some).
    one2 = step.marginal_s2 / step.marginal_s**2
    cv2 = one2[:, None] / many - (1.0 - some)
    fits = room * step.budget_s[:, None]
    apart = (mean - fits) ** 2 + jnp.minimum(0.54 * cv2, 2.0) * mean * fits
    given = 0.5 * (mean + fits - jnp.sqrt(apart + 1e-18))
    # Nothing varies of those that fill the room, all that they do if none of them does.
    varies = cv2 * jnp.clip(1.0 - given / jnp.maximum(fits, 1e-9), 0.0, 1.0)
    given = step.depth[:, None] * given
    return some * given, some * (1.0 - some + varies) * given**2


def _whole_steps(budget_s: Array, ahead_s: Array) -> Array:
    """Share of exponential work of this mean that fills whole steps."""
    x = jnp.minimum(budget_s / (ahead_s + 1e-9), 30.0)
    return x / (jnp.expm1(x) + 1e-9)


def burst(step: Step, servers: Array, pause_s: Array) -> Burst:
    r"""The burst around a call of an engine whose steps it joins.

    With exponential work of mean a ahead, beside what mates share, and steps of T seconds the share
    :math:`y = x/(e^x - 1)`, x = T/a, is waited for in whole steps, the rest is computed in the call's own one. So it
    begins after

    .. math:: D = \rho ((1 - y) r + y a) + \text{pause},

    r the residual of a step. In that time prompts of work A have come, geometric in number: none with probability
    1/(1 + lambda D), else exponential with mean (1 + lambda D) E[S]. Of these min(A, U T) fit into the last step, U
    uniform. What came while the call waited, was computed, and meanwhile, and did not fit, is left.
    """
    rate, service = step.rate, step.service
    rho = jnp.clip(rate * service.first, 1e-6, HIGHEST)
    load = jnp.minimum(rate * step.marginal_s, rho)
    found_s = 0.5 * service.second / service.first / (1.0 - rho)
    residual_s = jnp.minimum(_residual_s(step, load), found_s)
    # Of what it waits for, the budget has to hold what mates do not share.
    whole = _whole_steps(step.budget_s, found_s)
    waited_s = (1.0 - whole) * residual_s * (1.0 + load) + whole * found_s
    ahead_s = load * waited_s + jnp.minimum(step.marginal_s / service.first, 1.0) * residual_s
    whole = _whole_steps(step.budget_s, jnp.minimum(ahead_s, found_s))
    begins_s = (1.0 - whole) * residual_s + whole * found_s
    shorter = ((1.0 - whole) * residual_s * (1.0 + step.depth * load) + whole * found_s) / found_s
    one = 1.0 / servers
    wait_s = rho * found_s * one
    joins = _joins(step, servers)
    waited = _fitting(step, joins * begins_s * (one + (1.0 - one) * (1.0 - rho)))
    paused = _fitting(step, rate * pause_s)
    together_s = rho * waited.average_s + paused.average_s
    done_s = together_s * service.first / step.marginal_s
    spent_s = wait_s + service.first + pause_s + done_s
    left_s = jnp.maximum(rho * spent_s - done_s, 0.0)
    share = left_s / (rho * spent_s)
    spent_s2 = 2.0 * wait_s**2 + 2.0 * wait_s * service.first + service.second
    left_s2 = share * rate * spent_s * service.second + (share * rho) ** 2 * spent_s2
    fixed = jnp.maximum(1.0 - step.marginal_s / service.first, 0.0)
    together = Joined(*(part._replace(mean_s=step.depth * part.mean_s) for part in (waited, paused)))
    return Burst(shorter, fixed * (1.0 - whole), together, left_s, left_s2)


class HeldUp(NamedTuple):
    """Wait at the stages of a pipeline behind its first."""

    idle: Wait  # of a call that finds the first stage idle
    busy: Wait  # of one that waits there, too


def held_up(rate: Array, seconds: Array, weight: Array, longest_s: Array, depth: Array) -> HeldUp:
    r"""Wait beyond the first of a pipeline's `depth` equal stages, where prompts of `seconds` a stage, a share `weight`
    (n, nodes) of each, come at `rate` (n,); a step takes `longest_s` at most. Nodes rise, in each half of them.

    Nothing overtakes, so prompt n leaves the first stage's successors after the longest of :math:`(p - 1) S_k - I_k`
    over all prompts k up to it, I_k the time that the first stage was idle between k and n (Boxma 1979, two stages of
    equal services). On the clock of that idle time busy periods come as Poisson points, hence before a call that finds
    the first stage idle

    .. math:: P(M \le x) = \exp\left(-\lambda (p-1) \int_x^\infty g(y) dy\right), \quad
              g(y) = \frac{P(S > y)}{1 - \lambda E[S; S \le y]},

    g the probability that a busy period has a longer prompt (of a branching process, where the first of them is
    reached). Before any call it is :math:`(1 - \rho) / (1 - \lambda E[S; S \le x])` times that.
    """
    seconds, weight, half = seconds.T, weight.T, seconds.shape[-1] // 2  # sums over the first axis are sums of vectors
    whole_s = jnp.sum(weight * seconds, 0)
    rho = jnp.clip(rate * whole_s, 1e-6, HIGHEST)
    rate = rho / whole_s  # of a saturated stage no more than it can take
    low = jnp.minimum(seconds[0], seconds[half])
    seconds = jnp.minimum(seconds, low + longest_s)  # of a long prompt, the step that others wait behind
    high = 1.001 * jnp.maximum(seconds[half - 1], seconds[-1])
    mean_s = jnp.sum(weight * seconds, 0)

    def at(y: Array, beyond: Array, before: _Point) -> _Point:
        served = jnp.sum(weight * jnp.minimum(seconds, y), 0)  # E[min(S, y)]
        above = jnp.sum(jnp.where(seconds > y, weight, 0.0), 0)
        free = 1.0 / (1.0 - jnp.minimum(rate * (served - y * above), HIGHEST))
        beyond = beyond + 0.5 * (before.served - served) * (before.free + free)
        idle = jnp.exp(-rate * (depth - 1.0) * beyond)
        return _Point(y, served, above, free, beyond, 1.0 - idle, 1.0 - idle * (1.0 - rho) * (free - 1.0) / rho)

    def body(k: Array, carry: tuple[_Point, _Late, _Late]) -> tuple[_Point, _Late, _Late]:
        before, idle, busy = carry
        y = low + (high - low) * jnp.square(1.0 - (k + 1.0) / HELD_STEPS)
        here = at(y, before.beyond, before)
        moved, width = here.above - before.above, before.y - here.y
        given = before, here, moved, width
        return here, idle.plus(before.idle, here.idle, *given), busy.plus(before.busy, here.busy, *given)

    zero = jnp.zeros_like(rate)
    top = _Point(high, mean_s, zero, 1.0 / (1.0 - rho), zero, zero, 1.0 - (1.0 - rho) * (1.0 / (1.0 - rho) - 1.0) / rho)
    _, *found = lax.fori_loop(0, HELD_STEPS, body, (top, _Late(zero, zero, zero), _Late(zero, zero, zero)))
    return HeldUp(*(late.wait(depth) for late in found))


class _Point(NamedTuple):
    """What is known of the longest prompt ahead at a time y, (n,)."""

    y: Array
    served: Array  # E[min(S, y)]
    above: Array  # P(S > y)
    free: Array
    beyond: Array  # integral of g from y on
    idle: Array  # probability that it is longer, before a call that finds the first stage idle
    busy: Array  # and before one that does not


class _Late(NamedTuple):
    """Of (M - S)+: its probability of being positive, mean and mean square, summed by trapezoids; (n,)."""

    probability: Array
    first: Array
    second: Array

    def plus(self, late: Array, here_late: Array, before: _Point, here: _Point, share: Array, width: Array) -> "_Late":
        """With the part between two times."""
        first, here_first = late * (1.0 - before.above), here_late * (1.0 - here.above)
        second, here_second = late * (before.y - before.served), here_late * (here.y - here.served)
        return _Late(
            self.probability + 0.5 * (late + here_late) * share,
            self.first + 0.5 * (first + here_first) * width,
            self.second + (second + here_second) * width,
        )

    def wait(self, depth: Array) -> Wait:
        """Of as many stages as there are behind the first."""
        probability, behind = jnp.clip(self.probability, 1e-6, 1.0), depth - 1.0
        mean_s = behind * self.first / probability + 1e-9
        cv2 = behind**2 * self.second / (probability * mean_s**2 + 1e-15) - 1.0  # 1e-20 squared is 0 in 32 bit
        return Wait(jnp.where(depth > 1.0, probability, 0.0), mean_s, jnp.clip(cv2, 0.05, 100.0))
