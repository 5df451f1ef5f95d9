"""A space of deployments: families of topologies, each a product of pool configurations, numbered one by one.

A family's pools are tables of valid configurations (numpy, one row each). A candidate of the family is one row of
each table, a KV precision, a link and a routing: a mixed-radix number. `Space.deployment(ids)` turns numbers into
the struct of arrays that `evaluate` takes; nothing is held in memory beyond the tables.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax import Array

from breakeven.models.architecture import Architecture
from breakeven.models.deployment import ROUTING, STAGE_FIELDS, Deployment, Stage
from breakeven.models.hardware import Accelerator, Link
from breakeven.models.placement_choices import Placement
from breakeven.models.speculation import Speculation
from breakeven.models.tables import PLAIN_ENCODER
from breakeven.models.tiers import Stack
from breakeven.models.topology import COLUMNS, STAGES, Topology, topology
from breakeven.models.transfer_ways import FULL, TransferWay, transfers

POOL_FIELDS = (
    "accelerator",
    "tensor_parallel",
    "data_parallel",
    "expert_parallel",
    "pipeline_parallel",
    "context_parallel",
    "replicas",
    "max_batch",
    "token_budget",
    "weights",
)

AXES = (
    "kv",
    "tiers",
    "links",
    "routing",
    "micro_batches",
    "speculation",
    "kv_transfer",
    "encoder",
    "placement",
)  # what joins the pools, as a family's last digits
AXIS_COLUMNS = {axis: axis for axis in AXES} | {"links": "link"}  # of `Space.columns`
RANKS = ("tensor_parallel", "data_parallel", "pipeline_parallel", "context_parallel")  # whose product is an engine


@dataclass(frozen=True)
class PoolDomain:
    """The values each choice of a pool may take; accelerators and weights by name."""

    accelerator: tuple[str, ...]
    tensor_parallel: tuple[int, ...] = (1,)
    data_parallel: tuple[int, ...] = (1,)
    expert_parallel: tuple[bool, ...] = (False,)
    pipeline_parallel: tuple[int, ...] = (1,)
    context_parallel: tuple[int, ...] = (1,)
    replicas: tuple[int, ...] = (1,)
    max_batch: tuple[int, ...] = (256,)
    token_budget: tuple[int, ...] = (8192,)
    weights: tuple[str, ...] = ("bf16",)


@dataclass(frozen=True)
class Names:
    """What row numbers of the catalogue stand for."""

    accelerators: tuple[Accelerator, ...]
    links: tuple[Link, ...]
    weights: tuple[str, ...]
    kv: tuple[str, ...]
    tiers: tuple[Stack, ...] = (Stack("none"),)
    speculations: tuple[Speculation, ...] = (Speculation("none"),)
    transfers: tuple[TransferWay, ...] = (TransferWay(FULL),)
    encoders: tuple[str, ...] = (PLAIN_ENCODER,)
    placements: tuple[Placement, ...] = (Placement(),)

    @property
    def speculates(self) -> bool:
        """Whether some candidate decodes speculatively."""
        return any(way.acceptance for way in self.speculations)

    @property
    def transfers_differ(self) -> bool:
        """Whether some candidate's KV cache gets to decode otherwise than as a whole after prefill."""
        return transfers(self.transfers) is not None

    @property
    def encoders_differ(self) -> bool:
        """Whether some candidate's vision encoder is not in 16 bit."""
        return any(name != PLAIN_ENCODER for name in self.encoders)

    @property
    def placements_differ(self) -> bool:
        """Whether some part of the model may stand on another side of an attention/FFN split than by default."""
        return any(placement != Placement() for placement in self.placements)

    @property
    def accelerator_ids(self) -> tuple[str, ...]:
        return tuple(a.id for a in self.accelerators)


def why_invalid(
    row: dict[str, np.ndarray], names: Names, llm: Architecture, experts: bool = True
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(valid rows, rule -> rows it forbids) of pool configurations, by sharding rules alone (memory is the model's).

    `experts`: the pool holds those that the model has.
    """
    t, d, p = row["tensor_parallel"], row["data_parallel"], row["pipeline_parallel"]
    node = np.array([max(a.scaleup_domain, a.per_instance) for a in names.accelerators])[row["accelerator"]]
    whole = row["expert_parallel"] > 0
    ranks = t * d
    wide = whole & (t <= node) & (ranks % node == 0)  # experts over whole nodes, dispatched through the NICs
    rules = {
        f"tensor_parallel divides {llm.shardable_heads} heads": llm.shardable_heads % t != 0,
        "tensor_parallel × data_parallel stays inside a node, or fills several with expert_parallel": (ranks > node)
        & ~wide,
        f"pipeline_parallel is at most {llm.layers} layers": p > llm.layers,
        "context_parallel needs data_parallel 1": (row.get("context_parallel", 1) > 1) & (d > 1),
        "expert_parallel needs experts that the ranks divide": whole
        & ((llm.experts == 0) | (ranks == 1) | (np.maximum(llm.experts, 1) % ranks != 0)),
        "data_parallel with experts needs expert_parallel": (d > 1) & (experts and llm.experts > 0) & ~whole,
    }
    valid = np.ones(len(t), bool)
    for broken in rules.values():
        valid &= ~broken
    return valid, rules


def pool_table(domain: PoolDomain, stages: tuple[str, ...], names: Names, llm: Architecture) -> dict[str, np.ndarray]:
    """Every valid configuration of a pool of these stages, one array per field of POOL_FIELDS."""
    domain = _effective(domain, stages)
    rows = {
        "accelerator": [names.accelerator_ids.index(a) for a in domain.accelerator],
        "weights": [names.weights.index(w) for w in domain.weights],
    }
    axes = [np.asarray(rows.get(name, getattr(domain, name))) for name in POOL_FIELDS]
    grid = np.meshgrid(*axes, indexing="ij")
    table = {name: axis.ravel().astype(np.int64) for name, axis in zip(POOL_FIELDS, grid, strict=True)}
    valid, _ = why_invalid(table, names, llm, _feeds_forward(stages))
    return {name: column[valid] for name, column in table.items()}


def accelerators_of(table: dict[str, np.ndarray]) -> np.ndarray:
    """Accelerators of each configuration of a pool."""
    return np.prod([table[name] for name in ("replicas", *RANKS)], axis=0)


@dataclass(frozen=True)
class Family:
    """All candidates of one topology: one configuration per pool, a KV precision, a link and a routing."""

    topology: Topology
    tables: tuple[dict[str, np.ndarray], ...]
    kv: np.ndarray  # rows of the catalogue
    tiers: np.ndarray
    links: np.ndarray
    routing: np.ndarray  # codes of ROUTING
    micro_batches: np.ndarray  # in flight between attention and feed-forward pools; 1 where there are none
    speculation: np.ndarray
    kv_transfer: np.ndarray
    encoder: np.ndarray
    placement: np.ndarray

    @property
    def radices(self) -> tuple[int, ...]:
        pools = tuple(len(table["replicas"]) for table in self.tables)
        return (*pools, *[len(getattr(self, axis)) for axis in AXES])

    @property
    def size(self) -> int:
        return int(np.prod([float(r) for r in self.radices]))

    def digits(self, index: np.ndarray) -> tuple[np.ndarray, ...]:
        """The mixed-radix digits of candidate numbers within the family."""
        return tuple(np.unravel_index(index, self.radices)) if self.size else ()


@dataclass(frozen=True)
class Space:
    """Families one after another; candidate ids run through them."""

    families: tuple[Family, ...]
    names: Names

    @cached_property
    def offsets(self) -> np.ndarray:
        return np.cumsum([0, *[family.size for family in self.families]])

    @property
    def size(self) -> int:
        return int(self.offsets[-1])

    def family(self, ids: np.ndarray) -> np.ndarray:
        """Number of the family each candidate belongs to."""
        return np.searchsorted(self.offsets, ids, side="right") - 1

    @cached_property
    def slots(self) -> tuple[str, ...]:
        """Columns of pools: those of prefill and decode attention, and where some family has feed-forward layers or the
        vision encoder apart, those of theirs."""
        apart = {
            "encode": any(f.topology.encode_apart for f in self.families),
            "prefill_ffn": any(f.topology.prefill_apart for f in self.families),
            "decode_ffn": any(f.topology.decode_apart for f in self.families),
        }
        return tuple(name for name in (*COLUMNS[1:], COLUMNS[0]) if apart.get(name, True))

    @cached_property
    def rings(self) -> bool:
        """Whether some pool spreads the tokens of a prefill over ranks."""
        return any((table["context_parallel"] > 1).any() for family in self.families for table in family.tables)

    @property
    def pool_fields(self) -> tuple[str, ...]:
        """The fields of POOL_FIELDS that some pool makes use of."""
        return tuple(name for name in POOL_FIELDS if name != "context_parallel" or self.rings)

    @property
    def apart(self) -> bool:
        """Whether some candidate's attention stands apart from its feed-forward layers."""
        return any(f.topology.sides_apart for f in self.families)

    @property
    def places(self) -> bool:
        """Whether candidates differ in what stands on which side of such a split, or from the default."""
        return self.apart and self.names.placements_differ

    def columns(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """Choices of candidates as numbers: family, kv, link, routing, and each pool field by slot."""
        ids = np.asarray(ids, np.int64)
        out: dict[str, np.ndarray] = {"family": self.family(ids)}
        fields = [f"{slot}_{name}" for slot in self.slots for name in POOL_FIELDS]
        out |= {name: np.zeros(len(ids), np.int64) for name in (*AXIS_COLUMNS.values(), *fields)}
        for f, family in enumerate(self.families):
            here = np.flatnonzero(out["family"] == f)
            if not len(here):
                continue
            digits = family.digits(ids[here] - self.offsets[f])
            pools = digits[: -len(AXES)]
            for (axis, name), digit in zip(AXIS_COLUMNS.items(), digits[-len(AXES) :], strict=True):
                out[name][here] = getattr(family, axis)[digit]
            for slot in self.slots:
                pool = family.topology.labels[COLUMNS.index(slot)]
                for name in POOL_FIELDS:
                    out[f"{slot}_{name}"][here] = family.tables[pool][name][pools[pool]]
        return out

    def accelerators(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(kind of each stage's pool, shape (len(ids), stages); accelerators of each kind, shape (len(ids), kinds))."""
        number = self.family(ids)
        kinds = np.zeros((len(ids), len(STAGES)), np.int64)
        count = np.zeros((len(ids), len(self.names.accelerators)), np.int64)
        for f in np.unique(number):
            family, here = self.families[f], np.flatnonzero(number == f)
            pools = list(zip(family.tables, family.digits(ids[here] - self.offsets[f]), strict=False))
            kind = [table["accelerator"][row] for table, row in pools]
            for own, (table, row) in zip(kind, pools, strict=True):
                count[here, own] += accelerators_of(table)[row]
            kinds[here] = np.stack([kind[pool] for pool in family.topology.labels], 1)
        return kinds, count

    def deployment(self, ids: np.ndarray) -> Deployment:
        """Candidates as a struct of arrays, shape (len(ids),)."""
        c = self.columns(ids)
        labels = np.array([family.topology.labels for family in self.families])[c["family"]]
        chunked = np.array([family.topology.chunked for family in self.families])[c["family"]]
        choices = {slot: _choices({n: c[f"{slot}_{n}"] for n in self.pool_fields}, chunked) for slot in self.slots}
        stages = {}
        for s, stage in enumerate(STAGES):
            phase = "decode" if stage.startswith("decode") else "prefill"
            slot = COLUMNS[s] if COLUMNS[s] in self.slots else phase
            stages[stage] = Stage(pool=_array(labels[:, s], np.int32), **choices[slot])
        activations = {}
        if self.apart:
            activations["activation_link"] = _array(c["link"], np.int32)
            activations["micro_batches"] = _array(c["micro_batches"], np.float32)
        if self.names.speculates:
            activations["speculation"] = _array(c["speculation"], np.int32)
        if self.names.transfers_differ:
            activations["kv_transfer"] = _array(c["kv_transfer"], np.int32)
        if self.names.encoders_differ:
            activations["encoder"] = _array(c["encoder"], np.int32)
        if self.places:
            activations["placement"] = _array(c["placement"], np.int32)
        return Deployment(
            **stages,
            kv=_array(c["kv"], np.int32),
            kv_tiers=_array(c["tiers"], np.int32),
            link=_array(c["link"], np.int32),
            routing=_array(c["routing"], np.float32),
            **activations,
        )

    def frame(self, ids: np.ndarray) -> pd.DataFrame:
        """Choices of candidates by name, one column each, as front.csv shows them."""
        c = self.columns(ids)
        topologies = [f.topology.name for f in self.families]
        split = np.array([len(f.topology.pools) > 1 for f in self.families])[c["family"]]
        out: dict[str, object] = {"candidate": np.asarray(ids, np.int64)}
        out["topology"] = _named(c["family"], topologies)
        named = {"accelerator": self.names.accelerator_ids, "weights": self.names.weights}
        for slot in self.slots:
            for name in self.pool_fields:
                values = c[f"{slot}_{name}"]
                flagged = values > 0 if name == "expert_parallel" else values
                out[f"{slot}_{name}"] = _named(values, named[name]) if name in named else flagged
        out["kv"] = _named(c["kv"], self.names.kv)
        out["kv_tiers"] = _named(c["tiers"], [stack.id for stack in self.names.tiers])
        out["link"] = _named(np.where(split, c["link"] + 1, 0), ["", *[link.id for link in self.names.links]])
        out["routing"] = _named(c["routing"], ROUTING)
        if self.apart:
            out["micro_batches"] = c["micro_batches"]
        if self.names.speculates:
            out["speculation"] = _named(c["speculation"], [way.id for way in self.names.speculations])
        if self.names.transfers_differ:
            out["kv_transfer"] = _named(c["kv_transfer"], [way.id for way in self.names.transfers])
        if self.names.encoders_differ:
            out["encoder"] = _named(c["encoder"], self.names.encoders)
        if self.places:
            apart = np.array([f.topology.sides_apart for f in self.families])[c["family"]]
            named = ["", *[placement.id for placement in self.names.placements]]
            out["placement"] = _named(np.where(apart, c["placement"] + 1, 0), named)
        return pd.DataFrame(out)

    def blocks(self, size: int) -> Iterator[np.ndarray]:
        """Candidate ids in order, `size` at a time."""
        for start in range(0, self.size, size):
            yield np.arange(start, min(start + size, self.size), dtype=np.int64)


def _named(codes: np.ndarray, names: Sequence[str]) -> pd.Categorical:
    """Names by number; several numbers may stand for one name."""
    unique = list(dict.fromkeys(names))
    codes = np.array([unique.index(name) for name in names], np.int64)[codes]
    return pd.Categorical.from_codes(codes, categories=unique)  # type: ignore[arg-type]


def _choices(pool: dict[str, np.ndarray], chunked: np.ndarray) -> dict[str, Array]:
    """Everything that a stage takes from the table of its pool."""
    ranks = pool["tensor_parallel"] * pool["data_parallel"]
    values = {**pool, "chunked": chunked, "expert_parallel": np.where(pool["expert_parallel"] > 0, ranks, 1)}
    whole = {"accelerator", "weights"}
    return {n: _array(values[n], np.int32 if n in whole else np.float32) for n in STAGE_FIELDS if n in values}


def _array(values: np.ndarray, kind: type[np.number]) -> Array:
    """On the device; converted before, which is several times as fast."""
    return jnp.asarray(values.astype(kind))


@dataclass(frozen=True)
class Domains:
    """What a study allows: topologies, the choices of each phase's pool, and what joins the pools."""

    topologies: tuple[str, ...]
    pool: Callable[[Topology, int], PoolDomain]  # the choices of a topology's pool
    kv: tuple[str, ...]
    links: tuple[str, ...]
    kv_tiers: tuple[str, ...] = ("none",)
    routing: tuple[str, ...] = ("affinity",)
    micro_batches: tuple[int, ...] = (2,)
    speculation: tuple[str, ...] = ("none",)
    kv_transfer: tuple[str, ...] = (FULL,)
    encoder: tuple[str, ...] = (PLAIN_ENCODER,)


def build_space(domains: Domains, names: Names, llm: Architecture) -> Space:
    """The space of `domains`; choices without effect in a topology are held at their first value."""
    families = []
    kv = np.array([names.kv.index(k) for k in domains.kv])
    tiers = np.array([[stack.id for stack in names.tiers].index(name) for name in domains.kv_tiers])
    ways = np.array([[way.id for way in names.speculations].index(name) for name in domains.speculation])
    moves = np.array([[way.id for way in names.transfers].index(name) for name in domains.kv_transfer])
    encoders = np.array([names.encoders.index(name) for name in domains.encoder])
    routing = np.array([ROUTING.index(r) for r in domains.routing])
    all_links = np.array([[link.id for link in names.links].index(name) for name in domains.links])
    for name in domains.topologies:
        chosen = topology(name)
        apart = chosen.sides_apart
        tables = tuple(
            pool_table(domains.pool(chosen, i), chosen.stages(i), names, llm) for i in range(len(chosen.pools))
        )
        links = all_links if len(chosen.pools) > 1 else all_links[:1]
        parts = np.array(domains.micro_batches if apart else (1,))
        moved = moves if chosen.kv_moves else moves[:1]
        placed = np.arange(len(names.placements) if apart else 1)
        families.append(Family(chosen, tables, kv, tiers, links, routing, parts, ways, moved, encoders, placed))
    return Space(tuple(families), names)


def _feeds_forward(stages: tuple[str, ...]) -> bool:
    return any(stage.endswith("ffn") for stage in stages)


def _effective(domain: PoolDomain, stages: tuple[str, ...]) -> PoolDomain:
    """Choices without effect at their first value: a pool without decode attention has no decode batch, one that does
    not prefill no token budget, one that does not prefill alone no context to spread, one without feed-forward layers
    no experts to spread. A pool of the vision encoder alone has its heads to split, and images that it encodes together
    as its batch."""
    values = dict(domain.__dict__)
    encoder = stages == ("encode",)
    if encoder:
        values |= {"data_parallel": (1,), "pipeline_parallel": (1,), "weights": domain.weights[:1]}
    if "decode_attention" not in stages and not encoder:
        values["max_batch"] = domain.max_batch[:1]
    if not any(stage.startswith("prefill") for stage in stages):
        values["token_budget"] = domain.token_budget[:1]
    if set(stages) - {"encode"} != {"prefill_attention", "prefill_ffn"}:
        values["context_parallel"] = (1,)
    if not _feeds_forward(stages):
        values["expert_parallel"] = (False,)
    return PoolDomain(**values)


def first_broken_rule(domain: PoolDomain, names: Names, llm: Architecture) -> str:
    """The sharding rule that forbids most of an empty pool domain, in words."""
    axes = [domain.accelerator, domain.tensor_parallel, domain.data_parallel, domain.expert_parallel]
    axes.append(domain.pipeline_parallel)
    rows = np.array([[names.accelerator_ids.index(a), t, d, int(e), p] for a, t, d, e, p in itertools.product(*axes)])
    keys = ("accelerator", "tensor_parallel", "data_parallel", "expert_parallel", "pipeline_parallel")
    _, rules = why_invalid({k: rows[:, i] for i, k in enumerate(keys)}, names, llm)
    return max(rules, key=lambda rule: int(rules[rule].sum()))
