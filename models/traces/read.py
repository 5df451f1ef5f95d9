"""Reading a trace of any known format; the format is told from the file's beginning when it is not given."""

import csv
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from breakeven.models.inputs import InputError, number, pick
from breakeven.models.traces.mooncake import read_mooncake
from breakeven.models.traces.otel import read_otel
from breakeven.models.traces.rows import UNITS, Options, reading
from breakeven.models.traces.table import MAPS, read_table
from breakeven.models.traces.trace import Trace
from breakeven.models.traces.tracelab import read_tracelab
from breakeven.models.traces.weka import read_weka

FORMATS: dict[str, Callable[[Path, Options, bool], Trace]] = {
    "mooncake": read_mooncake,
    "weka": read_weka,
    "otel": read_otel,
    "tracelab": read_tracelab,
    "table": read_table,
    **{name: partial(read_table, name=name) for name in MAPS},
}
_BEGINNING = 1 << 20  # characters looked at


def read_trace(path: str | Path, format: str | None = None, options: Options | None = None) -> Trace:
    """The trace in `path`. Raises InputError: unreadable, of no known format, malformed, or without a call."""
    path, options = Path(path), options or Options()
    if options.time_unit is not None:
        pick("time_unit", options.time_unit, UNITS)
    number("block_tokens", options.block_tokens, 1, 1e6, whole=True)
    if not path.exists():
        raise InputError("file", str(path), "no such file")
    guessed = format is None
    name = _guess(path, options) if format is None else pick("format", format, FORMATS)
    return FORMATS[name](path, options, guessed)


def _guess(path: Path, options: Options) -> str:
    if path.is_dir():
        return "weka"
    if options.columns:
        return "table"
    with reading(path) as text:
        beginning = text.read(_BEGINNING).lstrip()
    line = beginning.partition("\n")[0]
    name = _of_object(line, beginning) if beginning.startswith("{") else _of_header(line)
    if name is None:
        known = ", ".join(FORMATS)
        raise InputError("format", None, f"cannot be told from the file; name one of {known}", str(path))
    return name


def _of_object(line: str, beginning: str) -> str | None:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        return "weka" if '"requests"' in beginning else _of_words(line)
    if isinstance(row.get("requests"), list):
        return "weka"
    return _of_words(line)


_WORDS = (
    ("mooncake", ('"input_length"',)),
    ("tracelab", ('"input_tokens_total"',)),
    ("langfuse", ('"usageDetails"', '"usage_details"')),
    ("litellm", ('"prompt_tokens"',)),
    ("otel", ("gen_ai.", '"spans"', '"resourceSpans"', '"trace_id"')),
    ("calls", ('"input_tokens"',)),
)


def _of_words(line: str) -> str | None:
    return next((name for name, words in _WORDS if any(word in line for word in words)), None)


def _of_header(line: str) -> str | None:
    try:
        names = {name.strip() for name in next(csv.reader([line]), [])}
    except csv.Error:
        return None
    for name in ("azure", "burstgpt", "litellm", "calls", "langfuse"):
        of = MAPS[name].of
        if all(any(column in names for column in of[field]) for field in ("input_tokens", "output_tokens")):
            return name
    if {"usageDetails", "usage_details"} & names:
        return "langfuse"
    return None
