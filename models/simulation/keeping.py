"""Decode engines that keep their sessions' KV cache between calls: which holds a session, and what is left."""

from breakeven.models.simulation.compiled import compiled, seldom
from breakeven.models.simulation.queues import enter_cache, least_loaded, leave_cache, make_room
from breakeven.models.simulation.state import Plan, State


@seldom
def left_decode(plan: Plan, s: State, c: int, tokens: float, now: float) -> None:
    """What becomes of a call's cache in a decode pool: kept there, or sent to join that of its prompt, if that is still
    in HBM of the engine that prefilled it."""
    index = s.calls[c].session
    if plan.keeps:
        enter_cache(plan, s, twin_of(s, c), s.calls[c].decode_engine, tokens, now)
        make_room(plan, s, s.calls[c].decode_engine)
    r = s.sessions[index].where
    if not plan.returns:
        return
    if s.sessions[index].cached and s.sessions[index].where == r and s.sessions[index].level == 0:
        leave_cache(plan, s, index)
        enter_cache(plan, s, index, r, tokens, now)
        make_room(plan, s, r)


@compiled
def twin_of(s: State, c: int) -> int:
    """What a decode engine holds of a call's session."""
    return s.calls[c].session + len(s.sessions) // 2


@compiled
def decode_holds(plan: Plan, s: State, c: int, now: float) -> bool:
    """Whether a decode engine still has the call before, or there was none."""
    call, twin = s.calls[c], s.sessions[twin_of(s, c)]
    if call.first:
        return s.sessions[call.session].parent < 0
    return twin.cached and now - twin.since_s <= plan.cache_ttl_s


@compiled
def decode_engine(plan: Plan, s: State, c: int) -> int:
    """Where a call decodes: with its session where that is kept, else on the engine with the fewest calls."""
    tie = (s.calls[c].tie * 977.0) % 1.0
    if not plan.keeps:
        return least_loaded(s, plan.prefill_engines, plan.decode_engines, tie)
    where = s.sessions[twin_of(s, c)].where
    return where if where >= 0 else plan.prefill_engines + int(tie * plan.decode_engines)
