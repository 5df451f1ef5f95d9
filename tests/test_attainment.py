"""Attainment as a distribution function: between 0 and 1, monotone in every bound, consistent with its means."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import ArrayLike

from breakeven.models.attainment import (
    Bound,
    Latency,
    Slo,
    TokenTime,
    attain,
    call_cdf,
    percentile,
    session_cdf,
    shortfall,
    tpot_cdf,
    ttft_cdf,
)
from breakeven.models.performance import performance
from breakeven.models.queueing import Wait
from breakeven.models.tables import resolve

BOUNDS = ("ttft", "tpot", "call", "session")
score = jax.jit(attain)


@pytest.fixture(scope="module")
def latency(study, deployment) -> Latency:
    """Latencies of the feasible candidates."""

    @jax.jit
    def find(deployment, workload, catalog):
        return performance(resolve(deployment, catalog), workload, catalog).latency

    found = find(deployment, study.workload, study.catalog)
    n = len(deployment)
    return jax.tree.map(lambda leaf: leaf[: n // 2] if leaf.shape[:1] == (n,) else leaf, found)


def whole_call_cdf(latency, x_s):
    far = jnp.full_like(x_s, 1e9)
    return call_cdf(latency, far, far, x_s)


CDFS = {"ttft": ttft_cdf, "tpot": tpot_cdf, "call": whole_call_cdf, "session": session_cdf}
jitted = {name: jax.jit(cdf) for name, cdf in CDFS.items()}


def curve(latency, name, grid, unit: ArrayLike = 1.0):
    """The distribution function on a grid of `unit` seconds, (points, n)."""
    one = jnp.asarray(unit) * jnp.ones_like(latency.call_mean_s)
    return np.stack([np.asarray(jitted[name](latency, float(x) * one)) for x in grid])


@pytest.mark.parametrize("name", BOUNDS)
def test_distribution_functions_rise_from_0_to_1(latency, name):
    found = curve(latency, name, [1e-9, *np.geomspace(1e-4, 1e7, 60), 1e9])
    assert found.min() >= 0.0 and found.max() <= 1.0 + 1e-5
    assert (np.diff(found, axis=0) >= -2e-4).all()
    assert found[-1] == pytest.approx(1.0, abs=1e-3)
    if name != "tpot":  # a call of one token has no TPOT and meets any bound
        assert found[0].max() < 1e-3


@pytest.mark.parametrize("name", BOUNDS)
def test_a_larger_bound_is_never_met_by_fewer(study, latency, name):
    """Of calls and of sessions, whatever the other bounds."""
    for per_session in (0.0, 1.0):
        last = np.zeros_like(np.asarray(latency.call_mean_s))
        for factor in (0.3, 0.7, 1.0, 1.1, 2.0, 10.0):
            bound = getattr(study.slo, name)
            wider = dataclasses.replace(bound, bound_s=bound.bound_s * factor)
            slo = dataclasses.replace(study.slo, per_session=jnp.float32(per_session), **{name: wider})
            found = np.asarray(score(latency, slo).slo)
            assert (found >= last - 1e-4).all() and (found >= 0.0).all() and (found <= 1.0).all()
            last = found


def test_all_bounds_together_are_met_by_no_more_than_each(study, latency):
    found = score(latency, study.slo)
    each = np.minimum(np.asarray(found.ttft) * np.asarray(found.tpot), np.asarray(found.call))
    assert (np.asarray(found.calls) <= each + 0.02).all()
    assert (np.asarray(found.slo) <= np.asarray(found.session) + 1e-6).all()


def test_sessions_meet_all_calls_less_often_than_calls_do(study, latency):
    """A session of K calls meets the SLO when all K do: p^K <= p."""
    calls = score(latency, study.slo)
    sessions = score(latency, dataclasses.replace(study.slo, per_session=jnp.float32(1.0)))
    assert (np.asarray(sessions.slo) <= np.asarray(calls.slo) + 1e-6).all()


def test_a_call_bound_that_binds_nothing_leaves_the_other_two(study, latency):
    """TPOT is then integrated with 3 Gauss points: never above the product of the two, rarely 0.1 below it."""
    found = score(latency, dataclasses.replace(study.slo, call=Bound(jnp.float32(1e9), jnp.float32(0.0))))
    missing = np.asarray(found.ttft) * np.asarray(found.tpot) - np.asarray(found.calls)
    assert missing.min() > -0.02
    assert np.mean(missing > 0.1) < 0.03 and abs(missing.mean()) < 0.02


@pytest.mark.parametrize("name", ["ttft", "session"])
def test_mean_is_the_integral_of_the_survival(latency, name):
    """Within 5 %: TTFT from waits and prefill nodes, a session's time from calls and gaps."""
    calls = float(jnp.sum(latency.session_weight * latency.session_calls))
    session = calls * latency.call_mean_s + (calls - 1.0) * latency.gap_mean_s
    mean = np.asarray(latency.ttft_mean_s if name == "ttft" else session)
    grid = np.concatenate([[0.0], np.geomspace(1e-3, 1e3, 600)])  # in means
    late = 1.0 - curve(latency, name, grid, mean)
    assert np.trapezoid(late, grid, axis=0) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("share", [0.5, 0.95])
@pytest.mark.parametrize("name", BOUNDS)
def test_percentile_inverts_the_distribution_function(latency, name, share):
    at = jax.jit(lambda latency: percentile(CDFS[name], latency, share))(latency)
    below, above = (np.asarray(jitted[name](latency, at * factor)) for factor in (0.999, 1.001))
    assert (below <= share + 2e-3).all() and (above >= share - 2e-3).all()


def test_without_waiting_or_spread_times_are_steps():
    """Prefill of 1 s and tokens of 0.1 s, always: bounds below are never met, above always."""
    zero, one = jnp.zeros(1), jnp.ones(1)
    latency = Latency(
        wait=Wait(zero, zero, one),
        brief=Wait(zero, zero, one),
        prefill_s=one[:, None],
        prefill_spread_s=zero[:, None],
        prefill_weight=one[:, None],
        token=TokenTime(0.1 * one[:, None], 1e-6 * one, zero[:, None], zero[:, None], zero[:, None], zero[:, None]),
        steps=jnp.array([10.0]),
        output_weight=one,
        session_calls=one,
        session_weight=one,
        gap_mean_s=zero,
        gap_variance=zero,
        call_mean_s=2.0 * one,
        call_variance=zero,
        first_chunk_s=zero,
        first_chunk_sd_s=zero,
        first_chunk_batch=Wait(zero, zero, one),
        first_chunk_stall=Wait(zero, zero, one),
    )
    for name, exact in {"ttft": 1.0, "tpot": 0.1, "call": 2.0, "session": 2.0}.items():
        assert curve(latency, name, [0.9 * exact, 1.1 * exact])[:, 0] == pytest.approx([0.0, 1.0], abs=1e-3)


def test_a_wait_that_all_calls_have_does_not_cut_off_the_faster_half_of_a_node(latency):
    """Calls of one node, unlike by 0.1 s, of which all wait one second: half of them have done so at the mean."""
    one = jnp.ones_like(latency.call_mean_s)
    wait = Wait(one, one, 1e-4 * one)
    nodes = jnp.ones_like(latency.prefill_s)
    alike = dataclasses.replace(
        latency, wait=wait, brief=Wait(0.0 * one, one, one), prefill_s=nodes, prefill_spread_s=0.1 * nodes,
        first_chunk_s=0.0 * one, first_chunk_sd_s=0.0 * one, first_chunk_batch=wait,
        first_chunk_stall=Wait(0.0 * one, one, one),
    )  # fmt: skip
    found = [np.asarray(ttft_cdf(alike, x * one)) for x in (2.8, 3.0, 3.2)]
    assert found[1] == pytest.approx(0.5, abs=0.1)
    assert (found[0] < 0.1).all() and (found[2] > 0.9).all()


def test_shortfall_is_the_worst_fraction_missed(study, latency):
    met = score(latency, study.slo)
    slo = Slo(study.slo.target, study.slo.per_session, ttft=Bound(jnp.float32(5.0), jnp.float32(0.99)))
    assert np.asarray(shortfall(met, slo)) == pytest.approx(0.99 - np.asarray(met.ttft), abs=1e-6)
    assert (np.asarray(shortfall(met, study.slo)) <= 0.0).all()
