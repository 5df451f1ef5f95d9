"""A recorded workload in one normal form: sessions of calls as flat arrays, and what of it was read or inferred."""

from array import array
from collections.abc import Hashable
from dataclasses import dataclass, replace
from math import isnan, nan

import numpy as np
from numpy.typing import NDArray

from breakeven.models.inputs import InputError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Reading:
    """How a trace came to be: what its file says, what was concluded from it, what was left out."""

    file: str
    format: str
    guessed: bool  # the format was told from the file's first bytes
    read: tuple[str, ...]
    inferred: tuple[str, ...]
    left_out: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The same for a person, one statement a line."""
        found = [f"format: {self.format}" + (" (guessed from the file)" if self.guessed else "")]
        found += [f"read: {', '.join(self.read)}"] if self.read else []
        found += [f"inferred: {text}" for text in self.inferred]
        return found + [f"left out: {text}" for text in self.left_out]


@dataclass(frozen=True)
class Trace:
    """Calls of recorded sessions, session after session, in the order they were made; nan is not known.

    Cached tokens are the start of the prompt that was held already: by an unlimited cache where the file has
    hashes, by the cache of the day where it has a service's count.
    """

    session: NDArray[np.int64]
    index: NDArray[np.int64]  # in the session, from 0
    start_s: Floats  # since the file's epoch, or the session's start: `absolute`
    duration_s: Floats  # of the call
    ttft_s: Floats  # time to its first token
    gap_s: Floats  # from the previous call's end, nan in first calls
    prompt_tokens: Floats  # whole prompt, cached part included
    output_tokens: Floats  # thinking included
    thinking_tokens: Floats
    cached_tokens: Floats
    shared_tokens: Floats  # start of the prompt common to all sessions: system prompt and tools
    tool_time_s: Floats  # tools ran this long before the call
    person: Floats  # 1: a person's turn, 0: a tool's result
    images: Floats
    absolute: bool  # start times of different sessions can be compared
    unlimited_cache: bool  # cached tokens are an unlimited cache's: fewer than the previous prompt means a break
    block_tokens: float  # the grain of cached tokens
    reading: Reading

    @property
    def sessions(self) -> int:
        """Number of sessions."""
        return int(self.session[-1]) + 1

    @property
    def first(self) -> NDArray[np.bool_]:
        """Calls that begin a session."""
        return self.index == 0

    @property
    def hit_ratio(self) -> float:
        """Share of all prompt tokens that were cached; nan where no call says."""
        known = np.isfinite(self.cached_tokens)
        total = float(self.prompt_tokens[known].sum())
        return float(self.cached_tokens[known].sum()) / total if total else nan

    def summary(self) -> str:
        """Counts in a line."""
        hit = f", {self.hit_ratio:.1%} of the prompt tokens cached" if np.isfinite(self.hit_ratio) else ""
        return f"{self.sessions:,} sessions, {len(self.session):,} calls{hit}"


_COLUMNS = (
    "start_s",
    "duration_s",
    "ttft_s",
    "gap_s",
    "prompt_tokens",
    "output_tokens",
    "thinking_tokens",
    "cached_tokens",
    "shared_tokens",
    "person",
    "images",
)


class Calls:
    """Collects calls in any order, as packed numbers; `trace` puts them into sessions."""

    def __init__(self) -> None:
        self._columns = {name: array("d") for name in _COLUMNS}
        self._session, self._order = array("q"), array("d")
        self._ids: dict[Hashable, int] = {}
        self._tools: list[tuple[int, float, float]] = []

    def __len__(self) -> int:
        return len(self._session)

    def add(self, session: Hashable, order: float = nan, **values: float) -> None:
        """A call of `session` (None: of a session of its own), at `order` in it or by its start."""
        key = ("alone", len(self)) if session is None else session
        self._session.append(self._ids.setdefault(key, len(self._ids)))
        start = values.get("start_s", nan)
        self._order.append(start if isnan(order) else order)
        for name, column in self._columns.items():
            column.append(values.get(name, nan))

    def add_tool(self, session: Hashable, start_s: float, end_s: float) -> None:
        """A tool that ran in `session`; it counts for the session's next call."""
        self._tools.append((self._ids.setdefault(session, len(self._ids)), start_s, end_s))

    def trace(
        self, reading: Reading, absolute: bool, unlimited_cache: bool = False, block_tokens: float = 128.0
    ) -> Trace:
        """The sessions, in order of first appearance."""
        if not len(self):
            raise InputError("rows", 0, "no call with token counts in it", reading.file)
        session, order = np.array(self._session, np.int64), np.array(self._order)
        by = np.lexsort((np.nan_to_num(order, nan=np.inf), session))
        labels = session[by]
        first = np.append(True, labels[1:] != labels[:-1])
        start = np.flatnonzero(first)
        number = np.cumsum(first) - 1
        values = {name: np.array(column)[by] for name, column in self._columns.items()}
        gap, notes = _gaps(values, first)
        values["gap_s"] = gap
        tools = self._tool_times(labels, values["start_s"])
        if self._tools and not np.isfinite(values["person"]).any():
            values["person"] = (first | np.isnan(tools)).astype(float)
            notes.append("turns: a tool's where one ran before the call, else a person's")
        found = replace(reading, inferred=(*reading.inferred, *notes))
        index = np.arange(len(labels)) - start[number]
        return Trace(
            session=number,
            index=index,
            tool_time_s=tools,
            absolute=absolute,
            unlimited_cache=unlimited_cache,
            block_tokens=block_tokens,
            reading=found,
            **values,
        )

    def _tool_times(self, labels: NDArray[np.int64], start_s: Floats) -> Floats:
        """Seconds from the first tool's start to the last one's end, of the tools before each call."""
        begun, ended = np.full(len(labels), np.inf), np.full(len(labels), -np.inf)
        for session, start, end in self._tools:
            low, high = np.searchsorted(labels, session), np.searchsorted(labels, session, side="right")
            at = low + np.searchsorted(start_s[low:high], start)
            if at < high:
                begun[at], ended[at] = min(begun[at], start), max(ended[at], end)
        return np.where(np.isfinite(ended), np.maximum(ended - np.where(np.isfinite(begun), begun, 0.0), 0.0), nan)


def _gaps(values: dict[str, Floats], first: NDArray[np.bool_]) -> tuple[Floats, list[str]]:
    """Gaps as recorded, else from the previous end (or start) to the start; and what was inferred of them."""
    start, duration, gap = values["start_s"], values["duration_s"], values["gap_s"]
    recorded = np.isfinite(gap) & ~first
    before = np.append(nan, start[:-1])
    took = np.append(nan, duration[:-1])
    derived = start - before - np.nan_to_num(took)
    use = ~recorded & ~first & np.isfinite(derived)
    out = np.where(recorded, gap, np.where(use, np.maximum(derived, 0.0), nan))
    notes = []
    ends = int(np.sum(use & np.isfinite(took)))
    if ends:
        notes.append(f"{ends:,} gaps, from the previous call's end to the next one's start")
    starts = int(np.sum(use & ~np.isfinite(took)))
    if starts:
        notes.append(
            f"{starts:,} gaps, from start to start: they hold the previous call itself, whose length is unknown"
        )
    overlap = int(np.sum(use & (derived < 0.0)))
    if overlap:
        notes.append(f"{overlap:,} calls start before the session's previous call ends: a gap of 0 s")
    return np.where(first, nan, out), notes
