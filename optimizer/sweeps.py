"""Everything numeric inside a structure, swept in one call of the model: what one trial of a bilevel search buys."""

from dataclasses import dataclass, field

import numpy as np

from breakeven.optimizer.evaluator import REASONS, Columns
from breakeven.optimizer.exhaustive import Task
from breakeven.optimizer.search import Found
from breakeven.spaces.structures import Structures

MOST = 2048  # candidates of a structure that are tried at first; of more, an even sample and then its neighbours
ROUNDS = 4  # of neighbours


@dataclass(frozen=True)
class Scale:
    """The corners of what is worth having: objectives to be minimised, best and worst of feasible candidates."""

    best: np.ndarray
    worst: np.ndarray

    def volume(self, costs: np.ndarray) -> np.ndarray:
        """Share of the box between the corners that each row dominates, beyond the worst corner 0."""
        width = np.maximum(self.worst - self.best, 1e-12)
        return np.prod(np.clip((self.worst - costs) / width, 0.0, None), 1)


@dataclass(frozen=True)
class Swept:
    """What the numbers of one structure came to."""

    structure: int
    found: Found
    excess: float  # over all limits together, of the candidate that breaks them least; below 0: its distance to one

    def representative(self, scale: Scale | None) -> tuple[int, np.ndarray] | None:
        """(candidate, objectives to be minimised) that stands for the structure: the one that dominates most."""
        front = self.found.archive
        if not len(front.ids):
            return None
        value = -front.costs[:, 0] if scale is None else scale.volume(front.costs)
        best = np.lexsort((front.ids, -value))[0]
        return int(front.ids[best]), front.costs[best]


@dataclass
class Sweeper:
    """Sweeps structures, several in one call; each once."""

    task: Task
    structures: Structures
    most: int = MOST
    known: dict[int, Swept] = field(default_factory=dict)
    evaluated: int = 0  # by the whole model
    screened: int = 0

    def __call__(self, structures: list[int], kept: Found | None = None) -> list[Swept]:
        """What each structure comes to; rows of new ones are kept in `kept`."""
        new = [s for s in dict.fromkeys(structures) if s not in self.known]
        founds = {s: Found(self.task.objectives) for s in new}
        near: dict[int, float] = {}
        thinned = set()
        parts, owners = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for s in new:
            ids, whole = self.structures.candidates(s, self.most)
            parts.append(ids)
            owners.append(np.full(len(ids), s, np.int64))
            if not whole:
                thinned.add(s)
        ids, owner = np.concatenate(parts), np.concatenate(owners)
        self._judge(ids, owner, founds, near, kept)
        tried = ids
        for _ in range(ROUNDS if thinned else 0):
            ids, owner = self._next(thinned, founds, tried)
            if not len(ids):
                break
            self._judge(ids, owner, founds, near, kept)
            tried = np.concatenate([tried, ids])
        for s in new:
            founds[s].kept = []
            self.known[s] = Swept(s, founds[s], near.get(s, 0.0))
        return [self.known[s] for s in structures]

    def _next(self, thinned: set[int], founds: dict[int, Found], tried: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Untried neighbours of the fronts of structures that were thinned, and whose they are."""
        fronts = [founds[s].archive.ids for s in sorted(thinned)]
        around = self.structures.neighbours(np.concatenate(fronts), numbers_only=True)
        around = around[~np.isin(around, tried)]
        return around, self.structures.of(around)

    def _judge(
        self,
        ids: np.ndarray,
        owner: np.ndarray,
        founds: dict[int, Found],
        near: dict[int, float],
        kept: Found | None,
    ) -> None:
        """Judge candidates and give each structure its own."""
        evaluator = self.task.evaluator
        if not len(ids):
            return
        left, ruled_out = evaluator.sift(ids)
        self.screened += len(ids) - len(left)
        order = np.argsort(ids, kind="stable")

        def owners(some: np.ndarray) -> np.ndarray:
            return owner[order[np.searchsorted(ids, some, sorter=order)]]

        for s, part in _by_owner(ruled_out, owners(ruled_out["candidate"])):
            founds[s].add_screened(part)
            _note_nearest(near, s, part)
        for columns in evaluator.parts(left):
            self.evaluated += len(columns["candidate"])
            if kept is not None:
                kept.keep(columns)
            for s, part in _by_owner(columns, owners(columns["candidate"])):
                founds[s].add(part, evaluator.space.family(part["candidate"]), self.task.rank_by)
                _note_nearest(near, s, part)


def _by_owner(columns: Columns, owner: np.ndarray) -> list[tuple[int, Columns]]:
    order = np.argsort(owner, kind="stable")
    values, starts = np.unique(owner[order], return_index=True)
    cuts = np.split(order, starts[1:]) if len(values) else []
    return [
        (int(s), {name: column[cut] for name, column in columns.items()}) for s, cut in zip(values, cuts, strict=True)
    ]


def _note_nearest(near: dict[int, float], structure: int, columns: Columns) -> None:
    """Remember how far the structure's candidate that breaks the limits least is from breaking none."""
    excess = np.stack([columns[f"excess_{name}"] for name in REASONS], 1).astype(float)
    excess = np.clip(np.nan_to_num(excess, nan=1e6), -1.0, 1e6)
    broken = np.maximum(excess, 0.0).sum(1)
    least = float(np.where(broken > 0.0, broken, excess.max(1)).min())
    near[structure] = min(near.get(structure, np.inf), least)
