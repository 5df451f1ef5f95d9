"""A front made certain: all that costs less than the cheapest that attains everything is listed, and nothing missed."""

import numpy as np
import pytest

from breakeven.optimizer import complete
from breakeven.optimizer.exhaustive import Task, exhaustive
from breakeven.optimizer.search import Found

COST = "cost_per_hour_usd"
OBJECTIVES = (COST, "slo_attainment")


@pytest.fixture(scope="module")
def task(make_study):
    study = make_study(
        "load.sessions_per_second=0.02",
        "slo={ttft_s: 60, tpot_s: 0.2, call_s: 900, session_s: 10000000, target: 0.9}",
        topologies=["colocated", "pd"],
        pipeline_parallel=1,
        tensor_parallel=[4, 8],
        replicas=[1, 2, 3, 4, 8],
        kv="fp8",
        token_budget=8192,
        max_batch=64,
        routing="affinity",
        links="ib-ndr-400",
    )
    return Task(study.evaluator(), OBJECTIVES, COST)


@pytest.mark.parametrize("limit", [0.0, 30.0, 117.3, 1e9])
def test_it_lists_exactly_what_costs_no_more_and_the_cheapest_first(task, limit):
    space, price = task.evaluator.space, np.asarray(task.evaluator.catalog.hardware.usd_per_hour, float)
    columns, split = space.columns(np.arange(space.size)), np.arange(space.size) >= space.offsets[1]

    def usd(pool):
        count = columns[f"{pool}_replicas"] * columns[f"{pool}_tensor_parallel"] * columns[f"{pool}_data_parallel"]
        return count * price[columns[f"{pool}_accelerator"]]

    cost = usd("prefill") + split * usd("decode")
    cheapest = complete._cheapest(space, price, limit, space.size)
    assert cheapest is not None
    ids, listed = cheapest
    assert sorted(ids) == np.flatnonzero(cost <= limit).tolist()
    assert listed == pytest.approx(cost[ids]) and (np.diff(listed) >= 0.0).all()
    if len(ids):
        assert complete._cheapest(space, price, limit, len(ids) - 1) is None


def test_the_front_is_that_of_the_whole_space(task, monkeypatch):
    truth = exhaustive(task, Found(OBJECTIVES), lambda done, total: None)
    dear = task.judge(np.arange(task.evaluator.space.size)[-400:])
    assert complete.bar(task, dear) is not None, "something attains all"
    few = Found(OBJECTIVES)
    few.merge(dear)
    assert not complete.complete(task, few), "too many cost less for a space that small"
    monkeypatch.setattr(complete, "SHARE", 1.0)
    assert complete.complete(task, few) and few.evaluated < 0.9 * task.evaluator.space.size
    certain = truth.archive.costs[:, 0] <= complete.bar(task, truth)
    assert set(truth.archive.ids[certain]) <= set(few.archive.ids)


def test_no_bar_where_something_else_is_asked_for(task):
    found = task.judge(np.arange(task.evaluator.space.size))
    other = Task(task.evaluator, (COST, "session_p95_s"), COST)
    assert complete.bar(other, found) is None and complete.bar(task, Found(OBJECTIVES)) is None
