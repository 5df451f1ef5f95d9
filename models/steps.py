"""Step time of a stage as a few coefficients: what a step costs fixed, per token, per sequence and per cached token.

A decode step of `T` tokens or a prefill chunk takes, on each stage,

    step_s + max~(weight_s, token_s T) + max~(expert_s hit(T), expert_token_s T) + collective_token_s T
           + sequence_s sequences + context terms + pair_s query-key pairs

where max~ is the smooth roofline and hit(T) the expected share of experts that T tokens reach. The coefficients
depend on the stage's hardware, sharding and precisions alone, never on the load.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from breakeven.models.llm import LLM
from breakeven.models.numerics import smooth_max
from breakeven.models.tables import Engine, Hardware, ResolvedStage

ACTIVATION_BYTES = 2.0  # activations cross the links in 16 bit


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
    collective_token_s: Array  # bytes of all-reduce and all-to-all
    sequence_s: Array  # scheduler, window and recurrent state
    context_s: Array  # each cached token a decoding sequence attends to (all of them)
    selected_context_s: Array  # the same, for those that sparse attention selects
    prefill_context_s: Array  # reading one cached token in a prefill chunk
    pair_s: Array  # one query-key pair of prefill
    selected_pair_s: Array  # the same, for pairs that sparse attention selects
    window_token_s: Array  # attention of one prefill token in window and linear layers


class StepTime(NamedTuple):
    """Seconds by cause; their sum is the step (or the prefill of one call)."""

    products_s: Array  # dense matrix products: attention projections, feed-forward, LM head
    experts_s: Array
    attention_s: Array  # KV cache traffic and score/value products
    collective_s: Array
    overhead_s: Array
    transfer_s: Array | float = 0.0  # activations between attention and feed-forward pools, as far as nothing hides it

    @property
    def total_s(self) -> Array:
        return (
            self.products_s + self.experts_s + self.attention_s + self.collective_s + self.overhead_s + self.transfer_s
        )

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


def _layer_overhead_s(stage: ResolvedStage, engine: Engine) -> Array:
    return engine.layer_s * jnp.where(stage.hardware.hopper > 0.5, engine.hopper_factor, 1.0)


def _latent_overhead_s(stage: ResolvedStage, llm: LLM, engine: Engine) -> Array:
    factor = jnp.where(stage.hardware.hopper > 0.5, engine.hopper_factor, 1.0)
    return llm.layers * llm.mla * engine.latent_layer_s * factor


def _allreduce(stage: ResolvedStage, llm: LLM, engine: Engine) -> tuple[Array, Array]:
    """(latency per step, seconds per token) of one all-reduce a layer; ring volume 2 (t-1)/t."""
    t = stage.choice.tensor_parallel
    rate = collective_bytes_per_s(stage.hardware, t) * stage.hardware.collective_bandwidth
    volume = 2.0 * ACTIVATION_BYTES * llm.hidden * (t - 1.0) / t
    hops = (stage.choice.pipeline_parallel - 1.0) * 0.5
    return jnp.where(t > 1.0, llm.layers, 0.0) * engine.allreduce_s + hops * engine.allreduce_s, (
        llm.layers * volume / rate
    )


def _alltoall(stage: ResolvedStage, llm: LLM, engine: Engine) -> tuple[Array, Array]:
    """(latency per step, seconds per token) of dispatching to and combining from whole experts on other ranks.

    Dispatch moves 1 byte and combine 2 bytes per element and selected expert.
    """
    choice = stage.choice
    active = (choice.expert_parallel > 1.0) & (choice.data_parallel > 1.0)
    ranks = choice.tensor_parallel * choice.data_parallel
    rate = collective_bytes_per_s(stage.hardware, ranks) * stage.hardware.alltoall_bandwidth
    bytes_per_token = 3.0 * llm.experts_active * llm.hidden
    return (
        jnp.where(active, llm.moe_layers * engine.alltoall_s, 0.0),
        jnp.where(active, llm.moe_layers * bytes_per_token / rate, 0.0),
    )


def attention_coefficients(stage: ResolvedStage, llm: LLM, engine: Engine, kv_bytes: Array) -> Coefficients:
    """Coefficients of an attention stage: projections, KV cache, scores and values, one all-reduce a layer."""
    hw, t = stage.hardware, stage.choice.tensor_parallel
    read = hw.memory_bandwidth_bytes_per_s * hw.weight_bandwidth
    kv_read = hw.memory_bandwidth_bytes_per_s * hw.kv_bandwidth * kv_shards(stage, llm)
    decode_rate = t * hw.bf16_flops_per_s * hw.decode_attention
    prefill_rate = t * hw.bf16_flops_per_s * hw.prefill_attention
    latency_s, token_s = _allreduce(stage, llm, engine)
    state_s = 2.0 * 2.0 * llm.state_elements / (t * hw.memory_bandwidth_bytes_per_s * hw.kv_bandwidth)
    window_s = smooth_max(
        llm.window_kv_elements_per_token * kv_bytes / kv_read, llm.window_flops_per_pair / decode_rate
    )
    zero = jnp.zeros_like(t)
    return Coefficients(
        step_s=llm.layers * 0.5 * _layer_overhead_s(stage, engine)
        + _latent_overhead_s(stage, llm, engine)
        + engine.step_s
        + latency_s,
        weight_s=llm.attention_weights * stage.attention_bytes / (t * read),
        token_s=2.0 * llm.attention_weights / (t * stage.attention_flops_per_s),
        expert_s=zero,
        expert_token_s=zero,
        collective_token_s=token_s,
        sequence_s=engine.sequence_s + state_s + llm.window_tokens * window_s,
        context_s=smooth_max(llm.index_elements_per_token * kv_bytes / kv_read, llm.index_flops_per_pair / decode_rate),
        selected_context_s=smooth_max(
            llm.kv_elements_per_token * kv_bytes / kv_read, llm.decode_flops_per_pair / decode_rate
        ),
        prefill_context_s=(llm.kv_elements_per_token + llm.index_elements_per_token) * kv_bytes / kv_read,
        pair_s=llm.index_flops_per_pair / prefill_rate,
        selected_pair_s=llm.prefill_flops_per_pair / prefill_rate,
        window_token_s=(llm.window_tokens * llm.window_flops_per_pair + llm.linear_flops_per_token) / prefill_rate,
    )


def ffn_coefficients(stage: ResolvedStage, llm: LLM, engine: Engine, apart: Array | float = 0.0) -> Coefficients:
    """Coefficients of a feed-forward stage: dense layers, shared experts, LM head, routed experts, collectives.

    Where it stands `apart` from attention (1.0), tokens come from there to their experts: nothing is left to dispatch.
    """
    hw, choice = stage.hardware, stage.choice
    t, ranks = choice.tensor_parallel, choice.tensor_parallel * choice.data_parallel
    read = hw.memory_bandwidth_bytes_per_s * hw.weight_bandwidth
    imbalance = jnp.where(choice.expert_parallel > 1.0, hw.expert_imbalance, 1.0)
    expert_read = ranks * hw.memory_bandwidth_bytes_per_s * hw.expert_bandwidth
    expert_share = llm.experts_active / jnp.maximum(llm.experts, 1.0)
    latency_s, token_s = _allreduce(stage, llm, engine)
    dispatch_s, dispatch_token_s = (part * (1.0 - apart) for part in _alltoall(stage, llm, engine))
    weights = llm.dense_weights * stage.dense_bytes + llm.head_weights * stage.head_bytes
    zero = jnp.zeros_like(t)
    return Coefficients(
        step_s=llm.layers * 0.5 * _layer_overhead_s(stage, engine)
        + llm.moe_layers * engine.moe_layer_s
        + latency_s
        + dispatch_s,
        weight_s=weights / (t * read),
        token_s=2.0 * llm.dense_weights / (t * stage.dense_flops_per_s),
        expert_s=imbalance * llm.expert_weights * stage.experts_bytes / expert_read,
        expert_token_s=imbalance * 2.0 * llm.expert_weights * expert_share / (ranks * stage.experts_flops_per_s),
        collective_token_s=token_s + dispatch_token_s,
        sequence_s=2.0 * llm.head_weights / (t * stage.head_flops_per_s) / choice.data_parallel,
        context_s=zero,
        selected_context_s=zero,
        prefill_context_s=zero,
        pair_s=zero,
        selected_pair_s=zero,
        window_token_s=zero,
    )


def expert_hit_share(tokens: Array, llm: LLM) -> Array:
    """Expected share of a layer's experts that `tokens` reach with uniform routing, 1 - (1 - k/E)^T."""
    miss = jnp.clip(llm.experts_active / jnp.maximum(llm.experts, 1.0), 0.0, 0.999999)
    return -jnp.expm1(tokens * jnp.log1p(-miss))


def decode_attention(side: Coefficients, llm: LLM, sequences: Array, rank_sequences: Array, context: Array) -> StepTime:
    """Attention of one decode step of an engine with `sequences` of `context` tokens, `rank_sequences` of them on each
    data-parallel rank."""
    cached = side.context_s * context + side.selected_context_s * jnp.minimum(context, llm.sparse_topk)
    return StepTime(
        products_s=smooth_max(side.weight_s, side.token_s * rank_sequences),
        experts_s=jnp.zeros_like(rank_sequences),
        attention_s=rank_sequences * cached,
        collective_s=side.collective_token_s * rank_sequences,
        overhead_s=side.step_s + side.sequence_s * sequences,
    )


def decode_ffn(side: Coefficients, llm: LLM, tokens: Array, rank_tokens: Array) -> StepTime:
    """Feed-forward layers of one decode step of an engine: `tokens` reach its experts, `rank_tokens` of them each
    data-parallel rank."""
    return StepTime(
        products_s=smooth_max(side.weight_s, side.token_s * rank_tokens),
        experts_s=smooth_max(side.expert_s * expert_hit_share(tokens, llm), side.expert_token_s * tokens),
        attention_s=jnp.zeros_like(tokens),
        collective_s=side.collective_token_s * rank_tokens,
        overhead_s=side.step_s + side.sequence_s * tokens,
    )


def prefill_chunks(tokens: Array, token_budget: Array) -> Array:
    """Chunks a prompt of `tokens` uncached tokens is computed in, as a real number of at least one."""
    return jnp.maximum(tokens / jnp.maximum(token_budget, 1.0), 1.0)


def prefill_attention(
    side: Coefficients, llm: LLM, tokens: Array, pairs: Array, context: Array, passes: Array
) -> StepTime:
    """Attention of one call's prefill in so many passes: `tokens` uncached tokens with `pairs` query-key pairs in a
    prompt of `context` tokens. Every pass reads the weights and the KV cache before it."""
    selected = jnp.minimum(pairs, tokens * llm.sparse_topk)
    return StepTime(
        products_s=smooth_max(side.weight_s * passes, side.token_s * tokens),
        experts_s=jnp.zeros_like(tokens),
        attention_s=side.pair_s * pairs
        + side.selected_pair_s * selected
        + side.window_token_s * tokens
        + side.prefill_context_s * context * passes,
        collective_s=side.collective_token_s * tokens,
        overhead_s=side.step_s * passes + side.sequence_s,
    )


def prefill_ffn(side: Coefficients, llm: LLM, tokens: Array, rank_tokens: Array, passes: Array) -> StepTime:
    """Feed-forward layers of one call's prefill in so many passes, each of which reads the weights and the experts it
    hits; `tokens` on the engine, `rank_tokens` of them on a data-parallel rank."""
    hit = expert_hit_share(tokens / passes, llm)
    return StepTime(
        products_s=smooth_max(side.weight_s * passes, side.token_s * rank_tokens),
        experts_s=smooth_max(side.expert_s * hit * passes, side.expert_token_s * tokens),
        attention_s=jnp.zeros_like(tokens),
        collective_s=side.collective_token_s * rank_tokens,
        overhead_s=side.step_s * passes + side.sequence_s,
    )


def prefill_marginal(side: Coefficients, llm: LLM) -> tuple[Array, Array]:
    """(seconds per token, seconds per pair) that a stage adds to a prefill so large that weight traffic vanishes beside
    arithmetic."""
    token_s = side.token_s + side.expert_token_s + side.collective_token_s + side.window_token_s
    dense = jnp.where(llm.sparse_topk < llm.max_context, 0.0, side.selected_pair_s)
    return token_s, side.pair_s + dense
