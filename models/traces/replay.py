"""A trace as sessions of calls, in place of sampled ones: what a prompt consists of is derived here.

Of a call after the first, growth is its prompt less the previous prompt; of that, the previous output up to
growth - 1 tokens is kept, and the rest is observation. Its prefix is broken where an unlimited cache holds less
than 95 % of the previous prompt (and a block less than it), or, without such a cache's record, where the prompt
shrank. Gaps are kept as they are, so that a replay is closed-loop: a call waits for the one before it.
"""

from dataclasses import replace
from math import floor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from breakeven.models.inputs import InputError
from breakeven.models.sessions import Sessions
from breakeven.models.traces.trace import Floats, Trace

INTACT = 0.95  # share of the previous prompt that a whole prefix keeps
LEAST_BREAKS = 20  # to tell the shared prefix from what survives them
COMPACT_TO = 32_768


class Turns(NamedTuple):
    """What each call's prompt is made of; first calls have no growth and no break."""

    previous_prompt: Floats
    growth: Floats  # new prompt tokens, the previous output included
    broken: NDArray[np.bool_]
    shared: Floats
    notes: tuple[str, ...]  # what was inferred


def turns(trace: Trace, shared_prefix_tokens: float | None = None) -> Turns:
    """Growth, breaks and shared prefixes of a trace, in tokens."""
    first, prompt, cached = trace.first, trace.prompt_tokens, trace.cached_tokens
    before = np.where(first, 0.0, np.append(0.0, prompt[:-1]))
    known = np.isfinite(cached) & trace.unlimited_cache
    intact = np.minimum(INTACT * before, before - trace.block_tokens)
    broken = ~first & np.where(known, cached < intact, prompt < before)
    shared, source = _shared(trace, broken, before, shared_prefix_tokens)
    fresh = np.where(known & ~broken, prompt - np.nan_to_num(cached), 1.0)
    growth = np.clip(np.where(prompt > before, prompt - before, fresh), 1.0, prompt - shared)
    rule = "cached prefixes" if known.any() else "prompts that shrink"
    notes = (f"{int(broken.sum()):,} prefix breaks, from {rule}",) if (~first).any() else ()
    return Turns(before, np.where(first, 0.0, growth), broken, shared, (*notes, source))


def _shared(trace: Trace, broken: NDArray[np.bool_], before: Floats, given: float | None) -> tuple[Floats, str]:
    """The always cached prefix of each call, at most all but one token, and where it comes from."""
    most, cached, first = trace.prompt_tokens - 1.0, trace.cached_tokens, trace.first
    survived = cached[broken & (cached < 0.5 * before)]
    if given is not None:
        return np.minimum(given, most), f"shared prefix: {given:,.0f} tokens, as given"
    if np.isfinite(trace.shared_tokens).any():
        recorded = np.nan_to_num(trace.shared_tokens)
        return np.minimum(recorded, most), "shared prefix: as the trace has it"
    if np.any(cached[first] > 0.0):
        own = np.nan_to_num(cached[first])[trace.session]
        return np.minimum(own, most), "shared prefix: what is cached of a session's first prompt"
    if trace.unlimited_cache and len(survived) >= LEAST_BREAKS:
        found = float(np.median(survived))
        note = f"shared prefix: {found:,.0f} tokens, the median that outlives {len(survived):,} prefix breaks"
        return np.minimum(found, most), note
    return np.zeros(len(most)), "shared prefix: none, as nothing tells of one"


def trace_sessions(trace: Trace, shared_prefix_tokens: float | None = None) -> Sessions:
    """The trace's sessions, for the workload's moments or a replay; tokens and seconds."""
    found, first = turns(trace, shared_prefix_tokens), trace.first
    prompt, output = trace.prompt_tokens, np.maximum(trace.output_tokens, 1.0)
    thinking = np.minimum(np.nan_to_num(trace.thinking_tokens), output)
    written, thought = np.roll(output, 1), np.roll(thinking, 1)
    stripped = ~first & ~found.broken & (thought > 0.0) & (found.growth < written)
    kept = np.minimum(np.where(stripped, np.maximum(written - thought, 0.0), written), found.growth - 1.0)
    kept = np.where(first, 0.0, kept)
    anew = prompt - np.maximum(found.shared, np.nan_to_num(trace.cached_tokens) if trace.unlimited_cache else 0.0)
    return Sessions(
        session=trace.session,
        index=trace.index,
        prompt_tokens=prompt,
        shared_tokens=found.shared,
        observation_tokens=found.growth - kept,
        previous_output_kept_tokens=kept,
        stripped=stripped,
        broken=found.broken,
        compacted=found.broken & (prompt < found.previous_prompt),
        break_tokens=np.where(found.broken, np.maximum(anew, 1.0), 0.0),
        output_tokens=output,
        thinking_tokens=thinking,
        gap_after_s=_gaps_after(trace),
    )


def _gaps_after(trace: Trace) -> Floats:
    """Gap to the session's next call; an unknown one is the median of those known, or 0 where none is."""
    known = np.isfinite(trace.gap_s)
    usual = float(np.median(trace.gap_s[known])) if known.any() else 0.0
    filled = np.where(known, trace.gap_s, usual)
    last = np.append(trace.first[1:], True)
    return np.where(last, np.nan, np.roll(filled, -1))


def inferences(trace: Trace, shared_prefix_tokens: float | None = None) -> list[str]:
    """What `trace_sessions` concludes beyond what the reading says."""
    notes = list(turns(trace, shared_prefix_tokens).notes)
    unknown = int(np.sum(~np.isfinite(trace.gap_s) & ~trace.first))
    if unknown:
        notes.append(f"{unknown:,} unknown gaps: the median of those known (0 s where none is)")
    empty = int(np.sum(trace.output_tokens < 1.0))
    return notes + ([f"{empty:,} empty outputs count as one token"] if empty else [])


def fit_window(sessions: Sessions, max_context: float) -> tuple[Sessions, int]:
    """The sessions on a model of `max_context` tokens, and how many prompts had to be cut for that.

    An output is at most half of the window. A first prompt is cut to what the output leaves. A later one that
    would pass it is compacted (to 32k, at most half the window), and the session grows on from there.
    """
    output = np.minimum(sessions.output_tokens, max(max_context // 2, 1.0))
    limit = np.floor(max_context) - output
    if np.any(sessions.shared_tokens >= limit):
        most = float(sessions.shared_tokens.max())
        raise InputError("workload.shared_prefix_tokens", most, f"below {limit.min():g}, the room for a prompt")
    prompt, cut = _compacted(sessions, limit)
    if not cut.any() and np.array_equal(output, sessions.output_tokens):
        return sessions, 0
    shared = sessions.shared_tokens
    later = cut & ~sessions.first
    anew = np.minimum(np.where(later, prompt - shared, sessions.break_tokens), prompt - shared)
    grown = sessions.observation_tokens + sessions.previous_output_kept_tokens
    room = np.minimum(1.0, (prompt - shared) / np.maximum(grown, 1.0))
    return (
        replace(
            sessions,
            prompt_tokens=prompt,
            output_tokens=output,
            thinking_tokens=np.minimum(sessions.thinking_tokens, output),
            observation_tokens=np.floor(sessions.observation_tokens * room),
            previous_output_kept_tokens=np.floor(sessions.previous_output_kept_tokens * room),
            broken=sessions.broken | later,
            compacted=sessions.compacted | later,
            stripped=sessions.stripped & ~later,
            break_tokens=anew,
        ),
        int(cut.sum()),
    )


def _compacted(sessions: Sessions, limit: Floats) -> tuple[Floats, NDArray[np.bool_]]:
    """Prompts within `limit`, and which were cut; what a compaction removes stays removed until the next one."""
    prompt, cut = sessions.prompt_tokens.copy(), np.zeros(len(limit), bool)
    too_long = np.unique(sessions.session[prompt > limit])
    starts = np.flatnonzero(sessions.first)
    ends = np.append(starts[1:], len(prompt))
    for s in too_long:
        removed = 0.0
        for i in range(starts[s], ends[s]):
            if sessions.compacted[i]:
                removed = 0.0
            wanted = max(prompt[i] - removed, sessions.shared_tokens[i] + 1.0)
            if wanted > limit[i]:
                cut[i] = True
                kept = limit[i] if sessions.first[i] else min(COMPACT_TO, floor(0.5 * limit[i]))
                wanted, removed = max(kept, sessions.shared_tokens[i] + 1.0), prompt[i] - kept
            prompt[i] = wanted
    return prompt, cut
