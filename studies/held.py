"""Optima that hold: along a list of candidates, cheapest first, to the first that meets the target when simulated."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from breakeven.optimizer.evaluator import Evaluator
from breakeven.optimizer.optima import Optimum
from breakeven.optimizer.verify import Verification
from breakeven.studies.study import Study

LONGEST_LIST = 60
SECONDS_EACH = 10.0


class Held(NamedTuple):
    """What simulation makes of a list: the cheapest that holds (None: none does), and what it attained there."""

    tried: bool  # False where time was over before anything was known
    candidate: int | None
    cost_per_hour_usd: float  # infinite where none holds
    attainment: float


UNTRIED = Held(False, None, np.nan, np.nan)


@dataclass
class Holding:
    """Simulates lists of optima until its seconds are spent; compiling and drawing sessions do not count."""

    seconds: float
    spent_s: float = 0.0
    simulated: int = 0

    @property
    def over(self) -> bool:
        return self.spent_s >= self.seconds

    def walk(self, study: Study, lists: Sequence[Sequence[Optimum]]) -> list[Held]:
        """What holds of each list in one study."""
        if self.over:
            return [UNTRIED] * len(lists)
        evaluator = Evaluator(study.space, study.workload, study.slo, study.catalog)
        seed = study.written.search.seed
        left = min(self.seconds - self.spent_s, SECONDS_EACH)
        verification = Verification(study.simulator(evaluator), study.slo, seed, left)
        some = [list(each[:LONGEST_LIST]) for each in lists]
        numbers = [[optimum.candidate for optimum in each] for each in some]
        clock = time.perf_counter()
        ends = verification.run(numbers, [], lambda done, total: None)
        self.spent_s += verification.spent_s or time.perf_counter() - clock
        self.simulated += len(verification.verdicts)
        return [_held(each, ends.get(k), verification) for k, each in enumerate(some)]


def _held(some: list[Optimum], end: int | None, verification: Verification) -> Held:
    if not some or end is None:
        return Held(True, None, np.inf, np.nan)
    verdict = verification.verdicts.get(end)
    if verdict is None:
        return UNTRIED
    optimum = next(each for each in some if each.candidate == end)
    return Held(True, end, optimum.cost_per_hour_usd, verdict.attainment.value)
