"""Calibration: what serving engines add to their kernels, from measured points, by a robust fit under tight priors.

Minimises, over x = ln(value / prior) and the log residuals r of TTFT and TPOT,

    sum rho(r / scale) + strength sum (x / sd)^2 / 2,      rho(z) = sqrt(1 + z^2) - 1

by Gauss-Newton steps over finite differences: all points evaluate in a tenth of a second. What may move and how far
is data (calibration.toml). Fits are judged on (model, accelerator) combinations they never saw.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from breakeven.models.catalog import table
from breakeven.models.tables import Engine
from breakeven.studies.benchmark import Inputs, predict
from breakeven.studies.measured import Point

Floats = NDArray[np.float64]
SETTINGS = table("calibration")
STEPS, TOLERANCE = 12, 1e-4
DIFFERENCE = 0.3  # of a standard deviation, for derivatives
DAMPING = (0.0, 1e-2, 1e-1, 1.0, 10.0)  # of the diagonal, tried in turn until a step lowers the loss


@dataclass(frozen=True)
class Parameter:
    """A number that the fit may move, times e^x."""

    kind: str  # engine or memory
    field: str
    owners: tuple[str, ...]  # engines
    prior: float
    sd: float


def parameters(*kinds: str) -> tuple[Parameter, ...]:
    """What calibration.toml lets move, of these kinds."""
    found = []
    for kind in kinds:
        for field, row in SETTINGS[kind].items():
            owners = [tuple(table("engines"))] if row.get("shared") else [_with_heirs(o, row) for o in row["prior"]]
            found += [Parameter(kind, field, each, row["prior"][each[0]], row["sd"]) for each in owners]
    return tuple(found)


def _with_heirs(owner: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    """The engine, and its eras and modes (`like`) that have no number of their own."""
    engines = table("engines")
    return owner, *(name for name in engines if engines[name].get("like") == owner and name not in row["prior"])


def _owned(parameter: Parameter) -> Floats:
    """1 where a row of the engines belongs to the parameter."""
    return np.array([float(name in parameter.owners) for name in table("engines")])


def with_values(given: Inputs, moved: Sequence[Parameter], values: Any) -> Inputs:
    """The inputs with the parameters at these values."""
    engines = {f.name: getattr(given.engines, f.name) for f in dataclasses.fields(Engine)}
    for parameter, value in zip(moved, values, strict=True):
        engines[parameter.field] = jnp.where(_owned(parameter) > 0.5, value, engines[parameter.field])
    return dataclasses.replace(given, engines=Engine(**engines))


def _priors(moved: Sequence[Parameter]) -> Floats:
    return np.array([parameter.prior for parameter in moved])


@dataclass(frozen=True)
class Problem:
    """Residuals of points as functions of x, compiled once and used for every fold."""

    moved: tuple[Parameter, ...]
    residuals: Callable[[Floats], Floats]  # (points, 2): ln(predicted / measured) of TTFT and TPOT
    jacobian: Callable[[Floats], Floats]  # (points, 2, parameters)


def problem(points: Sequence[Point], moved: tuple[Parameter, ...], given: Inputs) -> Problem:
    """The fit of `points` over the parameters `moved`; everything else as in `given`."""
    measured = jnp.log(jnp.asarray([[p.ttft_ms / 1e3, p.tpot_ms / 1e3] for p in points]))
    prior = jnp.asarray(_priors(moved), jnp.float32)

    def residuals(x: Array, given: Inputs) -> Array:
        found = predict(with_values(given, moved, prior * jnp.exp(x)))
        return jnp.log(jnp.stack([found.ttft_s, found.tpot_s], -1)) - measured

    compiled = jax.jit(residuals)
    steps = DIFFERENCE * np.array([parameter.sd for parameter in moved])

    def plain(x: Floats) -> Floats:
        return np.asarray(compiled(jnp.asarray(x, jnp.float32), given), np.float64)

    def derivative(x: Floats) -> Floats:
        """Forward differences, wide enough for the fixed point's tolerance."""
        here = plain(x)
        columns = [(plain(x + step * one) - here) / step for step, one in zip(steps, np.eye(len(x)), strict=True)]
        return np.stack(columns, -1)

    return Problem(moved, plain, derivative)


def _rho(z: Floats) -> Floats:
    return np.sqrt(1.0 + z**2) - 1.0


def _loss(residuals: Floats, weight: Floats, x: Floats, sd: Floats, strength: float) -> float:
    data = np.sum(weight * _rho(residuals / SETTINGS["scale"]))
    return float(data + 0.5 * strength * np.sum((x / sd) ** 2))


def fit(
    task: Problem,
    weight: Floats,
    start: Floats | None = None,
    strength: float = SETTINGS["strength"],
    steps: int = STEPS,
    jacobian: Floats | None = None,
) -> Floats:
    """x that minimises the loss over residuals of positive `weight`, (points, 2).

    A `jacobian` given is kept for all steps: enough near a solution, and far cheaper.
    """
    scale, sd = SETTINGS["scale"], np.array([parameter.sd for parameter in task.moved])
    x = np.zeros(len(sd)) if start is None else start.copy()
    loss = _loss(task.residuals(x), weight, x, sd, strength)
    for _ in range(steps):
        r = task.residuals(x).ravel()
        j = np.nan_to_num(task.jacobian(x) if jacobian is None else jacobian, posinf=0.0, neginf=0.0)
        j = np.clip(j.reshape(len(r), -1), -20.0, 20.0)
        w = weight.ravel() / np.sqrt(1.0 + (r / scale) ** 2) / scale**2
        gradient = j.T @ (w * r) + strength * x / sd**2
        hessian = (j.T * w) @ j + np.diag(strength / sd**2)
        before = loss
        for damping in DAMPING:
            step = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), gradient)
            trial = x - np.clip(step, -1.0, 1.0)
            trial_loss = _loss(task.residuals(trial), weight, trial, sd, strength)
            if trial_loss < loss:
                x, loss = trial, trial_loss
                break
        if before - loss < TOLERANCE * before:
            break
    return x


def _combinations(points: Sequence[Point]) -> tuple[int, NDArray[np.int64]]:
    """(how many (model, accelerator) combinations there are, the number of each point's)."""
    known = sorted({point.combination for point in points})
    return len(known), np.array([known.index(point.combination) for point in points])


def left_out(
    task: Problem, points: Sequence[Point], weight: Floats, start: Floats, jacobian: Floats, folds: int = 0
) -> Floats:
    """Residuals of each point by a fit that never saw its (model, accelerator) combination, (points, 2).

    Each fold descends from `start`, the fit on all, with the `jacobian` there.
    """
    count, of_point = _combinations(points)
    fold = of_point % (folds or count)
    out = np.full((len(points), 2), np.nan)
    for k in sorted(set(fold)):
        x = fit(task, weight * (fold != k)[:, None], start, jacobian=jacobian)
        out[fold == k] = task.residuals(x)[fold == k]
    return out


def resampled(
    task: Problem, points: Sequence[Point], weight: Floats, start: Floats, jacobian: Floats, draws: int, seed: int = 0
) -> Floats:
    """x of fits to as many (model, accelerator) combinations drawn with replacement: a bootstrap, (draws, parameters).

    Points of one combination share its errors, so combinations are drawn, not points. Each fit descends from `start`.
    """
    count, of_point = _combinations(points)
    times = np.random.default_rng(seed).multinomial(count, np.full(count, 1.0 / count), draws)
    return np.stack([fit(task, weight * n[of_point][:, None], start, jacobian=jacobian) for n in times])
