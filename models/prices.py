"""What an accelerator costs per hour: catalogue rows, committed multipliers, and a user's own SkyPilot file.

prices.csv holds one row per accelerator, provider and term, in USD per accelerator-hour: a provider's median
over regions. Where two snapshots told of the same provider, the dated one was kept for RunPod's A100 PCIe
(1.39, not the undated 1.64), the provider's own list for Lambda's H100 (3.19, not a blog's 2.99). A forecast
of the H100 index was left out. Rows of `market-index` and `semianalysis-*` are surveys: an index is no
provider and stays out of medians; owning costs and three-year rentals exist only as surveys.
"""

import ast
import csv
import functools
import io
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from breakeven.models.catalog import table, text
from breakeven.models.hardware import Accelerator
from breakeven.models.inputs import InputError, number, pick

TERMS = ("on-demand", "spot", "committed-1y", "committed-3y", "owning")
_INDEX = "market-index"
_COLUMNS = ("AcceleratorName", "AcceleratorCount", "Price")
_TPU_SENTINEL_USD = 700.0  # what Google's list says where a slice is not sold


class PriceRow(NamedTuple):
    """One price of one accelerator."""

    accelerator: str
    provider: str
    term: str
    usd_per_hour: float  # per accelerator
    as_of: str
    confidence: str
    source: str


@functools.cache
def price_rows() -> tuple[PriceRow, ...]:
    """The rows of prices.csv."""
    rows = csv.DictReader(io.StringIO(text("prices.csv")))
    return tuple(PriceRow(**{**row, "usd_per_hour": float(row["usd_per_hour"])}) for row in rows)


@dataclass(frozen=True)
class Prices:
    """A choice of prices: term, provider (or the median over providers), and own prices by accelerator id."""

    term: str = "on-demand"
    provider: str = "median"
    own: Mapping[str, float] = field(default_factory=dict, hash=False)
    rows: Sequence[PriceRow] | None = None

    def usd_per_hour(self, accelerator: Accelerator) -> float:
        """USD per hour of one accelerator under this choice."""
        return usd_per_hour(accelerator, self.term, self.provider, self.own, self.rows)


def usd_per_hour(
    accelerator: Accelerator,
    term: str = "on-demand",
    provider: str = "median",
    own: Mapping[str, float] | None = None,
    rows: Sequence[PriceRow] | None = None,
) -> float:
    """USD per hour of one accelerator.

    The first that exists: `own[accelerator.id]`; the accelerator's own price; `own[accelerator.priced_as]`;
    the rows of `priced_as`. All but the first are multiplied by its `price_factor`. A committed term without
    rows is on-demand times the provider's multiplier (for the median, the median multiplier of all clouds).

    >>> from breakeven.models.hardware import accelerator
    >>> usd_per_hour(accelerator("h100-sxm"))  # of nine providers, 1.93 to 12.29
    3.19
    """
    pick("prices.term", term, TERMS)
    prices = {key: number(f"prices.own.{key}", value, 0.0, 1e4) for key, value in (own or {}).items()}
    if accelerator.id in prices:
        return prices[accelerator.id]
    if accelerator.usd_per_hour is not None:
        return accelerator.usd_per_hour * accelerator.price_factor
    if accelerator.priced_as in prices:
        return prices[accelerator.priced_as] * accelerator.price_factor
    rows = price_rows() if rows is None else rows
    pick("prices.provider", provider, ("median", *sorted({row.provider for row in rows})))
    return _listed(accelerator.priced_as, term, provider, rows) * accelerator.price_factor


def _listed(accelerator: str, term: str, provider: str, rows: Sequence[PriceRow]) -> float:
    """The listed price of a term, or for a committed term its on-demand price times a multiplier."""
    found = _matching(accelerator, term, provider, rows)
    if found:
        return statistics.median(found)
    multiplier = committed_multiplier(term, provider)
    on_demand = _matching(accelerator, "on-demand", provider, rows)
    if multiplier is not None and on_demand:
        return statistics.median(on_demand) * multiplier
    raise _missing(accelerator, term, provider, rows)


def _matching(accelerator: str, term: str, provider: str, rows: Iterable[PriceRow]) -> list[float]:
    return [
        row.usd_per_hour
        for row in rows
        if (row.accelerator, row.term) == (accelerator, term)
        and (row.provider == provider or (provider == "median" and row.provider != _INDEX))
    ]


def committed_multiplier(term: str, provider: str) -> float | None:
    """Committed over on-demand price of a provider, the median of all for "median"; None where unknown.

    >>> committed_multiplier("committed-1y", "median")
    0.7
    """
    known = {name: row for name, row in table("prices")["committed"].items() if isinstance(row, Mapping)}
    if term not in TERMS[2:4]:
        return None
    if provider == "median":
        return statistics.median(row[term] for row in known.values())
    return known[provider][term] if provider in known else None


def _missing(accelerator: str, term: str, provider: str, rows: Iterable[PriceRow]) -> InputError:
    """No such price: says which ones exist for that accelerator."""
    exist: dict[str, list[str]] = {}
    for row in rows:
        if row.accelerator == accelerator:
            exist.setdefault(row.term, []).append(row.provider)
    listed = "; ".join(f"{name} of {', '.join(providers)}" for name, providers in exist.items())
    wanted = f"{term} of {provider}"
    advice = f"prices.own.{accelerator} or usd_per_hour"
    return InputError(
        f"prices for {accelerator}",
        wanted,
        f"no such price; it has {listed}" if listed else f"no price at all; give {advice}",
    )


@dataclass
class SkypilotReport:
    """What a SkyPilot file held: rows read, rows used, what was dropped and why, and malformed lines."""

    file: str
    read: int = 0
    used: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # reason -> prices or rows
    unknown: Counter[str] = field(default_factory=Counter)  # accelerator name -> rows
    malformed: list[tuple[int, str]] = field(default_factory=list)  # line number, reason

    def __str__(self) -> str:
        lines = ", ".join(f"line {line} ({reason})" for line, reason in self.malformed[:10])
        parts = [f"{self.file}: {self.read} rows read, {self.used} used"]
        parts += [f"{count} dropped: {reason}" for reason, count in self.dropped.items()]
        parts += [f"{len(self.malformed)} malformed: {lines}"] if self.malformed else []
        return "; ".join(parts)


class SkypilotPrices(NamedTuple):
    """Price rows of a SkyPilot file, and what was read and dropped."""

    rows: list[PriceRow]
    report: SkypilotReport


def read_skypilot(path: str | Path, provider: str | None = None) -> SkypilotPrices:
    """On-demand and spot prices per accelerator of a SkyPilot catalogue file (`vms.csv`, schema v5 to v8).

    A row's price over its accelerator count; of these the median within each region, then over regions. The
    provider is the file's folder (catalogs/v8/aws/vms.csv: aws) unless given, its date that of the file.
    Dropped, and counted: spot equal to on-demand or to exactly a tenth of it, 0.00, Google's 700.0 for slices
    not sold, and accelerators listed without the machine around them.
    """
    path = Path(path)
    provider = provider or (path.parent.name if path.stem == "vms" else path.stem)
    report = SkypilotReport(str(path))
    prices: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in _csv_rows(path, report):
        for accelerator, term, price in _row_prices(row, provider, report):
            prices.setdefault((accelerator, term), {}).setdefault(row.get("Region", ""), []).append(price)
    if not prices:
        raise InputError("Price", None, f"no usable price ({report})", str(path))
    as_of = datetime.fromtimestamp(path.stat().st_mtime, UTC).date().isoformat()
    rows = [
        PriceRow(accelerator, provider, term, _median_of_medians(regions), as_of, "medium", path.name)
        for (accelerator, term), regions in sorted(prices.items())
    ]
    return SkypilotPrices(rows, report)


def _median_of_medians(regions: Mapping[str, Sequence[float]]) -> float:
    return statistics.median(statistics.median(prices) for prices in regions.values())


def _lines(path: Path) -> list[str]:
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise InputError("file", str(path), f"cannot be read: {reason}", str(path)) from None
    lines = content.split("\n")
    header = next(csv.reader(lines[:1]), [])
    missing = [name for name in _COLUMNS if name not in header]
    if missing:
        raise InputError("header", header, f"not a SkyPilot catalogue: no column {', '.join(missing)}", str(path))
    if not content.endswith("\n") and len(lines) > 1 and _cells(lines[-1], len(header)) is None:
        raise InputError(f"line {len(lines)}", lines[-1], "the file is cut off here; fetch it again", str(path))
    return lines


def _cells(line: str, count: int) -> list[str] | None:
    """The cells of one line, None unless there are `count` of them."""
    try:
        cells = next(csv.reader([line], strict=True), [])
    except csv.Error:
        return None
    return cells if len(cells) == count else None


def _csv_rows(path: Path, report: SkypilotReport) -> Iterable[dict[str, str]]:
    """Well-formed rows with an accelerator, line by line, so that one bad quote costs one line."""
    lines = _lines(path)
    header = next(csv.reader(lines[:1]))
    for line_number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        report.read += 1
        cells = _cells(line, len(header))
        row = dict(zip(header, cells, strict=True)) if cells else {}
        fault = _fault(row) if cells else f"not {len(header)} columns"
        if fault:
            report.malformed.append((line_number, fault))
        elif row["AcceleratorName"]:
            yield row
        else:
            report.dropped["no accelerator"] += 1


def _fault(row: Mapping[str, str]) -> str | None:
    """What makes a row unusable, None if nothing does."""
    if not row["AcceleratorName"]:
        return None
    for column in ("AcceleratorCount", "Price", "SpotPrice"):
        cell = row.get(column, "")
        value = _float(cell)
        if (cell and value is None) or (value is not None and value < 0):
            return f"{column} = {cell!r}"
    if not _float(row["AcceleratorCount"]):
        return f"AcceleratorCount = {row['AcceleratorCount']!r}"
    gpu_info = row.get("GpuInfo", "")
    return "GpuInfo" if gpu_info.startswith("{") and not _gpu(gpu_info) else None


def _float(cell: str) -> float | None:
    try:
        return float(number("", float(cell), -1e9, 1e9))
    except ValueError:
        return None


@functools.lru_cache(maxsize=4096)
def _gpu(gpu_info: str) -> Mapping[str, Any]:
    """The first GPU of a GpuInfo cell (a Python literal or JSON); empty if there is none."""
    for parse in (ast.literal_eval, json.loads):
        try:
            gpu = parse(gpu_info)["Gpus"][0]
        except (ValueError, SyntaxError, TypeError, LookupError, RecursionError, MemoryError):
            continue
        if isinstance(gpu, Mapping):
            return gpu
    return {}


def _memory_gib(row: Mapping[str, str], provider: str) -> float | None:
    """Stated memory of one accelerator: some files give that of the node, and some call gigabytes MiB."""
    memory = _gpu(row.get("GpuInfo", "")).get("MemoryInfo")
    size = memory.get("SizeInMiB") if isinstance(memory, Mapping) else None
    if not isinstance(size, int | float) or size <= 0:
        return None
    count = float(row["AcceleratorCount"]) if provider in table("prices")["skypilot"]["per_node"] else 1.0
    return size / count / (1024.0 if size >= 1024 else 1.0)


def _known(row: Mapping[str, str], provider: str) -> tuple[str, float] | None:
    """Our id of a row's accelerator, and how many of them the row prices; None if we have no such row."""
    names = table("prices")["skypilot"]
    name, count = _plain(row["AcceleratorName"]), float(row["AcceleratorCount"])
    for part in names["slice"]:
        units = name.removeprefix(part["prefix"])
        if name.startswith(part["prefix"]) and units.isdecimal() and int(units):
            return part["id"], count * int(units) / part["per_chip"]
    gpu_name = _gpu(row.get("GpuInfo", "")).get("Name", "")
    hints = _plain(f"{row.get('InstanceType', '')} {gpu_name}")
    memory = _memory_gib(row, provider)
    for alias in names["alias"]:
        low, high = alias.get("memory_gib", (None, None))
        fits = low is None or (memory is not None and low <= memory <= high)
        if fits and name in map(_plain, alias["names"]) and alias.get("hint", "") in hints:
            return alias["id"], count
    return None


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def _row_prices(row: Mapping[str, str], provider: str, report: SkypilotReport) -> list[tuple[str, str, float]]:
    """(accelerator, term, USD per accelerator-hour) of a row; what it drops goes to the report."""
    known = _known(row, provider)
    if known is None:
        report.unknown[row["AcceleratorName"]] += 1
        report.dropped["accelerator not in the catalogue"] += 1
        return []
    is_slice = _plain(row["AcceleratorName"]).startswith("tpu-")
    if not row.get("InstanceType", "x") and not is_slice:
        report.dropped["accelerator without its machine"] += 1
        return []
    price, spot = _float(row["Price"]), _float(row.get("SpotPrice", ""))
    kept = []
    for term, value in (("on-demand", price), ("spot", spot)):
        reason = _sentinel(value, price if term == "spot" else None, is_slice)
        if reason:
            report.dropped[f"{term} {reason}"] += 1
        elif value is not None:
            kept.append((known[0], term, value / known[1]))
    report.used += bool(kept)
    return kept


def _sentinel(value: float | None, on_demand: float | None, is_slice: bool) -> str | None:
    """Why a price stands for "none", None if it is a price or the cell is empty."""
    if value is None:
        return None
    if value == 0:
        return "of 0.00"
    if is_slice and value == _TPU_SENTINEL_USD:
        return "of 700.00, a slice not sold"
    if on_demand and abs(value / on_demand - 1.0) < 1e-9:
        return "equal to on-demand"
    if on_demand and abs(value / on_demand - 0.1) < 1e-9:
        return "a tenth of on-demand"
    return None
