"""Step time of a stage as a few coefficients: what a step costs fixed, per token, per sequence and per cached token.

A decode step of `T` tokens or a prefill chunk takes, on each stage,

    step_s + max~(weight_s, token_s T) + max~(expert_s hit(T), expert_token_s T)
           + (permute_token_s + collective_token_s + activation_token_s) T + collective_root_s sqrt(T)
           + sequence_s sequences + context terms + pair_s query-key pairs

where max~ is the smooth roofline and hit(T) the expected share of experts that T tokens reach. The coefficients
depend on the stage's hardware, sharding and precisions alone, never on the load. What the hardware achieves comes
from curves fitted to measured kernels (`operators`), what the serving engine adds from `Engine`.
"""

from dataclasses import dataclass
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array

from breakeven.models.llm import LLM
from breakeven.models.numerics import choose, smooth_max
from breakeven.models.operators import (
    Curve,
    allreduce_bytes,
    collective_latency_s,
    compute_s,
    exchange_s,
    hit_ranks,
    pair_s,
    permute_s,
    read_s,
)
from breakeven.models.speculation import Speculations
from breakeven.models.tables import Engine, Hardware, ResolvedStage

ACTIVATION_BYTES = 2.0  # activations cross the links in 16 bit
ATTENTION_PRODUCTS, FFN_PRODUCTS = 2.0, 2.0  # kernels per layer: query/key/value and output; up and down if dense


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Coefficients:
    """Seconds that one stage adds to a step of one engine, by cause; every field of shape (n,), or None where a stage
    has no such part.

    `token` is one token of one attention replica (data-parallel rank); `expert_token` one token of the engine.
    """

    step_s: Array  # launches and scheduling, each step
    collective_s: Array  # latency of all-reduce and all-to-all, each step
    collective_token_s: Array  # bytes of all-reduce and all-to-all
    collective_root_s: Array  # what short messages lose of the link, per square root of tokens
    activation_token_s: Array  # norms, residuals, quantisation: memory passes over the hidden state
    sequence_s: Array  # of one sequence of a replica: scheduler, window and recurrent state, LM head
    projection_s: Array | None = None  # reading the weights of attention's projections
    projection_token_s: Array | None = None  # their arithmetic
    context_s: Array | None = None  # each cached token a decoding sequence attends to (all of them)
    selected_context_s: Array | None = None  # the same, for those that sparse attention selects
    prefill_context_s: Array | None = None  # reading one cached token in a prefill chunk
    pair_s: Array | None = None  # one query-key pair of prefill
    selected_pair_s: Array | None = None  # the same, for pairs that sparse attention selects
    query_s: Array | None = None  # attention of one prefill token whatever its context: masked tiles, window, linear
    weight_s: Array | None = None  # reading the weights of the dense feed-forward products
    token_s: Array | None = None  # their arithmetic
    expert_s: Array | None = None  # reading every expert once
    expert_token_s: Array | None = None  # arithmetic of the experts
    permute_token_s: Array | None = None  # sorting one token's copies by expert and summing them again
    ring_context_s: Array | None = None  # of a cached token going round the ranks of context parallelism, each pass

    def __add__(self, other: "Coefficients") -> "Coefficients":
        """Both stages on one engine."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in self.__dataclass_fields__}
        return Coefficients(**{name: b if a is None else a if b is None else a + b for name, (a, b) in pairs.items()})


class StepTime(NamedTuple):
    """Seconds by cause; their sum is the step (or the prefill of one call)."""

    products_s: Array  # dense matrix products: attention projections, feed-forward, LM head
    experts_s: Array
    attention_s: Array  # KV cache traffic and score/value products
    collective_s: Array
    overhead_s: Array
    transfer_s: Array = cast(
        Array, 0.0
    )  # activations between attention and feed-forward pools, as far as nothing hides it

    @property
    def total_s(self) -> Array:
        computed_s = self.products_s + self.experts_s + self.attention_s
        return computed_s + self.collective_s + self.overhead_s + self.transfer_s

    def scaled(self, factor: Array) -> "StepTime":
        """Every part times `factor`."""
        return StepTime(*(part * factor for part in self))

    def plus(self, other: "StepTime") -> "StepTime":
        """The sum, part by part."""
        return StepTime(*(a + b for a, b in zip(self, other, strict=True)))


def collective_bytes_per_s(hw: Hardware, ranks: Array) -> Array:
    """One direction of the link that `ranks` of an engine share: scale-up, host link inside a node, else the NIC.

    A full mesh (xGMI) gives each pair its own narrow link, so few ranks reach few of them.
    """
    mesh = jnp.minimum(hw.scaleup_bytes_per_s, jnp.maximum(ranks - 1.0, 1.0) * hw.scaleup_pair_bytes_per_s)
    outside = jnp.where(ranks <= hw.per_instance, hw.host_bytes_per_s, hw.nic_bytes_per_s)
    return jnp.maximum(jnp.where(ranks <= hw.scaleup_domain, mesh, outside), 1.0)  # a lone accelerator has none


def kv_shards(stage: ResolvedStage, llm: LLM) -> Array:
    """Ways tensor parallelism really splits the KV cache: at most one KV head a rank; a latent is replicated."""
    return jnp.minimum(stage.choice.tensor_parallel, llm.kv_shards)


def slow_host(stage: ResolvedStage, engine: Engine) -> Array:
    """Times by which the host launches slower."""
    return jnp.where(stage.hardware.hopper > 0.5, engine.hopper_factor, 1.0)


def _half_layers_s(stage: ResolvedStage, llm: LLM, engine: Engine) -> Array:
    """Launches beside the kernels' own of half a layer, attention's or the feed-forward network's, in all layers."""
    return 0.5 * llm.layers * engine.layer_s * slow_host(stage, engine)


def activations_s(stage: ResolvedStage, llm: LLM, engine: Engine) -> Array:
    """Seconds per token that half of every layer's small kernels move activations; each rank holds all of them."""
    moved = 0.5 * engine.activation_passes * ACTIVATION_BYTES * llm.hidden * llm.layers
    return read_s(stage.hardware.kernels["gemm_bf16"], moved, stage.hardware.memory_bandwidth_bytes_per_s)


def allreduce(stage: ResolvedStage, llm: LLM, engine: Engine) -> tuple[Array, Array, Array]:
    """(latency per step, seconds per token, per root of tokens) of one all-reduce a layer."""
    t, curve = stage.choice.tensor_parallel, stage.hardware.kernels["allreduce"]
    volume = allreduce_bytes(curve, ACTIVATION_BYTES * llm.hidden, jnp.maximum(t, 2.0))
    token_s, root_s = exchange_s(curve, volume, collective_bytes_per_s(stage.hardware, t))
    return (
        jnp.where(t > 1.0, llm.layers, 0.0) * _allreduce_latency_s(stage, engine),
        jnp.where(t > 1.0, llm.layers, 0.0) * token_s,
        jnp.where(t > 1.0, llm.layers, 0.0) * root_s,
    )


def _allreduce_latency_s(stage: ResolvedStage, engine: Engine) -> Array:
    return collective_latency_s(stage.hardware.kernels["allreduce"], stage.choice.tensor_parallel) + engine.allreduce_s


def _hops_s(stage: ResolvedStage, engine: Engine) -> Array:
    """Latency of half the hand-overs between the groups of a pipeline."""
    return (stage.choice.pipeline_parallel - 1.0) * 0.5 * _allreduce_latency_s(stage, engine)


def _exchange(stage: ResolvedStage, llm: LLM, engine: Engine) -> tuple[Array, Array, Array]:
    """As `allreduce`, of bringing tokens to whole experts on other ranks (1 byte an element) and back (2 bytes).

    On no more ranks than a token has experts, engines gather all tokens on every rank, in the experts' precision, and
    scatter the sums; on more they send each token to the ranks that hold one of its experts, by a kernel that waits
    longer; between nodes one copy goes to each that holds one of a token's experts, and is handed on there (DeepEP).
    """
    choice, kernels = stage.choice, stage.hardware.kernels
    active = (choice.expert_parallel > 1.0) & (choice.data_parallel > 1.0)
    ranks = choice.tensor_parallel * choice.data_parallel
    link = collective_bytes_per_s(stage.hardware, ranks)
    copy = llm.hidden / choice.tensor_parallel
    nodes = ranks / jnp.maximum(stage.hardware.scaleup_domain, stage.hardware.per_instance)
    sent = hit_ranks(jnp.where(nodes > 1.0, nodes, ranks), llm.experts_active)
    token_s, root_s = exchange_s(kernels["alltoall"], 3.0 * sent * copy, link)
    there_s, there_root_s = exchange_s(kernels["gather"], stage.experts_bytes * (ranks - 1.0) * copy, link)
    back_s, back_root_s = exchange_s(kernels["gather"], 2.0 * (ranks - 1.0) * copy, link)
    gathers = ranks <= llm.experts_active
    latency_s = jnp.where(
        gathers,
        2.0 * collective_latency_s(kernels["gather"], ranks),
        kernels["alltoall"]["latency_s"] * engine.alltoall_share,
    )
    layers = jnp.where(active, llm.moe_layers, 0.0)
    return (
        layers * latency_s,
        layers * jnp.where(gathers, there_s + back_s, token_s),
        layers * jnp.where(gathers, there_root_s + back_root_s, root_s),
    )


def _attention_curve(stage: ResolvedStage, llm: LLM, kv_bytes: Array, phase: str) -> Curve:
    """The curve of this attention: latent or not, of an 8-bit or a 16-bit cache.

    All queries of one K/V head decode like those of a latent, which is such a head of all queries.
    """
    kernels, wide = stage.hardware.kernels, kv_bytes > 1.5
    latent = llm.kv_shards < 1.5 if phase == "decode" else llm.latent > 0.5

    def kind(name: str) -> Curve:
        byte, word = kernels[f"{name}_fp8"], kernels[f"{name}_bf16"]
        return {key: jnp.where(wide, word[key], byte[key]) for key in word}

    own, mla = kind(f"{phase}_attention"), kind(f"{phase}_mla")
    return {key: jnp.where(latent, mla.get(key, 0.0), own[key]) for key in own}


def projection_products(stage: ResolvedStage, llm: LLM) -> tuple[Array, Array]:
    """(seconds to read the weights of attention's projections, seconds of a token's arithmetic with them)."""
    t = stage.choice.tensor_parallel
    return (
        llm.attention_weights * stage.attention_bytes / (t * stage.attention_read_bytes_per_s),
        2.0 * llm.attention_weights / (t * stage.attention_flops_per_s),
    )


def attention_coefficients(
    stage: ResolvedStage, llm: LLM, engine: Engine, kv_bytes: Array, queries: Array | float = 1.0
) -> Coefficients:
    """Coefficients of an attention stage: projections, KV cache, scores and values, one all-reduce a layer.

    A decoding sequence has `queries` tokens in a step, which read its cache once.
    """
    hw, t = stage.hardware, stage.choice.tensor_parallel
    projections = projection_products(stage, llm)
    decode = _attention_curve(stage, llm, kv_bytes, "decode")
    prefill = _attention_curve(stage, llm, kv_bytes, "prefill")
    peak, bandwidth = hw.bf16_flops_per_s, hw.memory_bandwidth_bytes_per_s
    cache_bandwidth = bandwidth * kv_shards(stage, llm)
    latency_s, token_s, root_s = allreduce(stage, llm, engine)
    kernels_s = ATTENTION_PRODUCTS * hw.kernels["gemm_bf16"]["latency_s"] + decode["latency_s"]
    window_s = smooth_max(
        read_s(decode, llm.window_kv_elements_per_token * kv_bytes, cache_bandwidth),
        compute_s(decode, llm.window_flops_per_pair, t * peak),
    )
    index_pair_s = compute_s(prefill, llm.index_flops_per_pair, t * peak)
    full_pair_s = pair_s(prefill, llm.prefill_flops_per_pair, llm.head_pair_flops, t * peak)
    window_pair_s = pair_s(prefill, llm.window_flops_per_pair, llm.head_pair_flops, t * peak)
    return Coefficients(
        step_s=_half_layers_s(stage, llm, engine)
        + llm.layers * llm.mla * engine.latent_layer_s * slow_host(stage, engine)
        + llm.layers * kernels_s * engine.launch_share
        + engine.step_s,
        collective_s=latency_s + _hops_s(stage, engine),
        projection_s=projections[0],
        projection_token_s=projections[1],
        collective_token_s=token_s,
        collective_root_s=root_s,
        activation_token_s=activations_s(stage, llm, engine),
        sequence_s=engine.sequence_s
        + read_s(decode, 2.0 * 2.0 * llm.state_elements, t * bandwidth)
        + llm.window_tokens * window_s,
        context_s=smooth_max(
            read_s(decode, llm.index_elements_per_token * kv_bytes, cache_bandwidth),
            compute_s(decode, queries * llm.index_flops_per_pair, t * peak),
        ),
        selected_context_s=smooth_max(
            read_s(decode, llm.kv_elements_per_token * kv_bytes, cache_bandwidth),
            compute_s(decode, queries * llm.decode_flops_per_pair, t * peak),
        ),
        prefill_context_s=read_s(
            decode, (llm.kv_elements_per_token + llm.index_elements_per_token) * kv_bytes, cache_bandwidth
        ),
        pair_s=index_pair_s,
        selected_pair_s=full_pair_s,
        query_s=(llm.window_tokens + prefill["half_keys"]) * window_pair_s
        + prefill["half_keys"] * full_pair_s
        + compute_s(prefill, llm.linear_flops_per_token, t * peak),
    )


def ffn_coefficients(
    stage: ResolvedStage, llm: LLM, engine: Engine, routed: Array | float = 0.0, queries: Array | float = 1.0
) -> Coefficients:
    """Coefficients of a feed-forward stage: dense layers, shared experts, LM head, routed experts, collectives.

    A decoding sequence has `queries` tokens in a step, all of which pass the LM head.
    Where tokens come from attention already `routed` (1.0), each to its experts, nothing is left to dispatch.
    """
    hw, choice = stage.hardware, stage.choice
    t, ranks = choice.tensor_parallel, choice.tensor_parallel * choice.data_parallel
    imbalance = jnp.where(choice.expert_parallel > 1.0, engine.expert_imbalance, 1.0)
    expert_share = llm.experts_active / jnp.maximum(llm.experts, 1.0)
    latency_s, token_s, root_s = allreduce(stage, llm, engine)
    dispatch_s, dispatch_token_s, dispatch_root_s = (x * (1.0 - routed) for x in _exchange(stage, llm, engine))
    weight_s = llm.dense_weights * stage.dense_bytes / stage.dense_read_bytes_per_s
    head_s = llm.head_weights * stage.head_bytes / stage.head_read_bytes_per_s
    copied = llm.moe_layers * llm.experts_active * llm.hidden / choice.expert_parallel
    return Coefficients(
        step_s=_half_layers_s(stage, llm, engine)
        + (llm.layers - llm.moe_layers) * FFN_PRODUCTS * hw.kernels["gemm_bf16"]["latency_s"] * engine.launch_share
        + llm.moe_layers * (stage.experts_latency_s * engine.launch_share + engine.moe_layer_s),
        collective_s=latency_s + _hops_s(stage, engine) + dispatch_s,
        weight_s=(weight_s + head_s) / t,
        token_s=2.0 * llm.dense_weights / (t * stage.dense_flops_per_s),
        expert_s=llm.expert_weights * stage.experts_bytes / (ranks * stage.experts_read_bytes_per_s),
        expert_token_s=imbalance * 2.0 * llm.expert_weights * expert_share / (ranks * stage.experts_flops_per_s),
        permute_token_s=permute_s(stage.experts_permute_bytes, copied, hw.memory_bandwidth_bytes_per_s),
        collective_token_s=token_s + dispatch_token_s,
        collective_root_s=root_s + dispatch_root_s,
        activation_token_s=activations_s(stage, llm, engine),
        sequence_s=queries * 2.0 * llm.head_weights / (t * stage.head_flops_per_s),
    )


def overlapped(whole: StepTime, parts: StepTime) -> StepTime:
    """A step in parts, each computed while the collectives of another run, where that is faster than as a whole.

    `parts` are the seconds of all of them: each reads the weights again.
    """
    computed_s = parts.total_s - parts.collective_s
    hidden = parts._replace(collective_s=jnp.maximum(parts.collective_s - computed_s, 0.0))
    faster = hidden.total_s < whole.total_s
    return choose(faster, hidden, whole)


def expert_hit_share(tokens: Array, llm: LLM) -> Array:
    """Expected share of a layer's experts that `tokens` reach with uniform routing, 1 - (1 - k/E)^T."""
    miss = jnp.clip(llm.experts_active / jnp.maximum(llm.experts, 1.0), 0.0, 0.999999)
    return -jnp.expm1(tokens * jnp.log1p(-miss))


def _roofline(read_s: Array | None, compute_s: Array | None, passes: Array | float, tokens: Array) -> Array:
    """Products of `tokens` in passes that each read the weights; nothing where the stage has none."""
    if read_s is None or compute_s is None:
        return jnp.zeros_like(tokens)
    return smooth_max(read_s * passes, compute_s * tokens)


def _linear(*terms: tuple[Array | None, Array]) -> Array:
    """The sum of those products whose coefficient the stage has."""
    found = jnp.zeros_like(terms[0][1])
    for coefficient, amount in terms:
        found = found if coefficient is None else found + coefficient * amount
    return found


def speculated_time(
    side: Coefficients, llm: LLM, way: Speculations, tokens: Array, rank_tokens: Array, context: Array
) -> StepTime:
    """A token's share of a decode step that verifies drafted tokens, and of drafting them: `decode_time` where steps
    yield more than one token each."""
    q = way.verified
    fed = decode_time(side, llm, tokens * q, rank_tokens * q, context)
    plain = decode_time(side, llm, tokens, rank_tokens, context)
    more = (q - 1.0) * side.sequence_s * rank_tokens  # which counts the tokens of a sequence itself
    verify = fed._replace(attention_s=plain.attention_s, overhead_s=fed.overhead_s - more)
    draft = plain.scaled(way.weights_share)
    shift = way.layers_share - way.weights_share
    draft = draft._replace(
        overhead_s=draft.overhead_s + shift * side.step_s, collective_s=draft.collective_s + shift * side.collective_s
    )
    return verify.plus(draft.scaled(way.drafts)).scaled(1.0 / way.yielded)


def decode_time(side: Coefficients, llm: LLM, tokens: Array, rank_tokens: Array, context: Array) -> StepTime:
    """One decode step of an engine (of both stages, or one of them) for `tokens` sequences of `context` tokens each,
    `rank_tokens` of them on each data-parallel rank."""
    read_s = None if side.expert_s is None else side.expert_s * expert_hit_share(tokens, llm)
    cached = _linear((side.context_s, context), (side.selected_context_s, jnp.minimum(context, llm.sparse_topk)))
    products_s = _roofline(side.projection_s, side.projection_token_s, 1.0, rank_tokens)
    return StepTime(
        products_s=products_s + _roofline(side.weight_s, side.token_s, 1.0, rank_tokens),
        experts_s=_roofline(read_s, side.expert_token_s, 1.0, tokens) + _linear((side.permute_token_s, tokens)),
        attention_s=rank_tokens * cached,
        collective_s=side.collective_s
        + side.collective_token_s * rank_tokens
        + side.collective_root_s * jnp.sqrt(rank_tokens),
        overhead_s=side.step_s + side.sequence_s * rank_tokens + side.activation_token_s * rank_tokens,
    )


def prefill_chunks(tokens: Array, token_budget: Array) -> Array:
    """Chunks a prompt of `tokens` uncached tokens is computed in, as a real number of at least one."""
    return jnp.maximum(tokens / jnp.maximum(token_budget, 1.0), 1.0)


def prefill_time(
    side: Coefficients, llm: LLM, tokens: Array, rank_tokens: Array, pairs: Array, context: Array, passes: Array
) -> StepTime:
    """Prefill of one call on an engine of both stages, or one of them.

    It has `tokens` uncached tokens with `pairs` query-key pairs in a prompt of `context` tokens, `rank_tokens` of them
    on a data-parallel rank; where all ranks prefill such calls, `tokens` are those of all. Every pass reads the
    weights, the experts it hits and the KV cache before it.
    """
    read_s = None if side.expert_s is None else side.expert_s * expert_hit_share(tokens / passes, llm)
    selected = jnp.minimum(pairs, rank_tokens * llm.sparse_topk)
    products_s = _roofline(side.projection_s, side.projection_token_s, passes, rank_tokens)
    attention_s = _linear(
        (side.pair_s, pairs),
        (side.selected_pair_s, selected),
        (side.query_s, rank_tokens),
        (side.prefill_context_s, context * passes),
    )
    return StepTime(
        products_s=products_s + _roofline(side.weight_s, side.token_s, passes, rank_tokens),
        experts_s=_roofline(read_s, side.expert_token_s, passes, tokens) + _linear((side.permute_token_s, tokens)),
        attention_s=attention_s,
        collective_s=_ring_s(side, rank_tokens, pairs, passes, attention_s)
        + side.collective_s * passes
        + side.collective_token_s * rank_tokens
        + side.collective_root_s * jnp.sqrt(jnp.maximum(rank_tokens, 1.0) * passes),
        overhead_s=side.step_s * passes + side.activation_token_s * rank_tokens + side.sequence_s,
    )


def prefill_per_cached(side: Coefficients, llm: LLM, tokens: Array, pairs: Array, passes: Array) -> Array:
    """Seconds by which one more cached token before the uncached `tokens` makes a prefill longer: it is read in every
    pass, and a pair with each of them."""
    selected = jnp.where(pairs < tokens * llm.sparse_topk, tokens, 0.0)
    return _linear((side.pair_s, tokens), (side.selected_pair_s, selected), (side.prefill_context_s, passes))


def _ring_s(side: Coefficients, tokens: Array, pairs: Array, passes: Array, attention_s: Array) -> Array | float:
    """What the exchange of keys and values takes beyond the attention it runs beside; each pass that of the cache so
    far, pairs / tokens of it on average and half a chunk more."""
    if side.ring_context_s is None:
        return 0.0
    context = passes * pairs / jnp.maximum(tokens, 1.0) + 0.5 * tokens
    return jnp.maximum(side.ring_context_s * context - attention_s, 0.0)


def prefill_marginal(side: Coefficients, llm: LLM, share: Array, rank_share: Array) -> tuple[Array, Array]:
    """(seconds per token, seconds per pair) of a prefill so large that weight traffic vanishes beside arithmetic.

    Of each token `share` goes through an engine, `rank_share` through each of its data-parallel ranks.
    """
    ranked = (side.projection_token_s, side.token_s, side.collective_token_s, side.activation_token_s, side.query_s)
    token_s = _linear((side.expert_token_s, share), (side.permute_token_s, share))
    token_s = token_s + _linear(*((coefficient, rank_share) for coefficient in ranked))
    dense = jnp.where(llm.sparse_topk < llm.max_context, 0.0, 1.0)
    return token_s, _linear((side.pair_s, rank_share), (side.selected_pair_s, dense * rank_share))
