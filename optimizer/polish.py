"""The neighbourhood of a front: every candidate one choice away from a member, until none of them improves it."""

import time
from dataclasses import dataclass, field

import numpy as np

from breakeven.optimizer.exhaustive import Task
from breakeven.optimizer.search import Found
from breakeven.spaces.structures import Structures

ROUNDS = 100


@dataclass
class Seen:
    """What earlier rounds tried, and the members whose neighbours they were."""

    tried: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    expanded: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))


def polish(task: Task, structures: Structures, found: Found, seen: Seen | None = None, seconds: float = np.inf) -> int:
    """Merge neighbours of the fronts and of the best of each topology into `found`; returns the rounds it took.

    Pareto local search: a round tries what is one step away from each member that is new, all in one call. `seen`
    remembers, from one call to the next.
    """
    clock, seen = time.perf_counter(), seen or Seen()
    for rounds in range(ROUNDS):
        members = found.members
        new = np.setdiff1d(members, seen.expanded)
        if not len(new) or time.perf_counter() - clock > seconds:
            return rounds
        seen.expanded, seen.tried = np.union1d(seen.expanded, new), np.union1d(seen.tried, members)
        around = np.setdiff1d(structures.neighbours(new), seen.tried)
        seen.tried = np.union1d(seen.tried, around)
        found.merge(task.judge(around))
    return ROUNDS
