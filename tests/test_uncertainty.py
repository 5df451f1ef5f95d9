"""Uncertain inputs: draws with the stated moments, quantiles over them, and what they say of a front."""

import dataclasses

import numpy as np
import pytest

from breakeven.models.inputs import InputError
from breakeven.optimizer.search import Found
from breakeven.optimizer.uncertainty import Factor, RobustEvaluator, draws, pessimistic, risk
from breakeven.studies.run import run
from breakeven.studies.study import Study
from breakeven.studies.task import task_of

FACTORS = {"load": Factor(0.3), "prices": Factor(None, 0.8, 1.5), "efficiency": Factor(0.1), "tool_time": Factor(0.5)}


@pytest.fixture(scope="module")
def drawn(study):
    return draws(study.workload, study.catalog, FACTORS, 400, 0)


def test_factors_have_their_moments():
    u = (np.arange(20_000) + 0.5) / 20_000
    values = Factor(0.4).invert(u)
    assert values.mean() == pytest.approx(1.0, rel=2e-3) and values.std() == pytest.approx(0.4, rel=0.02)
    even = Factor(None, 0.5, 2.0).invert(u)
    assert even.min() >= 0.5 and even.max() <= 2.0 and even.mean() == pytest.approx(1.25, rel=1e-3)


def test_draws_scale_what_they_name(study, drawn):
    loads = np.array([float(d.workload.sessions_per_second) for d in drawn]) / float(study.workload.sessions_per_second)
    assert loads.mean() == pytest.approx(1.0, abs=0.02) and loads.std() == pytest.approx(0.3, abs=0.03)
    prices = np.array([np.asarray(d.catalog.hardware.usd_per_hour) for d in drawn])
    prices = prices / np.asarray(study.catalog.hardware.usd_per_hour)
    assert prices.min() >= 0.8 and prices.max() <= 1.5
    assert abs(np.corrcoef(prices[:, 0], prices[:, 1])[0, 1]) < 0.2
    again = draws(study.workload, study.catalog, FACTORS, 400, 0)
    assert float(again[7].workload.gap_mean_s) == float(drawn[7].workload.gap_mean_s)


def test_tool_time_is_what_a_workload_of_longer_gaps_has(study, make_study):
    """Gaps, their moments and the cache's miss curve of sessions whose every gap is twice as long."""
    [drawn] = draws(study.workload, study.catalog, {"tool_time": Factor(None, 2.0, 2.0)}, 1, 0)
    longer = make_study("workload.scale.tool_gap_s=2", "workload.scale.human_gap_s=2").workload
    assert float(drawn.workload.gap_mean_s) == pytest.approx(float(longer.gap_mean_s), rel=0.01)
    assert float(drawn.workload.gap_var_s) == pytest.approx(float(longer.gap_var_s), rel=0.05)
    x = np.linspace(float(longer.cache_work[0]), float(longer.cache_work[-1]), 30)
    ours = np.interp(x, drawn.workload.cache_work, drawn.workload.cache_miss)
    assert np.allclose(ours, np.interp(x, longer.cache_work, longer.cache_miss), atol=0.01)


def test_one_certain_draw_changes_nothing(study, candidates):
    certain = draws(study.workload, study.catalog, {"load": Factor(None, 1.0, 1.0)}, 4, 0)
    usual = study.evaluator()
    robust = RobustEvaluator(**usual.__dict__, draws=certain, quantile=0.9)
    a, b = usual(candidates), robust(candidates)
    for name in ("feasible", "meets_slo", "slo_attainment", "cost_per_hour_usd"):
        assert np.array_equal(a[name], b[name])
    found = risk(usual, certain, candidates)
    assert np.array_equal(found.probability_meets_target, a["meets_slo"].astype(float))
    assert found.expected_cost_per_hour_usd == pytest.approx(a["cost_per_hour_usd"])


def test_a_quantile_is_pessimistic(study, candidates, drawn):
    """Attainment at most, cost at least the median over draws; who meets the SLO does so in 90 % of them."""
    usual = study.evaluator()
    columns = [dataclasses.replace(usual, workload=d.workload, catalog=d.catalog)(candidates) for d in drawn[:20]]
    worse = pessimistic(columns, 0.9)
    assert (worse["slo_attainment"] <= np.median([c["slo_attainment"] for c in columns], 0) + 1e-6).all()
    assert (worse["cost_per_hour_usd"] >= np.median([c["cost_per_hour_usd"] for c in columns], 0) - 1e-4).all()
    often = np.mean([c["meets_slo"] for c in columns], 0)
    assert (often[worse["meets_slo"]] >= 0.9).all()
    bounds = RobustEvaluator(**study.evaluator().__dict__, draws=drawn[:20], quantile=0.9).screen(candidates)
    for name in ("excess_prefill", "excess_weights", "excess_link"):
        broken = bounds[name] > 0.0
        assert (worse[name][broken] > 0.0).all()


def test_a_robust_choice_costs_more_and_holds_more_often(make_study):
    """Judged over draws that the search did not see."""
    choices = {"topologies": "chunked", "accelerators": ["h100-sxm", "b200-sxm"], "weights": "fp8", "kv": "fp8"}
    choices |= {"routing": "affinity", "replicas": {"from": 1, "to": 12}}
    found = {}
    for objective in ("nominal", "robust"):
        made: Study = make_study(
            "uncertain.load.cv=0.4", f"uncertain.objective={objective}", "uncertain.search_draws=12", **choices
        )
        task = task_of(made)
        result = Found(task.objectives)
        result.merge(task.judge_range(0, made.space.size))
        best = np.array([min(result.best.values())[-1]])
        usual = made.evaluator()
        cost = float(usual(best)["cost_per_hour_usd"][0])
        fresh = draws(made.workload, made.catalog, {"load": Factor(0.4)}, 60, 99)
        found[objective] = cost, float(risk(usual, fresh, best).probability_meets_target[0])
    assert found["robust"][0] > found["nominal"][0]
    assert found["robust"][1] > found["nominal"][1] and found["robust"][1] >= 0.8


def test_what_is_uncertain_is_checked(make_study):
    for change, words in (
        ("uncertain.load.cv=-1", "greater than 0"),
        ("uncertain.load.low=2", "either cv, or low and high"),
        ("uncertain.objective=robust", "at least one of"),
    ):
        with pytest.raises(InputError, match=words):
            make_study(change)


def test_a_run_shows_the_risk_of_its_front(make_study):
    """Columns of front.csv and families.csv, of the usual values and of a robust choice."""
    choices = {
        "topologies": "chunked",
        "accelerators": ["h100-sxm"],
        "weights": "fp8",
        "kv": "fp8",
        "replicas": [2, 4, 8],
    }
    for objective in ("nominal", "robust"):
        made = make_study(
            "search.verify=false",
            "uncertain.prices.cv=0.2",
            "uncertain.draws=20",
            "uncertain.search_draws=4",
            f"uncertain.objective={objective}",
            **choices,
        )
        result = run(made)
        assert result.front["probability_meets_target"].between(0, 1).all()
        cost, expected = result.front["cost_per_hour_usd"], result.front["expected_cost_per_hour_usd"]
        assert bool(np.all(expected < cost)) if objective == "robust" else np.allclose(expected, cost, rtol=0.05)
