"""Two cells that share the sessions: the best pairs, from what is non-dominated in each cell alone.

A cell is a complete deployment at its share of the load. Cost, power and accelerators of a pair are sums, its SLO
attainment is the mean weighted by shares, so a pair that no other one beats is made of cells that none with the same
accelerators beats in cost, attainment and what the study limits of the sum. With the same accelerators: for whether a
pair is of unlike ones, and what it costs to run a second kind, depends on them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np

from breakeven.models.serving import Outcome
from breakeven.models.simulation import Estimate
from breakeven.models.topology import STAGES
from breakeven.optimizer.evaluator import Columns, Evaluator
from breakeven.optimizer.front import Archive
from breakeven.optimizer.search import KINDS, Found
from breakeven.optimizer.verify import SECONDS, Verification

PAIRS_AT_ONCE = 1_000_000
EXACT = 1.0 + 1e-6  # a limit's own rounding
_USED = "used_"


@dataclass(frozen=True)
class Limited:
    """What a pair may come to: dollars per hour, kilowatts, accelerators by kind; what is not named has no limit."""

    budget_usd_per_hour: float = math.inf
    power_kw: float = math.inf
    inventory: Mapping[str, int] = field(default_factory=dict)

    @property
    def objectives(self) -> tuple[str, ...]:
        """What no cell of a pair that is not beaten is beaten in: columns of `CellEvaluator`."""
        power = () if math.isinf(self.power_kw) else ("power_kw",)
        return ("cost_per_hour_usd", "slo_attainment", *power, *[_USED + kind for kind in self.inventory])

    @property
    def most(self) -> np.ndarray:
        """The largest sum of each objective."""
        power = () if math.isinf(self.power_kw) else (self.power_kw,)
        return np.array([self.budget_usd_per_hour, math.inf, *power, *self.inventory.values()]) * EXACT


@dataclass(frozen=True)
class CellEvaluator(Evaluator):
    """Evaluates candidates as cells: also the accelerators of each kind that they use, and which kinds those are."""

    def finish(self, started: tuple[np.ndarray, Outcome, jax.Array | None]) -> Columns:
        """Columns of a started block, one value per candidate."""
        columns, names = super().finish(started), self.space.names.accelerator_ids
        kinds, used = self.space.accelerators(columns["candidate"])
        columns[KINDS] = np.asarray(np.ravel_multi_index(tuple(kinds.T), (len(names),) * len(STAGES)))
        return columns | {_USED + name: used[:, k] for k, name in enumerate(names)}


class Pair(NamedTuple):
    """Two cells: `share` of the sessions goes to candidate `first`, the others to `second`."""

    share: float
    first: int
    second: int
    cost_per_hour_usd: float
    slo_attainment: float

    @property
    def cells(self) -> tuple[tuple[float, int], tuple[float, int]]:
        """(share, candidate) of each."""
        return (self.share, self.first), (other(self.share), self.second)


def other(share: float) -> float:
    """What a share leaves.

    >>> other(0.9)
    0.1
    """
    return round(1.0 - share, 9)


@dataclass(frozen=True)
class Pairing:
    """Pairs of the cells that searches found at each share of the load, the larger share first."""

    found: Mapping[float, Found]
    limited: Limited
    kinds: int  # of accelerators in the space
    pool_usd_per_hour: float = 0.0  # of each pool beyond the first
    second_kind_usd_per_hour: float = 0.0  # of each kind beyond the first

    def front(self, unlike: bool) -> list[Pair]:
        """Cheapest first, the pairs that no other one beats in cost and attainment: of cells whose accelerators differ
        in some stage, or (not `unlike`) of cells with the same ones in all."""
        kept, made, position = Archive(), list[_Sums](), 0
        for sums in self._sums(unlike):
            costs = sums.costs()
            inside = np.flatnonzero((costs <= self.limited.most).all(1))
            if len(inside):
                kept.add(position + inside, costs[inside, :2])
            made.append(sums)
            position += len(costs)
        starts = np.cumsum([0, *[sums.size for sums in made]])
        pairs = []
        for number, (cost, missed) in zip(kept.ids, kept.costs, strict=True):
            block = int(np.searchsorted(starts, number, side="right")) - 1
            pairs.append(made[block].pair(int(number - starts[block]), float(cost), -float(missed)))
        return sorted(pairs, key=lambda pair: (pair.cost_per_hour_usd, -pair.slo_attainment, pair))

    def _sums(self, unlike: bool) -> Iterator["_Sums"]:
        for share in sorted(s for s in self.found if s >= 0.5):
            firsts, seconds = self.found[share].alike, self.found[other(share)].alike
            for u, a in sorted(firsts.items()):
                for v, b in sorted(seconds.items()):
                    swapped = share == 0.5 and v < u
                    if (u != v) == unlike and not swapped:
                        yield from _Sums(share, a, b, self._joining_usd(u, v)).parts()

    def _joining_usd(self, u: int, v: int) -> float:
        """What running both costs beside running each: a pool more, and a kind more for each but those in common."""
        both = self._kinds(u) & self._kinds(v)
        return self.pool_usd_per_hour + (1.0 - len(both)) * self.second_kind_usd_per_hour

    def _kinds(self, number: int) -> set[int]:
        return {int(kind) for kind in np.unravel_index(number, (self.kinds,) * len(STAGES))}


@dataclass(frozen=True)
class _Sums:
    """All pairs of two fronts."""

    share: float
    first: Archive
    second: Archive
    joining_usd: float

    def parts(self) -> Iterator["_Sums"]:
        """The same in parts that memory holds."""
        rows = max(PAIRS_AT_ONCE // len(self.second.ids), 1)
        for i in range(0, len(self.first.ids), rows):
            some = Archive(self.first.ids[i : i + rows], self.first.costs[i : i + rows])
            yield _Sums(self.share, some, self.second, self.joining_usd)

    @property
    def size(self) -> int:
        return len(self.first.ids) * len(self.second.ids)

    def costs(self) -> np.ndarray:
        """Objectives to be minimised, shape (pairs, objectives), the second cell's number running fastest."""
        weights = np.ones((2, self.first.costs.shape[1]))
        weights[:, 1] = self.share, other(self.share)
        a, b = weights[0] * self.first.costs, weights[1] * self.second.costs
        a[:, 0] += self.joining_usd
        return (a[:, None, :] + b[None, :, :]).reshape(self.size, -1)

    def pair(self, number: int, cost: float, attainment: float) -> Pair:
        i, j = divmod(number, len(self.second.ids))
        return Pair(self.share, int(self.first.ids[i]), int(self.second.ids[j]), cost, attainment)


def mean_of(parts: Sequence[tuple[float, Estimate]]) -> Estimate:
    """The weighted mean of independent estimates, with its interval."""
    value = sum(weight * estimate.value for weight, estimate in parts)
    half = math.hypot(*[weight * estimate.half_width for weight, estimate in parts])
    return Estimate(value, max(value - half, 0.0), min(value + half, 1.0))


@dataclass
class PairVerification:
    """Simulates both cells of pairs until its time is over."""

    cells: Mapping[tuple[int, float], Verification]  # by place in a pair and share; independent of one another
    target: float
    seconds: float = SECONDS  # of simulation; compiling does not count
    spent_s: float = 0.0
    shown: dict[Pair, Estimate] = field(default_factory=dict)

    def judge(self, pair: Pair) -> Estimate | None:
        """The attainment of a pair; None when time was over before it was known, or a cell cannot be simulated."""
        parts: list[tuple[float, Estimate]] = []
        for place, (share, candidate) in enumerate(pair.cells):
            verification = self.cells[place, share]
            verification.seconds = self.seconds - self.spent_s
            if candidate not in verification.verdicts and verification.seconds > 0.0:
                verification.run([], [candidate], lambda done, total: None)
                self.spent_s += verification.spent_s
            verdict = verification.verdicts.get(candidate)
            if verdict is None:
                return None
            parts.append((share, verdict.attainment))
        self.shown[pair] = mean_of(parts)
        return self.shown[pair]

    def walk(self, pairs: Sequence[Pair]) -> Pair | None:
        """The first that meets the target, or that nothing is known of; None where none does."""
        for pair in pairs:
            found = self.judge(pair)
            if found is None or found.value >= self.target:
                return pair
        return None
