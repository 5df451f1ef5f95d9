"""The decode batch of an engine, and the pass it is in: joining and leaving it, cutting a pass short, preemption."""

from math import ceil, sqrt

from breakeven.models.simulation.compiled import compiled, seldom
from breakeven.models.simulation.queues import (
    enter_cache,
    latest,
    make_room,
    push_event,
    push_key,
    put_back,
    remove_keys,
)
from breakeven.models.simulation.state import PASS, Plan, Records, State


@compiled
def measured_s(plan: Plan, start_s: float, end_s: float) -> float:
    """Seconds of an interval inside the measured window."""
    return max(min(end_s, plan.window_end_s) - max(start_s, plan.window_start_s), 0.0)


@compiled
def _pass_s(engine: Records, steps: int) -> float:
    """Duration of `steps` steps of the engine's pass: each is longer by its growth than the one before."""
    return steps * engine.step_s + 0.5 * engine.growth_s * steps * (steps - 1)


@compiled
def cut_pass(s: State, r: int, now: float) -> None:
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
def join_batch(plan: Plan, s: State, r: int, c: int) -> None:
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
def leave_batch(plan: Plan, s: State, r: int, length: float) -> None:
    """A call that holds `length` tokens decodes no more."""
    engine, topk = s.engines[r], plan.decode.sparse_topk
    engine.batch -= 1
    engine.context -= length
    engine.selected -= min(length, topk)


@compiled
def make_way(plan: Plan, s: State, r: int, now: float) -> None:
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
        leave_batch(plan, s, r, held)
        if held < topk:
            engine.growing -= 1
        call.begun, call.written = False, written
        put_back(s, r, c)
    enter_cache(plan, s, call.session, r, held - call.shared, now)
    s.sessions[call.session].resumes = True


@compiled
def launch(s: State, r: int, steps: int, growth_s: float, start_s: float) -> None:
    """Begin the pass that the engine's fields describe: `steps` of its batch, or prefill alone."""
    engine = s.engines[r]
    engine.busy, engine.start_s, engine.growth_s, engine.ahead = True, start_s, growth_s, steps
    engine.decoding = engine.batch if steps > 0 else 0
    engine.widening = engine.growing if steps > 0 else 0
    push_event(s, start_s + _pass_s(engine, max(steps, 1)), PASS, r, engine.version)
