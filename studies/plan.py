"""A deployment as launch files need it: its pools, what each of their engines is given, and what joins them."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from breakeven.models.hardware import Accelerator
from breakeven.models.inputs import InputError
from breakeven.models.support import PoolNeeds
from breakeven.models.topology import topology
from breakeven.models.transfer_ways import FULL, TransferWay
from breakeven.studies.deployment_file import Deployed, choices
from breakeven.studies.result import describe, records
from breakeven.studies.schema import KeptFields


@dataclass(frozen=True)
class PoolPlan:
    """A pool of equal engines."""

    role: str  # pool, prefill or decode
    accelerator: Accelerator
    replicas: int
    tensor_parallel: int
    data_parallel: int
    pipeline_parallel: int
    context_parallel: int
    expert_parallel: bool
    max_batch: int  # sequences of one engine
    token_budget: int  # new tokens of one step
    weights: str

    @property
    def accelerators(self) -> int:
        """Accelerators of one engine."""
        return self.tensor_parallel * self.data_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def nodes(self) -> int:
        """Machines that one engine spans."""
        per_node = max(self.accelerator.per_instance, 1)
        return math.ceil(self.accelerators / per_node)


@dataclass(frozen=True)
class Plan:
    """A deployment to launch."""

    name: str
    title: str
    model: str  # a Hugging Face id where one is known
    topology: str
    pools: tuple[PoolPlan, ...]
    kv: str
    link: str
    routing: str
    chunked: bool
    offload_bytes: float  # KV cache in the first tier below HBM, per accelerator that prefills; 0.0: none
    deeper_tiers: tuple[str, ...]  # the tiers below that one
    context: int  # the longest sequence, tokens
    memory_fraction: float
    two_batches: bool  # that hide each other's collectives
    transfer: TransferWay  # how a split's KV cache gets to decode
    undocumented: tuple[str, ...]  # what no engine documents

    def overlaps(self, pool: PoolPlan) -> bool:
        """Whether engines of a pool exchange tokens between experts under the arithmetic of another batch."""
        return self.two_batches and pool.expert_parallel and pool.data_parallel > 1

    @property
    def sticky(self) -> bool:
        """Whether a session's calls go to the engine that holds its prefix."""
        return self.routing in ("affinity", "prefix-aware")

    @property
    def split(self) -> bool:
        """Whether prefill and decode stand apart."""
        return len(self.pools) > 1

    @property
    def needs(self) -> list[PoolNeeds]:
        """What the pools ask of an engine."""
        return [PoolNeeds(pool.accelerator, pool.weights) for pool in self.pools]


def plan(deployed: Deployed) -> Plan:
    """The plan of a deployment; InputError for topologies whose pools are not prefill, decode or both."""
    study = deployed.study
    row = records(study.space.frame(np.array([0], np.int64)))[0]
    chosen = choices(row)
    pools = {name: pool for name, pool in chosen.items() if isinstance(pool, Mapping)}
    chosen_topology = topology(row["topology"])
    if not set(pools) <= {"pool", "prefill", "decode"}:
        roles = ", ".join(pools)
        raise InputError(
            "deployment.topology", chosen_topology.name, f"launch files exist for shared and pd pools, not {roles}"
        )
    known = re.search(r"config\.json of (\S+/\S+)", study.architecture.source)
    kinds = {a.id: a for a in study.accelerators}
    tiers = study.names.tiers[0].tiers
    return Plan(
        name=re.sub(r"[^a-z0-9]+", "-", study.written.name.lower()).strip("-") or "breakeven",
        title=describe(row),
        model=known[1].rstrip(",;.") if known else study.architecture.name,
        topology=chosen_topology.name,
        pools=tuple(_pool(name, pool, kinds) for name, pool in pools.items()),
        kv=str(row["kv"]),
        link=str(row["link"]),
        routing=str(row["routing"]),
        chunked=chosen_topology.chunked,
        offload_bytes=tiers[0].capacity_bytes if tiers else 0.0,
        deeper_tiers=tuple(tier.id for tier in tiers[1:]),
        context=math.ceil(float(np.asarray(study.workload.max_tokens)) / 1024.0) * 1024,
        memory_fraction=round(float(np.asarray(study.catalog.engine.memory_fraction)), 3),
        two_batches=study.catalog.engine.overlapped_batches is not None,
        transfer=study.names.transfers[0] if chosen_topology.kv_moves else TransferWay(FULL),
        undocumented=tuple(_undocumented(study.written.kv_kept, any(tier.prefetch_s for tier in tiers))),
    )


def _undocumented(kept: float | KeptFields, ahead: bool) -> Iterator[str]:
    if kept != 1.0:
        yield "a KV cache that keeps a part of each sequence (kv_kept): not documented"
    if ahead:
        yield "reading a prefix back before its call comes (prefetch_s): not documented"


def _pool(role: str, pool: Mapping[str, Any], kinds: Mapping[str, Accelerator]) -> PoolPlan:
    counts = ("replicas", "tensor_parallel", "data_parallel", "pipeline_parallel", "max_batch", "token_budget")
    return PoolPlan(
        role=role,
        accelerator=kinds[str(pool["accelerator"])],
        expert_parallel=bool(pool["expert_parallel"]),
        weights=str(pool["weights"]),
        context_parallel=int(pool.get("context_parallel", 1)),
        **{name: int(pool[name]) for name in counts},
    )
