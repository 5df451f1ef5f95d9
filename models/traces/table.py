"""Any table of calls, CSV or JSON lines, through a map from our fields to its columns.

The maps of known exports are data: azure, burstgpt, litellm, langfuse, and `calls`, our own column names.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isnan, nan
from pathlib import Path
from typing import Any

from breakeven.models.inputs import InputError, pick
from breakeven.models.traces.rows import (
    BadRows,
    Options,
    RowFault,
    csv_rows,
    instant,
    json_rows,
    optional,
    quantity,
    reading,
    take,
)
from breakeven.models.traces.trace import Calls, Reading, Trace

FIELDS = (
    "session",
    "call",  # position in the session
    "start",
    "end",
    "duration_s",
    "first_token",  # when it came
    "ttft_s",
    "gap_s",
    "input_tokens",
    "output_tokens",
    "thinking_tokens",
    "cached_tokens",
    "cache_write_tokens",  # prompt tokens counted beside the input
    "shared_tokens",
    "turn",  # tool, or user
    "images",
    "kind",  # of the row
)


@dataclass(frozen=True)
class Columns:
    """Where our fields stand in a table: per field the columns that may hold it, dots for nested ones."""

    of: Mapping[str, tuple[str, ...]]
    absolute: bool = True  # times of different sessions can be compared
    unlimited: bool = False  # cached tokens are those of an unlimited cache, not a service's count
    separate: bool = False  # cached and thinking tokens are not counted in the input and the output
    failures: bool = False  # no output: the call failed
    calls: frozenset[str] = field(default_factory=frozenset)  # kinds of row that are model calls; empty: all
    tools: frozenset[str] = field(default_factory=frozenset)  # kinds of row that are tools


MAPS: dict[str, Columns] = {
    "azure": Columns(
        {"start": ("TIMESTAMP",), "input_tokens": ("ContextTokens",), "output_tokens": ("GeneratedTokens",)}
    ),
    "burstgpt": Columns(
        {
            "session": ("Session ID",),
            "start": ("Timestamp",),
            "duration_s": ("Elapsed time",),
            "input_tokens": ("Request tokens",),
            "output_tokens": ("Response tokens",),
        },
        failures=True,
    ),
    "litellm": Columns(
        {
            "session": ("session_id", "metadata.session_id", "trace_id", "metadata.trace_id", "end_user"),
            "start": ("startTime",),
            "end": ("endTime",),
            "duration_s": ("response_time",),
            "input_tokens": ("prompt_tokens",),
            "output_tokens": ("completion_tokens",),
            "cached_tokens": (
                "metadata.usage_object.prompt_tokens_details.cached_tokens",
                "prompt_tokens_details.cached_tokens",
                "cache_read_input_tokens",
            ),
            "thinking_tokens": (
                "metadata.usage_object.completion_tokens_details.reasoning_tokens",
                "completion_tokens_details.reasoning_tokens",
            ),
        },
        failures=True,
    ),
    "langfuse": Columns(
        {
            "session": ("sessionId", "session_id", "traceId", "trace_id"),
            "start": ("startTime", "start_time"),
            "end": ("endTime", "end_time"),
            "input_tokens": ("usageDetails.input", "usage_details.input", "promptTokens", "usage.input"),
            "output_tokens": ("usageDetails.output", "usage_details.output", "completionTokens", "usage.output"),
            "cached_tokens": (
                "usageDetails.cache_read_input_tokens",
                "usageDetails.input_cached_tokens",
                "usage_details.cache_read_input_tokens",
                "usage_details.input_cached_tokens",
            ),
            "cache_write_tokens": (
                "usageDetails.cache_creation_input_tokens",
                "usage_details.cache_creation_input_tokens",
            ),
            "thinking_tokens": ("usageDetails.output_reasoning_tokens", "usage_details.output_reasoning_tokens"),
            "kind": ("type",),
        },
        separate=True,
        calls=frozenset({"GENERATION"}),
        tools=frozenset({"TOOL"}),
    ),
    "calls": Columns(
        {
            "session": ("session",),
            "call": ("call",),
            "start": ("t_s", "start_s"),
            "duration_s": ("api_time_s", "duration_s"),
            "ttft_s": ("ttft_s",),
            "gap_s": ("think_time_s", "gap_s"),
            "input_tokens": ("input_tokens",),
            "output_tokens": ("output_tokens",),
            "thinking_tokens": ("thinking_tokens",),
            "cached_tokens": ("cached_prefix_tokens",),
            "shared_tokens": ("shared_prefix_tokens",),
            "turn": ("turn_kind",),
            "images": ("images",),
        },
        absolute=False,
        unlimited=True,
    ),
}


def read_table(path: Path, options: Options, guessed: bool, name: str = "table") -> Trace:
    """The table in `path` by the map `name`; `table` is `calls` with the columns of the options."""
    columns = MAPS["calls" if name == "table" else name]
    if options.columns:
        own = {pick("columns", ours, FIELDS): (theirs,) for ours, theirs in options.columns}
        columns = replace(columns, of={**columns.of, **own})
    elif name == "table":
        raise InputError("columns", None, "a map from input_tokens, output_tokens, session, start, … to the columns")
    rows = _Rows(columns, options)
    bad = BadRows(str(path), options.skip_bad_rows)
    source = json_rows(path, bad) if _is_json(path) else csv_rows(path, bad)
    take(source, rows.use, bad)
    left_out = bad.check(len(rows.calls))
    if rows.failed:
        left_out += (f"{rows.failed:,} failed calls, without output",)
    if rows.others:
        left_out += (f"{rows.others:,} rows that are no model call",)
    read = tuple(ours.replace("_", " ") for ours in FIELDS if ours in rows.seen)
    inferred = () if rows.named else ("sessions: none recorded, so every call is one of its own",)
    if rows.named and rows.named < len(rows.calls):
        inferred = (f"{len(rows.calls) - rows.named:,} calls without a session are one of their own",)
    found = Reading(str(path), name, guessed, read, inferred, left_out)
    absolute = columns.absolute or (name == "table" and any(ours == "start" for ours, _ in options.columns))
    return rows.calls.trace(found, absolute, columns.unlimited)


def _is_json(path: Path) -> bool:
    """Whether the first thing in the file is an object."""
    with reading(path) as text:
        return text.read(4096).lstrip().startswith("{")


class _Rows:
    """Turns rows into calls."""

    def __init__(self, columns: Columns, options: Options):
        self.columns, self.unit = columns, options.time_unit
        self.calls, self.seen = Calls(), set[str]()
        self.failed = self.others = self.named = 0

    def use(self, row: dict[str, Any]) -> None:
        value = {ours: found for ours, names in self.columns.of.items() if (found := _first(row, names)) is not None}
        kind = str(value.get("kind", ""))
        if self.columns.tools and kind in self.columns.tools:
            self._tool(value)
        elif self.columns.calls and kind not in self.columns.calls:
            self.others += 1
        else:
            self._call(value)

    def _tool(self, value: dict[str, Any]) -> None:
        start, end = self._time(value, "start"), self._time(value, "end")
        if "session" not in value or not start <= end:
            raise RowFault("a tool without session, start or end")
        self.calls.add_tool(str(value["session"]), start, end)

    def _call(self, value: dict[str, Any]) -> None:
        output = quantity("output_tokens", value.get("output_tokens"))
        prompt, cached, thinking = self._prompt(value)
        if self.columns.separate and not isnan(thinking):
            output += thinking
        if self.columns.failures and output == 0.0:
            self.failed += 1
            return
        start, end = self._time(value, "start"), self._time(value, "end")
        took = optional("duration_s", value.get("duration_s"), 0.0, 1e9)
        if isnan(took) and not isnan(end):
            if end < start:
                raise RowFault("ends before it starts")
            took = end - start
        ttft = optional("ttft_s", value.get("ttft_s"), 0.0, 1e9)
        if isnan(ttft) and "first_token" in value:
            ttft = max(self._time(value, "first_token") - start, 0.0)
        self.seen |= set(value)
        session = value.get("session")
        self.named += session is not None
        self.calls.add(
            None if session is None else str(session),
            optional("call", value.get("call"), 0.0, 1e9),
            start_s=start,
            duration_s=took,
            ttft_s=ttft,
            gap_s=optional("gap_s", value.get("gap_s"), 0.0, 1e9),
            prompt_tokens=prompt,
            output_tokens=output,
            cached_tokens=min(cached, prompt),
            thinking_tokens=min(thinking, output),
            shared_tokens=optional("shared_tokens", value.get("shared_tokens")),
            person=_person(value.get("turn")),
            images=optional("images", value.get("images")),
        )

    def _prompt(self, value: dict[str, Any]) -> tuple[float, float, float]:
        """Whole prompt, cached and thinking tokens."""
        cached = optional("cached_tokens", value.get("cached_tokens"))
        written = optional("cache_write_tokens", value.get("cache_write_tokens"))
        thinking = optional("thinking_tokens", value.get("thinking_tokens"))
        prompt = quantity("input_tokens", value.get("input_tokens"))
        if self.columns.separate:
            prompt += sum(tokens for tokens in (cached, written) if not isnan(tokens))
        return quantity("input_tokens", prompt, 1.0), cached, thinking

    def _time(self, value: dict[str, Any], name: str) -> float:
        return instant(name, value[name], self.unit) if name in value else nan


def _person(turn: Any) -> float:
    """1 for a person's turn, 0 for a tool's, nan for any other word."""
    return {"user": 1.0, "human": 1.0, "tool": 0.0}.get(str(turn), nan)


def _first(row: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((found for name in names if (found := _at(row, name)) is not None), None)


def _at(row: dict[str, Any], name: str) -> Any:
    """The value of a column, or of a path of keys; an object may stand in a cell as JSON."""
    if name in row or "." not in name:
        return row.get(name)
    head, _, rest = name.partition(".")
    inner = row.get(head)
    if isinstance(inner, str) and inner.startswith("{"):
        try:
            inner = json.loads(inner)
        except (ValueError, RecursionError):
            return None
    return _at(inner, rest) if isinstance(inner, dict) else None
