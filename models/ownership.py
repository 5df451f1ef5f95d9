"""What owning an accelerator costs per hour: purchase, building, electricity, staff; from ownership.toml or stated."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from breakeven.models.catalog import table
from breakeven.models.hardware import Accelerator
from breakeven.models.inputs import InputError, known_fields, number, pick

HOURS_PER_YEAR = 8760.0
HOURS_PER_MONTH = HOURS_PER_YEAR / 12.0

# Sane range of each number of a profile.
_RANGES: dict[str, tuple[float, float]] = {
    "cost_of_capital": (0.0, 1.0),
    "life_years": (0.25, 30.0),
    "residual_share": (0.0, 1.0),
    "network_usd": (0.0, 1e6),
    "overhead_share": (0.0, 2.0),
    "spares_share": (0.0, 1.0),
    "facility_usd_per_kw_month": (0.0, 1e5),
    "electricity_usd_per_kwh": (0.0, 10.0),
    "pue": (1.0, 5.0),
    "staff_usd_per_year": (0.0, 1e7),
    "accelerators_per_staff": (1.0, 1e7),
}
_SERVER_PRICES = ("low", "middle", "high")


class Bill(NamedTuple):
    """USD per hour of one accelerator owned. Electricity is at full use; idle it is a share of that."""

    purchase: float  # server, network, overhead and spares, as an annuity less what the sale brings
    facility: float
    staff: float
    electricity: float

    @property
    def fixed(self) -> float:
        """What it costs however little it does."""
        return self.purchase + self.facility + self.staff

    def at(self, use: float, idle_share: float) -> float:
        """USD per hour at a use in [0, 1], drawing `idle_share` of its power when idle."""
        return self.fixed + self.electricity * (idle_share + (1.0 - idle_share) * use)


@dataclass(frozen=True)
class Ownership:
    """Who owns: the numbers of a profile, what differs from it, and prices of one's own."""

    name: str
    server_price: str  # low, middle or high of the catalogue's range
    numbers: Mapping[str, float]
    server_usd: Mapping[str, float]  # own prices by accelerator id, with its share of the server
    sources: Mapping[str, str]

    def bill(self, accelerator: Accelerator) -> Bill:
        """What one such accelerator costs per hour."""
        n = self.numbers
        all_in_over_it = table("ownership")["all_in_over_it_power"]
        it_kw = accelerator.all_in_power_w / 1e3 / all_in_over_it
        if it_kw <= 0.0:
            raise InputError(
                f"economics.ownership, accelerator {accelerator.id}", None, "its all_in_kw or power_w must be known"
            )
        bought = (self.server_of(accelerator) + n["network_usd"]) * (1.0 + n["overhead_share"])
        bought *= 1.0 + n["spares_share"]
        yearly = annuity(bought, n["residual_share"], n["cost_of_capital"], n["life_years"])
        return Bill(
            purchase=yearly / HOURS_PER_YEAR,
            facility=it_kw * n["facility_usd_per_kw_month"] / HOURS_PER_MONTH,
            staff=n["staff_usd_per_year"] / n["accelerators_per_staff"] / HOURS_PER_YEAR,
            electricity=it_kw * n["pue"] * n["electricity_usd_per_kwh"],
        )

    def server_of(self, accelerator: Accelerator) -> float:
        """Purchase price of an accelerator with its share of the server, USD."""
        if accelerator.id in self.server_usd:
            return self.server_usd[accelerator.id]
        rows = table("ownership")["server"]
        if accelerator.priced_as in self.server_usd:
            price = self.server_usd[accelerator.priced_as]
        elif accelerator.priced_as in rows:
            price = rows[accelerator.priced_as][self.server_price]
        else:
            known = ", ".join(rows)
            raise InputError(
                f"economics.ownership.server_usd.{accelerator.id}",
                None,
                f"no purchase price is known; state it, or use one of {known}",
            )
        return price * accelerator.price_factor

    def source(self, accelerator: Accelerator) -> str:
        """Where the purchase price comes from."""
        if {accelerator.id, accelerator.priced_as} & self.server_usd.keys():
            return "stated by the user"
        return str(table("ownership")["server"][accelerator.priced_as]["source"])


def annuity(bought_usd: float, residual_share: float, cost_of_capital: float, life_years: float) -> float:
    """USD per year that pay off a purchase, less what its sale brings at the end.

    (B - s B v) r / (1 - v) with v = (1 + r)^-n; at r = 0 the straight line (B - s B) / n.

    >>> annuity(1000.0, 0.0, 0.0, 4.0)
    250.0
    """
    if cost_of_capital == 0.0:
        return bought_usd * (1.0 - residual_share) / life_years
    discount = (1.0 + cost_of_capital) ** -life_years
    return bought_usd * (1.0 - residual_share * discount) * cost_of_capital / (1.0 - discount)


def ownership(spec: str | Mapping[str, Any], field: str = "ownership") -> Ownership:
    """An ownership profile by name, or `{like: name, ...}` with numbers of one's own. Raises InputError.

    >>> from breakeven.models.hardware import accelerator
    >>> bill = ownership("hyperscaler").bill(accelerator("h100-sxm"))
    >>> round(bill.fixed + bill.electricity, 2)  # SemiAnalysis: 1.30
    1.43
    """
    profiles = table("ownership")["profile"]
    if isinstance(spec, str):
        spec = {"like": spec}
    known_fields(spec, ("like", "server_price", "server_usd", *_RANGES), field)
    name = pick(f"{field}.like" if len(spec) > 1 else field, spec.get("like", "neocloud"), profiles)
    row = profiles[name]
    own = {key: number(f"{field}.{key}", spec[key], *_RANGES[key]) for key in _RANGES if key in spec}
    prices = spec.get("server_usd", {})
    if not isinstance(prices, Mapping):
        raise InputError(f"{field}.server_usd", prices, "a mapping from accelerator to USD")
    return Ownership(
        name=name,
        server_price=pick(f"{field}.server_price", spec.get("server_price", row["server_price"]), _SERVER_PRICES),
        numbers={key: float(row[key]) for key in _RANGES} | own,
        server_usd={k: number(f"{field}.server_usd.{k}", v, 0.0, 1e7) for k, v in prices.items()},
        sources=row["sources"] | dict.fromkeys(own, "stated by the user"),
    )
