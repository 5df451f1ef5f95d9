"""Everything about a deployment that its load does not change: what each phase runs on, how long its calls take there,
what its caches hold.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from breakeven.models.bundle import Bundle, PrefillTime, bundle, common_divisor, prefill_call
from breakeven.models.encoder import Encode, encoding
from breakeven.models.kv_transfer import moved, return_s
from breakeven.models.llm import LLM
from breakeven.models.memory import Memory, pool_memory
from breakeven.models.operating_point import Pools
from breakeven.models.queueing import Moments
from breakeven.models.reload import continued_share, reload
from breakeven.models.retained import retained
from breakeven.models.steps import Coefficients, StepTime, prefill_chunks
from breakeven.models.tables import Catalog, Engine, Resolved
from breakeven.models.workload import PrefillNodes, Workload

StageCoefficients = tuple[Coefficients, Coefficients]  # attention, feed-forward


class Prefill(NamedTuple):
    """Prefill of a call, by node; (n, nodes): first those that find their prefix, then those that lost it."""

    latency_s: Array
    transfer_s: Array  # waited for the KV cache, and of images encoded elsewhere also their time there
    spread_s: Array  # standard deviation of a node's, for its calls' unlike contexts
    before: Array  # share of it before the last of its steps
    room: Array  # share of a token budget that this one leaves, where there are several
    terms: StepTime  # of the mean call that finds its prefix, (n,)


def _service_moments(nodes: PrefillNodes, latency_s: Array, token_s: Array, pair_s: Array, occupancy: Array) -> Moments:
    """Raw moments of the time a call occupies its prefill engine.

    The part linear in tokens and pairs uses the workload's exact moments (the tail carries half the work); what
    weight traffic and launches add to it is corrected on the nodes.
    """
    base = nodes.mean(latency_s - token_s[:, None] * nodes.tokens - pair_s[:, None] * nodes.pairs)
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
        shift = nodes.mean(latency_s**k - linear**k)
        corrected.append(jnp.maximum(moment + shift, 0.2 * moment) * occupancy**k)
    return Moments(*corrected)


def _mate_s(machine: Bundle, llm: LLM, nodes: PrefillNodes, token_budget: Array) -> Array:
    """How much longer a step of two mean prompts takes than one of one, seconds: of few tokens more than by their
    arithmetic, for the experts that only the second hits and near the ridge of the roofline."""
    prompts = jnp.array([1.0, 2.0])
    means = nodes.mean_tokens, nodes.mean_pairs, nodes.mean(nodes.context)
    tokens, pairs, context = (mean[:, None] * prompts for mean in means)
    one, two = prefill_call(machine, llm, tokens, pairs, context, token_budget).busy_s.T
    return two - one


def _mean_chunks(nodes: PrefillNodes, token_budget: Array) -> Array:
    return nodes.mean(prefill_chunks(nodes.tokens, token_budget[:, None]))


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
    # moments are indexed [i, j] per candidate; the bins hold the same shares of the calls in both
    return dataclasses.replace(chosen, weight=shared.weight, moments=jnp.moveaxis(chosen.moments, 0, -1))


def _both(hit: Array, lost: Array) -> Array:
    """Nodes of calls that find their prefix, (n, nodes), then those of calls that lost it, (nodes,)."""
    return jnp.concatenate([hit, jnp.broadcast_to(lost, (*hit.shape[:-1], *lost.shape))], -1)


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
    place = resolved.placement
    crossed = (None, None) if place is None else (place.prefill, place.decode)
    return (
        bundle(resolved, catalog, pa, pf, prefill, 0.0 * context_sd, paces[0], None, crossed[0]),
        bundle(resolved, catalog, da, df, decode, context_sd, paces[1], resolved.speculation, crossed[1]),
    )


def coefficients(resolved: Resolved, catalog: Catalog) -> tuple[StageCoefficients, StageCoefficients]:
    """(prefill, decode): step coefficients of their attention and feed-forward stages, at the pace measured locally."""
    prefill, decode = ((machine.attention, machine.ffn) for machine in machines(resolved, catalog))
    return prefill, decode


def machines(resolved: Resolved, catalog: Catalog, context_sd: Array | float = 0.0) -> tuple[Bundle, Bundle]:
    """(of prefill, of decode): what each phase runs on, for sequences whose lengths have that standard deviation."""
    return _bundles(resolved, catalog, _sharing(resolved), context_sd * jnp.ones_like(resolved.routing))


def _held_share(sharing: Sharing, hit: PrefillNodes, time: PrefillTime, machine: Bundle) -> Array:
    """Share of a prefill's occupancy of its bundle in which it holds decode up: all of it where both its sides run in
    pools that decode, else what it spends on the side that does."""
    if machine.split is None:
        return jnp.where(sharing.attention, 1.0, 0.0)
    busy, attention, ffn = (hit.mean(x) for x in (time.busy_s, time.attention_s, time.ffn_s))
    one_side = jnp.where(sharing.attention, attention, jnp.where(sharing.ffn, ffn * machine.ways, 0.0)) / busy
    return jnp.where(sharing.attention & sharing.ffn, 1.0, jnp.minimum(one_side, 1.0))


def _forgets(resolved: Resolved, sharing: Sharing) -> Array:
    """1.0 where prefill never sees the output of the call before: it was written in another pool, and stays there."""
    way = resolved.transfers
    return jnp.where(sharing.moves, 1.0 if way is None else 1.0 - way.returns, 0.0)


def _staged(resolved: Resolved, memory: Memory) -> Memory:
    """Decode memory without what is held free for caches on their way."""
    if resolved.transfers is None:
        return memory
    return memory._replace(capacity_tokens=memory.capacity_tokens * (1.0 - resolved.transfers.staging))


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


def build_pools(resolved: Resolved, workload: Workload, catalog: Catalog) -> tuple[Pools, Prefill]:
    """Everything the load does not change."""
    llm, engine = catalog.llm, catalog.engine
    p, d = resolved.prefill_attention, resolved.decode_attention
    one, budget = jnp.ones_like(p.choice.replicas), p.choice.token_budget
    sharing = _sharing(resolved)
    prefill, decode = _bundles(resolved, catalog, sharing, jnp.sqrt(workload.decode_context_var) * one)
    hit, lost = _select(_forgets(resolved, sharing), workload.resident, workload.recomputed), workload.missed
    hit_time = prefill_call(prefill, llm, hit.tokens, hit.pairs, hit.context, budget)
    lost_time = prefill_call(prefill, llm, lost.tokens, lost.pairs, lost.context, budget)
    hit_latency_s = _pipelined(hit_time.alone.total_s, hit, prefill, budget)
    missed_latency_s = _pipelined(lost_time.alone.total_s, lost, prefill, budget)
    nodes = hit.weight.shape[-1]
    prefill_s = jnp.concatenate([hit_latency_s, missed_latency_s], -1)
    encode = encoding(resolved, workload, catalog, hit, lost)
    if encode is not None:
        joined_s = encode.joined[:, None] * encode.seconds
        hit_time = _encoding_too(hit_time, joined_s[:, :nodes], prefill)
        lost_time = _encoding_too(lost_time, joined_s[:, nodes:], prefill)
        hit_latency_s = hit_latency_s + joined_s[:, :nodes]
        missed_latency_s = missed_latency_s + joined_s[:, nodes:]
    token_s, pair_s, ways = hit_time.token_s, hit_time.pair_s, prefill.ways
    contexts = _both(hit.context, lost.context)
    transfer, transfer_s = moved(resolved, catalog, contexts, prefill_s, hit.weight)
    # Calls that lost their prefix all find the same, the shared one.
    more_tokens_s = hit.tokens_per_cached * (token_s[:, None] + pair_s[:, None] * hit.context)
    varied_s = _pipelined(hit_time.cached_s + more_tokens_s, hit, prefill, budget)
    varied_s = varied_s + (1.0 + hit.tokens_per_cached) * transfer_s[:, :nodes] / hit.context
    lost_spread_s = lost.cached_sd * transfer_s[:, nodes:] / lost.context
    spread_s = jnp.concatenate([hit.cached_sd * jnp.abs(varied_s), lost_spread_s], -1)
    marginal = token_s, pair_s
    kept = retained(resolved, workload, catalog, hit, prefill_s[:, :nodes], hit_time.busy_s, marginal, ways, decode)
    shared = _held_share(sharing, hit, hit_time, prefill)
    prefill_memory = pool_memory(resolved, p, llm, engine, workload.mean_prompt)
    decode_memory = pool_memory(resolved, d, llm, engine, workload.decode_context)
    prefill_latency_s = hit.mean(hit_latency_s)
    lost_latency_s = lost.mean(missed_latency_s)
    encoding_s = _encoding_s(encode, hit, prefill)
    marginal_s = token_s * hit.mean_tokens + pair_s * hit.mean_pairs + hit.mean(encoding_s)
    x, y, m = token_s * hit.mean_tokens, pair_s * hit.mean_pairs, hit.moments
    marginal_s2 = x * x * m[2, 0] + 2.0 * x * y * m[1, 1] + y * y * m[0, 2]
    mate_s = jnp.maximum(_mate_s(prefill, llm, hit, budget) + hit.mean(encoding_s), marginal_s)
    ranks = jnp.where(prefill.workers > 1.0, 1.0, p.choice.data_parallel)
    recompute_s = lost_latency_s - prefill_latency_s
    if encode is not None:
        recompute_s = recompute_s + encode.lost_mean_s - encode.found_mean_s
    recompute_s = recompute_s / continued_share(workload)
    pools = Pools(
        decode=decode,
        resident=_service_moments(hit, hit_time.busy_s, token_s, pair_s, 1.0 / ways),
        missed=_service_moments(lost, lost_time.busy_s, lost_time.token_s, lost_time.pair_s, 1.0 / ways),
        resident_chunks=_mean_chunks(hit, budget),
        missed_chunks=_mean_chunks(lost, budget),
        marginal_s=marginal_s,
        mate_s=mate_s,
        mate_s2=mate_s**2 * jnp.maximum(marginal_s2 / marginal_s**2, 1.0),
        budget_s=marginal_s / hit.mean_tokens * budget * ranks / ways,
        prefill_latency_s=prefill_latency_s,
        missed_latency_s=lost_latency_s,
        alone_s=prefill_s,
        found_weight=jnp.broadcast_to(hit.weight, hit_latency_s.shape),
        lost_weight=jnp.broadcast_to(lost.weight, missed_latency_s.shape),
        prefill_memory=_bundle_memory(prefill_memory, prefill.workers, workload.shared_prefix_tokens),
        decode_memory=_bundle_memory(_staged(resolved, decode_memory), decode.workers, workload.shared_prefix_tokens),
        prefill_replicas=prefill.count,
        decode_replicas=decode.count,
        prefill_workers=prefill.workers,
        prefill_ways=ways,
        prefill_ranks=ranks,
        token_budget=budget,
        max_batch=d.choice.max_batch * decode.workers,
        shared=shared,
        holding_ways=jnp.where(sharing.attention, ways, 1.0),
        moves=jnp.where(sharing.moves, 1.0, 0.0),
        chunked=jnp.where(sharing.attention & sharing.ffn & ~sharing.moves, p.choice.chunked, 0.0),
        prefill_balanced=resolved.balanced,
        prefill_scattered=resolved.scattered,
        decode_balanced=jnp.where(sharing.moves, 1.0 if kept is None else 1.0 - kept.keeps, resolved.balanced),
        moved=transfer,
        return_s=return_s(resolved, catalog, workload.mean_output),
        retained=kept,
        request_s=request_s(resolved, workload, engine)[0] * one,
        reserve_tokens=workload.decode_context + (engine.reserve_output_share - 0.5) * workload.mean_output * one,
        reload=reload(resolved, hit, workload, llm, recompute_s, prefill.workers),
        encode=encode,
    )
    if encode is not None:
        transfer_s = transfer_s + (1.0 - encode.joined[:, None]) * encode.seconds + encode.transfer_s
    mean_terms = StepTime(*(hit.mean(term) for term in hit_time.alone))
    latency_s = jnp.concatenate([hit_latency_s, missed_latency_s], -1)
    return pools, Prefill(
        latency_s, transfer_s, spread_s, *_last_step(_both(hit.tokens, lost.tokens), budget), mean_terms
    )


def _last_step(tokens: Array, budget: Array) -> tuple[Array, Array]:
    """(share of a prefill before its last step, share of the token budget that this one leaves), 0 where it is the only
    one; (n, nodes)."""
    steps = prefill_chunks(tokens, budget[:, None])
    last = jnp.ceil(steps)
    several = last > 1.0
    return jnp.where(several, (last - 1.0) / steps, 0.0), jnp.where(several, last - steps, 0.0)


def _encoding_too(time: PrefillTime, encoding_s: Array, machine: Bundle) -> PrefillTime:
    """The prefill of calls whose images the same engine encodes, `encoding_s` (n, nodes): the first group of a pipeline
    does all of it."""
    return time._replace(
        busy_s=time.busy_s + encoding_s * machine.depth[:, None], attention_s=time.attention_s + encoding_s
    )


def _encoding_s(encode: Encode | None, nodes: PrefillNodes, machine: Bundle) -> Array:
    """What encoding adds to how long a prefill occupies its bundle, (n, nodes)."""
    if encode is None:
        return jnp.zeros_like(nodes.weight)
    return encode.joined[:, None] * encode.seconds[:, : nodes.weight.shape[-1]] * machine.depth[:, None]


def pools(resolved: Resolved, workload: Workload, catalog: Catalog) -> Pools:
    """The pools of each candidate, before any load."""
    return build_pools(resolved, workload, catalog)[0]
