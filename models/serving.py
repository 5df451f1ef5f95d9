"""One jitted `evaluate` for every topology: operators -> stages -> pools -> queueing -> attainment -> cost."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from breakeven.models.attainment import Attainment, Slo, attain, shortfall
from breakeven.models.deployment import Deployment
from breakeven.models.limits import Doubts, Violations
from breakeven.models.memory import kv_bytes_per_token
from breakeven.models.numerics import TINY
from breakeven.models.performance import Performance, performance
from breakeven.models.placement import read_elsewhere
from breakeven.models.reload import continued_share
from breakeven.models.stress import Case, cases, without, workload_of
from breakeven.models.tables import Catalog, Resolved, ResolvedStage, resolve
from breakeven.models.workload import Workload


class Outcome(NamedTuple):
    """What a candidate costs and achieves, arrays of shape (n,); the columns of front.csv."""

    trust: Array  # inside the region where simulation confirmed the queueing approximations
    feasible: Array  # fits, is stable and within the study's limits
    meets_slo: Array  # feasible, the target is met and so is every fraction of a single bound
    cost_per_hour_usd: Array
    slo_attainment: Array
    calls_attainment: Array
    ttft_attainment: Array
    tpot_attainment: Array
    call_attainment: Array
    session_attainment: Array
    cost_per_million_tokens_usd: Array  # generated tokens
    complexity_usd_per_hour: Array  # of the cost: running further pools and kinds of accelerators
    cost_per_session_usd: Array
    cost_per_solved_task_usd: Array  # a session is a task
    goodput_per_s: Array  # calls that meet every bound
    energy_per_token_j: Array  # generated tokens
    accelerators: Array
    power_kw: Array
    sessions_per_second: Array
    sessions_in_progress: Array
    sessions_per_accelerator: Array  # in progress
    sessions_per_kw: Array  # in progress, of provisioned power
    solved_tasks_per_hour: Array
    tokens_per_second: Array
    ttft_mean_s: Array
    tpot_mean_s: Array
    call_mean_s: Array
    session_mean_s: Array
    utilization_max: Array
    utilization_prefill: Array
    utilization_decode: Array
    utilization_link: Array
    utilization_encode: Array  # of an encoder outside the pools that prefill
    decode_batch: Array  # of one attention engine
    cache_hit: Array  # continued calls that find their prefix, in HBM or a tier below
    cache_reload: Array  # of them all, those that read it from a tier below HBM
    mfu_prefill: Array
    mfu_decode: Array
    mbu_decode: Array
    violations: Violations
    doubts: Doubts


def _model_flops_per_token(catalog: Catalog, pairs_per_token: Array) -> Array:
    """Useful FLOPs of one token: 2 per active parameter, and its attention."""
    llm = catalog.llm
    active = llm.attention_weights + llm.dense_weights
    active = active + llm.expert_weights * llm.experts_active / jnp.maximum(llm.experts, 1.0)
    return 2.0 * active + llm.prefill_flops_per_pair * jnp.minimum(pairs_per_token, llm.sparse_topk)


def _phase_total(attention: ResolvedStage, ffn: ResolvedStage, name: str) -> Array:
    """A peak of the hardware, summed over the accelerators of the pools that one phase runs on."""

    def total(stage: ResolvedStage) -> Array:
        choice = stage.choice
        return choice.replicas * choice.accelerators * getattr(stage.hardware, name)

    return total(attention) + jnp.where(attention.choice.pool == ffn.choice.pool, 0.0, total(ffn))


def _decode_traffic(resolved: Resolved, found: Performance, workload: Workload, catalog: Catalog) -> Array:
    """Bytes moved per generated token: the weights once per micro-batch, and the sequence's KV cache."""
    llm, machine = catalog.llm, found.pools.decode
    d, f = resolved.decode_attention, resolved.decode_ffn
    weights = llm.dense_weights * f.dense_bytes + llm.head_weights * f.head_bytes + llm.expert_weights * f.experts_bytes
    weights = weights * machine.ffn_engines + llm.attention_weights * d.attention_bytes * machine.workers
    if resolved.placement is not None:
        weights = weights + read_elsewhere(llm, d, f, resolved.placement, machine.workers, machine.ffn_engines)
    per_token = weights * machine.micro_batches / jnp.maximum(found.point.state.batch, 1.0)
    kv = kv_bytes_per_token(llm, resolved.kv_bytes_per_element, workload.decode_context)
    return per_token + kv * jnp.minimum(workload.decode_context, llm.sparse_topk)


def outcome(
    resolved: Resolved, found: Performance, met: Attainment, slo: Slo, workload: Workload, catalog: Catalog
) -> Outcome:
    """The columns of front.csv from a performance and its attainment."""
    short = shortfall(met, slo)
    feasible = jnp.ones_like(found.session_rate, dtype=bool)
    for excess in found.violations:
        feasible = feasible & (excess <= 0.0)
    calls = found.session_rate * workload.calls_per_session
    tokens = calls * workload.mean_output
    latency, cost = found.latency, found.fleet.cost_per_hour_usd
    session_mean = workload.session_s(latency.call_mean_s, latency.call_variance)
    served = jnp.where(feasible, 1.0, 0.0)
    in_progress, success = found.session_rate * session_mean, catalog.economy.success_rate
    p = resolved.prefill_attention, resolved.prefill_ffn
    d = resolved.decode_attention, resolved.decode_ffn
    pairs = workload.resident.mean_pairs / workload.resident.mean_tokens
    prefill_flops = workload.resident.mean_tokens * _model_flops_per_token(catalog, pairs)
    decode_tokens = calls * workload.mean_steps
    doubtful = jnp.zeros_like(feasible)
    for doubt in found.doubts:
        doubtful = doubtful | doubt
    return Outcome(
        trust=~doubtful,
        feasible=feasible,
        meets_slo=feasible & (met.slo >= slo.target) & (short <= 0.0),
        cost_per_hour_usd=cost,
        slo_attainment=met.slo * served,
        calls_attainment=met.calls * served,
        ttft_attainment=met.ttft * served,
        tpot_attainment=met.tpot * served,
        call_attainment=met.call * served,
        session_attainment=met.session * served,
        cost_per_million_tokens_usd=cost / 3600.0 / tokens * 1e6,
        complexity_usd_per_hour=found.fleet.complexity_usd_per_hour,
        cost_per_session_usd=cost / 3600.0 / found.session_rate,
        cost_per_solved_task_usd=cost / 3600.0 / found.session_rate / success,
        goodput_per_s=calls * met.calls * served,
        energy_per_token_j=found.fleet.drawn_w / tokens,
        accelerators=found.fleet.accelerators,
        power_kw=found.fleet.power_w / 1e3,
        sessions_per_second=found.session_rate,
        sessions_in_progress=in_progress,
        sessions_per_accelerator=in_progress / found.fleet.accelerators,
        sessions_per_kw=1e3 * in_progress / jnp.maximum(found.fleet.power_w, TINY),
        solved_tasks_per_hour=3600.0 * found.session_rate * success,
        tokens_per_second=tokens,
        ttft_mean_s=latency.ttft_mean_s,
        tpot_mean_s=latency.tpot_mean_s,
        call_mean_s=latency.call_mean_s,
        session_mean_s=session_mean,
        utilization_max=jnp.maximum(
            jnp.maximum(found.utilization_prefill, found.utilization_decode),
            jnp.maximum(found.utilization_link, found.utilization_encode),
        ),
        utilization_prefill=found.utilization_prefill,
        utilization_decode=found.utilization_decode,
        utilization_link=found.utilization_link,
        utilization_encode=found.utilization_encode,
        decode_batch=found.point.state.batch / found.pools.decode.workers,
        cache_hit=1.0 - found.point.state.miss,
        cache_reload=found.reads.share / continued_share(workload),
        mfu_prefill=calls * prefill_flops / _phase_total(*p, "bf16_flops_per_s"),
        mfu_decode=decode_tokens
        * _model_flops_per_token(catalog, workload.decode_context)
        / _phase_total(*d, "bf16_flops_per_s"),
        mbu_decode=decode_tokens
        * _decode_traffic(resolved, found, workload, catalog)
        / _phase_total(*d, "memory_bandwidth_bytes_per_s"),
        violations=found.violations,
        doubts=found.doubts,
    )


@jax.jit
def evaluate(deployment: Deployment, workload: Workload, slo: Slo, catalog: Catalog) -> Outcome:
    """Cost and SLO attainment of every candidate: the whole model, pure and jitted.

    `deployment` is a struct of arrays of shape (n,); the result has the same shape. Topologies are data, so no mix
    of them recompiles; an open load, a closed population and each set of bounds are compiled apart.
    """
    return _evaluate(resolve(deployment, catalog), workload, slo, catalog)


def _evaluate(resolved: Resolved, workload: Workload, slo: Slo, catalog: Catalog) -> Outcome:
    if slo.losses is None and workload.peaks is None:
        return _as_it_is(resolved, workload, slo, catalog)
    usual, lost, peaks = _under_stress(resolved, workload, slo, catalog)

    def excess(attained: Array) -> Array:
        return jnp.max(1.0 - attained / slo.target, 0, initial=-1.0)

    violations = usual.violations._replace(loss=excess(lost), peak=excess(peaks))
    kept = (violations.loss <= 0.0) & (violations.peak <= 0.0)
    return usual._replace(
        feasible=usual.feasible & kept,
        meets_slo=usual.meets_slo & kept,
        violations=violations,
    )


def _as_it_is(resolved: Resolved, workload: Workload, slo: Slo, catalog: Catalog) -> Outcome:
    found = performance(resolved, workload, catalog)
    return outcome(resolved, found, attain(found.latency, slo), slo, workload, catalog)


def _under_stress(resolved: Resolved, workload: Workload, slo: Slo, catalog: Catalog) -> tuple[Outcome, Array, Array]:
    """(the outcome in usual hours, attainment after each pool's loss, (pools, n), and at each peak, (peaks, n)): one
    evaluation, compiled once."""
    replicas = jnp.float32(0.0) if slo.losses is None else slo.losses.replicas

    def of(case: Case) -> tuple[Outcome, Array]:
        left, alive = without(resolved, case.pool, replicas)
        found = _as_it_is(left, workload_of(case, workload), slo, catalog)
        return found, jnp.where(alive, found.slo_attainment, 0.0)

    every, peaks = cases(slo.losses, workload)
    found, attained = lax.map(of, every)
    first_peak = attained.shape[0] - peaks
    return jax.tree.map(lambda leaf: leaf[0], found), attained[1:first_peak], attained[first_peak:]


@jax.jit
def attained_under_stress(
    deployment: Deployment, workload: Workload, slo: Slo, catalog: Catalog
) -> tuple[Array, Array]:
    """SLO attainment after the loss of replicas of each of the SLO's pools, (pools, n), and at each of the workload's
    peaks, (peaks, n)."""
    return _under_stress(resolve(deployment, catalog), workload, slo, catalog)[1:]


LIGHTEST, HEAVIEST = 1e-6, 1e4  # sessions per second that `evaluate_max_load` searches between


@jax.jit
def evaluate_max_load(deployment: Deployment, workload: Workload, slo: Slo, catalog: Catalog) -> Outcome:
    """Every candidate at the largest session rate at which it is feasible and meets the SLO, within 0.1 %.

    Bisection on the logarithm of the rate: attainment falls with load. Candidates that meet the SLO at no rate are
    returned at a thousandth of a call per second or less, and their violations or attainment say why.
    """
    resolved = resolve(deployment, catalog)

    def at(log_rate: Array) -> Outcome:
        loaded = dataclasses.replace(workload, sessions_per_second=jnp.exp(log_rate), concurrent_sessions=None)
        return _evaluate(resolved, loaded, slo, catalog)

    def body(_: int, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = 0.5 * (low + high)
        met = at(middle).meets_slo
        return jnp.where(met, middle, low), jnp.where(met, high, middle)

    low = jnp.full_like(deployment.balanced, jnp.log(LIGHTEST))
    high = jnp.full_like(low, jnp.log(HEAVIEST))
    low, _ = lax.fori_loop(0, 15, body, (low, high))
    return at(low)
