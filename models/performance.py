"""What a deployment does under its load: latency distributions, utilizations, and limits it breaks.

Pools of stages -> the fixed point they settle at -> waits -> latencies. Every topology passes through the same lines:
which stages share a pool only decides which terms are zero.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from breakeven.models.attainment import FirstChunk, Latency, Stall, TokenTime, Varying
from breakeven.models.bursts import in_the_last
from breakeven.models.closed import first_wave, held_back
from breakeven.models.economics import Fleet, fleet
from breakeven.models.limits import Busy, Doubts, Violations, doubts, limits_broken, pool_use
from breakeven.models.llm import LLM
from breakeven.models.numerics import TINY, choose, gamma_cdf
from breakeven.models.operating_point import (
    OperatingPoint,
    Pools,
    State,
    decode_step_at,
    decode_utilization,
    operating_point,
    prefill_servers,
)
from breakeven.models.pools import Prefill, build_pools, request_s
from breakeven.models.queueing import Wait, autocorrelation_share
from breakeven.models.retained import Nodes, by_kind, calls_ahead
from breakeven.models.settle import (
    Closed,
    closed_with_derivatives,
    settle,
    settle_again,
    settle_closed,
    with_derivatives,
)
from breakeven.models.steps import StepTime
from breakeven.models.tables import Catalog, Engine, Resolved
from breakeven.models.waits import CallWaits, Reads, call_waits
from breakeven.models.workload import Workload

RARE = 8.0  # how sharply prompts are told apart by their seconds


class Performance(NamedTuple):
    """What a deployment does, before any SLO; `explain` shows it, `attain` scores it."""

    latency: Latency
    point: OperatingPoint
    pools: Pools
    session_rate: Array
    utilization_prefill: Array
    utilization_decode: Array
    utilization_link: Array
    utilization_encode: Array  # of an encoder outside the pools that prefill
    decode_step: StepTime
    prefill_call: StepTime  # of the mean call that finds its prefix
    admission: Wait
    reads: Reads  # of prefixes from the tiers below HBM
    encode: Wait  # for such an encoder
    fleet: Fleet
    violations: Violations
    doubts: Doubts


def _operating_state(pools: Pools, workload: Workload, catalog: Catalog) -> tuple[Array, State, Array]:
    """(session rate, state, tipped over?): where the deployment settles, and stays after a surge.

    An open workload supplies its rate; a closed one has the rate at which its sessions are in progress. The number
    of live sessions of an engine fluctuates like a Poisson variable, as slowly as sessions last. Two standard
    deviations more of them can tip an engine over into a state where evicted prefixes feed on themselves; if it does
    not come back from there at its usual rate, that state is what the deployment is judged by.
    """
    one = jnp.ones_like(pools.shared)
    given = pools, workload, catalog.llm
    fixed = lax.stop_gradient(given)
    sessions = workload.concurrent_sessions
    if sessions is None:
        assert workload.sessions_per_second is not None
        rate = workload.sessions_per_second * one
        fixed_rate = lax.stop_gradient(rate)
        usual, after = settle(*fixed, fixed_rate, _surge(*fixed, fixed_rate))
    else:
        rate, usual = settle_closed(*fixed, lax.stop_gradient(sessions) * one)
        after = settle_again(*fixed, rate, _surge(*fixed, rate), usual)
    tipped = jnp.abs(after.miss - usual.miss) > 0.05
    state = choose(tipped, after, usual)
    if sessions is None:
        return rate, with_derivatives(state, *given, rate), tipped
    rate, state = closed_with_derivatives(Closed(rate, state), *given, sessions * one)
    return rate, state, tipped


def _surge(pools: Pools, workload: Workload, llm: LLM, rate: Array) -> Array:
    """Load of an engine with two standard deviations more live sessions than usual, over its usual load.

    Of a closed population only the share that one of r engines has fluctuates: binomially, not like Poisson.
    """
    calls = workload.calls_per_session
    step_s = decode_step_at(pools, llm, jnp.ones_like(rate), workload.decode_context).total_s
    session_s = workload.session_s(pools.prefill_latency_s + workload.mean_steps * step_s)
    live = rate / pools.prefill_replicas * session_s
    free = 1.0 if workload.concurrent_sessions is None else jnp.maximum(1.0 - 1.0 / pools.prefill_replicas, 0.0)
    return jnp.where(calls > 1.0, 1.0 + 2.0 * jnp.sqrt(free / jnp.maximum(live, 1.0)), 1.0)


def _token_times(point: OperatingPoint, pools: Pools, workload: Workload, catalog: Catalog) -> TokenTime:
    """Distribution of the time per output token, per output node."""
    context = workload.decode_context
    per_context = point.context_s
    a, b, own = point.fixed_s, point.marginal_s, point.own_batch
    batch, busy = point.seen_batch, point.state.decode_busy
    steps = jnp.maximum(workload.output_steps, 1.0)
    step = a + b * (batch + own)
    base = (a + b * own - per_context * context + 0.3 * b * point.delay.mates)[:, None]
    # A call from another pool waits for the step in progress; one from the same pool starts with a step of its own.
    own_step_s = jnp.where(pools.moves > 0.5, step * pools.decode.yielded, 0.0)[:, None]
    found = _found_decoding(point, pools)[:, None]
    base = base + 0.5 * found * own_step_s * workload.output_inverse

    spread = b**2 * point.batch_variance + per_context**2 * batch * workload.decode_context_var
    memory_s = workload.mean_steps2 / workload.mean_steps * step * point.slowdown / (1.0 - busy)
    variance = spread[:, None] * autocorrelation_share(steps * (step * point.slowdown / memory_s)[:, None])
    if pools.decode.speculation is not None:  # n tokens take n / E steps on average, of variance n v / E^3
        way = pools.decode.speculation
        variance = variance + (step**2 * way.variance / way.yielded)[:, None] / steps
    inverse, inverse2 = workload.output_inverse, workload.output_inverse2
    variance = variance + own_step_s**2 * found * (inverse2 / 3.0 - found * inverse**2 / 4.0)
    own_tokens = Varying(
        per_context[:, None] * workload.output_context, per_context[:, None] ** 2 * workload.output_context_var
    )
    others = Varying(jnp.broadcast_to((b * batch)[:, None], variance.shape), variance)
    common, rare = _stalls(point, pools, workload, base + own_tokens.mean_s + others.mean_s, steps)
    return TokenTime(base, own_tokens, others, common, rare)


def _found_decoding(point: OperatingPoint, pools: Pools) -> Array:
    """Probability that a call finds its decode engine at work, of sequences that are Poisson in number: with the least
    loaded of R engines, that there are R of them."""
    engines = jnp.where(pools.decode_balanced > 0.5, pools.decode_replicas, 1.0)
    return gamma_cdf(point.seen_batch * engines, engines, engines)


def _stalls(
    point: OperatingPoint, pools: Pools, workload: Workload, token_s: Array, steps: Array
) -> tuple[Stall, Stall]:
    """What common and rare prompts' prefill in the pool adds to a call's TPOT, per output node (n, O).

    A call is stalled if a prefill starts while it decodes, or was ahead of it when it began; else not at all.
    """
    # A queue is empty behind a call that leaves it with probability 1 - utilization.
    ahead = (point.joined * jnp.clip(point.prefill_utilization, 0.0, 1.0))[:, None]
    rate, held = point.joined * point.prefill_rate, pools.shared
    if pools.retained is not None:
        local = point.decode_rate * point.local
        rate, ahead = jnp.where(held > 0.0, rate, local), jnp.where(held[:, None] > 0.0, ahead, 0.0)
        held = jnp.maximum(held, local)
    passes = point.delay.passes + 1e-6
    lasts = jnp.expm1(-steps / passes[:, None]) / jnp.expm1(-workload.mean_steps / passes)[:, None] / steps
    once, once2 = point.delay.mean_s[:, None], point.delay.second_s2[:, None]
    slower = (point.slowdown - 1.0)[:, None] * token_s
    variance = _stall_variance(point, pools, steps) + jnp.maximum(once2 - once**2, 0.0) * lasts**2
    there = jnp.where(held > 0.0, 1.0, 0.0)[:, None]

    def stall(of: _Shares) -> Stall:
        calls, work, square = (share[:, None] for share in of)
        none = (1.0 - ahead * work) * jnp.exp(-rate[:, None] * calls * steps * token_s)
        probability = jnp.clip(1.0 - none, 1e-6, 1.0)
        mean = slower * work + once * lasts * square
        given = mean / probability
        spread = jnp.maximum((variance * square + mean**2) / probability - given**2, 0.02 * given**2)
        return Stall(there * probability, Varying(given, spread))

    rare = _rare_prompts(point, pools)
    return stall(_Shares(*(1.0 - share for share in rare))), stall(rare)


class _Shares(NamedTuple):
    """Of the prompts, of their seconds and of the squares of these, (n,)."""

    calls: Array
    work: Array
    square: Array


def _rare_prompts(point: OperatingPoint, pools: Pools) -> _Shares:
    """Shares of prompts longer than E[S^2] / E[S], the one in which a second of work lies on average."""
    weight, seconds = pools.node_weight(point.state.miss), pools.alone_s
    work = weight * seconds
    square = work * seconds
    typical = jnp.sum(square, -1, keepdims=True) / jnp.sum(work, -1, keepdims=True)
    over = jax.nn.sigmoid(RARE * (seconds / typical - 1.0))
    return _Shares(*(jnp.sum(part * over, -1) / jnp.sum(part, -1) for part in (weight, work, square)))


def _stall_variance(point: OperatingPoint, pools: Pools, steps: Array) -> Array:
    """Variance over calls of the mean stall per token, (n, O): whole prefills, or the chunks that slow steps."""
    idle, work = 1.0 - point.joined * point.prefill_share, point.joined * point.prefill_rate * point.stall.second
    if pools.retained is not None:
        local = point.decode_rate * point.local * pools.retained.local_moments.second
        idle, work = idle - point.encode_share, work + local
    first = (work * point.step_s / idle**3)[:, None] / steps
    slower = jnp.maximum(point.chunk_step_s - point.step_s, 0.0)
    share = jnp.clip(point.chunk_rate / (point.chunk_rate + idle / point.step_s + TINY), 0.0, 1.0)
    pace = point.slowdown * point.step_s
    bursts = pace**3 * (slower / (point.step_s * point.chunk_step_s)) ** 2 * work
    single = share * (1.0 - share) * slower**2
    # Seconds squared, negligible; the squares of smaller ones' inverses are no numbers in 32 bit, nor are derivatives.
    chunked = 1.0 / (steps / (bursts + 1e-15)[:, None] + 1.0 / (single + 1e-15)[:, None])
    return jnp.where(pools.chunked[:, None] > 0.5, chunked, first)


def _latency(
    point: OperatingPoint,
    pools: Pools,
    prefill: Prefill,
    weight: Array,
    waits: CallWaits,
    workload: Workload,
    resolved: Resolved,
    catalog: Catalog,
) -> Latency:
    token = _token_times(point, pools, workload, catalog)
    wait, brief = waits.long, waits.brief
    prefill_s = prefill.latency_s * point.riding[:, None] + prefill.transfer_s + pools.request_s[:, None]
    output = jnp.sum(workload.output_weight * workload.output_steps * token.mean_s, -1)
    square = token.mean_s**2 + token.total_variance
    output2 = jnp.sum(workload.output_weight * workload.output_steps**2 * square, -1)
    first = jnp.sum(weight * prefill_s, -1)
    first2 = jnp.sum(weight * prefill_s**2, -1)
    call_mean = wait.average_s + brief.average_s + waits.turn.mean_s + first + output
    # A measured constant may say that the first chunk is held back less than the engine does.
    constant_s = request_s(resolved, workload, catalog.engine)[1]
    soon = jnp.where(workload.output_steps < catalog.engine.first_chunk_steps, 1.0, 0.0)
    chunks = [_first_chunk(token, workload, of, catalog.engine, constant_s) for of in (1.0 - soon, soon)]
    call_variance = (
        wait.variance_s2
        + brief.variance_s2
        + waits.turn.variance
        + jnp.maximum(first2 - first**2, 0.0)
        + jnp.maximum(output2 - output**2, 0.0)
    )
    none = jnp.zeros_like(call_mean)
    forked = (none, none) if workload.forks is None else workload.forks.added(call_mean, call_variance)
    return Latency(
        wait=wait,
        brief=brief,
        turn_s=waits.turn.mean_s,
        turn_variance=waits.turn.variance,
        prefill_s=prefill_s,
        prefill_spread_s=prefill.spread_s,
        prefill_weight=weight,
        token=token,
        steps=workload.output_steps,
        output_weight=workload.output_weight,
        session_calls=workload.session_calls,
        session_weight=workload.session_weight,
        gap_mean_s=workload.gap_mean_s + forked[0],
        gap_variance=workload.gap_var_s + forked[1],
        call_mean_s=call_mean,
        call_variance=call_variance,
        chunk=chunks[0],
        brief_chunk=chunks[1],
        brief_output=soon,
    )


def _first_chunk(token: TokenTime, workload: Workload, of: Array, engine: Engine, constant_s: Array) -> FirstChunk:
    """The way of the first chunk, of the outputs `of` (O,): after a few steps, or after all there are."""
    steps = jnp.minimum(workload.output_steps, engine.first_chunk_steps)
    weight = workload.output_weight * of
    share = jnp.sum(weight)
    weight = weight / (share + 1e-9)
    shown_s = jnp.sum(weight * steps * token.steady_s, -1)
    second = jnp.sum(weight * steps**2 * (token.variance + token.steady_s**2), -1)
    none = (1.0 - token.common.probability) * (1.0 - token.rare.probability)
    probability = jnp.sum(weight * (1.0 - none), -1)
    total_s = jnp.sum(weight * steps * token.stall_mean_s, -1)
    square = jnp.sum(weight * steps**2 * (token.stall_variance + token.stall_mean_s**2), -1)
    mean_s = total_s / (probability + 1e-12)  # 0 in a pool of its own; squared, as in derivatives, still a number
    cv2 = square / (probability * mean_s**2 + 1e-18) - 1.0
    return FirstChunk(
        share=share * jnp.ones_like(shown_s),
        shown_s=jnp.maximum(shown_s + constant_s, 0.0),
        variance=jnp.maximum(second - shown_s**2, 1e-12),
        stall=Wait(probability, mean_s, jnp.clip(cv2, 0.02, 1e4)),
    )


def _with_others(prefill: Prefill, point: OperatingPoint, pools: Pools) -> Prefill:
    """Prefill with the prompts of others that come during all steps but the last, and are computed in that one."""
    before_s = prefill.before * pools.alone_s * point.stretch[:, None] / point.filled.depth[:, None]
    mean_s, variance = in_the_last(point.filled, prefill_servers(pools), before_s, prefill.room)
    one = jnp.where((pools.prefill_ranks <= 1.0) & (pools.prefill_workers <= 1.0), 1.0, 0.0)[:, None]
    spread_s = jnp.sqrt(prefill.spread_s**2 + one * variance + 1e-18)  # the root of 0 has no derivative
    return prefill._replace(latency_s=prefill.latency_s + one * mean_s, spread_s=spread_s)


def performance(resolved: Resolved, workload: Workload, catalog: Catalog) -> Performance:
    """Latency distributions, utilizations, fleet and violated limits of each candidate, shapes (n, ...)."""
    pools, prefill = build_pools(resolved, workload, catalog)
    rate, state, tipped = _operating_state(pools, workload, catalog)
    seen = jnp.ones_like(rate)
    if workload.concurrent_sessions is not None:
        seen = seen * jnp.maximum(1.0 - 1.0 / workload.concurrent_sessions, 0.0)
    point = operating_point(state, pools, workload, catalog.llm, rate, seen)
    weight = pools.node_weight(state.miss)
    prefill = _with_others(prefill, point, pools)
    if pools.retained is not None:
        ahead = calls_ahead(point.local, workload.calls_per_session)
        calls = by_kind(
            pools.retained, Nodes(prefill.latency_s, prefill.transfer_s, prefill.spread_s, weight), point.kept, ahead
        )
        prefill, weight = (
            prefill._replace(latency_s=calls.latency_s, transfer_s=calls.transfer_s, spread_s=calls.spread_s),
            calls.weight,
        )

    waits = call_waits(point, pools, workload, catalog.llm, seen)
    latency = _latency(point, pools, prefill, weight, waits, workload, resolved, catalog)
    if workload.concurrent_sessions is not None:
        latency = held_back(latency, rate, workload)
    if workload.first_wave_share is not None:
        latency = first_wave(latency, point, pools, workload, catalog.engine)
    decode_use = decode_utilization(point, pools, workload, catalog.llm)
    busy = Busy(
        point.prefill_utilization,
        decode_use,
        waits.link_utilization,
        waits.reads.utilization,
        waits.encode_utilization,
    )
    money = fleet(resolved, catalog.economy, pool_use(resolved, busy))
    return Performance(
        latency=latency,
        point=point,
        pools=pools,
        session_rate=rate,
        utilization_prefill=point.prefill_utilization,
        utilization_decode=decode_use,
        utilization_link=waits.link_utilization,
        utilization_encode=waits.encode_utilization,
        decode_step=decode_step_at(pools, catalog.llm, state.batch, workload.decode_context),
        prefill_call=prefill.terms,
        admission=waits.admission,
        reads=waits.reads,
        encode=waits.encode,
        fleet=money,
        violations=limits_broken(resolved, pools, workload, busy, money, catalog),
        doubts=doubts(resolved, pools, state, point, decode_use, waits, tipped),
    )
