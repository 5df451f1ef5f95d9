"""Is it worth the trouble? Investment arithmetic of a split, and self-hosting against an API. Plain floats."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from breakeven.models.catalog import table
from breakeven.models.inputs import InputError, known_fields, number, pick
from breakeven.models.ownership import HOURS_PER_MONTH

_PRICES = ("input", "cached", "output", "cache_write")


@dataclass(frozen=True)
class Horizon:
    """Over which time, and at which interest, an investment is judged."""

    months: float
    discount_rate: float  # per year

    @property
    def annuity_factor(self) -> float:
        """Worth today of one dollar at the end of each month: (1 - (1 + i)^-n) / i, i the monthly rate."""
        if self.discount_rate == 0.0:
            return self.months
        monthly = (1.0 + self.discount_rate) ** (1.0 / 12.0) - 1.0
        return (1.0 - (1.0 + monthly) ** -self.months) / monthly


class SplitCase(NamedTuple):
    """What disaggregating brings over a horizon, against the best shared pool. Infinite where it never does."""

    saving_usd_per_month: float  # net of what running it costs
    complexity_usd_per_month: float  # running cost of further pools and kinds of hardware, beyond the shared pool's
    one_off_usd: float
    payback_months: float
    npv_usd: float
    roi: float  # what comes back over what was put in, less one; infinite where nothing is
    break_even_complexity_usd_per_month: float  # what running it may cost until NPV is zero
    break_even_fleet: float  # accelerators of the shared pool from which NPV is positive, all else in proportion


def split_case(
    joint_usd_per_hour: float,
    split_usd_per_hour: float,
    complexity_usd_per_hour: float,
    joint_accelerators: float,
    one_off_usd: float,
    horizon: Horizon,
) -> SplitCase:
    """Net present value, pay-back and break-even points of a split.

    `split_usd_per_hour` includes `complexity_usd_per_hour`, by how much more running it costs than running the shared
    pool. The fleet's break-even takes savings in proportion to the fleet, complexity and one-off cost as they are.
    """
    saving = (joint_usd_per_hour - split_usd_per_hour) * HOURS_PER_MONTH
    complexity = complexity_usd_per_hour * HOURS_PER_MONTH
    gross, factor = saving + complexity, horizon.annuity_factor
    burden = complexity + one_off_usd / factor
    never = float("inf")
    return SplitCase(
        saving_usd_per_month=saving,
        complexity_usd_per_month=complexity,
        one_off_usd=one_off_usd,
        payback_months=one_off_usd / saving if saving > 0.0 else never,
        npv_usd=saving * factor - one_off_usd,
        roi=saving * horizon.months / one_off_usd - 1.0 if one_off_usd else never,
        break_even_complexity_usd_per_month=gross - one_off_usd / factor,
        break_even_fleet=joint_accelerators * burden / gross if gross > 0.0 else never,
    )


@dataclass(frozen=True)
class ApiPrice:
    """A hosted model's prices, USD per million tokens."""

    name: str
    input: float  # new, not cached
    cached: float  # read from the provider's cache
    output: float
    cache_write: float  # new input that is cached for the next call
    source: str

    def usd_per_call(self, new_tokens: float, reused_tokens: float, output_tokens: float) -> float:
        """What a call costs whose prompt has `reused_tokens` in the provider's cache, and whose rest is cached.

        >>> ApiPrice("x", 3.0, 0.3, 15.0, 3.0, "").usd_per_call(1000.0, 10000.0, 200.0)
        0.009
        """
        return (self.cache_write * new_tokens + self.cached * reused_tokens + self.output * output_tokens) / 1e6


class ApiCase(NamedTuple):
    """Self-hosting against an API at the load of a deployment."""

    api: str
    api_usd_per_session: float
    api_usd_per_hour: float
    self_usd_per_hour: float
    ratio: float  # self-hosting over API
    break_even_sessions_per_second: float  # load from which this fleet costs less; it is paid for whether used or not
    source: str


def api_case(price: ApiPrice, usd_per_session: float, sessions_per_second: float, self_usd_per_hour: float) -> ApiCase:
    """Compare a fleet that costs `self_usd_per_hour` with an API that takes `usd_per_session`."""
    hourly = usd_per_session * sessions_per_second * 3600.0
    return ApiCase(
        api=price.name,
        api_usd_per_session=usd_per_session,
        api_usd_per_hour=hourly,
        self_usd_per_hour=self_usd_per_hour,
        ratio=self_usd_per_hour / hourly,
        break_even_sessions_per_second=self_usd_per_hour / 3600.0 / usd_per_session,
        source=price.source,
    )


def api_price(spec: str | Mapping[str, Any], field: str = "api") -> ApiPrice:
    """A hosted model's prices by name, or `{input, cached, output}` in USD per million tokens, or a variation."""
    rows = table("api_prices")
    if isinstance(spec, str):
        spec = {"like": spec}
    known_fields(spec, ("like", "name", *_PRICES), field)
    base: Mapping[str, Any] = {}
    if "like" in spec:
        base = rows[pick(f"{field}.like" if len(spec) > 1 else field, spec["like"], rows)]
    prices = {key: spec.get(key, base.get(key)) for key in _PRICES}
    for key in ("input", "output"):
        if prices[key] is None:
            raise InputError(f"{field}.{key}", None, f"is required; or a catalogue name: {', '.join(rows)}")
    prices["cached"] = prices["input"] if prices["cached"] is None else prices["cached"]
    if prices["cache_write"] is None or ("input" in spec and "cache_write" not in spec):
        prices["cache_write"] = prices["input"]
    values = {key: number(f"{field}.{key}", value, 0.0, 1e5) for key, value in prices.items()}
    own = set(spec) - {"like"}
    source = "stated by the user" if own else f"{base['source']}, {base['as_of']}"
    return ApiPrice(str(spec.get("name", spec.get("like", "API"))), **values, source=source)
