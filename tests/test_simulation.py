"""The simulation: equal to a plain step-by-step reference, exact queues, laws, and agreement with the model."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation_reference import Reference

from breakeven.models.simulation import Traffic, simulate
from breakeven.models.simulation.state import CHUNKED, COLOCATED, SPLIT, Plan, Speed, new_calls, new_sessions

SPEED = Speed(
    step=4e-3,
    attention_weight=3e-3,
    attention_token=2e-5,
    ffn_weight=5e-3,
    ffn_token=4e-5,
    expert=6e-3,
    expert_token=1e-5,
    log_expert_miss=float(np.log1p(-0.05)),
    collective_token=2e-6,
    sequence=3e-5,
    context=1e-7,
    selected_context=2e-7,
    prefill_context=1e-8,
    pair=1e-9,
    selected_pair=2e-9,
    window_token=1e-6,
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
    balanced=False,
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


def case(mode: int, limited: bool, balanced: bool) -> Plan:
    split = mode == SPLIT
    return PLAN._replace(
        mode=mode,
        decode_engines=2 if split else 0,
        balanced=balanced,
        max_batch=4 if limited else 64,
        prefill_capacity=3500.0 if limited else 1e9,
        decode_capacity=3000.0 if limited else 1e9,
    )


@pytest.mark.parametrize("mode", [COLOCATED, CHUNKED, SPLIT])
@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("balanced", [False, True])
def test_equal_to_the_step_by_step_reference(mode: int, limited: bool, balanced: bool) -> None:
    """To 1e-9 s in every time of every call, with and without limits on batch and cache."""
    plan = case(mode, limited, balanced)
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
