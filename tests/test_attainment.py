"""Attainment as a distribution function: between 0 and 1, monotone in every bound, consistent with its means."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import ArrayLike

from breakeven.models.attainment import (
    SMOOTH_TOKEN,
    Bound,
    FirstChunk,
    Latency,
    Slo,
    Stall,
    TokenTime,
    Varying,
    attain,
    call_cdf,
    percentile,
    session_cdf,
    shortfall,
    tpot_cdf,
    ttft_cdf,
)
from breakeven.models.numerics import gamma_cdf
from breakeven.models.performance import performance
from breakeven.models.queueing import Wait
from breakeven.models.tables import resolve

NOTHING = Varying(jnp.zeros((1, 1)), jnp.zeros((1, 1)))
NEVER = Stall(jnp.zeros((1, 1)), NOTHING)
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
    assert np.trapezoid(late, grid, axis=0) == pytest.approx(1.0, rel=0.02)


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
        turn_s=zero,
        turn_variance=zero,
        prefill_s=one[:, None],
        prefill_spread_s=zero[:, None],
        prefill_weight=one[:, None],
        token=TokenTime(0.1 * one[:, None], NOTHING, NOTHING, NEVER, NEVER),
        steps=jnp.array([10.0]),
        output_weight=one,
        session_calls=one,
        session_weight=one,
        gap_mean_s=zero,
        gap_variance=zero,
        call_mean_s=2.0 * one,
        call_variance=zero,
        chunk=FirstChunk(one, zero, zero, Wait(zero, zero, one)),
        brief_chunk=FirstChunk(zero, zero, zero, Wait(zero, zero, one)),
        brief_output=zero,
    )
    for name, exact in {"ttft": 1.0, "tpot": 0.1, "call": 2.0, "session": 2.0}.items():
        assert curve(latency, name, [0.9 * exact, 1.1 * exact])[:, 0] == pytest.approx([0.0, 1.0], abs=1e-3)


def test_a_wait_that_all_calls_have_does_not_cut_off_the_faster_half_of_a_node(latency):
    """Calls of one node, unlike by 0.1 s, of which all wait one second: half of them have done so at the mean."""
    one = jnp.ones_like(latency.call_mean_s)
    none = Wait(0.0 * one, one, one)
    chunk = FirstChunk(one, one, 1e-4 * one, none)
    nodes = jnp.ones_like(latency.prefill_s)
    alike = dataclasses.replace(
        latency, wait=Wait(one, one, 1e-4 * one), brief=none, turn_s=0.0 * one,
        turn_variance=0.0 * one, prefill_s=nodes, prefill_spread_s=0.1 * nodes, chunk=chunk,
        brief_chunk=chunk._replace(share=0.0 * one),
    )  # fmt: skip
    found = [np.asarray(ttft_cdf(alike, x * one)) for x in (2.8, 3.0, 3.2)]
    assert found[1] == pytest.approx(0.5, abs=0.1)
    assert (found[0] < 0.1).all() and (found[2] > 0.9).all()


def test_short_outputs_are_shown_before_long_ones(latency):
    """Half of the calls show their first chunk at once, half after five seconds: TTFT has no values between."""
    one = jnp.ones_like(latency.call_mean_s)
    none = Wait(0.0 * one, one, one)
    late = FirstChunk(0.5 * one, 5.0 * one, 1e-4 * one, none)
    nodes = jnp.ones_like(latency.prefill_s)
    halves = dataclasses.replace(
        latency, wait=none, brief=none, turn_s=0.0 * one,
        turn_variance=0.0 * one, prefill_s=nodes, prefill_spread_s=1e-3 * nodes, chunk=late,
        brief_chunk=late._replace(shown_s=0.0 * one),
    )  # fmt: skip
    for x, share in ((0.8, 0.0), (1.2, 0.5), (5.8, 0.5), (6.2, 1.0)):
        assert np.asarray(ttft_cdf(halves, x * one)) == pytest.approx(share, abs=0.01)
    assert np.asarray(halves.ttft_mean_s) == pytest.approx(3.5, rel=1e-5)


def test_gamma_parts_of_one_scale_are_one_gamma_part():
    """Gamma variables of one scale add up to a gamma variable, of the summed means, and leave the fixed part alone."""
    parts = Varying(jnp.array([[2.0]]), jnp.array([[1.0]])), Varying(jnp.array([[4.0]]), jnp.array([[2.0]]))
    (_, base_s, plain), *_ = TokenTime(jnp.ones((1, 1)), *parts, NEVER, NEVER).parts()
    smooth = (SMOOTH_TOKEN * 7.0) ** 2 / 3.0
    assert float(plain.variance[0, 0]) == pytest.approx(3.0 + smooth, rel=1e-5)
    assert float(plain.mean_s[0, 0]) == pytest.approx(6.0, rel=3e-3)
    assert float(base_s[0, 0] + plain.mean_s[0, 0]) == pytest.approx(7.0, rel=1e-5)


def test_contexts_spread_tpot_about_its_mean():
    """A lone sequence's TPOT moves with its own tokens only: half of the calls are below the mean, nearly, and none is
    far above (all of it was taken for a rare and long delay by others)."""
    one = jnp.ones((1, 1))
    own, batch = Varying(4e-4 * one, 1e-8 * one), Varying(1e-5 * one, 1e-12 * one)
    (_, base_s, gamma), *_ = TokenTime(4e-3 * one, own, batch, NEVER, NEVER).parts()
    below = [float(gamma_cdf(x - base_s, *gamma)[0, 0]) for x in (4.2e-3, 4.41e-3, 4.7e-3)]
    assert below[0] < 0.05 and below[1] == pytest.approx(0.5, abs=0.06) and below[2] > 0.99


def test_rare_stalls_leave_the_others_as_they_are():
    """Common stalls of a millisecond and rare ones of a second: nine calls of ten have a TPOT near the common one."""
    one = jnp.ones((1, 1))
    common = Stall(one, Varying(1e-3 * one, 1e-8 * one))
    rare = Stall(0.1 * one, Varying(one, 0.1 * one))
    token = TokenTime(1e-2 * one, NOTHING, NOTHING, common, rare)

    def below(x):
        return sum(float((share * gamma_cdf(x - base, *gamma))[0, 0]) for share, base, gamma in token.parts())

    assert below(0.0105) < 0.01 and below(0.0115) == pytest.approx(0.9, abs=0.01)
    assert float(token.mean_s[0, 0]) == pytest.approx(0.111, rel=1e-5)
    assert float(token.total_variance[0, 0]) == pytest.approx(1e-8 + 0.1 * 1.1 - 0.01, rel=1e-4)


def test_shortfall_is_the_worst_fraction_missed(study, latency):
    met = score(latency, study.slo)
    slo = Slo(study.slo.target, study.slo.per_session, ttft=Bound(jnp.float32(5.0), jnp.float32(0.99)))
    assert np.asarray(shortfall(met, slo)) == pytest.approx(0.99 - np.asarray(met.ttft), abs=1e-6)
    assert (np.asarray(shortfall(met, study.slo)) <= 0.0).all()
