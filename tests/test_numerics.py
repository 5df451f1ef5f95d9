"""Small functions against scipy's and their limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from breakeven.models.numerics import (
    gamma_cdf,
    gamma_survival,
    normal_cdf,
    smooth_max,
    table_lookup,
    wait_probability,
)

terms = st.floats(1e-9, 1e9)


@given(terms, terms)
def test_smooth_max_lies_between_the_max_and_19_percent_above(a, b):
    found, largest = float(smooth_max(a, b)), max(a, b)
    assert largest * (1 - 1e-6) <= found <= largest * 2**0.25 * (1 + 1e-6)
    assert found == pytest.approx(float(smooth_max(b, a)), rel=1e-6)


def test_smooth_max_has_finite_derivatives_everywhere():
    for a, b in [(0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (1e-9, 1e9)]:
        assert np.isfinite(jax.grad(smooth_max, argnums=(0, 1))(a, b)).all()


def test_normal_cdf():
    z = np.linspace(-8, 8, 4001)
    assert np.abs(np.asarray(normal_cdf(z)) - stats.norm.cdf(z)).max() < 2e-7


def test_gamma_survival_is_the_incomplete_gamma_function():
    """Documented: absolute error below 3e-5 for shapes 0.05 to 3."""
    shape = np.linspace(0.05, 3.0, 60)[:, None]
    x = np.concatenate([[0.0], np.geomspace(1e-6, 80.0, 600)])[None]
    error = np.asarray(gamma_survival(jnp.float32(x), jnp.float32(shape))) - special.gammaincc(shape, x)
    assert np.abs(error).max() < 3e-5


@pytest.mark.parametrize(("shapes", "allowed"), [((3.0, 200.0), 0.0025), ((0.5, 3.0), 0.035)])
def test_gamma_cdf_by_mean_and_variance(shapes, allowed):
    shape = np.geomspace(shapes[0], shapes[1], 40)[:, None]
    x = np.linspace(0.0, 6.0, 500)[None]  # in means
    error = np.asarray(gamma_cdf(x, 1.0, 1.0 / shape)) - stats.gamma.cdf(x, shape, scale=1.0 / shape)
    assert np.abs(error).max() < allowed


def test_gamma_cdf_is_zero_below_zero_and_a_step_without_variance():
    assert float(gamma_cdf(-1.0, 1.0, 1.0)) == 0.0
    assert np.asarray(gamma_cdf(np.array([0.99, 1.01]), 1.0, 0.0)).round(6).tolist() == [0.0, 1.0]


def erlang_c(servers: int, load: float) -> float:
    """P(wait) of M/M/c by the recursion of Erlang B; `load` in servers."""
    blocked = 1.0
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    return blocked / (1.0 - load / servers * (1.0 - blocked))


def test_one_server_is_busy_with_probability_rho():
    rho = np.linspace(0.01, 0.99, 50)
    assert np.asarray(wait_probability(1.0, rho)) == pytest.approx(rho, rel=1e-5)


@pytest.mark.parametrize("servers", range(2, 17))
def test_sakasegawa_is_close_to_erlang_c(servers):
    """Within 0.055 of the exact probability of waiting at any load, and 2 % of it from 0.9 on, where waits matter."""
    rho = np.linspace(0.05, 0.98, 40)
    exact = np.array([erlang_c(servers, servers * r) for r in rho])
    found = np.asarray(wait_probability(float(servers), rho))
    assert np.abs(found - exact).max() < 0.055
    assert found[rho >= 0.9] == pytest.approx(exact[rho >= 0.9], rel=0.02)


@given(st.floats(1.0, 16.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_waiting_is_likelier_under_more_load_and_with_fewer_servers(servers, a, b):
    low, high = sorted((a, b))
    assert float(wait_probability(servers, low)) <= float(wait_probability(servers, high)) + 1e-6
    assert float(wait_probability(servers + 1.0, high)) <= float(wait_probability(servers, high)) + 1e-6


def test_table_lookup_is_linear_between_and_constant_outside():
    grid, values = jnp.array([0.0, 1.0, 2.0]), jnp.array([1.0, 3.0, 0.0])
    found = table_lookup(grid, values, np.array([-5.0, 0.0, 0.5, 1.0, 1.5, 2.0, 9.0]))
    assert np.asarray(found) == pytest.approx([1.0, 1.0, 2.0, 3.0, 1.5, 0.0, 0.0], abs=5e-3)
