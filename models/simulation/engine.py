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

from math import inf
from typing import Any

from breakeven.models.simulation.admission import enters_batch
from breakeven.models.simulation.batches import cut_pass, join_batch, leave_batch, measured_s
from breakeven.models.simulation.calls import arrive, end_call, find_prefix, wait_for_prefill
from breakeven.models.simulation.compiled import compiled, kept, source_digest
from breakeven.models.simulation.keeping import decode_engine, decode_holds, left_decode
from breakeven.models.simulation.passes import start_pass
from breakeven.models.simulation.queues import enqueue, enter_cache, make_room, pop_event, pop_key, push_event
from breakeven.models.simulation.state import (
    ARRIVAL,
    ENCODED,
    PASS,
    PREFILLED,
    RELOADED,
    SPLIT,
    TRANSFERRED,
    Plan,
    Records,
    State,
)


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
        leave_batch(plan, s, r, length)
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
        left_decode(plan, s, c, need, now)
    end_call(plan, s, c, now)


@compiled
def _account(plan: Plan, s: State, r: int, now: float) -> None:
    """Busy time of a finished pass in the window, and its line in the log."""
    engine, clock = s.engines[r], s.clock[0]
    busy_s = measured_s(plan, engine.start_s, now)
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
def _finish_pass(plan: Plan, s: State, r: int, now: float) -> int:
    """An engine's pass is done: tokens are out. Returns the first call whose prompt it completed, -1 for none."""
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
    complete, engine.done = engine.done, -1
    return complete


@compiled
def _prefilled(plan: Plan, s: State, r: int, c: int, now: float) -> None:
    """A prompt is complete: its first token in a shared pool, its way over the link in a split one."""
    call, engine = s.calls[c], s.engines[r]
    engine.prefilling -= 1
    if call.written == 0.0:
        call.prefill_end_s = now
    if plan.mode == SPLIT and not call.local:
        engine.load -= 1
        sent = call.fresh_tokens if plan.keeps and decode_holds(plan, s, c, now) else call.prompt
        duration = plan.link_latency_s + plan.link_token_s * sent
        # Layer by layer it begins with prefill, and what the last layer needs comes after it.
        call.transfer_s = max(call.prefill_start_s if plan.link_last < 1.0 else now, engine.link_free_s)
        engine.link_free_s = call.transfer_s + duration / plan.link_ways
        engine.link_busy_s += measured_s(plan, call.transfer_s, engine.link_free_s)
        last_s = now + plan.link_latency_s + plan.link_last * (duration - plan.link_latency_s)
        push_event(s, max(call.transfer_s + duration, last_s), TRANSFERRED, c, 0)
        return
    call.decode_engine = r
    if call.written == 0.0:
        call.first_s = now
    if call.output - call.written <= 1.0:
        _end_on(plan, s, r, c, now)
    else:
        join_batch(plan, s, r, c)


@compiled
def _transferred(plan: Plan, s: State, c: int, now: float) -> int:
    """A call's cache has reached the decode pool; its session's prefix stays behind. Returns the decode engine."""
    call = s.calls[c]
    own = call.prompt - call.shared
    s.engines[call.prefill_engine].reserved -= own
    enter_cache(plan, s, call.session, call.prefill_engine, own, now)
    r = decode_engine(plan, s, c)
    call.decode_engine = r
    if call.output <= 1.0:
        call.first_s = now
        end_call(plan, s, c, now)
        return r
    s.engines[r].load += 1
    enqueue(s, r, c)
    cut_pass(s, r, now)
    return r


@compiled
def _admit_waiting(plan: Plan, s: State, r: int, now: float) -> None:
    """Let calls that wait at a decode engine join its batch while there is room."""
    engine = s.engines[r]
    while engine.head >= 0 and not s.calls[engine.head].local:
        c = engine.head
        if not enters_batch(plan, s, r, c):
            return
        s.calls[c].first_s = now
        join_batch(plan, s, r, c)


@compiled
def _take(plan: Plan, s: State, kind: int, index: int, now: float) -> None:
    """Let one event happen, and start what engines can do then.

    Each of the larger functions is called from one place: what is compiled in twice takes twice as long to compile.
    """
    r, roomier, complete = index, -1, -1
    if kind == PASS:
        complete = _finish_pass(plan, s, r, now)
    elif kind == PREFILLED:
        r, complete = s.calls[index].prefill_engine, index
        cut_pass(s, r, now)
    elif kind == TRANSFERRED:
        roomier = s.calls[index].prefill_engine  # its cache has room again
        r = _transferred(plan, s, index, now)
    elif kind == RELOADED:
        r = s.calls[index].prefill_engine
        wait_for_prefill(plan, s, index, now)
    elif kind == ENCODED:
        r = s.calls[index].prefill_engine
        find_prefix(plan, s, index, now)
    else:
        r = arrive(plan, s, index, now)
    while complete >= 0:
        after = s.calls[complete].next
        _prefilled(plan, s, r, complete, now)
        complete = after
    if kind == PASS:
        _retire(plan, s, r, now)
    if kind == TRANSFERRED or (kind == PASS and not s.engines[r].prefills):
        _admit_waiting(plan, s, r, now)
    for e in (roomier, r):
        if e >= 0:
            start_pass(plan, s, e, now)


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
