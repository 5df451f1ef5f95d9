r"""Fits of one variable: a lognormal, else a mixture of two by expectation-maximisation, else quantiles.

The distance is Kolmogorov and Smirnov's, :math:`\max_x |F_n(x) - F(x)|`. Whole numbers are rounded ones: equal
values are spread evenly over the unit they were rounded from, so that ties are no misfit.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breakeven.models.distributions import Distribution, distribution

Floats = NDArray[np.float64]

LOGNORMAL_KS, MIXTURE_KS = 0.03, 0.05  # distances from which the next kind is tried
WORST = 0.5  # the same, of quantiles
NOISE = 0.886  # over sqrt(n): the distance that one sample in twenty of a true lognormal passes (Lilliefors)
MIXTURE_OF, FIT_OF = 200, 30  # values it takes to fit a mixture, and to fit anything but quantiles
CHECKED = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
_GRID = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 0.995, 1.0)
_ZEROS = 0.02  # share of zeros from which they are a part of their own


@dataclass(frozen=True)
class Fit:
    """A fitted variable."""

    field: str
    values: Floats  # positive ones, rising, ties spread
    zeros: int
    table: Any  # as a workload's field
    fitted: Distribution
    kind: str
    ks: float
    worst: float  # largest |fitted / measured - 1| of the quantiles from 5 to 99 %

    @property
    def n(self) -> int:
        """Values fitted, zeros included."""
        return len(self.values) + self.zeros


def spread(values: Floats) -> Floats:
    """Positive values in rising order; equal whole ones evenly over ±1/2.

    >>> spread(np.array([3.0, 2.0, 3.0])).tolist()
    [2.0, 2.75, 3.25]
    """
    rising = np.sort(values)
    if not np.array_equal(rising, np.rint(rising)):
        return rising
    _, first, count = np.unique(rising, return_index=True, return_counts=True)
    rank = np.arange(len(rising)) - np.repeat(first, count)
    return rising - 0.5 + (rank + 0.5) / np.repeat(count, count)


def distance(rising: Floats, fitted: Distribution) -> float:
    """Kolmogorov and Smirnov's distance of rising values from a distribution."""
    n, at = len(rising), fitted.cdf(rising)
    step = np.arange(n) / n
    return float(max(np.max(at - step), np.max(step + 1.0 / n - at)))


def _distance_of_steps(rising: Floats, fitted: Distribution) -> float:
    """The distance where both have atoms: at the values only, and half a unit above whole ones."""
    at, count = np.unique(rising, return_counts=True)
    above = 0.5 if np.array_equal(at, np.rint(at)) else 0.0
    return float(np.max(np.abs(np.cumsum(count) / len(rising) - fitted.cdf(at + above))))


def worst_quantile(rising: Floats, fitted: Distribution) -> float:
    """Largest relative error of the quantiles from 5 to 99 %."""
    measured = np.quantile(rising, CHECKED)
    grid = np.append(np.geomspace(max(rising[0] * 1e-3, 1e-9), rising[-1] * 1e3, 20_000), rising[-1])
    grid.sort()
    found = grid[np.minimum(np.searchsorted(fitted.cdf(grid), CHECKED), len(grid) - 1)]
    return float(np.max(np.abs(found / measured - 1.0)))


def lognormal(rising: Floats) -> dict[str, Any]:
    """The likeliest lognormal."""
    ln = np.log(rising)
    return {"lognormal": [round(float(ln.mean()), 4), round(max(float(ln.std()), 1e-6), 4)]}


def lognormal_mixture(rising: Floats, steps: int = 400) -> dict[str, Any]:
    r"""Two lognormals, by expectation-maximisation on ln x.

    .. math:: r_{ij} \propto w_j \varphi((x_i - \mu_j)/\sigma_j)/\sigma_j,\quad
        w_j = \bar r_j,\ \mu_j = \langle x \rangle_{r_j},\ \sigma_j^2 = \langle (x - \mu_j)^2 \rangle_{r_j}
    """
    x = np.log(rising)
    mu, sigma, weight = np.quantile(x, (0.25, 0.75)), np.full(2, x.std()) * np.array([0.5, 1.0]), np.full(2, 0.5)
    for _ in range(steps):
        ln = np.log(weight) - np.log(sigma) - 0.5 * np.square((x[:, None] - mu) / sigma)
        share = np.exp(ln - ln.max(axis=1, keepdims=True))
        share /= share.sum(axis=1, keepdims=True)
        total = share.sum(axis=0) + 1e-9
        moved = (share * x[:, None]).sum(axis=0) / total
        sigma = np.sqrt((share * np.square(x[:, None] - moved)).sum(axis=0) / total + 1e-4)
        weight = np.clip(total / len(x), 1e-6, 1.0)
        done, mu = float(np.max(np.abs(moved - mu))) < 1e-6, moved
        if done:
            break
    low, high = np.argsort(mu)
    first = round(float(weight[low] / weight.sum()), 4)
    parts = ((first, low), (round(1.0 - first, 4), high))
    return {
        "mixture": [
            {"weight": w, "lognormal": [round(float(mu[j]), 4), round(min(float(sigma[j]), 5.0), 4)]} for w, j in parts
        ]
    }


def quantiles(values: Floats) -> dict[str, Any] | float:
    """Measured quantiles, or the one value there is."""
    x = [float(f"{v:.6g}") for v in np.maximum.accumulate(np.quantile(values, _GRID))]
    return x[0] if x[0] == x[-1] else {"quantiles": {"p": list(_GRID), "x": x}}


def fit(field: str, values: Floats, low: float, high: float) -> Fit | None:
    """The simplest good fit of a field's values in [low, high]; None without values."""
    values = np.clip(values[np.isfinite(values)], low, high)
    positive = values[values > 0.0]
    zeros = len(values) - len(positive)
    if not len(values):
        return None
    if not len(positive):
        return Fit(field, positive, zeros, 0.0, distribution(0.0, field, low, high), "constant", 0.0, 0.0)
    rising = np.maximum(spread(positive), 1e-9)
    kind, table = _simplest(field, rising, positive, low, high)
    fitted = distribution(table, field, low, high)
    if kind in ("constant", "quantiles"):
        rising = np.sort(positive)
        ks, worst = _distance_of_steps(rising, fitted), worst_quantile(rising, fitted)
    else:
        ks, worst = distance(rising, fitted), worst_quantile(rising, fitted)
    share = zeros / len(values)
    if share >= _ZEROS:
        table, kind = _with_zeros(table, share), f"{kind} + {share:.0%} zeros"
    return Fit(field, rising, zeros, _capped(table, values), fitted, kind, ks, worst)


def _simplest(field: str, rising: Floats, raw: Floats, low: float, high: float) -> tuple[str, Any]:
    if raw.min() == raw.max():
        return "constant", float(raw[0])
    if len(raw) < FIT_OF:
        return "quantiles", quantiles(raw)
    noise = NOISE / math.sqrt(len(raw))

    def good(table: dict[str, Any], most: float) -> bool:
        fitted = distribution(table, field, low, high)
        return distance(rising, fitted) <= max(most, noise) and worst_quantile(rising, fitted) <= WORST

    single = lognormal(rising)
    if good(single, LOGNORMAL_KS):
        return "lognormal", single
    if len(raw) >= MIXTURE_OF and good(double := lognormal_mixture(rising), MIXTURE_KS):
        return "mixture", double
    return "quantiles", quantiles(raw)


def _with_zeros(table: Any, share: float) -> dict[str, Any]:
    rest = table if isinstance(table, dict) else {"constant": table}
    return {
        "mixture": [
            {"weight": round(share, 4), "constant": 0.0},
            {"weight": round(1.0 - round(share, 4), 4), **rest},
        ]
    }


def _capped(table: Any, values: Floats) -> Any:
    """A fitted tail ends at the largest value seen."""
    if isinstance(table, dict) and ("lognormal" in table or "mixture" in table):
        return {**table, "max": float(f"{values.max():.6g}")}
    return table


def scaled(table: Any, factor: float, most: float) -> Any:
    """The distribution of `factor` times a variable, up to `most`; factor 1 is the table itself."""
    if factor <= 1.0 + 1e-6:
        return table
    if not isinstance(table, dict):
        return min(table * factor, most)
    return {key: _scaled(key, value, factor, most) for key, value in table.items()}


def _scaled(key: str, value: Any, factor: float, most: float) -> Any:
    if key == "lognormal":
        return [round(value[0] + math.log(factor), 4), value[1]]
    if key == "quantiles":
        return {"p": value["p"], "x": [float(f"{min(x * factor, most):.6g}") for x in value["x"]]}
    if key == "mixture":
        return [scaled(part, factor, most) for part in value]
    return value if key == "weight" else min(value * factor, most)


def session_effects(ln: Floats, session: NDArray[np.int64]) -> tuple[float, Floats]:
    r"""Deviation of a session's mean of ln x, and each value's session effect.

    One-way analysis of variance: :math:`\sigma^2_b = (MS_b - MS_w)/n_0`; an effect is the session's mean deviation
    shrunk by :math:`\sigma_b^2 / (\sigma_b^2 + MS_w / n)`.
    """
    _, at, count = np.unique(session, return_inverse=True, return_counts=True)
    groups, n = len(count), len(ln)
    if groups < 10 or n <= 2 * groups:
        return 0.0, np.zeros(n)
    means = np.bincount(at, ln) / count
    within = float(np.sum(np.square(ln - means[at]))) / (n - groups)
    between = float(np.sum(count * np.square(means - ln.mean()))) / (groups - 1)
    n0 = (n - float(np.sum(np.square(count))) / n) / (groups - 1)
    variance = max((between - within) / n0, 0.0)
    shrunk = variance / (variance + within / count) * (means - ln.mean())
    return math.sqrt(variance), shrunk[at]
