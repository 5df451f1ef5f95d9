"""KV cache below HBM: tiers that hold what HBM evicts, and what it takes to read a prefix back.

A stack is a sequence of tiers, nearest first. Together with HBM they are one LRU: what a level evicts moves down to
the next, and a call whose prefix stands in level k reads it back into HBM before its prefill, or computes it anew where
that is quicker on average (then the tier is of no use to that deployment).
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from breakeven.models.catalog import table
from breakeven.models.inputs import InputError, known_fields, number, pick
from breakeven.models.ownership import HOURS_PER_MONTH

NONE = "none"
LEVELS = 3
PATHS = ("host", "nic")
_RANGES = {
    "read_gbs": (1e-3, 1e6),
    "path_efficiency": (0.01, 1.0),
    "latency_us": (0.0, 1e7),
    "capacity_gb": (0.0, 1e9),
    "usd_per_gb_month": (0.0, 1e4),
    "prefetch_s": (0.0, 1e5),
}
_ABOUT = ("recalled", "sources", "as_of", "notes")
_FIELDS = (*_RANGES, "path", "shared", *_ABOUT)


@dataclass(frozen=True)
class Tier:
    """A level of KV cache below HBM, per accelerator."""

    id: str
    path: str  # what limits reading beside the tier itself: the accelerator's host link, or its NIC
    path_efficiency: float  # share of the path's peak that reading achieves
    read_bytes_per_s: float  # inf: as fast as the path
    latency_s: float
    capacity_bytes: float
    usd_per_hour: float
    shared: bool  # every replica finds in it what another one left
    prefetch_s: float = 0.0  # before a call comes (its tool still runs) that reading its prefix back begins


@dataclass(frozen=True)
class Stack:
    """Tiers below HBM, nearest first; none at all is a stack too."""

    id: str
    tiers: tuple[Tier, ...] = ()


@functools.cache
def tiers() -> dict[str, Tier]:
    """The tiers of the catalogue by id."""
    return {name: _tier(name, row, f"tiers.{name}") for name, row in table("tiers").items()}


def _tier(id: str, row: Mapping[str, Any], field: str) -> Tier:
    given = {"read_gbs": math.inf, "prefetch_s": 0.0} | dict(row)
    n = {k: v if v == math.inf else number(f"{field}.{k}", v, *_RANGES[k]) for k, v in given.items() if k in _RANGES}
    for name in (name for name in (*_RANGES, "path", "shared") if name not in given):
        raise InputError(f"{field}.{name}", None, "needed in a tier")
    if not isinstance(given["shared"], bool):
        raise InputError(f"{field}.shared", given["shared"], "true or false")
    return Tier(
        id=id,
        path=pick(f"{field}.path", given["path"], PATHS),
        path_efficiency=n["path_efficiency"],
        read_bytes_per_s=n["read_gbs"] * 1e9,
        latency_s=n["latency_us"] * 1e-6,
        capacity_bytes=n["capacity_gb"] * 1e9,
        usd_per_hour=n["capacity_gb"] * n["usd_per_gb_month"] / HOURS_PER_MONTH,
        shared=given["shared"],
        prefetch_s=n["prefetch_s"],
    )


def stack(spec: str | Mapping[str, Any], field: str = "kv_tiers") -> Stack:
    """A stack of tiers: `none`, tiers of the catalogue joined by `+`, or a table `{name, tiers}` whose tiers are names
    or variations `{like: id, capacity_gb: …}`; a variation alone is a stack of one.

    >>> [tier.id for tier in stack("host-dram+nvme").tiers]
    ['host-dram', 'nvme']
    """
    if isinstance(spec, str):
        names = [] if spec == NONE else spec.split("+")
        return _checked(Stack(spec, tuple(tiers()[pick(field, name, (NONE, *tiers()))] for name in names)), field)
    if "tiers" not in spec:
        one = _variation(spec, field)
        return Stack(one.id, (one,))
    known_fields(spec, ("name", "tiers"), field)
    rows = spec["tiers"]
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        raise InputError(f"{field}.tiers", rows, "a list of tiers, nearest first")
    found = tuple(_variation(row, f"{field}.tiers.{i}") for i, row in enumerate(rows))
    return _checked(Stack(_name(spec, field, "+".join(tier.id for tier in found)), found), field)


def _variation(spec: str | Mapping[str, Any], field: str) -> Tier:
    if isinstance(spec, str):
        return tiers()[pick(field, spec, tiers())]
    if not isinstance(spec, Mapping):
        raise InputError(field, spec, "a tier's name, or a table of its fields")
    known_fields(spec, ("name", "like", *_FIELDS), field)
    like = pick(f"{field}.like", spec.get("like"), tiers())
    own = {key: value for key, value in spec.items() if key not in ("name", "like")}
    return _tier(_name(spec, field, f"{like}*"), {**table("tiers")[like], **own}, field)


def _name(spec: Mapping[str, Any], field: str, default: str) -> str:
    name = spec.get("name", default)
    if not isinstance(name, str) or not name.strip():
        raise InputError(f"{field}.name", name, "a name, for reports")
    if name in (NONE, *tiers()):
        raise InputError(f"{field}.name", name, "is a row of the catalogue; choose another name")
    return name


def _checked(found: Stack, field: str) -> Stack:
    if len(found.tiers) > LEVELS:
        raise InputError(field, found.id, f"at most {LEVELS} tiers")
    for above, below in zip(found.tiers, found.tiers[1:], strict=False):
        if above.shared and not below.shared:
            raise InputError(field, found.id, "tiers of one's own above shared ones")
    return found


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TierRows:
    """Stacks as arrays: shape (stacks, LEVELS) in the catalogue, (n, LEVELS) once gathered; per accelerator.

    A level that a stack does not have holds nothing.
    """

    capacity_bytes: Array
    path_efficiency: Array
    read_bytes_per_s: Array
    latency_s: Array
    usd_per_hour: Array
    through_nic: Array  # 1.0: the accelerator's NIC limits reading; 0.0: its host link does
    shared: Array  # 1.0: of the whole pool; 0.0: of one engine
    prefetch_s: Array | None = None  # before a call comes; None: no tier is read before


FASTEST = 1e15  # bytes/s: no limit of its own


def tier_rows(stacks: Sequence[Stack]) -> TierRows | None:
    """The stacks as arrays, rows in this order; None where no stack has a tier, so that nothing is computed."""
    if not any(row.tiers for row in stacks):
        return None
    empty = Tier(NONE, "host", 1.0, FASTEST, 0.0, 0.0, 0.0, False)
    padded = [(*row.tiers, *[empty] * (LEVELS - len(row.tiers))) for row in stacks]

    def leaf(value: Any) -> Array:
        return jnp.asarray(np.array([[value(tier) for tier in row] for row in padded], np.float64), jnp.float32)

    return TierRows(
        capacity_bytes=leaf(lambda t: t.capacity_bytes),
        path_efficiency=leaf(lambda t: t.path_efficiency),
        read_bytes_per_s=leaf(lambda t: min(t.read_bytes_per_s, FASTEST)),
        latency_s=leaf(lambda t: t.latency_s),
        usd_per_hour=leaf(lambda t: t.usd_per_hour),
        through_nic=leaf(lambda t: float(t.path == "nic")),
        shared=leaf(lambda t: float(t.shared)),
        prefetch_s=leaf(lambda t: t.prefetch_s) if any(t.prefetch_s for row in stacks for t in row.tiers) else None,
    )
