"""What a deployment must withstand beside its usual hours: a pool's lost replicas, peaks of prefill or of decode.

Each is a case of its own, in which the same deployment serves another workload, or with fewer replicas; the target
must hold in every one of them. All cases go through one evaluation, compiled once.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from breakeven.models.tables import Resolved
from breakeven.models.topology import STAGES
from breakeven.models.workload import Workload


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Losses:
    """Replicas that any one pool may lose."""

    pools: Array  # labels of the pools that lose them, one after another, shape (pools,)
    replicas: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Case:
    """One case, or all of them with a leading axis (cases,)."""

    pool: Array  # that has lost replicas; -1: none
    workload: Workload | None  # None: the usual one


def cases(losses: Losses | None, workload: Workload) -> tuple[Case, int]:
    """(the usual hours, then each pool's loss, then each peak of the workload, leaves with a leading axis; peaks)."""
    lost = jnp.zeros(0, jnp.int32) if losses is None else losses.pools.astype(jnp.int32)
    pools = jnp.concatenate([jnp.full((1,), -1, jnp.int32), lost])
    if workload.peaks is None:
        return Case(pools, None), 0
    count = workload.peaks.mean_output.shape[0]
    stacked = jax.tree.map(
        lambda one, many: jnp.concatenate([jnp.broadcast_to(one, (len(pools), *jnp.shape(one))), many]),
        _without_load(workload),
        _without_load(workload.peaks),
    )
    return Case(jnp.pad(pools, (0, count), constant_values=-1), stacked), count


def workload_of(case: Case, usual: Workload) -> Workload:
    """The workload of one case, at the load of the usual hours."""
    if case.workload is None:
        return usual
    return dataclasses.replace(
        case.workload,
        sessions_per_second=usual.sessions_per_second,
        concurrent_sessions=usual.concurrent_sessions,
    )


def _without_load(workload: Workload) -> Workload:
    return dataclasses.replace(workload, sessions_per_second=None, concurrent_sessions=None, peaks=None)


def without(resolved: Resolved, pool: Array, replicas: Array) -> tuple[Resolved, Array]:
    """(a deployment whose `pool` has lost so many replicas, whether it has any left)."""
    stages, alive = {}, jnp.ones_like(resolved.routing, dtype=bool)
    for name, stage in zip(STAGES, resolved.stages, strict=True):
        here = stage.choice.pool == pool
        left = stage.choice.replicas - jnp.where(here, replicas, 0.0)
        alive = alive & (left > 0.5)
        choice = dataclasses.replace(stage.choice, replicas=jnp.maximum(left, 1.0))
        stages[name] = dataclasses.replace(stage, choice=choice)
    return dataclasses.replace(resolved, **stages), alive
