"""A simulation as a Chrome trace (chrome://tracing, ui.perfetto.dev): pools, engines, passes, transfers, sessions."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from breakeven.models.simulation import Simulated

SESSIONS = 64  # shown
Event = dict[str, Any]
_PREFILL, _DECODE, _LINK, _SESSION = 1, 2, 3, 4


def write_trace(run: Simulated, path: Path) -> None:
    """Write the logged passes of a simulation and what its first sessions did meanwhile."""
    events = [*_names(run), *_passes(run), *_transfers(run), *_sessions(run)]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _bar(name: str, pid: int, tid: int, start_s: float, end_s: float, **details: Any) -> Event:
    """A bar of a lane; Chrome traces count microseconds."""
    span = {"ts": round(start_s * 1e6, 1), "dur": round((end_s - start_s) * 1e6, 1)}
    return {"name": name, "ph": "X", "pid": pid, "tid": tid, **span, "args": details}


def _names(run: Simulated) -> Iterator[Event]:
    split = run.plan.decode_engines > 0
    names = {_PREFILL: "prefill pool" if split else "pool", _SESSION: "sessions"}
    if split:
        names |= {_DECODE: "decode pool", _LINK: "KV links"}
    for pid, name in names.items():
        yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}


def _until(run: Simulated) -> float:
    return float(run.log["end_s"].max()) if len(run.log) else run.plan.log_start_s


def _passes(run: Simulated) -> Iterator[Event]:
    for row in run.log:
        pid = _PREFILL if row.engine < run.plan.prefill_engines else _DECODE
        name = "decode" if row.tokens == 0.0 else "prefill" if row.decoding == 0 else "prefill + decode"
        details = {"sequences": int(row.decoding), "steps": int(row.steps), "prefill tokens": float(row.tokens)}
        yield _bar(name, pid, int(row.engine), row.start_s, row.end_s, **details)


def _transfers(run: Simulated) -> Iterator[Event]:
    plan = run.plan
    start = run.calls["transfer_s"]
    with np.errstate(invalid="ignore"):
        shown = np.flatnonzero((start >= plan.log_start_s) & (start <= _until(run)))
    for c in shown:
        call = run.calls[c]
        end = call.transfer_s + plan.link_latency_s + plan.link_token_s * call.prompt
        details = {"session": int(call.session), "tokens": float(call.prompt)}
        yield _bar("KV transfer", _LINK, int(call.prefill_engine), call.transfer_s, end, **details)


def _sessions(run: Simulated) -> Iterator[Event]:
    """What the first sessions of the span did: wait, prefill, transfer, decode, and the gaps between calls."""
    start, until = run.plan.log_start_s, _until(run)
    with np.errstate(invalid="ignore"):
        inside = np.flatnonzero((run.calls["end_s"] >= start) & (run.calls["arrival_s"] <= until))
    shown = np.unique(run.calls["session"][inside])[:SESSIONS]
    for c in inside[np.isin(run.calls["session"][inside], shown)]:
        call = run.calls[c]
        lane = int(call.session)
        moments = [
            ("wait", call.arrival_s),
            ("prefill", call.prefill_start_s),
            ("transfer", call.prefill_end_s),
            ("decode", call.first_s),
        ]
        ends = [moment for _, moment in moments[1:]] + [call.end_s]
        for (name, begin), end in zip(moments, ends, strict=True):
            if end > begin:
                yield _bar(name, _SESSION, lane, begin, end, prompt=float(call.prompt), output=float(call.output))
        if not call.last and np.isfinite(call.gap_s):
            yield _bar("tool", _SESSION, lane, call.end_s, min(call.end_s + call.gap_s, until))
