"""Who may begin to prefill, or to decode: room in the cache and in the batch."""

from breakeven.models.simulation.calls import images_of, parents_prefix, prefix_level
from breakeven.models.simulation.compiled import compiled
from breakeven.models.simulation.keeping import twin_of
from breakeven.models.simulation.queues import leave_cache, make_room, unlink
from breakeven.models.simulation.state import COLOCATED, HIT, MISSED, OPENING, READ, SPLIT, Plan, State
from breakeven.models.simulation.step_times import encode_s


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
def begin_prefill(plan: Plan, s: State, r: int, c: int, now: float) -> bool:
    """Admit a call to prefill, if there is room, with what it finds of its prefix."""
    call, engine = s.calls[c], s.engines[r]
    need = call.prompt - call.shared + _output_room(plan, s, c)
    next_step = engine.batch + engine.prefilling + 1 if plan.preempts and plan.mode == COLOCATED else 0
    if not _admits(plan, s, r, need + next_step, plan.mode != SPLIT):
        return False
    session = s.sessions[call.session]
    level = prefix_level(plan, s, c, r)
    held = call.found == READ or level >= 0
    if call.first and session.parent >= 0 and call.preempted == 0:
        held = parents_prefix(plan, s, c, r, now)
    if call.preempted == 0 and call.found != READ:
        # What moved down a tier while the call waited was read back meanwhile.
        kept = READ if level > 0 else HIT
        call.found = kept if held else (OPENING if call.first and session.parent < 0 else MISSED)
    if call.preempted == 0:
        call.prefill_start_s = now
        call.left = min(call.hit_tokens + session.behind, call.missed_tokens) if held else call.missed_tokens
        session.behind = 0.0
        if plan.encode.engines == 0:
            engine.encoding_s += encode_s(plan.encode, images_of(plan, s, c, held))
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
def enters_batch(plan: Plan, s: State, r: int, c: int) -> bool:
    """Take a call that waits first at a decode engine into service, if there is room."""
    call, engine = s.calls[c], s.engines[r]
    need = call.prompt - call.shared + call.output
    if not _admits(plan, s, r, need, True):
        return False
    unlink(s, r, -1, c)
    engine.reserved += need
    if plan.keeps and s.sessions[twin_of(s, c)].cached:
        leave_cache(plan, s, twin_of(s, c))
    make_room(plan, s, r)
    return True
