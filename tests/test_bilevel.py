"""Structures times numbers, the parameters that name them, and bilevel search against the exhaustive front."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optuna
import pytest
from optuna.storages.journal import JournalFileBackend

from breakeven.models.inputs import InputError
from breakeven.models.serving import evaluate
from breakeven.optimizer.bilevel import Settings, search_alone
from breakeven.optimizer.encoding import Encoding
from breakeven.optimizer.evaluator import REASONS, SMALL
from breakeven.optimizer.exhaustive import Task, Threads, exhaustive
from breakeven.optimizer.front import hypervolume
from breakeven.optimizer.polish import polish
from breakeven.optimizer.quality import History
from breakeven.optimizer.refine import _numbers, _rounded, _with_numbers, refine
from breakeven.optimizer.search import Found
from breakeven.optimizer.storage import JOURNAL, Journal, sampler
from breakeven.spaces.structures import NUMBERS, Structures

COST = "cost_per_hour_usd"
OBJECTIVES = (COST, "slo_attainment")


def silent(done: int, total: int) -> None:
    del done, total


@pytest.fixture(scope="module")
def structures(study):
    return Structures(study.space)


@pytest.fixture(scope="module")
def small(make_study):
    """52,480 candidates in 1,640 structures."""
    return make_study(
        topologies=["colocated", "pd"],
        pipeline_parallel=1,
        tensor_parallel=[1, 2, 4, 8],
        replicas=[1, 2, 4, 8],
        kv="fp8",
        token_budget=8192,
        max_batch=[16, 64],
        routing="affinity",
        links="ib-ndr-400",
    )


@pytest.fixture(scope="module")
def task(small):
    return Task(small.evaluator(), OBJECTIVES, COST)


@pytest.fixture(scope="module")
def truth(task):
    return exhaustive(task, Found(OBJECTIVES), silent)


def share_of_truth(found: Found, truth: Found) -> float:
    reference = truth.archive.costs.max(0) + np.array([1.0, 0.01])
    return hypervolume(found.archive.costs, reference) / hypervolume(truth.archive.costs, reference)


def test_structures_times_numbers_are_the_space(structures, study, random_ids):
    """Each candidate belongs to the structure that lists it, and no structure is empty."""
    for candidate in random_ids(study, 30, 1):
        structure = int(structures.of(np.array([candidate]))[0])
        ids, whole = structures.candidates(structure, 10**9)
        assert whole and candidate in ids and (structures.of(ids) == structure).all()
    frame = study.space.frame(structures.candidates(structures.size - 1, 10**9)[0])
    fixed = [c for c in frame if c != "candidate" and not any(c.endswith(name) for name in NUMBERS)]
    assert (frame[fixed].nunique() == 1).all()


def test_thinned_candidates_spread_over_every_number(structures):
    ids, whole = structures.candidates(structures.size - 1, 12)
    assert not whole and 1 < len(ids) <= 12
    assert len(np.unique(ids)) == len(ids)


def test_neighbours_differ_in_one_choice(structures, study, random_ids):
    for candidate in random_ids(study, 6, 2):
        around = structures.neighbours(np.array([candidate]))
        rows = study.space.frame(np.append(around, candidate)).drop(columns="candidate").astype(str)
        joint = rows.iloc[-1]["link"] == ""
        columns = [c for c in rows if not (joint and c.startswith("decode_"))]
        assert ((rows.iloc[:-1] != rows.iloc[-1])[columns].sum(axis=1) == 1).all()
        assert candidate in structures.neighbours(around)


def test_parameters_name_every_structure(structures):
    """`suggest` reads back what `parameters` writes."""
    encoding = Encoding(structures)
    rng = np.random.default_rng(0)
    for structure in [0, structures.size - 1, *rng.integers(0, structures.size, 60).tolist()]:
        trial = optuna.trial.FixedTrial(encoding.parameters(structure))
        assert encoding.suggest(trial) == structure  # pyright: ignore[reportArgumentType]


def test_whatever_screening_rules_out_is_infeasible(study, candidates):
    """And never by more than the model finds."""
    outcome = evaluate(study.space.deployment(candidates), study.workload, study.slo, study.catalog)
    bounds = study.evaluator().screen(candidates)
    out = np.zeros(len(candidates), bool)
    for name in REASONS:
        found, bound = np.asarray(getattr(outcome.violations, name)), bounds[f"excess_{name}"]
        broken = bound > 0.0
        assert (found[broken] > 0.0).all()
        assert (bound[broken] <= found[broken] + 1e-3 * (1.0 + np.abs(found[broken]))).all()
        out |= broken
    assert 0 < out.sum() < len(out)


def test_ranges_devices_and_workers_change_nothing(task, truth):
    """The same front, best of each topology and counts from one thread."""
    one = exhaustive(task, Found(OBJECTIVES), silent, pool=Threads(1))
    assert one.state() == truth.state()
    size = task.evaluator.space.size
    parts = [task.judge_range(start, min(start + 7001, size)) for start in range(0, size, 7001)]
    assert sum(part.evaluated for part in parts) == size
    other = Found(OBJECTIVES)
    for part in reversed(parts):
        other.merge(part)
    assert np.array_equal(np.sort(other.archive.ids), np.sort(truth.archive.ids)) and other.best == truth.best


def test_bilevel_search_comes_close_to_the_exhaustive_front(task, truth):
    """A tenth of the candidates for 99 % of the hypervolume, and the same twice."""
    founds = [Found(OBJECTIVES) for _ in range(2)]
    searches = [search_alone(task, Settings(trials=100, seed=1, early_stop=False), found, silent) for found in founds]
    assert share_of_truth(founds[0], truth) > 0.99
    assert founds[0].evaluated < 0.2 * task.evaluator.space.size
    assert np.array_equal(founds[0].archive.ids, founds[1].archive.ids)
    values = [record[-1] for record in searches[0].history.records]
    assert values == sorted(values)


def test_polish_only_improves(task, truth):
    found = task.judge(np.arange(0, task.evaluator.space.size, 97))
    before = share_of_truth(found, truth)
    polish(task, Structures(task.evaluator.space), found)
    assert before <= share_of_truth(found, truth) <= 1.0 + 1e-9
    assert share_of_truth(found, truth) > 0.98


def test_refinement_starts_from_and_rounds_to_candidates(structures, study, random_ids):
    """A member's own numbers make its own deployment, and between two levels lie both of them."""
    ids = random_ids(study, SMALL, 5)
    values, low, high = _numbers(structures, ids)
    assert all((low[name] <= values[name]).all() and (values[name] <= high[name]).all() for name in values)
    usual = study.evaluator().deployment(ids, SMALL)
    again = _with_numbers(usual, {name: jnp.asarray(v, jnp.float32) for name, v in values.items()})
    for a, b in zip(jax.tree.leaves(usual), jax.tree.leaves(again), strict=True):
        assert np.allclose(a, b, rtol=1e-5)
    ends = {name: np.exp(v) * 1.001 for name, v in values.items()}
    near = _rounded(structures, ids[:20], {name: v[:20] for name, v in ends.items()})
    below = np.isin(ids[:20], near)
    top = np.any([(values[n] >= high[n] - 1e-9) & (high[n] > low[n]) for n in values], axis=(0, 2))[:20]
    assert (below | top).all() and below.any()
    assert np.isin(structures.of(near), structures.of(ids[:20])).all()


@pytest.mark.skipif(not os.environ.get("BREAKEVEN_SLOW_TESTS"), reason="compiles a minute: BREAKEVEN_SLOW_TESTS=1")
def test_gradients_find_better_numbers_for_a_poor_front(task, truth):
    """From a handful of candidates; no member is lost that nothing beats."""
    structures = Structures(task.evaluator.space)
    found = task.judge(np.arange(5, task.evaluator.space.size, 211))
    before, members = share_of_truth(found, truth), found.archive.costs.copy()
    assert refine(task, structures, found, seed=1) > 0
    assert before < share_of_truth(found, truth) <= 1.0 + 1e-9
    for row in members:
        assert (found.archive.costs <= row + 1e-12).all(1).any()


class Killed(BaseException):
    """What stands for kill -9 inside a test: nothing may catch it."""


def run_killed(task: Task, folder: Path, after: int) -> None:
    """Search in `folder` and die after so many batches."""

    def progress(done: int, total: int) -> None:
        if done >= after:
            raise Killed

    with pytest.raises(Killed):
        search_alone(task, SETTINGS, Found(OBJECTIVES), progress, folder)


SETTINGS = Settings(trials=150, seed=3, early_stop=False, identity="one")


def test_a_killed_search_goes_on_as_if_nothing_had_happened(task, tmp_path):
    """Also when the last batch was half written; another search's journal in the folder is put aside."""
    whole, resumed = Found(OBJECTIVES), Found(OBJECTIVES)
    search_alone(task, SETTINGS, whole, silent)
    run_killed(task, tmp_path, 20)
    with (tmp_path / JOURNAL).open("ab") as file:
        lines = (tmp_path / JOURNAL).read_bytes().splitlines(keepends=True)
        file.write(b"".join(lines[-40:-20]) + lines[0][:20])
    run_killed(task, tmp_path, 100)
    search = search_alone(task, SETTINGS, resumed, silent, tmp_path)
    assert len(search.study.trials) == 150
    assert resumed.state() == whole.state()
    other = Settings(trials=50, identity="two")
    search_alone(task, other, Found(OBJECTIVES), silent, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {JOURNAL, "trials-one.journal"}


def test_optuna_itself_reads_the_journal(task, tmp_path):
    search_alone(task, Settings(trials=50, name="mine", early_stop=False), Found(OBJECTIVES), silent, tmp_path)
    backend = JournalFileBackend(str(tmp_path / JOURNAL))
    read = optuna.load_study(study_name="mine", storage=optuna.storages.JournalStorage(backend))
    assert len(read.trials) == 50 and read.metric_names == list(OBJECTIVES)
    assert all(t.constraints for t in read.trials) and len(read.best_trials) > 1


@pytest.mark.parametrize("name", ["nsga3", "tpe", "qmc", "random"])
def test_every_sampler_searches(task, truth, name):
    found = Found(OBJECTIVES)
    search_alone(task, Settings(trials=30, sampler=name), found, silent)
    assert share_of_truth(found, truth) > 0.9


def test_gaussian_processes_say_what_they_need():
    with pytest.raises(InputError, match=r"breakeven\[gp\]") if not _has_torch() else _nothing():
        sampler("gp", 0)


def _has_torch() -> bool:
    import importlib.util

    return importlib.util.find_spec("torch") is not None


def _nothing():
    import contextlib

    return contextlib.nullcontext()


def test_a_journal_of_no_whole_batch_is_empty(tmp_path):
    path = tmp_path / JOURNAL
    path.write_text('{"op_code": 0, "worker_id": "x", "study_name": "s", "directions": [1]}\n{"op')
    assert list(Journal(path).read_logs(0)) == [] and path.read_bytes() == b""


def test_a_front_that_stands_still_is_told_from_one_that_grows():
    history = History(np.array([10.0, 0.0]))
    for k in range(8):
        history.add(k, 2**k, float(k), np.array([[9.0 - k, -0.5]]))
    assert not history.still(100) and history.last_doubling == pytest.approx(1.0 - 7.0 / 8.0)
    for k in range(8, 12):
        history.add(k, 2**k, float(k), np.array([[2.0, -0.5]]))
    assert history.still(100) and history.last_doubling == 0.0
    assert not history.still(1e9), "so little of a space was seen that a standstill may be an accident"
