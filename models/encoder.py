"""The vision encoder: seconds that a call's images take, where they are encoded, and what that does to the pool.

A pass takes as many images as the pool's limit allows: a vision transformer over their patches, every patch of an image
attending to all of that image. In a pool that prefills, the seconds are part of a call's prefill; elsewhere the encoder
has a queue of its own, and its embeddings cross a link. Audio windows and groups of video frames are images here.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from breakeven.models.llm import LLM
from breakeven.models.numerics import TINY
from breakeven.models.operators import allreduce_bytes, collective_latency_s, exchange_s, pair_s, read_s
from breakeven.models.queueing import Moments, Wait, queue_wait, uniform_wait
from breakeven.models.steps import (
    ACTIVATION_BYTES,
    ATTENTION_PRODUCTS,
    FFN_PRODUCTS,
    Coefficients,
    StepTime,
    collective_bytes_per_s,
    prefill_time,
    slow_host,
)
from breakeven.models.tables import Catalog, EncoderFormats, Engine, Resolved, ResolvedStage
from breakeven.models.workload import Images, PrefillNodes, Workload

BYTES = 2.0  # weights and embeddings of an encoder, 16 bit
MOST = 0.98  # utilizations are held below this where they shape waits; the true ones decide saturation


def encoder_coefficients(
    stage: ResolvedStage, llm: LLM, engine: Engine, own: EncoderFormats | None = None
) -> Coefficients:
    """Coefficients of a vision encoder by patches: its products, attention and two all-reduces a layer.

    Tensor parallelism splits its heads at most. Its weights and products are 16 bit, or of its `own` format, attention
    always; launches are those of the language model's layers.
    """
    hw = stage.hardware
    gemm, curve = hw.kernels["gemm_bf16"], hw.kernels["vision_attention_bf16"]
    t = jnp.minimum(stage.choice.tensor_parallel, llm.encoder_heads)
    peak, bandwidth = hw.bf16_flops_per_s, hw.memory_bandwidth_bytes_per_s
    parallel = jnp.where(t > 1.0, 2.0 * llm.encoder_layers, 0.0)
    reduce = hw.kernels["allreduce"]
    volume = allreduce_bytes(reduce, ACTIVATION_BYTES * llm.encoder_hidden, jnp.maximum(t, 2.0))
    token_s, root_s = exchange_s(reduce, volume, collective_bytes_per_s(hw, t))
    pairs_s = pair_s(curve, llm.encoder_flops_per_pair, llm.encoder_flops_per_pair / _head_layers(llm), t * peak)
    kernels_s = (ATTENTION_PRODUCTS + FFN_PRODUCTS) * gemm["latency_s"] + curve["latency_s"]
    layer_s = engine.layer_s * slow_host(stage, engine) + kernels_s * engine.launch_share
    moved = engine.activation_passes * ACTIVATION_BYTES * llm.encoder_hidden * llm.encoder_layers
    rate, size = t * gemm["share"] * peak, BYTES
    if own is not None:
        rate, size = t * own.flops_per_s, own.bytes_per_weight
    return Coefficients(
        step_s=llm.encoder_layers * layer_s,
        collective_s=parallel * (collective_latency_s(reduce, t) + engine.allreduce_s),
        collective_token_s=parallel * token_s,
        collective_root_s=parallel * root_s,
        activation_token_s=read_s(gemm, moved, bandwidth) * jnp.ones_like(t),
        sequence_s=jnp.zeros_like(t),
        projection_s=read_s(gemm, size * llm.encoder_attention_weights, t * bandwidth),
        projection_token_s=2.0 * llm.encoder_attention_weights / rate,
        weight_s=read_s(gemm, size * llm.encoder_dense_weights, t * bandwidth),
        token_s=2.0 * llm.encoder_patch_weights / rate,
        pair_s=pairs_s,
        query_s=curve["half_keys"] * pairs_s,
    )


def _head_layers(llm: LLM) -> Array:
    """Attention heads of all layers, at least one."""
    return jnp.maximum(llm.encoder_heads * llm.encoder_layers, 1.0)


def encode_time(
    side: Coefficients, llm: LLM, images: Images, count: Array, pictured: Array, per_pass: Array
) -> StepTime:
    """Encoding `count` images of a call, mean over calls of which a share `pictured` has any, `per_pass` at a time."""
    passes = jnp.maximum(count / per_pass, pictured)
    patches, some = count * images.patches, jnp.where(passes > 0.0, passes, 1.0)  # finite derivatives
    found = prefill_time(side, llm, patches, patches, patches * images.patches, 0.0 * count, some)
    return StepTime(*(jnp.where(passes > 0.0, part, 0.0) for part in found))


class Encode(NamedTuple):
    """What a call's images take, by node where (n, nodes): first calls that find their prefix, then that lost it."""

    seconds: Array  # (n, 2 nodes)
    transfer_s: Array  # (n, 2 nodes), embeddings on their way to another pool
    terms: StepTime  # of the mean call that finds its prefix, (n,)
    joined: Array  # 1.0 where the pool prefills: the seconds are part of the prefill
    beside_decode: Array  # 1.0 where the pool decodes and does not prefill
    engines: Array  # of the encoder's pool
    found: Moments  # of a call with images where they wait in a queue of their own, prefix held
    lost: Moments
    found_share: Array  # of calls that have any
    lost_share: Array
    found_mean_s: Array  # of the mean call, link included, where the prefill does not count it
    lost_mean_s: Array
    link_s: Array  # of it on the link, prefix held
    side: Coefficients
    per_pass: Array  # images
    image_link_s: Array  # of one image's embeddings, latency apart

    def mean_s(self, miss: Array) -> Array:
        """Of the mean call, link included, where a share `miss` of the prefixes is lost."""
        return self.found_mean_s + miss * (self.lost_mean_s - self.found_mean_s)


def encoding(
    resolved: Resolved, workload: Workload, catalog: Catalog, found: PrefillNodes, lost: PrefillNodes
) -> Encode | None:
    """The encoder of each candidate; None where no call has anything to encode."""
    images = workload.images
    if images is None:
        return None
    llm, choice = catalog.llm, resolved.encode.choice
    pa, pf, da, df = (other.choice.pool == choice.pool for other in resolved.stages[1:])
    joined = pa | pf
    side = encoder_coefficients(resolved.encode, llm, catalog.engine, resolved.encoder)
    wide: Coefficients = jax.tree.map(lambda leaf: leaf[:, None], side)
    budgeted = jnp.maximum(choice.token_budget / jnp.maximum(images.tokens, 1.0), 1.0)
    per_pass = jnp.where(joined | da | df, budgeted, choice.max_batch)
    image_s = _embedding_s(resolved, llm, images) * jnp.where(pa, 0.0, 1.0)

    def of(nodes: PrefillNodes) -> _Encoded:
        count, pictured, weight = (_wide(x, choice.pool) for x in (nodes.images, nodes.pictured, nodes.weight))
        time = encode_time(wide, llm, images, count, pictured, per_pass[:, None])
        latency_s = jnp.where(pa, 0.0, resolved.link_latency_s)
        moved_s = pictured * latency_s[:, None] + count * image_s[:, None]
        return _Encoded(weight, pictured, time, moved_s)

    one, other, apart = of(found), of(lost), jnp.where(joined, 0.0, 1.0)
    return Encode(
        seconds=jnp.concatenate([one.time.total_s, other.time.total_s], -1),
        transfer_s=jnp.concatenate([one.moved_s, other.moved_s], -1),
        terms=StepTime(*(jnp.sum(one.weight * term, -1) for term in one.time)),
        joined=jnp.where(joined, 1.0, 0.0),
        beside_decode=jnp.where((da | df) & ~joined, 1.0, 0.0),
        engines=choice.replicas,
        found=one.service,
        lost=other.service,
        found_share=apart * one.share,
        lost_share=apart * other.share,
        found_mean_s=apart * one.mean_s + one.link_s,
        lost_mean_s=apart * other.mean_s + other.link_s,
        link_s=one.link_s,
        side=side,
        per_pass=per_pass,
        image_link_s=image_s,
    )


class _Encoded(NamedTuple):
    """By node, (n, nodes): share of the calls, of them with images, and what these take."""

    weight: Array
    pictured: Array
    time: StepTime
    moved_s: Array

    @property
    def share(self) -> Array:
        """Of calls that have any."""
        return jnp.sum(self.weight * self.pictured, -1)

    @property
    def mean_s(self) -> Array:
        return jnp.sum(self.weight * self.time.total_s, -1)

    @property
    def link_s(self) -> Array:
        return jnp.sum(self.weight * self.moved_s, -1)

    @property
    def service(self) -> Moments:
        """Of a call that has any: a node's calls that have take as much more as they are fewer."""
        given_s = self.time.total_s / jnp.maximum(self.pictured, TINY)
        part = self.weight * self.pictured / jnp.maximum(self.share, TINY)[:, None]
        return Moments(*(jnp.sum(part * given_s**k, -1) for k in (1, 2, 3)))


def _wide(leaf: Array | None, like: Array) -> Array:
    """A node's number of each candidate, (n, nodes)."""
    assert leaf is not None
    return leaf if leaf.ndim > 1 else jnp.broadcast_to(leaf, (*like.shape, *leaf.shape))


def _embedding_s(resolved: Resolved, llm: LLM, images: Images) -> Array:
    """Seconds on the link of one image's embeddings, (n,); every rank sends its part over its own port."""
    e, p = resolved.encode, resolved.prefill_attention
    nic = jnp.minimum(e.hardware.nic_bytes_per_s, p.hardware.nic_bytes_per_s)
    port = jnp.minimum(resolved.link_bytes_per_s, jnp.where(resolved.link_through_nic > 0.5, nic, jnp.inf))
    ports = jnp.minimum(e.choice.tensor_parallel, p.choice.tensor_parallel)
    return BYTES * llm.encoder_token_elements * images.tokens / (ports * port)


class EncodeLoad(NamedTuple):
    """An encoder of its own under its load, shapes (n,)."""

    waits: tuple[Wait, Wait, Wait]  # for an engine, for the step in progress beside a decode, for the link
    link_utilization: Array


def encode_busy(encode: Encode, calls: Array, miss: Array | float) -> Array:
    """Share of time that each engine of an encoder outside the pools that prefill works, at so many calls a second."""
    found_s, lost_s = encode.found_share * encode.found.first, encode.lost_share * encode.lost.first
    return calls / encode.engines * (found_s + miss * (lost_s - found_s))


def encode_load(encode: Encode, calls: Array, miss: Array, step_s: Array, arrival_cv2: Array) -> EncodeLoad:
    """Waits at the encoder, sent to the engine with the fewest calls, M/G/c; beside a decode also for the step in
    progress, `step_s`. The link of embeddings is M/D/1."""
    share = encode.found_share + miss * (encode.lost_share - encode.found_share)
    some = jnp.where(share > 0.0, share, 1.0)  # keeps derivatives finite where nobody waits
    service = encode.found.mixed(encode.lost, miss * encode.lost_share / some)
    rate = calls * some / encode.engines
    queue = queue_wait(rate, service, encode.engines, arrival_cv2)
    link_busy = calls * encode.link_s / encode.engines
    link = jnp.clip(link_busy, 0.0, MOST)
    link_s = 0.5 * encode.link_s / (1.0 - link)
    step = uniform_wait(share * encode.beside_decode, jnp.maximum(step_s, 1e-6))
    sent = Wait(share * link, link_s, jnp.ones_like(link_s))
    return EncodeLoad((queue._replace(probability=share * queue.probability), step, sent), link_busy)
