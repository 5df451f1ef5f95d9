"""What moves with a part of the model to the other side of an attention/FFN split: its products, weights and traffic.

A part takes its matrix products, at the other side's sharding and pace, and the weights they read. Projections also
take the kernels' launches, the all-reduce behind them and the passes over the hidden state, which then never comes to
attention: queries, keys and values cross to it in 16 bit, and what it attended to crosses back (Lamina,
arXiv:2405.01814). There are two hand-offs a layer either way, and one more each way where the LM head stands with
attention but the projections do not.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from breakeven.models.llm import LLM
from breakeven.models.placement_choices import Crossed, Placements
from breakeven.models.steps import (
    ACTIVATION_BYTES,
    ATTENTION_PRODUCTS,
    Coefficients,
    activations_s,
    allreduce,
    projection_products,
)
from breakeven.models.tables import Activations, Engine, ResolvedStage

DISPATCH_BYTES, COMBINE_BYTES = 1.0, 2.0  # per element on the way to experts (8 bit) and back (16 bit)


class Traffic(NamedTuple):
    """What the activations of one token take to the other side and back, over all layers; shapes (n,)."""

    there_bytes: Array  # to the feed-forward side
    back_bytes: Array
    handoffs: Array  # of one direction


def traffic(llm: LLM, experts_ranks: Array, place: Placements | None, crossed: Crossed | None) -> Traffic:
    """Of one token. With whole experts on `experts_ranks` ranks a token that is routed before it crosses goes to each
    of the ranks that hold one of its k experts, r (1 - (1 - 1/r)^k) of r on average, and to one more for the shared
    expert; else one copy goes, and the engine's own links spread it.
    """
    ranks = experts_ranks
    distinct = -ranks * jnp.expm1(llm.experts_active * jnp.log1p(-1.0 / jnp.maximum(ranks, 1.0 + 1e-6)))
    shared, dispatch = llm.shared_experts, jnp.asarray(DISPATCH_BYTES)
    if place is not None:
        shared = shared * jnp.where(place.shared > 0.0, 0.0, 1.0)
        dispatch = _either(place.routed, ACTIVATION_BYTES, DISPATCH_BYTES)
        ranks = jnp.where(place.routed > 0.5, ranks, 1.0)
    copies = jnp.where(ranks > 1.0, distinct + shared, 1.0)
    plain = (llm.layers - llm.moe_layers) * ACTIVATION_BYTES
    there = llm.hidden * (llm.moe_layers * copies * dispatch + plain)
    back = llm.hidden * (llm.moe_layers * copies * COMBINE_BYTES + plain)
    if place is None or crossed is None:
        return Traffic(there, back, llm.layers * jnp.ones_like(there))
    ends = place.head * llm.hidden  # the embedding on its way to the projections, the last layer's output to the head
    return Traffic(
        _either(place.projections, there, ACTIVATION_BYTES * (crossed.attended + ends)),
        _either(place.projections, back, ACTIVATION_BYTES * (crossed.projected + ends)),
        llm.layers + place.projections * place.head,
    )


def ports(
    link: Activations, a: ResolvedStage, f: ResolvedStage, workers: Array, ffn_engines: Array
) -> tuple[Array, Array]:
    """(bytes per second between the sides of a bundle, share of its ports that one rank group has).

    Every rank sends its part over its own port, as many ports as the side with fewer ranks has.
    """
    nic = jnp.minimum(a.hardware.nic_bytes_per_s, f.hardware.nic_bytes_per_s)
    port = jnp.where(link.through_nic > 0.5, jnp.minimum(link.bytes_per_s, nic), link.bytes_per_s)
    here = a.choice.tensor_parallel * a.choice.data_parallel * workers
    other = f.choice.tensor_parallel * f.choice.data_parallel * ffn_engines
    count = jnp.minimum(here, other)
    return count * port, jnp.minimum(a.choice.tensor_parallel / count, 1.0)


def sides_with(
    sides: tuple[Coefficients, Coefficients],
    stages: tuple[ResolvedStage, ResolvedStage],
    llm: LLM,
    engine: Engine,
    place: Placements,
    apart: Array,
    queries: Array | float,
) -> tuple[Coefficients, Coefficients]:
    """(attention, feed-forward) coefficients of a phase with every part where it stands; as they are where the sides
    are not `apart` (1.0)."""
    found = []
    for side, stage, sign in zip(sides, stages, (-1.0, 1.0), strict=True):
        gained = sign * apart
        projections = _times(_projections(stage, llm, engine), gained * place.projections)
        dense = _times(_dense(stage, llm), -gained * (place.gate + place.shared))
        whole = side + projections + dense + _times(_head(stage, llm, queries), -gained * place.head)
        found.append(jax.tree.map(lambda leaf: jnp.maximum(leaf, 0.0), whole))  # what all moves from leaves rounding
    return found[0], found[1]


def shared_products(stage: ResolvedStage, llm: LLM, place: Placements) -> tuple[Array, Array]:
    """(seconds to read, seconds of a token's arithmetic) of shared experts on an attention engine: they need nothing
    from the feed-forward side, so they run while tokens are away there."""
    side = _times(_dense(stage, llm), place.shared)
    assert side.weight_s is not None and side.token_s is not None
    return side.weight_s, side.token_s


def read_elsewhere(
    llm: LLM, a: ResolvedStage, f: ResolvedStage, place: Placements, workers: Array, ffn_engines: Array
) -> Array:
    """Bytes that a step of a bundle reads more than where every part stands where it does by default."""
    moved = (place.gate + place.shared) * llm.dense_weights
    return (
        place.projections * llm.attention_weights * (f.attention_bytes * ffn_engines - a.attention_bytes * workers)
        + moved * (a.dense_bytes * workers - f.dense_bytes * ffn_engines)
        + place.head * llm.head_weights * (a.head_bytes * workers - f.head_bytes * ffn_engines)
    )


def _projections(stage: ResolvedStage, llm: LLM, engine: Engine) -> Coefficients:
    """All that projections add to a side."""
    latency_s, token_s, root_s = allreduce(stage, llm, engine)
    read_s, arithmetic_s = projection_products(stage, llm)
    return _part(
        stage,
        step_s=llm.layers * ATTENTION_PRODUCTS * stage.hardware.kernels["gemm_bf16"]["latency_s"] * engine.launch_share,
        collective_s=latency_s,
        collective_token_s=token_s,
        collective_root_s=root_s,
        activation_token_s=activations_s(stage, llm, engine),
        projection_s=read_s,
        projection_token_s=arithmetic_s,
    )


def _dense(stage: ResolvedStage, llm: LLM) -> Coefficients:
    """All dense feed-forward products."""
    t = stage.choice.tensor_parallel
    return _part(
        stage,
        weight_s=llm.dense_weights * stage.dense_bytes / (t * stage.dense_read_bytes_per_s),
        token_s=2.0 * llm.dense_weights / (t * stage.dense_flops_per_s),
    )


def _head(stage: ResolvedStage, llm: LLM, queries: Array | float) -> Coefficients:
    """The LM head, which every token of a decoding sequence passes."""
    t = stage.choice.tensor_parallel
    read_s = llm.head_weights * stage.head_bytes / (t * stage.head_read_bytes_per_s)
    return _part(
        stage,
        weight_s=read_s,
        token_s=jnp.zeros_like(read_s),
        sequence_s=queries * 2.0 * llm.head_weights / (t * stage.head_flops_per_s),
    )


_ALWAYS = ("step_s", "collective_s", "collective_token_s", "collective_root_s", "activation_token_s", "sequence_s")


def _part(stage: ResolvedStage, **seconds: Array) -> Coefficients:
    """Coefficients that are 0 but for these."""
    none = jnp.zeros_like(stage.choice.tensor_parallel)
    return Coefficients(**{name: none for name in _ALWAYS} | seconds)


def _times(part: Coefficients, factor: Array) -> Coefficients:
    return jax.tree.map(lambda leaf: leaf * factor, part)


def _either(flag: Array, off: Array | float, on: Array | float) -> Array:
    return jnp.where(flag > 0.5, on, off)
