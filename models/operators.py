r"""Time of one operator on one accelerator: a roofline whose sides are the shares of the peaks that kernels achieve.

    seconds = latency + max~(bytes / (read x bandwidth), FLOPs / (share x peak))

where max~ is the smooth roofline. With a fixed latency the achieved share of an operator of size w is
share w / (w + half), half = latency x share x peak: a logistic curve in log w, bounded by `share`, so that it
extrapolates to the peak share and to the latency. Prefill attention saturates in keys per query as well (partly masked
tiles, start of the loop over keys), and pays for the exponential of every score. A curve is a mapping of these
numbers (kernels.toml); the cost model and `breakeven calibrate` call the same functions.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from breakeven.models.numerics import smooth_max

Curve = Mapping[str, Any]  # of arrays or floats
Number = Any  # an array of any kind, or a float


def kernel_s(latency_s: Number, read_s: Number, compute_s: Number) -> Array:
    """Seconds of a kernel whose traffic alone takes `read_s` and whose arithmetic alone `compute_s`."""
    return latency_s + smooth_max(read_s, compute_s)


def read_s(curve: Curve, size_bytes: Number, bytes_per_s: Number) -> Array:
    """Seconds to move bytes of memory at the share of the bandwidth that the operator reaches."""
    return jnp.asarray(size_bytes) / (curve["read"] * bytes_per_s)


def compute_s(curve: Curve, flops: Number, flops_per_s: Number) -> Array:
    """Seconds of arithmetic at the share of the peak that the operator reaches."""
    return jnp.asarray(flops) / (curve["share"] * flops_per_s)


def pair_s(curve: Curve, flops: Number, head_flops: Number, flops_per_s: Number) -> Array:
    """Seconds that one (query, key) pair adds to prefill attention: `flops` of products, `head_flops` of them a head,
    and one exponential a head that costs as much as `softmax_flops`."""
    return compute_s(curve, flops * (1.0 + curve["softmax_flops"] / head_flops), flops_per_s)


def masked_pairs(curve: Curve, pairs: Number, queries: Number) -> Array:
    """Query-key pairs that prefill attention pays for: each query costs `half_keys` more than it attends to."""
    return pairs + curve["half_keys"] * queries


def permute_s(element_bytes: Number, routed_elements: Number, bytes_per_s: Number) -> Array:
    """Seconds to sort tokens by expert and to sum what they return; elements = token copies x hidden."""
    return jnp.asarray(element_bytes) * routed_elements / bytes_per_s


def allreduce_bytes(curve: Curve, size_bytes: Number, ranks: Number) -> Array:
    """Bytes that count for the link in an all-reduce of `size_bytes`: a ring sends 2 (t - 1) / t of them, `ring_power`
    1; switches that add on the way take the growth with ranks off, towards 0."""
    return size_bytes * (2.0 * (ranks - 1.0) / ranks) ** curve["ring_power"]


def hit_ranks(ranks: Number, experts_active: Number) -> Array:
    """Other ranks that a token must reach when its k experts stand on r ranks: (r - 1) (1 - (1 - 1/r)^k).

    >>> round(float(hit_ranks(8.0, 8.0)), 2)
    4.59
    """
    others = jnp.maximum(jnp.asarray(ranks), 1.0 + 1e-6)
    return -(others - 1.0) * jnp.expm1(experts_active * jnp.log1p(-1.0 / others))


def collective_latency_s(curve: Curve, ranks: Number) -> Array:
    """Seconds of a collective of next to nothing; each rank beyond two adds a share."""
    return curve["latency_s"] * (1.0 + curve["per_rank"] * jnp.maximum(ranks - 2.0, 0.0))


def exchange_s(curve: Curve, size_bytes: Number, bytes_per_s: Number) -> tuple[Array, Array]:
    """(seconds per message, per root of messages) of a collective, latency apart: n messages of these bytes in one
    take a n + b sqrt(n).

    The achieved share of a link grows with the bytes v as share / (1 + sqrt(half_bytes / v)): kernels change their
    algorithm and pipelining between a few kilobytes and tens of megabytes.
    """
    rate = curve["share"] * bytes_per_s
    return size_bytes / rate, jnp.sqrt(size_bytes * curve["half_bytes"]) / rate
