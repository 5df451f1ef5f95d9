"""SLO attainment from latency distributions: the share of calls, and of sessions, that meet every bound.

A `Latency` holds each distribution as a few numbers; `attain` scores it against an `Slo`, so a new SLO needs no
new evaluation. Prefill work and output length of a call are taken as independent, given the workload.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.special import ndtri

from breakeven.models.numerics import TINY, gamma_cdf, gamma_quantile, normal_cdf, power
from breakeven.models.queueing import Wait, either_wait, followed
from breakeven.models.stress import Losses

SMOOTH = 0.02  # bounds are smoothed by this share of the service time, so that attainment has a gradient
SMOOTH_TOKEN = 0.01  # and those of TPOT, whose spread is a few percent, by this one
# Quantiles that stand for a call's TPOT, equally likely (Gauss-Legendre): without a stall, with common, with rare ones.
POINTS = (0.5,), (0.2113, 0.7887), (0.5,)

BISECTIONS = 26  # of 32 in the logarithm of a percentile: 5e-7 of it


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Bound:
    """A bound in seconds, and the fraction that must meet it alone (0 when it has none of its own)."""

    bound_s: Array
    fraction: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slo:
    """Bounds on a call's TTFT, TPOT and time, and on a session's time; None where there is none.

    `target` is the share that must meet all of them jointly; `per_session` is 1.0 when it counts sessions (a
    session meets the SLO when all of its calls do), 0.0 when it counts calls.
    """

    target: Array
    per_session: Array
    ttft: Bound | None = None
    tpot: Bound | None = None
    call: Bound | None = None
    session: Bound | None = None
    losses: Losses | None = None


class Varying(NamedTuple):
    """A gamma variable by its moments, seconds and their square."""

    mean_s: Array
    variance: Array


class Stall(NamedTuple):
    """What prefill in the same pool adds to a call's TPOT: nothing, or, with a probability, a gamma variable."""

    probability: Array
    given: Varying

    @property
    def mean_s(self) -> Array:
        return self.probability * self.given.mean_s

    @property
    def variance(self) -> Array:
        return self.probability * (self.given.variance + self.given.mean_s**2) - self.mean_s**2


class TokenTime(NamedTuple):
    """TPOT of a call by output node: a fixed part, gamma parts, and stalls by prefill in the same pool. A few prompts
    may hold most of the work: their stalls are rare, and told apart. Shapes (n, O)."""

    base_s: Array
    own: Varying  # with the call's own tokens in the cache
    batch: Varying  # with the sequences of others in its steps
    common: Stall
    rare: Stall

    @property
    def steady_s(self) -> Array:
        """Mean without a stall."""
        return self.base_s + self.own.mean_s + self.batch.mean_s

    @property
    def variance(self) -> Array:
        """Without a stall."""
        return self.own.variance + self.batch.variance

    @property
    def stall_mean_s(self) -> Array:
        return self.common.mean_s + self.rare.mean_s

    @property
    def stall_variance(self) -> Array:
        return self.common.variance + self.rare.variance

    @property
    def mean_s(self) -> Array:
        return self.steady_s + self.stall_mean_s

    @property
    def total_variance(self) -> Array:
        return self.variance + self.stall_variance

    def parts(self) -> tuple[tuple[Array, Array, Varying], ...]:
        """(probability, fixed part, gamma part) of calls without a stall, with common ones, with a rare one."""
        smooth = jnp.square(SMOOTH_TOKEN * self.steady_s) / 3.0
        moving = self.base_s, smooth, self.own, self.batch
        common, rare = self.common, self.rare
        any_common = Varying(common.mean_s, common.variance)
        return (
            ((1.0 - rare.probability) * (1.0 - common.probability), *_together(*moving)),
            ((1.0 - rare.probability) * common.probability, *_together(*moving, common.given)),
            (rare.probability, *_together(*moving, any_common, rare.given)),
        )


def _together(base_s: Array, smooth: Array, *parts: Varying) -> tuple[Array, Varying]:
    r"""(fixed part, gamma part) of a fixed time and the sum of independent gamma variables, by three moments.

    A gamma variable of mean m and variance v has the third central moment 2 v^2 / m, so the sum is that of mean
    :math:`(\sum v)^2 / \sum (v^2 / m)`, at most all of the time, and the rest is fixed. The `smooth` variance is
    that of a symmetric variable.
    """
    total_s, variance, skew = base_s, smooth, jnp.zeros_like(smooth)
    for part in parts:
        total_s, variance = total_s + part.mean_s, variance + part.variance
        skew = skew + part.variance * (part.variance / (part.mean_s + 1e-9))
    gamma_s = jnp.minimum(variance / (skew / variance + 1e-9), total_s)
    return total_s - gamma_s, Varying(gamma_s, variance)


class FirstChunk(NamedTuple):
    """The time from a call's first token to its first chunk at the user, which is part of TTFT and not of the call's
    time; shapes (n,)."""

    share: Array  # of the calls
    shown_s: Array  # without stalls, mean
    variance: Array  # of that
    stall: Wait  # what prefill in the pool adds


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Latency:
    """Latency distributions of a deployment. Shapes (n,), except nodes: (n, prefill nodes) and (n, outputs)."""

    wait: Wait  # behind whole prompts: for prefill, for room to decode
    brief: Wait  # for the step in progress, for prompts computed in the same one, for the link
    turn_s: Array  # nearly evenly spread, for the step of a decode that is always at work: mean
    turn_variance: Array  # of that
    prefill_s: Array  # (n, P): prefill, transfer and constants of a call
    prefill_spread_s: Array  # (n, P): standard deviation within a node
    prefill_weight: Array  # (n, P)
    token: TokenTime
    steps: Array  # (O,): tokens after the first
    output_weight: Array  # (O,)
    session_calls: Array  # (K,)
    session_weight: Array  # (K,)
    gap_mean_s: Array
    gap_variance: Array
    call_mean_s: Array  # (n,)
    call_variance: Array  # (n,)
    chunk: FirstChunk  # of outputs that reach the engine's stream interval
    brief_chunk: FirstChunk  # of shorter ones, which are shown at their end
    brief_output: Array  # (O,): 1.0 where they are

    @property
    def first_chunk_s(self) -> Array:
        """From a call's first token to its first chunk at the user, mean."""
        late, soon = (part.share * (part.shown_s + part.stall.average_s) for part in (self.chunk, self.brief_chunk))
        return late + soon

    @property
    def waiting_s(self) -> Array:
        """Before and between prefill and the first token, mean."""
        return self.wait.average_s + self.brief.average_s + self.turn_s

    @property
    def ttft_mean_s(self) -> Array:
        return self.waiting_s + jnp.sum(self.prefill_weight * self.prefill_s, -1) + self.first_chunk_s

    @property
    def tpot_mean_s(self) -> Array:
        """Mean over generated tokens, seconds."""
        weight = self.output_weight * self.steps
        return jnp.sum(weight * self.token.mean_s, -1) / jnp.sum(weight)


class Attainment(NamedTuple):
    """Shares in [0, 1], shapes (n,); 1 where there is no such bound."""

    slo: Array
    calls: Array  # all bounds of a call, jointly
    ttft: Array
    tpot: Array
    call: Array
    session: Array


def _node_width(nodes_s: Array, spread_s: Array) -> Array:
    """Half width of a triangle as wide as what a prefill node stands for: half the distance to its neighbours on either
    side, and its own spread."""
    size = nodes_s.shape[-1]
    spread = np.eye(size, k=-1) - np.eye(size, k=1)  # of the neighbours, by a product: concatenations are slow
    spread[0, 0] -= 1.0  # the first and the last have a neighbour on one side only
    spread[-1, -1] += 1.0
    apart_s = jnp.dot(nodes_s, jnp.asarray(spread, nodes_s.dtype), precision="highest")
    width = jnp.clip(0.25 * apart_s, SMOOTH * nodes_s, 0.5 * nodes_s)
    return jnp.sqrt(2.0 * width**2 + 6.0 * spread_s**2 + TINY)  # never 0: it divides


def _served(slack: Array) -> tuple[Array, Array]:
    """(share of a node's calls for which a slack is enough without a wait, what it leaves these to wait, mean), times
    in half widths of the node: calls are spread over a triangle, which the sum of several even spreads comes near. The
    mean is one of second order, off by 2 % at most."""
    x = jnp.clip(slack, -1.0, 1.0)
    late = jnp.square(jnp.maximum(x, 0.0))
    room = (1.0 + x + late) / 3.0 + jnp.maximum(slack - 1.0, 0.0)
    return 0.5 * jnp.square(1.0 + x) - late, room


def ttft_cdf(latency: Latency, x_s: Array) -> Array:
    """P(TTFT <= x); x of shape (n,) or scalar."""
    ways = jax.tree.map(lambda *leaves: jnp.stack(leaves), latency.chunk, latency.brief_chunk)
    none = jnp.zeros_like(latency.call_mean_s)

    def body(total: Array, way: FirstChunk) -> tuple[Array, None]:
        within = lax.cond(jnp.any(way.share > 0.0), lambda: way.share * _ttft_cdf(latency, way, x_s), lambda: none)
        return total + within, None

    return lax.scan(body, none, ways)[0]  # compiled once, and seldom are there outputs of both kinds


def _ttft_cdf(latency: Latency, chunk: FirstChunk, x_s: Array) -> Array:
    """P(TTFT <= x) of the outputs whose first chunk takes so long."""
    # Stalls that nearly all calls have, and that vary little, are a part of what all calls take; others are told apart.
    stall = chunk.stall
    even = jnp.clip(5.0 * (stall.probability - 0.7), 0.0, 1.0) * jnp.clip(2.0 * (1.0 - stall.cv2), 0.0, 1.0)
    taken_s = chunk.shown_s + latency.turn_s + even * stall.average_s
    varied = chunk.variance + latency.turn_variance + even**2 * stall.variance_s2
    stall, free = stall._replace(probability=(1.0 - even) * stall.probability), 1.0 - latency.wait.probability
    late = either_wait(followed(latency.wait, stall), stall._replace(probability=free * stall.probability))
    alone = latency.brief._replace(probability=free * (1.0 - stall.probability) * latency.brief.probability)
    long, alone, brief = jax.tree.map(lambda leaf: leaf[..., None], (late, alone, latency.brief))
    slack = jnp.asarray(x_s - taken_s)[..., None] - latency.prefill_s
    spread = jnp.sqrt(latency.prefill_spread_s**2 + varied[..., None])
    width_s = _node_width(latency.prefill_s, spread)
    served, room = _served(slack / width_s)
    room_s = room * width_s
    # Behind whole prompts the brief wait is a part of the long one's end; without a long one it stands alone.
    later_s = jnp.maximum(room_s - brief.average_s, 0.0)
    on_time = 1.0 - long.survival(later_s) - alone.survival(room_s)
    return jnp.sum(latency.prefill_weight * served * on_time, -1)


def tpot_cdf(latency: Latency, y_s: Array) -> Array:
    """P(TPOT <= y) over calls; a call of one token has none and meets any bound."""
    return jnp.sum(latency.output_weight * _token_cdf(latency, y_s), -1)


def _token_cdf(latency: Latency, y_s: Array) -> Array:
    """P(TPOT <= y) per output node, (n, O)."""
    y_s = jnp.asarray(y_s)[..., None]
    within = sum(share * gamma_cdf(y_s - base_s, *gamma) for share, base_s, gamma in latency.token.parts())
    return jnp.where(latency.steps > 0.5, within, 1.0)


def call_cdf(latency: Latency, ttft_s: Array, tpot_s: Array, call_s: Array) -> Array:
    """P(TTFT <= ttft, TPOT <= tpot, call time <= call), (n,); a bound of 1e9 binds nothing.

    Sums over prefill nodes, output nodes, and one or two values of the TPOT below its bound, without and with stalls
    (`POINTS`); the wait has the tail of one or two exponentials here (Wait.exponentials).
    """
    wait = jax.tree.map(lambda leaf: leaf[..., None], latency.wait)
    width_s = _node_width(latency.prefill_s, latency.prefill_spread_s)
    per_width = 1.0 / width_s
    tails = [(wait.probability * part, -rate * width_s) for part, rate in wait.exponentials()]
    first_s = latency.prefill_s + (latency.brief.average_s + latency.turn_s)[..., None]
    parts = latency.token.parts()
    outputs = jax.tree.map(jnp.asarray, (latency.steps, latency.output_weight, latency.brief_output))

    def served(room_s: Array) -> Array:
        share, room = _served((room_s[..., None] - first_s) * per_width)
        late = sum(part * jnp.exp(rate * room) for part, rate in tails)
        return jnp.sum(latency.prefill_weight * share * (1.0 - late), -1)

    def body(j: Array, total: Array) -> Array:
        steps, weight, brief = (leaf[j] for leaf in outputs)
        soon = brief > 0.5
        shown_s = jnp.where(soon, latency.brief_chunk.shown_s, latency.chunk.shown_s)
        for part, points in zip(parts, POINTS, strict=True):
            share, base, *gamma = (leaf[..., j] for leaf in jax.tree.leaves(part))
            below = jnp.where(steps > 0.5, gamma_cdf(tpot_s - base, *gamma), 1.0)
            share = weight * share * below / len(points)
            for point in points:
                z = ndtri(jnp.clip(below * point, 1e-6, 1.0 - 1e-6))
                room_s = jnp.minimum(ttft_s - shown_s, call_s - steps * (base + gamma_quantile(z, *gamma)))
                total = total + share * served(room_s)
        return total

    return lax.fori_loop(0, latency.steps.shape[0], body, jnp.zeros_like(latency.call_mean_s))


def session_cdf(latency: Latency, x_s: Array) -> Array:
    """P(session time <= x): given its K calls and K - 1 gaps, lognormal by its first two moments; one call is exact."""
    calls = latency.session_calls
    far, single = jnp.full_like(latency.call_mean_s, 1e9), calls < 1.0 + 1e-6
    call_s = jnp.broadcast_to(x_s, far.shape)
    alone = lax.cond(jnp.any(single), lambda: call_cdf(latency, far, far, call_s), lambda: jnp.zeros_like(far))
    mean = calls * latency.call_mean_s[..., None] + (calls - 1.0) * latency.gap_mean_s[..., None]
    variance = calls * latency.call_variance[..., None] + (calls - 1.0) * latency.gap_variance[..., None]
    log_variance = jnp.maximum(jnp.log1p(variance / (mean * mean + TINY)), SMOOTH**2)
    centre = jnp.log(mean) - 0.5 * log_variance
    z = (jnp.log(jnp.maximum(x_s, TINY))[..., None] - centre) / jnp.sqrt(log_variance)
    within = jnp.where(single, alone[..., None], normal_cdf(z))
    return jnp.sum(latency.session_weight * within, -1)


def attain(latency: Latency, slo: Slo) -> Attainment:
    """Share of calls that meet every bound of a call, share of sessions in time, and each bound alone."""
    one = jnp.ones_like(latency.call_mean_s)
    far = one * 1e9
    ttft_s = far if slo.ttft is None else one * slo.ttft.bound_s
    tpot_s = far if slo.tpot is None else one * slo.tpot.bound_s
    ttft = one if slo.ttft is None else ttft_cdf(latency, ttft_s)
    tpot = one if slo.tpot is None else tpot_cdf(latency, tpot_s)
    call = one if slo.call is None else call_cdf(latency, far, far, one * slo.call.bound_s)
    session = one if slo.session is None else session_cdf(latency, one * slo.session.bound_s)
    calls = ttft * tpot
    if slo.call is not None:
        # The exponential tails of the wait must not promise more than its gamma tail does.
        calls = jnp.minimum(jnp.minimum(call_cdf(latency, ttft_s, tpot_s, one * slo.call.bound_s), calls), call)
    every = jnp.sum(latency.session_weight * power(calls[..., None], latency.session_calls), -1)
    joint = jnp.where(slo.per_session > 0.5, every, calls) * session
    return Attainment(*(jnp.clip(x, 0.0, 1.0) for x in (joint, calls, ttft, tpot, call, session)))


def shortfall(attainment: Attainment, slo: Slo) -> Array:
    """By how much the fractions that single bounds carry are missed, the worst of them; <= 0 when all are met."""
    worst = -jnp.ones_like(attainment.slo)
    for name in ("ttft", "tpot", "call", "session"):
        bound: Bound | None = getattr(slo, name)
        if bound is not None:
            worst = jnp.maximum(worst, bound.fraction - getattr(attainment, name))
    return worst


def percentile(cdf: object, latency: Latency, share: float) -> Array:
    """The time that `share` of a latency's `cdf(latency, x)` stays below, by bisection on log time, seconds."""
    low = jnp.full_like(latency.call_mean_s, -14.0)
    high = jnp.full_like(low, 18.0)

    def body(_: int, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = 0.5 * (low + high)
        below = cdf(latency, jnp.exp(middle)) < share  # type: ignore[operator]
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    low, high = lax.fori_loop(0, BISECTIONS, body, (low, high))
    return jnp.exp(0.5 * (low + high))
