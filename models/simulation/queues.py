"""What the loop keeps in order: events and step counts in heaps, waiting calls in queues, idle sessions by last use."""

from breakeven.models.simulation.compiled import compiled
from breakeven.models.simulation.state import PASS, Plan, Records, State


@compiled
def push_event(s: State, time_s: float, kind: int, index: int, version: int) -> None:
    """Add an event; of those at one time the lower kind and index comes first."""
    clock, events = s.clock[0], s.events
    if clock.events == len(events):
        _drop_void(s)
    j = clock.events
    clock.events += 1
    while j > 0:
        above = (j - 1) >> 1
        if not _before(time_s, kind, index, events[above]):
            break
        _copy_event(events, j, above)
        j = above
    _set_event(events, j, time_s, kind, index, version)


@compiled
def _before(time_s: float, kind: int, index: int, other: Records) -> bool:
    if time_s != other.time_s:
        return time_s < other.time_s
    return kind < other.kind or (kind == other.kind and index < other.index)


@compiled
def _set_event(events: Records, j: int, time_s: float, kind: int, index: int, version: int) -> None:
    e = events[j]
    e.time_s, e.kind, e.index, e.version = time_s, kind, index, version


@compiled
def _copy_event(events: Records, j: int, k: int) -> None:
    _set_event(events, j, events[k].time_s, events[k].kind, events[k].index, events[k].version)


@compiled
def pop_event(s: State) -> None:
    """Remove the first event."""
    clock, events = s.clock[0], s.events
    n = clock.events - 1
    clock.events = n
    time_s, kind, index, version = events[n].time_s, events[n].kind, events[n].index, events[n].version
    j = 0
    while 2 * j + 1 < n:
        k = 2 * j + 1
        if k + 1 < n and _before(events[k + 1].time_s, events[k + 1].kind, events[k + 1].index, events[k]):
            k += 1
        if _before(time_s, kind, index, events[k]):
            break
        _copy_event(events, j, k)
        j = k
    _set_event(events, j, time_s, kind, index, version)


@compiled
def _drop_void(s: State) -> None:
    """Rebuild the heap without the events of passes that were cut."""
    clock, events = s.clock[0], s.events
    old = clock.events
    clock.events = 0
    for i in range(old):
        e = events[i]
        time_s, kind, index, version = e.time_s, e.kind, e.index, e.version
        if kind != PASS or version == s.engines[index].version:
            j = clock.events
            clock.events += 1
            while j > 0 and _before(time_s, kind, index, events[(j - 1) >> 1]):
                _copy_event(events, j, (j - 1) >> 1)
                j = (j - 1) >> 1
            _set_event(events, j, time_s, kind, index, version)


@compiled
def _key_before(step: int, call: int, other: Records) -> bool:
    return step < other.step or (step == other.step and call < other.call)


@compiled
def push_key(s: State, r: int, step: int, call: int) -> None:
    """Add the step count at which something happens to a call of engine `r`."""
    engine, keys = s.engines[r], s.keys
    j = engine.keys
    engine.keys += 1
    while j > 0 and _key_before(step, call, keys[r, (j - 1) >> 1]):
        above = keys[r, (j - 1) >> 1]
        keys[r, j].step, keys[r, j].call = above.step, above.call
        j = (j - 1) >> 1
    keys[r, j].step, keys[r, j].call = step, call


@compiled
def pop_key(s: State, r: int) -> int:
    """Remove the first of them; its call."""
    engine, keys = s.engines[r], s.keys
    found = keys[r, 0].call
    n = engine.keys - 1
    engine.keys = n
    step, call = keys[r, n].step, keys[r, n].call
    j = 0
    while 2 * j + 1 < n:
        k = 2 * j + 1
        if k + 1 < n and _key_before(keys[r, k + 1].step, keys[r, k + 1].call, keys[r, k]):
            k += 1
        if _key_before(step, call, keys[r, k]):
            break
        keys[r, j].step, keys[r, j].call = keys[r, k].step, keys[r, k].call
        j = k
    keys[r, j].step, keys[r, j].call = step, call
    return found


@compiled
def remove_keys(s: State, r: int, call: int) -> int:
    """Remove what waits for step counts of a call of engine `r`; the count at which it would have ended."""
    engine, keys = s.engines[r], s.keys
    old, ends = engine.keys, -1
    engine.keys = 0
    for i in range(old):
        step, found = keys[r, i].step, keys[r, i].call
        if found == call:
            ends = step
        elif found != ~call:
            push_key(s, r, step, found)
    return ends


@compiled
def latest(s: State, r: int) -> int:
    """The call in service of engine `r` that was admitted last; -1 where none decodes or is being prefilled."""
    engine, keys, calls = s.engines[r], s.keys, s.calls
    best, c = -1, engine.head
    while c >= 0 and calls[c].begun:  # those stand first, in the order of their admission
        best, c = c, calls[c].next
    for i in range(engine.keys):
        c = keys[r, i].call
        if c >= 0 and (best < 0 or calls[c].order > calls[best].order):
            best = c
    return best


@compiled
def _cache_at(plan: Plan, level: int, r: int) -> int:
    """Column of `State.caches` that engine `r` uses on a level."""
    if level > 0 and plan.tiers[level - 1].shared:
        return 0
    return r


@compiled
def leave_cache(plan: Plan, s: State, session: int) -> None:
    """Take an idle session out of the cache it stands in."""
    me = s.sessions[session]
    cache = s.caches[me.level, _cache_at(plan, me.level, me.where)]
    if me.older >= 0:
        s.sessions[me.older].newer = me.newer
    else:
        cache.oldest = me.newer
    if me.newer >= 0:
        s.sessions[me.newer].older = me.older
    else:
        cache.newest = me.older
    me.cached = me.resumes = False
    cache.idle -= me.tokens
    if cache.oldest < 0:
        cache.idle = 0.0


@compiled
def _keep(plan: Plan, s: State, session: int, level: int) -> None:
    """Put an idle session into a cache of its engine's as the one used last."""
    me = s.sessions[session]
    cache = s.caches[level, _cache_at(plan, level, me.where)]
    me.cached, me.level = True, level
    me.older, me.newer = cache.newest, -1
    if cache.newest >= 0:
        s.sessions[cache.newest].newer = session
    else:
        cache.oldest = session
    cache.newest = session
    cache.idle += me.tokens


@compiled
def enter_cache(plan: Plan, s: State, session: int, r: int, tokens: float, now: float) -> None:
    """Keep a session that falls idle in HBM of engine `r`."""
    me = s.sessions[session]
    me.where, me.tokens, me.since_s = r, tokens, now
    _keep(plan, s, session, 0)


@compiled
def make_room(plan: Plan, s: State, r: int) -> None:
    """Evict idle sessions, least recently used first, until HBM of the engine holds what it must.

    They move down the tiers, each of which evicts in turn; from the last they are gone.
    """
    engine = s.engines[r]
    most = engine.capacity - engine.reserved - plan.shared_prefix
    levels = plan.levels if engine.prefills else 0
    for level in range(1 + levels):
        if level > 0:
            most = plan.tiers[level - 1].capacity
        cache = s.caches[level, _cache_at(plan, level, r)]
        while cache.oldest >= 0 and cache.idle > most:
            session = cache.oldest
            me, resumes = s.sessions[session], s.sessions[session].resumes
            if resumes and me.tokens > cache.idle - most:
                me.tokens -= cache.idle - most
                cache.idle = most
                break
            leave_cache(plan, s, session)
            if level < levels and not resumes:
                _keep(plan, s, session, level + 1)
    engine.peak = max(engine.peak, s.caches[0, r].idle + engine.reserved + plan.shared_prefix)


@compiled
def resumable(s: State, r: int) -> float:
    """Tokens of preempted calls in HBM of engine `r` that are evicted before any session."""
    tokens, session = 0.0, s.caches[0, r].oldest
    while session >= 0 and s.sessions[session].resumes:
        tokens += s.sessions[session].tokens
        session = s.sessions[session].newer
    return tokens


@compiled
def least_loaded(s: State, start: int, count: int, tie: float) -> int:
    """Engine of `count` from `start` on with the fewest calls; ties by where the search begins."""
    offset = int(tie * count)
    best = -1
    for i in range(count):
        r = start + (i + offset) % count
        if best < 0 or s.engines[r].load < s.engines[best].load:
            best = r
    return best


@compiled
def enqueue(s: State, r: int, c: int) -> None:
    """Put a call at the end of an engine's queue."""
    engine = s.engines[r]
    s.calls[c].next = -1
    if engine.tail >= 0:
        s.calls[engine.tail].next = c
    else:
        engine.head = c
    engine.tail = c


@compiled
def put_back(s: State, r: int, c: int) -> None:
    """Put a call before all that wait in an engine's queue, behind those that are being prefilled."""
    engine, calls = s.engines[r], s.calls
    before, after = -1, engine.head
    while after >= 0 and calls[after].begun:
        before, after = after, calls[after].next
    calls[c].next = after
    if before >= 0:
        calls[before].next = c
    else:
        engine.head = c
    if after < 0:
        engine.tail = c


@compiled
def unlink(s: State, r: int, before: int, c: int) -> None:
    """Take `c`, which stands after `before` (-1: first), out of an engine's queue."""
    engine, after = s.engines[r], s.calls[c].next
    if before >= 0:
        s.calls[before].next = after
    else:
        engine.head = after
    if engine.tail == c:
        engine.tail = before
    s.calls[c].next = -1
