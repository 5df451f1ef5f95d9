"""Sensitivity: derivatives against finite differences, Sobol indices against known ones, bills that add up."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from breakeven.models import settle
from breakeven.models.variation import WORKLOAD_INPUTS, Input, varied
from breakeven.optimizer.evaluator import Evaluator
from breakeven.optimizer.optima import Scenario
from breakeven.optimizer.sensitivity import Judge, Measures, jacobian, measures, sobol
from breakeven.studies.attribution import COMMUNICATION, COMPLEXITY, ENCODE, GAINS, STAGES, bill, gain
from breakeven.studies.fit_error import coefficient_draws, log_sd
from breakeven.studies.inputs_of import inputs_of, with_ranges
from breakeven.studies.study import Study

INPUTS = (
    Input("load", "workload", ("load",)),
    *[Input(name, "workload", (name,)) for name in WORKLOAD_INPUTS],
    Input("slo.ttft_s", "slo", ("ttft",)),
    Input("slo.tpot_s", "slo", ("tpot",)),
    *[Input(f"{row}.memory_bandwidth", "hardware", ("memory_bandwidth_bytes_per_s",), row) for row in (0, 2)],
    Input("0.gemm", "kernels", ("gemm_fp8", "gemm_bf16"), 0),
    Input("link", "links", ("bytes_per_s",), 0),
    Input("price", "hardware", ("usd_per_hour",), 0),
    Input("engine.step_s", "engine", ("step_s",)),
    Input("llm.parameters", "llm", ("attention_weights", "dense_weights")),
)


def in_64_bit(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64 if np.asarray(leaf).dtype.kind == "f" else None), tree)


def scenario_of(study: Study) -> Scenario:
    return Scenario(study.workload, study.slo, study.catalog)


@pytest.fixture(scope="module")
def hundred(study: Study, random_ids: Any) -> np.ndarray:
    """A hundred random feasible deployments whose attainment is neither 0 nor 1."""
    found: list[int] = []
    evaluator = Evaluator(study.space, *scenario_of(study))
    for seed in range(40):
        ids = random_ids(study, 512, 100 + seed)
        columns = evaluator(ids)
        attained = columns["slo_attainment"]
        found += ids[columns["feasible"] & (attained > 0.05) & (attained < 0.995)].tolist()
        if len(found) >= 100:
            break
    return np.array(found[:100])


class Derivatives(NamedTuple):
    """Of every measure by every input and the size, (100, inputs + 1): by differentiation, and by differences."""

    found: Measures
    differences: Measures


@pytest.fixture(scope="module")
def one_server(study: Study, hundred: np.ndarray) -> np.ndarray:
    """Which of them have a single engine that prefills and takes any call: its queue is M/G/1, that of more than one
    server follows another law, so more than one engine is a jump away (`queue_wait`)."""
    deployment = study.space.deployment(hundred)
    return (np.asarray(deployment.balanced) > 0.5) & (np.asarray(deployment.prefill_attention.replicas) == 1.0)


@pytest.fixture(scope="module")
def derivatives(study: Study, hundred: np.ndarray, one_server: np.ndarray) -> Derivatives:
    """In 64 bit; the fixed point iterated to its end, as the derivative is that of the solution.

    Differences are central, but those by the size of one server: from below.
    """
    h, count = 1e-7, len(INPUTS) + 1  # a wait that starts at the bound has an endless slope: few are that near
    slo = dataclasses.replace(study.slo, call=None, session=None)
    with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
        patch.setattr(settle, "ITERATIONS", 120)
        deployment = in_64_bit(study.space.deployment(hundred))
        scenario = Scenario(*in_64_bit((study.workload, slo, study.catalog)))
        found = jacobian(deployment, scenario, INPUTS)
        model = jax.jit(measures, static_argnums=2)
        columns = []
        for i, step in enumerate(h * np.eye(count)):
            ways = (model(deployment, scenario, INPUTS, jnp.asarray(sign * step)) for sign in (-1.0, 0.0, 1.0))
            low, here, high = (np.stack([np.asarray(each) for each in way]) for way in ways)
            central = (high - low) / (2.0 * h)
            columns.append(np.where(one_server, (here - low) / h, central) if i == count - 1 else central)
    return Derivatives(found, Measures(*[np.stack([c[i] for c in columns], 1) for i in range(len(found))]))  # type: ignore


def test_gradients_are_those_of_finite_differences(
    hundred: np.ndarray, one_server: np.ndarray, derivatives: Derivatives
) -> None:
    """Of attainment, cost, TTFT and TPOT by every kind of input, on 100 random feasible deployments: within 1 %, or
    0.0001 where there is next to nothing."""
    assert len(hundred) == 100 and one_server.sum() <= 10
    names = [*[each.path for each in INPUTS], "size"]
    for measure, found, difference in zip(Measures._fields, *derivatives, strict=True):
        assert np.isfinite(found).all()
        off = np.abs(found - difference) > 0.01 * np.abs(difference) + 1e-4
        where = [(names[i], found[k, i], difference[k, i]) for k, i in np.argwhere(off)]
        assert not where, (measure, where[:6])


def test_as_much_more_hardware_as_load_holds_the_attainment(
    study: Study, hundred: np.ndarray, derivatives: Derivatives
) -> None:
    """Every engine sees what it saw before, but for what balancing gains from more engines to choose from."""
    affinity = np.asarray(study.space.deployment(hundred).balanced) < 0.5
    joint = np.array([study.space.families[f].topology.name != "pd" for f in study.space.family(hundred)])
    by_load, by_size = (np.asarray(derivatives.found.attainment)[affinity & joint][:, i] for i in (0, -1))
    assert np.abs(by_size).max() > 0.05
    assert by_load == pytest.approx(-by_size, abs=2e-3)


def test_sobol_indices_of_the_ishigami_function() -> None:
    """sin x + 7 sin² y + 0.1 z⁴ sin x: first order 0.3139, 0.4424, 0; total 0.5576, 0.4424, 0.2437."""

    def ishigami(x: np.ndarray) -> np.ndarray:
        value = np.sin(x[:, 0]) + 7.0 * np.sin(x[:, 1]) ** 2 + 0.1 * x[:, 2] ** 4 * np.sin(x[:, 0])
        return np.stack([value, np.zeros(len(x))], 1)

    found, constant = sobol(ishigami, np.full(3, -np.pi), np.full(3, np.pi), 2048, 0)
    assert found.first == pytest.approx([0.3139, 0.4424, 0.0], abs=0.02)
    assert found.total == pytest.approx([0.5576, 0.4424, 0.2437], abs=0.02)
    assert np.isnan(constant.total).all()


def test_a_changed_scenario_is_the_study_with_the_field_changed(make_study: Any) -> None:
    """Factors on arrays say the same as fields of the file, where a file can say it."""
    base = make_study()
    row = {"prefill_accelerator": "h100-sxm", "decode_accelerator": "h100-sxm", "link": "ib-ndr-400"}
    inputs = {each.path: each for each in inputs_of(base, [row])}
    same = {
        "load.sessions_per_second": "load.sessions_per_second=0.015",
        "slo.ttft_s": "slo.ttft_s=7.5",
        "accelerators.h100-sxm.memory_bandwidth": "accelerators.h100-sxm.memory_bandwidth=1.5",
        "accelerators.h100-sxm.compute": "accelerators.h100-sxm.compute=1.5",
        "accelerators.h100-sxm.price": "accelerators.h100-sxm.price=1.5",
        "links.ib-ndr-400.bandwidth": "links.ib-ndr-400.bandwidth=1.5",
        "workload.gaps": "workload.scale={tool_gap_s: 1.0, human_gap_s: 1.0}",
    }
    for path, change in same.items():
        factor = 1.0 if path == "workload.gaps" else 1.5
        ours = varied(*scenario_of(base), [inputs[path]], [np.float32(factor)])
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(tuple(scenario_of(make_study(change)))), strict=True):
            assert np.asarray(a) == pytest.approx(np.asarray(b), rel=2e-5), path
    ranged = with_ranges(list(inputs.values()), ["slo.ttft_s=0.5:3"])
    assert next((e.low, e.high) for e in ranged if e.path == "slo.ttft_s") == (0.5, 3.0)


def test_a_judge_sees_the_winner_change_with_the_price(study: Study, random_ids: Any) -> None:
    """Two candidates, one of each side: which is cheaper follows the price of the split's accelerator."""
    evaluator, b200 = Evaluator(study.space, *scenario_of(study)), study.names.accelerator_ids.index("b200-sxm")
    ids = random_ids(study, 4096, 1)
    columns, choices = evaluator(ids), study.space.columns(ids)
    split = study.space.family(ids) == 2
    fast = (choices["prefill_accelerator"] == b200) & (choices["decode_accelerator"] == b200)
    slow = (choices["prefill_accelerator"] != b200) & (choices["decode_accelerator"] != b200)
    chosen = [int(np.flatnonzero(columns["meets_slo"] & where)[0]) for where in (split & fast, ~split & slow)]
    deployment = study.space.deployment(ids[chosen])
    price = Input("price", "hardware", ("usd_per_hour",), b200)
    judge = Judge.of(deployment, np.array([True, False]), scenario_of(study), [price])
    one = judge.at([1.0])
    assert judge.at([0.5]).ratio == pytest.approx(0.5 * one.ratio, rel=1e-5)
    assert (judge.at([0.01]).ratio < 1.0) and (judge.at([100.0]).ratio > 1.0)
    assert one.attainment == pytest.approx(float(columns["slo_attainment"][chosen[0]]), abs=1e-5)


def test_fitted_coefficients_have_errors(study: Study) -> None:
    row = {"prefill_accelerator": "h100-sxm", "decode_accelerator": "b200-sxm", "link": ""}
    inputs = inputs_of(study, [row])
    sd = {each.path: log_sd(study, each) for each in inputs}
    assert 0.01 < sd["kernels.h100-sxm.gemm_fp8"] < 0.5 and sd["engine.step_s"] > 0.0
    assert sd["accelerators.h100-sxm.price"] == 0.0
    draws = coefficient_draws(study, inputs, 4000, 0)
    spread = dict(zip(sd, np.log(draws).std(0), strict=True))
    apart = [path for path in sd if not path.startswith("engine.")]
    assert [spread[path] for path in apart] == pytest.approx([sd[path] for path in apart], rel=0.08, abs=1e-9)
    of_fit = [i for i, path in enumerate(sd) if path in ("engine.step_s", "engine.layer_s", "engine.sequence_s")]
    together = np.unique(draws[:, of_fit], axis=0)
    assert 20 <= len(together) <= 30  # resampled fits, each drawn as a whole
    assert all(0.01 < spread[list(sd)[i]] < 1.2 * sd[list(sd)[i]] for i in of_fit)


def test_bills_add_up_and_their_difference_is_the_net_benefit(study: Study, candidates: np.ndarray) -> None:
    """Time and money of every row sum to the mean call and the cost; gains less communication less complexity to their
    difference, whatever two deployments are compared."""
    evaluator = Evaluator(study.space, *scenario_of(study))
    columns = evaluator(candidates)
    family = study.space.family(candidates)
    some = [int(candidates[columns["feasible"] & (family == f)][k]) for f in range(3) for k in range(2)]
    bills = [bill(study, evaluator, candidate, "") for candidate in some]
    for each, candidate in zip(bills, some, strict=True):
        at = int(np.flatnonzero(candidates == candidate)[0])
        assert each.total_s == pytest.approx(float(columns["call_mean_s"][at]), rel=1e-4)
        assert each.total_usd_per_hour == pytest.approx(float(columns["cost_per_hour_usd"][at]), rel=1e-5)
        assert min(v for k, v in each.usd_per_hour.items()) > -1e-3
        assert set(each.dominant.values()) <= {"compute", "memory", "launches", "transfer", "waiting", "interference"}
    for a in bills:
        for b in bills:
            found = gain(a, b)
            assert found.net(found.seconds) == pytest.approx(b.total_s - a.total_s, abs=1e-6)
            assert found.net(found.usd_per_hour) == pytest.approx(b.total_usd_per_hour - a.total_usd_per_hour, abs=1e-6)
    assert set(GAINS) | set(COMMUNICATION) | {COMPLEXITY} == set(bills[0].seconds)


def test_bills_of_attention_apart_from_feed_forward_layers(make_study: Any, random_ids: Any) -> None:
    """They add up too; a mean call's decode and the way of its activations are its decode steps, and every pool is
    paid once, for what it works on, even where that hides behind the other side."""
    made = make_study(topologies=["afd", "af", "pdaf"], micro_batches=2)
    evaluator = Evaluator(made.space, *scenario_of(made))
    ids = random_ids(made, 3000, 0)
    columns = evaluator(ids)
    family = made.space.family(ids)
    some = [int(i) for f in range(3) for i in ids[columns["feasible"] & (family == f)][:2]]
    assert len({int(made.space.family(np.array([i]))[0]) for i in some}) == 3
    for candidate in some:
        found = bill(made, evaluator, candidate, "")
        at = int(np.flatnonzero(ids == candidate)[0])
        assert found.total_s == pytest.approx(float(columns["call_mean_s"][at]), rel=1e-4)
        assert found.total_usd_per_hour == pytest.approx(float(columns["cost_per_hour_usd"][at]), rel=1e-5)
        assert min(found.usd_per_hour.values()) > -1e-3
        assert all(found.usd_per_hour[name] > 0.0 for name in STAGES)
        assert found.usd_per_hour[ENCODE] == 0.0
        prefill, decode = sides(made, evaluator, candidate)
        apart = sum(found.seconds[name] for name in (*STAGES, *COMMUNICATION)) - found.seconds["KV transfer"]
        assert apart == pytest.approx(prefill + decode, rel=1e-4)


def sides(study: Study, evaluator: Evaluator, candidate: int) -> tuple[float, float]:
    """Seconds of a mean call's prefill alone, and of its decode steps at the mean batch."""
    rate = evaluator(np.array([candidate]))["sessions_per_second"][0]
    _, _, found = evaluator.performance(candidate, float(rate))
    decode_s = float(found.decode_step.total_s[0]) * float(study.workload.mean_steps)
    return float(found.prefill_call.total_s[0]), decode_s
