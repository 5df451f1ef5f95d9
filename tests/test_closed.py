"""A closed population without gaps, as benchmarks drive it: laws that simulation confirmed, and Little's law."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from breakeven.models.operating_point import decode_step_at
from breakeven.models.performance import performance
from breakeven.models.sessions import session_spec
from breakeven.models.workload import workload

PROMPT, OUTPUT = 2048, 512
POPULATION = [1.0, 2.0, 4.0, 16.0, 64.0, 128.0]
FULL = 40_000.0  # far more than the cache holds
settled = jax.jit(performance)


@pytest.fixture(scope="module", params=["colocated", "chunked"])
def served(request, one):
    """Performance by population, (populations,), of one deployment; and the workload and model it is of."""
    resolved, made = one(topologies=request.param, tensor_parallel=4, accelerators=["h200-sxm"], max_batch=4096)
    spec = session_spec({"first_prompt_tokens": PROMPT, "output_tokens": OUTPUT})
    load = dataclasses.replace(
        workload(spec, 1e6, sessions=1000),
        concurrent_sessions=jnp.array([*POPULATION, FULL]),
        first_wave_share=jnp.float32(0.0),
    )
    n = len(POPULATION) + 1
    many = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (n, *leaf.shape[1:])), resolved)

    def run(load):
        return settled(many, load, made.catalog)

    return run(load), run, load, made.catalog


def test_tokens_take_a_step_and_their_share_of_the_others_prefill(served):
    """TPOT = D(N) + (N - 1) p / O: every other request pushes one prefill into my O steps. In chunks p shares the
    step's fixed part with decode; a batch of prompts shares some of it."""
    found, _, load, catalog = served
    n = load.concurrent_sessions[:-1]
    step = decode_step_at(found.pools, catalog.llm, load.concurrent_sessions, load.decode_context).total_s[:-1]
    p = found.pools.resident.first[:-1]
    fixed = found.point.fixed_s[:-1]
    tpot = found.latency.tpot_mean_s[:-1]
    apart = step + (n - 1.0) * p / load.mean_steps
    together = step + (n - 1.0) * (p - fixed) / load.mean_steps
    assert (np.asarray(tpot) <= 1.01 * np.asarray(apart)).all()
    assert (np.asarray(tpot) >= 0.99 * np.asarray(together)).all()


def test_one_session_alone_never_waits_for_others(served):
    found, _, load, catalog = served
    step = decode_step_at(found.pools, catalog.llm, load.concurrent_sessions, load.decode_context).total_s[0]
    assert float(found.latency.tpot_mean_s[0]) == pytest.approx(float(step), rel=0.005)


def test_littles_law_also_when_the_cache_is_full(served):
    found, _, load, _ = served
    live = found.session_rate * found.latency.call_mean_s
    assert np.asarray(live) == pytest.approx(np.asarray(load.concurrent_sessions), rel=0.02)
    assert float(found.latency.ttft_mean_s[-1]) > 50.0 * float(found.latency.ttft_mean_s[-2])


@pytest.mark.parametrize(("limit", "excess"), [(64, 0.0), (32, 1.0), (16, 3.0)])
def test_a_population_waits_for_room_only_where_it_does_not_fit(one, limit, excess):
    """64 calls in flight where b fit: each waits 64 / b - 1 of a call's time in the engine, and none where all fit."""
    resolved, made = one(topologies="colocated", tensor_parallel=4, accelerators=["h200-sxm"], max_batch=limit)
    spec = session_spec({"first_prompt_tokens": 64, "output_tokens": OUTPUT})
    load = dataclasses.replace(workload(spec, 1e6, sessions=1000), concurrent_sessions=jnp.float32(64.0))
    found = settled(resolved, load, made.catalog)
    decode_s = float(found.latency.tpot_mean_s[0]) * (OUTPUT - 1.0)
    waited_s = float(found.latency.wait.average_s[0])
    assert waited_s == pytest.approx(excess * decode_s, rel=0.1, abs=0.1 * decode_s)


def test_a_first_wave_waits_for_half_of_its_others(served):
    """Prompts that one token budget holds share the fixed part of their step."""
    found, run, load, catalog = served
    wave = run(dataclasses.replace(load, first_wave_share=jnp.float32(0.1)))
    more = np.asarray(wave.latency.ttft_mean_s - found.latency.ttft_mean_s)[:-1]
    others, first = np.asarray(POPULATION) - 1.0, np.asarray(found.point.service.first)[:-1]
    marginal = np.asarray(found.pools.marginal_s)[:-1]
    mates = np.clip(np.asarray(found.pools.token_budget)[:-1] / PROMPT, 1.0, others + 1.0)
    half = 0.5 * others * (marginal + np.maximum(first - marginal, 0.0) / mates)
    assert more == pytest.approx(0.1 * half * float(catalog.engine.burst_factor), abs=1e-4, rel=1e-2)
    assert np.array_equal(wave.latency.tpot_mean_s, found.latency.tpot_mean_s)


def test_the_first_chunk_delays_ttft_but_not_the_call(served):
    found, _, load, catalog = served
    expected = (
        catalog.engine.first_chunk_steps * found.latency.tpot_mean_s + catalog.engine.crowd_s * load.concurrent_sessions
    )
    seen = found.latency
    assert np.asarray(seen.first_chunk_s) == pytest.approx(np.asarray(expected), rel=1e-3)
    waited = seen.waiting_s
    parts = waited + jnp.sum(seen.prefill_weight * seen.prefill_s, -1)
    call = np.asarray(parts) + (OUTPUT - 1.0) * np.asarray(found.latency.tpot_mean_s)
    assert np.asarray(found.latency.call_mean_s) == pytest.approx(call, rel=1e-3)
