"""Waiting: M/G/1 and M/G/c by moments, delays added by moments, and the batch of a processor-sharing decode pool."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from breakeven.models.numerics import TINY, gamma_cdf, gamma_survival, power, wait_probability

LEAST_CALLS = 0.17  # where calls go to the engine with the fewest, they wait less often than in one queue (simulated)
STAGED_CALLS = 1.25  # the same, as an exponent, of engines in stages


class Wait(NamedTuple):
    """A wait that is zero with probability 1 - `probability`, else gamma with `mean_s` and squared CV `cv2`."""

    probability: Array
    mean_s: Array  # given that one waits
    cv2: Array

    @property
    def average_s(self) -> Array:
        return self.probability * self.mean_s

    @property
    def variance_s2(self) -> Array:
        second = self.probability * self.mean_s**2 * (1.0 + self.cv2)
        return jnp.maximum(second - self.average_s**2, 0.0)

    def survival(self, x_s: Array) -> Array:
        """P(wait > x) for x >= 0."""
        shape = 1.0 / jnp.maximum(self.cv2, TINY)
        held = jnp.clip(shape, 0.05, 3.0)
        wide = gamma_survival(x_s / (self.mean_s + TINY) * held, held)
        narrow = 1.0 - gamma_cdf(x_s, self.mean_s, self.cv2 * jnp.square(self.mean_s))
        return self.probability * jnp.where(shape > 3.0, narrow, wide)

    def exponentials(self) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """(share, rate per second) of two exponentials with this mean and, from 1 on, this squared CV (balanced means):
        a cheap stand-in for the gamma tail."""
        excess = jnp.maximum(self.cv2, 1.0)
        share = 0.5 * (1.0 + jnp.sqrt((excess - 1.0) / (excess + 1.0) + 1e-12))  # the root of 0 has no derivative
        mean = self.mean_s + TINY
        return (share, 2.0 * share / mean), (1.0 - share, 2.0 * (1.0 - share) / mean)


class Moments(NamedTuple):
    """First three raw moments of a service time, in seconds and its powers."""

    first: Array
    second: Array
    third: Array

    def scaled(self, factor: Array) -> "Moments":
        """The moments of `factor` times the variable."""
        return Moments(self.first * factor, self.second * factor**2, self.third * factor**3)

    def mixed(self, other: "Moments", share: Array) -> "Moments":
        """The moments of a mixture that takes `other` with probability `share`."""
        return Moments(*(a + share * (b - a) for a, b in zip(self, other, strict=True)))


def queue_wait(rate: Array, service: Moments, servers: Array, arrival_cv2: Array) -> Wait:
    r"""Wait in a queue with `servers` equal servers, each fed at `rate` calls per second.

    One server: Pollaczek-Khinchine and Takacs, with :math:`\rho = \lambda E[S]`,

    .. math:: E[W] = \frac{\lambda E[S^2]}{2(1-\rho)}, \quad E[W^2] = 2E[W]^2 + \frac{\lambda E[S^3]}{3(1-\rho)}.

    A pool that sends calls to the server with the fewest of them waits with the probability C of M/M/c (Sakasegawa),
    to the power R^0.17, and longer than one queue for all would: calls are sent behind a huge prompt, too. With R
    servers

    .. math:: E[W | W > 0] = \frac{E[S^2]}{2E[S]} \left(\frac{1}{R(1-\rho)} + (1 - 1/R)(1 - R^{-0.6} \rho)\right).

    Both exponents were read off simulations of 2 to 8 servers, 30 to 85 % busy. Arrivals burstier than Poisson stretch
    the wait (`burstier`).
    """
    rho = jnp.clip(rate * service.first, 1e-6, 0.995)
    idle = 1.0 - rho
    pooled = service.scaled(1.0 / servers)
    arrivals, one = rate * servers, 1.0 / servers
    mean = arrivals * pooled.second / (2.0 * idle)
    second = 2.0 * mean**2 + arrivals * pooled.third / (3.0 * idle)
    residual = 0.5 * service.second / (service.first + TINY)
    stuck = residual * (one / idle + (1.0 - one) * (1.0 - power(servers, -0.6) * rho))
    given_wait = stuck * burstier(service, arrival_cv2)
    cv2 = jnp.maximum(second * rho / (mean**2 + TINY) - 1.0, jnp.where(servers > 1.0, 0.3, 0.05))
    return Wait(power(wait_probability(servers, rho), power(servers, LEAST_CALLS)), given_wait, cv2)


def burstier(service: Moments, arrival_cv2: Array) -> Array:
    """Mean wait of arrivals of this squared CV over that of Poisson ones, (c_a^2 + c_s^2) / (1 + c_s^2) (Allen and
    Cunneen)."""
    service_cv2 = jnp.maximum(service.second / (service.first**2 + TINY) - 1.0, 0.0)
    return (arrival_cv2 + service_cv2) / (1.0 + service_cv2)


def counted_wait(rate: Array, seconds: Array, weight: Array, servers: Array, calls: Array, joined: Array) -> Wait:
    r"""Wait for prefill on one of several engines that are sent a call by how few they have, where most of an engine's
    `calls` are not in its queue for prefill: they decode, or their images are encoded. Shapes (n,), of prompts (n, P).

    Calls come to an engine that has some at `joined` times their mean `rate`. During a prompt of S seconds about

    .. math:: h (1 - e^{-x/h}), \quad x = \text{joined} \cdot \lambda S, \quad h = (1 + 0.1\, \text{calls}) R / (R - 1)

    come: while a long one lasts the engine falls behind the others, which get the rest. Summed over prompts that is the
    share of calls that wait, the first of them for most of the prompt. Another call may be waiting, too:

    .. math:: E[W | W > 0] = r \left(\frac{1}{R(1-\rho)} + (1 - 1/R)(1 - 0.4 \rho)\right).

    0.1 and 0.4 were read off simulations of 17 deployments below half load: off by 8 and 10 % (root mean square).
    """
    one = 1.0 / servers
    most = ((1.0 + 0.1 * calls) / jnp.maximum(1.0 - one, 0.1))[:, None]
    come = (joined * rate)[:, None] * seconds / most
    some = -jnp.expm1(-come)
    # Of a prompt, what is left when a call comes; for a short one the difference is lost in 32 bit.
    left = jnp.where(come < 0.01, 0.5 * come, 1.0 - some / jnp.maximum(come, 0.01))
    probability = jnp.sum(weight * most * some, -1)
    left_s = jnp.sum(weight * most * seconds * left, -1) / jnp.maximum(probability, 1e-9)
    rho = jnp.clip(rate * jnp.sum(weight * seconds, -1), 1e-6, 0.995)
    given = left_s * (one / (1.0 - rho) + (1.0 - one) * (1.0 - 0.4 * rho))
    return Wait(jnp.clip(probability, 1e-9, 1.0), given, jnp.ones_like(given))


def pipeline_probability(engines: Array, utilization: Array, stages: Array) -> Array:
    r"""Probability of waiting for the first stage of a pipeline, of several that are sent a call by how few they have.

    A call is at an engine p = `stages` times as long as at its first stage. All engines must have some, each with
    probability :math:`1 - (1 - \rho)^p`, and the first stage of the chosen one must be busy, as it is in a share
    :math:`\rho / (1 - (1 - \rho)^p)` of that time.
    """
    rho = jnp.clip(utilization, 1e-6, 0.995)
    some = 1.0 - power(1.0 - rho, stages)
    every = power(wait_probability(engines, some), jnp.where(engines > 1.0, STAGED_CALLS, 1.0))
    return rho / some * every


def add_waits(*waits: Wait) -> Wait:
    """The sum of independent waits, matched by its probability of being zero, mean and variance."""
    none = jnp.ones_like(waits[0].probability)
    mean = variance = jnp.zeros_like(none)
    for wait in waits:
        none = none * (1.0 - wait.probability)
        mean = mean + wait.average_s
        variance = variance + wait.variance_s2
    probability = jnp.maximum(1.0 - none, 1e-9)
    given = mean / probability
    second = (variance + mean**2) / probability
    given2 = jnp.maximum(given**2, 1e-24)  # a wait of no length has no spread
    return Wait(probability, given, jnp.clip(second / given2 - 1.0, 1e-4, 1e6))


def followed(wait: Wait, other: Wait) -> Wait:
    """A wait that another one follows, if there is one at all."""
    given = wait.mean_s + other.average_s
    variance = wait.cv2 * wait.mean_s**2 + other.variance_s2
    return Wait(wait.probability, given, variance / jnp.maximum(given**2, 1e-24))


def either_wait(one: Wait, other: Wait) -> Wait:
    """A wait that is the one or the other, never both."""
    probability = one.probability + other.probability + 1e-9
    mean = (one.average_s + other.average_s) / probability
    second = sum(w.probability * w.mean_s**2 * (1.0 + w.cv2) for w in (one, other)) / probability
    return Wait(probability, mean, jnp.clip(second / jnp.maximum(mean**2, 1e-24) - 1.0, 1e-4, 1e6))


def uniform_wait(probability: Array, longest_s: Array) -> Wait:
    """With some probability, a wait uniform between 0 and `longest_s` (for the end of the step in progress)."""
    return Wait(probability, 0.5 * longest_s, jnp.full_like(longest_s, 1.0 / 3.0))


def autocorrelation_share(life: Array) -> Array:
    """Variance left when an exponentially correlated process is averaged over `life` correlation times,
    2 (u - 1 + e^-u) / u^2; 1 at u = 0."""
    u = jnp.maximum(life, 1e-6)
    exact = 2.0 * (u + jnp.expm1(-u)) / (u * u)
    return jnp.where(u < 0.05, 1.0 - u / 3.0 + u * u / 12.0, exact)
