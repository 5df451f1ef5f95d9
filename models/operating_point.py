"""The fixed point a deployment settles at: prefill utilization, decode batch, and the cache misses they cause.

Prefill is a queue on uncached work. Decode is a processor-sharing pool whose batch follows from Little's law;
with a step time a + b B its batch is negative binomial. A pool that does both slows its decode by the share of
time prefill takes. Idle sessions keep their KV in what memory the active ones leave; evicted ones are prefilled
again, which closes the loop. The approximations and the constants marked `simulated` were read off
discrete-event simulations (shared pools 0.25 and 0.3, least-loaded routing in `unevenness`).
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from breakeven.models.bundle import Bundle, decode_step, decode_step_s
from breakeven.models.bursts import Burst, Step, burst
from breakeven.models.encoder import Encode, encode_busy
from breakeven.models.kv_transfer import Moved
from breakeven.models.llm import LLM
from breakeven.models.memory import Memory
from breakeven.models.numerics import TINY, power, table_lookup
from breakeven.models.queueing import Moments
from breakeven.models.reload import Reload
from breakeven.models.retained import Retained, calls_ahead, remote_service
from breakeven.models.steps import StepTime
from breakeven.models.workload import Workload

GAUSS = ((-1.7320508, 1.0 / 6.0), (0.0, 2.0 / 3.0), (1.7320508, 1.0 / 6.0))  # 3-point Gauss-Hermite
HIGHEST = 0.98  # utilizations are held below this inside the fixed point; the true ones decide saturation


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pools:
    """What the load does not change, of the bundles that prefill and decode; shapes (n,) unless said."""

    decode: Bundle
    resident: Moments  # time one call's prefill occupies its engine, prefix held
    missed: Moments  # the same after its prefix was evicted
    resident_chunks: Array
    missed_chunks: Array
    marginal_s: Array  # mean prefill without weight traffic and launches, prefix held
    mate_s: Array  # by which one more mean prompt makes a step longer
    mate_s2: Array  # the second moment of that
    budget_s: Array  # marginal time of a full token budget
    prefill_latency_s: Array  # mean latency, prefix held
    missed_latency_s: Array
    alone_s: Array  # of a prefill while nothing else is, by node, (n, 2 nodes): prefix held, then lost
    found_weight: Array  # (n, nodes)
    lost_weight: Array  # (n, nodes)
    prefill_memory: Memory  # of all attention engines of a bundle
    decode_memory: Memory
    prefill_replicas: Array  # bundles
    decode_replicas: Array
    prefill_workers: Array  # attention engines of a bundle
    prefill_ways: Array  # prefills one bundle works on at once: pipeline stages x data-parallel ranks, or workers
    prefill_ranks: Array  # of them, the data-parallel ranks that share a step
    token_budget: Array
    max_batch: Array  # of a bundle
    shared: Array  # share of a prefill's time in which it holds up decode: 1.0 in one pool, 0.0 where they share none
    holding_ways: Array  # prefills of a bundle each of which holds all its decode up
    moves: Array  # 1.0 where prefill and decode attention stand apart: the KV cache crosses a link
    chunked: Array  # 1.0 where prefill and decode share a pool in chunks
    prefill_balanced: Array  # 1.0: least loaded replica; 0.0: one drawn for the session or the call
    prefill_scattered: Array  # 1.0: a session's calls go to any replica; 0.0: to the one that holds its prefix
    decode_balanced: Array
    moved: Moved  # a call's KV transfer
    request_s: Array  # what the engine adds to every call
    reserve_tokens: Array  # cache that admission counts for a sequence
    reload: Reload | None  # tiers of KV cache below HBM
    encode: Encode | None = None  # the vision encoder, where calls have something to encode
    retained: Retained | None = None  # what decode pools keep of their sessions; None: nothing
    return_s: Array | None = None  # mean KV transfer of a call's output back

    def node_weight(self, miss: Array) -> Array:
        """Share of each prefill node, found, then lost, (n, 2 nodes), where a share `miss` of the prefixes is lost."""
        lost = miss[:, None]
        return jnp.concatenate([self.found_weight * (1.0 - lost), self.lost_weight * lost], -1)


class State(NamedTuple):
    """What the iteration carries, shapes (n,)."""

    batch: Array  # sequences decoding in one engine, mean
    miss: Array  # share of continued calls whose prefix was evicted
    decode_busy: Array  # rate of decode work over the engine's marginal speed, below 1 when stable
    mates: Array  # prefills computed in one step, mean


class Delay(NamedTuple):
    """What the prefill burst that a request arrives in does to its decode, in a shared pool; shapes (n,)."""

    mean_s: Array  # decode time lost once
    second_s2: Array
    mates: Array  # requests released to decode together
    passes: Array  # chunks of the burst, which slow only the steps a request has; 0 where prefill comes first


class OperatingPoint(NamedTuple):
    """Where a deployment settles; per engine, shapes (n,)."""

    state: State
    prefill_rate: Array  # calls per second and engine that come to it
    decode_rate: Array
    service: Moments  # occupancy of one call's prefill, misses and batching included
    stall: Moments  # time that one call's prefill keeps the decode of its pool from going on
    stretch: Array  # prefill time over its time alone and unbatched
    riding: Array  # latency of a prefill over its time alone: decodes that ride along
    others: Array  # prefills that a call finds in its step
    prefill_utilization: Array
    prefill_share: Array  # share of time that prefill takes from the decode of its pool
    joined: Array  # rate at which prompts come to an engine while a call is on it, over the mean rate
    encode_share: Array  # the same, of an encoder in a pool that decodes and does not prefill
    fixed_s: Array  # decode step a + b B near the operating batch
    marginal_s: Array
    context_s: Array  # by which one cached token of one sequence makes a step longer
    step_s: Array  # step time at the batch a request sees
    slowdown: Array  # decode time over its time without prefill in the pool
    seen_batch: Array  # sequences of others that a request sees decoding, mean
    own_batch: Array  # own and mates' load that a request sees beside the mean batch
    filled: Step  # how prefill steps are
    burst: Burst  # of prompts around a call's own
    delay: Delay  # by the prefill burst that a request arrives in
    batch_variance: Array
    chunk_step_s: Array  # step that carries a prefill chunk
    chunk_rate: Array  # such steps per second
    active_tokens: Array
    moved: Moved  # KV transfer of a call that goes to prefill
    kept: Array  # share of calls whose session decode still holds
    local: Array  # share of calls that are prefilled by decode


def decode_step_at(pools: Pools, llm: LLM, batch: Array, context: Array) -> StepTime:
    """One decode step of one of the deployment's decode bundles at `batch`, by cause."""
    return decode_step(pools.decode, llm, batch, context)


class Tangent(NamedTuple):
    """A step time near a batch, a + b B."""

    step_s: Array
    fixed_s: Array
    marginal_s: Array
    context_s: Array  # of b, each cached token of the sequence


def _linear_step(pools: Pools, llm: LLM, batch: Array, context: Array) -> Tangent:
    """The tangent to the step time at `batch`."""

    step, slope, attention = jax.jvp(
        lambda b: decode_step_s(pools.decode, llm, b, context), (batch,), (jnp.ones_like(batch),), has_aux=True
    )
    fixed = jnp.maximum(step - slope * batch, 0.05 * step)
    machine = pools.decode
    ways = machine.micro_batches * machine.workers * machine.data_parallel
    selected = jnp.minimum(context, llm.sparse_topk) / context
    side = machine.attention
    assert side.context_s is not None and side.selected_context_s is not None
    per_token = side.context_s + side.selected_context_s * selected
    per_token = per_token * (1.0 + _drafted(machine)) / machine.yielded
    return Tangent(step, fixed, (step - fixed) / batch, per_token * attention / ways)


def _drafted(machine: Bundle) -> Array | float:
    """What drafting adds to a step's reads of the KV cache."""
    way = machine.speculation
    return 0.0 if way is None else way.drafts * way.weights_share


def unevenness(batch: Array, replicas: Array) -> Array:
    r"""Variance of one engine's batch about the mean of the R engines, of which each call joins the least loaded one.

    A few sequences lie about one by one, with variance B (1 - 1/R); of many, (1 - 1/R) c is left, where
    c = 1/6 + 5/6 (2/R)^0.8. Between the two a power mean of exponent 1 - 0.56/R (read off simulations of M/M/inf).

    .. math:: (1 - 1/R) \left(B^{-p} + c^{-p}\right)^{-1/p}, \quad p = 1 - 0.56/R
    """
    one = 1.0 / replicas
    exponent = 1.0 - 0.56 * one
    many = (1.0 + 5.0 * power(2.0 * one, 0.8)) / 6.0
    return (1.0 - one) * many * power(1.0 + power(many / batch, exponent), -1.0 / exponent)


def own_load(batch: Array, uneven: Array, replicas: Array, balanced: Array) -> Array:
    """Sequences a request sees beside the mean batch: itself, less under least-loaded routing."""
    return jnp.where(balanced > 0.5, 1.0 / replicas + uneven / batch, 1.0)


def joined_share(calls: Array, replicas: Array, balanced: Array) -> Array:
    r"""Rate at which calls come to an engine while one is on it, over their mean rate: 1 where they do not choose it,
    less where they go to the one with the fewest `calls`, of which it has that many on average.

    With n calls on an engine with probability p_n, each leaving at the rate mu, and a_n the rate of arrivals there,
    :math:`a_n p_n = (n + 1) \mu p_{n+1}`, so one of n calls sees
    :math:`\sum n a_n p_n / E[n] = \mu E[n (n - 1)] / E[n]`: the others that it sees over those that there are.
    """
    own = own_load(calls, unevenness(calls, replicas), replicas, balanced)
    return jnp.clip(1.0 + (own - 1.0) / calls, 0.02, 1.0)


def most_sequences(pools: Pools, workload: Workload) -> Array:
    """Sequences an engine decodes at once at most: its batch limit or the KV cache they need, at least one."""
    fit = pools.decode_memory.capacity_tokens / pools.reserve_tokens
    return jnp.maximum(jnp.minimum(pools.max_batch, fit), 1.0)


def cache_miss(pools: Pools, workload: Workload, session_rate: Array, active_tokens: Array) -> Array:
    """Share of continued calls that find their prefix evicted from HBM and every tier below it."""
    tiers = 0 if pools.reload is None else pools.reload.shared.shape[-1]
    kept = prefix_found(pools, workload, session_rate, active_tokens, tiers)
    return jnp.where(workload.calls_per_session > 1.0, 1.0 - kept, 0.0)


def prefix_found(pools: Pools, workload: Workload, session_rate: Array, active_tokens: Array, tiers: int) -> Array:
    """Share of continued calls that find their prefix in HBM or the first `tiers` below: LRU by characteristic time.

    A call that may go to any replica finds its session on the right one with probability 1 / replicas, but in a
    tier that the replicas share it finds all of them.
    """
    free = pools.prefill_memory.capacity_tokens - workload.shared_prefix_tokens - active_tokens
    own = jnp.maximum(free, 1.0)
    pool = jnp.zeros_like(own)
    for k in range(tiers):
        assert pools.reload is not None
        tokens, shared = pools.reload.capacity_tokens[:, k], pools.reload.shared[:, k] > 0.5
        own, pool = own + jnp.where(shared, 0.0, tokens), pool + jnp.where(shared, tokens, 0.0)
    replicas = pools.prefill_replicas
    kept = _kept(workload, own, own * replicas / session_rate)
    kept = kept / jnp.where(pools.prefill_scattered > 0.5, replicas, 1.0)
    if not tiers:
        return kept
    everywhere = _kept(workload, own, (own * replicas + pool) / session_rate)
    return jnp.where(pool > 0.0, jnp.maximum(everywhere, kept), kept)


def _kept(workload: Workload, tokens: Array, tokens_per_rate: Array) -> Array:
    """Share of prefixes that a cache keeps. Its tokens per session rate are the only number that the tabulated curve
    needs (workload.cache_miss); of the `tokens` of one engine, the room that few large sessions leave fluctuates: its
    CV is that of a Poisson number of them."""
    work = jnp.log(tokens_per_rate)
    variance = workload.mean_prompt2 / workload.mean_prompt**2 * workload.idle_tokens / tokens
    spread = jnp.minimum(jnp.sqrt(jnp.maximum(variance, TINY)), 0.5)  # no idle sessions: no derivative at 0 either
    missed = [weight * table_lookup(workload.cache_work, workload.cache_miss, work + z * spread) for z, weight in GAUSS]
    return 1.0 - (missed[0] + missed[1] + missed[2])


def _stretch(
    pools: Pools, state: State, service_s: Array, chunks: Array, marginal_s: Array
) -> tuple[Array, Array, Array]:
    """(stretch of prefill time by batching and by the decodes that ride in chunks, stretch of its latency by these,
    chunks per call)."""
    # Weight traffic and launches are what mates share: as large for a call that lost its prefix, so a smaller part.
    alone_s = pools.resident.first * pools.prefill_ways
    floor = jnp.clip(1.0 - pools.mate_s / alone_s, 0.0, 1.0) * pools.resident.first / service_s
    mates = jnp.maximum(state.mates / pools.prefill_ranks, 1.0)  # on one rank
    batched = 1.0 - floor * (1.0 - 1.0 / mates)
    left = jnp.maximum(pools.token_budget - state.batch, 0.1 * pools.token_budget)
    chunks = jnp.where(pools.chunked > 0.5, 1.0 + (chunks - 1.0) * pools.token_budget / left, chunks)
    riding = pools.chunked * chunks * marginal_s * state.batch / (service_s * pools.prefill_ways)
    return batched + riding / mates, 1.0 + riding, chunks


def _mate(pools: Pools, service: Moments) -> tuple[Array, Array]:
    """(mean, second moment) of the seconds by which one more prompt makes a step longer: what mates share takes a call
    that lost its prefix as long, the rest longer."""
    ways, found = pools.prefill_ways, pools.resident
    shared_s = jnp.maximum(found.first - pools.mate_s / ways, 0.0)
    more_s = service.first - found.first
    more_s2 = service.second - found.second - 2.0 * shared_s * more_s
    mean_s = jnp.maximum(pools.mate_s + ways * more_s, 0.1 * pools.mate_s)
    return mean_s, jnp.maximum(pools.mate_s2 + ways**2 * more_s2, mean_s**2)


def _held_parts(pools: Pools, utilization: Array, step_s: Array, service: Moments, ranks_busy: Array) -> Array:
    """How much longer prefill holds decode up than it occupies its engine, where the engine works on w parts at once.

    p micro-batches go round in the time of the longest: one that alone carries a prefill holds up all of them, and
    only when all carry one is nothing lost. With rho = x / p the utilization by prefill and each other part busy with
    the probability sought, share = (x / p) (1 + (p - 1)(1 - share)), hence the factor share / rho = p / (1 + (p - 1)
    rho). Prefill first stops decode only for what it takes longer than a decode step: the first micro-batch follows
    it right through. Of d data-parallel ranks, which share each step, only those with a prompt have work.
    """
    depth = jnp.maximum(pools.holding_ways / pools.prefill_ranks, 1.0)
    pass_s = service.first * pools.prefill_ways
    spread = jnp.maximum(service.second - service.first**2, 0.0) * pools.prefill_ways**2
    longer = pass_s - step_s
    longer = 0.5 * (longer + jnp.sqrt(longer**2 + 0.64 * spread)) / pass_s  # E[(pass - step)+], normal
    longer = jnp.where(pools.chunked > 0.5, 1.0, jnp.clip(longer, 0.0, 1.0))
    rounds = depth / (1.0 + utilization * (depth - 1.0))
    held = (1.0 + (rounds - 1.0) * longer) * pools.prefill_ranks / ranks_busy
    return jnp.where(pools.holding_ways > 1.0, held, 1.0)


def operating_point(
    state: State, pools: Pools, workload: Workload, llm: LLM, session_rate: Array, seen: Array
) -> OperatingPoint:
    """One pass of the fixed point at `session_rate` (per second, whole deployment).

    `seen` is the share of the others' load that an arrival sees: 1 in an open system, (N-1)/N in a closed one.
    """
    context, steps = workload.decode_context, workload.mean_steps
    calls = session_rate * workload.calls_per_session
    kept, local = _kept_by_decode(pools, workload, session_rate, state.batch)
    prefill_rate, decode_rate = calls * (1.0 - local) / pools.prefill_replicas, calls / pools.decode_replicas
    uneven = unevenness(state.batch, pools.decode_replicas)
    own = own_load(state.batch, uneven, pools.decode_replicas, pools.decode_balanced)
    step_s, fixed_s, marginal_s, per_context = _linear_step(pools, llm, seen * state.batch + own, context)

    alone, moved = pools.resident.mixed(pools.missed, state.miss), pools.moved
    if pools.retained is not None:
        ahead = calls_ahead(local, workload.calls_per_session)
        alone = remote_service(pools.retained, pools.resident, pools.missed, state.miss, local, ahead)
        moved = moved.mixed(pools.retained.partial, (kept - local) / (1.0 - local))
    chunks = pools.resident_chunks + state.miss * (pools.missed_chunks - pools.resident_chunks)
    stretch, riding, chunks = _stretch(pools, state, alone.first, chunks, marginal_s)
    service = alone.scaled(stretch)
    prefill_utilization = prefill_rate * service.first

    pass_s = service.first * pools.prefill_ways
    ranks_busy = jnp.minimum(state.mates, pools.prefill_ranks)
    held = _held_parts(pools, jnp.minimum(prefill_utilization, HIGHEST), step_s, service, ranks_busy)
    stall = service.scaled(held * pools.shared)
    share = jnp.minimum(seen * prefill_rate * stall.first, HIGHEST)
    chunk_step_s = pass_s * jnp.maximum(state.mates / pools.prefill_ranks, 1.0) / chunks
    chunk_rate = jnp.where(pools.chunked > 0.5, share / chunk_step_s, 0.0)
    encoding = _encode_share(pools, seen * calls, state.miss) + local_share(pools, seen * decode_rate * local)
    calls_there = state.batch + prefill_rate * service.first
    joined = joined_share(calls_there, pools.prefill_replicas, pools.prefill_balanced)
    joined = jnp.where(pools.shared > 0.0, joined, 1.0)
    slowdown = 1.0 / (1.0 - jnp.minimum(joined * share + encoding, HIGHEST) + joined * chunk_rate * step_s)
    met = seen * prefill_rate
    pause_s = pools.shared * (1.0 - share) * -jnp.expm1(-state.batch) * 0.5 * step_s * pools.decode.yielded
    part, (mate_s, mate_s2) = riding / pools.prefill_ways, _mate(pools, alone)
    mate = jnp.minimum(mate_s * part, service.first), mate_s2 * part**2
    filled = Step(met, service, *mate, state.mates, pools.budget_s * riding, pools.prefill_ways / pools.prefill_ranks)
    around = burst(filled, prefill_servers(pools), pause_s)
    delay = _decode_delay(pools, around, service, met, share, step_s, chunk_step_s, steps)

    busy = jnp.minimum(decode_rate * steps * slowdown * marginal_s, HIGHEST)
    spread = per_context**2 * workload.decode_context_var / marginal_s
    balanced = pools.decode_balanced > 0.5
    spread = spread / jnp.where(balanced, pools.decode_replicas, 1.0)
    work = slowdown * (fixed_s + marginal_s * (own + 0.25 * delay.mates) + spread)
    batch = (decode_rate * steps * work + decode_rate * delay.mean_s) / (1.0 - seen * busy)
    batch = jnp.clip(batch, 1e-3, most_sequences(pools, workload))
    variance = (fixed_s / marginal_s + 1.0) * busy / (1.0 - busy) ** 2
    one = 1.0 / pools.decode_replicas
    variance = jnp.where(balanced, variance * one + uneven, variance) * (1.0 + 0.25 * delay.mates)
    variance = variance * (1.0 + 0.5 * (workload.arrival_cv2 - 1.0) * one)

    active = _active_tokens(pools, workload, batch, prefill_rate, service, moved)
    miss = cache_miss(pools, workload, session_rate, active)
    together, others = _prefill_mates(pools, workload, state, prefill_rate, pass_s, share, step_s, chunk_step_s)
    return OperatingPoint(
        State(batch, miss, busy, together),
        prefill_rate,
        decode_rate,
        service,
        stall,
        stretch,
        riding,
        others,
        prefill_utilization,
        share,
        joined,
        encoding,
        fixed_s,
        marginal_s,
        per_context,
        step_s,
        slowdown,
        seen * batch,
        own,
        filled,
        around,
        delay,
        variance,
        chunk_step_s,
        chunk_rate,
        active,
        moved,
        kept,
        local,
    )


def _kept_by_decode(pools: Pools, workload: Workload, session_rate: Array, batch: Array) -> tuple[Array, Array]:
    """(share of calls whose session decode still holds, share that are prefilled there)."""
    if pools.retained is None:
        return jnp.zeros_like(batch), jnp.zeros_like(batch)
    busy = workload.shared_prefix_tokens + batch * workload.decode_context
    own = jnp.maximum(pools.decode_memory.capacity_tokens - busy, 1.0)
    found = _kept(workload, own, own * pools.decode_replicas / session_rate)
    found = pools.retained.keeps * jnp.where(workload.calls_per_session > 1.0, found, 1.0)
    return found, found * jnp.minimum(pools.retained.local_share, HIGHEST)


def local_share(pools: Pools, rate: Array) -> Array:
    """Share of time that a decode engine spends on prefilling short prompts, of which `rate` come a second."""
    if pools.retained is None:
        return jnp.zeros_like(rate)
    return jnp.minimum(rate * pools.retained.local_moments.first, HIGHEST)


def _encode_share(pools: Pools, calls: Array, miss: Array) -> Array:
    """Share of time that an encoder in a pool without prefill takes from its decode."""
    if pools.encode is None:
        return jnp.zeros_like(calls)
    return jnp.minimum(pools.encode.beside_decode * encode_busy(pools.encode, calls, miss), HIGHEST)


def prefill_servers(pools: Pools) -> Array:
    """Engines that a call's prefill may wait for: all of a balanced pool, else the one that holds its session.

    Routing counts the calls of an engine. In a shared pool most of them decode, in a pipeline most are past its first
    stage: that tells little of its queue.
    """
    depth = pools.prefill_ways / pools.prefill_ranks
    known = power(pools.prefill_replicas, jnp.where(pools.shared > 0.5, 0.5, 2.0 / (1.0 + depth)))
    return jnp.where(pools.prefill_balanced > 0.5, known, 1.0)


def _decode_delay(
    pools: Pools,
    around: Burst,
    service: Moments,
    rate: Array,
    share: Array,
    step_s: Array,
    chunk_step_s: Array,
    steps: Array,
) -> Delay:
    """Decode time that a request of a shared pool loses to the prefill burst it came in, and its mates.

    What is left of the burst when a request starts to decode takes a busy period to compute. Prefill first stops it
    for that time; chunks only slow it, for as long as it lasts.
    """
    idle = 1.0 - share
    lasts_s = around.left_s / idle
    lasts_s2 = around.left_s2 / idle**2 + around.left_s * rate * service.second / idle**3
    mates = (share * idle + rate**2 * service.second / prefill_servers(pools)) / idle**2 + 1.0 / idle - 1.0

    slower = jnp.maximum(1.0 - step_s / chunk_step_s, 0.0)
    passes = jnp.maximum(lasts_s / chunk_step_s, 1e-6)
    reached = -jnp.expm1(-steps / passes)
    life_s = steps * step_s / idle
    burst_s = 0.5 * service.second / service.first / idle**2
    chunked = pools.chunked > 0.5
    factor = pools.shared * jnp.where(chunked, reached * slower, 1.0)
    return Delay(
        factor * lasts_s,
        factor**2 * lasts_s2,
        pools.shared * mates * jnp.where(chunked, life_s / (life_s + burst_s) * slower, 1.0),
        pools.chunked * passes,
    )


def prefill_queue_s(pools: Pools, service: Moments, rate: Array) -> Array:
    """Mean wait for prefill by its first two moments (Pollaczek-Khinchine), held finite near saturation."""
    idle = 1.0 - jnp.minimum(rate * service.first, HIGHEST)
    return 0.5 * rate * service.second / (idle * prefill_servers(pools))


def _active_tokens(
    pools: Pools, workload: Workload, batch: Array, rate: Array, service: Moments, moved: Moved
) -> Array:
    """Tokens that sessions in service hold in the cache of one prefill engine: of calls that wait, prefill, cross the
    link or decode. A split pool's decode goes on elsewhere, but the prefix stays for the session's next call."""
    decoding = batch * pools.decode_replicas / pools.prefill_replicas
    waiting_s = prefill_queue_s(pools, service, rate) + service.first + moved.waited_s
    return decoding * workload.decode_context + rate * waiting_s * workload.mean_prompt


def _prefill_mates(
    pools: Pools,
    workload: Workload,
    state: State,
    rate: Array,
    pass_s: Array,
    share: Array,
    step_s: Array,
    chunk_step_s: Array,
) -> tuple[Array, Array]:
    """(prefills computed in one step, mean; others that a call finds in its own): those that came to a micro-batch
    during the last one, as far as the budget holds them."""
    depth = pools.prefill_ways / pools.prefill_ranks
    stage_s = jnp.maximum(state.mates / pools.prefill_ranks, 1.0) * pass_s / depth
    alone = jnp.minimum(rate * stage_s / state.mates, HIGHEST)  # without a decode to wait for
    first_s = jnp.where(pools.shared > 0.5, (1.0 - share) * step_s + share * stage_s, alone * stage_s)
    chunk_s = ((1.0 - share) * step_s + share * chunk_step_s) / depth
    gathering_s = jnp.where(pools.chunked > 0.5, chunk_s, first_s)
    came = jnp.clip(rate * gathering_s, 1e-3, 100.0)
    most = jnp.maximum(pools.token_budget / workload.resident.mean_tokens, 1.0)
    together = jnp.minimum(came / -jnp.expm1(-came), most * pools.prefill_ranks)
    return together, jnp.minimum(came, most * pools.prefill_ranks)


def decode_utilization(point: OperatingPoint, pools: Pools, workload: Workload, llm: LLM) -> Array:
    """Share of the decode engine's time that its load needs at its largest batch, prefill in the pool included."""
    held = point.prefill_share + point.encode_share
    return decode_load(pools, workload, llm, point.decode_rate, held, point.chunk_rate)


def decode_load(
    pools: Pools, workload: Workload, llm: LLM, decode_rate: Array, prefill_share: Array, chunk_rate: Array
) -> Array:
    """`decode_utilization` at a rate of calls per engine, beside a share of prefill and chunks per second."""
    most = most_sequences(pools, workload)
    full_s = decode_step_at(pools, llm, most, workload.decode_context).total_s
    riding = chunk_rate * most
    tokens = jnp.maximum(decode_rate * workload.mean_steps - riding, 0.0)
    return prefill_share + tokens * full_s / most
