"""Rows of a trace file, one at a time, never the whole text; malformed ones are counted, named, refused or skipped."""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite, nan
from pathlib import Path
from typing import Any, TextIO, cast

from breakeven.models.inputs import InputError

MOST_TOKENS = 1e7
SHOWN, LONGEST_LINE = 3, 1 << 26  # malformed rows quoted; characters of a line


class RowFault(ValueError):
    """What is wrong with a row, in a few words."""


@dataclass(frozen=True)
class Options:
    """What a format cannot say of itself."""

    skip_bad_rows: bool = False
    block_tokens: int = 512  # of a hashed block (mooncake)
    time_unit: str | None = None  # of plain numbers in the time column: s, ms, us, ns
    subagents: bool = True  # weka: sub-agents as sessions of their own
    columns: tuple[tuple[str, str], ...] = ()  # table: field, column


UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


class BadRows:
    """Malformed rows of a file: how many, and the first few."""

    def __init__(self, file: str, skip: bool):
        self.file, self.skip, self.count = file, skip, 0
        self.first: list[str] = []

    def add(self, where: str, why: object) -> None:
        """Note the row at `where`."""
        self.count += 1
        if len(self.first) < SHOWN:
            self.first.append(f"{where}: {' '.join(str(why).split())[:120]}")

    def check(self, good: int) -> tuple[str, ...]:
        """What is left out, for the report; InputError unless malformed rows may be skipped."""
        if not self.count:
            return ()
        quoted = "; ".join(self.first) + ("; …" if self.count > len(self.first) else "")
        if not self.skip or not good:
            advice = "no row is usable" if not good else "mend them, or leave them out with skip_bad_rows"
            raise InputError(
                "rows", f"{self.count:,} malformed of {self.count + good:,}", f"{quoted}; {advice}", self.file
            )
        return (f"{self.count:,} malformed rows ({quoted})",)


Row = tuple[str, dict[str, Any]]  # where it stands, its fields


def take(rows: Iterable[Row], use: Callable[[dict[str, Any]], None], bad: BadRows) -> None:
    """`use` every row; those it finds fault with are counted."""
    for where, row in rows:
        try:
            use(row)
        except RowFault as fault:
            bad.add(where, fault)


@contextmanager
def reading(path: Path) -> Iterator[TextIO]:
    """The file as text, gzip or plain; what goes wrong while it is read as InputError."""
    file = str(path)
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            body = cast(Any, gzip.GzipFile(fileobj=raw) if packed else raw)
            yield io.TextIOWrapper(body, encoding="utf-8-sig", newline="")
    except UnicodeDecodeError:
        raise InputError("file", path.name, "not UTF-8 text", file) from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise InputError("file", path.name, "a gzip file that is cut short or damaged", file) from None
    except OSError as error:
        raise InputError("file", file, f"cannot be read: {error.strerror or error}") from None


def _lines(text: TextIO, file: str) -> Iterator[tuple[int, str]]:
    number = 0
    while line := text.readline(LONGEST_LINE):
        number += 1
        if len(line) == LONGEST_LINE:
            raise InputError("file", Path(file).name, f"line {number} is longer than {LONGEST_LINE:,} characters", file)
        yield number, line


def parsed(text: str) -> Any:
    """JSON in `text`; RowFault where there is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise RowFault(f"no JSON: {text.strip()[:40]!r}") from None


def json_rows(path: Path, bad: BadRows) -> Iterator[Row]:
    """The objects of a JSON-lines file."""
    with reading(path) as text:
        for number, line in _lines(text, str(path)):
            if not line.strip():
                continue
            try:
                row = parsed(line)
            except RowFault as fault:
                bad.add(f"line {number}", fault)
                continue
            if isinstance(row, dict):
                yield f"line {number}", row
            else:
                bad.add(f"line {number}", f"no object: {line.strip()[:40]!r}")


def csv_rows(path: Path, bad: BadRows) -> Iterator[Row]:
    """The rows of a CSV file with a header; empty cells are absent."""
    with reading(path) as text:
        rows = csv.reader(line for _, line in _lines(text, str(path)))
        header: list[str] | None = None
        while True:
            try:
                cells = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                bad.add(f"line {rows.line_num}", error)
                continue
            if header is None:
                header = [name.strip() for name in cells]
            elif len(cells) > len(header):
                bad.add(f"line {rows.line_num}", f"{len(cells)} cells under {len(header)} headings")
            elif cells:
                filled = {name: cell.strip() for name, cell in zip(header, cells, strict=False) if cell.strip()}
                yield f"line {rows.line_num}", filled


def quantity(name: str, value: object, low: float = 0.0, high: float = MOST_TOKENS) -> float:
    """`value`, a number or its text, in [low, high]; RowFault otherwise."""
    if value is None:
        raise RowFault(f"{name} is missing")
    try:
        found = nan if isinstance(value, bool) else float(cast(Any, value))
    except (TypeError, ValueError, OverflowError):
        found = nan
    if not low <= found <= high:
        raise RowFault(f"{name} = {str(value)[:30]!r}, not a number from {low:g} to {high:g}")
    return found


def optional(name: str, value: object, low: float = 0.0, high: float = MOST_TOKENS) -> float:
    """The same, and nan for an absent value."""
    return nan if value is None else quantity(name, value, low, high)


def instant(name: str, value: object, unit: str | None = None) -> float:
    """Seconds since the epoch of a number in `unit` (by its size when not given) or of an ISO date and time."""
    if value is None:
        raise RowFault(f"{name} is missing")
    try:
        number = nan if isinstance(value, bool) else float(cast(Any, value))
    except (TypeError, ValueError, OverflowError):
        return _date(name, value)
    if not isfinite(number) or abs(number) > 1e20:
        raise RowFault(f"{name} = {str(value)[:30]!r}, not a time")
    if unit is None:
        unit = "ns" if number > 1e17 else "us" if number > 1e14 else "ms" if number > 1e11 else "s"
    return number * UNITS[unit]


def _date(name: str, value: object) -> float:
    try:
        found = datetime.fromisoformat(cast(str, value).strip())
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise RowFault(f"{name} = {str(value)[:30]!r}, not a time") from None
