"""Pay-off maps: over two fields of a study, what the best split costs beside the best baseline, and which side wins."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from breakeven.models.inputs import InputError, pick
from breakeven.optimizer.optima import rising
from breakeven.optimizer.search import Progress
from breakeven.studies.axes import Axis
from breakeven.studies.held import Holding
from breakeven.studies.optima import (
    SHARED,
    Changes,
    Found,
    Optima,
    cheapest,
    deployments,
    doubtful,
    is_split,
    scenario,
)
from breakeven.studies.result import save_answer, versions
from breakeven.studies.study import Study

TABLE, RECORD = "payoff.csv", "payoff.json"
CHECKED = 3  # cells along the contour whose optimum is sought in the whole of a large space
VERIFY_SECONDS = 60.0
ONLY_SPLIT, ONLY_BASELINE = 0.0, np.inf  # ratio where the other side cannot meet the target


def sides(study: Study, baseline: str) -> tuple[list[str], list[str]]:
    """(splits, baselines) among the study's topologies."""
    names = [family.topology.name for family in study.space.families]
    splits = [name for name in names if is_split(name) and name != baseline]
    if baseline == SHARED:
        base = [name for name in names if not is_split(name)]
    else:
        base = [pick("--baseline", baseline, (SHARED, *names))]
    if not splits or not base:
        raise InputError("space.topologies", names, f"a split (pd) and a baseline ({baseline}) to set it against")
    return splits, base


def ratio(found: Found, splits: Sequence[str], base: Sequence[str]) -> float:
    """Cost of the best split over the best baseline's; 0 or infinity where only one can, nan where none."""
    split, other = cheapest(found, splits), cheapest(found, base)
    if split is None or other is None:
        return np.nan if split is other else ONLY_SPLIT if other is None else ONLY_BASELINE
    return split[1].cost_per_hour_usd / other[1].cost_per_hour_usd


def sign(value: float) -> int:
    """-1 where the split pays, 1 where it does not (at equal cost neither), 0 where neither side meets the target."""
    return 0 if np.isnan(value) else -1 if value < 1.0 - 1e-4 else 1


@dataclass
class PayoffMap:
    """A pay-off map: one row per cell, x fastest."""

    study: Study
    x: Axis
    y: Axis
    baseline: str
    table: pd.DataFrame
    seconds: float
    evaluated: int
    considered: int
    missed: float  # by which the shortlist's optimum cost more than the whole space's, at the checked cells
    simulated: int = 0
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def signs(self) -> np.ndarray:
        """(y, x): -1 where the split pays, 1 where it does not, 0 where neither meets the target."""
        values = [sign(value) for value in self.table["ratio"]]
        return np.array(values).reshape(len(self.y.values), len(self.x.values))

    def record(self) -> dict[str, Any]:
        """payoff.json: what a picture of the map, or its repetition, needs."""
        study = self.study
        return {
            "study": study.written.name,
            "file": study.file,
            "llm": study.architecture.name,
            "workload": study.workload_name,
            "seed": study.written.search.seed,
            "target": study.written.slo.target,
            "baseline": self.baseline,
            "x": _axis_record(self.x),
            "y": _axis_record(self.y),
            "cells": len(self.table),
            "candidates_in_space": study.space.size,
            "candidates_per_cell": self.considered,
            "candidates_evaluated": self.evaluated,
            "shortlist_missed": self.missed,
            "candidates_simulated": self.simulated,
            "seconds": self.seconds,
            "interrupted": self.interrupted,
            "notes": self.notes,
            "versions": versions(),
            "data": study.data,
        }

    def save(self, folder: Path) -> None:
        """Write payoff.csv and payoff.json."""
        save_answer(folder, self.table, TABLE, self.record(), RECORD)


def _axis_record(axis: Axis) -> dict[str, Any]:
    return {"path": axis.path, "label": axis.label, "values": list(axis.values), "current": axis.current}


def default_axes(study: Study) -> tuple[str, str]:
    """What a map shows unless told: the link's bandwidth across, the load up."""
    link = study.names.links[0]
    return (
        f"links.{link.id}.gbs={link.bytes_per_s / 1e9 / 64:.4g}:{link.bytes_per_s / 1e9:.4g}:13:log",
        "load=x0.25:x4:13:log",
    )


def contour_cells(signs: np.ndarray) -> np.ndarray:
    """Cells with a neighbour where the other side wins, booleans like `signs`."""
    out = np.zeros(signs.shape, bool)
    for axis in (0, 1):
        a = np.moveaxis(signs, axis, 0)
        crosses = a[1:] * a[:-1] < 0
        view = np.moveaxis(out, axis, 0)
        view[1:] |= crosses
        view[:-1] |= crosses
    return out


def payoff(
    study: Study,
    x: Axis,
    y: Axis,
    baseline: str = SHARED,
    verify_seconds: float = VERIFY_SECONDS,
    optima: Optima | None = None,
    progress: Progress | None = None,
    verifying: Progress | None = None,
) -> PayoffMap:
    """Re-optimise every topology in every cell of x times y; simulate the cells along the contour on both sides.

    A study that says `search: {verify: false}`, or `verify_seconds` of zero, leaves the simulations out.
    """
    for option, axis in (("--x", x), ("--y", y)):
        if not axis.numeric:
            raise InputError(f"{option} {axis.path}", list(axis.values), "numbers: a map needs an order")
    if x.path == y.path:
        raise InputError("--y", y.path, "another field than --x")
    splits, base = sides(study, baseline)
    clock = time.perf_counter()
    optima = optima or Optima(study, (x, y))
    points: list[Changes] = [{x.path: a, y.path: b} for b in y.values for a in x.values]
    found = optima.all(points, progress)
    missed = 0.0
    if optima.considered < study.space.size:
        missed = optima.check(_check_points(found, points, splits, base, len(x.values)))
        if missed:
            found = optima.all(points, progress)
    table = _table(found, points, splits, base)
    out = PayoffMap(
        study, x, y, baseline, table, time.perf_counter() - clock, optima.evaluated, optima.considered, missed
    )
    out.interrupted = any(each is None for each in found)
    out.table["contour"] = contour_cells(out.signs).ravel()
    if verify_seconds > 0.0 and study.written.search.verify and not out.interrupted:
        _simulate_contour(out, optima, points, splits, base, verify_seconds, verifying)
    return out


def _check_points(
    found: Sequence[tuple[Study, Found] | None],
    points: Sequence[Changes],
    splits: Sequence[str],
    base: Sequence[str],
    width: int,
) -> list[Changes]:
    """Cells along the contour (else anywhere), evenly chosen."""
    signs = [0 if each is None else sign(ratio(each[1], splits, base)) for each in found]
    cells = np.flatnonzero(contour_cells(np.array(signs).reshape(-1, width)))
    if not len(cells):
        cells = np.arange(len(points))
    chosen = np.linspace(0, len(cells) - 1, 2 * CHECKED + 1).astype(int)[1::2]
    return [points[i] for i in dict.fromkeys(int(c) for c in cells[chosen])]


def _table(
    found: Sequence[tuple[Study, Found] | None], points: Sequence[Changes], splits: Sequence[str], base: Sequence[str]
) -> pd.DataFrame:
    """One row per cell: ratio, winner, and the best of each side with its attainment and doubts."""
    rows = []
    for changes, each in zip(points, found, strict=True):
        row: dict[str, Any] = dict(changes)
        optimum = {} if each is None else each[1]
        winner = cheapest(optimum, optimum)
        row["ratio"] = np.nan if each is None else ratio(optimum, splits, base)
        row["winner"] = "" if winner is None else winner[0]
        for side, names in (("split", splits), ("baseline", base)):
            best = cheapest(optimum, names)
            row[f"{side}_topology"] = "" if best is None else best[0]
            row[f"{side}_cost_per_hour_usd"] = np.nan if best is None else best[1].cost_per_hour_usd
            row[f"{side}_slo_attainment"] = np.nan if best is None else best[1].slo_attainment
            row[f"{side}_deployment"] = -1 if best is None else best[1].candidate
            row[f"{side}_unverified"] = "" if best is None else doubtful(best[1])
        rows.append(row)
    table = pd.DataFrame(rows)
    return _with_words(table, [None if each is None else each[0] for each in found])


def _with_words(table: pd.DataFrame, studies: Sequence[Study | None]) -> pd.DataFrame:
    """Deployments in words in place of their numbers."""
    words: dict[tuple[int, int], str] = {}
    spaces = {id(s.space): s.space for s in studies if s is not None}
    for side in ("split", "baseline"):
        column = table[f"{side}_deployment"]
        for key, space in spaces.items():
            mine = [int(c) for c, s in zip(column, studies, strict=True) if s is not None and id(s.space) == key]
            words |= {(key, c): text for c, text in deployments(space, [c for c in mine if c >= 0]).items()}
        table[f"{side}_deployment"] = [
            "" if s is None or c < 0 else words[id(s.space), int(c)] for c, s in zip(column, studies, strict=True)
        ]
    return table


def _simulate_contour(
    found: PayoffMap,
    optima: Optima,
    points: Sequence[Changes],
    splits: Sequence[str],
    base: Sequence[str],
    seconds: float,
    progress: Progress | None,
) -> None:
    """Simulate the best of both sides in the cells along the contour, spread over it, as long as time is left.

    A side's simulated cost is that of its cheapest deployment that meets the target in simulation.
    """
    holding = Holding(seconds)
    cells = np.flatnonzero(found.table["contour"].to_numpy(bool))
    simulated = np.full((len(points), 3), np.nan)  # ratio, split's attainment, baseline's
    try:
        for done, cell in enumerate(spread_order(len(cells))):
            if holding.over:
                found.notes.append(f"{done} of {len(cells)} cells along the contour simulated: time was over")
                break
            i = int(cells[cell])
            study = optima.variations.at(points[i])
            meeting = optima.optimizer(study).meeting(scenario(study))
            named = {study.space.families[f].topology.name: each for f, each in meeting.items()}
            lists = [rising(o for name in names for o in named.get(name, [])) for names in (splits, base)]
            split, other = holding.walk(study, lists)
            if split.tried and other.tried:
                costs = split.cost_per_hour_usd, other.cost_per_hour_usd
                value = np.nan if np.isinf(costs).all() else costs[0] / costs[1]
                simulated[i] = value, split.attainment, other.attainment
            if progress:
                progress(done + 1, len(cells))
    except KeyboardInterrupt:
        found.interrupted = True
    if progress:
        progress(len(cells), len(cells))
    for k, name in enumerate(("ratio", "split_slo_attainment", "baseline_slo_attainment")):
        found.table[f"{name}_simulated"] = simulated[:, k]
    found.simulated = holding.simulated


def spread_order(count: int) -> list[int]:
    """Positions 0 to count - 1 so that every beginning of the list is spread over all of them.

    >>> spread_order(5)
    [0, 4, 2, 1, 3]
    """
    order: list[int] = []
    parts = 1
    while len(order) < count:
        order += [p for p in np.linspace(0, count - 1, parts + 1).round().astype(int).tolist() if p not in order]
        parts *= 2
    return order
