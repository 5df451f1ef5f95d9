"""The catalogue as tables on the screen; `?` marks what is only recalled, `!` what sources dispute."""

from collections.abc import Callable, Iterable

from rich.table import Table

from breakeven.models.catalog import table as data
from breakeven.models.hardware import Accelerator, accelerators, links
from breakeven.models.llm import llms
from breakeven.models.prices import price_rows
from breakeven.models.topology import STAGES, TOPOLOGIES, all_partitions


def _table(headings: Iterable[str], caption: str) -> Table:
    out = Table(box=None, pad_edge=False, caption=caption, caption_justify="left", caption_style="dim")
    for i, heading in enumerate(headings):
        out.add_column(heading, justify="left" if i == 0 else "right", overflow="fold")
    return out


def _marked(row: Accelerator, value: float, *fields: str) -> str:
    """A number with its trust mark; `-` where there is none."""
    if not value:
        return "-"
    mark = "?" if any(f in row.recalled for f in fields) else ""
    mark += "!" if any(f in row.disputed for f in fields) else ""
    return f"{value:,.4g}{mark}"


def _accelerators() -> Table:
    headings = ("id", "BF16 TFLOP/s", "FP8", "INT8", "FP4", "GiB", "GB/s", "scale-up GB/s", "domain", "NIC Gb/s", "W")
    out = _table(
        (*headings, "confidence"),
        "dense peaks; scale-up per direction; ? recalled, not looked up; ! sources disagree; - lacks it or unpublished",
    )
    for row in accelerators().values():
        out.add_row(
            row.id,
            _marked(row, row.bf16_flops_per_s / 1e12, "bf16_tflops"),
            _marked(row, row.fp8_flops_per_s / 1e12, "fp8_tflops"),
            _marked(row, row.int8_flops_per_s / 1e12, "int8_tops"),
            _marked(row, row.fp4_flops_per_s / 1e12, "fp4_tflops"),
            _marked(row, row.memory_bytes / 2**30, "memory_gib"),
            _marked(row, row.memory_bandwidth_bytes_per_s / 1e9, "memory_bandwidth_gbs"),
            _marked(row, row.scaleup_bytes_per_s / 1e9, "scaleup_gbs", "scaleup_link"),
            _marked(row, row.scaleup_domain, "scaleup_domain"),
            _marked(row, row.nic_bytes_per_s * 8 / 1e9, "nic_gbps"),
            _marked(row, row.power_w, "power_w"),
            row.confidence,
        )
    return out


def _llms() -> Table:
    out = _table(
        ("name", "total", "active", "KV KiB/token (bf16)", "context", "ships in", "source"),
        "parameters in billions, computed from the configuration; * has fields not verified",
    )
    for name, a in llms().items():
        out.add_row(
            name + ("*" if a.unverified else ""),
            f"{a.total_parameters / 1e9:,.2f}",
            f"{a.active_parameters / 1e9:,.2f}",
            f"{(a.kv_elements_per_token + a.index_elements_per_token) * 2 / 1024:,.1f}",
            f"{a.max_context:,}",
            a.native_dtype,
            a.source,
        )
    return out


def _links() -> Table:
    out = _table(("id", "kind", "GB/s", "per", "latency us", "achieved"), "per direction; ? recalled, ! disputed")
    for row in links().values():
        mark = {
            name: ("?" if name in row.recalled else "") + ("!" if name in row.disputed else "")
            for name in ("gbs", "latency_us", "efficiency")
        }
        out.add_row(
            row.id,
            row.kind,
            f"{row.bytes_per_s / 1e9:,.4g}{mark['gbs']}",
            row.per,
            f"{row.latency_s * 1e6:,.3g}{mark['latency_us']}",
            f"{row.efficiency:.0%}{mark['efficiency']}",
        )
    return out


def _prices() -> Table:
    out = _table(
        ("accelerator", "provider", "term", "USD per hour", "as of", "confidence", "source"), "per accelerator"
    )
    for row in price_rows():
        out.add_row(
            row.accelerator, row.provider, row.term, f"{row.usd_per_hour:,.4g}", row.as_of, row.confidence, row.source
        )
    return out


def _workloads() -> Table:
    out = _table(("preset", "summary", "assumed fields", "sources"), "every field can be overridden in a study")
    for name, row in data("workloads").items():
        out.add_row(name, row["summary"], ", ".join(row.get("assumptions", [])) or "-", "; ".join(row["sources"]))
    return out


def _topologies() -> Table:
    out = _table(("name", "pools", "about"), f"stages: {', '.join(STAGES)}; {len(all_partitions())} partitions in all")
    for topology in TOPOLOGIES.values():
        pools = [
            "{" + " ".join(s for s, label in zip(STAGES, topology.labels, strict=True) if label == i) + "}"
            for i in range(len(topology.pools))
        ]
        out.add_row(topology.name, " ".join(pools), topology.about)
    return out


def _support() -> Table:
    out = _table(("engine", "what", "status", "on", "source", "note"), "what is not listed is not documented")
    for engine, row in data("support").items():
        if not isinstance(row, dict):
            continue
        for group in ("topologies", "generations", "weights", "kv"):
            for name, fact in row[group].items():
                kinds = ", ".join(fact.get("generations", [])) or "-"
                cells = fact.get("status", "yes"), kinds, fact["source"], fact.get("note", "-")
                out.add_row(engine, f"{group} {name}", *cells)
        for name in ("mixed_vendors", "unlike_weights", "offload"):
            fact = row[name]
            out.add_row(engine, name.replace("_", " "), fact["status"], "-", fact["source"], fact.get("note", "-"))
    return out


TABLES: dict[str, Callable[[], Table]] = {
    "accelerators": _accelerators,
    "llms": _llms,
    "links": _links,
    "prices": _prices,
    "workloads": _workloads,
    "topologies": _topologies,
    "support": _support,
}
