"""A deployment as the loop sees it: step coefficients, memory and link, from the model's own functions."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from breakeven.models.bundle import Bundle
from breakeven.models.deployment import Stage
from breakeven.models.encoder import Encode
from breakeven.models.kv_transfer import kv_transfer_s
from breakeven.models.pools import StageCoefficients, pools, request_s
from breakeven.models.pools import machines as bundles
from breakeven.models.reload import Reload, prefix_tokens
from breakeven.models.simulation.state import (
    CHUNKED,
    COLOCATED,
    NO_TIER,
    SPLIT,
    EncodePlan,
    Plan,
    Speed,
    SplitPlan,
    TierPlan,
)
from breakeven.models.speculation import Speculations
from breakeven.models.tables import Catalog, Resolved
from breakeven.models.tiers import LEVELS
from breakeven.models.workload import Workload


class Machines(NamedTuple):
    """Candidates, each leaf of shape (n,)."""

    bundles: tuple[Bundle, Bundle]  # of prefill, of decode
    prefill_capacity: Array  # tokens of one bundle
    decode_capacity: Array
    max_batch: Array  # of one bundle
    link_latency_s: Array
    link_token_s: Array
    request_s: Array
    first_chunk_s: Array  # at most 0: what a measured constant of TTFT takes from the time to the first chunk
    reload: Reload | None
    reload_tokens: Array  # of a continued call's prefix, mean
    encode: Encode | None

    @property
    def prefill(self) -> StageCoefficients:
        return self.bundles[0].attention, self.bundles[0].ffn

    @property
    def decode(self) -> StageCoefficients:
        return self.bundles[1].attention, self.bundles[1].ffn


DRAFTING = ("drafts", "yielded", "layers_share", "weights_share")  # fields of Speculations and of Speed


class Window(NamedTuple):
    """Seconds: what is measured, and when the simulation ends at the latest."""

    start_s: float
    end_s: float
    horizon_s: float
    whole_sessions: bool = False
    log_start_s: float = np.inf


@jax.jit
def machines(resolved: Resolved, workload: Workload, catalog: Catalog) -> Machines:
    """What the load does not change, of a batch of candidates."""
    llm, engine, kv = catalog.llm, catalog.engine, resolved.kv_bytes_per_element
    found = pools(resolved, workload, catalog)
    # Beyond windows and recurrent state a transfer grows by as much with every token.
    context = llm.max_context * jnp.array([[0.5, 1.0]])
    times = kv_transfer_s(resolved, catalog, jnp.broadcast_to(context, (kv.shape[0], 2)))
    per_token = (times[:, 1] - times[:, 0]) / (context[0, 1] - context[0, 0])
    return Machines(
        bundles(resolved, catalog, jnp.sqrt(workload.decode_context_var)),
        found.prefill_memory.capacity_tokens,
        found.decode_memory.capacity_tokens,
        found.max_batch,
        jnp.maximum(times[:, 1] - context[0, 1] * per_token, 0.0),
        per_token,
        *request_s(resolved, workload, engine),
        found.reload,
        prefix_tokens(workload),
        found.encode,
    )


def _number(leaf: Any, i: int) -> float:
    values = np.asarray(leaf, np.float64).reshape(-1)
    return float(values[i if len(values) > 1 else 0])


def _speed(
    stages: tuple[Any, ...],
    ranks: float,
    depth: float,
    catalog: Catalog,
    i: int,
    way: Speculations | None = None,
    parts: float = 1.0,
) -> Speed:
    """Stages on one engine: both sides, or one of them; coefficients that none of them has are 0."""

    def of(name: str) -> float:
        found = [getattr(stage, name) for stage in stages]
        return sum(_number(part, i) for part in found if part is not None)

    llm = catalog.llm
    share = min(_number(llm.experts_active, 0) / max(_number(llm.experts, 0), 1.0), 0.999999)
    return Speed(
        step=of("step_s"),
        attention_weight=of("projection_s"),
        attention_token=of("projection_token_s"),
        ffn_weight=of("weight_s"),
        ffn_token=of("token_s"),
        expert=of("expert_s"),
        expert_token=of("expert_token_s"),
        permute_token=of("permute_token_s"),
        log_expert_miss=float(np.log1p(-share)),
        activation_token=of("activation_token_s"),
        collective=of("collective_s"),
        collective_token=of("collective_token_s"),
        collective_root=of("collective_root_s"),
        sequence=of("sequence_s") / ranks,
        context=of("context_s"),
        selected_context=of("selected_context_s"),
        prefill_context=of("prefill_context_s"),
        pair=of("pair_s"),
        selected_pair=of("selected_pair_s"),
        query=of("query_s"),
        sparse_topk=_number(llm.sparse_topk, 0),
        ranks=ranks,
        depth=round(depth),
        ring=of("ring_context_s"),
        parts=parts,
        **{} if way is None else {name: _number(getattr(way, name), i) for name in DRAFTING},
    )


def _phase(machine: Bundle, choice: Stage, catalog: Catalog, i: int) -> tuple[Speed, SplitPlan]:
    """(one engine that does both sides, the bundle where they stand apart). A bundle prefills on all its attention
    engines at once, as a pipeline does on its groups."""
    ranks, depth = _number(choice.data_parallel, i), _number(choice.pipeline_parallel, i)
    sides = machine.attention, machine.ffn
    split, way = machine.split, machine.speculation
    if split is None or _number(split.apart, i) < 0.5:
        parts = 1.0 if machine.overlapped is None else _number(machine.overlapped, i)
        return _speed(sides, ranks, depth, catalog, i, way, parts), SplitPlan(False)
    ways = _number(machine.ways, i)
    ffn_ranks = _number(split.ffn_ranks, i)
    plan = SplitPlan(
        apart=True,
        attention=_speed(sides[:1], ranks, 1.0, catalog, i, way),
        ffn=_speed(sides[1:], ffn_ranks, 1.0, catalog, i, way),
        micro_batches=_number(split.micro_batches, i),
        workers=_number(split.workers, i),
        ffn_engines=_number(split.ffn_engines, i),
        pipeline=depth,
        ffn_pipeline=_number(split.ffn_pipeline, i),
        straggle_tokens=_number(split.straggle_tokens, i),
        handoff_s=_number(split.handoff_s, i),
        dispatch_token=_number(split.dispatch_token_s, i),
        combine_token=_number(split.combine_token_s, i),
        worker_ports=_number(split.worker_ports, i),
        ways=ways,
        shared=0.0 if split.shared_s is None else _number(split.shared_s, i),
        shared_token=0.0 if split.shared_token_s is None else _number(split.shared_token_s, i),
    )
    return _speed(sides, 1.0, ways, catalog, i, way), plan


def _encode(found: Machines, resolved: Resolved, workload: Workload, catalog: Catalog, i: int) -> EncodePlan:
    """The vision encoder of candidate `i`."""
    encode, images = found.encode, workload.images
    if encode is None or images is None:
        return EncodePlan(0)
    joined = _number(encode.joined, i) > 0.5
    return EncodePlan(
        engines=0 if joined else round(_number(encode.engines, i)),
        speed=_speed((encode.side,), 1.0, 1.0, catalog, i),
        patches=_number(images.patches, 0),
        per_pass=_number(encode.per_pass, i),
        reuse=_number(images.reuse, 0),
        link_latency_s=_number(resolved.link_latency_s, i),
        link_image_s=_number(encode.image_link_s, i),
    )


def _tiers(found: Machines, resolved: Resolved, i: int) -> dict[str, Any]:
    """Fields of a plan: the tiers that candidate `i` uses."""
    if found.reload is None or resolved.tiers is None:
        return {}
    used = []
    for k in range(LEVELS):
        capacity = float(found.reload.capacity_tokens[i, k])
        if capacity > 0.0:
            latency_s, mean_s = float(resolved.tiers.latency_s[i, k]), float(found.reload.mean_s[i, k])
            token_s = (mean_s - latency_s) / _number(found.reload_tokens, 0)
            shared = bool(found.reload.shared[i, k] > 0.5)
            ahead_s = 0.0 if found.reload.ahead is None else float(found.reload.ahead.lead_s[i, k])
            used.append(TierPlan(capacity, shared, latency_s, token_s, float(found.reload.paths[i]), ahead_s))
    a, b, c = [*used, *[NO_TIER] * (LEVELS - len(used))]
    return {"levels": len(used), "tiers": (a, b, c)}


def _transfers(resolved: Resolved, catalog: Catalog, i: int) -> dict[str, Any]:
    """Fields of a plan: how KV caches of candidate `i` get to decode, and back."""
    way = resolved.transfers
    if way is None:
        return {}
    last = 1.0 / _number(catalog.llm.layers, 0) if _number(way.overlap, i) > 0.5 else 1.0
    found: dict[str, Any] = {"link_last": last, "returns": _number(way.returns, i) > 0.5}
    if way.keeps is not None and way.local_tokens is not None and _number(way.keeps, i) > 0.5:
        budget = _number(resolved.decode_attention.choice.token_budget, i)
        found |= {"keeps": True, "local_tokens": _number(way.local_tokens, i), "decode_budget": budget}
    return found


def plan(found: Machines, resolved: Resolved, workload: Workload, catalog: Catalog, window: Window, i: int = 0) -> Plan:
    """Candidate `i` of a batch, ready to be played."""
    p, d = resolved.prefill_attention.choice, resolved.decode_attention.choice
    split = _number(p.pool, i) != _number(d.pool, i)
    joint = CHUNKED if _number(p.chunked, i) > 0.5 else COLOCATED
    (prefill, prefill_split), (decode, decode_split) = (
        _phase(machine, choice, catalog, i) for machine, choice in zip(found.bundles, (p, d), strict=True)
    )
    engines = [round(_number(machine.count, i)) for machine in found.bundles]
    return Plan(
        mode=SPLIT if split else joint,
        prefill_engines=engines[0],
        decode_engines=engines[1] if split else 0,
        prefill=prefill,
        decode=decode,
        token_budget=_number(p.token_budget, i),
        max_batch=round(_number(found.max_batch, i)),
        prefill_capacity=_number(found.prefill_capacity, i),
        decode_capacity=_number(found.decode_capacity, i),
        shared_prefix=_number(workload.shared_prefix_tokens, 0),
        request_s=_number(found.request_s, i),
        link_latency_s=_number(found.link_latency_s, i),
        link_token_s=_number(found.link_token_s, i),
        routing=int(_number(resolved.routing, i)),
        window_start_s=window.start_s,
        window_end_s=window.end_s,
        horizon_s=window.horizon_s,
        whole_sessions=window.whole_sessions,
        log_start_s=window.log_start_s,
        first_chunk_steps=_number(catalog.engine.first_chunk_steps, 0),
        first_chunk_s=_number(found.first_chunk_s, i),
        cache_ttl_s=_number(workload.cache_ttl_s, 0),
        preempts=not split and _number(catalog.engine.preempts, 0) > 0.5,
        prefill_split=prefill_split,
        decode_split=decode_split,
        link_ways=_number(found.bundles[0].workers, i),
        **(_transfers(resolved, catalog, i) if split else {}),
        encode=_encode(found, resolved, workload, catalog, i),
        **_tiers(found, resolved, i),
    )
