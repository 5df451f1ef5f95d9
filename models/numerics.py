"""Small smooth functions in 32-bit floats: fast where the library's are slow, checked against them in tests."""

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

TINY = 1e-30
T = TypeVar("T")


@jax.custom_jvp
def smooth_max(a: ArrayLike, b: ArrayLike) -> Array:
    r"""Smooth roofline, :math:`(a^4 + b^4)^{1/4}`: the larger term far from the ridge, 19 % above it on the ridge.

    Any unit, both the same and non-negative. The fourth-order norm costs two square roots and its
    overlap loss at the ridge is what partial overlap of traffic and arithmetic shows on real kernels.

    >>> round(float(smooth_max(3.0, 0.0)), 6)
    3.0
    """
    a, b = jnp.asarray(a), jnp.asarray(b)
    high, low = jnp.maximum(a, b), jnp.minimum(a, b)
    ratio = jnp.square(low / jnp.where(high > 0.0, high, 1.0))  # keeps the derivatives finite where both are 0
    return high * jnp.sqrt(jnp.sqrt(1.0 + jnp.square(ratio)))


@smooth_max.defjvp
def _smooth_max_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    """(a / s)^3 and (b / s)^3: a third of what tracing through maximum and minimum costs."""
    value = smooth_max(*primals)
    scale = 1.0 / jnp.where(value > 0.0, value, 1.0)
    slopes = ((x * scale) ** 3 for x in primals)
    return value, sum((slope * x for slope, x in zip(slopes, tangents, strict=True)), jnp.zeros_like(value))


@jax.custom_jvp
def cube_root(x: ArrayLike) -> Array:
    """Cube root of positive 32-bit floats: a third of the exponent, then two steps of Halley's method.

    Relative error below 3e-7; six times as fast as the library's on a CPU.

    >>> round(float(cube_root(27.0)), 5)
    3.0
    """
    x = jnp.asarray(x)
    if x.dtype != jnp.float32:
        return jnp.cbrt(x)
    third = lax.bitcast_convert_type(x, jnp.int32).astype(jnp.float32) * np.float32(1.0 / 3.0)
    root = lax.bitcast_convert_type(third.astype(jnp.int32) + 709958130, jnp.float32)
    for _ in range(2):
        cube = root * root * root
        root = root * (cube + 2.0 * x) / (2.0 * cube + x)
    return root


@cube_root.defjvp
def _cube_root_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    root = cube_root(*primals)
    return root, root / (3.0 * primals[0]) * tangents[0]


def once(value: ArrayLike, positive: ArrayLike) -> Array:
    """`value`, computed once before it is broadcast: XLA repeats cheap work for every element that reads it, but never
    a division, here by `positive` over itself."""
    ratio = lax.stop_gradient(jnp.asarray(positive))
    return jnp.asarray(value) / (ratio / ratio)


def power(base: ArrayLike, exponent: ArrayLike) -> Array:
    """`base ** exponent` for a base of 0 or more, by exponential and logarithm: the library's is four times as slow."""
    return jnp.exp(jnp.log(jnp.maximum(base, TINY)) * exponent)


def normal_cdf(z: ArrayLike) -> Array:
    """Standard normal distribution function; absolute error below 2e-7 in 32-bit floats."""
    return 0.5 + 0.5 * jnp.maximum(lax.erf(jnp.asarray(z) * 0.70710678), -1.0)  # rounded below -1 by some compilers


def gamma_survival(x: ArrayLike, shape: ArrayLike) -> Array:
    r"""Regularised upper incomplete gamma :math:`Q(k, x)` for shapes 0.05 to 3 and x >= 0.

    A 14-term series below x = k + 2 and a continued fraction of two terms above it (Abramowitz and Stegun 6.5.29 and
    6.5.31); absolute error below 3e-5, some tens of times faster than the library's on a CPU. What depends on the
    shape alone is computed apart, once for all x that share it.
    """
    k = jnp.asarray(shape)
    x = jnp.clip(x, 1e-20, 100.0)
    front = jnp.exp(k * jnp.log(x) - x - once(lax.lgamma(k), k))
    terms = [1.0 / k]
    for n in range(1, 15):
        terms.append(terms[-1] / (k + n))
    low = jnp.minimum(x, k + 2.0)
    series = terms[-1]
    for term in terms[-2::-1]:
        series = series * low + term
    last = jnp.maximum(x, k + 2.0) + 5.0 - k
    second = last * (last - 2.0) - 2.0 * (2.0 - k)
    fraction = (last - 4.0) - (1.0 - k) * last / second
    survival = jnp.clip(jnp.where(x < k + 2.0, 1.0 - front * series, front / fraction), 0.0, 1.0)
    return jnp.where(x <= 1e-20, 1.0, survival)


def gamma_cdf(x: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> Array:
    """Gamma distribution function by mean and variance (Wilson and Hilferty 1931); 0 below zero.

    The cube root of a gamma variable is nearly normal: error at most 0.0023 for shapes of 3 and more,
    0.035 near a shape of one half.
    """
    mean, spread = _cube_root_spread(mean, variance)
    root = cube_root(jnp.maximum(jnp.asarray(x) / mean, 1e-12))  # its slope is infinite at 0
    return jnp.where(jnp.asarray(x) > 0.0, normal_cdf((root - 1.0 + spread) / jnp.sqrt(spread)), 0.0)


def gamma_quantile(z: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> Array:
    """The gamma quantile at probability Phi(z): `gamma_cdf` inverted."""
    mean, spread = _cube_root_spread(mean, variance)
    return mean * jnp.maximum(1.0 - spread + jnp.asarray(z) * jnp.sqrt(spread), 0.0) ** 3


def _cube_root_spread(mean: ArrayLike, variance: ArrayLike) -> tuple[Array, Array]:
    """(mean, variance of the cube root over the cube root of the mean)."""
    mean = jnp.maximum(mean, 1e-12)  # its square is a number in 32 bit
    return mean, jnp.maximum(variance, 1e-8 * mean * mean) / (9.0 * mean * mean)


def wait_probability(servers: ArrayLike, utilization: ArrayLike) -> Array:
    r"""Probability of waiting in M/M/c for any real c >= 1, :math:`\rho^{\sqrt{2(c+1)}-1}` (Sakasegawa 1977).

    Exact at c = 1. The mean wait that belongs to it is P(wait) / (c (1 - rho)) service times.
    """
    rho = jnp.clip(utilization, 1e-6, 1.0)
    return power(rho, jnp.sqrt(2.0 * (jnp.asarray(servers) + 1.0)) - 1.0)


def choose(condition: Array, a: T, b: T) -> T:
    """`a` where the condition holds, else `b`: arrays, or alike trees of them."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)


def table_lookup(grid: ArrayLike, values: ArrayLike, x: ArrayLike) -> Array:
    """Linear interpolation of `values` on a uniform `grid`, held constant outside it."""
    grid, values = jnp.asarray(grid), jnp.asarray(values)
    step = (grid[-1] - grid[0]) / (grid.shape[0] - 1)
    position = jnp.clip((jnp.asarray(x) - grid[0]) / step, 0.0, grid.shape[0] - 1.001)
    left = position.astype(jnp.int32)
    share = position - left
    return values[left] * (1.0 - share) + values[left + 1] * share
