"""What a deployment costs and draws: accelerators by kind, dollars per hour, power, energy."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from breakeven.models.tables import Economy, Resolved


class Fleet(NamedTuple):
    """Accelerators and what they cost, shapes (n,)."""

    accelerators: Array
    pools: Array
    cost_per_hour_usd: Array
    complexity_usd_per_hour: Array  # part of the cost: running further pools and kinds of accelerators
    power_w: Array  # provisioned, all in
    drawn_w: Array  # by use, the building's overhead included
    inventory_excess: Array  # relative excess over what one can have, the worst kind
    by_stage: tuple[Array, ...]  # accelerators of each stage's pool, counted at the pool's first stage, else 0


def pool_accelerators(resolved: Resolved) -> tuple[Array, ...]:
    """Accelerators of each stage's pool, counted once: at the first stage that stands in it.

    A pool whose stages ask for different sharding is as large as the largest of them.
    """
    stages = resolved.stages
    sizes = [s.choice.replicas * s.choice.accelerators for s in stages]
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


def fleet(resolved: Resolved, economy: Economy, use: Sequence[Array]) -> Fleet:
    """Accelerators by kind, paid by whole instances where the study says so, electricity by use, and what it takes to
    run further pools and kinds.

    `use` is the share of time that each stage's pool is busy, shapes (n,). An accelerator that does nothing draws
    `idle_power_share` of its power.
    """
    by_stage = pool_accelerators(resolved)
    stages = resolved.stages
    idle = economy.idle_power_share
    total = cost = power = drawn = pools = kinds = jnp.zeros_like(by_stage[0])
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
        cost = cost + jnp.where(first, paid * (hw.usd_per_hour + idle * hw.electricity_usd_per_hour), 0.0)
        excess = jnp.maximum(excess, jnp.where(first, kind / hw.available - 1.0, -1.0))
        power = power + jnp.where(first, paid * hw.all_in_power_w, 0.0)
        busy = (1.0 - idle) * jnp.clip(use[i], 0.0, 1.0)
        cost = cost + by_stage[i] * busy * hw.electricity_usd_per_hour
        drawn = drawn + by_stage[i] * (idle + busy) * hw.power_w
        pools = pools + (by_stage[i] > 0.0)
        kinds = kinds + first
    cost = cost + _tiers_usd_per_hour(resolved, by_stage)
    complexity = jnp.maximum(pools - 1.0, 0.0) * economy.pool_usd_per_hour
    complexity = complexity + jnp.maximum(kinds - 1.0, 0.0) * economy.second_kind_usd_per_hour
    return Fleet(total, pools, cost + complexity, complexity, power, drawn * economy.power_overhead, excess, by_stage)


def _tiers_usd_per_hour(resolved: Resolved, by_stage: tuple[Array, ...]) -> Array | float:
    """Cost of the KV cache below HBM, on every accelerator of the pool that prefills."""
    if resolved.tiers is None:
        return 0.0
    pool = resolved.prefill_attention.choice.pool
    counted = [
        jnp.where(stage.choice.pool == pool, size, 0.0) for stage, size in zip(resolved.stages, by_stage, strict=True)
    ]
    return sum(counted[1:], counted[0]) * jnp.sum(resolved.tiers.usd_per_hour, -1)
