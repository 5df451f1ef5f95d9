"""The fixed point a deployment settles at: prefill utilization, decode batch, and the cache misses they cause.

Prefill is a queue on uncached work. Decode is a processor-sharing pool whose batch follows from Little's law;
with a step time a + b B its batch is negative binomial. A pool that does both slows its decode by the share of
time prefill takes. Idle sessions keep their KV in what memory the active ones leave; evicted ones are prefilled
again, which closes the loop. The approximations and the constants marked `simulated` were read off
discrete-event simulations (shared pools 0.25 and 0.3, least-loaded routing 0.62, 0.14, 0.05 and 0.5).
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from breakeven.models.llm import LLM
from breakeven.models.memory import Memory
from breakeven.models.numerics import TINY, table_lookup
from breakeven.models.queueing import Moments, Wait, queue_wait
from breakeven.models.steps import Coefficients, StepTime, decode_step
from breakeven.models.workload import Workload

HIGHEST = 0.98  # utilizations are held below this inside the fixed point; the true ones decide saturation


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pools:
    """What the load does not change, of the pools that prefill and decode; shapes (n,) unless said."""

    attention: Coefficients  # decode stages
    ffn: Coefficients
    resident: Moments  # time one call's prefill occupies its engine, prefix held
    missed: Moments  # the same after its prefix was evicted
    resident_chunks: Array
    missed_chunks: Array
    marginal_s: Array  # mean prefill without weight traffic and launches, prefix held
    prefill_latency_s: Array  # mean latency, prefix held
    missed_latency_s: Array
    prefill_memory: Memory
    decode_memory: Memory
    prefill_replicas: Array
    decode_replicas: Array
    prefill_ways: Array  # prefills one engine works on at once: pipeline stages x data-parallel ranks
    pipeline_parallel: Array  # of decode
    data_parallel: Array
    token_budget: Array
    max_batch: Array
    shared: Array  # 1.0 where prefill and decode share a pool
    chunked: Array  # 1.0 where they share it in chunks
    prefill_balanced: Array  # 1.0: least loaded replica; 0.0: the session's own
    decode_balanced: Array
    transfer_s: Array  # mean KV transfer of a call


class State(NamedTuple):
    """What the iteration carries, shapes (n,)."""

    batch: Array  # sequences decoding in one engine, mean
    miss: Array  # share of continued calls whose prefix was evicted
    decode_busy: Array  # rate of decode work over the engine's marginal speed, below 1 when stable
    mates: Array  # prefills computed together, mean


class OperatingPoint(NamedTuple):
    """Where a deployment settles; per engine, shapes (n,)."""

    state: State
    prefill_rate: Array  # calls per second and engine
    decode_rate: Array
    service: Moments  # occupancy of one call's prefill, misses and batching included
    stretch: Array  # prefill time over its time alone and unbatched
    prefill_utilization: Array
    fixed_s: Array  # decode step a + b B near the operating batch
    marginal_s: Array
    step_s: Array  # step time at the batch a request sees
    slowdown: Array  # decode time over its time without prefill in the pool
    own_batch: Array  # own and mates' load that a request sees beside the mean batch
    prefill_delay_s: Array  # decode time lost once to the prefill burst a request arrives in
    batch_mates: Array  # requests released to decode together
    batch_variance: Array
    chunk_step_s: Array  # step that carries a prefill chunk
    chunk_rate: Array  # such steps per second
    active_tokens: Array


def decode_step_at(pools: Pools, llm: LLM, batch: Array, context: Array) -> StepTime:
    """One decode step of the deployment's decode engine at `batch`, by cause."""
    return decode_step(pools.attention, pools.ffn, llm, batch, context, pools.pipeline_parallel, pools.data_parallel)


def _linear_step(pools: Pools, llm: LLM, batch: Array, context: Array) -> tuple[Array, Array, Array]:
    """(step at `batch`, a, b) of the tangent a + b B to the step time at `batch`."""

    def total(b: Array) -> Array:
        return decode_step_at(pools, llm, b, context).total_s

    step, slope = jax.jvp(total, (batch,), (jnp.ones_like(batch),))
    fixed = jnp.maximum(step - slope * batch, 0.05 * step)
    return step, fixed, (step - fixed) / batch


def context_s(pools: Pools, llm: LLM, context: Array) -> Array:
    """Decode time per cached token and step of one sequence, seconds."""
    ways = pools.pipeline_parallel * pools.data_parallel
    selected = jnp.minimum(context, llm.sparse_topk) / context
    return (pools.attention.context_s + pools.attention.selected_context_s * selected) / ways


def own_load(decode_busy: Array, replicas: Array, balanced: Array) -> Array:
    """Sequences a request sees beside the mean batch: itself, less under least-loaded routing (simulated)."""
    spread = jnp.maximum(0.62 * (1.0 - decode_busy) - 0.14, -0.05)
    return jnp.where(balanced > 0.5, 1.0 / replicas + (1.0 - 1.0 / replicas) * spread, 1.0)


def most_sequences(pools: Pools, workload: Workload) -> Array:
    """Sequences an engine decodes at once at most: its batch limit or the KV cache they need, at least one."""
    fit = pools.decode_memory.capacity_tokens / workload.decode_context
    return jnp.maximum(jnp.minimum(pools.max_batch, fit), 1.0)


def cache_miss(pools: Pools, workload: Workload, session_rate: Array, active_tokens: Array) -> Array:
    """Share of continued calls that find their prefix evicted: LRU by its characteristic time.

    The memory left per session rate is the only number the tabulated curve needs (workload.cache_miss). A call
    that may go to any replica finds its session on the right one with probability 1 / replicas.
    """
    free = pools.prefill_memory.capacity_tokens - workload.shared_prefix_tokens - active_tokens
    work = jnp.log(jnp.maximum(free, 1.0) * pools.prefill_replicas / session_rate)
    kept = 1.0 - table_lookup(workload.cache_work, workload.cache_miss, work)
    kept = kept / jnp.where(pools.prefill_balanced > 0.5, pools.prefill_replicas, 1.0)
    return jnp.where(workload.calls_per_session > 1.0, 1.0 - kept, 0.0)


def _stretch(pools: Pools, state: State, service_s: Array, chunks: Array, marginal_s: Array) -> tuple[Array, Array]:
    """(stretch of prefill time, chunks per call) by batching of prefills, or by the decodes that ride in chunks."""
    floor = jnp.clip(1.0 - pools.marginal_s / pools.prefill_latency_s, 0.0, 1.0)
    batched = 1.0 - floor * (1.0 - 1.0 / state.mates)
    left = jnp.maximum(pools.token_budget - state.batch, 0.1 * pools.token_budget)
    chunks = 1.0 + (chunks - 1.0) * pools.token_budget / left
    riding = 1.0 + chunks * marginal_s * state.batch / service_s
    return jnp.where(pools.chunked > 0.5, riding, batched), chunks


def _unequal_parts(pools: Pools, load: Array) -> Array:
    """Stretch of prefill where micro-batches or ranks with prefill make those without it wait (joint pools).

    w micro-batches in flight take the time of the longest: one that alone carries a prefill holds all w of them, and
    only when all carry one is nothing lost. With x = w load the work of whole passes and each other one busy with
    probability rho, rho = (x / w) (1 + (w - 1)(1 - rho)), hence rho = x / (1 + x (1 - 1/w)) in place of x / w.
    """
    ways = pools.prefill_ways
    return jnp.where(pools.shared > 0.5, ways / (1.0 + load * (ways - 1.0)), 1.0)


def operating_point(
    state: State, pools: Pools, workload: Workload, llm: LLM, session_rate: Array, seen: Array
) -> OperatingPoint:
    """One pass of the fixed point at `session_rate` (per second, whole deployment).

    `seen` is the share of the others' load that an arrival sees: 1 in an open system, (N-1)/N in a closed one.
    """
    context, steps = workload.decode_context, workload.mean_steps
    calls = session_rate * workload.calls_per_session
    prefill_rate, decode_rate = calls / pools.prefill_replicas, calls / pools.decode_replicas
    own = own_load(state.decode_busy, pools.decode_replicas, pools.decode_balanced)
    step_s, fixed_s, marginal_s = _linear_step(pools, llm, seen * state.batch + own, context)

    alone = pools.resident.mixed(pools.missed, state.miss)
    chunks = pools.resident_chunks + state.miss * (pools.missed_chunks - pools.resident_chunks)
    stretch, chunks = _stretch(pools, state, alone.first, chunks, marginal_s)
    service = alone.scaled(stretch * _unequal_parts(pools, prefill_rate * alone.first * stretch))
    prefill_utilization = prefill_rate * service.first

    share = jnp.minimum(prefill_utilization, HIGHEST) * pools.shared
    idle = 1.0 - share
    chunk_step_s = service.first / chunks
    chunk_rate = jnp.where(pools.chunked > 0.5, share / chunk_step_s, 0.0)
    slowdown = 1.0 / (idle + chunk_rate * step_s)
    delay_s, mates = _prefill_bursts(pools, service, prefill_rate, share, step_s, chunk_step_s, chunk_rate, steps)

    busy = jnp.minimum(decode_rate * steps * slowdown * marginal_s, HIGHEST)
    per_context = context_s(pools, llm, context)
    spread = per_context**2 * workload.decode_context_var / marginal_s
    balanced = pools.decode_balanced > 0.5
    spread = spread / jnp.where(balanced, pools.decode_replicas, 1.0)
    work = slowdown * (fixed_s + marginal_s * (own + 0.25 * mates) + spread)
    batch = (decode_rate * steps * work + decode_rate * delay_s) / (1.0 - busy)
    batch = jnp.clip(batch, 1e-3, most_sequences(pools, workload))
    variance = (fixed_s / marginal_s + 1.0) * busy / (1.0 - busy) ** 2
    one = 1.0 / pools.decode_replicas
    variance = jnp.where(balanced, variance * one + 0.5 * (1.0 - one), variance) * (1.0 + 0.25 * mates)
    variance = variance * (1.0 + 0.5 * (workload.arrival_cv2 - 1.0) * one)

    active = _active_tokens(pools, workload, batch, prefill_rate, prefill_utilization)
    miss = cache_miss(pools, workload, session_rate, active)
    together = _prefill_mates(pools, workload, state, prefill_rate, prefill_utilization, service, step_s)
    return OperatingPoint(
        State(batch, miss, busy, together),
        prefill_rate,
        decode_rate,
        service,
        stretch,
        prefill_utilization,
        fixed_s,
        marginal_s,
        step_s,
        slowdown,
        own,
        delay_s,
        mates,
        variance,
        chunk_step_s,
        chunk_rate,
        active,
    )


def _prefill_bursts(
    pools: Pools,
    service: Moments,
    rate: Array,
    share: Array,
    step_s: Array,
    chunk_step_s: Array,
    chunk_rate: Array,
    steps: Array,
) -> tuple[Array, Array]:
    """(decode delay a request suffers from the prefill burst it came in, mates released with it) in a shared pool."""
    idle = 1.0 - share
    queue_s = 0.5 * rate * service.second / idle
    first_delay_s = (queue_s + service.first) * share / idle
    mates = (share * idle + rate**2 * service.second) / idle**2 + 1.0 / idle - 1.0

    burst_s = 0.5 * service.second / service.first / idle**2
    chunk_share = chunk_rate / (chunk_rate + idle / step_s + TINY)
    forget = 1.0 / (chunk_step_s / burst_s + rate * step_s + TINY)
    x = jnp.maximum(steps / forget, 1e-3)
    gain_s = jnp.maximum(chunk_step_s - step_s, 0.0)
    chunked_delay_s = jnp.maximum(steps * (share - chunk_share), 0.0) * (-jnp.expm1(-x) / x) * gain_s
    life_s = steps * step_s / idle
    chunked_mates = mates * life_s / (life_s + burst_s) * gain_s / chunk_step_s
    chunked = pools.chunked > 0.5
    return (
        pools.shared * jnp.where(chunked, chunked_delay_s, first_delay_s),
        pools.shared * jnp.where(chunked, chunked_mates, mates),
    )


def _active_tokens(
    pools: Pools, workload: Workload, batch: Array, prefill_rate: Array, prefill_utilization: Array
) -> Array:
    """Tokens of sequences in service on one engine of the prefill pool (decoding ones too where it is shared)."""
    in_prefill = jnp.minimum(prefill_utilization, 1.0) + prefill_rate * pools.transfer_s
    return pools.shared * batch * workload.decode_context + in_prefill * workload.mean_prompt


def _prefill_mates(
    pools: Pools,
    workload: Workload,
    state: State,
    rate: Array,
    utilization: Array,
    service: Moments,
    step_s: Array,
) -> Array:
    """Prefills computed in one step, mean: those that came during the last one, as far as the budget holds them."""
    share = jnp.minimum(utilization, HIGHEST)
    gathering_s = (1.0 - share) * step_s * pools.shared + share * state.mates * service.first
    came = jnp.clip(rate * gathering_s, 1e-3, 100.0)
    most = jnp.maximum(pools.token_budget / workload.resident.mean_tokens, 1.0)
    mates = jnp.minimum(came / -jnp.expm1(-came), most)
    return jnp.where(pools.chunked > 0.5, 1.0, mates)


def prefill_wait(point: OperatingPoint, pools: Pools, workload: Workload, seen: Array) -> Wait:
    """Wait for prefill at the operating point."""
    servers = jnp.where(pools.prefill_balanced > 0.5, pools.prefill_replicas, 1.0)
    # A session's burst is spread over its calls, and splitting over replicas thins it further.
    burst = (workload.arrival_cv2 - 1.0) / (workload.calls_per_session * pools.prefill_replicas / servers)
    return queue_wait(point.prefill_rate * seen, point.service, servers, 1.0 + burst)


def decode_utilization(point: OperatingPoint, pools: Pools, workload: Workload, llm: LLM) -> Array:
    """Share of the decode engine's time that its load needs at its largest batch, prefill in the pool included."""
    most = most_sequences(pools, workload)
    full_s = decode_step_at(pools, llm, most, workload.decode_context).total_s
    riding = point.chunk_rate * most
    tokens = jnp.maximum(point.decode_rate * workload.mean_steps - riding, 0.0)
    return pools.shared * point.prefill_utilization + tokens * full_s / most


def sessions_in_progress(state: State, pools: Pools, workload: Workload, llm: LLM, rate: Array, seen: Array) -> Array:
    """Sessions in progress at session rate `rate` (Little's law); infinite where a pool is saturated."""
    point = operating_point(state, pools, workload, llm, rate, seen)
    wait = prefill_wait(point, pools, workload, seen).average_s
    latency = pools.prefill_latency_s + point.state.miss * (pools.missed_latency_s - pools.prefill_latency_s)
    call_s = wait + latency * point.stretch + pools.transfer_s + point.state.batch / point.decode_rate
    session_s = workload.calls_per_session * call_s + (workload.calls_per_session - 1.0) * workload.gap_mean_s
    full = (point.prefill_utilization >= 1.0) | (decode_utilization(point, pools, workload, llm) >= 1.0)
    return jnp.where(full, jnp.inf, rate * session_s)
