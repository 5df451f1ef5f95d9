"""The part of a space that a serving engine of today can run."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from breakeven.models.hardware import Accelerator
from breakeven.models.support import (
    accelerator_support,
    joint_support,
    kv_support,
    topology_support,
    transfer_support,
    weights_support,
)
from breakeven.spaces.formats import by_kv, part
from breakeven.spaces.space import Family, Names, Space


def deployable(space: Space, engine: str) -> Space:
    """The candidates of `space` whose topology, accelerators, formats and mixture of makers `engine` supports.

    A family becomes several where KV formats run on different accelerators, or where the pools of a split could stand
    on accelerators of makers that the engine does not mix. Pools with different weight formats stay.
    """
    kept = [found for family in space.families for found in _deployable(family, space.names, engine)]
    return Space(tuple(kept), space.names)


def _deployable(family: Family, names: Names, engine: str) -> Iterator[Family]:
    if not topology_support(engine, family.topology.name).today:
        return
    mixed = len(family.tables) == 1 or joint_support(engine, "mixed_vendors").today
    makers = np.array([a.vendor for a in names.accelerators])
    moves = [k for k in family.kv_transfer if all(transfer_support(engine, a).today for a in names.transfers[k].asks)]
    family = dataclasses.replace(family, kv_transfer=np.array(moves, np.int64))
    groups = [np.ones(len(makers), bool)] if mixed else [makers == maker for maker in dict.fromkeys(makers)]
    for kv, runs in by_kv(family, names, lambda *choice: _runs(engine, *choice)):
        for group in groups:
            found = part(family, kv, runs & group[:, None])
            if found.size:
                yield found


def _runs(engine: str, accelerator: Accelerator, weights: str, kv: str) -> bool:
    facts = accelerator_support(engine, accelerator), weights_support(engine, weights, accelerator)
    return all(fact.today for fact in (*facts, kv_support(engine, kv, accelerator)))


def what_is_missing(space: Space, engine: str) -> str:
    """Why nothing of a space is deployable: the topologies and accelerators that the engine does not run."""
    topologies = {f.topology.name for f in space.families if not topology_support(engine, f.topology.name).today}
    kinds = [a.id for a in space.names.accelerators if not accelerator_support(engine, a).today]
    return ", ".join([*sorted(topologies), *kinds]) or "the formats of its weights or KV cache"
