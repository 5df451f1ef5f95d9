"""A call from its arrival to the queue for prefill, and its end: routing, encoding, its prefix, sub-agents."""

from breakeven.models.deployment import BALANCED, PREFIX_AWARE, RANDOM
from breakeven.models.simulation.batches import cut_pass
from breakeven.models.simulation.compiled import compiled, seldom
from breakeven.models.simulation.keeping import decode_engine, decode_holds
from breakeven.models.simulation.queues import enqueue, enter_cache, least_loaded, leave_cache, push_event
from breakeven.models.simulation.state import ARRIVAL, ENCODED, HIT, OPENING, READ, RELOADED, SPLIT, Plan, State
from breakeven.models.simulation.step_times import encode_s


@seldom
def _stays(plan: Plan, s: State, c: int, now: float) -> int:
    """Queue a call with few new tokens at the decode engine that holds its session; that engine, -1 if it cannot."""
    call = s.calls[c]
    if call.fresh_tokens > plan.local_tokens or not decode_holds(plan, s, c, now):
        return -1
    r, session = decode_engine(plan, s, c), s.sessions[call.session]
    call.local, call.decode_engine, call.left = True, r, call.fresh_tokens
    call.found = OPENING if call.first else HIT
    session.behind += 0.0 if plan.returns else call.hit_tokens
    s.engines[r].load += 1
    enqueue(s, r, c)
    cut_pass(s, r, now)
    return r


@compiled
def _whole(plan: Plan, s: State, c: int) -> bool:
    """Whether a call's session is measured as a whole: it started in the window."""
    return plan.whole_sessions and s.sessions[s.calls[c].session].measured


@compiled
def _awaited(plan: Plan, s: State, c: int) -> bool:
    """Whether the simulation goes on until this call has ended."""
    return _whole(plan, s, c) or plan.window_start_s <= s.calls[c].arrival_s < plan.window_end_s


@seldom
def _fork(plan: Plan, s: State, c: int, now: float) -> None:
    """Start the sub-agents of a call, on the replica that holds its prefix; the call after it waits for the last."""
    call = s.calls[c]
    for i in range(call.forks):
        child = s.sessions[call.fork + i]
        child.where = s.sessions[call.session].where
        push_event(s, now + plan.request_s, ARRIVAL, child.first_call, 0)


@seldom
def parents_prefix(plan: Plan, s: State, c: int, r: int, now: float) -> bool:
    """Whether engine `r` holds in HBM the prefix that a sub-agent's first call has from its parent; it is used anew."""
    index = s.calls[s.sessions[s.calls[c].session].parent].session
    session = s.sessions[index]
    if not session.cached or session.where != r or session.level != 0 or session.resumes:
        return False
    leave_cache(plan, s, index)
    enter_cache(plan, s, index, r, session.tokens, now)
    return True


@compiled
def end_call(plan: Plan, s: State, c: int, now: float) -> None:
    """A call ends; its session's next call comes a gap later, or after its last one another session may start."""
    call, clock = s.calls[c], s.clock[0]
    call.end_s = now
    if plan.window_start_s <= now < plan.window_end_s:
        clock.left += 1
    if _awaited(plan, s, c) and (call.last or not _whole(plan, s, c)):
        clock.outstanding -= 1
    parent = s.sessions[call.session].parent
    if not call.last:
        if call.forks > 0:
            _fork(plan, s, c, now)
        else:
            push_event(s, now + call.gap_s + plan.request_s, ARRIVAL, c + 1, 0)
    elif parent >= 0:
        s.calls[parent].forks -= 1
        if s.calls[parent].forks == 0:  # the last of its sub-agents has ended
            push_event(s, now + s.calls[parent].gap_s + plan.request_s, ARRIVAL, parent + 1, 0)
    elif clock.waiting_session < clock.playing:
        following = s.sessions[clock.waiting_session].first_call
        clock.waiting_session += 1
        push_event(s, now + plan.request_s, ARRIVAL, following, 0)


@compiled
def arrive(plan: Plan, s: State, c: int, now: float) -> int:
    """A call reaches its engine's queue; returns the engine."""
    call, clock = s.calls[c], s.clock[0]
    session = s.sessions[call.session]
    call.arrival_s = now - plan.request_s
    if plan.window_start_s <= call.arrival_s < plan.window_end_s:
        clock.arrived += 1
        session.measured = session.measured or (call.first and session.parent < 0)
    if _awaited(plan, s, c) and (call.first or not _whole(plan, s, c)):
        clock.outstanding += 1
    if plan.local_tokens > 0.0:
        r = _stays(plan, s, c, now)
        if r >= 0:
            return r
    known = _cached(plan, s, c) or (call.first and session.parent >= 0)
    if plan.routing == RANDOM:
        r = int(call.tie * plan.prefill_engines)
    elif plan.routing == BALANCED or (plan.routing == PREFIX_AWARE and not known):
        r = least_loaded(s, 0, plan.prefill_engines, call.tie)
    elif plan.routing == PREFIX_AWARE:
        r = session.where
    else:
        r = session.where if session.where >= 0 else session.home
        session.where = r
    call.prefill_engine = r
    s.engines[r].load += 1
    if plan.encode.engines > 0 and _encode(plan, s, c, now):
        return r
    find_prefix(plan, s, c, now)
    return r


@compiled
def _encode(plan: Plan, s: State, c: int, now: float) -> bool:
    """Send a call's images to the encoder of its own that is free first; False if it has none to encode."""
    encode = plan.encode
    images = images_of(plan, s, c, prefix_level(plan, s, c, s.calls[c].prefill_engine) >= 0)
    taken_s = encode_s(encode, images)
    if taken_s <= 0.0:
        return False
    k = 0
    for i in range(encode.engines):
        if s.encoders[i] < s.encoders[k]:
            k = i
    s.encoders[k] = max(now, s.encoders[k]) + taken_s
    sent_s = encode.link_latency_s + encode.link_image_s * images * (1.0 - encode.reuse)
    push_event(s, s.encoders[k] + sent_s, ENCODED, c, 0)
    return True


@compiled
def images_of(plan: Plan, s: State, c: int, held: bool) -> float:
    """Images of a call to encode: those that are new, or all of its prompt where its prefix is lost."""
    call = s.calls[c]
    return call.images_found if held or call.first else call.images_held


@compiled
def find_prefix(plan: Plan, s: State, c: int, now: float) -> None:
    """Let a call whose images are encoded wait for its engine, or for its prefix."""
    level = prefix_level(plan, s, c, s.calls[c].prefill_engine)
    if level > 0:
        _read_back(plan, s, c, level, now)
    else:
        wait_for_prefill(plan, s, c, now)


@compiled
def wait_for_prefill(plan: Plan, s: State, c: int, now: float) -> None:
    """Put a call into the queue of its engine, which stops to look at it."""
    r = s.calls[c].prefill_engine
    enqueue(s, r, c)
    if plan.mode != SPLIT:
        cut_pass(s, r, now)


@compiled
def _cached(plan: Plan, s: State, c: int) -> bool:
    """Whether the cache of a call's session is somewhere."""
    call = s.calls[c]
    session = s.sessions[call.session]
    return session.cached and call.arrival_s - session.since_s <= plan.cache_ttl_s


@compiled
def prefix_level(plan: Plan, s: State, c: int, r: int) -> int:
    """Where engine `r` finds the cache of a call's session: 0 in HBM, k in its k-th tier, -1 nowhere any more.

    What any engine holds was written through to the tier that they share, if there is one.
    """
    session = s.sessions[s.calls[c].session]
    if not _cached(plan, s, c):
        return -1
    if session.where == r:
        return session.level
    for k in range(plan.levels):
        if plan.tiers[k].shared:
            return k + 1
    return -1


@compiled
def _read_back(plan: Plan, s: State, c: int, level: int, now: float) -> None:
    """Read a call's prefix from a tier; reads of an engine from one tier follow one another.

    Where they begin before their calls, all of them do so by as much: they queue as if they came with the calls.
    """
    call = s.calls[c]
    tier, cache = plan.tiers[level - 1], s.caches[level, call.prefill_engine]
    leave_cache(plan, s, call.session)
    taken_s = tier.latency_s + tier.token_s * max(call.prompt - call.hit_tokens - call.shared, 0.0)
    start_s = max(now, cache.free_s)
    cache.free_s = start_s + taken_s / tier.paths
    call.found = READ
    push_event(s, max(start_s + taken_s - tier.prefetch_s, now), RELOADED, c, 0)
