"""TraceLab rounds: a JSON line per model call of a coding agent, with its events and tools.

A round begins at its last input (a message or a tool's result) and ends at the last thing the model said.
"""

from math import isnan, nan
from pathlib import Path
from typing import Any

from breakeven.models.traces.rows import BadRows, Options, RowFault, instant, json_rows, optional, quantity, take
from breakeven.models.traces.trace import Calls, Reading, Trace

_INPUTS = ("user_message", "tool_result")


def read_tracelab(path: Path, options: Options, guessed: bool) -> Trace:
    """The rounds in `path`."""
    calls, bad = Calls(), BadRows(str(path), options.skip_bad_rows)

    def use(row: dict[str, Any]) -> None:
        session = row.get("session_id")
        if not isinstance(session, str):
            raise RowFault("session_id is missing")
        start, end = _times(row.get("timing_events"))
        values = {
            "prompt_tokens": quantity("input_tokens_total", row.get("input_tokens_total"), 1.0),
            "output_tokens": quantity("output_tokens", row.get("output_tokens")),
            "thinking_tokens": optional("reasoning_output_tokens", row.get("reasoning_output_tokens")),
            "cached_tokens": optional("prefix_tokens", row.get("prefix_tokens")),
            "person": float(row.get("first_input_event_type") == "user_message"),
        }
        tools = _tools(row.get("tools"))
        order = quantity("round_index", row.get("round_index"), 0.0, 1e9)
        calls.add(session, order, start_s=start, duration_s=end - start, **values)
        for begun, ended in tools:
            calls.add_tool(session, begun, ended)

    take(json_rows(path, bad), use, bad)
    left_out = bad.check(len(calls))
    read = ("sessions", "prompt and output tokens", "cached prefixes (the service's count)", "tool times")
    inferred = ("starts: a round's last input event; ends: its last event",)
    return calls.trace(Reading(str(path), "tracelab", guessed, read, inferred, left_out), absolute=True)


def _objects(value: object, name: str) -> list[dict[str, Any]]:
    rows = [] if value is None else value
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise RowFault(f"{name} is no list of objects")
    return rows


def _times(events: object) -> tuple[float, float]:
    """Start and end of a round; nan when it has no input event."""
    rows = _objects(events, "timing_events")
    inputs = [instant("timestamp", e.get("timestamp")) for e in rows if e.get("event_type") in _INPUTS]
    said = [instant("timestamp", e.get("timestamp")) for e in rows if e.get("event_type") not in _INPUTS]
    start = max(inputs, default=nan)
    return start, max([*said, start]) if said else nan


def _tools(tools: object) -> list[tuple[float, float]]:
    """Start and end of each tool the round called."""
    found = []
    for tool in _objects(tools, "tools"):
        took = optional("tool_wall_latency_ms", tool.get("tool_wall_latency_ms"), 0.0, 1e12)
        if not isnan(took) and tool.get("emitted_at") is not None:
            start = instant("emitted_at", tool["emitted_at"])
            found.append((start, start + 1e-3 * took))
    return found
