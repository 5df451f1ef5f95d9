"""Starting an engine's next pass: prefill, a chunk beside decode, or decode that jumps to the next change."""

from breakeven.models.simulation.admission import begin_prefill, enters_batch
from breakeven.models.simulation.batches import launch, make_way
from breakeven.models.simulation.compiled import compiled, seldom
from breakeven.models.simulation.queues import push_event, resumable, unlink
from breakeven.models.simulation.state import CHUNKED, COLOCATED, PREFILLED, Plan, State
from breakeven.models.simulation.step_times import apart_decode_s, apart_prefill_s, decode_s, mixed_s


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
        if not calls[c].begun and not begin_prefill(plan, s, r, c, start_s):
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
        if (tokens > 0.0 and tokens + n > plan.decode_budget) or not enters_batch(plan, s, r, c):
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
    launch(s, r, 0, 0.0, now)
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
    launch(s, r, 1 if together else 0, 0.0, now)
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
    launch(s, r, steps, growth, start_s)


@compiled
def start_pass(plan: Plan, s: State, r: int, now: float) -> None:
    """Start the engine's next pass if it is free: prefill before decode, or both together when chunked."""
    engine = s.engines[r]
    if engine.busy:
        return
    if plan.mode == CHUNKED:
        make_way(plan, s, r, now)
    if engine.prefills and engine.head >= 0 and _start_prefill(plan, s, r, now):
        return
    if plan.mode == COLOCATED:
        make_way(plan, s, r, now)
    if plan.local_tokens > 0.0 and not engine.prefills and _start_local(plan, s, r, now):
        return
    if engine.batch > 0:
        _start_decode(plan, s, r, now)
