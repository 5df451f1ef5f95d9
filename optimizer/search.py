"""Searches: all candidates in blocks, or Optuna's choice of them; both keep a front and the best of each topology."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from breakeven.optimizer.evaluator import REASONS, Columns, Evaluator
from breakeven.optimizer.front import MAXIMISED, Archive, as_costs

KEPT_ROWS = 1_000_000
SHORTLIST = 200  # per family
METRICS = ("ttft", "tpot", "call", "session")

Progress = Callable[[int, int], None]


@dataclass
class Found:
    """What a search has seen: the front, the cheapest of each topology family that meets the target, and counts."""

    objectives: tuple[str, ...]
    archive: Archive = field(default_factory=Archive)
    best: dict[int, tuple[float, float, int]] = field(default_factory=dict)  # family -> (rank, -attainment, candidate)
    meeting: dict[int, Archive] = field(
        default_factory=dict
    )  # family -> those that meet the target, rank by attainment
    nearest: dict[str, float] = field(default_factory=dict)  # limit -> smallest excess of those it stops
    stopped: dict[str, int] = field(default_factory=dict)  # limit -> candidates whose first broken limit it is
    highest_attainment: float = 0.0
    alone: dict[str, tuple[float, float]] = field(default_factory=dict)  # metric -> (best share in time, lowest mean)
    evaluated: int = 0
    feasible: int = 0
    kept: list[Columns] = field(default_factory=list)

    def add(self, columns: Columns, family: np.ndarray, rank_by: str) -> None:
        """Merge one block of evaluated candidates."""
        ok = columns["feasible"]
        ids = columns["candidate"]
        self.evaluated += len(ids)
        self.feasible += int(ok.sum())
        shown = ok & (columns["slo_attainment"] > 0.0)
        self.archive.add(ids[shown], as_costs({k: columns[k][shown] for k in self.objectives}, self.objectives))
        if ok.any():
            self._add_reach(columns, ok)
        self._add_best(columns, family, rank_by)
        self._add_reasons(columns)
        if self.evaluated <= KEPT_ROWS:
            self.kept.append(columns)

    def _add_reach(self, columns: Columns, ok: np.ndarray) -> None:
        """How far feasible candidates get: the joint attainment, and each latency alone."""
        self.highest_attainment = max(self.highest_attainment, float(columns["slo_attainment"][ok].max()))
        for name in METRICS:
            share, mean = self.alone.get(name, (0.0, np.inf))
            share = max(share, float(columns[f"{name}_attainment"][ok].max()))
            self.alone[name] = (share, min(mean, float(columns[f"{name}_mean_s"][ok].min())))

    def _add_best(self, columns: Columns, family: np.ndarray, rank_by: str) -> None:
        meets, sign = columns["meets_slo"], -1.0 if rank_by in MAXIMISED else 1.0
        for f in np.unique(family[meets]):
            here = np.flatnonzero(meets & (family == f))
            keys = (sign * columns[rank_by][here].astype(float), -columns["slo_attainment"][here].astype(float))
            first = np.lexsort((columns["candidate"][here], keys[1], keys[0]))[0]
            entry = (float(keys[0][first]), float(keys[1][first]), int(columns["candidate"][here][first]))
            self.best[int(f)] = min(self.best.get(int(f), entry), entry)
            self._add_meeting(int(f), columns["candidate"][here], np.stack(keys, 1))

    def _add_meeting(self, family: int, ids: np.ndarray, keys: np.ndarray) -> None:
        """Keep the cheapest that meet the target of which no other one of the family costs less and attains more."""
        kept = self.meeting.setdefault(family, Archive())
        kept.add(ids, keys)
        first = np.lexsort((kept.ids, kept.costs[:, 0]))[:SHORTLIST]
        kept.ids, kept.costs = kept.ids[first], kept.costs[first]

    def shortlists(self) -> list[list[int]]:
        """Per family, cheapest first: the candidates to fall back on, one after another, should one not hold."""
        return [[int(c) for c in self.meeting[f].ids] for f in sorted(self.meeting)]

    def _add_reasons(self, columns: Columns) -> None:
        left = ~columns["feasible"]
        for name in REASONS:
            excess = columns[f"excess_{name}"]
            hit = left & (excess > 0.0)
            if hit.any():
                self.stopped[name] = self.stopped.get(name, 0) + int(hit.sum())
                self.nearest[name] = min(self.nearest.get(name, np.inf), float(excess[hit].min()))
            left = left & ~hit


def exhaustive(evaluator: Evaluator, found: Found, rank_by: str, progress: Progress) -> Found:
    """Evaluate every candidate of the space, a block at a time; one block computes while another is merged."""
    total = evaluator.space.size
    pending = None
    for ids in [*evaluator.space.blocks(evaluator.block), None]:
        started = None if ids is None else evaluator.start(ids)
        if pending is not None:
            columns = evaluator.finish(pending)
            found.add(columns, evaluator.space.family(columns["candidate"]), rank_by)
            progress(found.evaluated, total)
        pending = started
    return found
