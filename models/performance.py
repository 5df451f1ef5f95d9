"""What a deployment does under its load: latency distributions, utilizations, and limits it breaks.

Pools of stages -> the fixed point they settle at -> waits -> latencies. Every topology passes through the same lines:
which stages share a pool only decides which terms are zero.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from breakeven.models.attainment import Latency, TokenTime
from breakeven.models.bundle import Bundle, PrefillTime, bundle, common_divisor, prefill_call
from breakeven.models.closed import first_wave, held_back
from breakeven.models.economics import Fleet, fleet
from breakeven.models.llm import LLM
from breakeven.models.memory import Memory, kv_bytes_per_token, pool_memory
from breakeven.models.numerics import TINY
from breakeven.models.operating_point import (
    OperatingPoint,
    Pools,
    State,
    decode_step_at,
    decode_utilization,
    operating_point,
)
from breakeven.models.queueing import Moments, Wait, autocorrelation_share
from breakeven.models.reload import continued_share, reload
from breakeven.models.settle import Closed, closed_with_derivatives, settle, settle_closed, warm, with_derivatives
from breakeven.models.steps import Coefficients, StepTime, kv_shards, prefill_chunks
from breakeven.models.tables import Catalog, Engine, Resolved
from breakeven.models.waits import CallWaits, call_waits
from breakeven.models.workload import PrefillNodes, Workload

StageCoefficients = tuple[Coefficients, Coefficients]  # attention, feed-forward


class Prefill(NamedTuple):
    """Prefill of a call, by node; (n, 2 x nodes): first those that find their prefix, then those that lost it."""

    latency_s: Array
    transfer_s: Array
    terms: StepTime  # of the mean call that finds its prefix, (n,)


class Busy(NamedTuple):
    """Utilizations of prefill and decode engines, of the link and of the path to the KV tiers, shapes (n,)."""

    prefill: Array
    decode: Array
    link: Array
    tiers: Array


class Violations(NamedTuple):
    """Relative excess over each limit, shapes (n,): feasible where all are <= 0."""

    weights: Array
    kv_cache: Array
    prefill: Array
    decode: Array
    link: Array
    tiers: Array
    budget: Array
    power: Array
    inventory: Array


class Doubts(NamedTuple):
    """Where the queueing approximations were not confirmed by simulation, booleans of shape (n,)."""

    shared_pool_busy: Array  # above half load, prefill and decode in one pool
    decode_busy: Array  # decode above 0.8
    batch_limit: Array  # more than 2 % wait for room in the decode batch
    link_busy: Array  # bursty prefill over a link above 0.3
    few_prefill_engines: Array  # one or two, with a heavy-tailed prompt
    cache_unsettled: Array  # a surge of sessions tips it over for good, or the fixed point was not reached
    cache_short: Array  # more than 2 % of continued calls lose their prefix, 5 % where prefill is apart
    in_step: Array  # prefill and decode in a pool whose pipeline stages or data-parallel ranks keep step
    sides_apart: Array  # attention apart from feed-forward layers, which is not simulated


class Performance(NamedTuple):
    """What a deployment does, before any SLO; `explain` shows it, `attain` scores it."""

    latency: Latency
    point: OperatingPoint
    pools: Pools
    session_rate: Array
    utilization_prefill: Array
    utilization_decode: Array
    utilization_link: Array
    decode_step: StepTime
    prefill_call: StepTime  # of the mean call that finds its prefix
    admission: Wait
    reload: Wait  # for the prefix from the tiers below HBM
    fleet: Fleet
    violations: Violations
    doubts: Doubts


def _service_moments(nodes: PrefillNodes, latency_s: Array, token_s: Array, pair_s: Array, occupancy: Array) -> Moments:
    """Raw moments of the time a call occupies its prefill engine.

    The part linear in tokens and pairs uses the workload's exact moments (the tail carries half the work); what
    weight traffic and launches add to it is corrected on the nodes.
    """
    base = jnp.sum(nodes.weight * (latency_s - token_s[:, None] * nodes.tokens - pair_s[:, None] * nodes.pairs), -1)
    base = jnp.maximum(base, 0.0)
    x, y = token_s * nodes.mean_tokens, pair_s * nodes.mean_pairs
    linear = base[:, None] + token_s[:, None] * nodes.tokens + pair_s[:, None] * nodes.pairs
    m = nodes.moments
    first = base + x + y
    second = base**2 + 2.0 * base * (x + y) + x * x * m[2, 0] + 2.0 * x * y * m[1, 1] + y * y * m[0, 2]
    third = (
        base**3
        + 3.0 * base**2 * (x + y)
        + 3.0 * base * (x * x * m[2, 0] + 2.0 * x * y * m[1, 1] + y * y * m[0, 2])
        + x**3 * m[3, 0]
        + 3.0 * x * x * y * m[2, 1]
        + 3.0 * x * y * y * m[1, 2]
        + y**3 * m[0, 3]
    )
    exact = [first, second, third]
    corrected = []
    for k, moment in enumerate(exact, start=1):
        shift = jnp.sum(nodes.weight * (latency_s**k - linear**k), -1)
        corrected.append(jnp.maximum(moment + shift, 0.2 * moment) * occupancy**k)
    return Moments(*corrected)


def _mate(nodes: PrefillNodes, token_s: Array, pair_s: Array, token_budget: Array) -> Moments:
    """Moments of the time that one step spends on a prompt beside what it costs anyway: at most a budget of it."""
    part = jnp.minimum(1.0, token_budget[:, None] / nodes.tokens)
    taken_s = part * (token_s[:, None] * nodes.tokens + pair_s[:, None] * nodes.pairs)
    return Moments(*(jnp.sum(nodes.weight * taken_s**k, -1) for k in (1, 2, 3)))


def _mean_chunks(nodes: PrefillNodes, token_budget: Array) -> Array:
    return jnp.sum(nodes.weight * prefill_chunks(nodes.tokens, token_budget[:, None]), -1)


def _pipelined(pass_s: Array, nodes: PrefillNodes, machine: Bundle, token_budget: Array) -> Array:
    """Latency of a prefill that takes `pass_s` in one accelerator group: its chunks follow one another through the p
    groups of a pipeline, so n chunks take (n + p - 1) / (n p) of it."""
    depth = machine.depth[:, None]
    chunks = prefill_chunks(nodes.tokens, token_budget[:, None])
    return pass_s * (1.0 + (depth - 1.0) / chunks) / depth


def _select(split: Array, shared: PrefillNodes, apart: PrefillNodes) -> PrefillNodes:
    """Nodes per candidate, (n, nodes): `apart` where prefill never saw the previous output."""

    def choose(a: Array, b: Array) -> Array:
        return jnp.where(split.reshape(-1, *[1] * a.ndim) > 0.5, b, a)

    chosen = jax.tree.map(choose, shared, apart)
    # moments are indexed [i, j] per candidate
    return PrefillNodes(**{**chosen.__dict__, "moments": jnp.moveaxis(chosen.moments, 0, -1)})


def kv_transfer_s(resolved: Resolved, catalog: Catalog, context: Array) -> Array:
    """Seconds one call's KV cache of `context` tokens takes from the prefill to the decode engine, (n, ...).

    Every rank that holds a shard sends it over its own port, as many ports as the side with fewer shards has.
    """
    llm, p, d = catalog.llm, resolved.prefill_attention, resolved.decode_attention
    ports = jnp.minimum(kv_shards(p, llm) * p.choice.pipeline_parallel, kv_shards(d, llm) * d.choice.pipeline_parallel)
    nic = jnp.minimum(p.hardware.nic_bytes_per_s, d.hardware.nic_bytes_per_s)
    port = jnp.where(
        resolved.link_through_nic > 0.5,
        jnp.minimum(resolved.link_bytes_per_s, nic),
        resolved.link_bytes_per_s,
    )
    shape = (-1, *[1] * (context.ndim - 1))
    per_token = kv_bytes_per_token(llm, resolved.kv_bytes_per_element.reshape(shape), context)
    time = resolved.link_latency_s.reshape(shape) + context * per_token / (ports * port).reshape(shape)
    apart = p.choice.pool != d.choice.pool
    return jnp.where(apart.reshape(shape), time, 0.0)


class Sharing(NamedTuple):
    """Which pools the phases share, booleans of shape (n,)."""

    attention: Array  # prefill attention runs in a pool that also decodes
    ffn: Array  # so do the feed-forward layers of prefill
    moves: Array  # the KV cache goes from one pool to another


def _sharing(resolved: Resolved) -> Sharing:
    pa, pf, da, df = (s.choice.pool for s in resolved.stages[1:])
    return Sharing((pa == da) | (pa == df), (pf == da) | (pf == df), pa != da)


def _bundles(resolved: Resolved, catalog: Catalog, sharing: Sharing, context_sd: Array) -> tuple[Bundle, Bundle]:
    """The machines of prefill and of decode. Where they share a pool, one prefills for one that decodes."""
    pa, pf, da, df = resolved.stages[1:]
    prefill, decode = pa.choice.replicas, da.choice.replicas
    if resolved.activations is not None:
        joint = pa.choice.pool == pf.choice.pool, da.choice.pool == df.choice.pool
        prefill = jnp.where(joint[0], prefill, common_divisor(prefill, pf.choice.replicas))
        decode = jnp.where(joint[1], decode, common_divisor(decode, df.choice.replicas))
        one_for_one, both = sharing.attention | sharing.ffn, common_divisor(prefill, decode)
        prefill, decode = (jnp.where(one_for_one, both, count) for count in (prefill, decode))
    paces = (None, None)
    if resolved.correction is not None:
        paces = resolved.correction.prefill_factor, resolved.correction.decode_factor
    return (
        bundle(resolved, catalog, pa, pf, prefill, 0.0 * context_sd, paces[0]),
        bundle(resolved, catalog, da, df, decode, context_sd, paces[1]),
    )


def coefficients(resolved: Resolved, catalog: Catalog) -> tuple[StageCoefficients, StageCoefficients]:
    """(prefill, decode): step coefficients of their attention and feed-forward stages, at the pace measured locally."""
    prefill, decode = ((machine.attention, machine.ffn) for machine in machines(resolved, catalog))
    return prefill, decode


def machines(resolved: Resolved, catalog: Catalog, context_sd: Array | float = 0.0) -> tuple[Bundle, Bundle]:
    """(of prefill, of decode): what each phase runs on, for sequences whose lengths have that standard deviation."""
    return _bundles(resolved, catalog, _sharing(resolved), context_sd * jnp.ones_like(resolved.balanced))


def _held_share(sharing: Sharing, hit: PrefillNodes, time: PrefillTime, machine: Bundle) -> Array:
    """Share of a prefill's occupancy of its bundle in which it holds decode up: all of it where both its sides run in
    pools that decode, else what it spends on the side that does."""
    if machine.split is None:
        return jnp.where(sharing.attention, 1.0, 0.0)
    busy, attention, ffn = (jnp.sum(hit.weight * x, -1) for x in (time.busy_s, time.attention_s, time.ffn_s))
    one_side = jnp.where(sharing.attention, attention, jnp.where(sharing.ffn, ffn * machine.ways, 0.0)) / busy
    return jnp.where(sharing.attention & sharing.ffn, 1.0, jnp.minimum(one_side, 1.0))


def _bundle_memory(memory: Memory, workers: Array, shared_prefix_tokens: Array) -> Memory:
    """Memory of a bundle whose every worker holds the shared prefix; that of the model counts it once."""
    extra = (workers - 1.0) * shared_prefix_tokens
    return memory._replace(capacity_tokens=workers * memory.capacity_tokens - extra)


def request_s(resolved: Resolved, workload: Workload, engine: Engine) -> tuple[Array, Array]:
    """(what the engine adds to every call, what is added to its first chunk alone), seconds.

    A measured constant of TTFT delays the call; where it takes away more than the engine's own constant, the rest is
    time that the first chunk is not held back.
    """
    p, d = resolved.prefill_attention, resolved.decode_attention
    handover_s = jnp.where(p.choice.pool == d.choice.pool, 0.0, engine.handover_s)
    own = engine.request_s + engine.request_token_s * workload.mean_prompt + handover_s
    if resolved.correction is None:
        return own, jnp.zeros_like(own)
    moved = own + resolved.correction.first_token_s
    return jnp.maximum(moved, 0.0), jnp.minimum(moved, 0.0)


def build_pools(resolved: Resolved, workload: Workload, catalog: Catalog) -> tuple[Pools, Prefill, PrefillNodes]:
    """Everything the load does not change."""
    llm, engine = catalog.llm, catalog.engine
    p, d = resolved.prefill_attention, resolved.decode_attention
    one, budget = jnp.ones_like(p.choice.replicas), p.choice.token_budget
    sharing = _sharing(resolved)
    prefill, decode = _bundles(resolved, catalog, sharing, jnp.sqrt(workload.decode_context_var) * one)
    hit = _select(jnp.where(sharing.moves, 1.0, 0.0), workload.resident, workload.recomputed)
    lost = workload.missed
    hit_time = prefill_call(prefill, llm, hit.tokens, hit.pairs, hit.context, budget)
    lost_time = prefill_call(prefill, llm, lost.tokens, lost.pairs, lost.context, budget)
    hit_latency_s = _pipelined(hit_time.alone.total_s, hit, prefill, budget)
    missed_latency_s = _pipelined(lost_time.alone.total_s, lost, prefill, budget)
    token_s, pair_s, ways = hit_time.token_s, hit_time.pair_s, prefill.ways
    contexts = jnp.concatenate([hit.context, jnp.broadcast_to(lost.context, hit.context.shape)], axis=-1)
    transfer_s = kv_transfer_s(resolved, catalog, contexts)
    nodes = hit.weight.shape[-1]
    shared = _held_share(sharing, hit, hit_time, prefill)
    prefill_memory = pool_memory(resolved, p, llm, engine, workload.mean_prompt)
    decode_memory = pool_memory(resolved, d, llm, engine, workload.decode_context)
    prefill_latency_s = jnp.sum(hit.weight * hit_latency_s, -1)
    lost_latency_s = jnp.sum(lost.weight * missed_latency_s, -1)
    recompute_s = (lost_latency_s - prefill_latency_s) / continued_share(workload)
    pools = Pools(
        decode=decode,
        resident=_service_moments(hit, hit_time.busy_s, token_s, pair_s, 1.0 / ways),
        missed=_service_moments(lost, lost_time.busy_s, lost_time.token_s, lost_time.pair_s, 1.0 / ways),
        resident_chunks=_mean_chunks(hit, budget),
        missed_chunks=_mean_chunks(lost, budget),
        marginal_s=token_s * hit.mean_tokens + pair_s * hit.mean_pairs,
        mate=_mate(hit, token_s, pair_s, budget),
        prefill_latency_s=prefill_latency_s,
        missed_latency_s=lost_latency_s,
        prefill_memory=_bundle_memory(prefill_memory, prefill.workers, workload.shared_prefix_tokens),
        decode_memory=_bundle_memory(decode_memory, decode.workers, workload.shared_prefix_tokens),
        prefill_replicas=prefill.count,
        decode_replicas=decode.count,
        prefill_workers=prefill.workers,
        prefill_ways=ways,
        prefill_ranks=jnp.where(prefill.workers > 1.0, 1.0, p.choice.data_parallel),
        token_budget=budget,
        max_batch=d.choice.max_batch * decode.workers,
        shared=shared,
        holding_ways=jnp.where(sharing.attention, ways, 1.0),
        moves=jnp.where(sharing.moves, 1.0, 0.0),
        chunked=jnp.where(sharing.attention & sharing.ffn & ~sharing.moves, p.choice.chunked, 0.0),
        prefill_balanced=resolved.balanced,
        decode_balanced=jnp.where(sharing.moves, 1.0, resolved.balanced),
        transfer_s=jnp.sum(hit.weight * transfer_s[:, :nodes], -1),
        transfer_s2=jnp.sum(hit.weight * transfer_s[:, :nodes] ** 2, -1),
        request_s=request_s(resolved, workload, engine)[0] * one,
        reserve_tokens=workload.decode_context + (engine.reserve_output_share - 0.5) * workload.mean_output * one,
        reload=reload(resolved, hit, workload, llm, recompute_s, prefill.workers),
    )
    mean_terms = StepTime(*(jnp.sum(hit.weight * term, -1) for term in hit_time.alone))
    return pools, Prefill(jnp.concatenate([hit_latency_s, missed_latency_s], -1), transfer_s, mean_terms), hit


def pools(resolved: Resolved, workload: Workload, catalog: Catalog) -> Pools:
    """The pools of each candidate, before any load."""
    return build_pools(resolved, workload, catalog)[0]


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
        usual = settle(*fixed, lax.stop_gradient(rate), warm(one))
    else:
        rate, usual = settle_closed(*fixed, lax.stop_gradient(sessions) * one)
    fixed_rate = lax.stop_gradient(rate)
    surged = settle(*fixed, fixed_rate * _surge(*fixed, fixed_rate), usual)
    after = settle(*fixed, fixed_rate, surged)
    tipped = jnp.abs(after.miss - usual.miss) > 0.05
    state = State(*(jnp.where(tipped, a, b) for a, b in zip(after, usual, strict=True)))
    if sessions is None:
        return rate, with_derivatives(state, *given, rate), tipped
    rate, state = closed_with_derivatives(Closed(rate, state), *given, sessions * one)
    return rate, state, tipped


def _surge(pools: Pools, workload: Workload, llm: LLM, rate: Array) -> Array:
    """Load of an engine with two standard deviations more live sessions than usual, over its usual load.

    Of a closed population only the share that one of r engines has fluctuates: binomially, not like Poisson.
    """
    calls, thinks = workload.calls_per_session, workload.calls_per_session - 1.0
    step_s = decode_step_at(pools, llm, jnp.ones_like(rate), workload.decode_context).total_s
    session_s = calls * (pools.prefill_latency_s + workload.mean_steps * step_s) + thinks * workload.gap_mean_s
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
    base = a + (b - per_context * context) * own + per_context * context * (own - 1.0) + 0.3 * b * point.batch_mates
    base = base[:, None] + per_context[:, None] * workload.output_context
    # A call from another pool waits for the step in progress; one from the same pool starts with a step of its own.
    own_step_s = jnp.where(pools.moves > 0.5, step, 0.0)[:, None]
    base = base + 0.5 * own_step_s * workload.output_inverse

    spread = b**2 * point.batch_variance + per_context**2 * batch * workload.decode_context_var
    memory_s = workload.mean_steps2 / workload.mean_steps * step * point.slowdown / (1.0 - busy)
    variance = spread[:, None] * autocorrelation_share(steps * (step * point.slowdown / memory_s)[:, None])
    variance = variance + per_context[:, None] ** 2 * workload.output_context_var
    inverse, inverse2 = workload.output_inverse, workload.output_inverse2
    variance = variance + own_step_s**2 * (inverse2 / 3.0 - inverse**2 / 4.0)
    mean = base + (b * batch)[:, None]
    probability, stall_s, stall_variance = _stalls(point, pools, workload, mean, steps)
    return TokenTime(base, b * batch, variance, probability, stall_s, stall_variance)


def _stalls(
    point: OperatingPoint, pools: Pools, workload: Workload, token_s: Array, steps: Array
) -> tuple[Array, Array, Array]:
    """(probability, mean, variance) of what prefill in the pool adds to a call's TPOT, per output node (n, O).

    A call is stalled if a prefill starts while it decodes, or was ahead of it when it began; else not at all.
    """
    # A queue is empty behind a call that leaves it with probability 1 - utilization.
    left = 1.0 - jnp.clip(point.prefill_utilization, 0.0, 1.0)[:, None]
    probability = jnp.clip(1.0 - left * jnp.exp(-point.prefill_rate[:, None] * steps * token_s), 1e-6, 1.0)
    passes = point.burst_passes + 1e-6
    lasts = jnp.expm1(-steps / passes[:, None]) / jnp.expm1(-workload.mean_steps / passes)[:, None]
    mean = (point.slowdown - 1.0)[:, None] * token_s + point.prefill_delay_s[:, None] * lasts / steps
    variance = _stall_variance(point, pools, steps)
    given = mean / probability
    given_variance = jnp.maximum((variance + mean**2) / probability - given**2, 0.02 * given**2)
    return jnp.where(pools.shared > 0.0, 1.0, 0.0)[:, None] * probability, given, given_variance


def _stall_variance(point: OperatingPoint, pools: Pools, steps: Array) -> Array:
    """Variance over calls of the mean stall per token, (n, O): whole prefills, or the chunks that slow steps."""
    idle = 1.0 - point.prefill_share
    work = point.prefill_rate * point.stall.second
    first = (work * point.step_s / idle**3)[:, None] / steps
    slower = jnp.maximum(point.chunk_step_s - point.step_s, 0.0)
    share = jnp.clip(point.chunk_rate / (point.chunk_rate + idle / point.step_s + TINY), 0.0, 1.0)
    pace = point.slowdown * point.step_s
    bursts = pace**3 * (slower / (point.step_s * point.chunk_step_s)) ** 2 * work
    single = share * (1.0 - share) * slower**2
    chunked = 1.0 / (steps / (bursts + TINY)[:, None] + 1.0 / (single + TINY)[:, None])
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
    call_mean = wait.average_s + brief.average_s + first + output
    first_chunk_s, moving, stall = _first_chunk(token, workload, catalog.engine.first_chunk_steps)
    call_variance = (
        wait.variance_s2
        + brief.variance_s2
        + jnp.maximum(first2 - first**2, 0.0)
        + jnp.maximum(output2 - output**2, 0.0)
    )
    return Latency(
        wait=wait,
        brief=brief,
        prefill_s=prefill_s,
        prefill_weight=weight,
        token=token,
        steps=workload.output_steps,
        output_weight=workload.output_weight,
        session_calls=workload.session_calls,
        session_weight=workload.session_weight,
        gap_mean_s=workload.gap_mean_s,
        gap_variance=workload.gap_var_s,
        call_mean_s=call_mean,
        call_variance=call_variance,
        # A measured constant may say that the first chunk is held back less than the engine does.
        first_chunk_s=first_chunk_s + jnp.maximum(request_s(resolved, workload, catalog.engine)[1], -first_chunk_s),
        first_chunk_batch=moving,
        first_chunk_stall=stall,
    )


def _first_chunk(token: TokenTime, workload: Workload, most_steps: Array) -> tuple[Array, Wait, Wait]:
    """(seconds from the first token to the first chunk's arrival, those that move with the batch, what stalls add):
    of a few steps, or of all there are."""
    steps = jnp.minimum(workload.output_steps, most_steps)
    weight = workload.output_weight
    base_s = jnp.sum(weight * steps * token.base_s, -1)
    moving_s = jnp.sum(weight * steps, -1) * token.batch_s + TINY
    variance = jnp.sum(weight * steps**2 * token.variance, -1)
    moving = Wait(jnp.ones_like(moving_s), moving_s, jnp.clip(variance / moving_s**2, 0.02, 3.0))
    stalled = weight * token.stall_probability
    probability = jnp.sum(stalled, -1)
    total_s = jnp.sum(stalled * steps * token.stall_s, -1)
    second = jnp.sum(stalled * steps**2 * (token.stall_variance + token.stall_s**2), -1)
    mean_s = total_s / (probability + 1e-12)  # 0 in a pool of its own; squared, as in derivatives, still a number
    cv2 = second / (probability * mean_s**2 + 1e-18) - 1.0
    return base_s, moving, Wait(probability, mean_s, jnp.clip(cv2, 0.02, 1e4))


def performance(resolved: Resolved, workload: Workload, catalog: Catalog) -> Performance:
    """Latency distributions, utilizations, fleet and violated limits of each candidate, shapes (n, ...)."""
    pools, prefill, hit = build_pools(resolved, workload, catalog)
    rate, state, tipped = _operating_state(pools, workload, catalog)
    seen = jnp.ones_like(rate)
    if workload.concurrent_sessions is not None:
        seen = seen * jnp.maximum(1.0 - 1.0 / workload.concurrent_sessions, 0.0)
    point = operating_point(state, pools, workload, catalog.llm, rate, seen)
    miss = state.miss[:, None]
    missed_weight = jnp.broadcast_to(workload.missed.weight, hit.weight.shape)
    weight = jnp.concatenate([hit.weight * (1.0 - miss), missed_weight * miss], -1)

    waits = call_waits(point, pools, workload, catalog.llm, seen)
    latency = _latency(point, pools, prefill, weight, waits, workload, resolved, catalog)
    if workload.concurrent_sessions is not None:
        latency = held_back(latency, rate, workload)
    if workload.first_wave_share is not None:
        latency = first_wave(latency, point, pools, workload, catalog.engine)
    decode_use = decode_utilization(point, pools, workload, catalog.llm)
    money = fleet(resolved, catalog.economy, pool_use(resolved, point.prefill_utilization, decode_use))
    return Performance(
        latency=latency,
        point=point,
        pools=pools,
        session_rate=rate,
        utilization_prefill=point.prefill_utilization,
        utilization_decode=decode_use,
        utilization_link=waits.link_utilization,
        decode_step=decode_step_at(pools, catalog.llm, state.batch, workload.decode_context),
        prefill_call=prefill.terms,
        admission=waits.admission,
        reload=waits.reload,
        fleet=money,
        violations=limits_broken(
            resolved,
            pools,
            workload,
            Busy(point.prefill_utilization, decode_use, waits.link_utilization, waits.reload_utilization),
            money,
            catalog,
        ),
        doubts=_doubts(resolved, pools, state, point, decode_use, waits, tipped),
    )


def pool_use(resolved: Resolved, prefill: Array, decode: Array) -> tuple[Array, ...]:
    """Share of time that the pool of each stage is busy: with what keeps it busiest."""
    stages, found = resolved.stages, []
    for stage in stages:
        use = jnp.zeros_like(prefill)
        for other, share in zip(stages[1:], (prefill, prefill, decode, decode), strict=True):
            use = jnp.where(other.choice.pool == stage.choice.pool, jnp.maximum(use, share), use)
        found.append(use)
    return tuple(found)


def limits_broken(
    resolved: Resolved,
    pools: Pools,
    workload: Workload,
    busy: Busy,
    money: Fleet,
    catalog: Catalog,
) -> Violations:
    """Excess over each limit at these utilizations."""
    economy, engine = catalog.economy, catalog.engine
    p, d = resolved.prefill_attention, resolved.decode_attention
    others = (
        [resolved.encode]
        if resolved.activations is None
        else [resolved.encode, resolved.prefill_ffn, resolved.decode_ffn]
    )
    memory = [pool_memory(resolved, s, catalog.llm, engine, workload.mean_prompt) for s in others]
    memory += [pools.prefill_memory, pools.decode_memory]
    short = [-m.free_bytes / s.hardware.memory_bytes for m, s in zip(memory, (*others, p, d), strict=True)]
    room = jnp.minimum(
        pools.prefill_memory.capacity_tokens / pools.prefill_workers,
        pools.decode_memory.capacity_tokens / pools.decode.workers,
    )
    return Violations(
        weights=functools.reduce(jnp.maximum, short),
        kv_cache=workload.max_tokens / jnp.maximum(room, 1.0) - 1.0,
        prefill=busy.prefill - 1.0,
        decode=busy.decode - 1.0,
        link=busy.link - 1.0,
        tiers=busy.tiers - 1.0,
        budget=money.cost_per_hour_usd / economy.budget_usd_per_hour - 1.0,
        power=money.power_w / economy.max_power_w - 1.0,
        inventory=money.inventory_excess,
    )


def _sides_apart(resolved: Resolved) -> Array:
    pa, pf, da, df = (s.choice.pool for s in resolved.stages[1:])
    return (pa != pf) | (da != df)


def _doubts(
    resolved: Resolved,
    pools: Pools,
    state: State,
    point: OperatingPoint,
    decode_use: Array,
    waits: CallWaits,
    tipped: Array,
) -> Doubts:
    service_cv2 = point.service.second / (point.service.first**2 + TINY) - 1.0
    moved = jnp.abs(point.state.batch / state.batch - 1.0) > 0.05
    return Doubts(
        shared_pool_busy=(pools.shared > 0.0) & (jnp.maximum(point.prefill_utilization, decode_use) > 0.5),
        decode_busy=point.state.decode_busy > 0.8,
        batch_limit=waits.admission.probability > 0.02,
        link_busy=(waits.link_utilization > 0.3) & (waits.departures_cv2 > 1.5),
        few_prefill_engines=(pools.shared <= 0.0) & (pools.prefill_replicas <= 2.0) & (service_cv2 > 4.0),
        cache_unsettled=tipped | moved,
        cache_short=state.miss > jnp.where(pools.shared > 0.5, 0.02, 0.05),
        in_step=(pools.shared > 0.5) & (pools.prefill_ways > 1.0),
        sides_apart=_sides_apart(resolved),
    )
