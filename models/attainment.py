"""SLO attainment from latency distributions: the share of calls, and of sessions, that meet every bound.

A `Latency` holds each distribution as a few numbers; `attain` scores it against an `Slo`, so a new SLO needs no
new evaluation. Prefill work and output length of a call are taken as independent, given the workload.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from breakeven.models.numerics import TINY, gamma_cdf, normal_cdf, ramp
from breakeven.models.queueing import Wait

SMOOTH = 0.02  # bounds are smoothed by this share of the service time, so that attainment has a gradient
GAUSS = ((-1.7320508, 1.0 / 6.0), (0.0, 2.0 / 3.0), (1.7320508, 1.0 / 6.0))  # 3-point Gauss-Hermite


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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Latency:
    """Latency distributions of a deployment. Shapes (n,), except nodes: (n, prefill nodes) and (n, outputs)."""

    wait: Wait  # everything before and between: queue, batching, admission, link
    prefill_s: Array  # (n, P): prefill, transfer and constants of a call
    prefill_weight: Array  # (n, P)
    token_s: Array  # (n, O): TPOT that does not vary with the batch
    token_batch_s: Array  # (n,): mean of the part that does (gamma)
    token_variance: Array  # (n, O)
    steps: Array  # (O,): tokens after the first
    output_weight: Array  # (O,)
    session_calls: Array  # (K,)
    session_weight: Array  # (K,)
    gap_mean_s: Array
    gap_variance: Array
    call_mean_s: Array  # (n,)
    call_variance: Array  # (n,)

    @property
    def ttft_mean_s(self) -> Array:
        return self.wait.average_s + jnp.sum(self.prefill_weight * self.prefill_s, -1)

    @property
    def tpot_mean_s(self) -> Array:
        """Mean over generated tokens, seconds."""
        weight = self.output_weight * self.steps
        return jnp.sum(weight * self.token_s, -1) / jnp.sum(weight) + self.token_batch_s


class Attainment(NamedTuple):
    """Shares in [0, 1], shapes (n,); 1 where there is no such bound."""

    slo: Array
    calls: Array  # all bounds of a call, jointly
    ttft: Array
    tpot: Array
    call: Array
    session: Array


def _node_width(nodes_s: Array) -> Array:
    """Half width of what a prefill node stands for: half the distance to its neighbours."""
    left = jnp.concatenate([nodes_s[..., :1], nodes_s[..., :-1]], -1)
    right = jnp.concatenate([nodes_s[..., 1:], nodes_s[..., -1:]], -1)
    return jnp.clip(0.25 * (right - left), SMOOTH * nodes_s, 0.5 * nodes_s)


def ttft_cdf(latency: Latency, x_s: Array) -> Array:
    """P(TTFT <= x); x of shape (n,) or scalar."""
    slack = jnp.asarray(x_s)[..., None] - latency.prefill_s
    wait = jax.tree.map(lambda leaf: leaf[..., None], latency.wait)
    served = ramp(slack, 0.0, _node_width(latency.prefill_s))
    on_time = 1.0 - wait.survival(jnp.maximum(slack, 0.0))
    return jnp.sum(latency.prefill_weight * served * on_time, -1)


def tpot_cdf(latency: Latency, y_s: Array) -> Array:
    """P(TPOT <= y) over calls; a call of one token has none and meets any bound."""
    return jnp.sum(latency.output_weight * _token_cdf(latency, y_s), -1)


def _token_cdf(latency: Latency, y_s: Array) -> Array:
    """P(TPOT <= y) per output node, (n, O)."""
    slack = jnp.asarray(y_s)[..., None] - latency.token_s
    smooth = jnp.square(SMOOTH * (latency.token_s + latency.token_batch_s[..., None])) / 3.0
    within = gamma_cdf(slack, latency.token_batch_s[..., None], latency.token_variance + smooth)
    return jnp.where(latency.steps > 0.5, within, 1.0)


def call_cdf(latency: Latency, ttft_s: Array, tpot_s: Array, call_s: Array) -> Array:
    """P(TTFT <= ttft, TPOT <= tpot, call time <= call), (n,); infinite bounds bind nothing.

    Sums prefill nodes x output nodes x 3 Gauss points of the TPOT; the wait has an exponential tail here.
    """
    mean = latency.token_s + latency.token_batch_s[..., None]
    sd = jnp.sqrt(jnp.maximum(latency.token_variance, 0.0))
    rate = 1.0 / (latency.wait.mean_s[..., None] + TINY)
    width = _node_width(latency.prefill_s)
    points = latency.steps.shape[0]

    def body(j: Array, total: Array) -> Array:
        for z, weight in GAUSS:
            token = jnp.maximum(mean[..., j] + z * sd[..., j], 0.0)
            meets = jnp.where(latency.steps[j] > 0.5, ramp(tpot_s, token, SMOOTH * token), 1.0)
            room = jnp.minimum(ttft_s, call_s - latency.steps[j] * token)
            slack = room[..., None] - latency.prefill_s
            late = latency.wait.probability[..., None] * jnp.exp(-jnp.maximum(slack, 0.0) * rate)
            served = jnp.sum(latency.prefill_weight * ramp(slack, 0.0, width) * (1.0 - late), -1)
            total = total + weight * latency.output_weight[j] * meets * served
        return total

    return lax.fori_loop(0, points, body, jnp.zeros_like(latency.token_batch_s))


def session_cdf(latency: Latency, x_s: Array) -> Array:
    """P(session time <= x): given its K calls and K - 1 gaps, lognormal by its first two moments."""
    calls = latency.session_calls
    mean = calls * latency.call_mean_s[..., None] + (calls - 1.0) * latency.gap_mean_s
    variance = calls * latency.call_variance[..., None] + (calls - 1.0) * latency.gap_variance
    log_variance = jnp.maximum(jnp.log1p(variance / (mean * mean + TINY)), SMOOTH**2)
    centre = jnp.log(mean) - 0.5 * log_variance
    z = (jnp.log(jnp.maximum(x_s, TINY))[..., None] - centre) / jnp.sqrt(log_variance)
    return jnp.sum(latency.session_weight * normal_cdf(z), -1)


def attain(latency: Latency, slo: Slo) -> Attainment:
    """Share of calls that meet every bound of a call, share of sessions in time, and each bound alone."""
    one = jnp.ones_like(latency.token_batch_s)
    far = one * 1e9
    ttft_s = far if slo.ttft is None else one * slo.ttft.bound_s
    tpot_s = far if slo.tpot is None else one * slo.tpot.bound_s
    ttft = one if slo.ttft is None else ttft_cdf(latency, ttft_s)
    tpot = one if slo.tpot is None else tpot_cdf(latency, tpot_s)
    call = one if slo.call is None else call_cdf(latency, far, far, one * slo.call.bound_s)
    session = one if slo.session is None else session_cdf(latency, one * slo.session.bound_s)
    calls = ttft * tpot if slo.call is None else call_cdf(latency, ttft_s, tpot_s, one * slo.call.bound_s)
    every = jnp.sum(latency.session_weight * calls[..., None] ** latency.session_calls, -1)
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


def percentile(cdf: object, latency: Latency, share: float, iterations: int = 40) -> Array:
    """The time that `share` of a latency's `cdf(latency, x)` stays below, by bisection on log time, seconds."""
    low = jnp.full_like(latency.token_batch_s, -14.0)
    high = jnp.full_like(low, 18.0)

    def body(_: int, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = 0.5 * (low + high)
        below = cdf(latency, jnp.exp(middle)) < share  # type: ignore[operator]
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    low, high = lax.fori_loop(0, iterations, body, (low, high))
    return jnp.exp(0.5 * (low + high))
