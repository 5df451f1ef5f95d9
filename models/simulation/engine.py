"""The loop: plays a deployment forward from event to event, compiled, over flat records.

An engine works in passes. A decode pass jumps over as many steps as leave its batch unchanged: each step is longer
than the one before by what the batch's growth by one token a call costs, so their sum is closed. A call that comes
meanwhile cuts the pass at the end of the step in progress, which voids the event of the longer one. A pipeline of p
stages keeps p equal micro-batches in flight: a step of the whole batch takes as long as one of them needs through all
stages, and a prefill holds the first stage for a p-th of its time.

A call keeps the cache it will need at its end from its admission on, so that no engine ever runs out of it. With
`Plan.preempts` it keeps what it holds and a token more: a jump ends where the growing batch has filled the cache, and
the call admitted last makes room. It waits before all others, and prefills what it had written with its prompt, but
for what is left of its cache, which is evicted from its end.
"""

from math import ceil, inf, sqrt
from typing import Any

from breakeven.models.deployment import BALANCED, PREFIX_AWARE, RANDOM
from breakeven.models.simulation.compiled import compiled, kept, seldom, source_digest
from breakeven.models.simulation.queues import (
    enqueue,
    enter_cache,
    latest,
    least_loaded,
    leave_cache,
    make_room,
    pop_event,
    pop_key,
    push_event,
    push_key,
    put_back,
    remove_keys,
    resumable,
    unlink,
)
from breakeven.models.simulation.state import (
    ARRIVAL,
    CHUNKED,
    COLOCATED,
    ENCODED,
    HIT,
    MISSED,
    OPENING,
    PASS,
    PREFILLED,
    READ,
    RELOADED,
    SPLIT,
    TRANSFERRED,
    Plan,
    Records,
    State,
)
from breakeven.models.simulation.step_times import apart_decode_s, apart_prefill_s, decode_s, encode_s, mixed_s


@compiled
def _overlap(plan: Plan, start_s: float, end_s: float) -> float:
    """Seconds of an interval inside the measured window."""
    return max(min(end_s, plan.window_end_s) - max(start_s, plan.window_start_s), 0.0)


@compiled
def _pass_s(engine: Records, steps: int) -> float:
    """Duration of `steps` steps of the engine's pass: each is longer by its growth than the one before."""
    return steps * engine.step_s + 0.5 * engine.growth_s * steps * (steps - 1)


@compiled
def _cut(s: State, r: int, now: float) -> None:
    """End the jump in progress, if there is one, with the first step that ends at `now` or later."""
    engine = s.engines[r]
    most = engine.ahead
    if not engine.busy or most <= 1:
        return
    until, growth = max(now - engine.start_s, 0.0), engine.growth_s
    linear = engine.step_s - 0.5 * growth
    root = 2.0 * until / (linear + sqrt(linear * linear + 2.0 * growth * until))
    steps = max(1, min(most, ceil(root) - 1))
    while steps < most and _pass_s(engine, steps) < until:
        steps += 1
    if steps < most:
        engine.ahead = steps
        engine.version += 1
        push_event(s, engine.start_s + _pass_s(engine, steps), PASS, r, engine.version)


@compiled
def _join(plan: Plan, s: State, r: int, c: int) -> None:
    """Add a call to an engine's batch; it decodes from the end of the pass in progress on."""
    engine, call, topk = s.engines[r], s.calls[c], plan.decode.sparse_topk
    begin, last = engine.steps + engine.ahead, int(call.output - call.written) - 1
    held = call.prompt + call.written
    engine.batch += 1
    engine.context += held
    engine.selected += min(held, topk)
    if held < topk:
        engine.growing += 1
        if held + last > topk:
            push_key(s, r, begin + int(topk - held), ~c)
    push_key(s, r, begin + last, c)


@compiled
def _leave_batch(plan: Plan, s: State, r: int, length: float) -> None:
    """A call that holds `length` tokens decodes no more."""
    engine, topk = s.engines[r], plan.decode.sparse_topk
    engine.batch -= 1
    engine.context -= length
    engine.selected -= min(length, topk)


@compiled
def _make_way(plan: Plan, s: State, r: int, now: float) -> None:
    """Give each call of the batch room for one more token; while there is none, preempt the call admitted last."""
    engine = s.engines[r]
    if not plan.preempts:
        return
    while engine.batch > 0 and engine.reserved + engine.batch + plan.shared_prefix > engine.capacity:
        c = latest(s, r)
        if engine.prefilling + engine.batch <= 1:
            break  # alone it fits, or nothing helps
        _preempt(plan, s, r, c, now)
    engine.reserved += engine.batch
    if s.caches[0, r].idle + engine.reserved + plan.shared_prefix > engine.capacity:
        make_room(plan, s, r)


@seldom
def _preempt(plan: Plan, s: State, r: int, c: int, now: float) -> None:
    """Take a call out of service: what it has written becomes part of its prompt."""
    call, engine, topk = s.calls[c], s.engines[r], plan.decode.sparse_topk
    call.preempted += 1
    engine.reserved -= call.prompt + call.written - call.shared + 1.0
    held = call.position
    if call.left > 0.0:
        engine.prefilling -= 1
        call.begun = False
    else:
        written = call.output - float(remove_keys(s, r, c) - engine.steps)
        engine.reserved -= written - call.written - 1.0
        held = call.prompt + written - 1.0
        _leave_batch(plan, s, r, held)
        if held < topk:
            engine.growing -= 1
        call.begun, call.written = False, written
        put_back(s, r, c)
    enter_cache(plan, s, call.session, r, held - call.shared, now)
    s.sessions[call.session].resumes = True


@compiled
def _retire(plan: Plan, s: State, r: int, now: float) -> None:
    """Let the calls leave whose last step is done."""
    engine, keys, topk = s.engines[r], s.keys, plan.decode.sparse_topk
    while engine.keys > 0 and keys[r, 0].step <= engine.steps:
        c = pop_key(s, r)
        if c < 0:
            engine.growing -= 1
            continue
        call = s.calls[c]
        length = call.prompt + call.output - 1.0
        if length <= topk and call.prompt + call.written < topk:
            engine.growing -= 1
        _leave_batch(plan, s, r, length)
        _end_on(plan, s, r, c, now)


@compiled
def _end_on(plan: Plan, s: State, r: int, c: int, now: float) -> None:
    """A call leaves engine `r`: its cache there stays for the session in a shared pool, else it goes."""
    call, engine = s.calls[c], s.engines[r]
    need = call.prompt - call.shared + call.output
    engine.load -= 1
    engine.reserved -= need
    if engine.prefills:
        enter_cache(plan, s, call.session, r, need, now)
    else:
        _left_decode(plan, s, c, need, now)
    _end(plan, s, c, now)


@seldom
def _left_decode(plan: Plan, s: State, c: int, tokens: float, now: float) -> None:
    """What becomes of a call's cache in a decode pool: kept there, or sent to join that of its prompt, if that is still
    in HBM of the engine that prefilled it."""
    index = s.calls[c].session
    if plan.keeps:
        enter_cache(plan, s, _twin(s, c), s.calls[c].decode_engine, tokens, now)
        make_room(plan, s, s.calls[c].decode_engine)
    r = s.sessions[index].where
    if not plan.returns:
        return
    if s.sessions[index].cached and s.sessions[index].where == r and s.sessions[index].level == 0:
        leave_cache(plan, s, index)
        enter_cache(plan, s, index, r, tokens, now)
        make_room(plan, s, r)


@compiled
def _twin(s: State, c: int) -> int:
    """What a decode engine holds of a call's session."""
    return s.calls[c].session + len(s.sessions) // 2


@compiled
def _decode_holds(plan: Plan, s: State, c: int, now: float) -> bool:
    """Whether a decode engine still has the call before, or there was none."""
    call, twin = s.calls[c], s.sessions[_twin(s, c)]
    if call.first:
        return s.sessions[call.session].parent < 0
    return twin.cached and now - twin.since_s <= plan.cache_ttl_s


@compiled
def _decode_engine(plan: Plan, s: State, c: int) -> int:
    """Where a call decodes: with its session where that is kept, else on the engine with the fewest calls."""
    tie = (s.calls[c].tie * 977.0) % 1.0
    if not plan.keeps:
        return least_loaded(s, plan.prefill_engines, plan.decode_engines, tie)
    where = s.sessions[_twin(s, c)].where
    return where if where >= 0 else plan.prefill_engines + int(tie * plan.decode_engines)


@seldom
def _stays(plan: Plan, s: State, c: int, now: float) -> int:
    """Queue a call with few new tokens at the decode engine that holds its session; that engine, -1 if it cannot."""
    call = s.calls[c]
    if call.fresh_tokens > plan.local_tokens or not _decode_holds(plan, s, c, now):
        return -1
    r, session = _decode_engine(plan, s, c), s.sessions[call.session]
    call.local, call.decode_engine, call.left = True, r, call.fresh_tokens
    call.found = OPENING if call.first else HIT
    session.behind += 0.0 if plan.returns else call.hit_tokens
    s.engines[r].load += 1
    enqueue(s, r, c)
    _cut(s, r, now)
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
def _parents_prefix(plan: Plan, s: State, c: int, r: int, now: float) -> bool:
    """Whether engine `r` holds in HBM the prefix that a sub-agent's first call has from its parent; it is used anew."""
    index = s.calls[s.sessions[s.calls[c].session].parent].session
    session = s.sessions[index]
    if not session.cached or session.where != r or session.level != 0 or session.resumes:
        return False
    leave_cache(plan, s, index)
    enter_cache(plan, s, index, r, session.tokens, now)
    return True


@compiled
def _end(plan: Plan, s: State, c: int, now: float) -> None:
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
def _arrive(plan: Plan, s: State, c: int, now: float) -> int:
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
    _find(plan, s, c, now)
    return r


@compiled
def _encode(plan: Plan, s: State, c: int, now: float) -> bool:
    """Send a call's images to the encoder of its own that is free first; False if it has none to encode."""
    encode = plan.encode
    images = _images(plan, s, c, _level(plan, s, c, s.calls[c].prefill_engine) >= 0)
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
def _images(plan: Plan, s: State, c: int, held: bool) -> float:
    """Images of a call to encode: those that are new, or all of its prompt where its prefix is lost."""
    call = s.calls[c]
    return call.images_found if held or call.first else call.images_held


@compiled
def _find(plan: Plan, s: State, c: int, now: float) -> None:
    """Let a call whose images are encoded wait for its engine, or for its prefix."""
    level = _level(plan, s, c, s.calls[c].prefill_engine)
    if level > 0:
        _read_back(plan, s, c, level, now)
    else:
        _wait(plan, s, c, now)


@compiled
def _wait(plan: Plan, s: State, c: int, now: float) -> None:
    """Put a call into the queue of its engine, which stops to look at it."""
    r = s.calls[c].prefill_engine
    enqueue(s, r, c)
    if plan.mode != SPLIT:
        _cut(s, r, now)


@compiled
def _cached(plan: Plan, s: State, c: int) -> bool:
    """Whether the cache of a call's session is somewhere."""
    call = s.calls[c]
    session = s.sessions[call.session]
    return session.cached and call.arrival_s - session.since_s <= plan.cache_ttl_s


@compiled
def _level(plan: Plan, s: State, c: int, r: int) -> int:
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
    """Read a call's prefix from a tier; reads of an engine from one tier follow one another."""
    call = s.calls[c]
    tier, cache = plan.tiers[level - 1], s.caches[level, call.prefill_engine]
    leave_cache(plan, s, call.session)
    taken_s = tier.latency_s + tier.token_s * max(call.prompt - call.hit_tokens - call.shared, 0.0)
    start_s = max(now, cache.free_s)
    cache.free_s = start_s + taken_s / tier.paths
    call.found = READ
    push_event(s, start_s + taken_s, RELOADED, c, 0)


@compiled
def _admits(plan: Plan, s: State, r: int, need: float, whole: bool) -> bool:
    """Whether an engine has room for a call that needs `need` tokens of cache; an empty one takes any."""
    engine = s.engines[r]
    if engine.reserved <= 0.0:
        return True
    if whole and engine.prefilling + engine.batch >= plan.max_batch:
        return False
    return engine.reserved + need + plan.shared_prefix <= engine.capacity


@compiled
def _begin(plan: Plan, s: State, r: int, c: int, now: float) -> bool:
    """Admit a call to prefill, if there is room, with what it finds of its prefix."""
    call, engine = s.calls[c], s.engines[r]
    need = call.prompt - call.shared + _output_room(plan, s, c)
    next_step = engine.batch + engine.prefilling + 1 if plan.preempts and plan.mode == COLOCATED else 0
    if not _admits(plan, s, r, need + next_step, plan.mode != SPLIT):
        return False
    session = s.sessions[call.session]
    level = _level(plan, s, c, r)
    held = call.found == READ or level >= 0
    if call.first and session.parent >= 0 and call.preempted == 0:
        held = _parents_prefix(plan, s, c, r, now)
    if call.preempted == 0 and call.found != READ:
        # What moved down a tier while the call waited was read back meanwhile.
        kept = READ if level > 0 else HIT
        call.found = kept if held else (OPENING if call.first and session.parent < 0 else MISSED)
    if call.preempted == 0:
        call.prefill_start_s = now
        call.left = min(call.hit_tokens + session.behind, call.missed_tokens) if held else call.missed_tokens
        session.behind = 0.0
        if plan.encode.engines == 0:
            engine.encoding_s += encode_s(plan.encode, _images(plan, s, c, held))
    else:
        kept = session.tokens if session.resumes else 0.0
        call.left = call.prompt + call.written - call.shared - kept
    call.position = call.prompt + call.written - call.left
    if session.cached:
        leave_cache(plan, s, call.session)
    session.where = r
    call.begun, call.order = True, engine.admitted
    engine.admitted += 1
    engine.prefilling += 1
    engine.reserved += need
    make_room(plan, s, r)
    return True


@compiled
def _output_room(plan: Plan, s: State, c: int) -> float:
    """Tokens of cache that a call is given beside its prompt when it is admitted to prefill."""
    if plan.mode == SPLIT:
        return 0.0
    return s.calls[c].written + 1.0 if plan.preempts else s.calls[c].output


@compiled
def _depth(plan: Plan, s: State, r: int) -> int:
    """Pipeline stages of an engine."""
    return plan.prefill.depth if s.engines[r].prefills else plan.decode.depth


@compiled
def _slot(plan: Plan, s: State, r: int, riding: float, start_s: float) -> float:
    """Prefill what one step's budget holds, beside `riding` of the decode batch: the seconds that the step takes.

    Prompts that it completes are ready when it has passed through the whole pipeline.
    """
    engine, calls, speed = s.engines[r], s.calls, plan.prefill
    room = plan.token_budget * speed.ranks - riding * engine.batch
    tokens = pairs = selected = read = largest = 0.0
    first, latest, count = -1, -1, 0
    before, c, engine.encoding_s = -1, engine.head, 0.0
    while c >= 0 and room > 0.0:
        if not calls[c].begun and not _begin(plan, s, r, c, start_s):
            break
        call, after = calls[c], calls[c].next
        n = min(call.left, room, plan.token_budget)
        mine = n * (call.position + 0.5 * n)
        call.position += n
        call.left -= n
        tokens, room, largest = tokens + n, room - n, max(largest, n)
        pairs, selected, read = pairs + mine, selected + min(mine, n * speed.sparse_topk), read + call.position
        if call.left > 0.0:
            before = c
            if speed.ranks <= 1.0:
                break
        else:
            unlink(s, r, before, c)
            if latest >= 0:
                calls[latest].next = c
            else:
                first = c
            latest, count = c, count + 1
        c = after
    if tokens <= 0.0:
        return 0.0
    engine.tokens += tokens
    share = max(1.0 / speed.ranks, largest / tokens)
    beside = riding * engine.batch, riding * engine.context, riding * engine.selected
    if plan.prefill_split.apart:
        alone_s, taken_s = apart_prefill_s(plan.prefill_split, tokens, pairs, selected, read, float(count))
    else:
        taken_s = mixed_s(speed, *beside, tokens, pairs, selected, read, float(count), share)
        alone_s = taken_s
    alone_s, taken_s = alone_s + engine.encoding_s, taken_s + engine.encoding_s * speed.depth
    if speed.depth == 1:
        engine.done = first
        return taken_s
    engine.through_s = max(start_s + alone_s, engine.through_s + taken_s / speed.depth)
    if first >= 0:
        push_event(s, engine.through_s, PREFILLED, first, 0)
    return taken_s


@seldom
def _start_local(plan: Plan, s: State, r: int, now: float) -> bool:
    """Start a step that prefills the calls that wait first at a decode engine, as many as its budget holds."""
    engine, calls, speed = s.engines[r], s.calls, plan.decode
    tokens = pairs = selected = read = largest = 0.0
    first, latest, count = -1, -1, 0
    while engine.head >= 0 and calls[engine.head].local:
        c = engine.head
        call, n = calls[c], calls[c].left
        if (tokens > 0.0 and tokens + n > plan.decode_budget) or not _enters(plan, s, r, c):
            break
        mine = n * (call.prompt - 0.5 * n)
        tokens, pairs, selected = tokens + n, pairs + mine, selected + min(mine, n * speed.sparse_topk)
        read, largest, count = read + call.prompt, max(largest, n), count + 1
        call.left, call.prefill_start_s = 0.0, now
        engine.prefilling += 1
        if latest >= 0:
            calls[latest].next = c
        else:
            first = c
        latest = c
    if count == 0:
        return False
    engine.tokens, engine.done = tokens, first
    if plan.decode_split.apart:
        engine.step_s, _ = apart_prefill_s(plan.decode_split, tokens, pairs, selected, read, float(count))
    else:
        share = max(1.0 / speed.ranks, largest / max(tokens, 1e-9))
        engine.step_s = mixed_s(speed, 0.0, 0.0, 0.0, tokens, pairs, selected, read, float(count), share)
    _launch(s, r, 0, 0.0, now)
    return True


@compiled
def _enters(plan: Plan, s: State, r: int, c: int) -> bool:
    """Take a call that waits first at a decode engine into service, if there is room."""
    call, engine = s.calls[c], s.engines[r]
    need = call.prompt - call.shared + call.output
    if not _admits(plan, s, r, need, True):
        return False
    unlink(s, r, -1, c)
    engine.reserved += need
    if plan.keeps and s.sessions[_twin(s, c)].cached:
        leave_cache(plan, s, _twin(s, c))
    make_room(plan, s, r)
    return True


@compiled
def _decode_s(plan: Plan, s: State, r: int) -> float:
    """A step of an engine's whole batch."""
    engine = s.engines[r]
    return _decode_step_s(plan, engine.batch, engine.context, engine.selected)


@compiled
def _decode_step_s(plan: Plan, batch: int, context: float, selected: float) -> float:
    """A step of `batch` sequences: as long as a micro-batch takes through all stages of its pipeline."""
    share = 1.0 / plan.decode.depth
    if plan.decode_split.apart:
        return apart_decode_s(plan.decode_split, float(batch), context, selected)
    return decode_s(plan.decode, share * batch, share * context, share * selected)


@compiled
def _start_prefill(plan: Plan, s: State, r: int, now: float) -> bool:
    """Start a pass that prefills; False if no call waits that could.

    Without decode it takes the first stage of the pipeline for its share of the step. In chunks it is a step of the
    whole batch, whose micro-batches each carry a chunk as long as there is one, and none overtakes the longest.
    """
    engine, depth = s.engines[r], _depth(plan, s, r)
    together = plan.mode == CHUNKED and engine.batch > 0
    engine.tokens = 0.0
    taken_s = _slot(plan, s, r, 1.0 / depth if together else 0.0, now)
    engine.step_s = taken_s if together else taken_s / depth
    if together and depth > 1 and taken_s > 0.0:
        alone_s, offset_s = _decode_s(plan, s, r), taken_s / depth
        for _ in range(depth - 1):
            more_s = _slot(plan, s, r, 1.0 / depth, now + offset_s) if engine.head >= 0 else 0.0
            engine.step_s = max(engine.step_s, more_s, alone_s)
            offset_s += max(more_s, alone_s) / depth
    if taken_s <= 0.0:
        return False
    _launch(s, r, 1 if together else 0, 0.0, now)
    return True


@compiled
def _start_decode(plan: Plan, s: State, r: int, now: float) -> None:
    """Start a pass that jumps to the next step at which the batch changes."""
    engine, speed = s.engines[r], plan.decode
    engine.tokens, engine.step_s = 0.0, _decode_s(plan, s, r)
    growth = (speed.context * engine.batch + speed.selected_context * engine.growing) / (speed.ranks * speed.depth)
    growth *= (1.0 + speed.drafts * speed.weights_share) / speed.yielded
    if plan.decode_split.apart or speed.parts > 1.0:  # what a longer context costs depends on what is busiest
        growth = _decode_step_s(plan, engine.batch, engine.context + engine.batch, engine.selected + engine.growing)
        growth -= engine.step_s
    steps = s.keys[r, 0].step - engine.steps
    if plan.preempts:
        free = engine.capacity - engine.reserved - plan.shared_prefix - s.caches[0, r].idle + resumable(s, r)
        steps = min(steps, 1 + int(max(free, 0.0) / engine.batch))
    # Behind prefill in the pipeline, the first micro-batch gets through right after it.
    start_s = max(now, engine.through_s - engine.step_s * (1.0 - 1.0 / speed.depth)) if engine.prefills else now
    _launch(s, r, steps, growth, start_s)


@compiled
def _launch(s: State, r: int, steps: int, growth_s: float, start_s: float) -> None:
    """Begin the pass that the engine's fields describe: `steps` of its batch, or prefill alone."""
    engine = s.engines[r]
    engine.busy, engine.start_s, engine.growth_s, engine.ahead = True, start_s, growth_s, steps
    engine.decoding = engine.batch if steps > 0 else 0
    engine.widening = engine.growing if steps > 0 else 0
    push_event(s, start_s + _pass_s(engine, max(steps, 1)), PASS, r, engine.version)


@compiled
def _work(plan: Plan, s: State, r: int, now: float) -> None:
    """Start the engine's next pass if it is free: prefill before decode, or both together when chunked."""
    engine = s.engines[r]
    if engine.busy:
        return
    if plan.mode == CHUNKED:
        _make_way(plan, s, r, now)
    if engine.prefills and engine.head >= 0 and _start_prefill(plan, s, r, now):
        return
    if plan.mode == COLOCATED:
        _make_way(plan, s, r, now)
    if plan.local_tokens > 0.0 and not engine.prefills and _start_local(plan, s, r, now):
        return
    if engine.batch > 0:
        _start_decode(plan, s, r, now)


@compiled
def _account(plan: Plan, s: State, r: int, now: float) -> None:
    """Busy time of a finished pass in the window, and its line in the log."""
    engine, clock = s.engines[r], s.clock[0]
    busy_s = _overlap(plan, engine.start_s, now)
    if engine.tokens > 0.0:
        engine.prefill_busy_s += busy_s
    else:
        engine.decode_busy_s += busy_s
    if engine.start_s >= plan.log_start_s and clock.logged < len(s.log):
        row = s.log[clock.logged]
        row.start_s, row.end_s, row.engine = engine.start_s, now, r
        row.decoding, row.steps, row.tokens = engine.decoding, engine.ahead, engine.tokens
        clock.logged += 1


@compiled
def _finish_pass(plan: Plan, s: State, r: int, now: float) -> None:
    """An engine's pass is done: prompts are complete, tokens are out, calls leave, others join."""
    engine = s.engines[r]
    _account(plan, s, r, now)
    engine.busy = False
    engine.steps += engine.ahead
    engine.context += engine.ahead * engine.decoding
    engine.selected += engine.ahead * engine.widening
    if plan.preempts and engine.ahead > 1:  # its first step was given room before it began
        engine.reserved += (engine.ahead - 1) * engine.decoding
        make_room(plan, s, r)
    engine.ahead = 0
    if engine.done >= 0:
        _all_prefilled(plan, s, r, engine.done, now)
        engine.done = -1
    _retire(plan, s, r, now)
    if not engine.prefills:
        _admit_waiting(plan, s, r, now)


@compiled
def _all_prefilled(plan: Plan, s: State, r: int, first: int, now: float) -> None:
    c = first
    while c >= 0:
        after = s.calls[c].next
        _prefilled(plan, s, r, c, now)
        c = after


@compiled
def _prefilled(plan: Plan, s: State, r: int, c: int, now: float) -> None:
    """A prompt is complete: its first token in a shared pool, its way over the link in a split one."""
    call, engine = s.calls[c], s.engines[r]
    engine.prefilling -= 1
    if call.written == 0.0:
        call.prefill_end_s = now
    if plan.mode == SPLIT and not call.local:
        engine.load -= 1
        sent = call.fresh_tokens if plan.keeps and _decode_holds(plan, s, c, now) else call.prompt
        duration = plan.link_latency_s + plan.link_token_s * sent
        # Layer by layer it begins with prefill, and what the last layer needs comes after it.
        call.transfer_s = max(call.prefill_start_s if plan.link_last < 1.0 else now, engine.link_free_s)
        engine.link_free_s = call.transfer_s + duration / plan.link_ways
        engine.link_busy_s += _overlap(plan, call.transfer_s, engine.link_free_s)
        last_s = now + plan.link_latency_s + plan.link_last * (duration - plan.link_latency_s)
        push_event(s, max(call.transfer_s + duration, last_s), TRANSFERRED, c, 0)
        return
    call.decode_engine = r
    if call.written == 0.0:
        call.first_s = now
    if call.output - call.written <= 1.0:
        _end_on(plan, s, r, c, now)
    else:
        _join(plan, s, r, c)


@compiled
def _transferred(plan: Plan, s: State, c: int, now: float) -> int:
    """A call's cache has reached the decode pool; its session's prefix stays behind. Returns the decode engine."""
    call = s.calls[c]
    own = call.prompt - call.shared
    s.engines[call.prefill_engine].reserved -= own
    enter_cache(plan, s, call.session, call.prefill_engine, own, now)
    r = _decode_engine(plan, s, c)
    call.decode_engine = r
    if call.output <= 1.0:
        call.first_s = now
        _end(plan, s, c, now)
        return r
    s.engines[r].load += 1
    enqueue(s, r, c)
    _cut(s, r, now)
    _admit_waiting(plan, s, r, now)
    return r


@compiled
def _admit_waiting(plan: Plan, s: State, r: int, now: float) -> None:
    """Let calls that wait at a decode engine join its batch while there is room."""
    engine = s.engines[r]
    while engine.head >= 0 and not s.calls[engine.head].local:
        c = engine.head
        if not _enters(plan, s, r, c):
            return
        s.calls[c].first_s = now
        _join(plan, s, r, c)


@compiled
def _take(plan: Plan, s: State, kind: int, index: int, now: float) -> None:
    """Let one event happen."""
    r = index
    if kind == PASS:
        _finish_pass(plan, s, r, now)
    elif kind == PREFILLED:
        r = s.calls[index].prefill_engine
        _cut(s, r, now)
        _all_prefilled(plan, s, r, index, now)
    elif kind == TRANSFERRED:
        r = _transferred(plan, s, index, now)
        _work(plan, s, s.calls[index].prefill_engine, now)  # its cache has room again
    elif kind == RELOADED:
        r = s.calls[index].prefill_engine
        _wait(plan, s, index, now)
    elif kind == ENCODED:
        r = s.calls[index].prefill_engine
        _find(plan, s, index, now)
    else:
        r = _arrive(plan, s, index, now)
    _work(plan, s, r, now)


def _stamped(stamp: str) -> Any:
    """The loop, compiled once for each state of its source."""

    @kept
    def play(plan: Plan, s: State, starts: Records, warm: Records) -> None:
        """Play until everything measured has left, nothing happens any more, or the horizon is reached.

        `starts` are the sessions that start at a given time, in order; those after them follow when one ends.
        `warm` are the sessions that some engine's cache holds at the beginning, the one used longest ago first.
        """
        _ = stamp
        clock, events, started = s.clock[0], s.events, 0
        for i in range(len(warm)):
            session = s.sessions[warm[i]]
            enter_cache(plan, s, warm[i], session.home, session.tokens, session.since_s)
            if plan.keeps:
                r = plan.prefill_engines + session.home % plan.decode_engines
                enter_cache(plan, s, warm[i] + len(s.sessions) // 2, r, session.tokens, session.since_s)
        for r in range(len(s.engines)):
            make_room(plan, s, r)
        while True:
            coming_s = inf
            if started < len(starts):
                coming_s = s.sessions[starts[started]].start_s + plan.request_s
            if clock.events > 0 and events[0].time_s <= coming_s:
                now, kind, index = events[0].time_s, events[0].kind, events[0].index
                void = kind == PASS and events[0].version != s.engines[index].version
                pop_event(s)
                if void:
                    continue
            elif started < len(starts):
                now, kind, index = coming_s, ARRIVAL, s.sessions[starts[started]].first_call
                started += 1
            else:
                return
            if now > plan.horizon_s or (now - plan.request_s > plan.window_end_s and clock.outstanding == 0):
                return
            clock.now_s = now
            clock.taken += 1
            _take(plan, s, kind, index, now)

    return play


play = _stamped(source_digest())
