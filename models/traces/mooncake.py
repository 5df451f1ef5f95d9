"""Mooncake JSON lines: timestamp, input_length, output_length and a chain of block hashes per request.

A hash names the whole prefix up to its block, over the whole file. So a block seen before was cached, and a
request whose chain extends all complete blocks of an earlier, shorter prompt (two at least: the first is often
one system prompt for all) continues its session; each request is continued once, others branch off anew.
"""

from pathlib import Path
from typing import Any

from breakeven.models.traces.rows import UNITS, BadRows, Options, RowFault, json_rows, optional, quantity, take
from breakeven.models.traces.trace import Calls, Reading, Trace

LEAST_BLOCKS = 2


class _Chains:
    """Blocks seen so far, and the sessions that end in them."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.tails: dict[int, tuple[int, float, int]] = {}  # last complete block -> blocks, prompt, session
        self.sessions = 0

    def cached_blocks(self, ids: list[int]) -> int:
        """Leading blocks that an earlier request had; remembers the others."""
        held = 0
        while held < len(ids) and ids[held] in self.seen:
            held += 1
        self.seen.update(ids)
        return held

    def session(self, ids: list[int], prompt: float) -> int:
        """The session that the request continues, or a new one."""
        number = self._continued(ids, prompt)
        if number is None:
            number, self.sessions = self.sessions, self.sessions + 1
        whole = len(ids) - 1
        if whole >= LEAST_BLOCKS:
            self.tails[ids[whole - 1]] = (whole, prompt, number)
        return number

    def _continued(self, ids: list[int], prompt: float) -> int | None:
        for blocks in range(len(ids), LEAST_BLOCKS - 1, -1):
            found = self.tails.get(ids[blocks - 1])
            if found is not None and found[0] == blocks and prompt > found[1]:
                del self.tails[ids[blocks - 1]]
                return found[2]
        return None


def read_mooncake(path: Path, options: Options, guessed: bool) -> Trace:
    """The trace in `path`; times in ms unless `time_unit` says otherwise."""
    calls, bad, chains = Calls(), BadRows(str(path), options.skip_bad_rows), _Chains()
    scale = UNITS[options.time_unit or "ms"]
    named = 0

    def use(row: dict[str, Any]) -> None:
        nonlocal named
        prompt = quantity("input_length", row.get("input_length"), 1.0)
        output = quantity("output_length", row.get("output_length"))
        start = optional("timestamp", row.get("timestamp"), 0.0, 1e18) * scale
        gap = optional("delay", row.get("delay"), 0.0, 1e12) * scale
        ids = _hashes(row.get("hash_ids", []), prompt, options.block_tokens)
        own = row.get("session_id")
        if own is not None and not isinstance(own, str | int):
            raise RowFault(f"session_id = {str(own)[:30]!r}, not a name")
        cached = min(chains.cached_blocks(ids) * options.block_tokens, prompt) if ids else float("nan")
        named += own is not None
        session = ("named", own) if own is not None else chains.session(ids, prompt)
        calls.add(session, start_s=start, gap_s=gap, prompt_tokens=prompt, output_tokens=output, cached_tokens=cached)

    take(json_rows(path, bad), use, bad)
    left_out = bad.check(len(calls))
    inferred = [f"cached prefixes, from {options.block_tokens}-token block hashes and an unlimited cache"]
    if named < len(calls):
        inferred.append("sessions: a prompt that extends all complete blocks of an earlier one continues it")
    read = ("start times", "prompt and output tokens", *(("session names",) if named else ()))
    found = Reading(str(path), "mooncake", guessed, read, tuple(inferred), left_out)
    return calls.trace(found, absolute=True, unlimited_cache=True, block_tokens=options.block_tokens)


def _hashes(value: object, prompt: float, block: int) -> list[int]:
    """The chain, whose length must fit the prompt."""
    if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        raise RowFault("hash_ids is no list of whole numbers")
    expected = -(-int(prompt) // block)
    if value and len(value) != expected:
        raise RowFault(f"{len(value)} hash_ids for {prompt:g} tokens, not {expected}: is a block {block} tokens?")
    return value
