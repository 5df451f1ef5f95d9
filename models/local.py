"""What measurements of the user's own system correct: pace of decode and prefill steps, and a constant of TTFT.

A correction belongs to the deployment it was measured on. A candidate takes that of its own layout where there is one,
else the geometric mean of those of its accelerator (the same topology first), else none.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from breakeven.models.deployment import Deployment, Stage

LAYOUT = ("tensor_parallel", "data_parallel", "pipeline_parallel", "weights")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pace:
    """Measured steps over the model's, of stages of known layout; every field of shape (corrections,)."""

    accelerator: Array  # row of catalog.hardware
    split: Array  # 1.0: prefill and decode stood in pools of their own
    tensor_parallel: Array
    data_parallel: Array
    expert_parallel: Array  # above 1: whole experts on each rank
    pipeline_parallel: Array
    weights: Array  # row of catalog.weight_schemes
    factor: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Local:
    """Corrections of one model and engine."""

    prefill: Pace
    decode: Pace
    first_token_s: Array  # (corrections,), added to TTFT


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Correction:
    """What applies to each candidate, shapes (n,)."""

    prefill_factor: Array
    decode_factor: Array
    first_token_s: Array


def _shares(stage: Stage, split: Array, pace: Pace) -> Array:
    """Weight of each correction for each stage, (n, corrections): the best matches share one, none have zero."""
    same = stage.accelerator[:, None] == pace.accelerator
    alike = (stage.expert_parallel[:, None] > 1.0) == (pace.expert_parallel > 1.0)
    for name in LAYOUT:
        alike = alike & (getattr(stage, name)[:, None] == getattr(pace, name))
    topology = split[:, None] == pace.split
    score = jnp.where(same, 1.0 + 2.0 * alike + topology, 0.0)
    best = (score > 0.0) & (score == jnp.max(score, -1, keepdims=True))
    return best / jnp.maximum(jnp.sum(best, -1, keepdims=True), 1.0)


def correction(deployment: Deployment, local: Local) -> Correction:
    """The corrections that apply to each candidate; neutral for an accelerator that was not measured."""
    p, d = deployment.prefill_attention, deployment.decode_attention
    split = jnp.where(p.pool == d.pool, 0.0, 1.0)
    prefill, decode = _shares(p, split, local.prefill), _shares(d, split, local.decode)
    return Correction(
        jnp.exp(prefill @ jnp.log(local.prefill.factor)),
        jnp.exp(decode @ jnp.log(local.decode.factor)),
        prefill @ local.first_token_s,
    )
