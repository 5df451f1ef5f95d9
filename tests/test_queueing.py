"""Waits against the queues with known answers: M/D/1, M/M/1, M/M/c, and sums of waits."""

import heapq
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate

from breakeven.models.operating_point import joined_share
from breakeven.models.queueing import (
    Moments,
    Wait,
    add_waits,
    autocorrelation_share,
    counted_wait,
    queue_wait,
    uniform_wait,
)

DETERMINISTIC = Moments(jnp.array(1.0), jnp.array(1.0), jnp.array(1.0))
EXPONENTIAL = Moments(jnp.array(1.0), jnp.array(2.0), jnp.array(6.0))  # mean 1 s
LOADS = np.array([0.1, 0.3, 0.5, 0.7, 0.9, 0.95])
ONE = jnp.array(1.0)


def test_md1_mean_wait():
    """rho / (2 (1 - rho)) service times."""
    found = queue_wait(jnp.array(LOADS), DETERMINISTIC, ONE, ONE).average_s
    assert np.asarray(found) == pytest.approx(LOADS / (2.0 * (1.0 - LOADS)), rel=1e-4)


def test_mm1_mean_wait_and_its_exponential_distribution():
    """P(W > t) = rho exp(-(1 - rho) t), exactly."""
    wait = queue_wait(jnp.array(LOADS), EXPONENTIAL, ONE, ONE)
    assert np.asarray(wait.average_s) == pytest.approx(LOADS / (1.0 - LOADS), rel=1e-4)
    assert np.asarray(wait.cv2) == pytest.approx(1.0, rel=1e-3)
    for t in (0.0, 0.3, 1.0, 4.0, 15.0, 60.0):
        exact = LOADS * np.exp(-(1.0 - LOADS) * t)
        assert np.asarray(wait.survival(jnp.array(t))) == pytest.approx(exact, abs=2e-4)


def test_mm1_wait_variance():
    """Var W = rho (2 - rho) / (1 - rho)^2."""
    wait = queue_wait(jnp.array(LOADS), EXPONENTIAL, ONE, ONE)
    assert np.asarray(wait.variance_s2) == pytest.approx(LOADS * (2.0 - LOADS) / (1.0 - LOADS) ** 2, rel=2e-3)


class Played(NamedTuple):
    probability: float  # of waiting
    mean_s: float  # of those that wait
    calls: float  # on an engine


def played(servers: int, load: float, prompts: np.ndarray, decode_s: float = 0.0, calls: int = 40_000) -> Played:
    """Calls that each go to the engine with the fewest of them, wait for prompts drawn from these, and then stay for an
    exponential time, in which later prompts hold them up."""
    rng = np.random.default_rng(1)
    free_s, ends = np.zeros(servers), [list[float]() for _ in range(servers)]
    now, waits, there = 0.0, np.zeros(calls), 0
    gaps = rng.exponential(prompts.mean() / (load * servers), calls)
    stays = rng.exponential(1.0, calls) * decode_s
    for i, (gap, prompt) in enumerate(zip(gaps, rng.choice(prompts, calls), strict=True)):
        now += gap
        for each in ends:
            while each and each[0] <= now:
                heapq.heappop(each)
        first = int(rng.integers(servers))
        k = min(range(servers), key=lambda r: (len(ends[r]), (r - first) % servers))
        there += sum(map(len, ends))
        waits[i] = max(free_s[k] - now, 0.0)
        free_s[k] = now + waits[i] + prompt
        if decode_s:
            ends[k] = [end + prompt for end in ends[k]]
        heapq.heappush(ends[k], free_s[k] + stays[i])
    late = waits > 0.0
    return Played(late.mean(), waits[late].mean(), there / calls / servers)


@pytest.mark.parametrize("servers", [2, 4, 8])
@pytest.mark.parametrize("load", [0.5, 0.8])
def test_calls_wait_at_the_server_with_the_fewest_longer_than_in_one_queue(servers, load):
    """As often and as long as played, within 8 %, and not shorter than the wait of M/M/c."""
    found = queue_wait(jnp.array(load), EXPONENTIAL, jnp.array(float(servers)), jnp.array(1.0))
    seen = played(servers, load, np.random.default_rng(0).exponential(1.0, 10_000))
    one_queue = load ** (np.sqrt(2.0 * (servers + 1.0)) - 1.0) / (servers * (1.0 - load))
    assert float(found.probability) == pytest.approx(seen.probability, rel=0.08)
    assert float(found.mean_s) == pytest.approx(seen.mean_s, rel=0.08)
    assert float(found.average_s) > 0.95 * one_queue


@pytest.mark.parametrize("prompts", [[1.0], [0.5, 0.5, 0.5, 2.5], [0.2] * 19 + [16.2]], ids=["alike", "mixed", "rare"])
@pytest.mark.parametrize(("servers", "decode_s"), [(2, 8.0), (5, 3.0), (5, 30.0), (8, 8.0)])
def test_where_calls_stay_to_decode_their_number_tells_little_of_a_queue(servers, decode_s, prompts):
    """As many wait as played, and as long, within 30 %; more than at servers of nothing else."""
    load, seconds = 0.3, np.array(prompts)
    seen = played(servers, load, seconds, decode_s)
    rate, r, calls = (jnp.array([x]) for x in (load / seconds.mean(), float(servers), seen.calls))
    nodes = jnp.array([seconds]), jnp.full((1, len(seconds)), 1.0 / len(seconds))
    found = counted_wait(rate, *nodes, r, calls, joined_share(calls, r, jnp.ones(1)))
    assert float(found.probability[0]) == pytest.approx(seen.probability, rel=0.3)
    assert float(found.mean_s[0]) == pytest.approx(seen.mean_s, rel=0.3)
    assert seen.probability > played(servers, load, seconds).probability


def test_few_short_prompts_are_met_as_often_as_calls_come():
    """joined x rho, and half of a prompt is left."""
    args = jnp.array([1e-4]), jnp.array([[1.0, 3.0]]), jnp.array([[0.5, 0.5]]), jnp.array([4.0]), jnp.array([2.0])
    found = counted_wait(*args, jnp.array([0.7]))
    assert float(found.probability[0]) == pytest.approx(0.7 * 2e-4, rel=1e-3)
    assert float(found.mean_s[0]) == pytest.approx(0.5 * 5.0 / 2.0, rel=1e-3)


@given(st.floats(0.05, 0.95), st.floats(1.0, 5.0), st.floats(1.01, 30.0))
def test_burstier_arrivals_wait_longer(rho, servers, arrival_cv2):
    """By (c_a^2 + c_s^2) / (1 + c_s^2): (c_a^2 + 1) / 2 for exponential service."""
    args = jnp.array(rho), EXPONENTIAL, jnp.array(servers)
    poisson, bursty = queue_wait(*args, ONE), queue_wait(*args, jnp.array(arrival_cv2))
    assert float(bursty.average_s / poisson.average_s) == pytest.approx((arrival_cv2 + 1.0) / 2.0, rel=1e-4)


def test_a_saturated_queue_has_a_finite_wait_no_shorter_than_a_busy_one():
    waits = queue_wait(jnp.array([0.9, 0.99, 1.0, 50.0]), EXPONENTIAL, ONE, ONE).average_s
    assert np.isfinite(waits).all() and (np.diff(np.asarray(waits)) >= 0.0).all()


parts = st.builds(
    lambda p, m, c: Wait(jnp.array(p), jnp.array(m), jnp.array(c)),
    st.floats(0.01, 0.99),
    st.floats(1e-3, 1e2),
    st.floats(0.1, 4.0),
)


@given(parts, parts, parts)
def test_the_sum_of_waits_keeps_mean_and_variance(a, b, c):
    """Means and variances of independent waits add; no wait when there is none in any."""
    total = add_waits(a, b, c)
    assert float(total.average_s) == pytest.approx(float(a.average_s + b.average_s + c.average_s), rel=1e-4)
    variance = float(a.variance_s2 + b.variance_s2 + c.variance_s2)
    assert float(total.variance_s2) == pytest.approx(variance, rel=1e-2)
    none = float((1.0 - a.probability) * (1.0 - b.probability) * (1.0 - c.probability))
    assert float(total.probability) == pytest.approx(1.0 - none, abs=1e-6)


@given(parts)
def test_a_wait_alone_is_its_own_sum(wait):
    assert [float(x) for x in add_waits(wait)] == pytest.approx([float(x) for x in wait], rel=1e-3)


@given(parts, st.floats(0.0, 1e3), st.floats(0.0, 1e3))
def test_survival_falls_from_the_probability_of_waiting(wait, a, b):
    low, high = sorted((a, b))
    assert float(wait.survival(jnp.array(0.0))) == pytest.approx(float(wait.probability), abs=2e-3)
    assert float(wait.survival(jnp.array(high))) <= float(wait.survival(jnp.array(low))) + 2e-4


def test_uniform_wait_has_the_moments_of_a_uniform():
    wait = uniform_wait(ONE, jnp.array(6.0))
    assert float(wait.average_s) == pytest.approx(3.0) and float(wait.variance_s2) == pytest.approx(3.0, rel=1e-5)


def test_moments_scale_and_mix_as_raw_moments_do():
    assert [float(m) for m in EXPONENTIAL.scaled(jnp.array(2.0))] == [2.0, 8.0, 48.0]
    assert [float(m) for m in DETERMINISTIC.mixed(EXPONENTIAL, jnp.array(0.5))] == [1.0, 1.5, 3.5]


def test_autocorrelation_share_is_the_variance_left_by_averaging():
    """2/u^2 times the integral of (u - x) exp(-x); 1 for no averaging, 2/u for a long one."""
    for u in (1e-3, 0.04, 0.06, 1.0, 5.0, 40.0):
        exact = 2.0 / u**2 * integrate.quad(lambda x, u=u: (u - x) * np.exp(-x), 0.0, u)[0]
        assert float(autocorrelation_share(jnp.array(u))) == pytest.approx(exact, rel=2e-3)
    assert float(autocorrelation_share(jnp.array(0.0))) == pytest.approx(1.0)
