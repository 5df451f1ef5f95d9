"""How good a front is and whether it still moves: hypervolume over a search, and what doubling it added."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from breakeven.optimizer.front import hypervolume

GAIN = 1e-3  # relative growth of the hypervolume below which a front stands still
PATIENCE = 2  # records without more than that
LONG_PATIENCE = 10  # where less than this share of a space was evaluated, and a front may stand on an accident:
THIN = 0.01


@dataclass
class History:
    """Records of (trials, candidates evaluated, seconds, hypervolume), taken up to one and the same worst corner."""

    reference: np.ndarray | None = None
    records: list[tuple[int, int, float, float]] = field(default_factory=list)
    certain: bool = False  # everything that could be on the front was judged

    def add(self, trials: int, evaluated: int, seconds: float, costs: np.ndarray) -> None:
        """Record where the search stands."""
        value = 0.0 if self.reference is None or not len(costs) else hypervolume(costs, self.reference)
        self.records.append((trials, evaluated, seconds, value))

    def still(self, size: float) -> bool:
        """Whether the last records added next to nothing, in a space of `size` candidates."""
        patience = PATIENCE if self.records and self.records[-1][1] >= THIN * size else LONG_PATIENCE
        if len(self.records) <= patience:
            return False
        before, now = self.records[-1 - patience][-1], self.records[-1][-1]
        return now > 0.0 and now - before <= GAIN * now

    @property
    def last_doubling(self) -> float:
        """Relative growth since half as many candidates were evaluated: what a search twice as long may add at most,
        if each doubling adds no more than the last one did. NaN before there is a half."""
        if len(self.records) < 2 or self.records[-1][-1] <= 0.0:
            return float("nan")
        evaluated, now = self.records[-1][1], self.records[-1][-1]
        half = [value for _, count, _, value in self.records if 2 * count <= evaluated]
        return 1.0 - half[-1] / now if half else float("nan")

    def record(self) -> dict[str, Any]:
        """The course of the search, as study.json holds it."""
        growth = self.last_doubling
        return {
            "reference": None if self.reference is None else self.reference.tolist(),
            "columns": ["trials", "candidates_evaluated", "seconds", "hypervolume"],
            "records": [list(record) for record in self.records],
            "certain": self.certain,
            "growth_by_last_doubling": growth if np.isfinite(growth) else None,
        }
