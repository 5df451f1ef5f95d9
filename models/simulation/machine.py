"""A deployment as the loop sees it: step coefficients, memory and link, from the model's own functions."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from breakeven.models.memory import pool_memory
from breakeven.models.pools import StageCoefficients, coefficients, kv_transfer_s, pools, request_s
from breakeven.models.reload import Reload, prefix_tokens
from breakeven.models.simulation.state import CHUNKED, COLOCATED, NO_TIER, SPLIT, Plan, Speed, TierPlan
from breakeven.models.tables import Catalog, Resolved
from breakeven.models.tiers import LEVELS
from breakeven.models.workload import Workload


class Machines(NamedTuple):
    """Candidates, each leaf of shape (n,)."""

    prefill: StageCoefficients
    decode: StageCoefficients
    prefill_capacity: Array  # tokens of one engine
    decode_capacity: Array
    link_latency_s: Array
    link_token_s: Array
    request_s: Array
    first_chunk_s: Array  # at most 0: what a measured constant of TTFT takes from the time to the first chunk
    reload: Reload | None
    reload_tokens: Array  # of a continued call's prefix, mean


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
    p, d = resolved.prefill_attention, resolved.decode_attention
    # Beyond windows and recurrent state a transfer grows by as much with every token.
    context = llm.max_context * jnp.array([[0.5, 1.0]])
    times = kv_transfer_s(resolved, catalog, jnp.broadcast_to(context, (kv.shape[0], 2)))
    per_token = (times[:, 1] - times[:, 0]) / (context[0, 1] - context[0, 0])
    return Machines(
        *coefficients(resolved, catalog),
        pool_memory(resolved, p, llm, engine, workload.mean_prompt).capacity_tokens,
        pool_memory(resolved, d, llm, engine, workload.decode_context).capacity_tokens,
        jnp.maximum(times[:, 1] - context[0, 1] * per_token, 0.0),
        per_token,
        *request_s(resolved, workload, engine),
        pools(resolved, workload, catalog).reload,
        prefix_tokens(workload),
    )


def _number(leaf: Any, i: int) -> float:
    values = np.asarray(leaf, np.float64).reshape(-1)
    return float(values[i if len(values) > 1 else 0])


def _speed(stages: StageCoefficients, choice: Any, catalog: Catalog, i: int) -> Speed:
    a, f = (jax.tree.map(lambda leaf: _number(leaf, i), stage) for stage in stages)
    llm = catalog.llm
    share = min(_number(llm.experts_active, 0) / max(_number(llm.experts, 0), 1.0), 0.999999)
    return Speed(
        step=a.step_s + f.step_s + a.collective_s + f.collective_s,
        attention_weight=a.projection_s,
        attention_token=a.projection_token_s,
        ffn_weight=f.weight_s,
        ffn_token=f.token_s,
        expert=f.expert_s,
        expert_token=f.expert_token_s,
        permute_token=f.permute_token_s,
        log_expert_miss=float(np.log1p(-share)),
        collective_token=a.collective_token_s + f.collective_token_s + a.activation_token_s + f.activation_token_s,
        collective_root=a.collective_root_s + f.collective_root_s,
        sequence=(a.sequence_s + f.sequence_s) / _number(choice.data_parallel, i),
        context=a.context_s,
        selected_context=a.selected_context_s,
        prefill_context=a.prefill_context_s,
        pair=a.pair_s,
        selected_pair=a.selected_pair_s,
        query=a.query_s,
        sparse_topk=_number(llm.sparse_topk, 0),
        ranks=_number(choice.data_parallel, i),
        depth=int(_number(choice.pipeline_parallel, i)),
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
            used.append(TierPlan(capacity, shared, latency_s, token_s, float(found.reload.paths[i])))
    a, b, c = [*used, *[NO_TIER] * (LEVELS - len(used))]
    return {"levels": len(used), "tiers": (a, b, c)}


def plan(found: Machines, resolved: Resolved, workload: Workload, catalog: Catalog, window: Window, i: int = 0) -> Plan:
    """Candidate `i` of a batch, ready to be played."""
    p, d = resolved.prefill_attention.choice, resolved.decode_attention.choice
    split = _number(p.pool, i) != _number(d.pool, i)
    joint = CHUNKED if _number(p.chunked, i) > 0.5 else COLOCATED
    return Plan(
        mode=SPLIT if split else joint,
        prefill_engines=int(_number(p.replicas, i)),
        decode_engines=int(_number(d.replicas, i)) if split else 0,
        prefill=_speed(found.prefill, p, catalog, i),
        decode=_speed(found.decode, d, catalog, i),
        token_budget=_number(p.token_budget, i),
        max_batch=int(_number(d.max_batch, i)),
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
        **_tiers(found, resolved, i),
    )
