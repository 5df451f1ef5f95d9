"""Candidates of a space played forward: what they need, computed once for many, and one simulation at a time."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from breakeven.models.attainment import Slo
from breakeven.models.deployment import Deployment
from breakeven.models.distributions import Floats
from breakeven.models.forks import SubAgents
from breakeven.models.sessions import Sessions
from breakeven.models.simulation import (
    Bounds,
    Load,
    Machines,
    Replications,
    Simulated,
    Window,
    call_s,
    fork_s,
    machines,
    plan,
    replay,
    simulate,
    traffic,
)
from breakeven.models.tables import Catalog, Resolved, resolve
from breakeven.models.workload import Workload
from breakeven.optimizer.evaluator import SMALL, Columns, Evaluator

SAMPLED_CALLS = 400_000  # of which a simulation takes its sessions
WARM_UP = 0.3  # share of a simulation that is not measured
MOST_CALLS = 3_000_000  # for which a simulation goes on to see whole sessions
MOST_SESSIONS = 1_000_000  # in progress at once, for the memory they take
LONGEST_S = (120.0, 1.0)  # times to the first and per further token that place the first sessions of a saturated one


def bounds(slo: Slo) -> Bounds:
    """An SLO's bounds as plain numbers."""

    def seconds(name: str) -> float:
        bound = getattr(slo, name)
        return np.inf if bound is None else float(bound.bound_s)

    names = ("ttft", "tpot", "call", "session")
    return Bounds(*(seconds(name) for name in names), per_session=float(slo.per_session) > 0.5)


@dataclass(frozen=True)
class Simulator:
    """Simulates candidates of an evaluator's space."""

    evaluator: Evaluator
    draw: Callable[[int], Sessions]  # about so many sessions of the workload: sampled, or all that were recorded
    fork: Callable[[Sessions], SubAgents | None] = lambda _: None  # their sub-agents

    @cached_property
    def sample(self) -> Sessions:
        """The sessions that every simulation draws from."""
        return self.draw(int(np.clip(SAMPLED_CALLS / self.calls_per_session, 500, 50_000)))

    @cached_property
    def agents(self) -> SubAgents | None:
        """The sub-agents of its sessions."""
        return self.fork(self.sample)

    @property
    def calls_per_session(self) -> float:
        return float(self.evaluator.workload.calls_per_session)

    def ready(self, ids: np.ndarray) -> list["Ready"]:
        """Candidates with everything a simulation of them needs, evaluated analytically along the way."""
        found: list[Ready] = []
        for begin in range(0, len(ids), SMALL):
            some = np.asarray(ids[begin : begin + SMALL], np.int64)
            columns = self.evaluator(some)
            deployment = self.evaluator.deployment(some, SMALL)
            resolved, machine = _machines(deployment, self.evaluator.workload, self.evaluator.catalog)
            found += [Ready(self, int(c), i, columns, resolved, machine) for i, c in enumerate(some)]
        return found


@jax.jit
def _machines(deployment: Deployment, workload: Workload, catalog: Catalog) -> tuple[Resolved, Machines]:
    """What a simulation takes of a block of candidates."""
    resolved = resolve(deployment, catalog)
    return resolved, machines(resolved, workload, catalog)


@dataclass(frozen=True)
class Ready:
    """One candidate, ready to be simulated."""

    simulator: Simulator
    candidate: int
    row: int
    columns: Columns
    resolved: Resolved
    machine: Machines

    def __getitem__(self, name: str) -> Any:
        """A column of its analytic evaluation."""
        return self.columns[name][self.row].item()

    @property
    def fits(self) -> bool:
        """Whether weights and the longest sequence fit, and pools are shared in a way that can be simulated."""
        if self["doubt_sides_apart"] or self["doubt_encoder"] or self["doubt_speculation"]:
            return False
        return self["excess_weights"] <= 0.0 and self["excess_kv_cache"] <= 0.0

    @property
    def live_sessions(self) -> float:
        """Sessions in progress, expected."""
        sample = self.simulator.sample
        spent = self.expected_s.sum() + sample.gap_after_s[~sample.last].sum()
        spent += fork_s(sample, self.simulator.agents, self.expected_s).sum()
        known = self.load.concurrent_sessions
        return known or self["sessions_per_second"] * spent / sample.last.sum()

    @cached_property
    def load(self) -> Load:
        workload = self.simulator.evaluator.workload
        if workload.concurrent_sessions is not None:
            return Load(None, float(workload.concurrent_sessions), float(workload.arrival_cv2))
        return Load(self["sessions_per_second"], None, float(workload.arrival_cv2))

    @property
    def settling_calls(self) -> int:
        """Calls of one mean session time: how long a doubtful prefix cache may take to show what becomes of it."""
        doubtful = self["doubt_cache_unsettled"] or self["doubt_cache_short"]
        seconds = self["session_mean_s"]
        return int(seconds * self.calls_per_s) if doubtful and np.isfinite(seconds) else 0

    @property
    def calls_per_s(self) -> float:
        """Offered calls per second."""
        return self["sessions_per_second"] * self.simulator.calls_per_session

    @cached_property
    def expected_s(self) -> Floats:
        """Time of each sampled call by the analytic means, held finite."""
        first_s = min(np.nan_to_num(self["ttft_mean_s"], nan=LONGEST_S[0]), LONGEST_S[0])
        token_s = min(np.nan_to_num(self["tpot_mean_s"], nan=LONGEST_S[1]), LONGEST_S[1])
        return call_s(self.simulator.sample, first_s, token_s)

    def simulate(
        self, calls: int, seed: int, warm_up: float = WARM_UP, whole_sessions: bool = False, log_rows: int = 0
    ) -> Simulated:
        """Play about `calls` measured calls forward, after a warm-up that takes this share of the time."""
        expected = self.expected_s
        measured_s = calls / max(self.calls_per_s, 1e-9)
        share_s = warm_up / (1.0 - warm_up) * measured_s
        start_s = max(share_s, min(5.0 * float(expected.mean()) * (warm_up > 0.0), 4.0 * measured_s))
        end_s = start_s + measured_s
        drain_s = max(0.25 * end_s, min(20.0 * float(np.quantile(expected, 0.99)), 3.0 * end_s))
        if whole_sessions:
            drain_s = max(drain_s, min(self.longest_session_s, MOST_CALLS / max(self.calls_per_s, 1e-9)))
        log_start_s = start_s if log_rows else np.inf
        window = Window(start_s, end_s, end_s + drain_s, whole_sessions, log_start_s)
        simulator = self.simulator
        workload, catalog = simulator.evaluator.workload, simulator.evaluator.catalog
        ready = plan(self.machine, self.resolved, workload, catalog, window, self.row)
        split = ready.decode_engines > 0 and not ready.returns
        cache = ready.prefill_engines * ready.prefill_capacity + sum(
            tier.capacity * (1 if tier.shared else ready.prefill_engines) for tier in ready.tiers[: ready.levels]
        )
        coming = traffic(
            simulator.sample,
            self.load,
            expected,
            window.horizon_s,
            ready.prefill_engines,
            split,
            cache,
            seed,
            simulator.agents,
        )
        return simulate(ready, coming, log_rows)

    def replay(self, start_s: Floats, seed: int, log_rows: int = 0) -> Simulated:
        """Play every session of the sample once, from an idle deployment to the end of the last; an infinite start:
        when another session ends. Rates are those until the last session starts, where that is known."""
        simulator = self.simulator
        known = np.isfinite(start_s).all() and float(start_s.max()) > 0.0
        until_s = float(start_s.max()) + 1e-6 if known else np.inf  # what rounding makes of the last one is inside
        window = Window(0.0, until_s, np.inf, True, 0.0 if log_rows else np.inf)
        workload, catalog = simulator.evaluator.workload, simulator.evaluator.catalog
        ready = plan(self.machine, self.resolved, workload, catalog, window, self.row)
        split = ready.decode_engines > 0 and not ready.returns
        coming = replay(simulator.sample, start_s, ready.prefill_engines, split, seed)
        found = replace(simulate(ready, coming, log_rows), every=True)
        return found if known else replace(found, plan=ready._replace(window_end_s=np.nextafter(found.end_s, np.inf)))

    def replicate(self, runs: int, calls: int, seed: int, **options: Any) -> Replications:
        """`runs` independent simulations of about `calls` calls each."""
        return Replications(tuple(self.simulate(calls, seed + k, **options) for k in range(runs)))

    @property
    def longest_session_s(self) -> float:
        """Half as long again as the longest sampled session should last."""
        sample = self.simulator.sample
        spent = self.expected_s + np.where(sample.last, 0.0, sample.gap_after_s)
        spent = spent + fork_s(sample, self.simulator.agents, self.expected_s)
        return 1.5 * float(np.bincount(sample.session, weights=spent).max())
