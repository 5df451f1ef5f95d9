"""A front made certain: nothing dearer than the cheapest deployment that attains everything can be on it.

What a candidate's accelerators cost is a sum over its pools, known without evaluating anything. As soon as so few
candidates cost less than a deployment that attains (almost) all, they are all judged, cheapest first, and the front of
cost and attainment is that of the whole space.
"""

from collections.abc import Iterator

import numpy as np

from breakeven.optimizer.evaluator import Evaluator
from breakeven.optimizer.exhaustive import Task
from breakeven.optimizer.search import Found
from breakeven.spaces.space import Family, Space, accelerators_of

SHARE = 0.04  # of the space, at most
MOST = 500_000  # candidates, at most
ALL = 1e-4  # attainment that the cheapest may be short of all of it
BLOCKS = 4  # judged before the bar is lowered

Certain = ("cost_per_hour_usd", "slo_attainment")


def bar(task: Task, found: Found) -> float | None:
    """Cost per hour of the cheapest member of the front that attains all; None where there is none, or where cost and
    attainment, at the usual values of all inputs and a given load, are not what is asked for."""
    plain = type(task.evaluator) is Evaluator and not task.evaluator.max_load
    if not plain or task.objectives != Certain or not len(found.archive.ids):
        return None
    cost, short = found.archive.costs[:, 0], 1.0 + found.archive.costs[:, 1]
    return float(cost[short <= ALL].min()) if (short <= ALL).any() else None


def complete(task: Task, found: Found) -> bool:
    """Judge all that costs no more than the bar, where it is little enough, and merge it; returns whether it was."""
    limit = bar(task, found)
    if limit is None:
        return False
    space, most = task.evaluator.space, int(min(MOST, SHARE * task.evaluator.space.size))
    price = np.asarray(task.evaluator.catalog.hardware.usd_per_hour, float)
    cheap = _cheapest(space, price, limit, most)
    if cheap is None:
        return False
    ids, usd = cheap
    step = BLOCKS * task.evaluator.block
    for start in range(0, len(ids), step):
        if usd[start] > limit:
            break
        found.merge(task.judge(ids[start : start + step]))
        limit = bar(task, found) or limit
    return True


def _cheapest(space: Space, price: np.ndarray, limit: float, most: int) -> tuple[np.ndarray, np.ndarray] | None:
    """(candidates whose accelerators cost at most `limit` per hour, cheapest first, that cost); None if more than
    `most`."""
    ids, usd = [np.empty(0, np.int64)], [np.empty(0)]
    for f, family in enumerate(space.families):
        found = _of_family(family, price, limit, most)
        if found is None:
            return None
        ids.append(found[0] + space.offsets[f])
        usd.append(found[1])
        most -= len(found[0])
        if most < 0:
            return None
    every, cost = np.concatenate(ids), np.concatenate(usd)
    order = np.lexsort((every, cost))
    return every[order], cost[order]


def _of_family(family: Family, price: np.ndarray, limit: float, most: int) -> tuple[np.ndarray, np.ndarray] | None:
    joint = int(np.prod([float(r) for r in family.radices[len(family.tables) :]]))
    number, usd = np.zeros(1, np.int64), np.zeros(1)
    for own in _pool_usd(family, price):
        order = np.argsort(own, kind="stable")
        counts = np.searchsorted(own[order], limit - usd, side="right")
        if counts.sum() * joint > most:
            return None
        before = np.repeat(np.arange(len(number)), counts)
        row = order[np.arange(len(before)) - np.repeat(np.cumsum(counts) - counts, counts)]
        number, usd = number[before] * len(own) + row, usd[before] + own[row]
    ids = (number[:, None] * joint + np.arange(joint)).ravel()
    return ids, np.repeat(usd, joint)


def _pool_usd(family: Family, price: np.ndarray) -> Iterator[np.ndarray]:
    """Cost per hour of the accelerators of each pool's configurations."""
    for table in family.tables:
        yield accelerators_of(table) * price[table["accelerator"]]
