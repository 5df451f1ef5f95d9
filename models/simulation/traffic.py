"""The calls of a simulation: sessions in progress at its beginning, and those that start later.

A deployment in its steady state holds many sessions that are somewhere in their middle. Starting from an empty one, a
simulation would take several session times to get there, so it starts with them: calls are drawn with the time they
and the gap after them last, and each drawn session goes on with its next call.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from breakeven.models.distributions import Floats
from breakeven.models.forks import SubAgents
from breakeven.models.sessions import Sessions
from breakeven.models.simulation.state import Records, new_calls, new_sessions

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Load:
    """How sessions come: a rate with the squared coefficient of variation of its intervals, or a fixed population."""

    sessions_per_second: float | None
    concurrent_sessions: float | None = None
    arrival_cv2: float = 1.0


@dataclass(frozen=True)
class Traffic:
    """Calls and sessions in flat records; `starts` and `warm` name sessions, in the order of `play`."""

    calls: Records
    sessions: Records  # those that ended before time 0 come last: they have no calls, only a place in the cache
    starts: Ints
    warm: Ints
    playing: int  # sessions that have calls


def call_s(sample: Sessions, first_s: float, token_s: float) -> Floats:
    """Expected time of each sampled call, from the mean times to its first and per further token."""
    return first_s + token_s * (sample.output_tokens - 1.0)


def traffic(
    sample: Sessions,
    load: Load,
    expected_s: Floats,
    until_s: float,
    engines: int,
    split: bool,
    cache_tokens: float,
    seed: int,
    agents: SubAgents | None = None,
) -> Traffic:
    """Traffic from time 0 to `until_s` for `engines` prefill engines with a cache of `cache_tokens` together.

    `expected_s` is the expected time of each sampled call; it only places the first sessions. In a `split`
    deployment the prefill pool never holds the output of the previous call.
    """
    rng = np.random.default_rng(seed)
    ends = np.flatnonzero(sample.last) + 1
    first = ends - np.diff(ends, prepend=0)
    gap = np.where(sample.last, 0.0, sample.gap_after_s)
    cycle = expected_s + gap + fork_s(sample, agents, expected_s)
    per_session_s = float(cycle.sum()) / len(ends)
    through, elapsed = _in_progress(load, cycle, len(ends), rng)
    goes_on = ~sample.last[through]
    if load.concurrent_sessions is None:  # else another session follows one at its last call
        through, elapsed, goes_on = through[goes_on], elapsed[goes_on], goes_on[goes_on]
    new = _new_sessions(load, until_s, len(through), per_session_s, rng)
    start_s = np.concatenate([cycle[through] - elapsed, new])
    start = first[np.resize(rng.permutation(len(ends)), len(start_s))]
    start[: len(through)] = np.where(goes_on, through + 1, start[: len(through)])
    rows, session = _rows(start, ends[sample.session[start]], gap, start_s, until_s)
    kept = (sample.prompt_tokens - sample.shared_tokens) + (0.0 if split else sample.output_tokens)
    live = np.flatnonzero(goes_on)
    ended = _ended(load, kept[ends - 1], per_session_s, cache_tokens, rng)
    rates = load.sessions_per_second or len(through) / per_session_s
    idle_s = np.concatenate([elapsed[live] - expected_s[through[live]], (np.arange(len(ended)) + 0.5) / rates])
    calls, sessions = _records(sample, rows, session, start_s, split)
    if agents is not None:
        calls, sessions = _forked(agents, rows, calls, sessions, split)
    holding = np.concatenate([live, len(sessions) + np.arange(len(ended))])
    sessions = _appended(sessions, _idle(len(ended), len(calls)))
    calls["tie"] = rng.random(len(calls))
    sessions["home"] = rng.integers(engines, size=len(sessions))
    sessions["tokens"][holding] = np.concatenate([kept[through[live]], ended])
    sessions["since_s"][holding] = -idle_s
    timed = np.flatnonzero(np.isfinite(start_s))
    starts = timed[np.argsort(start_s[timed], kind="stable")]
    warm = holding[np.argsort(-idle_s, kind="stable")]
    return Traffic(calls, sessions, starts.astype(np.int64), warm.astype(np.int64), len(start_s))


def _appended(one: Records, other: Records) -> Records:
    return np.concatenate([one, other]).view(np.recarray)


def _idle(count: int, calls: int) -> Records:
    """Sessions that have none of the `calls`."""
    sessions = new_sessions(count)
    sessions["first_call"], sessions["start_s"] = calls, np.inf
    return sessions


def kept_by_decode(sessions: Records, calls: int) -> Records:
    """The sessions, and as many again that stand for what a decode engine holds of each: nothing yet."""
    return _appended(sessions, _idle(len(sessions), calls))


def fork_s(sample: Sessions, agents: SubAgents | None, expected_s: Floats) -> Floats:
    """Seconds that each sampled call's sub-agents are expected to take."""
    out = np.zeros(len(sample.session))
    if agents is not None:
        each = expected_s.mean() * agents.prompt_tokens.shape[-1] + np.nansum(agents.gap_after_s, -1)
        out[agents.parent] = each.max(-1)
    return out


def _forked(agents: SubAgents, rows: Ints, calls: Records, sessions: Records, split: bool) -> tuple[Records, Records]:
    """The calls and sessions with those of the sub-agents that these calls, `rows` of the sample, fork."""
    position = np.searchsorted(agents.parent, rows)
    known = agents.parent[np.minimum(position, len(agents.parent) - 1)] == rows
    follows = np.append(calls["session"][1:] == calls["session"][:-1], False)  # else the simulation ends before
    parents = np.flatnonzero(known & follows)
    some, (width, each) = position[parents], agents.prompt_tokens.shape[1:]
    children, theirs = new_sessions(len(parents) * width), new_calls(len(parents) * width * each)
    of = np.repeat(np.arange(len(children)), each)
    index = np.tile(np.arange(each), len(children))
    theirs["session"], theirs["first"], theirs["last"] = len(sessions) + of, index == 0, index == each - 1
    fresh = agents.recomputed_tokens if split else agents.observation_tokens
    columns = {"prompt": agents.prompt_tokens, "shared": agents.shared_tokens, "output": agents.output_tokens}
    columns |= {
        "fresh_tokens": agents.observation_tokens,
        "hit_tokens": fresh,
        "missed_tokens": agents.missed_tokens,
        "gap_s": agents.gap_after_s,
    }
    for name, values in columns.items():
        theirs[name] = np.nan_to_num(values[some]).ravel()
    children["first_call"] = len(calls) + each * np.arange(len(children))
    children["start_s"], children["parent"] = np.inf, np.repeat(parents, width)
    calls["fork"][parents], calls["forks"][parents] = len(sessions) + width * np.arange(len(parents)), width
    return _appended(calls, theirs), _appended(sessions, children)


def replay(sample: Sessions, start_s: Floats, engines: int, split: bool, seed: int) -> Traffic:
    """Every session of `sample` once: it starts at `start_s`, or, where that is infinite, when another one ends."""
    rng = np.random.default_rng(seed)
    order = np.argsort(start_s, kind="stable")  # those without a start of their own follow in the order they have
    first = np.flatnonzero(sample.first)[order]
    count = np.diff(np.append(np.flatnonzero(sample.first), len(sample.session)))[order]
    session = np.repeat(np.arange(len(order)), count)
    rows = np.arange(len(session)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
    calls, sessions = _records(sample, rows, session, np.asarray(start_s, float)[order], split)
    calls["tie"] = rng.random(len(calls))
    sessions["home"] = rng.integers(engines, size=len(sessions))
    timed = int(np.isfinite(start_s).sum())
    return Traffic(calls, sessions, np.arange(timed), np.arange(0), len(order))


def _ended(load: Load, left: Floats, per_session_s: float, cache_tokens: float, rng: np.random.Generator) -> Floats:
    """Tokens of the sessions that ended last, as many as could still be cached, the latest first."""
    fill = 1.2 * cache_tokens / max(float(left.mean()), 1.0)
    past = 2.0 * (load.concurrent_sessions or float(load.sessions_per_second or 0.0) * per_session_s)
    return rng.choice(left, int(min(fill, past)))


def _in_progress(load: Load, cycle: Floats, sessions: int, rng: np.random.Generator) -> tuple[Ints, Floats]:
    """(sampled calls that sessions are at in the steady state, seconds since they came)."""
    total = np.cumsum(cycle)
    if load.concurrent_sessions is not None:
        count = round(load.concurrent_sessions)
    else:
        count = int(rng.poisson(float(load.sessions_per_second or 0.0) * total[-1] / sessions))
    at = rng.random(count) * total[-1]
    found = np.minimum(np.searchsorted(total, at, side="right"), len(cycle) - 1)
    return found, at - (total[found] - cycle[found])


def _new_sessions(load: Load, until_s: float, live: int, per_session_s: float, rng: np.random.Generator) -> Floats:
    """Start times of the sessions that come after time 0; infinite for those that replace one that ended, which
    lasts `per_session_s` on average."""
    if load.concurrent_sessions is not None:
        return np.full(int(3.0 * live * until_s / per_session_s) + live + 8, np.inf)
    rate, shape = float(load.sessions_per_second or 0.0), 1.0 / load.arrival_cv2
    count = int(rate * until_s + 6.0 * np.sqrt(load.arrival_cv2 * rate * until_s + 1.0)) + 8
    times = np.cumsum(rng.gamma(shape, 1.0 / (shape * rate), count))
    return times[times < until_s]


def _rows(start: Ints, end: Ints, gap: Floats, start_s: Floats, until_s: float) -> tuple[Ints, Ints]:
    """(sampled call, session) of every call that can come before `until_s`: gaps alone may not take it beyond."""
    count = end - start
    first = np.cumsum(count) - count
    session = np.repeat(np.arange(len(start)), count)
    rows = np.arange(len(session)) - first[session] + start[session]
    passed = np.cumsum(gap[rows]) - gap[rows]
    earliest = np.where(np.isfinite(start_s), start_s, 0.0)[session] + passed - passed[first[session]]
    kept = (earliest < until_s) | (rows == start[session])
    return rows[kept], session[kept]


def _records(sample: Sessions, rows: Ints, session: Ints, start_s: Floats, split: bool) -> tuple[Records, Records]:
    """Calls `rows` of the sample as records of their sessions, each of which starts at `start_s`."""
    calls, sessions = new_calls(len(rows)), new_sessions(len(start_s))
    calls["session"] = session
    calls["prompt"], calls["shared"] = sample.prompt_tokens[rows], sample.shared_tokens[rows]
    calls["output"], calls["missed_tokens"] = sample.output_tokens[rows], sample.missed_tokens[rows]
    calls["fresh_tokens"] = sample.resident_tokens[rows]
    calls["hit_tokens"] = (sample.recomputed_tokens if split else sample.resident_tokens)[rows]
    if sample.images is not None and sample.images_held is not None:
        calls["images_found"], calls["images_held"] = sample.images_found[rows], sample.images_held[rows]
    calls["first"], calls["last"] = sample.first[rows], sample.last[rows]
    calls["gap_s"] = np.where(sample.last, 0.0, sample.gap_after_s)[rows]
    cut = np.append(session[1:] != session[:-1], True) & ~calls["last"]
    calls["gap_s"][cut] = np.inf
    sessions["first_call"] = np.searchsorted(session, np.arange(len(start_s)))
    sessions["start_s"] = start_s
    return calls, sessions
