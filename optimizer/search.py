"""What a search has found so far: the front, the best of each topology, and why the others fell out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from breakeven.optimizer.evaluator import REASONS, Columns
from breakeven.optimizer.front import MAXIMISED, Archive, as_costs

KEPT_ROWS = 1_000_000
SHORTLIST = 200  # per family
KINDS = "kinds"  # column of a cell's candidates: a number for the accelerators of all stages
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
    screened: int = 0  # of those, ruled out by a limit before their fixed point was solved
    feasible: int = 0
    alike: dict[int, Archive] = field(default_factory=dict)  # choice of kinds (of a cell) -> its own front
    kept: list[Columns] = field(default_factory=list)  # of candidates that were screened alone, only their excesses
    kept_rows: int = 0

    def add(self, columns: Columns, family: np.ndarray, rank_by: str) -> None:
        """Merge one block of evaluated candidates."""
        ok = columns["feasible"]
        ids = columns["candidate"]
        self.evaluated += len(ids)
        self.feasible += int(ok.sum())
        shown, costs = self.shown(columns)
        self.archive.add(shown, costs)
        if KINDS in columns and len(shown):
            self._add_alike(shown, costs, columns[KINDS][np.isin(ids, shown)])
        if ok.any():
            self._add_reach(columns, ok)
        self._add_best(columns, family, rank_by)
        self._add_reasons(columns, ~ok)
        self.keep(columns)

    def shown(self, columns: Columns) -> tuple[np.ndarray, np.ndarray]:
        """(candidates, objectives to be minimised) of what may stand on a front: feasible, attaining something."""
        rows = columns["feasible"] & (columns["slo_attainment"] > 0.0)
        return columns["candidate"][rows], as_costs({k: columns[k][rows] for k in self.objectives}, self.objectives)

    def _add_alike(self, ids: np.ndarray, costs: np.ndarray, kinds: np.ndarray) -> None:
        for kind in np.unique(kinds):
            self.alike.setdefault(int(kind), Archive()).add(ids[kinds == kind], costs[kinds == kind])

    @property
    def members(self) -> np.ndarray:
        """Candidates on a front that is kept, and the best of each family, in order."""
        best = np.array([candidate for *_, candidate in self.best.values()], np.int64)
        fronts = [archive.ids for archive in (self.archive, *self.alike.values())]
        return np.unique(np.concatenate([best, *fronts]))

    def add_screened(self, columns: Columns) -> None:
        """Count candidates that a limit ruled out beforehand."""
        n = len(columns["candidate"])
        self.evaluated += n
        self.screened += n
        self._add_reasons(columns, np.ones(n, bool))
        self.keep(columns)

    def keep(self, columns: Columns) -> None:
        """Keep the rows of a block for evaluations.parquet, a million in all."""
        n = len(columns["candidate"])
        if 0 < n <= KEPT_ROWS - self.kept_rows:
            self.kept.append(columns)
            self.kept_rows += n

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
            self.meeting.setdefault(int(f), Archive()).add(columns["candidate"][here], np.stack(keys, 1))

    def shortlists(self) -> list[list[int]]:
        """Per family, cheapest first: the candidates to fall back on, one after another, should one not hold."""
        lists = []
        for _, kept in sorted(self.meeting.items()):
            first = np.lexsort((kept.ids, kept.costs[:, 0]))[:SHORTLIST]
            lists.append([int(c) for c in kept.ids[first]])
        return lists

    def _add_reasons(self, columns: Columns, left: np.ndarray) -> None:
        for name in REASONS:
            excess = columns[f"excess_{name}"]
            hit = left & (excess > 0.0)
            if hit.any():
                self.stopped[name] = self.stopped.get(name, 0) + int(hit.sum())
                self.nearest[name] = min(self.nearest.get(name, np.inf), float(excess[hit].min()))
            left = left & ~hit

    def merge(self, other: "Found") -> None:
        """Add what another search found; the order of merging changes nothing."""
        self.archive.add(other.archive.ids, other.archive.costs)
        for f, archive in other.meeting.items():
            self.meeting.setdefault(f, Archive()).add(archive.ids, archive.costs)
        for kind, archive in other.alike.items():
            self.alike.setdefault(kind, Archive()).add(archive.ids, archive.costs)
        for f, entry in other.best.items():
            self.best[f] = min(self.best.get(f, entry), entry)
        for name, count in other.stopped.items():
            self.stopped[name] = self.stopped.get(name, 0) + count
            self.nearest[name] = min(self.nearest.get(name, np.inf), other.nearest[name])
        for name, (share, mean) in other.alone.items():
            known = self.alone.get(name, (0.0, np.inf))
            self.alone[name] = max(known[0], share), min(known[1], mean)
        self.highest_attainment = max(self.highest_attainment, other.highest_attainment)
        self.evaluated += other.evaluated
        self.screened += other.screened
        self.feasible += other.feasible
        for part in other.kept:
            self.keep(part)

    def rows(self) -> Columns:
        """Columns of at most a million candidates in order, NaN for what screened ones lack; empty when none."""
        like = next((part for part in self.kept if "feasible" in part), None)
        if like is None:
            return {}
        parts = [{name: _column(name, part, like) for name in like} for part in self.kept]
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        order = np.argsort(columns["candidate"], kind="stable")
        return {name: column[order] for name, column in columns.items()}

    def state(self) -> dict[str, Any]:
        """Everything but the kept rows, as plain numbers that JSON holds exactly."""
        plain = ("highest_attainment", "alone", "nearest", "stopped", "evaluated", "screened", "feasible", "best")
        archives = {
            name: {str(key): archive.state() for key, archive in getattr(self, name).items()}
            for name in ("meeting", "alike")
        }
        return {name: getattr(self, name) for name in plain} | {"archive": self.archive.state()} | archives

    @classmethod
    def restored(cls, objectives: tuple[str, ...], state: Mapping[str, Any]) -> "Found":
        """What `state` was taken of."""
        found = cls(objectives, Archive.restored(state["archive"]))
        for name in ("meeting", "alike"):
            archives = state.get(name, {})
            setattr(found, name, {int(key): Archive.restored(archive) for key, archive in archives.items()})
        found.best = {int(f): (entry[0], entry[1], int(entry[2])) for f, entry in state["best"].items()}
        found.alone = {name: (pair[0], pair[1]) for name, pair in state["alone"].items()}
        for name in ("highest_attainment", "nearest", "stopped", "evaluated", "screened", "feasible"):
            setattr(found, name, state[name])
        return found


def _column(name: str, part: Columns, like: Columns) -> np.ndarray:
    """A column of a part; candidates that were only screened are infeasible, and nothing else is known of them."""
    if name in part:
        return part[name]
    n, kind = len(part["candidate"]), like[name].dtype
    known = kind.kind != "f" or name.endswith("_attainment") or name == "goodput_per_s"
    return np.zeros(n, kind) if known else np.full(n, np.nan, kind)
