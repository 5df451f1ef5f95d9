"""The limits a deployment may break, and where the approximations that it is judged by were not confirmed."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from breakeven.models.economics import Fleet
from breakeven.models.memory import pool_memory
from breakeven.models.numerics import TINY
from breakeven.models.operating_point import OperatingPoint, Pools, State
from breakeven.models.tables import Catalog, Resolved
from breakeven.models.waits import CallWaits
from breakeven.models.workload import Workload


class Busy(NamedTuple):
    """Utilizations of prefill and decode engines, of the link and of the path to the KV tiers, shapes (n,)."""

    prefill: Array
    decode: Array
    link: Array
    tiers: Array
    encode: Array  # of an encoder outside the pools that prefill


class Violations(NamedTuple):
    """Relative excess over each limit, shapes (n,): feasible where all are <= 0."""

    weights: Array
    kv_cache: Array
    prefill: Array
    decode: Array
    link: Array
    tiers: Array
    encode: Array
    budget: Array
    power: Array
    inventory: Array
    loss: Array  # of the target over what is attained when a pool has lost replicas; -1 where none is to be survived
    peak: Array  # and over what is attained at a peak of prefill or decode


class Doubts(NamedTuple):
    """Where the queueing approximations were not confirmed by simulation, booleans of shape (n,)."""

    shared_pool_busy: Array  # above half load, prefill and decode in one pool
    decode_busy: Array  # decode above 0.8
    batch_limit: Array  # more than 2 % wait for room in the decode batch
    link_busy: Array  # bursty prefill over a link above 0.3
    few_prefill_engines: Array  # one or two, with a heavy-tailed prompt
    cache_unsettled: Array  # a surge of sessions tips it over for good, or the fixed point was not reached
    cache_short: Array  # more than 10 % of continued calls lose their prefix to eviction
    in_step: (
        Array  # several prompts prefilled in step, in data-parallel ranks or a bundle; or beside decode in a pipeline
    )
    sides_apart: Array  # prefill and decode share a pool with one side apart or unlike, which is not simulated
    speculation: Array  # drafts verified in steps that carry chunks of prefill, which is not simulated
    encoder: Array  # images encoded in a pool that decodes and does not prefill, which is not simulated


def pool_use(resolved: Resolved, busy: Busy) -> tuple[Array, ...]:
    """Share of time that the pool of each stage is busy: with what keeps it busiest."""
    stages, found = resolved.stages, []
    shares = busy.encode, busy.prefill, busy.prefill, busy.decode, busy.decode
    for stage in stages:
        use = jnp.zeros_like(busy.prefill)
        for other, share in zip(stages, shares, strict=True):
            use = jnp.where(other.choice.pool == stage.choice.pool, jnp.maximum(use, share), use)
        found.append(use)
    return tuple(found)


def limits_broken(
    resolved: Resolved,
    pools: Pools,
    workload: Workload,
    busy: Busy,
    money: Fleet,
    catalog: Catalog,
) -> Violations:
    """Excess over each limit at these utilizations."""
    economy, engine = catalog.economy, catalog.engine
    p, d = resolved.prefill_attention, resolved.decode_attention
    others = (
        [resolved.encode]
        if resolved.activations is None
        else [resolved.encode, resolved.prefill_ffn, resolved.decode_ffn]
    )
    memory = [pool_memory(resolved, s, catalog.llm, engine, workload.mean_prompt) for s in others]
    memory += [pools.prefill_memory, pools.decode_memory]
    short = [-m.free_bytes / s.hardware.memory_bytes for m, s in zip(memory, (*others, p, d), strict=True)]
    room = jnp.minimum(
        pools.prefill_memory.capacity_tokens / pools.prefill_workers,
        pools.decode_memory.capacity_tokens / pools.decode.workers,
    )
    return Violations(
        weights=functools.reduce(jnp.maximum, short),
        kv_cache=workload.max_tokens / jnp.maximum(room, 1.0) - 1.0,
        prefill=busy.prefill - 1.0,
        decode=busy.decode - 1.0,
        link=busy.link - 1.0,
        tiers=busy.tiers - 1.0,
        encode=busy.encode - 1.0,
        budget=money.cost_per_hour_usd / economy.budget_usd_per_hour - 1.0,
        power=money.power_w / economy.max_power_w - 1.0,
        inventory=money.inventory_excess,
        loss=jnp.full_like(busy.prefill, -1.0),
        peak=jnp.full_like(busy.prefill, -1.0),
    )


def _sides_apart(resolved: Resolved) -> Array:
    """Whether phases share pools with a side apart, other than by both sides at once."""
    pa, pf, da, df = (s.choice.pool for s in resolved.stages[1:])
    shared = (pa == da) | (pa == df) | (pf == da) | (pf == df)
    return ((pa != pf) | (da != df)) & shared & ~((pa == da) & (pf == df))


def doubts(
    resolved: Resolved,
    pools: Pools,
    state: State,
    point: OperatingPoint,
    decode_use: Array,
    waits: CallWaits,
    tipped: Array,
) -> Doubts:
    service_cv2 = point.service.second / (point.service.first**2 + TINY) - 1.0
    depth = pools.prefill_ways / jnp.maximum(pools.prefill_ranks, pools.prefill_workers)
    # Of calls sent to any replica most miss the one that holds their prefix, in the model as in the simulation.
    scattered = jnp.where(pools.prefill_scattered > 0.5, pools.prefill_replicas, 1.0)
    evicted = 1.0 - (1.0 - state.miss) * scattered
    moved = jnp.abs(point.state.batch / state.batch - 1.0) > 0.05
    return Doubts(
        shared_pool_busy=(pools.shared > 0.0) & (jnp.maximum(point.prefill_utilization, decode_use) > 0.5),
        decode_busy=point.state.decode_busy > 0.8,
        batch_limit=waits.admission.probability > 0.02,
        link_busy=(waits.link_utilization > 0.3) & (waits.departures_cv2 > 1.5),
        few_prefill_engines=(pools.shared <= 0.0) & (pools.prefill_replicas <= 2.0) & (service_cv2 > 4.0),
        cache_unsettled=tipped | moved,
        cache_short=evicted > 0.1,
        in_step=pools.prefill_ways > jnp.where(pools.shared > 0.5, 1.0, depth),
        sides_apart=_sides_apart(resolved),
        speculation=jnp.zeros_like(tipped)
        if resolved.speculation is None
        else (pools.chunked > 0.5) & (resolved.speculation.drafts > 0.0),
        encoder=jnp.zeros_like(tipped) if pools.encode is None else pools.encode.beside_decode > 0.5,
    )
