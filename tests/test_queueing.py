"""Waits against the queues with known answers: M/D/1, M/M/1, M/M/c, and sums of waits."""

from collections import deque

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate

from breakeven.models.queueing import (
    Moments,
    Wait,
    add_waits,
    autocorrelation_share,
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


def shortest_queue_wait_s(servers: int, load: float, calls: int = 40_000) -> float:
    """Mean wait of exponential calls of one second that each go to the server with the fewest of them."""
    rng = np.random.default_rng(1)
    queues: list[deque[float]] = [deque() for _ in range(servers)]
    now, waited = 0.0, 0.0
    for gap, work in zip(rng.exponential(1.0 / (load * servers), calls), rng.exponential(1.0, calls), strict=True):
        now += gap
        for queue in queues:
            while queue and queue[0] <= now:
                queue.popleft()
        queue = min(queues, key=len)
        start = max(now, queue[-1]) if queue else now
        waited += start - now
        queue.append(start + work)
    return waited / calls


@pytest.mark.parametrize("servers", [2, 4, 8])
@pytest.mark.parametrize("load", [0.5, 0.8])
def test_calls_wait_at_the_server_with_the_fewest_longer_than_in_one_queue(servers, load):
    """Within a fifth of a mean service time of what is simulated, and not shorter than the wait of M/M/c."""
    found = float(queue_wait(jnp.array(load), EXPONENTIAL, jnp.array(float(servers)), jnp.array(1.0)).average_s)
    one_queue = load ** (np.sqrt(2.0 * (servers + 1.0)) - 1.0) / (servers * (1.0 - load))
    assert found == pytest.approx(shortest_queue_wait_s(servers, load), abs=0.2)
    assert found > 0.95 * one_queue


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
