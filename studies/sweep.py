"""Sweeps: the optimum of a study found again at every value of one or more fields."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from breakeven.models.inputs import InputError
from breakeven.optimizer.optima import Optimum
from breakeven.optimizer.search import Progress
from breakeven.studies.axes import Axis
from breakeven.studies.held import UNTRIED, Held, Holding
from breakeven.studies.optima import Changes, Found, Optima, cheapest, evaluator_of, scenario
from breakeven.studies.result import save_answer, table, versions
from breakeven.studies.study import Study

TABLE, RECORD = "sweep.csv", "sweep.json"
MOST_POINTS = 2000
VERIFY_SECONDS = 40.0


@dataclass
class Sweep:
    """One row per point and topology that meets the target there; the cheapest of a point is `chosen`."""

    study: Study
    axes: tuple[Axis, ...]
    table: pd.DataFrame
    considered: int
    simulated: int = 0
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """sweep.json: what a picture of it, or its repetition, needs."""
        study = self.study
        return {
            "study": study.written.name,
            "file": study.file,
            "llm": study.architecture.name,
            "workload": study.workload_name,
            "seed": study.written.search.seed,
            "target": study.written.slo.target,
            "axes": [
                {"path": a.path, "label": a.label, "values": list(a.values), "log": a.geometric} for a in self.axes
            ],
            "candidates_per_point": self.considered,
            "candidates_simulated": self.simulated,
            "interrupted": self.interrupted,
            "notes": self.notes,
            "versions": versions(),
            "data": study.data,
        }

    def save(self, folder: Path) -> None:
        """Write sweep.csv and sweep.json."""
        save_answer(folder, self.table, TABLE, self.record(), RECORD)


def sweep(
    study: Study,
    axes: Sequence[Axis],
    verify_seconds: float = VERIFY_SECONDS,
    progress: Progress | None = None,
    verifying: Progress | None = None,
) -> Sweep:
    """The optimum of every topology at every combination of the axes' values; the chosen ones hold in simulation, as
    far as the time goes (their `slo_attainment_simulated` says which)."""
    if not axes:
        raise InputError("--over", None, "at least one: --over PATH=a:b:n or PATH=v1,v2,…")
    if len({axis.path for axis in axes}) < len(axes):
        raise InputError("--over", [axis.path for axis in axes], "each field once")
    points: list[Changes] = [
        dict(zip([axis.path for axis in axes], values, strict=True))
        for values in itertools.product(*[axis.values for axis in axes])
    ]
    if len(points) > MOST_POINTS:
        raise InputError("--over", len(points), f"at most {MOST_POINTS} points")
    optima = Optima(study, axes)
    found = optima.all(points, progress)
    holding = Holding(verify_seconds if study.written.search.verify else 0.0)
    frames = []
    try:
        for done, (changes, each) in enumerate(zip(points, found, strict=True)):
            if each is not None:
                frames.append(_rows(changes, *each, optima, holding))
            if verifying and holding.seconds:
                verifying(done + 1, len(points))
        interrupted = any(each is None for each in found)
    except KeyboardInterrupt:
        interrupted = True
    rows = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
    return Sweep(study, tuple(axes), rows, optima.considered, holding.simulated, interrupted)


def _rows(changes: Changes, study: Study, found: Found, optima: Optima, holding: Holding) -> pd.DataFrame:
    """A point's optima in full, cheapest first; where nothing meets the target, a row without a topology."""
    given = pd.DataFrame([{path: value if np.isscalar(value) else str(value) for path, value in changes.items()}])
    held = _held(study, found, optima, holding)
    kept = {name: each for name, each in held.items() if each.candidate is not None}
    if not kept:
        return given.assign(topology="", chosen=True)
    shown = table(evaluator_of(study), np.array([each.candidate for each in kept.values()], np.int64))
    shown["slo_attainment_simulated"] = [each.attainment for each in kept.values()]
    shown.loc[shown["slo_attainment_simulated"].notna(), "unverified"] = ""
    chosen = cheapest({name: _optimum(shown, i) for i, name in enumerate(kept)}, kept)
    assert chosen is not None
    shown["chosen"] = [name == chosen[0] for name in kept]
    shown = shown.sort_values(["chosen", "cost_per_hour_usd"], ascending=[False, True], ignore_index=True)
    return given.loc[given.index.repeat(len(shown))].reset_index(drop=True).join(shown)


def _optimum(shown: pd.DataFrame, row: int) -> Optimum:
    cost, attainment = (float(shown[name].iloc[row]) for name in ("cost_per_hour_usd", "slo_attainment"))
    return Optimum(int(shown["candidate"].iloc[row]), cost, attainment, 0)


def _held(study: Study, found: Found, optima: Optima, holding: Holding) -> dict[str, Held]:
    """Per topology its cheapest candidate that holds in simulation; by the model alone where time is over."""
    tried = [UNTRIED] * len(found)
    if not holding.over:
        lists = optima.optimizer(study).meeting(scenario(study))
        named = {study.space.families[f].topology.name: each for f, each in lists.items()}
        tried = holding.walk(study, [named[name] for name in found])
    return {
        name: held if held.tried else held._replace(candidate=optimum.candidate)
        for (name, optimum), held in zip(found.items(), tried, strict=True)
    }
