"""The optimum of every topology in many variations of a study: what sweeps, pay-off maps and break-even points ask."""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from breakeven.models.inputs import InputError
from breakeven.models.topology import topology
from breakeven.optimizer.evaluator import DOUBTS, Evaluator
from breakeven.optimizer.optima import SAME, Optimizer, Optimum, Scenario, probe, shortlist
from breakeven.optimizer.search import Progress
from breakeven.spaces.space import Space
from breakeven.studies.axes import Axis, Value, Variations
from breakeven.studies.result import describe, records
from breakeven.studies.study import Study

SHARED = "shared"  # as a baseline: the best of the topologies whose prefill and decode share a pool
Changes = dict[str, Value]
Found = dict[str, Optimum]  # topology -> its optimum


def workers() -> int:
    """Threads that evaluate at once: the cores there are, at most eight."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(here, 8)


def is_split(name: str) -> bool:
    return len(topology(name).pools) > 1


def scenario(study: Study) -> Scenario:
    return Scenario(study.workload, study.slo, study.catalog)


def cheapest(found: Found, topologies: Iterable[str]) -> tuple[str, Optimum] | None:
    """The cheapest optimum among `topologies`, if any meets the target; at equal cost a shared pool, then the surer."""
    met = [name for name in topologies if name in found]
    if not met:
        return None
    lowest = SAME * min(found[name].cost_per_hour_usd for name in met)
    equal = [name for name in met if found[name].cost_per_hour_usd <= lowest]
    best = min(equal, key=lambda name: (is_split(name), -found[name].slo_attainment))
    return best, found[best]


def doubtful(optimum: Optimum) -> str:
    """Why the model is not trusted there, in words; empty inside its trusted region."""
    return "; ".join(words for bit, words in enumerate(DOUBTS.values()) if optimum.doubts >> bit & 1)


def deployments(space: Space, candidates: Sequence[int]) -> dict[int, str]:
    """Candidates in a few words each."""
    ids = np.array(sorted(set(candidates)), np.int64)
    if not len(ids):
        return {}
    return {int(row["candidate"]): describe(row) for row in records(space.frame(ids))}


@dataclass
class Optima:
    """Optima of a study's variations; spaces that the variations share are searched by one shortlist each."""

    study: Study
    axes: Sequence[Axis] = ()  # what varies: shortlists are chosen at their ends and middles
    preparing: Progress | None = None
    variations: Variations = field(init=False)
    _optimizers: dict[Any, Optimizer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.study.max_load:
            raise InputError("load", "max", "a stated load: this command finds the cheapest that carries it")
        self.variations = Variations(self.study)

    def optimizer(self, study: Study) -> Optimizer:
        """What searches the space of a variation."""
        key = space_key(study.space)
        if key not in self._optimizers:
            self._optimizers[key] = self._prepare(study, key)
        return self._optimizers[key]

    def _prepare(self, study: Study, key: Any) -> Optimizer:
        """An optimizer over the candidates that can be cheapest, by probing where the axes start, end and turn."""
        scenarios = [scenario(study)]
        for changes in probe_points(self.axes):
            made = self.variations.at(changes)
            if space_key(made.space) == key:
                scenarios.append(scenario(made))
        probed = []
        for i, each in enumerate(scenarios):
            probed.append(probe(study.space, each))
            if self.preparing:
                self.preparing(i + 1, len(scenarios))
        return Optimizer(study.space, shortlist(study.space, probed))

    def at(self, changes: Changes) -> tuple[Study, Found]:
        """The variation and the optimum of each topology that meets its target."""
        study = self.variations.at(changes)
        optimizer = self.optimizer(study)
        found = optimizer.best(scenario(study))
        return study, {study.space.families[f].topology.name: optimum for f, optimum in found.items()}

    def all(self, points: Sequence[Changes], progress: Progress | None = None) -> list[tuple[Study, Found] | None]:
        """`at` for many points, on all cores; None for those that an interrupt left out."""
        out: list[tuple[Study, Found] | None] = [None] * len(points)
        for changes in points[:1]:
            out[0] = self.at(changes)  # prepares and compiles
        with ThreadPoolExecutor(workers()) as pool:
            try:
                for i, found in enumerate(pool.map(self.at, points[1:]), 1):
                    out[i] = found
                    if progress:
                        progress(i + 1, len(points))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return out

    @property
    def evaluated(self) -> int:
        """Candidates evaluated in scenarios so far, probes aside."""
        return sum(optimizer.evaluated for optimizer in self._optimizers.values())

    @property
    def considered(self) -> int:
        """Candidates that each scenario searches, at most."""
        return max((len(optimizer.ids) for optimizer in self._optimizers.values()), default=0)

    def check(self, points: Sequence[Changes]) -> float:
        """The largest share by which any topology's optimum over the whole space is cheaper than over the shortlist,
        at these points; what it finds joins the shortlist."""
        worst = 0.0
        for changes in points:
            study, found = self.at(changes)
            optimizer = self.optimizer(study)
            whole = probe(study.space, scenario(study))
            for f, (cost, candidate) in whole.best(study.space).items():
                known = found.get(study.space.families[f].topology.name)
                ours = np.inf if known is None else known.cost_per_hour_usd
                if cost < ours * (1.0 - 1e-5):
                    worst = max(worst, 1.0 - cost / ours)
                    optimizer.add(candidate)
        return worst


def space_key(space: Space) -> Any:
    """What two spaces have in common when their candidates are the same."""
    return tuple(
        (f.topology.name, f.radices, *[column.tobytes() for table in f.tables for column in table.values()])
        for f in space.families
    )


def probe_points(axes: Sequence[Axis]) -> list[Changes]:
    """The ends and the middle of every axis, in all combinations; of more than two axes the corners."""
    points: list[Changes] = [{}]
    for axis in axes:
        count = len(axis.values)
        positions = {0, count - 1} if len(axes) > 2 or not axis.numeric else {0, count // 2, count - 1}
        points = [{**point, axis.path: axis.values[i]} for point in points for i in sorted(positions)]
    return [point for point in points if point]


def evaluator_of(study: Study) -> Evaluator:
    return Evaluator(study.space, *scenario(study))
