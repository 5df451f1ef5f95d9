"""A trace replayed on one deployment: every recorded session once, beside what was recorded and what the model says."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from breakeven.models.distributions import Floats
from breakeven.models.inputs import InputError
from breakeven.models.simulation import Estimate, Replications
from breakeven.models.traces import Trace
from breakeven.optimizer.simulator import bounds
from breakeven.studies.deployment_file import Deployed
from breakeven.studies.recorded import Recorded
from breakeven.studies.schema import set_path
from breakeven.studies.simulate import LOG_ROWS, Line, Report, fitting, lines_of
from breakeven.studies.study import Study


class Replay(NamedTuple):
    """A replay's report, and what was read and inferred of the trace."""

    report: Report
    notes: tuple[str, ...]


def trace_fields(
    trace: Path | None,
    format: str | None,
    skip_bad_rows: bool,
    column_map: str | None,
    changes: Sequence[str],
    rate: float | None,
) -> dict[str, Any] | None:
    """A trace on the command line as a study's workload; None without one. Raises InputError."""
    if trace is None:
        if format or skip_bad_rows or column_map or changes or rate:
            raise InputError("--trace", None, "a file: --format, --column-map, --option, --rate are of a trace")
        return None
    given: dict[str, Any] = {"trace": str(trace.absolute()), "skip_bad_rows": skip_bad_rows}
    given |= {"format": format or ("table" if column_map else None)}
    if column_map:
        pairs = [pair.partition("=") for pair in column_map.split(",")]
        if not all(ours.strip() and theirs.strip() for ours, _, theirs in pairs):
            raise InputError("--column-map", column_map, "start=COLUMN,input_tokens=COLUMN,…")
        given["columns"] = {ours.strip(): theirs.strip() for ours, _, theirs in pairs}
    for change in changes:
        set_path(given, change)
    return {name: value for name, value in given.items() if value is not None}


def replay_trace(
    deployed: Deployed, given: Mapping[str, Any], rate: float | None = None, seed: int = 0, log: bool = False
) -> Replay:
    """Replay the trace that `given` names (a study's `workload` with a trace) on a deployment.

    Sessions start when the trace says; at `rate` per second, or at the deployment's own load where it does not.
    """
    study = _study(deployed.study, given)
    trace = _of(study).trace
    start_s = _starts(trace, study, rate, seed)
    known = np.isfinite(start_s)
    if known.all() and len(start_s) > 1 and np.ptp(start_s) > 0.0:
        study = _study(study, given, {"sessions_per_second": (len(start_s) - 1) / float(np.ptp(start_s))})
    evaluator = study.evaluator()
    simulator = study.simulator(evaluator)
    ready = fitting(simulator.ready(np.array([0], np.int64))[0], deployed.title)
    ready.simulate(100, seed)  # compiles the loop, which no clock should count
    begun = time.perf_counter()
    played = ready.replay(start_s, seed, LOG_ROWS if log else 0)
    wall_s = time.perf_counter() - begun
    found, limits = Replications((played,)), bounds(study.slo)
    recorded = _recorded(trace, played.sessions["measured"].size)
    lines = tuple(replace(x, recorded=recorded.get(x.name, np.nan)) for x in lines_of(found, limits, ready, study))
    lines = (*lines, Line("wall_time_s", _exactly(wall_s)))
    seconds = {f"{name}_s": getattr(limits, f"{name}_s") for name in ("ttft", "tpot", "call", "session")}
    finite = {name: value for name, value in seconds.items() if np.isfinite(value)}
    title = f"{deployed.title}, {_of(study).name}"
    context = float(study.architecture.max_context)
    notes = (*_of(study).notes(context), _start_note(trace, study, rate, start_s))
    return Replay(Report(title, found, lines, (), finite), notes)


def _exactly(value: float) -> Estimate:
    return Estimate(value, -np.inf, np.inf)


def _study(study: Study, given: Mapping[str, Any], load: Mapping[str, float] | None = None) -> Study:
    """The study with the trace as its workload, and another load if one is given."""
    return Study.parse({**study.data, "workload": dict(given), **({"load": dict(load)} if load else {})}, study.file)


def _of(study: Study) -> Recorded:
    assert study.recorded is not None
    return study.recorded


def _starts(trace: Trace, study: Study, rate: float | None, seed: int) -> Floats:
    """When each session starts, seconds; infinite: when another one ends."""
    recorded, sessions = trace.start_s[trace.first], trace.sessions
    if rate is None and trace.absolute and np.isfinite(recorded).all():
        return recorded - recorded.min()
    load = study.written.load
    if rate is None and not isinstance(load, str) and load.concurrent_sessions is not None:
        return np.where(np.arange(sessions) < load.concurrent_sessions, 0.0, np.inf)
    if rate is None and isinstance(load, str):
        raise InputError("--rate", None, "sessions per second: neither the trace nor the deployment says")
    per_s = rate or float(np.asarray(study.workload.sessions_per_second))
    return np.cumsum(np.random.default_rng(seed).exponential(1.0 / per_s, sessions))


def _start_note(trace: Trace, study: Study, rate: float | None, start_s: Floats) -> str:
    if not np.isfinite(start_s).all():
        return f"replayed: {int(np.isfinite(start_s).sum()):,} sessions at once, another one when one ends"
    if rate is None and trace.absolute and np.isfinite(trace.start_s[trace.first]).all():
        return f"replayed: sessions start as recorded, over {np.ptp(start_s):,.0f} s"
    per_s = rate or float(np.asarray(study.workload.sessions_per_second))
    return f"replayed: sessions start at random, {per_s:.4g} per second, over {np.ptp(start_s):,.0f} s"


def _recorded(trace: Trace, sessions: int) -> dict[str, float]:
    """What the trace itself says of the latencies; nothing of those it does not time."""
    out: dict[str, float] = {}
    steps = trace.output_tokens - 1.0
    with np.errstate(invalid="ignore", divide="ignore"):
        tpot = np.where(steps > 0.0, (trace.duration_s - trace.ttft_s) / steps, np.nan)
    for name, values in (("ttft", trace.ttft_s), ("tpot", tpot), ("call", trace.duration_s)):
        known = values[np.isfinite(values)]
        if len(known) > 0.5 * len(values):
            out[f"{name}_mean_s"] = float(known.mean())
            out |= {f"{name}_p{share}_s": float(np.quantile(known, share / 100.0)) for share in (50, 95, 99)}
    spent = np.bincount(trace.session, np.nan_to_num(trace.duration_s) + np.nan_to_num(trace.gap_s), sessions)
    if np.isfinite(trace.duration_s).all():
        out |= {f"session_p{share}_s": float(np.quantile(spent, share / 100.0)) for share in (50, 95, 99)}
        out["session_mean_s"] = float(spent.mean())
    return out
