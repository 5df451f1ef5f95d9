"""What fits: weights per accelerator, KV cache capacity in tokens, and what each sequence needs."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from breakeven.models.context_parallel import ranks
from breakeven.models.llm import LLM
from breakeven.models.placement_choices import Placements
from breakeven.models.steps import kv_shards
from breakeven.models.tables import Engine, Resolved, ResolvedStage

ENCODER_BYTES = 2.0  # vision encoders, unless a study says otherwise, and embeddings are in 16 bit
ACTIVATION_FACTOR = 24.0  # bytes per budgeted token and hidden unit that an engine keeps for activations (assumption)


class Memory(NamedTuple):
    """Memory of one engine of the pool a stage stands in; shapes (n,)."""

    weights_bytes: Array  # per accelerator
    free_bytes: Array  # per accelerator, for KV; negative when the weights do not fit
    capacity_tokens: Array  # of one engine


def kv_bytes_per_token(llm: LLM, kv_bytes: Array, tokens: Array) -> Array:
    """Bytes of KV cache per token of a sequence of `tokens`, all layers: full layers, and windows and recurrent
    state spread over the sequence.

    Llama-3.1-70B in 16 bit: 2 (K, V) x 8 heads x 128 x 80 layers x 2 bytes = 327,680 bytes.
    """
    window = llm.window_kv_elements_per_token * jnp.minimum(llm.window_tokens, tokens)
    fixed = window * kv_bytes + llm.state_elements * 2.0
    return (llm.kv_elements_per_token + llm.index_elements_per_token) * kv_bytes + fixed / jnp.maximum(tokens, 1.0)


def _stage_weights_bytes(resolved: Resolved, stage: ResolvedStage, llm: LLM, name: str) -> Array:
    """Bytes per accelerator of the weights that one stage needs."""
    choice = stage.choice
    layers = choice.pipeline_parallel
    ranks = choice.tensor_parallel * choice.data_parallel
    if name == "encode":
        own = ENCODER_BYTES if resolved.encoder is None else resolved.encoder.bytes_per_weight
        return llm.encoder_weights * own * jnp.ones_like(layers)
    if name.endswith("attention"):
        return llm.attention_weights * stage.attention_bytes / (choice.tensor_parallel * layers)
    dense = llm.dense_weights * stage.dense_bytes + llm.head_weights * stage.head_bytes
    dense = dense + llm.embedding_weights * ENCODER_BYTES
    return dense / (choice.tensor_parallel * layers) + llm.expert_weights * stage.experts_bytes / (ranks * layers)


class _Hosted(NamedTuple):
    """Weights of one phase that stand together: the pool that holds them, and bytes per accelerator."""

    pool: Array
    size_bytes: Array


def _placed(resolved: Resolved, phase: str, llm: LLM, place: Placements) -> tuple[_Hosted, ...]:
    """The parts that may stand on either side: projections, what is dense with attention and without, the LM head."""
    a: ResolvedStage = getattr(resolved, f"{phase}_attention")
    f: ResolvedStage = getattr(resolved, f"{phase}_ffn")

    def hosted(side: ResolvedStage, size_bytes: Array) -> _Hosted:
        return _Hosted(side.choice.pool, size_bytes / (side.choice.tensor_parallel * side.choice.pipeline_parallel))

    def either(flag: Array, off: _Hosted, on: _Hosted) -> _Hosted:
        return _Hosted(*(jnp.where(flag > 0.5, b, a) for a, b in zip(off, on, strict=True)))

    def head(side: ResolvedStage) -> _Hosted:
        return hosted(side, llm.head_weights * side.head_bytes + llm.embedding_weights * ENCODER_BYTES)

    projections = (hosted(side, llm.attention_weights * side.attention_bytes) for side in (a, f))
    moved = place.gate + place.shared
    experts = llm.expert_weights * f.experts_bytes / f.choice.data_parallel
    return (
        either(place.projections, *projections),
        hosted(a, moved * llm.dense_weights * a.dense_bytes),
        hosted(f, (1.0 - moved) * llm.dense_weights * f.dense_bytes + experts),
        either(place.head, head(f), head(a)),
    )


def _placed_weights_bytes(resolved: Resolved, pool: Array, llm: LLM, place: Placements) -> Array:
    """Bytes per accelerator of `pool` where parts may stand on either side; phases that share it share one copy."""
    total = jnp.zeros_like(resolved.kv_bytes_per_element)
    for prefill, decode in zip(*(_placed(resolved, phase, llm, place) for phase in ("prefill", "decode")), strict=True):
        decoding = jnp.where(decode.pool == pool, decode.size_bytes, 0.0)
        total = total + jnp.where(prefill.pool == pool, prefill.size_bytes, decoding)
    return total


def pool_weights_bytes(resolved: Resolved, pool: Array, llm: LLM) -> Array:
    """Bytes of weights per accelerator of `pool`: stages of one kind that share the pool share one copy."""
    total = jnp.zeros_like(resolved.kv_bytes_per_element)
    kinds = ("encode",), ("prefill_attention", "decode_attention"), ("prefill_ffn", "decode_ffn")
    if resolved.placement is not None:
        total, kinds = _placed_weights_bytes(resolved, pool, llm, resolved.placement), kinds[:1]
    for names in kinds:
        present = jnp.zeros_like(total, dtype=bool)
        for name in names:
            stage = getattr(resolved, name)
            here = (stage.choice.pool == pool) & ~present
            total = total + jnp.where(here, _stage_weights_bytes(resolved, stage, llm, name), 0.0)
            present = present | here
    return total if resolved.speculation is None else total + _draft_bytes(resolved, pool)


def _draft_bytes(resolved: Resolved, pool: Array) -> Array:
    """Bytes per accelerator of what drafts tokens, in the pool of decode's feed-forward layers."""
    assert resolved.speculation is not None
    stage, choice = resolved.decode_ffn, resolved.decode_ffn.choice
    ranks = choice.tensor_parallel * jnp.where(choice.expert_parallel > 1.0, choice.data_parallel, 1.0)
    size = resolved.speculation.parameters * stage.dense_bytes / (ranks * choice.pipeline_parallel)
    return jnp.where(choice.pool == pool, size, 0.0)


def pool_memory(resolved: Resolved, stage: ResolvedStage, llm: LLM, engine: Engine, mean_tokens: Array) -> Memory:
    """Memory of the pool that `stage` (an attention stage) stands in; `mean_tokens` is a sequence's usual length."""
    choice, hw = stage.choice, stage.hardware
    weights = pool_weights_bytes(resolved, choice.pool, llm)
    activations = ACTIVATION_FACTOR * llm.hidden * choice.token_budget / (choice.tensor_parallel * ranks(stage))
    free = hw.memory_bytes * engine.memory_fraction - engine.reserve_bytes - weights - activations
    ways = kv_shards(stage, llm) * choice.pipeline_parallel * choice.data_parallel * ranks(stage)
    per_token = kv_bytes_per_token(llm, resolved.kv_bytes_per_element, mean_tokens)
    return Memory(weights, free, jnp.maximum(free, 0.0) * ways / per_token)
