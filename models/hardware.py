"""Accelerators and links: catalogue rows, whole definitions and variations of rows, in SI units."""

import dataclasses
import functools
import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from breakeven.models.catalog import table
from breakeven.models.inputs import InputError, known_fields, number, pick

_KINDS = ("scale-up", "scale-out", "host", "memory", "on-package")
_TEXTS = ("vendor", "generation", "status", "confidence", "as_of", "notes")
_PEAKS = ("bf16_tflops", "fp8_tflops", "int8_tops", "fp4_tflops")
_OWN_SHARES = ("gemm_bf16_share", "gemm_fp8_share")

# Sane range of each number of accelerators.toml, in its units; whole numbers in _WHOLE.
_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(_PEAKS, (0.0, 1e6)),
    **dict.fromkeys(_OWN_SHARES, (0.01, 2.0)),
    "year": (2000, 2100),
    "memory_gib": (0.01, 1e5),
    "memory_bandwidth_gbs": (1.0, 1e8),
    "sram_mib": (0.0, 1e6),
    "scaleup_gbs": (0.0, 1e5),
    "scaleup_pair_gbs": (0.0, 1e5),
    "scaleup_domain": (1, 1e5),
    "per_instance": (1, 1024),
    "nic_gbps": (0.0, 1e5),
    "host_gbs": (0.0, 1e5),
    "power_w": (0.0, 1e5),
    "all_in_kw": (0.0, 1e3),
    "usd_per_hour": (0.0, 1e4),
}
_WHOLE = ("year", "scaleup_domain", "per_instance")
_REQUIRED = ("memory_gib", "memory_bandwidth_gbs")
_FIELDS = (
    *_RANGES,
    *_TEXTS,
    "name",
    "scaleup_link",
    "host_link",
    "priced_as",
    "recalled",
    "disputed",
    "sources",
)

# What each factor of a variation multiplies.
_FACTORS: dict[str, tuple[str, ...]] = {
    "compute": _PEAKS,
    "memory_bandwidth": ("memory_bandwidth_gbs",),
    "scaleup": ("scaleup_gbs", "scaleup_pair_gbs"),
    "nic": ("nic_gbps",),
    "price": ("price_factor",),
}
# Numbers of the base that a variation drops when it states the key, because they followed from its old value.
_FOLLOWS = {
    "scaleup_link": ("scaleup_gbs", "scaleup_pair_gbs"),
    "host_link": ("host_gbs",),
}

_LINK_RANGES = {"gbs": (1e-3, 1e6), "latency_us": (0.0, 1e6), "efficiency": (0.01, 1.0)}
_LINK_FIELDS = (*_LINK_RANGES, "name", "kind", "per", "recalled", "disputed", "sources", "as_of", "notes")


@dataclass(frozen=True)
class Link:
    """A way to move bytes between two ends."""

    id: str
    kind: str  # scale-up, scale-out, host, memory or on-package
    bytes_per_s: float  # on paper, per direction
    per: str  # what has that much: an accelerator, a port, a device, a node
    latency_s: float
    efficiency: float  # fraction of bytes_per_s that a large transfer achieves
    recalled: tuple[str, ...] = ()  # file fields whose number was remembered, with no source opened
    disputed: Mapping[str, str] = field(default_factory=dict, hash=False)  # file field -> what others say
    sources: tuple[str, ...] = ()
    as_of: str = ""
    notes: str = ""


@dataclass(frozen=True)
class Accelerator:
    """One accelerator. Peaks are dense; 0.0 stands for what it lacks or nobody published (power included)."""

    id: str
    name: str
    vendor: str
    generation: str  # whose achieved shares of the peaks apply
    status: str
    year: int
    bf16_flops_per_s: float
    fp8_flops_per_s: float
    int8_flops_per_s: float
    fp4_flops_per_s: float
    memory_bytes: float  # usable
    memory_bandwidth_bytes_per_s: float
    sram_bytes: float
    scaleup_link: str
    scaleup_bytes_per_s: float  # per direction, to all peers together
    scaleup_pair_bytes_per_s: float  # per direction, to one peer
    scaleup_domain: int  # accelerators that reach each other over it
    per_instance: int  # accelerators of the node rented or bought whole
    nic_bytes_per_s: float
    host_link: str
    host_bytes_per_s: float  # per direction
    power_w: float
    all_in_power_w: float  # with its share of server, network and facility
    price_factor: float  # multiplies whatever price applies
    priced_as: str  # id whose price applies
    usd_per_hour: float | None  # its own price, before price_factor
    product_shares: Mapping[str, float] = field(default_factory=dict, hash=False)  # by operator: measured on this one
    recalled: tuple[str, ...] = ()  # file fields whose number was remembered, with no source opened
    derived: tuple[str, ...] = ()  # file fields computed here from others
    disputed: Mapping[str, str] = field(default_factory=dict, hash=False)  # file field -> what others say
    sources: tuple[str, ...] = ()
    as_of: str = ""
    confidence: str = ""
    notes: str = ""


@functools.cache
def links() -> dict[str, Link]:
    """The links of the catalogue by id."""
    return {name: _link(name, row, f"links.{name}") for name, row in table("links").items()}


@functools.cache
def accelerators() -> dict[str, Accelerator]:
    """The accelerators of the catalogue by id."""
    return {name: _accelerator(name, row, name) for name, row in _rows().items()}


def _rows() -> Mapping[str, Mapping[str, Any]]:
    return table("accelerators")


def accelerator(
    spec: str | Mapping[str, Any], field: str = "accelerator", changes: Mapping[str, Any] | None = None
) -> Accelerator:
    """An accelerator by name, as a whole definition, or as a variation of a catalogue row.

    A definition maps `name` and the fields of accelerators.toml, in its units, and perhaps `usd_per_hour`.
    A variation says `like: id`; its `compute`, `memory_bandwidth`, `scaleup`, `nic` and `price` are factors
    on that row, all other fields replace its own. A `scaleup_link` or `host_link` brings its own bandwidth
    unless one is stated; `power_w` scales the all-in power along. `changes` are such fields, laid over the spec; the
    accelerator keeps its id and name.

    >>> fast = accelerator({"like": "h100-sxm", "compute": 2.0, "price": 1.5})
    >>> fast.bf16_flops_per_s, fast.price_factor
    (1978000000000000.0, 1.5)
    """
    if changes:
        own = accelerator(spec, field)
        changed = accelerator(_changed(spec, changes), field)
        return dataclasses.replace(changed, id=own.id, name=own.name, priced_as=own.priced_as)
    if not isinstance(spec, Mapping):
        return accelerators()[pick(field, spec, accelerators())]
    known_fields(spec, (*_FIELDS, "like", *_FACTORS) if "like" in spec else _FIELDS, field)
    row, base = _varied(spec, _rows(), _FOLLOWS, field)
    factors = {key: _factor(spec, key, field) for key in _FACTORS if key in spec}
    name = _new_name(spec, accelerators(), field)
    if base and "all_in_kw" not in spec and "power_w" in spec:
        row = _scale_all_in(row, _rows()[base])
    return _accelerator(_slug(name), row | {"name": name}, field, factors, base or _slug(name))


def link(spec: str | Mapping[str, Any], field: str = "link", changes: Mapping[str, Any] | None = None) -> Link:
    """A link by name, as a whole definition, or as `{like: id, bandwidth: factor, latency_us: …}`.

    `changes` are such fields, laid over the spec; the link keeps its id.

    >>> link({"like": "ib-ndr-400", "bandwidth": 2.0}).bytes_per_s
    100000000000.0
    """
    if changes:
        return dataclasses.replace(link(_changed(spec, changes), field), id=link(spec, field).id)
    if not isinstance(spec, Mapping):
        return links()[pick(field, spec, links())]
    known_fields(spec, (*_LINK_FIELDS, "like", "bandwidth") if "like" in spec else _LINK_FIELDS, field)
    row, _ = _varied(spec, table("links"), {}, field)
    factor = _factor(spec, "bandwidth", field) if "bandwidth" in spec else 1.0
    return _link(_slug(_new_name(spec, links(), field)), row, field, factor)


def _changed(spec: str | Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The spec as a variation with `changes` laid over it, under a name that hides nothing."""
    base = {"like": spec} if isinstance(spec, str) else dict(spec)
    return {**base, **changes, "name": f"{base.get('name', base.get('like'))}, changed"}


def _slug(name: str) -> str:
    return re.sub(r"\s+", "-", name.strip().lower())


def _factor(spec: Mapping[str, Any], key: str, field: str) -> float:
    return number(f"{field}.{key}", spec[key], 0.0 if key == "price" else 0.01, 100.0)


def _new_name(spec: Mapping[str, Any], taken: Mapping[str, Any], field: str) -> str:
    """The name given, or that of the base with a star; it must not hide a catalogue row."""
    name = spec.get("name", f"{spec['like']}*" if "like" in spec else None)
    if not isinstance(name, str) or not name.strip():
        raise InputError(f"{field}.name", name, "a name, for reports")
    if _slug(name) in taken:
        raise InputError(f"{field}.name", name, "is a row of the catalogue; choose another name")
    return name


def _varied(
    spec: Mapping[str, Any], rows: Mapping[str, Any], follows: Mapping[str, tuple[str, ...]], field: str
) -> tuple[dict[str, Any], str]:
    """The row that `spec` states outright, laid over its base if it is a variation; and the base's id."""
    stated = {key: value for key, value in spec.items() if key not in (*_FACTORS, "like", "bandwidth")}
    if "like" not in spec:
        return stated, ""
    base = pick(f"{field}.like", spec["like"], rows)
    dropped = {name for key in stated for name in follows.get(key, ())}
    if stated.get("scaleup_link") == "none":
        dropped.add("scaleup_domain")
    changed = dropped | set(stated)
    row = {key: value for key, value in rows[base].items() if key not in dropped} | stated
    row["recalled"] = stated.get("recalled", [f for f in rows[base].get("recalled", ()) if f not in changed])
    row["disputed"] = stated.get(
        "disputed", {f: t for f, t in rows[base].get("disputed", {}).items() if f not in changed}
    )
    row["sources"] = stated.get("sources", [f"variation of {base}", *rows[base]["sources"]])
    return row, base


def _scale_all_in(row: dict[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """All-in power in proportion to the changed power; none where it will be derived anyway."""
    if "all_in_kw" not in base or not base.get("power_w") or not isinstance(row["power_w"], int | float):
        return row
    return row | {"all_in_kw": base["all_in_kw"] * row["power_w"] / base["power_w"]}


@functools.cache
def all_in_factor() -> float:
    """All-in power over accelerator power: the median of rows with both, undisputed and not recalled.

    Seven rows from InferenceX-app @77ca49a (2026-04-03), from 1.75 (GB200) to 2.47 (H100): 2.18.
    """
    doubtful = {name: (*row.get("recalled", ()), *row.get("disputed", ())) for name, row in _rows().items()}
    return statistics.median(
        1e3 * row["all_in_kw"] / row["power_w"]
        for name, row in _rows().items()
        if {"all_in_kw", "power_w"} <= row.keys() and "all_in_kw" not in doubtful[name]
    )


def _numbers(row: Mapping[str, Any], field: str) -> dict[str, float]:
    """The numbers that a row states, each checked against its sane range."""
    return {
        name: number(f"{field}.{name}", row[name], low, high, whole=name in _WHOLE)
        for name, (low, high) in _RANGES.items()
        if row.get(name) is not None
    }


def _strings(row: Mapping[str, Any], name: str, field: str) -> tuple[str, ...]:
    value = row.get(name, ())
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise InputError(f"{field}.{name}", value, "a list of texts")
    return tuple(value)


def _text(row: Mapping[str, Any], name: str, field: str, default: str = "") -> str:
    value = row.get(name, default)
    if not isinstance(value, str):
        raise InputError(f"{field}.{name}", value, "a text")
    return value


def _disputes(row: Mapping[str, Any], field: str) -> dict[str, str]:
    value = row.get("disputed", {})
    if not isinstance(value, Mapping):
        raise InputError(f"{field}.disputed", value, "a table of field: text")
    return {str(key): str(text) for key, text in value.items()}


def _link_gbs(row: Mapping[str, Any], name: str, field: str) -> tuple[str, float]:
    """The id of a row's link and its GB/s; ("none", 0.0) where the row has none."""
    link_id = row.get(name, "none")
    if link_id == "none":
        return "none", 0.0
    return pick(f"{field}.{name}", link_id, (*links(), "none")), links()[link_id].bytes_per_s / 1e9


def _check(n: Mapping[str, float], field: str) -> None:
    """What makes a row unusable: no memory, no peak, or a scale-up domain that nothing joins."""
    for name in _REQUIRED:
        if name not in n:
            raise InputError(f"{field}.{name}", None, "missing; a definition needs it (or say `like: <id>`)")
    if not any(n.get(peak) for peak in _PEAKS):
        raise InputError(f"{field}.bf16_tflops", None, f"missing; give at least one of {', '.join(_PEAKS)}")
    if n["scaleup_domain"] > 1 and not n["scaleup_gbs"]:
        raise InputError(f"{field}.scaleup_domain", n["scaleup_domain"], "needs a scaleup_link or scaleup_gbs")


def _filled(row: Mapping[str, Any], field: str) -> tuple[dict[str, float], list[str]]:
    """A row's numbers with what follows from others filled in, and the names of the fields so derived."""
    n = _numbers(row, field)
    n.setdefault("scaleup_gbs", _link_gbs(row, "scaleup_link", field)[1])
    n["scaleup_pair_gbs"] = min(n.get("scaleup_pair_gbs", math.inf), n["scaleup_gbs"])
    n.setdefault("host_gbs", _link_gbs(row, "host_link", field)[1])
    derived = [] if "all_in_kw" in n or not n.get("power_w") else ["all_in_kw"]
    if derived:
        n["all_in_kw"] = n["power_w"] * all_in_factor() / 1e3
    for name in (*_PEAKS, "year", "sram_mib", "nic_gbps", "power_w", "all_in_kw"):
        n.setdefault(name, 0.0)
    return {"scaleup_domain": 1.0, "per_instance": 1.0, "price_factor": 1.0} | n, derived


def _accelerator(
    id: str,
    row: Mapping[str, Any],
    field: str,
    factors: Mapping[str, float] | None = None,
    priced_as: str = "",
) -> Accelerator:
    """A record in SI units from a row in vendor units."""
    n, derived = _filled(row, field)
    _check(n, field)
    for key, factor in (factors or {}).items():
        n |= {name: factor * n[name] for name in _FACTORS[key]}
    return Accelerator(
        id=id,
        name=_text(row, "name", field, id),
        **{name: _text(row, name, field) for name in _TEXTS},
        year=int(n["year"]),
        bf16_flops_per_s=n["bf16_tflops"] * 1e12,
        fp8_flops_per_s=n["fp8_tflops"] * 1e12,
        int8_flops_per_s=n["int8_tops"] * 1e12,
        fp4_flops_per_s=n["fp4_tflops"] * 1e12,
        memory_bytes=n["memory_gib"] * 2.0**30,
        memory_bandwidth_bytes_per_s=n["memory_bandwidth_gbs"] * 1e9,
        sram_bytes=n["sram_mib"] * 2.0**20,
        scaleup_link=_link_gbs(row, "scaleup_link", field)[0],
        scaleup_bytes_per_s=n["scaleup_gbs"] * 1e9,
        scaleup_pair_bytes_per_s=n["scaleup_pair_gbs"] * 1e9,
        scaleup_domain=int(n["scaleup_domain"]),
        per_instance=int(n["per_instance"]),
        nic_bytes_per_s=n["nic_gbps"] * 1e9 / 8.0,
        host_link=_link_gbs(row, "host_link", field)[0],
        host_bytes_per_s=n["host_gbs"] * 1e9,
        power_w=n["power_w"],
        all_in_power_w=n["all_in_kw"] * 1e3,
        price_factor=n["price_factor"],
        priced_as=_priced_as(row, priced_as or id, field),
        usd_per_hour=n.get("usd_per_hour"),
        product_shares={name.removesuffix("_share"): n[name] for name in _OWN_SHARES if name in n},
        recalled=_strings(row, "recalled", field),
        derived=tuple(derived),
        disputed=_disputes(row, field),
        sources=_strings(row, "sources", field),
    )


def _priced_as(row: Mapping[str, Any], default: str, field: str) -> str:
    return pick(f"{field}.priced_as", row["priced_as"], _rows()) if "priced_as" in row else default


def _link(id: str, row: Mapping[str, Any], field: str, factor: float = 1.0) -> Link:
    """A link in SI units from a row in vendor units."""
    n = {name: number(f"{field}.{name}", row.get(name), low, high) for name, (low, high) in _LINK_RANGES.items()}
    return Link(
        id=id,
        kind=pick(f"{field}.kind", row.get("kind"), _KINDS),
        bytes_per_s=n["gbs"] * factor * 1e9,
        per=_text(row, "per", field, "accelerator"),
        latency_s=n["latency_us"] * 1e-6,
        efficiency=n["efficiency"],
        recalled=_strings(row, "recalled", field),
        disputed=_disputes(row, field),
        sources=_strings(row, "sources", field),
        as_of=_text(row, "as_of", field),
        notes=_text(row, "notes", field),
    )
