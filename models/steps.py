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
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from breakeven.models.llm import LLM
from breakeven.models.numerics import smooth_max
from breakeven.models.operators import (
    Curve,
    allreduce_bytes,
    allreduce_latency_s,
    compute_s,
    exchange_s,
    pair_s,
    permute_s,
    read_s,
)
from breakeven.models.tables import Engine, Hardware, ResolvedStage

ACTIVATION_BYTES = 2.0  # activations cross the links in 16 bit
ATTENTION_PRODUCTS, FFN_PRODUCTS = 2.0, 2.0  # kernels per layer: query/key/value and output; up and down if dense


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Coefficients:
    """Seconds that one stage adds to a step of one engine, by cause; every field of shape (n,).

    `token` is one token of one attention replica (data-parallel rank); `expert_token` one token of the engine.
    """

    step_s: Array  # launches, scheduling and latency of collectives, each step
    weight_s: Array  # reading the weights of the dense products
    token_s: Array  # arithmetic of the dense products
    expert_s: Array  # reading every expert once
    expert_token_s: Array  # arithmetic of the experts
    permute_token_s: Array  # sorting one token's copies by expert and summing them again
    collective_token_s: Array  # bytes of all-reduce and all-to-all
    collective_root_s: Array  # what short messages lose of the link, per square root of tokens
    activation_token_s: Array  # norms, residuals, quantisation: memory passes over the hidden state
    sequence_s: Array  # scheduler, window and recurrent state (attention: of one replica's sequences)
    context_s: Array  # each cached token a decoding sequence attends to (all of them)
    selected_context_s: Array  # the same, for those that sparse attention selects
    prefill_context_s: Array  # reading one cached token in a prefill chunk
    pair_s: Array  # one query-key pair of prefill
    selected_pair_s: Array  # the same, for pairs that sparse attention selects
    query_s: Array  # attention of one prefill token whatever its context: masked tiles, window and linear layers


class StepTime(NamedTuple):
    """Seconds by cause; their sum is the step (or the prefill of one call)."""

    products_s: Array  # dense matrix products: attention projections, feed-forward, LM head
    experts_s: Array
    attention_s: Array  # KV cache traffic and score/value products
    collective_s: Array
    overhead_s: Array

    @property
    def total_s(self) -> Array:
        return self.products_s + self.experts_s + self.attention_s + self.collective_s + self.overhead_s


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


def _slow_host(stage: ResolvedStage, engine: Engine) -> Array:
    return jnp.where(stage.hardware.hopper > 0.5, engine.hopper_factor, 1.0)


def _half_layers_s(stage: ResolvedStage, llm: LLM, engine: Engine) -> Array:
    """Launches beside the kernels' own of half a layer, attention's or the feed-forward network's, in all layers."""
    return 0.5 * llm.layers * engine.layer_s * _slow_host(stage, engine)


def _activations_s(stage: ResolvedStage, llm: LLM, engine: Engine) -> Array:
    """Seconds per token that half of every layer's small kernels move activations; each rank holds all of them."""
    moved = 0.5 * engine.activation_passes * ACTIVATION_BYTES * llm.hidden * llm.layers
    return read_s(stage.hardware.kernels["gemm_bf16"], moved, stage.hardware.memory_bandwidth_bytes_per_s)


def _allreduce(stage: ResolvedStage, llm: LLM, engine: Engine) -> tuple[Array, Array, Array]:
    """(latency per step, seconds per token, per root of tokens) of one all-reduce a layer."""
    t, curve = stage.choice.tensor_parallel, stage.hardware.kernels["allreduce"]
    volume = allreduce_bytes(curve, ACTIVATION_BYTES * llm.hidden, jnp.maximum(t, 2.0))
    hops = (stage.choice.pipeline_parallel - 1.0) * 0.5
    one_s = allreduce_latency_s(curve, t) + engine.allreduce_s
    token_s, root_s = exchange_s(curve, volume, collective_bytes_per_s(stage.hardware, t))
    return (
        jnp.where(t > 1.0, llm.layers, 0.0) * one_s + hops * one_s,
        jnp.where(t > 1.0, llm.layers, 0.0) * token_s,
        jnp.where(t > 1.0, llm.layers, 0.0) * root_s,
    )


def _alltoall(stage: ResolvedStage, llm: LLM, engine: Engine) -> tuple[Array, Array, Array]:
    """As `_allreduce`, of dispatching to and combining from whole experts on other ranks.

    Dispatch moves 1 byte and combine 2 bytes per element and selected expert.
    """
    choice, curve = stage.choice, stage.hardware.kernels["alltoall"]
    active = (choice.expert_parallel > 1.0) & (choice.data_parallel > 1.0)
    ranks = choice.tensor_parallel * choice.data_parallel
    token_bytes = 3.0 * llm.experts_active * llm.hidden
    token_s, root_s = exchange_s(curve, token_bytes, collective_bytes_per_s(stage.hardware, ranks))
    layers = jnp.where(active, llm.moe_layers, 0.0)
    return layers * curve["latency_s"] * engine.alltoall_share, layers * token_s, layers * root_s


def _attention_curve(stage: ResolvedStage, llm: LLM, kv_bytes: Array, phase: str) -> Curve:
    """The curve of this attention: latent or not, of an 8-bit or a 16-bit cache."""
    kernels, latent, wide = stage.hardware.kernels, llm.latent > 0.5, kv_bytes > 1.5

    def kind(name: str) -> Curve:
        byte, word = kernels[f"{name}_fp8"], kernels[f"{name}_bf16"]
        return {key: jnp.where(wide, word[key], byte[key]) for key in word}

    own, mla = kind(f"{phase}_attention"), kind(f"{phase}_mla")
    return {key: jnp.where(latent, mla.get(key, 0.0), own[key]) for key in own}


def attention_coefficients(stage: ResolvedStage, llm: LLM, engine: Engine, kv_bytes: Array) -> Coefficients:
    """Coefficients of an attention stage: projections, KV cache, scores and values, one all-reduce a layer."""
    hw, t = stage.hardware, stage.choice.tensor_parallel
    decode = _attention_curve(stage, llm, kv_bytes, "decode")
    prefill = _attention_curve(stage, llm, kv_bytes, "prefill")
    peak, bandwidth = hw.bf16_flops_per_s, hw.memory_bandwidth_bytes_per_s
    cache_bandwidth = bandwidth * kv_shards(stage, llm)
    latency_s, token_s, root_s = _allreduce(stage, llm, engine)
    kernels_s = ATTENTION_PRODUCTS * hw.kernels["gemm_bf16"]["latency_s"] + decode["latency_s"]
    window_s = smooth_max(
        read_s(decode, llm.window_kv_elements_per_token * kv_bytes, cache_bandwidth),
        compute_s(decode, llm.window_flops_per_pair, t * peak),
    )
    index_pair_s = compute_s(prefill, llm.index_flops_per_pair, t * peak)
    full_pair_s = pair_s(prefill, llm.prefill_flops_per_pair, llm.head_pair_flops, t * peak)
    window_pair_s = pair_s(prefill, llm.window_flops_per_pair, llm.head_pair_flops, t * peak)
    zero = jnp.zeros_like(t)
    return Coefficients(
        step_s=_half_layers_s(stage, llm, engine)
        + llm.layers * llm.mla * engine.latent_layer_s * _slow_host(stage, engine)
        + llm.layers * kernels_s * engine.launch_share
        + engine.step_s
        + latency_s,
        weight_s=llm.attention_weights * stage.attention_bytes / (t * stage.attention_read_bytes_per_s),
        token_s=2.0 * llm.attention_weights / (t * stage.attention_flops_per_s),
        expert_s=zero,
        expert_token_s=zero,
        permute_token_s=zero,
        collective_token_s=token_s,
        collective_root_s=root_s,
        activation_token_s=_activations_s(stage, llm, engine),
        sequence_s=engine.sequence_s
        + read_s(decode, 2.0 * 2.0 * llm.state_elements, t * bandwidth)
        + llm.window_tokens * window_s,
        context_s=smooth_max(
            read_s(decode, llm.index_elements_per_token * kv_bytes, cache_bandwidth),
            compute_s(decode, llm.index_flops_per_pair, t * peak),
        ),
        selected_context_s=smooth_max(
            read_s(decode, llm.kv_elements_per_token * kv_bytes, cache_bandwidth),
            compute_s(decode, llm.decode_flops_per_pair, t * peak),
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


def ffn_coefficients(stage: ResolvedStage, llm: LLM, engine: Engine) -> Coefficients:
    """Coefficients of a feed-forward stage: dense layers, shared experts, LM head, routed experts, collectives."""
    hw, choice = stage.hardware, stage.choice
    t, ranks = choice.tensor_parallel, choice.tensor_parallel * choice.data_parallel
    imbalance = jnp.where(choice.expert_parallel > 1.0, engine.expert_imbalance, 1.0)
    expert_share = llm.experts_active / jnp.maximum(llm.experts, 1.0)
    latency_s, token_s, root_s = _allreduce(stage, llm, engine)
    dispatch_s, dispatch_token_s, dispatch_root_s = _alltoall(stage, llm, engine)
    weight_s = llm.dense_weights * stage.dense_bytes / stage.dense_read_bytes_per_s
    head_s = llm.head_weights * stage.head_bytes / stage.head_read_bytes_per_s
    routed = llm.moe_layers * llm.experts_active * llm.hidden / choice.expert_parallel
    zero = jnp.zeros_like(t)
    return Coefficients(
        step_s=_half_layers_s(stage, llm, engine)
        + (llm.layers - llm.moe_layers) * FFN_PRODUCTS * hw.kernels["gemm_bf16"]["latency_s"] * engine.launch_share
        + llm.moe_layers * (stage.experts_latency_s * engine.launch_share + engine.moe_layer_s)
        + latency_s
        + dispatch_s,
        weight_s=(weight_s + head_s) / t,
        token_s=2.0 * llm.dense_weights / (t * stage.dense_flops_per_s),
        expert_s=imbalance * llm.expert_weights * stage.experts_bytes / (ranks * stage.experts_read_bytes_per_s),
        expert_token_s=imbalance * 2.0 * llm.expert_weights * expert_share / (ranks * stage.experts_flops_per_s),
        permute_token_s=permute_s(stage.experts_permute_bytes, routed, hw.memory_bandwidth_bytes_per_s),
        collective_token_s=token_s + dispatch_token_s,
        collective_root_s=root_s + dispatch_root_s,
        activation_token_s=_activations_s(stage, llm, engine),
        sequence_s=2.0 * llm.head_weights / (t * stage.head_flops_per_s) / choice.data_parallel,
        context_s=zero,
        selected_context_s=zero,
        prefill_context_s=zero,
        pair_s=zero,
        selected_pair_s=zero,
        query_s=zero,
    )


def expert_hit_share(tokens: Array, llm: LLM) -> Array:
    """Expected share of a layer's experts that `tokens` reach with uniform routing, 1 - (1 - k/E)^T."""
    miss = jnp.clip(llm.experts_active / jnp.maximum(llm.experts, 1.0), 0.0, 0.999999)
    return -jnp.expm1(tokens * jnp.log1p(-miss))


def decode_step(
    attention: Coefficients,
    ffn: Coefficients,
    llm: LLM,
    batch: Array,
    context: Array,
    pipeline_parallel: Array,
    data_parallel: Array,
) -> StepTime:
    """One decode step of an engine that holds `batch` sequences of `context` tokens each.

    A pipeline of p groups keeps p micro-batches in flight, so a token takes one pass of batch / p sequences
    through all layers; data-parallel ranks split them further, except before the experts.
    """
    tokens = batch / pipeline_parallel
    rank_tokens = tokens / data_parallel
    selected = jnp.minimum(context, llm.sparse_topk)
    products = smooth_max(attention.weight_s, attention.token_s * rank_tokens)
    products += smooth_max(ffn.weight_s, ffn.token_s * rank_tokens)
    cached = attention.context_s * context + attention.selected_context_s * selected
    return StepTime(
        products_s=products,
        experts_s=smooth_max(ffn.expert_s * expert_hit_share(tokens, llm), ffn.expert_token_s * tokens)
        + ffn.permute_token_s * tokens,
        attention_s=rank_tokens * cached,
        collective_s=(attention.collective_token_s + ffn.collective_token_s) * rank_tokens
        + (attention.collective_root_s + ffn.collective_root_s) * jnp.sqrt(rank_tokens),
        overhead_s=attention.step_s
        + ffn.step_s
        + attention.sequence_s * rank_tokens
        + ffn.sequence_s * tokens
        + (attention.activation_token_s + ffn.activation_token_s) * rank_tokens,
    )


def prefill_chunks(tokens: Array, token_budget: Array) -> Array:
    """Chunks a prompt of `tokens` uncached tokens is computed in, as a real number of at least one."""
    return jnp.maximum(tokens / jnp.maximum(token_budget, 1.0), 1.0)


def prefill_call(
    attention: Coefficients,
    ffn: Coefficients,
    llm: LLM,
    tokens: Array,
    pairs: Array,
    context: Array,
    token_budget: Array,
) -> StepTime:
    """Prefill of one call: `tokens` uncached tokens with `pairs` query-key pairs in a prompt of `context` tokens.

    Every chunk reads the weights, the experts it hits and the KV cache before it.
    """
    chunks = prefill_chunks(tokens, token_budget)
    hit = expert_hit_share(tokens / chunks, llm)
    selected = jnp.minimum(pairs, tokens * llm.sparse_topk)
    products = smooth_max(attention.weight_s * chunks, attention.token_s * tokens)
    products += smooth_max(ffn.weight_s * chunks, ffn.token_s * tokens)
    return StepTime(
        products_s=products,
        experts_s=smooth_max(ffn.expert_s * hit * chunks, ffn.expert_token_s * tokens) + ffn.permute_token_s * tokens,
        attention_s=attention.pair_s * pairs
        + attention.selected_pair_s * selected
        + attention.query_s * tokens
        + attention.prefill_context_s * context * chunks,
        collective_s=(attention.collective_token_s + ffn.collective_token_s) * tokens
        + (attention.collective_root_s + ffn.collective_root_s) * jnp.sqrt(jnp.maximum(tokens, 1.0) * chunks),
        overhead_s=(attention.step_s + ffn.step_s) * chunks
        + (attention.activation_token_s + ffn.activation_token_s) * tokens
        + attention.sequence_s
        + ffn.sequence_s,
    )


def prefill_marginal(attention: Coefficients, ffn: Coefficients, llm: LLM) -> tuple[Array, Array]:
    """(seconds per token, seconds per pair) of a prefill so large that weight traffic vanishes beside arithmetic."""
    token_s = (
        attention.token_s
        + ffn.token_s
        + ffn.expert_token_s
        + ffn.permute_token_s
        + attention.collective_token_s
        + ffn.collective_token_s
        + attention.activation_token_s
        + ffn.activation_token_s
        + attention.query_s
    )
    dense = jnp.where(llm.sparse_topk < llm.max_context, 0.0, attention.selected_pair_s)
    return token_s, attention.pair_s + dense
