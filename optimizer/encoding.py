"""Optuna parameters of a space's structures: the same for every topology, so that samplers learn across topologies.

Each pool is named by the first of its stages in `SLOTS`; every slot that some topology has is always asked for. What a
topology does not allow stands for the structure nearest to it, so every trial names a valid one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import optuna

from breakeven.models.topology import STAGES, Topology
from breakeven.spaces.space import AXES
from breakeven.spaces.structures import NAMED, PoolShape, Structures

SLOTS = ("prefill_attention", "decode_attention", "prefill_ffn", "decode_ffn", "encode")
_WEIGHT = {"accelerator": 100.0, "weights": 30.0, "expert_parallel": 10.0}  # how far another name is; a doubling is 1


def slot(topology: Topology, pool: int) -> str:
    """The stage that names a pool."""
    return next(name for name in SLOTS if topology.labels[STAGES.index(name)] == pool)


@dataclass(frozen=True)
class Encoding:
    """Reads a trial's parameters as a structure, and writes a structure as parameters."""

    structures: Structures

    @cached_property
    def values(self) -> dict[str, list[int]]:
        """Values of every choice, in a fixed order."""
        families = self.structures.space.families
        found: dict[str, set[int]] = {"topology": set(range(len(families)))}
        for family, pools in zip(families, self.structures.pools, strict=True):
            for i, pool in enumerate(pools):
                for name in pool.fields:
                    key = f"{slot(family.topology, i)}.{name}"
                    found.setdefault(key, set()).update(int(v) for v in pool.axes[name])
            for axis in AXES:
                found.setdefault(axis, set()).update(int(v) for v in getattr(family, axis))
        return {name: sorted(values) for name, values in found.items()}

    @property
    def choices(self) -> list[str]:
        """The choices that are parameters: those with more than one value."""
        return [name for name, values in self.values.items() if len(values) > 1]

    def labels(self, name: str) -> list[str | int]:
        """The values of a parameter as people know them."""
        names = self.structures.space.names
        topologies = [family.topology.name for family in self.structures.space.families]
        known: dict[str, Any] = {
            "topology": topologies,
            "accelerator": names.accelerator_ids,
            "weights": names.weights,
            "kv": names.kv,
            "tiers": [stack.id for stack in names.tiers],
            "links": [link.id for link in names.links],
            "speculation": [way.id for way in names.speculations],
            "kv_transfer": [way.id for way in names.transfers],
            "encoder": names.encoders,
            "placement": [placement.id for placement in names.placements],
        }
        words = known.get(name.rpartition(".")[2])
        return [v if words is None else words[v] for v in self.values[name]]

    def suggest(self, trial: optuna.Trial) -> int:
        """The structure that a trial's parameters name."""
        named = {name: trial.suggest_categorical(name, self.labels(name)) for name in self.choices}
        return self.named(named)

    def named(self, values: Mapping[str, Any]) -> int:
        """The structure nearest to named values, those that this space lacks left out."""
        chosen = {}
        for name, value in values.items():
            labels = self.labels(name) if name in self.values else []
            if value in labels:
                chosen[name] = self.values[name][labels.index(value)]
        return self.structure(chosen)

    def structure(self, chosen: dict[str, int]) -> int:
        """The structure nearest to these values; those with one value only may be left out."""
        f = chosen.get("topology", 0)
        family, pools = self.structures.space.families[f], self.structures.pools[f]
        digits = [_nearest(pool, slot(family.topology, i), chosen) for i, pool in enumerate(pools)]
        for axis in AXES:
            allowed = getattr(family, axis)
            digits.append(int(np.argmax(allowed == chosen.get(axis, allowed[0]))))
        return self.structures.number(f, digits)

    def parameters(self, structure: int) -> dict[str, str | int]:
        """Parameters that name a structure."""
        named = self.described(structure)
        return {name: named[name] for name in self.choices}

    def described(self, structure: int) -> dict[str, str | int]:
        """Every choice of a structure by name; slots that its topology lacks take after its first pool."""
        f, digits = self.structures.digits(structure)
        family, pools = self.structures.space.families[f], self.structures.pools[f]
        own = {slot(family.topology, i): pool for i, pool in enumerate(pools)}
        values: dict[str, int] = {"topology": f}
        for (name, pool), d in zip(own.items(), digits, strict=False):
            values |= {f"{name}.{field}": int(v) for field, v in zip(pool.fields, pool.structures[d], strict=True)}
        values |= {axis: int(getattr(family, axis)[d]) for axis, d in zip(AXES, digits[len(pools) :], strict=True)}
        first = next(iter(own))
        named: dict[str, str | int] = {}
        for name, allowed in self.values.items():
            stage, _, field = name.rpartition(".")
            value = values.get(name, values.get(f"{first}.{field}", allowed[0]) if stage else allowed[0])
            named[name] = self.labels(name)[allowed.index(value) if value in allowed else 0]
        return named


def _nearest(pool: PoolShape, name: str, chosen: dict[str, int]) -> int:
    """The pool's structure that is closest to the chosen values of a slot."""
    away = np.zeros(len(pool.structures))
    for k, field in enumerate(pool.fields):
        value = chosen.get(f"{name}.{field}")
        if value is None:
            continue
        column = pool.structures[:, k]
        if field in NAMED:
            away += _WEIGHT[field] * (column != value)
        else:
            away += np.abs(np.log2(column / value))
    return int(np.argmin(away))
