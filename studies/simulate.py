"""One deployment simulated, beside what the model says: attainment, percentiles, hit ratio, use, throughput."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from breakeven.models.inputs import InputError
from breakeven.models.simulation import Bounds, Estimate, Replications
from breakeven.optimizer.simulator import MOST_SESSIONS, WARM_UP, Ready, bounds
from breakeven.studies.deployment_file import Deployed
from breakeven.studies.result import table
from breakeven.studies.study import Study

RUNS = 8
PATIENCE = 40  # sessions are only followed to their end if that takes at most as many times the calls asked for
LOG_ROWS = 20_000  # passes in a trace
PERCENTILES = {
    f"{of}_p{share}_s": (f"{of}_s", share / 100.0)
    for of in ("ttft", "tpot", "call", "session")
    for share in (50, 95, 99)
}
MEANS = ("ttft", "tpot", "call", "session")
FOUND = {-1: "", 0: "missed", 1: "hit", 2: "first call"}


@dataclass(frozen=True)
class Line:
    """A quantity as simulated, as the model predicts it and as it was recorded (nan where they do not)."""

    name: str
    simulated: Estimate
    model: float = np.nan
    recorded: float = np.nan  # what the replayed trace itself says


@dataclass(frozen=True)
class Report:
    """What `breakeven simulate` shows."""

    title: str
    replications: Replications
    lines: tuple[Line, ...]
    warnings: tuple[str, ...]
    seconds: dict[str, float]  # the SLO's bounds


def simulate_deployment(
    deployed: Deployed, calls: int, seed: int = 0, warm_up: float = WARM_UP, trace: bool = False
) -> Report:
    """Simulate about `calls` measured calls of a deployment in independent parts, each after a warm-up that takes
    this share of its time; the first part keeps its passes for a trace."""
    study = deployed.study
    evaluator = study.evaluator()
    ready = fitting(study.simulator(evaluator).ready(np.array([0], np.int64))[0], deployed.title)
    if ready.live_sessions > MOST_SESSIONS:
        raise InputError("load", f"{ready.live_sessions:.3g} sessions at once", f"at most {MOST_SESSIONS:,}")
    part, limits = max(calls // RUNS, 1), bounds(study.slo)
    whole = limits.of_sessions or ready.calls_per_s * ready.longest_session_s < PATIENCE * part
    played = tuple(
        ready.simulate(part, seed + k, warm_up, whole_sessions=whole, log_rows=LOG_ROWS if trace and k == 0 else 0)
        for k in range(RUNS)
    )
    found = Replications(played)
    names = ("ttft", "tpot", "call", "session")
    seconds = {f"{name}_s": getattr(limits, f"{name}_s") for name in names}
    lines = lines_of(found, limits, ready, study)
    finite = {name: value for name, value in seconds.items() if np.isfinite(value)}
    return Report(deployed.title, found, lines, _warnings(found, ready), finite)


def fitting(ready: Ready, title: str) -> Ready:
    """The candidate, if its weights and the longest sequence fit and its pools can be simulated. Raises InputError."""
    if ready["doubt_sides_apart"] or ready["doubt_encoder"]:
        allowed = "a topology whose decode shares no pool with prefill or the encoder, or both its sides with prefill's"
        raise InputError("deployment", title, allowed)
    if not ready.fits:
        reason = table(ready.simulator.evaluator, np.array([0], np.int64))["reason"].iloc[0]
        raise InputError("deployment", title, f"one that fits: {reason}")
    return ready


def lines_of(found: Replications, limits: Bounds, ready: Ready, study: Study) -> tuple[Line, ...]:
    """Every quantity as simulated, beside the model's."""
    row = table(ready.simulator.evaluator, np.array([0], np.int64)).iloc[0].to_dict()
    return (*_shares(found, limits, row), *_times(found, row), *_use(found, ready, row))


def _shares(found: Replications, limits: Bounds, row: dict[str, Any]) -> list[Line]:
    return [
        Line(f"{name}_attainment", share, float(row[f"{name}_attainment"]))
        for name, share in found.attainment(limits).items()
    ]


def _times(found: Replications, row: dict[str, Any]) -> list[Line]:
    whole = found.runs[0].plan.whole_sessions
    means = {f"{of}_mean_s": found.mean(f"{of}_s") for of in MEANS if whole or of != "session"}
    shown = {name: of for name, of in PERCENTILES.items() if whole or not name.startswith("session")}
    # The model's mean TPOT is over tokens, the simulation's over calls.
    known = {name: value for name, value in row.items() if name != "tpot_mean_s"}
    every = means | found.percentiles(shown)
    return [Line(name, every[name], float(known.get(name, np.nan))) for name in sorted(every, key=_order)]


def _order(name: str) -> int:
    return [f"{of}_{what}_s" for of in MEANS for what in ("mean", "p50", "p95", "p99")].index(name)


def _use(found: Replications, ready: Ready, row: dict[str, Any]) -> list[Line]:
    split = found.runs[0].plan.decode_engines > 0
    lines = [
        Line("cache_hit", found.cache_hit, float(row["cache_hit"])),
        Line("cached_prompt_tokens", found.cached_tokens),
        Line("calls_per_second", found.throughput, ready.calls_per_s),
        Line("output_tokens_per_second", found.output_tokens_per_second, float(row["tokens_per_second"])),
        Line("utilization_prefill", found.utilization("prefill"), float(row["utilization_prefill"])),
    ]
    # The model says what share of its largest batch an engine needs, not of the time it has one: there is none beside.
    lines.append(Line("decoding", found.utilization("decode")))
    return (
        [*lines, Line("utilization_link", found.utilization("link"), float(row["utilization_link"]))]
        if split
        else lines
    )


def _warnings(found: Replications, ready: Ready) -> tuple[str, ...]:
    out = []
    if found.saturated(ready.calls_per_s):
        out.append(
            f"saturated: {found.throughput.value:.3g} calls per second leave of {ready.calls_per_s:.3g} offered; "
            "latencies grow with the length of the simulation"
        )
    if found.cache_hit.value < ready["cache_hit"] - 0.1:
        out.append(
            f"the prefix cache collapsed: {found.cache_hit.value:.1%} of continued calls find their prefix, "
            f"{ready['cache_hit']:.1%} by the model"
        )
    if found.unfinished:
        out.append(
            f"{found.unfinished:,} of {found.calls:,} calls had not ended when their simulation did; they count as late"
        )
    return tuple(out)


def calls_frame(found: Replications) -> pd.DataFrame:
    """Every measured call: what it was, what it found, where it went, and when, in seconds since its part began."""
    frames = []
    for k, run in enumerate(found.runs):
        calls = run.calls[run.measured]
        names = ("session", "prompt", "output", "arrival_s", "first_s", "end_s", "prefill_engine", "decode_engine")
        frame = pd.DataFrame({name: np.ascontiguousarray(calls[name]) for name in names})
        frame.insert(0, "part", k)
        frame["prefix"] = pd.Series(calls["found"]).map(FOUND).astype("category")
        seen = run.latencies()
        frames.append(frame.assign(**{name: seen[name] for name in ("ttft_s", "tpot_s", "call_s")}))
    return pd.concat(frames, ignore_index=True)
