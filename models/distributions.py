"""Random variables of a workload as data: what a table of constants, fits and quantiles means.

Every distribution gives values for uniforms (`invert`), samples, its distribution function and
:math:`E[\\min(X, t)]`, from which its mean and the means of its clipped forms follow.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from breakeven.models.inputs import InputError, known_fields, number

Floats = NDArray[np.float64]

_NORMAL = NormalDist()
_erfc = np.frompyfunc(math.erfc, 1, 1)
_normal_quantile = np.frompyfunc(_NORMAL.inv_cdf, 1, 1)


def _survival(z: ArrayLike) -> Floats:
    r""":math:`1 - \Phi(z)` of the standard normal."""
    return 0.5 * np.asarray(_erfc(np.asarray(z, float) / math.sqrt(2.0)), float)


def _quantile(u: ArrayLike) -> Floats:
    """Standard normal quantiles."""
    return np.asarray(_normal_quantile(np.clip(u, 1e-300, 1.0 - 1e-16)), float)


def _times(t: ArrayLike, share: Floats) -> Floats:
    """t · share, where an infinite t carries a share of nothing."""
    return np.where(share > 0.0, t, 0.0) * share


def _log(t: ArrayLike) -> Floats:
    return np.log(np.maximum(t, 1e-300))


class Distribution(ABC):
    """A random variable X, in the unit of its field."""

    @abstractmethod
    def invert(self, u: ArrayLike) -> Floats:
        """Values of X for uniforms u in [0, 1); a mixture gives each part its own stretch of u."""

    @abstractmethod
    def cdf(self, x: ArrayLike) -> Floats:
        """P(X <= x)."""

    @abstractmethod
    def mean_min(self, t: ArrayLike) -> Floats:
        r""":math:`E[\min(X, t)]`; its slope is P(X > t)."""

    def sample(self, rng: np.random.Generator, size: int) -> Floats:
        """`size` independent values."""
        return self.invert(rng.random(size))

    def mean(self) -> float:
        """E[X]."""
        return float(self.mean_min(np.inf))


@dataclass(frozen=True)
class Constant(Distribution):
    """X = value."""

    value: float

    def invert(self, u: ArrayLike) -> Floats:
        return np.full(np.shape(u), self.value)

    def cdf(self, x: ArrayLike) -> Floats:
        return np.where(np.asarray(x) >= self.value, 1.0, 0.0)

    def mean_min(self, t: ArrayLike) -> Floats:
        return np.minimum(t, self.value)


@dataclass(frozen=True)
class Uniform(Distribution):
    r"""X uniform in [low, high]: :math:`E[\min(X,t)] = t - (t-a)^2 / 2(b-a)` inside."""

    low: float
    high: float

    def invert(self, u: ArrayLike) -> Floats:
        return self.low + (self.high - self.low) * np.asarray(u, float)

    def cdf(self, x: ArrayLike) -> Floats:
        return np.clip((np.asarray(x, float) - self.low) / (self.high - self.low), 0.0, 1.0)

    def mean_min(self, t: ArrayLike) -> Floats:
        inside = np.clip(t, self.low, self.high)
        mean = inside - np.square(inside - self.low) / (2.0 * (self.high - self.low))
        return np.where(np.asarray(t) < self.low, t, mean)


@dataclass(frozen=True)
class Normal(Distribution):
    r"""X ~ N(m, s²): :math:`E[\min(X,t)] = m\Phi(z) - s\varphi(z) + t(1-\Phi(z))`, z = (t-m)/s."""

    location: float
    deviation: float

    def invert(self, u: ArrayLike) -> Floats:
        return self.location + self.deviation * _quantile(u)

    def cdf(self, x: ArrayLike) -> Floats:
        return _survival((self.location - np.asarray(x, float)) / self.deviation)

    def mean_min(self, t: ArrayLike) -> Floats:
        z = np.clip((np.asarray(t, float) - self.location) / self.deviation, -1e3, 1e3)
        density = np.exp(-0.5 * np.square(z)) / math.sqrt(2.0 * math.pi)
        below = self.location * _survival(-z) - self.deviation * density
        return below + _times(t, _survival(z))

    def sample(self, rng: np.random.Generator, size: int) -> Floats:
        return self.location + self.deviation * rng.standard_normal(size)


@dataclass(frozen=True)
class Lognormal(Distribution):
    r"""ln X ~ N(mu, sigma²); with z = (ln t - mu)/sigma,

    .. math:: E[\min(X,t)] = e^{\mu+\sigma^2/2}\,\Phi(z-\sigma) + t\,(1-\Phi(z))
    """

    mu: float
    sigma: float

    def _z(self, t: ArrayLike) -> Floats:
        return (_log(t) - self.mu) / self.sigma

    def invert(self, u: ArrayLike) -> Floats:
        return np.exp(self.mu + self.sigma * _quantile(u))

    def cdf(self, x: ArrayLike) -> Floats:
        return _survival(-self._z(x))

    def mean_min(self, t: ArrayLike) -> Floats:
        z = self._z(t)
        mean = math.exp(self.mu + 0.5 * self.sigma**2)
        return mean * _survival(self.sigma - z) + _times(t, _survival(z))

    def sample(self, rng: np.random.Generator, size: int) -> Floats:
        return np.exp(self.mu + self.sigma * rng.standard_normal(size))


@dataclass(frozen=True)
class Exponential(Distribution):
    r"""X exponential with mean m: :math:`E[\min(X,t)] = m(1-e^{-t/m})`."""

    scale: float

    def invert(self, u: ArrayLike) -> Floats:
        return -self.scale * np.log1p(-np.asarray(u, float))

    def cdf(self, x: ArrayLike) -> Floats:
        return -np.expm1(-np.maximum(x, 0.0) / self.scale)

    def mean_min(self, t: ArrayLike) -> Floats:
        return np.where(np.asarray(t) < 0.0, t, self.scale * self.cdf(t))


@dataclass(frozen=True)
class Quantiles(Distribution):
    r"""Measured quantiles x at probabilities p (0 to 1), ln X linear in p between them; equal x are an atom.

    A piece from x to y holds :math:`\Delta p` and the mean (y - x)/ln(y/x).
    """

    p: tuple[float, ...]
    x: tuple[float, ...]

    def invert(self, u: ArrayLike) -> Floats:
        return np.exp(np.interp(np.asarray(u, float), self.p, np.log(self.x)))

    def cdf(self, x: ArrayLike) -> Floats:
        grid, p, ln = np.asarray(self.x), np.asarray(self.p), np.log(self.x)
        right = np.searchsorted(grid, x, side="right")
        j = np.clip(right, 1, len(grid) - 1)
        width = np.where(ln[j] > ln[j - 1], ln[j] - ln[j - 1], 1.0)
        inside = p[j - 1] + (p[j] - p[j - 1]) * (_log(x) - ln[j - 1]) / width
        return np.where(right == 0, 0.0, np.where(right == len(grid), 1.0, inside))

    def mean_min(self, t: ArrayLike) -> Floats:
        share, low, high = np.diff(self.p), np.asarray(self.x[:-1]), np.asarray(self.x[1:])
        top = np.clip(np.asarray(t, float)[..., None], low, high)
        ratio = np.where(high > low, np.log(high / low), 1.0)
        below = np.where(high > low, (top - low) / ratio, np.minimum(low, top))
        reached = np.where(high > low, np.log(top / low) / ratio, 1.0)
        above = np.minimum(np.asarray(t, float)[..., None], high) * (1.0 - reached)
        atom = np.minimum(np.asarray(t, float)[..., None], low)
        return np.sum(share * np.where(high > low, below + above, atom), axis=-1)


@dataclass(frozen=True, eq=False)
class Empirical(Distribution):
    r"""The values themselves, each as likely: :math:`E[\min(X,t)] = (\sum_{x<=t} x + t \cdot |x>t|) / n`."""

    rising: Floats

    @classmethod
    def of(cls, values: ArrayLike) -> "Empirical":
        """The distribution of at least one value, in any order."""
        return cls(np.sort(np.asarray(values, float)))

    def invert(self, u: ArrayLike) -> Floats:
        at = (np.asarray(u, float) * len(self.rising)).astype(int)
        return self.rising[np.minimum(at, len(self.rising) - 1)]

    def cdf(self, x: ArrayLike) -> Floats:
        return np.searchsorted(self.rising, x, side="right") / len(self.rising)

    def mean_min(self, t: ArrayLike) -> Floats:
        n = len(self.rising)
        below = np.searchsorted(self.rising, t, side="right")
        return (np.append(0.0, np.cumsum(self.rising))[below] + _times(t, (n - below).astype(float))) / n


@dataclass(frozen=True)
class Mixture(Distribution):
    """X is part j with probability weight j."""

    weights: tuple[float, ...]
    parts: tuple[Distribution, ...]

    def _part(self, u: ArrayLike) -> NDArray[np.intp]:
        return np.searchsorted(np.cumsum(self.weights)[:-1], u, side="right")

    def invert(self, u: ArrayLike) -> Floats:
        u = np.asarray(u, float)
        part, starts, values = self._part(u), np.cumsum((0.0, *self.weights)), np.empty(u.shape)
        for j, (weight, inner) in enumerate(zip(self.weights, self.parts, strict=True)):
            mine = part == j
            values[mine] = inner.invert(np.clip((u[mine] - starts[j]) / weight, 0.0, 1.0 - 1e-16))
        return values

    def sample(self, rng: np.random.Generator, size: int) -> Floats:
        part, values = self._part(rng.random(size)), np.empty(size)
        for j, inner in enumerate(self.parts):
            mine = np.flatnonzero(part == j)
            values[mine] = inner.sample(rng, len(mine))
        return values

    def cdf(self, x: ArrayLike) -> Floats:
        pairs = zip(self.weights, self.parts, strict=True)
        return sum((w * d.cdf(x) for w, d in pairs), np.zeros(np.shape(x)))

    def mean_min(self, t: ArrayLike) -> Floats:
        pairs = zip(self.weights, self.parts, strict=True)
        return sum((w * d.mean_min(t) for w, d in pairs), np.zeros(np.shape(t)))


@dataclass(frozen=True)
class Clipped(Distribution):
    r"""X clipped to [a, b]: :math:`E[\min(\cdot,t)] = a + E[\min(X,\min(t,b))] - E[\min(X,a)]` for t >= a."""

    inner: Distribution
    low: float
    high: float

    def invert(self, u: ArrayLike) -> Floats:
        return np.clip(self.inner.invert(u), self.low, self.high)

    def sample(self, rng: np.random.Generator, size: int) -> Floats:
        return np.clip(self.inner.sample(rng, size), self.low, self.high)

    def cdf(self, x: ArrayLike) -> Floats:
        x = np.asarray(x, float)
        return np.where(x < self.low, 0.0, np.where(x >= self.high, 1.0, self.inner.cdf(x)))

    def mean_min(self, t: ArrayLike) -> Floats:
        t = np.asarray(t, float)
        within = self.inner.mean_min(np.clip(t, self.low, self.high)) - self.inner.mean_min(self.low)
        return np.where(t < self.low, t, self.low + within)


@dataclass(frozen=True)
class Scaled(Distribution):
    """X times a positive factor."""

    inner: Distribution
    factor: float

    def invert(self, u: ArrayLike) -> Floats:
        return self.factor * self.inner.invert(u)

    def sample(self, rng: np.random.Generator, size: int) -> Floats:
        return self.factor * self.inner.sample(rng, size)

    def cdf(self, x: ArrayLike) -> Floats:
        return self.inner.cdf(np.asarray(x, float) / self.factor)

    def mean_min(self, t: ArrayLike) -> Floats:
        return self.factor * self.inner.mean_min(np.asarray(t, float) / self.factor)


def mixture(weights: Sequence[float], parts: Sequence[Distribution]) -> Distribution:
    """The mixture of `parts` with weights scaled to sum to one; parts of no weight drop out."""
    kept = [(w, d) for w, d in zip(weights, parts, strict=True) if w > 0.0]
    total = sum(w for w, _ in kept)
    if len(kept) == 1:
        return kept[0][1]
    return Mixture(tuple(w / total for w, _ in kept), tuple(d for _, d in kept))


_KINDS = ("constant", "uniform", "normal", "lognormal", "exponential", "quantiles", "mixture")


def distribution(value: object, field: str, low: float, high: float) -> Distribution:
    """The distribution that `value` describes, clipped to [low, high]; else an InputError.

    A number is a constant; a table has one of the kinds `constant`, `uniform = [a, b]`,
    `normal = [mean, sd]`, `lognormal = [mu, sigma]`, `exponential = mean`,
    `quantiles = {p = [0, …, 1], x = […]}`, `mixture = [{weight, kind}, …]`, and optionally `min`, `max`.
    """
    if isinstance(value, Distribution):
        return value
    if not isinstance(value, Mapping):
        return Constant(number(field, value, low, high))
    known_fields(value, (*_KINDS, "min", "max"), field)
    floor = number(f"{field}.min", value.get("min", low), low, high)
    ceiling = number(f"{field}.max", value.get("max", high), floor, high)
    inner = _kind(value, field, low, high)
    if isinstance(inner, Constant) and floor <= inner.value <= ceiling:
        return inner
    return Clipped(inner, floor, ceiling)


_PAIRS: dict[str, tuple[Callable[..., Distribution], tuple[tuple[float, float], ...]]] = {
    "normal": (Normal, ((-1e9, 1e9), (1e-9, 1e9))),
    "lognormal": (Lognormal, ((-30.0, 30.0), (1e-6, 5.0))),
}


def _kind(table: Mapping[str, Any], field: str, low: float, high: float) -> Distribution:
    kinds = [name for name in _KINDS if name in table]
    if len(kinds) != 1:
        raise InputError(field, dict(table), "a distribution has exactly one of " + ", ".join(_KINDS))
    kind, value = kinds[0], table[kinds[0]]
    field = f"{field}.{kind}"
    if kind == "mixture":
        return _mixture(value, field, low, high)
    if kind == "quantiles":
        return _quantiles(value, field, low, high)
    if kind == "uniform":
        start, end = _pair(value, field, ((low, high), (low, high)))
        if start >= end:
            raise InputError(field, value, "[low, high] with low below high")
        return Uniform(start, end)
    if kind == "exponential":
        return Exponential(number(field, value, 1e-9, 1e9))
    if kind == "constant":
        return Constant(number(field, value, low, high))
    made, ranges = _PAIRS[kind]
    return made(*_pair(value, field, ranges))


def _numbers(values: object, field: str, low: float, high: float) -> tuple[float, ...]:
    if not isinstance(values, list | tuple):
        raise InputError(field, values, "a list of numbers")
    return tuple(number(f"{field}[{i}]", value, low, high) for i, value in enumerate(values))


def _pair(values: object, field: str, ranges: tuple[tuple[float, float], ...]) -> tuple[float, ...]:
    if not isinstance(values, list | tuple) or len(values) != len(ranges):
        raise InputError(field, values, f"a list of {len(ranges)} numbers")
    return tuple(number(f"{field}[{i}]", v, *r) for i, (v, r) in enumerate(zip(values, ranges, strict=True)))


def _quantiles(table: object, field: str, low: float, high: float) -> Distribution:
    if not isinstance(table, Mapping) or set(table) != {"p", "x"}:
        raise InputError(field, table, "{p = [0, …, 1], x = […]}")
    p = _numbers(table["p"], f"{field}.p", 0.0, 1.0)
    x = _numbers(table["x"], f"{field}.x", max(low, 1e-9), high)
    if len(p) < 2 or p[0] != 0.0 or p[-1] != 1.0 or any(b <= a for a, b in pairwise(p)):
        raise InputError(f"{field}.p", list(p), "rising probabilities from 0 to 1")
    if len(x) != len(p) or any(b < a for a, b in pairwise(x)):
        raise InputError(f"{field}.x", list(x), "as many values as p, none below the one before it")
    return Quantiles(p, x)


def _mixture(rows: object, field: str, low: float, high: float) -> Distribution:
    if not isinstance(rows, list | tuple) or not rows or not all(isinstance(row, Mapping) for row in rows):
        raise InputError(field, rows, "a list of {weight, kind} tables")
    weights = [number(f"{field}[{i}].weight", row.get("weight"), 0.0, 1.0) for i, row in enumerate(rows)]
    if abs(sum(weights) - 1.0) > 0.01:
        raise InputError(field, weights, "weights that sum to 1")
    inner = [{key: value for key, value in row.items() if key != "weight"} for row in rows]
    return mixture(weights, [distribution(row, f"{field}[{i}]", low, high) for i, row in enumerate(inner)])
