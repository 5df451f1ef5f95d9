"""Uncertain inputs: load, prices, efficiency and tool time as distributions, and what they do to a choice.

Candidates are evaluated in each draw of them all by the one jitted model, which a new draw does not recompile. Robust
choice ranks by a quantile over draws: a deployment counts with what it costs at most, and attains at least, in that
share of them.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from breakeven.models.tables import Catalog
from breakeven.models.workload import Workload
from breakeven.optimizer.evaluator import Columns, Evaluator
from breakeven.optimizer.front import MAXIMISED

SHARES = ("share", "read")  # what kernels achieve of a peak (kernels.toml)
UNCERTAIN = ("load", "prices", "efficiency", "tool_time")


@dataclass(frozen=True)
class Factor:
    """A factor on an input: lognormal with mean 1 and this coefficient of variation, or even between two bounds."""

    cv: float | None = None
    low: float = 1.0
    high: float = 1.0

    def invert(self, u: np.ndarray) -> np.ndarray:
        """The factor at each probability."""
        if self.cv is None:
            return self.low + (self.high - self.low) * u
        sigma = np.sqrt(np.log1p(self.cv**2))
        normal = np.array([NormalDist().inv_cdf(p) for p in u.ravel()]).reshape(u.shape)
        return np.exp(sigma * normal - 0.5 * sigma**2)


class Draw(NamedTuple):
    """What a candidate is evaluated against in one draw."""

    workload: Workload
    catalog: Catalog


def draws(workload: Workload, catalog: Catalog, factors: dict[str, Factor], count: int, seed: int) -> tuple[Draw, ...]:
    """`count` draws of the uncertain inputs, each input spread evenly over its distribution (Latin hypercube).

    Prices are drawn for each accelerator; load, efficiency and tool time once. Tool time scales every gap between
    calls, and with it the time a prefix must be kept: H(f T) = f H(T) in `workload.cache_table`.
    """
    rng = np.random.default_rng(seed)
    kinds = len(np.asarray(catalog.hardware.usd_per_hour))
    drawn = {
        name: factor.invert(_even(rng, count, kinds if name == "prices" else 1)) for name, factor in factors.items()
    }
    out = []
    for k in range(count):
        factor = {name: values[k] for name, values in drawn.items()}
        out.append(Draw(_workload(workload, factor), _catalog(catalog, factor)))
    return tuple(out)


def _even(rng: np.random.Generator, count: int, width: int) -> np.ndarray:
    """Probabilities (count, width), one in each of `count` equal parts of every column."""
    order = np.stack([rng.permutation(count) for _ in range(width)], 1)
    return (order + rng.random((count, width))) / count


def _workload(workload: Workload, factor: dict[str, np.ndarray]) -> Workload:
    changes: dict[str, Any] = {}
    if "load" in factor:
        name = "sessions_per_second" if workload.concurrent_sessions is None else "concurrent_sessions"
        changes[name] = np.float32(np.asarray(getattr(workload, name)) * factor["load"][0])
    if "tool_time" in factor:
        f = float(factor["tool_time"][0])
        changes["gap_mean_s"] = np.float32(np.asarray(workload.gap_mean_s) * f)
        changes["gap_var_s"] = np.float32(np.asarray(workload.gap_var_s) * f * f)
        changes["cache_work"] = np.asarray(np.asarray(workload.cache_work) + np.log(f), np.float32)
        if workload.peaks is not None:
            changes["peaks"] = _workload(workload.peaks, {"tool_time": factor["tool_time"]})
    return dataclasses.replace(workload, **changes)


def _catalog(catalog: Catalog, factor: dict[str, np.ndarray]) -> Catalog:
    hardware = catalog.hardware
    changes: dict[str, Any] = {}
    if "prices" in factor:
        changes["usd_per_hour"] = jnp.asarray(np.asarray(hardware.usd_per_hour) * factor["prices"], jnp.float32)
    if "efficiency" in factor:
        f = float(factor["efficiency"][0])
        changes["kernels"] = {operator: _achieving(curve, f) for operator, curve in hardware.kernels.items()}
    return dataclasses.replace(catalog, hardware=dataclasses.replace(hardware, **changes))


def _achieving(curve: Mapping[str, Array], factor: float) -> dict[str, Array]:
    """A kernel's curve that achieves `factor` times its share of the peaks."""
    return {
        name: jnp.asarray(value * factor, jnp.float32) if name in SHARES else value for name, value in curve.items()
    }


@dataclass(frozen=True)
class RobustEvaluator(Evaluator):
    """Evaluates candidates by a quantile over draws, column by column."""

    draws: tuple[Draw, ...] = ()
    quantile: float = 0.9

    def _each(self) -> list[Evaluator]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(Evaluator)}
        return [Evaluator(**{**fields, "workload": s.workload, "catalog": s.catalog}) for s in self.draws]

    def parts(self, ids: np.ndarray) -> Iterator[Columns]:
        """Columns of any number of candidates, a block at a time."""
        each = self._each()
        for i in range(0, len(ids), self.block):
            some = ids[i : i + self.block]
            yield pessimistic([e.finish(e.start(some)) for e in each], self.quantile)

    def screen(self, ids: np.ndarray) -> Columns:
        """Lower bounds of the quantile of the excess over each limit."""
        found = [e.screen(ids) for e in self._each()]
        return {name: _quantile(name, [c[name] for c in found], self.quantile) for name in found[0]}


def pessimistic(columns: Sequence[Columns], quantile: float) -> Columns:
    """One column of several draws' each: what holds in at least this share of the draws.

    Feasible is who keeps each limit in that share, and meets the SLO who meets it in that share of them.
    """
    out = {name: _quantile(name, [c[name] for c in columns], quantile) for name in columns[0]}
    out["feasible"] = np.all([out[name] <= 0.0 for name in out if name.startswith("excess_")], axis=0)
    out["meets_slo"] = out["meets_slo"] & out["feasible"]
    return out


def _quantile(name: str, values: list[np.ndarray], quantile: float) -> np.ndarray:
    """The worse end: low of what is to be large, high of everything else; flags hold in that share of the draws."""
    if name == "candidate":
        return values[0]
    if values[0].dtype == np.bool_:
        return np.mean(values, axis=0) >= (1.0 - quantile if name.startswith("doubt_") else quantile)
    if name.endswith("_attainment") or name in MAXIMISED or name in ("tokens_per_second", "cache_hit"):
        return np.quantile(values, 1.0 - quantile, axis=0, method="lower").astype(values[0].dtype)
    return np.quantile(values, quantile, axis=0, method="higher").astype(values[0].dtype)


class Risk(NamedTuple):
    """What draws say of a candidate, arrays of shape (n,)."""

    probability_meets_target: np.ndarray
    expected_cost_per_hour_usd: np.ndarray
    expected_slo_attainment: np.ndarray


def risk(evaluator: Evaluator, drawn: Sequence[Draw], ids: np.ndarray) -> Risk:
    """Monte Carlo over draws: the chance that each candidate meets the target, its expected cost and attainment."""
    meets, cost, attainment = np.zeros(len(ids)), np.zeros(len(ids)), np.zeros(len(ids))
    for draw in drawn:
        each = dataclasses.replace(evaluator, workload=draw.workload, catalog=draw.catalog)
        columns = each(ids)
        meets += columns["meets_slo"]
        cost += columns["cost_per_hour_usd"]
        attainment += columns["slo_attainment"]
    count = max(len(drawn), 1)
    return Risk(meets / count, cost / count, attainment / count)
