"""What a deployment costs and draws: accelerators by kind, dollars per hour, power, energy."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from breakeven.models.tables import Economy, Resolved


class Fleet(NamedTuple):
    """Accelerators and what they cost, shapes (n,)."""

    accelerators: Array
    pools: Array
    cost_per_hour_usd: Array
    power_w: Array  # provisioned, all in
    inventory_excess: Array  # relative excess over what one can have, the worst kind
    by_stage: tuple[Array, ...]  # accelerators of each stage's pool, counted at the pool's first stage, else 0


def pool_accelerators(resolved: Resolved) -> tuple[Array, ...]:
    """Accelerators of each stage's pool, counted once: at the first stage that stands in it.

    A pool whose stages ask for different sharding is as large as the largest of them.
    """
    stages = resolved.stages
    sizes = [
        s.choice.replicas * s.choice.tensor_parallel * s.choice.data_parallel * s.choice.pipeline_parallel
        for s in stages
    ]
    counted = []
    for i, stage in enumerate(stages):
        first = jnp.ones_like(sizes[0], dtype=bool)
        size = sizes[i]
        for j, other in enumerate(stages):
            same = other.choice.pool == stage.choice.pool
            if j < i:
                first = first & ~same
            else:
                size = jnp.where(same, jnp.maximum(size, sizes[j]), size)
        counted.append(jnp.where(first, size, 0.0))
    return tuple(counted)


def fleet(resolved: Resolved, economy: Economy) -> Fleet:
    """Accelerators by kind, paid by whole instances where the study says so, plus the running cost of each pool."""
    by_stage = pool_accelerators(resolved)
    stages = resolved.stages
    total = cost = power = pools = jnp.zeros_like(by_stage[0])
    excess = jnp.full_like(total, -1.0)
    for i, stage in enumerate(stages):
        kind, first = jnp.zeros_like(total), jnp.ones_like(total, dtype=bool)
        for j, other in enumerate(stages):
            same = other.choice.accelerator == stage.choice.accelerator
            kind = kind + jnp.where(same, by_stage[j], 0.0)
            if j < i:
                first = first & ~(same & (by_stage[j] > 0.0))
        first = first & (by_stage[i] > 0.0)
        hw = stage.hardware
        rounded = jnp.ceil(kind / hw.per_instance - 1e-4) * hw.per_instance
        paid = jnp.where(economy.whole_instances > 0.5, rounded, kind)
        total = total + jnp.where(first, paid, 0.0)
        cost = cost + jnp.where(first, paid * hw.usd_per_hour, 0.0)
        excess = jnp.maximum(excess, jnp.where(first, kind / hw.available - 1.0, -1.0))
        power = power + jnp.where(first, paid * hw.all_in_power_w, 0.0)
        pools = pools + (by_stage[i] > 0.0)
    cost = cost + jnp.maximum(pools - 1.0, 0.0) * economy.pool_usd_per_hour + _tiers_usd_per_hour(resolved, by_stage)
    return Fleet(total, pools, cost, power, excess, by_stage)


def _tiers_usd_per_hour(resolved: Resolved, by_stage: tuple[Array, ...]) -> Array | float:
    """Cost of the KV cache below HBM, on every accelerator of the pool that prefills."""
    if resolved.tiers is None:
        return 0.0
    pool = resolved.prefill_attention.choice.pool
    counted = [
        jnp.where(stage.choice.pool == pool, size, 0.0) for stage, size in zip(resolved.stages, by_stage, strict=True)
    ]
    return sum(counted[1:], counted[0]) * jnp.sum(resolved.tiers.usd_per_hour, -1)
