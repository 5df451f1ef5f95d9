"""Local calibration: a few points measured on one's own deployment correct its pace and its time to first token.

Of each deployment three numbers move: factors on its prefill and decode steps, and a constant in TTFT. They maximise
the posterior under the spreads of local.toml, by Gauss-Newton steps, so that one point moves them a little and each
further one more; the posterior's spread is what remains uncertain.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from breakeven.models.catalog import table
from breakeven.models.local import Correction
from breakeven.studies.benchmark import Inputs, predict_jitted
from breakeven.studies.measured import Point

Floats = NDArray[np.float64]
SPREADS = table("local")
SD = np.array([SPREADS[name] for name in ("prefill_factor", "decode_factor", "first_token_share")])
NOISE = np.array([SPREADS["ttft_noise"], SPREADS["tpot_noise"]])
Times = Callable[[Correction], Floats]  # (points, 2): TTFT and TPOT in seconds at each point's corrections
ITERATIONS, LONGEST_STEP, DIFFERENCE = 8, 0.7, 0.02


@dataclass(frozen=True)
class LocalFit:
    """Corrections of deployments, and what they leave of the points' log errors ln(predicted / measured)."""

    prefill_factor: Floats  # (deployments,)
    decode_factor: Floats
    first_token_s: Floats
    times_s: Floats  # (points, 2): TTFT, TPOT as corrected
    residuals: Floats  # (points, 2)
    spread: Floats  # (points, 2): standard deviation of the residual that a new point should have


def _log_times(x: Floats, scale_s: Floats, times: Times) -> Floats:
    """ln [TTFT, TPOT] of each point at its own corrections: columns of x, (points, 3), are ln prefill factor, ln decode
    factor, and the constant of TTFT over `scale_s`."""
    rows = jnp.asarray(x, jnp.float32)
    constant_s = jnp.asarray(scale_s * x[:, 2], jnp.float32)[:, None]
    return np.log(times(Correction(jnp.exp(rows[:, :1]), jnp.exp(rows[:, 1:2]), constant_s)))


def _evaluated(x: Floats, scale_s: Floats, times: Times) -> tuple[Floats, Floats]:
    """(ln times, (points, 2); their derivative by each point's own x, (points, 2, 3)).

    By central differences: they take six evaluations of what is compiled already, derivatives a minute of compilation.
    """
    sides = [
        (_log_times(x + h, scale_s, times), _log_times(x - h, scale_s, times)) for h in DIFFERENCE * np.eye(len(SD))
    ]
    slope = np.stack([(up - down) / (2.0 * DIFFERENCE) for up, down in sides], -1)
    return _log_times(x, scale_s, times), np.clip(np.nan_to_num(slope, posinf=0.0, neginf=0.0), -20.0, 20.0)


def fit_local(times: Times, measured_ms: Floats, deployment: NDArray[np.int64], used: NDArray[np.bool_]) -> LocalFit:
    """Correct each deployment (its number, by point) by its `used` points.

    `measured_ms` are TTFT and TPOT of the points, (points, 2), nan where not measured.
    """
    target = np.log(measured_ms / 1e3)
    count = int(deployment.max()) + 1
    x = np.zeros((count, len(SD)))
    scale_s = np.ones(count)
    precision = np.broadcast_to(np.diag(SD**-2.0), (count, len(SD), len(SD)))
    scale_s = _means(np.exp(_log_times(x[deployment], scale_s[deployment], times)[:, 0]), deployment, used, count)
    for _ in range(ITERATIONS):
        value, slope = _evaluated(x[deployment], scale_s[deployment], times)
        misses = np.where(used[:, None], value - target, np.nan)
        weight = np.where(np.isfinite(misses), NOISE**-2.0 / np.sqrt(1.0 + (misses / (2.0 * NOISE)) ** 2), 0.0)
        misses = np.nan_to_num(misses, posinf=0.0, neginf=0.0)
        hessian = _summed(np.einsum("nmi,nm,nmj->nij", slope, weight, slope), deployment, count)
        gradient = _summed(np.einsum("nmi,nm,nm->ni", slope, weight, misses), deployment, count) + x / SD**2
        precision = hessian + np.diag(SD**-2.0)
        step = np.linalg.solve(precision, gradient[..., None])[..., 0]
        x = x - np.clip(step, -LONGEST_STEP, LONGEST_STEP)
    value, slope = _evaluated(x[deployment], scale_s[deployment], times)
    open_ = np.einsum("nmi,nij,nmj->nm", slope, np.linalg.inv(precision)[deployment], slope)
    prefill, decode, share = np.exp(x[:, 0]), np.exp(x[:, 1]), x[:, 2]
    return LocalFit(prefill, decode, share * scale_s, np.exp(value), value - target, np.sqrt(open_ + NOISE**2))


def _summed(values: Floats, deployment: NDArray[np.int64], count: int) -> Floats:
    out = np.zeros((count, *values.shape[1:]))
    np.add.at(out, deployment, values)
    return out


def _means(seconds: Floats, deployment: NDArray[np.int64], used: NDArray[np.bool_], count: int) -> Floats:
    """Geometric mean of the used points of each deployment, one second where there is none."""
    known = used & np.isfinite(seconds)
    total = _summed(np.where(known, np.log(np.where(known, seconds, 1.0)), 0.0), deployment, count)
    return np.exp(total / np.maximum(_summed(known.astype(float), deployment, count), 1.0))


def times_of(given: Inputs) -> Times:
    """The model's times of benchmark points."""

    def times(correction: Correction) -> Floats:
        found = predict_jitted(dataclasses.replace(given, correction=correction))
        return np.stack([np.asarray(found.ttft_s, np.float64), np.asarray(found.tpot_s, np.float64)], -1)

    return times


def deployments(points: Sequence[Point]) -> NDArray[np.int64]:
    """Number of each point's deployment: one model and precision on one stack and layout, whatever the workload."""
    keys = [(p.model, p.accelerator, p.stack, p.mode, p.weights, p.kv, p.layouts, p.internal) for p in points]
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def spread_choice(points: Sequence[Point], deployment: NDArray[np.int64], each: int) -> NDArray[np.bool_]:
    """`each` points of every deployment that has more: in the order of concurrency and lengths, from the middle of as
    many equal parts."""
    chosen = np.zeros(len(points), bool)
    for number in range(int(deployment.max()) + 1 if len(points) else 0):
        own = np.flatnonzero(deployment == number).tolist()
        if len(own) > each:
            order = sorted(own, key=lambda i: (points[i].concurrency, points[i].prompt_tokens, points[i].output_tokens))
            chosen[[order[int((k + 0.5) * len(own) / each)] for k in range(each)]] = True
    return chosen
