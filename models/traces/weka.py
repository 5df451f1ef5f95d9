"""Claude Code sessions as kv-cache-tester writes them: one JSON object per file, with sub-agents inside.

Hashes name 64-token blocks of the whole prefix within one file. A sub-agent is a session of its own.
"""

from collections.abc import Iterator
from math import nan
from pathlib import Path
from typing import Any

from breakeven.models.inputs import InputError
from breakeven.models.traces.rows import BadRows, Options, RowFault, optional, parsed, quantity, reading
from breakeven.models.traces.trace import Calls, Reading, Trace

LONGEST_FILE = 1 << 30  # characters


def read_weka(path: Path, options: Options, guessed: bool) -> Trace:
    """The session in a file, or those in a folder of *.json files."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise InputError("folder", str(path), "a folder with *.json files")
    calls, bad = Calls(), BadRows(str(path), options.skip_bad_rows)
    agents = 0
    for file in files:
        try:
            agents += _file(file, calls, bad, options)
        except RowFault as fault:
            bad.add(file.name, fault)
    left_out = bad.check(len(calls))
    inferred = [
        "cached prefixes, from block hashes and an unlimited cache within each session",
        "prefix shared by all sessions: as long as a session's tools and system prompt",
    ]
    if agents:
        kept = f"{agents:,} sub-agents"
        left_out += () if options.subagents else (f"{kept}, which subagents: false leaves out",)
        inferred += [f"{kept} as sessions of their own"] if options.subagents else []
    read = ("sessions", "gaps (the client's delay, whole seconds)", "durations", "prompt and output tokens", "turns")
    found = Reading(str(path), "weka", guessed, read, tuple(inferred), left_out)
    return calls.trace(found, absolute=False, unlimited_cache=True, block_tokens=64)


def _file(file: Path, calls: Calls, bad: BadRows, options: Options) -> int:
    """Add the calls of one session file; how many sub-agents it has."""
    with reading(file) as text:
        session = parsed(text.read(LONGEST_FILE))
    if not isinstance(session, dict) or not isinstance(session.get("requests"), list):
        raise RowFault("no session: an object with `requests`")
    block = quantity("block_size", session.get("block_size", 64), 1.0)
    seen: set[int] = set()
    agents = 0
    for where, number, agent, request, shared in _requests(session):
        agents += agent is not None and number == 0
        if agent is not None and not options.subagents:
            continue
        try:
            _add(calls, (file.name, agent), number, request, shared, block, seen)
        except RowFault as fault:
            bad.add(f"{file.name} {where}", fault)
    return agents


def _requests(session: dict[str, Any]) -> Iterator[tuple[str, int, int | None, Any, float]]:
    """Where, position, sub-agent (or None), request, shared prefix tokens."""
    shared, position = _prefix(session), 0
    for i, request in enumerate(session["requests"]):
        inner = request.get("requests") if isinstance(request, dict) else None
        if isinstance(inner, list) and request.get("type") == "subagent":
            prefix = _prefix(request)
            for j, call in enumerate(inner):
                yield f"request {i} call {j}", j, i, call, prefix
        else:
            yield f"request {i}", position, None, request, shared
            position += 1


def _prefix(holder: dict[str, Any]) -> float:
    return sum(optional(name, holder.get(name, 0)) for name in ("tool_tokens", "system_tokens"))


def _add(
    calls: Calls,
    session: tuple[str, int | None],
    number: int,
    request: Any,
    shared: float,
    block: float,
    seen: set[int],
) -> None:
    if not isinstance(request, dict):
        raise RowFault("no object")
    prompt = quantity("in", request.get("in"), 1.0)
    ids = request.get("hash_ids", [])
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise RowFault("hash_ids is no list of whole numbers")
    values = {
        "start_s": optional("t", request.get("t"), 0.0, 1e12),
        "duration_s": optional("api_time", request.get("api_time"), 0.0, 1e9),
        "gap_s": optional("think_time", request.get("think_time"), 0.0, 1e9),
        "output_tokens": quantity("out", request.get("out")),
    }
    held = 0
    while held < len(ids) and ids[held] in seen:
        held += 1
    seen.update(ids)
    kinds = request.get("input_types")
    person = float("tool_result" not in kinds) if isinstance(kinds, list) and kinds else nan
    cached = min(held * block, prompt) if ids else nan
    calls.add(
        session, number, **values, prompt_tokens=prompt, cached_tokens=cached, shared_tokens=shared, person=person
    )
