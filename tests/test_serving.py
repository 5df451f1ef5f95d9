"""Laws of the whole model: known limits, Little's law, monotone in hardware and load, differentiable, and finite."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from breakeven.models.attainment import attain
from breakeven.models.deployment import take
from breakeven.models.hardware import accelerators
from breakeven.models.performance import performance
from breakeven.models.serving import LIGHTEST, evaluate, evaluate_max_load
from breakeven.models.tables import resolve
from breakeven.optimizer.evaluator import SMALL, reasons

NEVER_FEWER = 2e-3  # of attainment: rounding and interpolation between nodes


@pytest.fixture(scope="module")
def settled():
    """The model before any SLO, compiled."""
    return jax.jit(lambda deployment, workload, catalog: performance(resolve(deployment, catalog), workload, catalog))


@pytest.fixture(scope="module")
def outcome(study, deployment):
    return evaluate(deployment, study.workload, study.slo, study.catalog)


@pytest.fixture(scope="module")
def feasible(outcome):
    return np.asarray(outcome.feasible)


def loaded(study, factor):
    rate = np.float32(study.workload.sessions_per_second * factor)
    return dataclasses.replace(study.workload, sessions_per_second=rate)


def closed(workload, sessions):
    return dataclasses.replace(workload, sessions_per_second=None, concurrent_sessions=np.float32(sessions))


def hardware_scaled(catalog, name, factor):
    changed = {name: getattr(catalog.hardware, name) * factor}
    return dataclasses.replace(catalog, hardware=dataclasses.replace(catalog.hardware, **changed))


def replicated(deployment, factor):
    stages = {
        name: dataclasses.replace(stage, replicas=factor * stage.replicas)
        for name, stage in vars(deployment).items()
        if hasattr(stage, "replicas")
    }
    return dataclasses.replace(deployment, **stages)


# Finite, and infeasible for a reason ---------------------------------------------------------------------------------


def check_columns(study, ids):
    """Every column of every candidate is a number; shares are shares; what is infeasible says why."""
    columns = study.evaluator()(ids)
    for name, values in columns.items():
        assert np.isfinite(values.astype(float)).all(), name
    for name in columns:
        if name.endswith("_attainment") or name == "cache_hit":
            assert (columns[name] >= 0.0).all() and (columns[name] <= 1.0).all(), name
    infeasible = ~columns["feasible"]
    assert np.array_equal(reasons(columns) != "", infeasible)
    assert not columns["meets_slo"][infeasible].any() and not columns["slo_attainment"][infeasible].any()


MODELS = ["llama-3.1-8b", "deepseek-v3", "deepseek-v3.2", "gpt-oss-120b", "qwen3-next-80b-a3b", "llama-4-maverick"]


@pytest.mark.parametrize("llm", MODELS)
def test_every_column_is_a_number_for_every_model(make_study, random_ids, llm):
    """Dense, latent, sparse, window, linear and multimodal; whole experts and split ones."""
    choices = {"data_parallel": [1, 2, 8], "expert_parallel": [False, True], "replicas": [1, 8, 64]}
    made = make_study(f"llm={llm}", "load.sessions_per_second=0.3", **choices)
    check_columns(made, random_ids(made, SMALL, 5))


@pytest.mark.parametrize("first", range(0, 44, 5))
def test_every_column_is_a_number_on_every_accelerator(make_study, random_ids, first):
    """Also without scale-up link, network, published power or enough memory."""
    rows = list(accelerators())
    some = rows[min(first, len(rows) - 5) :][:5]
    own = "prices.own={" + ", ".join(f"{name}: 2.0" for name in some) + "}"
    made = make_study("llm=llama-3.1-8b", own, accelerators=some)
    check_columns(made, random_ids(made, SMALL, first))


@pytest.mark.parametrize("rate", [0.000001, 1.0, 10000.0])
@pytest.mark.parametrize("workload", ["chat", "reasoning", "rag-docqa"])
def test_every_column_is_a_number_at_every_load(make_study, candidates, workload, rate):
    check_columns(make_study(f"workload={workload}", f"load.sessions_per_second={rate:f}"), candidates)


@pytest.mark.parametrize("sessions", [1.0, 1e6])
def test_every_column_is_a_number_for_every_population(make_study, candidates, sessions):
    check_columns(make_study(f"load={{concurrent_sessions: {sessions}}}"), candidates)


# Known limits --------------------------------------------------------------------------------------------------------


def test_littles_law_of_the_decode_batch(study, deployment, feasible, settled):
    """Where decode has its own pool: sequences in the batch = calls a second x the time each one decodes."""
    found = settled(deployment, study.workload, study.catalog)
    latency, point = found.latency, found.point
    decoding_s = jnp.sum(latency.output_weight * latency.steps * latency.token.mean_s, -1)
    batch, little = np.asarray(point.state.batch), np.asarray(point.decode_rate * decoding_s)
    moderate = feasible & (np.asarray(found.pools.shared) < 0.5) & (np.asarray(found.utilization_decode) < 0.7)
    assert moderate.sum() > 30
    assert little[moderate] == pytest.approx(batch[moderate], rel=0.02)


@pytest.fixture(scope="module")
def population(study, deployment):
    return evaluate(deployment, closed(study.workload, 40.0), study.slo, study.catalog)


def unsaturated(found):
    busy = np.asarray(found.utilization_max) < 0.8
    return np.asarray(found.feasible) & busy & ~np.asarray(found.doubts.cache_unsettled)


def test_a_closed_population_has_its_sessions_in_progress(population):
    """Little's law of sessions: rate x session time is the population, within 1.5 % where the batch limit is far."""
    here = unsaturated(population) & ~np.asarray(population.doubts.batch_limit)
    assert here.sum() > 100
    assert np.asarray(population.sessions_in_progress)[here] == pytest.approx(40.0, rel=0.015)


def test_an_open_system_at_a_closed_one_s_rate_is_like_it(study, deployment, population):
    """A population so large that one session less is nothing: latencies within 5 %."""
    many = evaluate(deployment, closed(study.workload, 400.0), study.slo, study.catalog)
    here = unsaturated(many) & ~np.asarray(many.doubts.batch_limit)
    assert here.sum() > 20
    for name in ("tpot_mean_s", "ttft_mean_s"):
        rates = np.asarray(many.sessions_per_second)
        found, row = [], np.flatnonzero(here)
        for i in row[:: max(len(row) // 12, 1)]:
            open_load = dataclasses.replace(study.workload, sessions_per_second=np.float32(rates[i]))
            one = evaluate(deployment, open_load, study.slo, study.catalog)
            if not one.doubts.cache_unsettled[i]:
                found.append((float(getattr(one, name)[i]), float(getattr(many, name)[i])))
        opened, populated = np.array(found).T
        assert opened == pytest.approx(populated, rel=0.05)


def test_an_infinitely_fast_link_costs_nothing(make_study, candidates):
    """No transfer, no link load, and no fewer calls in time than over a real one."""
    fast = {"name": "instant", "kind": "scale-up", "gbs": 1e6, "latency_us": 0.0, "efficiency": 1.0}
    pd = make_study(topologies="pd", links=["ib-ndr-400", fast], replicas=[2, 4, 8, 16])
    rng = np.random.default_rng(0)
    slow_ids = pd.space.size // len(candidates) * np.arange(len(candidates)) + rng.integers(0, 9, len(candidates))
    columns = pd.space.columns(slow_ids)
    slow_ids = slow_ids[columns["link"] == 0]
    fast_ids = slow_ids + len(pd.written.space.routing)  # the next link
    assert (pd.space.columns(fast_ids)["link"] == 1).all()
    slow, instant = pd.evaluator()(slow_ids), pd.evaluator()(fast_ids)
    assert instant["utilization_link"].max() < 1e-3
    for name in ("utilization_decode", "tpot_mean_s", "cost_per_hour_usd"):
        assert instant[name] == pytest.approx(slow[name], rel=1e-4)
    # A saturated candidate has no settled wait to compare; one with two states of its cache may settle in either.
    same_state = np.abs(instant["cache_hit"] - slow["cache_hit"]) < 1e-3
    assert np.mean(same_state) > 0.98
    stable = slow["feasible"] & instant["feasible"] & same_state
    assert stable.sum() > 50
    assert (instant["ttft_mean_s"] <= slow["ttft_mean_s"] * (1 + 1e-5))[stable].all()
    assert (instant["ttft_attainment"] >= slow["ttft_attainment"] - NEVER_FEWER)[stable].all()


def test_pools_of_one_transfer_nothing(study, deployment, settled):
    found = settled(deployment, study.workload, study.catalog)
    joint = np.asarray(found.pools.shared) > 0.5
    assert (
        not np.asarray(found.point.moved.waited_s)[joint].any() and np.asarray(found.point.moved.waited_s)[~joint].all()
    )


# Monotone ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.05, 2.0])
@pytest.mark.parametrize("name", ["memory_bandwidth_bytes_per_s", "bf16_flops_per_s"])
def test_faster_hardware_never_generates_slower(study, deployment, outcome, feasible, name, factor):
    """More memory bandwidth or peak at the same load: TPOT and TTFT are no longer."""
    faster = evaluate(deployment, study.workload, study.slo, hardware_scaled(study.catalog, name, factor))
    assert np.asarray(faster.feasible)[feasible].all()
    for column in ("tpot_mean_s", "ttft_mean_s"):
        before, after = np.asarray(getattr(outcome, column)), np.asarray(getattr(faster, column))
        assert (after[feasible] <= before[feasible] * (1 + 1e-3)).all(), column


@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_more_replicas_never_attain_less(study, deployment, outcome, feasible, factor):
    """Under session affinity (spreading a session's calls over more replicas may lose its prefix)."""
    more = evaluate(replicated(deployment, factor), study.workload, study.slo, study.catalog)
    here = feasible & (np.asarray(deployment.balanced) < 0.5)
    assert np.asarray(more.feasible)[here].all()
    for name in ("calls_attainment", "ttft_attainment", "tpot_attainment"):
        before, after = np.asarray(getattr(outcome, name)), np.asarray(getattr(more, name))
        assert (after[here] >= before[here] - NEVER_FEWER).all(), name


def test_more_load_never_attains_more(study, deployment):
    last = np.ones(len(deployment))
    for factor in (0.1, 0.3, 0.6, 1.0, 1.5, 3.0, 10.0):
        found = evaluate(deployment, loaded(study, factor), study.slo, study.catalog)
        assert (np.asarray(found.slo_attainment) <= last + NEVER_FEWER).all(), factor
        last = np.asarray(found.slo_attainment)


def test_the_largest_load_meets_the_slo_and_five_percent_more_does_not(study, deployment):
    found = evaluate_max_load(deployment, study.workload, study.slo, study.catalog)
    rate = np.asarray(found.sessions_per_second)
    some = rate > 10.0 * LIGHTEST
    assert some.sum() > 50 and np.asarray(found.meets_slo)[some].all()
    at = [dataclasses.replace(study.workload, sessions_per_second=jnp.asarray(rate * f)) for f in (1.0, 1.05)]
    same, more = (evaluate(deployment, load, study.slo, study.catalog) for load in at)
    assert np.asarray(same.meets_slo)[some].all() and not np.asarray(more.meets_slo)[some].any()


# Precision and derivatives -------------------------------------------------------------------------------------------


def in_64_bit(tree):
    def widen(leaf):
        return jnp.asarray(leaf, jnp.float64 if np.asarray(leaf).dtype == np.float32 else None)

    return jax.tree.map(widen, tree)


def test_32_bit_ranks_candidates_as_64_bit_does(study, deployment, outcome, feasible):
    """The same are feasible; attainment within 0.002 and the order of candidates with it."""
    with jax.enable_x64(True):
        exact = evaluate(*in_64_bit((deployment, study.workload, study.slo, study.catalog)))
        exact = jax.tree.map(np.asarray, exact)
    assert exact.slo_attainment.dtype == np.float64
    assert np.mean(exact.feasible == feasible) > 0.995
    both = feasible & exact.feasible & ~exact.doubts.cache_unsettled
    a, b = exact.slo_attainment[both], np.asarray(outcome.slo_attainment)[both]
    assert b == pytest.approx(a, abs=2e-3)
    apart = np.abs(a[:, None] - a[None]) > 4e-3
    assert (np.sign(a[:, None] - a[None]) == np.sign(b[:, None] - b[None]))[apart].all()


def test_derivatives_by_the_load_are_numbers(study, deployment, outcome):
    """Of every candidate below saturation, with and without a pipeline, feasible or not, in 32 bit."""

    def measures(factor):
        load = dataclasses.replace(study.workload, sessions_per_second=study.workload.sessions_per_second * factor)
        found = evaluate(deployment, load, study.slo, study.catalog)
        return {name: getattr(found, name) for name in ("slo_attainment", "ttft_attainment", "ttft_mean_s")}

    one, able = jnp.float32(1.0), np.asarray(outcome.utilization_max) < 1.0
    assert able.sum() > 200
    for name, slope in jax.jvp(measures, (one,), (one,))[1].items():
        assert np.isfinite(np.asarray(slope)[able]).all(), name


SCALED = ("memory_bandwidth_bytes_per_s", "bf16_flops_per_s", "link_bytes_per_s")


def scaled(resolved, factors):
    """`resolved` with the hardware of every stage, and the link, times a factor per candidate."""

    def faster(stage):
        changed = {k: getattr(stage.hardware, k) * factors[k] for k in SCALED[:2]}
        rates = {f"{t}_flops_per_s": getattr(stage, f"{t}_flops_per_s") for t in ("attention", "dense", "head")}
        rates = {name: rate * factors["bf16_flops_per_s"] for name, rate in rates.items()}
        return dataclasses.replace(stage, hardware=dataclasses.replace(stage.hardware, **changed), **rates)

    stages = {name: faster(getattr(resolved, name)) for name in ("prefill_attention", "prefill_ffn")}
    stages |= {name: faster(getattr(resolved, name)) for name in ("decode_attention", "decode_ffn")}
    return dataclasses.replace(resolved, **stages, link_bytes_per_s=resolved.link_bytes_per_s * factors[SCALED[2]])


@pytest.mark.skipif(not os.environ.get("BREAKEVEN_SLOW_TESTS"), reason="compiles minutes: BREAKEVEN_SLOW_TESTS=1")
def test_gradients_in_reverse_are_those_forward(study, deployment, outcome):
    """Of TTFT, TPOT and cost-weighted attainment, by bandwidths and peaks (64 bit)."""
    attained = np.asarray(outcome.calls_attainment)
    rows = np.flatnonzero(np.asarray(outcome.feasible) & (attained > 0.2) & (attained < 0.98))[:24]
    assert len(rows) == 24
    slo = dataclasses.replace(study.slo, call=None, session=None)
    with jax.enable_x64(True):
        resolved, workload, slo, made = in_64_bit(
            (resolve(take(deployment, rows), study.catalog), study.workload, slo, study.catalog)
        )
        ones = {name: jnp.ones(24) for name in SCALED}

        def measures(factors):
            found = performance(scaled(resolved, factors), workload, made)
            weighted = attain(found.latency, slo).slo * found.fleet.cost_per_hour_usd
            return found.latency.ttft_mean_s + found.latency.tpot_mean_s - weighted

        backward = jax.jit(jax.grad(lambda factors: measures(factors).sum()))(ones)
        forward = jax.jit(lambda direction: jax.jvp(measures, (ones,), (direction,))[1])
        for name in SCALED:
            along = forward({other: jnp.full(24, float(other == name)) for other in SCALED})
            np.testing.assert_allclose(backward[name], along, rtol=1e-6, atol=1e-9)
