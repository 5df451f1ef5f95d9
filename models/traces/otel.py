"""OpenTelemetry gen_ai spans as JSON lines: a span a line, or `{"spans": […]}`, or an OTLP export a line.

Model calls are spans with token usage; `execute_tool` spans give tool times. Old attribute names are known.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from breakeven.models.traces.rows import BadRows, Options, Row, RowFault, instant, json_rows, optional, quantity, take
from breakeven.models.traces.trace import Calls, Reading, Trace

_USAGE = "gen_ai.usage."
_PROMPT = (_USAGE + "input_tokens", _USAGE + "prompt_tokens", "llm.usage.prompt_tokens")
_OUTPUT = (_USAGE + "output_tokens", _USAGE + "completion_tokens", "llm.usage.completion_tokens")
_CACHED = (_USAGE + "cache_read.input_tokens", _USAGE + "cache_read_input_tokens", _USAGE + "input_tokens.cached")
_THINKING = (_USAGE + "reasoning.output_tokens", _USAGE + "output_tokens.reasoning", _USAGE + "reasoning_tokens")
_SESSION = ("gen_ai.conversation.id", "session.id")
_START = ("start_time", "startTime", "start_time_unix_nano", "startTimeUnixNano")
_END = ("end_time", "endTime", "end_time_unix_nano", "endTimeUnixNano")
_CALLS = ("chat", "text_completion", "generate_content", "completion")


def read_otel(path: Path, options: Options, guessed: bool) -> Trace:
    """The spans in `path`: sessions by conversation, else by trace."""
    calls, bad, by = Calls(), BadRows(str(path), options.skip_bad_rows), {"trace": 0}

    def use(span: dict[str, Any]) -> None:
        about = _attributes(span.get("attributes"))
        operation = about.get("gen_ai.operation.name")
        prompt = _first(about, _PROMPT)
        if operation != "execute_tool" and operation not in _CALLS and (prompt is None or operation is not None):
            return
        session = _first(about, _SESSION) or _first(span, ("trace_id", "traceId")) or _context(span)
        if not isinstance(session, str | int):
            raise RowFault("neither gen_ai.conversation.id nor trace_id")
        start = instant("start time", _first(span, _START), options.time_unit)
        end = instant("end time", _first(span, _END), options.time_unit)
        if end < start:
            raise RowFault("ends before it starts")
        if operation == "execute_tool":
            calls.add_tool(session, start, end)
            return
        values = {
            "prompt_tokens": quantity("gen_ai.usage.input_tokens", prompt, 1.0),
            "output_tokens": quantity("gen_ai.usage.output_tokens", _first(about, _OUTPUT)),
            "cached_tokens": optional("cached tokens", _first(about, _CACHED)),
            "thinking_tokens": optional("reasoning tokens", _first(about, _THINKING)),
        }
        values["cached_tokens"] = min(values["cached_tokens"], values["prompt_tokens"])
        by["trace"] += _first(about, _SESSION) is None
        calls.add(session, start_s=start, duration_s=end - start, **values)

    take(_spans(json_rows(path, bad)), use, bad)
    left_out = bad.check(len(calls))
    sessions = "sessions: the spans of one trace_id" if by["trace"] else ""
    read = ("start and end times", "prompt and output tokens", "tool times", *(() if sessions else ("sessions",)))
    inferred = (sessions,) if sessions else ()
    return calls.trace(Reading(str(path), "otel", guessed, read, inferred, left_out), absolute=True)


def _spans(rows: Iterator[Row]) -> Iterator[Row]:
    """Every span of every line; a line's trace_id holds for its spans."""
    for where, row in rows:
        inner = _inside(row)
        if inner is None:
            yield where, row
            continue
        shared = {key: row[key] for key in ("trace_id", "traceId") if key in row}
        for i, span in enumerate(inner):
            yield f"{where} span {i}", {**shared, **(span if isinstance(span, dict) else {"attributes": "no object"})}


def _inside(row: dict[str, Any]) -> list[Any] | None:
    """The spans a line holds, at any of the depths an export has; None when it is a span itself."""
    if isinstance(row.get("spans"), list):
        return row["spans"]
    found: list[Any] | None = None
    for key in ("resourceSpans", "resource_spans", "scopeSpans", "scope_spans"):
        if isinstance(row.get(key), list):
            found = found or []
            for part in row[key]:
                found += (_inside(part) or []) if isinstance(part, dict) else []
    return found


def _attributes(value: object) -> dict[str, Any]:
    """Attributes as a mapping; OTLP writes a list of {key, value: {intValue: …}}."""
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RowFault("attributes is no mapping")
    return {str(item.get("key")): _scalar(item.get("value")) for item in value}


def _scalar(value: Any) -> Any:
    return next(iter(value.values()), None) if isinstance(value, dict) else value


def _first(row: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _context(span: dict[str, Any]) -> Any:
    context = span.get("context")
    return context.get("trace_id") if isinstance(context, dict) else None
