"""Playing a deployment forward, and what its calls saw."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from breakeven.models.distributions import Floats
from breakeven.models.simulation.engine import play
from breakeven.models.simulation.state import HIT, MISSED, READ, Plan, Records, new_state, packed
from breakeven.models.simulation.traffic import Traffic, kept_by_decode

Flags = NDArray[np.bool_]


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
    every: bool = False  # every call is measured; rates and use are still those of the window

    @property
    def cached_tokens(self) -> float:
        """Share of the measured calls' prompt tokens that they found in the prefix cache, shared prefixes included."""
        calls = self.calls[self.measured & (self.calls["found"] >= 0)]
        computed = np.where(calls["found"] == HIT, calls["hit_tokens"], calls["missed_tokens"])
        return 1.0 - float(computed.sum() / max(calls["prompt"].sum(), 1.0))

    @property
    def window_s(self) -> float:
        return self.plan.window_end_s - self.plan.window_start_s

    @property
    def measured(self) -> Flags:
        """Calls that came in the window, or all."""
        arrival = self.calls["arrival_s"]
        if self.every:
            return np.isfinite(arrival)
        return (arrival >= self.plan.window_start_s) & (arrival < self.plan.window_end_s)

    @property
    def finished(self) -> Flags:
        return np.isfinite(self.calls["end_s"])

    @property
    def throughput(self) -> float:
        """Calls per second that ended in the window."""
        return self.left / self.window_s

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second, of the calls that ended in the window."""
        ended = (self.calls["end_s"] >= self.plan.window_start_s) & (self.calls["end_s"] < self.plan.window_end_s)
        return float(self.calls["output"][ended].sum()) / self.window_s

    @property
    def cache_hit(self) -> float:
        """Share of the continued calls of the window that found their session's context, in HBM or a tier below."""
        known = self._continued
        return float(np.mean(known != MISSED)) if len(known) else 1.0

    @property
    def cache_reload(self) -> float:
        """Share of the continued calls of the window that read it back from a tier below HBM."""
        known = self._continued
        return float(np.mean(known == READ)) if len(known) else 0.0

    @property
    def _continued(self) -> Records:
        found = self.calls["found"][self.measured]
        return found[(found == HIT) | (found == MISSED) | (found == READ)]

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
        ttft = self._shown_s(first, end, tpot) - arrival
        return {"arrival_s": arrival, "ttft_s": ttft, "tpot_s": tpot, "call_s": end - arrival}

    def _shown_s(self, first_s: Floats, end_s: Floats, tpot_s: Floats) -> Floats:
        """When the first chunk reaches the user: some decode steps after the first token, at the end at the latest."""
        known_s = np.where(np.isfinite(tpot_s), tpot_s, 0.0)
        held_s = np.maximum(self.plan.first_chunk_steps * known_s + self.plan.first_chunk_s, 0.0)
        return np.minimum(first_s + held_s, end_s)

    def session_times(self) -> tuple[NDArray[np.int64], Floats]:
        """(rows, seconds) of the sessions that started in the window; infinite where one has not ended."""
        rows = np.flatnonzero(self.sessions["measured"])
        first = self.sessions["first_call"][rows]
        count = np.append(self.sessions["first_call"][1:], len(self.calls))[rows] - first
        final = first + count - 1
        ended = self.calls["last"][final] & np.isfinite(self.calls["end_s"][final])
        spent = np.where(ended, self.calls["end_s"][final], np.inf) - self.calls["arrival_s"][first]
        return rows, spent

    def calls_in_time(self, bounds: Bounds) -> dict[str, Flags]:
        """Of each measured call: whether it met all bounds of a call (`slo`), and each that there is alone."""
        seen = self.latencies()
        alone = {name: seen[f"{name}_s"] <= getattr(bounds, f"{name}_s") for name in ("ttft", "tpot", "call")}
        joint = np.isfinite(seen["call_s"]) & alone["ttft"] & alone["tpot"] & alone["call"]
        return {"slo": joint} | {k: v for k, v in alone.items() if np.isfinite(getattr(bounds, f"{k}_s"))}

    def sessions_in_time(self, bounds: Bounds) -> tuple[Flags, Flags]:
        """Of each session that started in the window: whether it ended in time, and met every bound in every call."""
        rows, spent = self.session_times()
        arrival, first, end = (self.calls[name] for name in ("arrival_s", "first_s", "end_s"))
        with np.errstate(invalid="ignore"):
            tpot = (end - first) / np.maximum(self.calls["output"] - 1.0, 1.0)
            shown = self._shown_s(first, end, tpot)
            late = ~(shown - arrival <= bounds.ttft_s) | ~(end - arrival <= bounds.call_s) | ~(tpot <= bounds.tpot_s)
        bad = np.bincount(self.calls["session"], weights=late, minlength=len(self.sessions))[rows] > 0.0
        in_time = (spent <= bounds.session_s) & np.isfinite(spent)
        return in_time, in_time & ~bad


def simulate(plan: Plan, traffic: Traffic, log_rows: int = 0) -> Simulated:
    """Play `traffic` through the deployment of `plan`."""
    sessions = kept_by_decode(traffic.sessions, len(traffic.calls)) if plan.keeps else traffic.sessions
    state = new_state(plan, traffic.calls, sessions, log_rows)
    state.clock["waiting_session"], state.clock["playing"] = len(traffic.starts), traffic.playing
    play(packed(plan), state, traffic.starts, traffic.warm)
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
