"""A calibration as a result: the points it saw, what it changed, how it does on what it did not see, its files."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from breakeven.models.catalog import text
from breakeven.models.inputs import InputError
from breakeven.models.residuals import residuals_toml
from breakeven.studies.benchmark import Inputs, inputs, predict_jitted
from breakeven.studies.calibrate import (
    SETTINGS,
    Floats,
    Parameter,
    fit,
    left_out,
    parameters,
    problem,
    resampled,
    with_values,
)
from breakeven.studies.measured import Point

FEWEST = 20  # points, of at least two combinations
DRAWS = 30  # of a bootstrap
SIGNIFICANT = 3  # digits of a fitted value


@dataclass(frozen=True)
class Calibration:
    """Fitted values, and log errors ln(predicted / measured) of TTFT and TPOT by points, (points, 2)."""

    points: tuple[Point, ...]
    moved: tuple[Parameter, ...]
    values: Floats
    fill: Floats  # concurrency over capacity, before the fit
    seen: Floats  # residuals of the fit on all
    unseen: Floats  # residuals by fits that left the point's combination out
    draws: Floats  # values of fits to resampled combinations over `values`, (draws, the first of them)

    @property
    def table(self) -> pd.DataFrame:
        """Parameters: value, prior, and how many standard deviations the data moved it."""
        rows = [
            {"kind": p.kind, "field": p.field, "owner": ", ".join(p.owners), "prior": p.prior, "value": value}
            | {"moved_sd": float(np.log(value / p.prior) / p.sd)}
            for p, value in zip(self.moved, self.values, strict=True)
        ]
        return pd.DataFrame(rows)

    @property
    def errors(self) -> pd.DataFrame:
        """Error ratios of each point, seen and left out."""
        rows = {"id": [p.id for p in self.points], "model": [p.model for p in self.points]}
        rows |= {"mode": [p.mode for p in self.points], "backend": [p.engine for p in self.points]}
        table = pd.DataFrame(rows | {"system": [p.accelerator for p in self.points], "fill": self.fill})
        for name, residuals in (("seen", self.seen), ("left_out", self.unseen)):
            for k, metric in enumerate(("ttft", "tpot")):
                table[f"{metric}_{name}"] = np.exp(residuals[:, k])
        return table

    @property
    def residuals(self) -> str:
        """residuals.toml: how far predictions of pairs left out were off."""
        return residuals_toml(
            [p.engine for p in self.points],
            [p.mode == "disagg" for p in self.points],
            self.fill,
            np.exp(-self.unseen),
            [p.combination for p in self.points],
            f"{len(self.points)} points, each pair of model and accelerator left out of the fit in turn",
        )

    @property
    def factors(self) -> pd.DataFrame:
        """calibration_draws.csv: a line a parameter, with its values over the fitted one in fits to resampled pairs."""
        drawn = self.moved[: self.draws.shape[1]]
        names = pd.DataFrame({"field": [p.field for p in drawn], "engines": [" ".join(p.owners) for p in drawn]})
        return pd.concat([names, pd.DataFrame(self.draws.T)], axis=1)

    def save(self, folder: Path) -> None:
        """Write engines.toml with the fitted values, what is uncertain about them, and errors.csv."""
        self.factors.to_csv(folder / "calibration_draws.csv", index=False, float_format="%.3g")
        (folder / "engines.toml").write_text(fitted_file(self), encoding="utf-8")
        (folder / "residuals.toml").write_text(self.residuals, encoding="utf-8")
        self.errors.to_csv(folder / "errors.csv", index=False, float_format="%.5g")
        self.table.to_csv(folder / "parameters.csv", index=False, float_format="%.5g")


def usable(points: Sequence[Point]) -> list[Point]:
    """Points a fit may see: nothing doubtful, copies of one run once."""
    found = {p.measurement: p for p in points if not p.excluded}
    if len(found) < FEWEST or len({p.combination for p in found.values()}) < 2:
        raise InputError("MEASURED.csv", len(found), f"at least {FEWEST} usable points of two (model, system) pairs")
    return list(found.values())


def calibrate(points: Sequence[Point], folds: int = 0) -> Calibration:
    """Fit overheads and shares where the KV cache has room, then the memory fields alone on the rest."""
    used = usable(points)
    given = inputs(used)
    start = predict_jitted(with_priors(given))
    fits = np.asarray(start.excess) <= 0.0
    used = [point for point, room in zip(used, fits, strict=True) if room]
    given, fill = inputs(used), np.asarray(start.fill, float)[fits]
    moved = parameters("engine")
    task = problem(used, moved, given=with_priors(given))
    weight = np.repeat((fill < SETTINGS["most_fill"]).astype(float)[:, None], 2, axis=1)
    x = fit(task, weight)
    jacobian = task.jacobian(x)
    unseen = left_out(task, used, weight, x, jacobian, folds)
    drawn = resampled(task, used, weight, x, jacobian, DRAWS)
    values = np.array([p.prior for p in moved]) * np.exp(x)
    base = with_values(with_priors(given), moved, values)
    memory = parameters("memory")
    room = problem(used, memory, given=base)
    y = fit(room, np.repeat((fill >= SETTINGS["most_fill"]).astype(float)[:, None], 2, axis=1))
    everything = np.concatenate([values, np.array([p.prior for p in memory]) * np.exp(y)])
    return Calibration(tuple(used), moved + memory, everything, fill, room.residuals(y), unseen, np.exp(drawn - x))


def with_priors(given: Inputs) -> Inputs:
    """The inputs at the priors of everything that may move: a fit does not start from an earlier one."""
    every = parameters("engine", "memory")
    return with_values(given, every, [p.prior for p in every])


def summary(residuals: Floats, where: NDArray[np.bool_]) -> dict[str, float]:
    """MAPE, median APE and MAPE without the worst twentieth of both metrics, over the points `where`."""
    found: dict[str, float] = {"rows": int(np.sum(where))}
    for k, metric in enumerate(("ttft", "tpot")):
        off = np.abs(np.expm1(residuals[where, k]))
        off = off[np.isfinite(off)]
        found |= {f"{metric}_mape": float(off.mean()), f"{metric}_median": float(np.median(off))}
        found[f"{metric}_trimmed"] = float(np.sort(off)[: math.ceil(0.95 * len(off))].mean())
    return found


def fitted_file(found: Calibration) -> str:
    """engines.toml with the fitted values in place, and a source that says where they come from."""
    sections: list[str] = re.split(r"(?m)^(?=\[)", text("engines.toml"))
    for parameter, value in zip(found.moved, found.values, strict=True):
        for owner in parameter.owners:
            sections = [_with_value(s, owner, parameter.field, value) for s in sections]
    return "".join(_with_source(s, found) for s in sections)


def _with_value(section: str, owner: str, field: str, value: float) -> str:
    if not section.startswith(f"[{owner}]"):
        return section
    shown = f"{value:.{SIGNIFICANT}g}"
    return re.sub(rf"(?m)^{field} = [^\s#]+", f"{field} = {shown}", section)


def _with_source(section: str, found: Calibration) -> str:
    owner = section[1 : section.index("]")] if section.startswith("[") else ""
    if owner not in {name for p in found.moved for name in p.owners}:
        return section
    seen = np.array([owner == p.stack for p in found.points]) & (found.fill < SETTINGS["most_fill"])
    if not seen.any():
        return section
    errors = summary(found.unseen, seen)
    tpot, ttft = f"{errors['tpot_median']:.1%} of TPOT", f"{errors['ttft_median']:.1%} of TTFT"
    words = (
        f"penalised fit (breakeven calibrate) on {errors['rows']} published serving points, 2025-11 to 2026-04; "
        f"median error on left-out (model, accelerator) pairs {tpot}, {ttft}"
    )
    return re.sub(r'(?m)^source = ".*"$', lambda _: f'source = "{words}"', section)
