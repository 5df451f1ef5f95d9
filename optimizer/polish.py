"""The neighbourhood of a front: every candidate one choice away from a member, until none of them improves it."""

import time

import numpy as np

from breakeven.optimizer.exhaustive import Task
from breakeven.optimizer.search import Found
from breakeven.spaces.structures import Structures

ROUNDS = 100


def polish(task: Task, structures: Structures, found: Found, seconds: float = np.inf) -> int:
    """Merge neighbours of the fronts and of the best of each topology into `found`; returns the rounds it took.

    Pareto local search: a round tries what is one step away from each member that is new, all in one call.
    """
    clock = time.perf_counter()
    tried = expanded = np.empty(0, np.int64)
    for rounds in range(ROUNDS):
        members = found.members
        new = np.setdiff1d(members, expanded)
        if not len(new) or time.perf_counter() - clock > seconds:
            return rounds
        expanded, tried = np.union1d(expanded, new), np.union1d(tried, members)
        around = np.setdiff1d(structures.neighbours(new), tried)
        tried = np.union1d(tried, around)
        found.merge(task.judge(around))
    return ROUNDS
