"""Verification: the deployments that matter are simulated, and one is only named cheapest if it holds there.

Their number doubles until the confidence interval is narrow, or clearly on one side of the target.
"""

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from breakeven.models.attainment import Slo
from breakeven.models.simulation import Estimate, Replications, Simulated
from breakeven.optimizer.simulator import MOST_SESSIONS, Ready, Simulator, bounds

CALLS = 8_000  # of one simulation; of a doubtful prefix cache as many as come in a session's time
FEWEST_RUNS, FIRST_RUNS, MOST_RUNS = 4, 6, 30
MOST_CALLS = 240_000  # of one candidate
HALF_WIDTH = 0.01
SECONDS = 20.0

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Verdict:
    """What the simulation of one candidate showed."""

    candidate: int
    attainment: Estimate
    meets: bool


@dataclass
class Verification:
    """Simulates candidates in order of importance until its time is over."""

    simulator: Simulator
    slo: Slo
    seed: int = 0
    seconds: float = SECONDS
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    note: Callable[[Verdict], None] = lambda verdict: None  # told of each
    started: float = 0.0
    spent_s: float = 0.0

    def __post_init__(self) -> None:
        self.target = float(self.slo.target)
        self.bounds = bounds(self.slo)

    @property
    def over(self) -> bool:
        return self.started > 0.0 and time.perf_counter() - self.started > self.seconds

    def judge(self, ready: Ready) -> Verdict | None:
        """Simulate one candidate; None when time is over before anything is known of it."""
        if not ready.fits or ready.live_sessions > MOST_SESSIONS:
            return None
        runs: list[Simulated] = []
        calls = min(max(CALLS, ready.settling_calls), MOST_CALLS // FIRST_RUNS)
        found, most = None, min(MOST_RUNS, MOST_CALLS // calls)
        while len(runs) < most and not self.over:
            more = min(max(2 * len(runs), FIRST_RUNS), most) - len(runs)
            runs += self._more(ready, len(runs), more, calls)
            if len(runs) < FEWEST_RUNS:
                break
            shares = Replications(tuple(runs)).attainment(self.bounds)
            joint = shares["slo"]
            found = Verdict(ready.candidate, joint, self._meets(shares))
            clear = abs(joint.value - self.target) > joint.half_width and joint.half_width < 3.0 * HALF_WIDTH
            if joint.half_width < HALF_WIDTH or clear:
                break
        return found

    def _more(self, ready: Ready, done: int, more: int, calls: int) -> list[Simulated]:
        """`more` further simulations of a candidate, fewer when time is over."""
        found: list[Simulated] = []
        while len(found) < more and not self.over:
            seed = self.seed + done + len(found)
            found.append(ready.simulate(calls, seed, whole_sessions=self.bounds.of_sessions))
        return found

    def _meets(self, shares: dict[str, Estimate]) -> bool:
        """Whether the joint target and the fractions of single bounds are reached."""
        if shares["slo"].value < self.target:
            return False
        alone = [name for name in shares if name != "slo"]
        return all(shares[name].value >= float(getattr(self.slo, name).fraction) for name in alone)

    def warm_up(self, ready: Ready) -> None:
        """Compile the loop and draw the sessions, which no clock should count."""
        if ready.fits and ready.live_sessions < MOST_SESSIONS:
            ready.simulate(200, self.seed)
        self.started = time.perf_counter()

    def run(self, lists: list[list[int]], others: Iterable[int], progress: Progress) -> dict[int, int | None]:
        """Walk each list (candidates that should meet the target, best first) to the first that does, then simulate
        `others`. Returns for each list the candidate it ends at: one that holds, else the first untried one, else None.
        """
        others = [c for c in others if c not in {c for some in lists for c in some[:1]}]
        wanted = list(dict.fromkeys([c for some in lists for c in some] + others))
        ready = {r.candidate: r for r in self.simulator.ready(np.array(wanted, np.int64))}
        if not wanted:
            return {}
        self.warm_up(ready[wanted[0]])
        ends: dict[int, int | None] = {}
        workers = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 8)
        total = len(lists) + len(others)
        with ThreadPoolExecutor(workers) as pool:
            try:
                for k, end in enumerate(pool.map(lambda some: self._walk([ready[c] for c in some]), lists)):
                    ends[k] = end
                    progress(k + 1, total)
                for done, _ in enumerate(pool.map(lambda c: self._judge_once(ready[c]), others)):
                    progress(len(lists) + done + 1, total)
            except KeyboardInterrupt:
                self.seconds = 0.0  # what still waits in the pool ends at once
                raise
        self.spent_s = time.perf_counter() - self.started
        return ends

    def _judge_once(self, ready: Ready) -> Verdict | None:
        known = self.verdicts.get(ready.candidate)
        if known is None and not self.over:
            known = self.judge(ready)
            if known is not None:
                self.verdicts[ready.candidate] = known
                self.note(known)
        return known

    def _walk(self, some: list[Ready]) -> int | None:
        for ready in some:
            verdict = self._judge_once(ready)
            if verdict is None or verdict.meets:
                return ready.candidate
        return None
