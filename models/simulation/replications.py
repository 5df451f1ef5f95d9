"""Several independent simulations of one deployment as one measurement, with its uncertainty.

The sessions in progress change as slowly as sessions last, often more slowly than one simulation, so spans of one are
no independent observations. Simulations that each start in the steady state with sessions of their own are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from breakeven.models.distributions import Floats
from breakeven.models.simulation.simulation import Bounds, Simulated

NORMAL = 1.959964  # its 0.975 quantile


class Estimate(NamedTuple):
    """A share or a mean with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return 0.5 * (self.high - self.low)


def student(freedom: int) -> float:
    """0.975 quantile of Student's t (Abramowitz and Stegun 26.7.5), 1 % low at 4 degrees of freedom."""
    z = NORMAL
    terms = (
        (z**3 + z) / 4.0,
        (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384.0,
    )
    return z + sum(term / freedom**k for k, term in enumerate(terms, start=1))


def pooled(parts: Sequence[np.ndarray]) -> Estimate:
    """Share of all flags that are set, its error from the parts' own (a ratio estimator: they hold unlike numbers)."""
    count = np.array([len(part) for part in parts], float)
    if count.sum() == 0.0:
        return Estimate(1.0, 0.0, 1.0)
    total = np.array([np.sum(part, dtype=float) for part in parts])
    share, n = float(total.sum() / count.sum()), len(parts)
    if n < 2:
        return Estimate(share, -np.inf, np.inf)
    error = float(np.sqrt(np.sum((total - share * count) ** 2) * n / (n - 1.0)) / count.sum())
    # What no call missed may still be missed by one in as many: the rule of three.
    half = student(n - 1) * error + (3.0 / count.sum() if error == 0.0 else 0.0)
    return Estimate(share, max(share - half, 0.0), min(share + half, 1.0))


def mean(parts: Sequence[float]) -> Estimate:
    """Mean of one value a part."""
    return between([np.array([part]) for part in parts], lambda x: float(x.mean()))


def between(parts: Sequence[Floats], measure: Callable[[Floats], float]) -> Estimate:
    """A measure such as a percentile of all values, its error from its values in the parts."""
    value = measure(np.concatenate(parts))
    each = np.array([measure(part) for part in parts if len(part)])
    if len(each) < 2 or not np.isfinite(each).all():
        return Estimate(value, -np.inf, np.inf)
    half = student(len(each) - 1) * float(each.std(ddof=1)) / np.sqrt(len(each))
    return Estimate(value, value - half, value + half)


@dataclass(frozen=True)
class Replications:
    """Independent simulations of one deployment."""

    runs: tuple[Simulated, ...]

    def attainment(self, bounds: Bounds) -> dict[str, Estimate]:
        """Shares in time: `slo` jointly, as the study counts (calls or sessions), and each bound alone."""
        calls = [run.calls_in_time(bounds) for run in self.runs]
        shares = {name: pooled([found[name] for found in calls]) for name in calls[0]}
        if bounds.of_sessions:
            sessions = [run.sessions_in_time(bounds) for run in self.runs]
            in_time, every = (pooled([found[i] for found in sessions]) for i in (0, 1))
            joint = Estimate(*(a * b for a, b in zip(shares["slo"], in_time, strict=True)))
            shares["slo"] = every if bounds.per_session else joint
            if np.isfinite(bounds.session_s):
                shares["session"] = in_time
        return shares

    def mean(self, of: str) -> Estimate:
        """Mean of a latency: `ttft_s`, `tpot_s`, `call_s` or `session_s`."""
        seen = [run.session_times()[1] if of == "session_s" else run.latencies()[of] for run in self.runs]
        return between(seen, lambda x: float(x.mean()) if len(x) else np.nan)

    def percentiles(self, shares: dict[str, tuple[str, float]]) -> dict[str, Estimate]:
        """Latency percentiles by name: of `ttft_s`, `tpot_s`, `call_s` or `session_s`, at a share."""
        seen = [run.latencies() | {"session_s": run.session_times()[1]} for run in self.runs]
        return {
            name: between([found[of] for found in seen], lambda x, q=share: _quantile(x, q))
            for name, (of, share) in shares.items()
        }

    @property
    def throughput(self) -> Estimate:
        """Calls per second that ended in the window."""
        return mean([run.throughput for run in self.runs])

    @property
    def arrivals(self) -> Estimate:
        """Calls per second that came."""
        return mean([run.arrived / run.window_s for run in self.runs])

    @property
    def cache_hit(self) -> Estimate:
        return mean([run.cache_hit for run in self.runs])

    def utilization(self, name: str) -> Estimate:
        """Mean share of the window that engines spend in `prefill`, `decode` or their `link`."""
        return mean([run.utilization(name) for run in self.runs])

    @property
    def cached_tokens(self) -> Estimate:
        """Share of prompt tokens found in the prefix cache."""
        return mean([run.cached_tokens for run in self.runs])

    @property
    def output_tokens_per_second(self) -> Estimate:
        """Generated tokens of the calls that ended in the window, over the window."""
        return mean([run.tokens_per_second for run in self.runs])

    @property
    def calls(self) -> int:
        """Measured calls."""
        return sum(int(run.measured.sum()) for run in self.runs)

    @property
    def unfinished(self) -> int:
        """Measured calls that had not left when their simulation ended."""
        return sum(int((run.measured & ~run.finished).sum()) for run in self.runs)

    def saturated(self, offered_per_s: float) -> bool:
        """Whether calls pile up: fewer leave than come, or sessions come round much more slowly than offered."""
        left, came = sum(run.left for run in self.runs), sum(run.arrived for run in self.runs)
        span = sum(run.window_s for run in self.runs)
        return left < 0.95 * came or self.throughput.high < 0.9 * offered_per_s or left < 0.7 * offered_per_s * span


def _quantile(values: Floats, share: float) -> float:
    return float(np.quantile(values, share, method="lower")) if len(values) else np.nan
