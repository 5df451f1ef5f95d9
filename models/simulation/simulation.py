"""Playing a deployment forward, and what its calls saw: latencies, attainment with its uncertainty, use."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from breakeven.models.distributions import Floats
from breakeven.models.simulation.engine import play
from breakeven.models.simulation.state import HIT, MISSED, Plan, Records, new_state
from breakeven.models.simulation.traffic import Traffic

Flags = NDArray[np.bool_]
BATCHES = 20
STUDENT = 2.093  # 0.975 quantile of Student's t with BATCHES - 1 degrees of freedom


class Estimate(NamedTuple):
    """A share or a mean with its 95 % confidence interval, by batch means over time."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return 0.5 * (self.high - self.low)


class Bounds(NamedTuple):
    """Upper bounds in seconds, infinite where there is none; `per_session`: a session must meet them in all calls."""

    ttft_s: float = np.inf
    tpot_s: float = np.inf
    call_s: float = np.inf
    session_s: float = np.inf
    per_session: bool = False

    @property
    def of_sessions(self) -> bool:
        """Whether whole sessions must be observed."""
        return self.per_session or np.isfinite(self.session_s)


@dataclass(frozen=True)
class Simulated:
    """A finished simulation; per-call arrays cover the calls that came in the measured window, in no order."""

    plan: Plan
    calls: Records  # every call, see `breakeven.models.simulation.state`
    sessions: Records
    engines: Records
    log: Records
    arrived: int  # calls that came in the window
    left: int  # calls that ended in it
    events: int
    end_s: float

    @property
    def window_s(self) -> float:
        return self.plan.window_end_s - self.plan.window_start_s

    @property
    def measured(self) -> Flags:
        """Calls that came in the window."""
        arrival = self.calls["arrival_s"]
        return (arrival >= self.plan.window_start_s) & (arrival < self.plan.window_end_s)

    @property
    def finished(self) -> Flags:
        return np.isfinite(self.calls["end_s"])

    @property
    def throughput(self) -> float:
        """Calls per second that ended in the window."""
        return self.left / self.window_s

    @property
    def cache_hit(self) -> float:
        """Share of the continued calls of the window that found their session's context cached."""
        found = self.calls["found"][self.measured]
        return float(np.mean(found[(found == HIT) | (found == MISSED)] == HIT)) if np.any(found <= HIT) else 1.0

    def utilization(self, name: str) -> float:
        """Mean share of the window that an engine spends in `prefill`, `decode` or its `link`, of those that do it."""
        does = self.engines["decodes" if name == "decode" else "prefills"]
        return float(self.engines[f"{name}_busy_s"][does].mean() / self.window_s)

    def latencies(self) -> dict[str, Floats]:
        """Seconds of each measured call: to its first token, per further token (0 without any), in all, and since
        when. What did not finish took for ever."""
        calls = self.calls[self.measured]
        arrival = np.asarray(calls["arrival_s"])
        first = np.where(np.isfinite(calls["first_s"]), calls["first_s"], np.inf)
        end = np.where(np.isfinite(calls["end_s"]), calls["end_s"], np.inf)
        steps = np.asarray(calls["output"]) - 1.0
        with np.errstate(invalid="ignore"):
            decoding = np.where(np.isfinite(first), end - first, np.inf)
        tpot = np.where(steps > 0.0, decoding / np.maximum(steps, 1.0), 0.0)
        return {"arrival_s": arrival, "ttft_s": first - arrival, "tpot_s": tpot, "call_s": end - arrival}

    def session_times(self) -> tuple[NDArray[np.int64], Floats]:
        """(rows, seconds) of the sessions that started in the window; infinite where one has not ended."""
        rows = np.flatnonzero(self.sessions["measured"])
        first = self.sessions["first_call"][rows]
        count = np.append(self.sessions["first_call"][1:], len(self.calls))[rows] - first
        final = first + count - 1
        ended = self.calls["last"][final] & np.isfinite(self.calls["end_s"][final])
        spent = np.where(ended, self.calls["end_s"][final], np.inf) - self.calls["arrival_s"][first]
        return rows, spent

    def attainment(self, bounds: Bounds) -> dict[str, Estimate]:
        """Shares of calls (or sessions) in time: `slo` jointly, and each bound alone."""
        seen = self.latencies()
        out, met = {}, np.ones(len(seen["call_s"]), bool)
        for name in ("ttft", "tpot", "call"):
            within = seen[f"{name}_s"] <= getattr(bounds, f"{name}_s")
            met &= within & np.isfinite(seen["call_s"])
            if np.isfinite(getattr(bounds, f"{name}_s")):
                out[name] = batch_means(within, seen["arrival_s"], self.plan)
        joint = batch_means(met, seen["arrival_s"], self.plan)
        if bounds.of_sessions:
            joint = self._sessions(bounds, joint, out)
        return {"slo": joint} | out

    def _sessions(self, bounds: Bounds, calls: Estimate, out: dict[str, Estimate]) -> Estimate:
        """The joint share where sessions count; adds the share of sessions in time to `out`."""
        rows, spent = self.session_times()
        started = self.calls["arrival_s"][self.sessions["first_call"][rows]]
        in_time = batch_means(spent <= bounds.session_s, started, self.plan)
        if np.isfinite(bounds.session_s):
            out["session"] = in_time
        if not bounds.per_session:
            return Estimate(*(a * b for a, b in zip(calls, in_time, strict=True)))
        end, first = self.calls["end_s"], self.calls["first_s"]
        with np.errstate(invalid="ignore"):
            steps = np.maximum(self.calls["output"] - 1.0, 1.0)
            late = ~(first - self.calls["arrival_s"] <= bounds.ttft_s) | ~((end - first) / steps <= bounds.tpot_s)
            late |= ~(end - self.calls["arrival_s"] <= bounds.call_s)
        bad = np.bincount(self.calls["session"], weights=late, minlength=len(self.sessions))[rows] > 0.0
        return batch_means((spent <= bounds.session_s) & np.isfinite(spent) & ~bad, started, self.plan)


def batch_means(values: NDArray[np.generic], at_s: Floats, plan: Plan) -> Estimate:
    """Mean of `values` observed at times of the window, its error from the means of equal spans of time (a ratio
    estimator, for spans hold unlike numbers)."""
    if not len(values):
        return Estimate(1.0, 0.0, 1.0)
    span = (at_s - plan.window_start_s) / (plan.window_end_s - plan.window_start_s)
    batch = np.minimum((span * BATCHES).astype(np.int64), BATCHES - 1)
    count = np.bincount(batch, minlength=BATCHES)
    mean = float(np.mean(values, dtype=np.float64))
    residual = np.bincount(batch, weights=values.astype(np.float64), minlength=BATCHES) - mean * count
    error = float(np.sqrt(np.sum(residual**2) * BATCHES / (BATCHES - 1.0)) / count.sum())
    # A share that no call missed is still uncertain by what n calls cannot show.
    half = STUDENT * error + 3.0 / len(values) * (error == 0.0)
    return Estimate(mean, mean - half, mean + half)


def simulate(plan: Plan, traffic: Traffic, log_rows: int = 0) -> Simulated:
    """Play `traffic` through the deployment of `plan`."""
    state = new_state(plan, traffic.calls, traffic.sessions, log_rows)
    state.clock[0].waiting_session = len(traffic.starts)
    play(plan, state, traffic.starts, traffic.warm)
    clock = state.clock[0]
    return Simulated(
        plan=plan,
        calls=state.calls,
        sessions=state.sessions,
        engines=state.engines,
        log=state.log[: clock.logged],
        arrived=int(clock.arrived),
        left=int(clock.left),
        events=int(clock.taken),
        end_s=float(clock.now_s),
    )
