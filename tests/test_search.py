"""Searches against brute force: the exhaustive front, archives in any order, and Optuna's share of it."""

import numpy as np
import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breakeven.optimizer.evaluator import SMALL
from breakeven.optimizer.exhaustive import Task, exhaustive
from breakeven.optimizer.front import Archive, as_costs, hypervolume, non_dominated
from breakeven.optimizer.optuna_search import Encoding, optuna_search
from breakeven.optimizer.search import Found

COST = "cost_per_hour_usd"
OBJECTIVES = (COST, "slo_attainment")


def silent(done: int, total: int) -> None:
    del done, total


def brute_force(costs: np.ndarray) -> np.ndarray:
    """Positions that no other row beats, the first of equal ones."""
    kept = []
    for i, row in enumerate(costs):
        better = (costs <= row).all(1) & (costs < row).any(1)
        if not better.any() and not (costs[:i] == row).all(1).any():
            kept.append(i)
    return np.array(kept)


rows = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=40)


@settings(deadline=None)
@given(rows, st.integers(2, 3), st.randoms(use_true_random=False), st.integers(1, 10))
def test_an_archive_is_the_front_whatever_the_order_of_its_blocks(points, objectives, random, block):
    """Equal to brute force over all, with the lowest id for equal rows."""
    costs = np.array(points, float)[:, :objectives]
    order = np.array(random.sample(range(len(costs)), len(costs)))
    archive = Archive()
    for start in range(0, len(order), block):
        some = order[start : start + block]
        archive.add(some, costs[some])
    assert sorted(archive.ids.tolist()) == brute_force(costs).tolist()
    assert np.array_equal(costs[archive.ids], archive.costs)


def test_of_equal_rows_the_lowest_id_stands_for_all():
    costs = np.array([[1.0, 2.0], [1.0, 2.0], [3.0, 3.0], [2.0, 1.0]])
    ids = np.array([9, 4, 1, 7])
    assert ids[non_dominated(costs, ids)].tolist() == [4, 7]


def test_nothing_makes_an_empty_front():
    archive = Archive()
    archive.add(np.empty(0, np.int64), np.empty((0, 2)))
    assert len(archive.ids) == 0 and len(non_dominated(np.empty((0, 2)), archive.ids)) == 0


def test_maximised_objectives_change_sign():
    values = {COST: np.array([3.0]), "slo_attainment": np.array([0.9])}
    assert as_costs(values, OBJECTIVES).tolist() == [[3.0, -0.9]]


def test_hypervolume_of_two_boxes():
    """(0,1) and (1,0) below (2,2): two boxes of 2 that share 1."""
    assert hypervolume(np.array([[0.0, 1.0], [1.0, 0.0], [5.0, 0.0]]), np.array([2.0, 2.0])) == pytest.approx(3.0)


@pytest.fixture(scope="module")
def small(make_study):
    """A study of 3,720 candidates: eight blocks."""
    return make_study(
        "space.prefill.weights=fp8",
        "space.decode.weights=fp8",
        topologies=["colocated", "pd"],
        pipeline_parallel=1,
        tensor_parallel=[4, 8],
        replicas=[2, 4, 8],
        token_budget=8192,
        max_batch=64,
        routing="affinity",
    )


@pytest.fixture(scope="module")
def everything(small):
    """All candidates of the small study, one block after another."""
    parts = [small.evaluator()(ids) for ids in small.space.blocks(SMALL)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@pytest.fixture(scope="module")
def searched(small):
    return exhaustive(Task(small.evaluator(), OBJECTIVES, COST), Found(OBJECTIVES), silent)


def test_the_exhaustive_front_is_that_of_brute_force(everything, searched):
    shown = np.flatnonzero(everything["feasible"] & (everything["slo_attainment"] > 0.0))
    costs = as_costs({name: everything[name][shown] for name in OBJECTIVES}, OBJECTIVES)
    assert np.sort(searched.archive.ids).tolist() == shown[brute_force(costs)].tolist()
    assert len(searched.archive.ids) > 3


def test_the_exhaustive_search_counts_every_candidate(small, everything, searched):
    assert searched.evaluated == small.space.size == len(everything["candidate"])
    assert searched.feasible == everything["feasible"].sum()
    assert sum(searched.stopped.values()) == searched.evaluated - searched.feasible
    assert searched.highest_attainment == pytest.approx(everything["slo_attainment"].max())


def test_the_best_of_a_topology_is_its_cheapest_that_meets_the_target(small, everything, searched):
    family = small.space.family(everything["candidate"])
    for f, (*_, candidate) in searched.best.items():
        meets = everything["meets_slo"] & (family == f)
        assert everything[COST][candidate] == everything[COST][meets].min() and meets[candidate]
    assert set(searched.best) == set(family[everything["meets_slo"]].tolist())


@pytest.fixture(scope="module")
def chosen(small):
    return [optuna_search(small.evaluator(), Found(OBJECTIVES), 600, "nsga2", 0, COST, silent) for _ in range(2)]


def test_optuna_finds_nine_tenths_of_the_exhaustive_hypervolume(everything, searched, chosen):
    shown = everything["feasible"] & (everything["slo_attainment"] > 0.0)
    reference = np.array([everything[COST][shown].max() * 1.01, 0.0])
    exact, found = (hypervolume(each.archive.costs, reference) for each in (searched, chosen[0]))
    assert 0.9 * exact <= found <= exact * (1 + 1e-9)
    assert chosen[0].evaluated <= 600


def test_the_same_seed_finds_the_same_front(chosen):
    first, second = (np.sort(each.archive.ids) for each in chosen)
    assert np.array_equal(first, second)


def test_optuna_parameters_name_every_candidate(study, random_ids):
    """`suggest` reads back what `parameters` writes."""
    encoding = Encoding(study.space)
    edges = [0, study.space.size - 1, *study.space.offsets[1:-1].tolist()]
    for candidate in [*edges, *random_ids(study, 60, 3).tolist()]:
        trial = optuna.trial.FixedTrial(encoding.parameters(int(candidate)))
        assert encoding.suggest(trial) == candidate  # pyright: ignore[reportArgumentType]
