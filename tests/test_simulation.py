"""The simulation: equal to a plain step-by-step reference, exact queues, laws, and agreement with the model."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation_reference import Reference

from breakeven.models.deployment import AFFINITY, BALANCED, PREFIX_AWARE, RANDOM
from breakeven.models.simulation import Bounds, Replications, Traffic, simulate
from breakeven.models.simulation.state import CHUNKED, COLOCATED, SPLIT, Plan, Speed, new_calls, new_sessions

ROOT = Path(__file__).resolve().parents[1]

SPEED = Speed(
    step=4e-3,
    attention_weight=3e-3,
    attention_token=2e-5,
    ffn_weight=5e-3,
    ffn_token=4e-5,
    expert=6e-3,
    expert_token=1e-5,
    permute_token=3e-6,
    log_expert_miss=float(np.log1p(-0.05)),
    activation_token=1e-6,
    collective=0.0,
    collective_token=1e-6,
    collective_root=1e-5,
    sequence=3e-5,
    context=1e-7,
    selected_context=2e-7,
    prefill_context=1e-8,
    pair=1e-9,
    selected_pair=2e-9,
    query=1e-6,
    sparse_topk=400.0,
    ranks=1.0,
    depth=1,
)
PLAN = Plan(
    mode=COLOCATED,
    prefill_engines=2,
    decode_engines=0,
    prefill=SPEED,
    decode=SPEED,
    token_budget=512.0,
    max_batch=8,
    prefill_capacity=1e9,
    decode_capacity=1e9,
    shared_prefix=50.0,
    request_s=0.002,
    link_latency_s=1e-3,
    link_token_s=2e-5,
    routing=AFFINITY,
    window_start_s=0.0,
    window_end_s=1e9,
    horizon_s=1e9,
    whole_sessions=False,
    log_start_s=np.inf,
)


def small_traffic(sessions: int, engines: int, rate: float, seed: int, warm: int = 0) -> Traffic:
    """Sessions of a few calls with growing prompts around the sparse top-k and the token budget."""
    rng = np.random.default_rng(seed)
    count = rng.integers(1, 6, sessions)
    calls, rows = new_calls(int(count.sum())), new_sessions(sessions)
    session = np.repeat(np.arange(sessions), count)
    first = np.append(True, session[1:] != session[:-1])
    calls["session"], calls["first"], calls["last"] = session, first, np.append(first[1:], True)
    calls["shared"], calls["output"] = 50.0, rng.integers(1, 40, len(calls))
    grown = np.cumsum(rng.integers(20, 300, len(calls)))
    start = np.flatnonzero(first)
    calls["prompt"] = grown - grown[start][session] + 60.0 + rng.integers(1, 300, sessions)[session]
    calls["missed_tokens"] = calls["prompt"] - 50.0
    calls["hit_tokens"] = np.where(first, calls["missed_tokens"], np.minimum(calls["missed_tokens"], 150.0))
    calls["gap_s"], calls["tie"] = rng.exponential(0.5, len(calls)), rng.random(len(calls))
    rows["first_call"], rows["home"] = start, rng.integers(engines, size=sessions)
    rows["start_s"] = np.cumsum(rng.exponential(1.0 / rate, sessions))
    rows["tokens"][:warm] = 100.0
    return Traffic(calls, rows, np.arange(sessions), np.arange(warm), sessions)


def case(mode: int, limited: bool, routing: int = AFFINITY) -> Plan:
    split = mode == SPLIT
    return PLAN._replace(
        mode=mode,
        decode_engines=2 if split else 0,
        routing=routing,
        max_batch=4 if limited else 64,
        prefill_capacity=3500.0 if limited else 1e9,
        decode_capacity=3000.0 if limited else 1e9,
    )


@pytest.mark.parametrize("mode", [COLOCATED, CHUNKED, SPLIT])
@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("routing", range(4))
def test_equal_to_the_step_by_step_reference(mode: int, limited: bool, routing: int) -> None:
    """To 1e-9 s in every time of every call, with and without limits on batch and cache."""
    plan = case(mode, limited, routing)
    for seed in range(3):
        expected = Reference(plan, small_traffic(60, 2, 12.0, seed))
        found = simulate(plan, small_traffic(60, 2, 12.0, seed))
        assert np.isfinite(found.calls["end_s"]).all()
        np.testing.assert_allclose(found.calls["arrival_s"], expected.arrival, rtol=0, atol=1e-9)
        np.testing.assert_allclose(found.calls["first_s"], expected.first, rtol=0, atol=1e-9)
        np.testing.assert_allclose(found.calls["end_s"], expected.end, rtol=0, atol=1e-9)
        np.testing.assert_array_equal(found.calls["found"] == 1, expected.hit)
        if limited:
            assert found.cache_hit < 1.0


def forked(traffic: Traffic, seed: int) -> Traffic:
    """The same with one to three sub-agents of one to three calls after a third of the calls that others follow."""
    rng, main = np.random.default_rng(seed), len(traffic.sessions)
    parents = np.flatnonzero(~traffic.calls["last"] & (rng.random(len(traffic.calls)) < 0.33))
    width = rng.integers(1, 4, len(parents))
    count = rng.integers(1, 4, int(width.sum()))
    parent, of = np.repeat(parents, width), np.repeat(np.arange(len(count)), count)
    calls, rows = new_calls(len(of)), new_sessions(len(count))
    index = np.arange(len(of)) - (np.cumsum(count) - count)[of]
    calls["session"], calls["first"], calls["last"] = main + of, index == 0, index == count[of] - 1
    grown = traffic.calls["prompt"] + traffic.calls["output"]
    calls["prompt"], calls["shared"] = grown[parent][of] + 40.0 * (index + 1.0), 50.0
    calls["output"], calls["tie"] = rng.integers(1, 40, len(of)), rng.random(len(of))
    calls["hit_tokens"], calls["missed_tokens"] = 40.0, calls["prompt"] - 50.0
    calls["gap_s"] = rng.exponential(0.1, len(of))
    rows["first_call"], rows["start_s"] = len(traffic.calls) + np.cumsum(count) - count, np.inf
    rows["parent"] = parent
    every = np.concatenate([traffic.calls, calls]).view(np.recarray)
    every["fork"][parents], every["forks"][parents] = main + np.cumsum(width) - width, width
    sessions = np.concatenate([traffic.sessions, rows]).view(np.recarray)
    return Traffic(every, sessions, traffic.starts, traffic.warm, traffic.playing)


@pytest.mark.parametrize("mode", [COLOCATED, CHUNKED, SPLIT])
@pytest.mark.parametrize("routing", range(4))
@pytest.mark.parametrize("limited", [False, True])
def test_forks_and_joins_equal_the_reference(mode: int, routing: int, limited: bool) -> None:
    """A call after a fork comes its gap after the last sub-agent has ended; these find their parent's prefix."""
    plan = case(mode, limited, routing)._replace(preempts=mode != SPLIT and limited)
    for seed in range(2):
        expected = Reference(plan, forked(small_traffic(40, 2, 8.0, seed), seed))
        given = forked(small_traffic(40, 2, 8.0, seed), seed)
        forks = np.flatnonzero(given.calls["forks"] > 0)
        parent = given.sessions["parent"]
        found = simulate(plan, given)
        assert np.isfinite(found.calls["end_s"]).all() and (found.calls["forks"] == 0).all()
        np.testing.assert_allclose(found.calls["end_s"], expected.end, rtol=0, atol=1e-9)
        np.testing.assert_array_equal(found.calls["found"] == 1, expected.hit)
        ends = np.zeros(len(found.calls))
        children = parent[found.calls["session"]]
        inside = children >= 0
        np.maximum.at(ends, children[inside], found.calls["end_s"][inside])
        waited = found.calls["arrival_s"][forks + 1] - ends[forks]
        np.testing.assert_allclose(waited, found.calls["gap_s"][forks], atol=1e-9)
        assert found.sessions["measured"].sum() == 40


def test_a_shared_prefix_is_held_once() -> None:
    """Two sessions at once: 50 tokens of it, and 100 + 10 of each."""
    traffic = single(np.full(2, 150.0), np.zeros(2))
    traffic.calls["shared"], traffic.calls["output"] = 50.0, 10.0
    traffic.calls["missed_tokens"] = traffic.calls["hit_tokens"] = 100.0
    for preempts in (False, True):
        found = simulate(PLAN._replace(prefill_engines=1, preempts=preempts), traffic)
        assert found.engines["peak"].tolist() == [270.0]
        traffic = single(np.full(2, 150.0), np.zeros(2))
        traffic.calls["shared"], traffic.calls["output"] = 50.0, 10.0
        traffic.calls["missed_tokens"] = traffic.calls["hit_tokens"] = 100.0


@pytest.mark.parametrize("mode", [COLOCATED, CHUNKED])
@pytest.mark.parametrize("routing", range(4))
@pytest.mark.parametrize("capacity", [2100.0, 3500.0])
def test_preempting_engines_equal_the_reference(mode: int, routing: int, capacity: float) -> None:
    """Admission by the prompt alone: jumps end where the cache is full, and the last admitted comes back."""
    plan = case(mode, False, routing)._replace(preempts=True, prefill_capacity=capacity)
    preempted = 0
    for seed in range(4):
        expected = Reference(plan, small_traffic(60, 2, 40.0, seed))
        found = simulate(plan, small_traffic(60, 2, 40.0, seed))
        np.testing.assert_allclose(found.calls["first_s"], expected.first, rtol=0, atol=1e-9)
        np.testing.assert_allclose(found.calls["end_s"], expected.end, rtol=0, atol=1e-9)
        np.testing.assert_array_equal(found.calls["found"] == 1, expected.hit)
        np.testing.assert_array_equal(found.calls["preempted"], expected.preempted)
        assert (found.engines["peak"] <= capacity).all()
        preempted += int(found.calls["preempted"].sum())
    assert preempted > 3


def test_with_ample_cache_nothing_is_preempted() -> None:
    """And every time is that of an engine that reserves."""
    for mode in (COLOCATED, CHUNKED):
        plan = case(mode, False)
        reserved, free = (
            simulate(plan._replace(preempts=p), small_traffic(60, 2, 25.0, 1)).calls for p in (False, True)
        )
        assert not free["preempted"].any()
        np.testing.assert_allclose(free["end_s"], reserved["end_s"], rtol=0, atol=1e-9)


def single(service: np.ndarray, arrival: np.ndarray) -> Traffic:
    """Sessions of one call each, whose prefill takes the given seconds in a deployment of `one_token_a_second`."""
    n = len(service)
    calls, rows = new_calls(n), new_sessions(n)
    calls["session"], calls["first"], calls["last"] = np.arange(n), True, True
    calls["prompt"] = calls["missed_tokens"] = calls["hit_tokens"] = service
    calls["output"] = 1.0
    rows["first_call"], rows["start_s"] = np.arange(n), arrival
    return Traffic(calls, rows, np.arange(n), np.arange(0), n)


ONE_TOKEN_A_SECOND = Speed(*[0.0] * 22, depth=1)._replace(query=1.0, ranks=1.0, sparse_topk=1e12)


@pytest.mark.parametrize(("law", "cv2"), [("deterministic", 0.0), ("exponential", 1.0)])
def test_single_server_queues(law: str, cv2: float) -> None:
    """Pollaczek and Khinchine: the mean wait in M/G/1 is rho (1 + cv^2) / (2 (1 - rho)) service times."""
    rng, n, rho = np.random.default_rng(5), 400_000, 0.7
    service = np.ones(n) if law == "deterministic" else rng.exponential(1.0, n)
    plan = PLAN._replace(
        prefill_engines=1,
        prefill=ONE_TOKEN_A_SECOND,
        decode=ONE_TOKEN_A_SECOND,
        max_batch=1,
        token_budget=1e9,
        shared_prefix=0.0,
        request_s=0.0,
    )
    found = simulate(plan, single(service, np.cumsum(rng.exponential(1.0 / rho, n))))
    wait = found.calls["end_s"] - found.calls["arrival_s"] - service
    assert wait.min() > -1e-6
    assert wait.mean() == pytest.approx(rho * (1.0 + cv2) / (2.0 * (1.0 - rho)), rel=0.03)
    if law == "exponential":  # the sojourn in M/M/1 is exponential of rate 1 - rho
        sojourn = found.calls["end_s"] - found.calls["arrival_s"]
        assert np.mean(sojourn > 5.0) == pytest.approx(np.exp(-5.0 * (1.0 - rho)), abs=0.01)


def test_random_routing_splits_poisson_arrivals() -> None:
    """Each of four engines is an M/D/1 of its own: mean wait rho / (2 (1 - rho)); one queue for all would wait less."""
    rng, n, rho = np.random.default_rng(6), 200_000, 0.7
    plan = PLAN._replace(
        prefill_engines=4,
        prefill=ONE_TOKEN_A_SECOND,
        decode=ONE_TOKEN_A_SECOND,
        max_batch=1,
        token_budget=1e9,
        shared_prefix=0.0,
        request_s=0.0,
    )
    waits = {}
    for routing in (RANDOM, BALANCED, PREFIX_AWARE):
        traffic = single(np.ones(n), np.cumsum(rng.exponential(0.25 / rho, n)))
        traffic.calls["tie"] = rng.random(n)
        found = simulate(plan._replace(routing=routing), traffic).calls
        waits[routing] = (found["end_s"] - found["arrival_s"] - 1.0).mean()
    assert waits[RANDOM] == pytest.approx(rho / (2.0 * (1.0 - rho)), rel=0.04)
    assert waits[BALANCED] < 0.5 * waits[RANDOM]
    assert waits[PREFIX_AWARE] == pytest.approx(waits[BALANCED], rel=0.1)  # no session comes back


def test_prefixes_are_found_where_routing_looks_for_them() -> None:
    """With ample cache every continued call finds its prefix but under random routing, which meets half of them."""
    hits = [simulate(case(CHUNKED, False, r), small_traffic(400, 2, 12.0, 1)).cache_hit for r in range(4)]
    assert hits[AFFINITY] == hits[PREFIX_AWARE] == 1.0
    assert hits[RANDOM] == pytest.approx(0.5, abs=0.06)


def test_the_same_seed_gives_the_same_simulation() -> None:
    plan = case(SPLIT, True, BALANCED)
    a, b = (simulate(plan, small_traffic(80, 2, 12.0, 3)) for _ in range(2))
    assert np.array_equal(a.calls["end_s"], b.calls["end_s"])
    assert not np.array_equal(
        a.calls["end_s"], simulate(plan, small_traffic(80, 2, 12.0, 4)).calls["end_s"][: len(a.calls)]
    )


PYTHON = """
import sys; sys.path.insert(0, "tests")
import numba
assert numba.config.DISABLE_JIT
from test_simulation import CHUNKED, COLOCATED, SPLIT, case, simulate, small_traffic
for mode in (COLOCATED, CHUNKED, SPLIT):
    print(repr(float(simulate(case(mode, True), small_traffic(20, 2, 12.0, 1)).calls["end_s"].sum())))
"""


def test_runs_as_plain_python_too() -> None:
    """With numba's compilation turned off, the same functions give the same times."""
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PYTHON], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    for line, mode in zip(done.stdout.split(), (COLOCATED, CHUNKED, SPLIT), strict=True):
        compiled = simulate(case(mode, True), small_traffic(20, 2, 12.0, 1)).calls["end_s"].sum()
        assert float(line) == pytest.approx(float(compiled), abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    mode=st.sampled_from([COLOCATED, CHUNKED, SPLIT]),
    engines=st.integers(1, 3),
    depth=st.sampled_from([1, 2, 4]),
    ranks=st.sampled_from([1.0, 2.0]),
    max_batch=st.integers(1, 12),
    budget=st.sampled_from([16.0, 128.0, 2048.0]),
    capacity=st.floats(2200.0, 20000.0),
    routing=st.integers(0, 3),
    preempts=st.booleans(),
    rate=st.floats(0.5, 50.0),
    seed=st.integers(0, 1000),
)
def test_every_call_leaves_and_no_cache_overflows(
    mode: int,
    engines: int,
    depth: int,
    ranks: float,
    max_batch: int,
    budget: float,
    capacity: float,
    routing: int,
    preempts: bool,
    rate: float,
    seed: int,
) -> None:
    """Whatever the deployment: times rise, no call is lost, and no engine ever holds more than its capacity."""
    speed = SPEED._replace(depth=depth, ranks=ranks)
    plan = PLAN._replace(
        mode=mode,
        prefill_engines=engines,
        decode_engines=2 if mode == SPLIT else 0,
        prefill=speed,
        decode=speed,
        max_batch=max_batch,
        token_budget=max(budget, 2.0 * max_batch if mode == CHUNKED else 1.0),
        prefill_capacity=capacity,
        decode_capacity=capacity,
        routing=routing,
        preempts=preempts and mode != SPLIT,
    )
    found = simulate(plan, small_traffic(40, engines, rate, seed, warm=10))
    calls = found.calls
    assert found.finished.all() and found.arrived == found.left == len(calls)
    assert (calls["arrival_s"] >= 0.0).all()
    assert (calls["prefill_start_s"] >= calls["arrival_s"]).all()
    assert (calls["prefill_end_s"] > calls["prefill_start_s"]).all()
    assert (calls["first_s"] >= calls["prefill_end_s"]).all() and (calls["end_s"] >= calls["first_s"]).all()
    assert (found.engines["peak"] <= capacity).all()
    for name in ("load", "batch", "prefilling", "keys", "growing"):
        assert (found.engines[name] == 0).all(), name
    for name in ("reserved", "context", "selected"):
        assert np.abs(found.engines[name]).max() < 1e-6, name


def test_an_unfinished_call_is_counted() -> None:
    """Where the horizon cuts a simulation short, what has not left is late for ever and the throughput falls short."""
    plan = case(CHUNKED, False)._replace(window_end_s=2.0, horizon_s=2.0)
    found = Replications((simulate(plan, small_traffic(400, 2, 200.0, 0)),))
    (run,) = found.runs
    assert found.unfinished == run.measured.sum() - (run.measured & run.finished).sum() > 0
    assert run.arrived == run.measured.sum() and run.left == run.finished.sum()
    assert found.saturated(200.0)
    shares = found.attainment(Bounds(call_s=1e6))
    assert shares["slo"].value == pytest.approx(1.0 - found.unfinished / found.calls)
