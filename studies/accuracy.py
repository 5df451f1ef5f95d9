"""What `validate` and `calibrate` print: tables of errors, coverage, and what the fit moved."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from breakeven.models.catalog import table as catalog_table
from breakeven.studies.calibrate import SETTINGS
from breakeven.studies.calibrated import Calibration, summary
from breakeven.studies.kernel_fit import FittedCurve, curve_table, errors_by_kind
from breakeven.studies.validate import BAND, SPENT, best_order, coverage, excluded, held, report

FIGURES = ("mape", "median", "bias", "rank")
HEADINGS = ("MAPE", "median", "bias", "Spearman")


def show_validation(table: pd.DataFrame, console: Console) -> None:
    """Coverage, reasons, and errors by group."""
    covered = coverage(table)
    console.print(
        f"{covered['predicted']:,.0f} of {covered['rows']:,.0f} rows predicted ({covered['share']:.0%}; "
        f"{covered['able_share']:.1%} of the {covered['able']:,.0f} that carry the needed fields): "
        f"{covered['predicted_measurements']:,.0f} of {covered['measurements']:,.0f} measurements, copies counted once"
    )
    for reason, count in excluded(table).items():
        console.print(f"  {count:>5,}  excluded: {reason}")
    if covered["predicted"]:
        console.print(errors_table(table))
        console.print(_coverage_words(table), highlight=False, soft_wrap=True)
        order = best_order(table)
        if not math.isnan(order):
            console.print(f"rank correlation of throughput inside a workload, median: {order:.2f}")


def _coverage_words(table: pd.DataFrame) -> str:
    found = held(table)
    words = f"measured inside the stated 80 % interval: TTFT {found['ttft']:.0%}, TPOT {found['tpot']:.0%}"
    if SPENT in set(table["excluded"]):
        return words
    apart = catalog_table("residuals")["coverage"]
    return f"{words} (TTFT {apart['ttft']:.0%}, TPOT {apart['tpot']:.0%} on pairs that neither fit nor interval saw)"


def errors_table(table: pd.DataFrame) -> Table:
    """Errors of TTFT and TPOT, one line per group."""
    out = Table(box=None, pad_edge=False)
    for name in ("by", "", "rows"):
        out.add_column(name, justify="right" if name == "rows" else "left")
    for metric in ("TTFT", "TPOT"):
        for heading in HEADINGS:
            out.add_column(f"{metric} {heading}", justify="right")
    for group, value, found in report(table):
        cells = [_cell(found[f"{m}_{f}"], f) for m in ("ttft", "tpot") for f in FIGURES]
        out.add_row(group, value, f"{found['rows']:,.0f}", *cells)
    return out


def markdown(table: pd.DataFrame) -> str:
    """Coverage, reasons and errors as Markdown tables, for docs."""
    covered = coverage(table)
    lines = [
        "| rows | |",
        "|---|---:|",
        f"| all | {covered['rows']:,.0f} |",
        f"| that carry the fields a prediction needs | {covered['able']:,.0f} |",
        f"| predicted | {covered['predicted']:,.0f} ({covered['able_share']:.1%} of these) |",
    ]
    lines += [f"| excluded: {reason} | {count:,} |" for reason, count in excluded(table).items()]
    titles = ["by", "", "rows", *[f"{m} {h}" for m in ("TTFT", "TPOT") for h in HEADINGS]]
    lines += ["", f"| {' | '.join(titles)} |", "|---|---|" + "---:|" * (len(titles) - 2)]
    for group, value, found in report(table):
        cells = [_cell(found[f"{m}_{f}"], f) for m in ("ttft", "tpot") for f in FIGURES]
        lines.append(f"| {' | '.join([group, value, format(int(found['rows']), ','), *cells])} |")
    return "\n".join(lines) + "\n"


def _cell(value: float, figure: str) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:.2f}" if figure == "rank" else f"{value:+.0%}" if figure == "bias" else f"{value:.1%}"


def _slices(found: Calibration) -> dict[str, NDArray[np.bool_]]:
    """Points by what they are: all engines of one pool, their room in the KV cache, split ones, stacks, pairs."""
    one = np.array([p.mode == "agg" for p in found.points])
    roomy = one & (found.fill < SETTINGS["most_fill"])
    away = one & ~((found.fill >= BAND[0]) & (found.fill <= BAND[1]))
    slices = {"all of one pool": one, f"outside {BAND[0]}-{BAND[1]} of KV capacity": away, "below half of it": roomy}
    slices["split deployments"] = ~one
    for engine in sorted({p.engine for p in found.points}):
        slices[f"{engine}, below half"] = roomy & np.array([p.engine == engine for p in found.points])
    for pair in sorted({p.combination for p in found.points}):
        slices[" on ".join(pair)] = roomy & np.array([p.combination == pair for p in found.points])
    return {words: where for words, where in slices.items() if where.any()}


def calibration_markdown(found: Calibration) -> str:
    """Errors in the fit and left out as a Markdown table, for docs."""
    titles = ("points", "n", "TTFT in the fit", "TTFT left out", "TPOT in the fit", "TPOT left out")
    lines = [f"| {' | '.join(titles)} |", "|---|" + "---:|" * (len(titles) - 1)]
    for words, where in _slices(found).items():
        both = summary(found.seen, where), summary(found.unseen, where)
        cells = [f"{e[f'{m}_mape']:.1%} / {e[f'{m}_median']:.1%}" for m in ("ttft", "tpot") for e in both]
        lines.append(f"| {' | '.join([words, format(both[0]['rows'], ','), *cells])} |")
    return "\n".join(lines) + "\n"


def kernels_markdown(found: Sequence[FittedCurve]) -> str:
    """Errors of the curves by kind of operator as a Markdown table: the catalogue's, and all that were fitted."""
    titles = ("operator", "rows", "median", "worst decile", "all kernels: rows", "median", "worst decile")
    lines = [f"| {' | '.join(titles)} |", "|---|" + "---:|" * (len(titles) - 1)]
    taken, every = errors_by_kind(found, only_shipped=True), errors_by_kind(found)
    for kind in taken:
        pairs = [(e["rows"], e["median"], e["worst_decile"]) for e in (taken[kind], every[kind])]
        cells = [cell for n, m, w in pairs for cell in (f"{n:,.0f}", f"{m:.1%}", f"{w:.0%}")]
        lines.append(f"| {' | '.join([kind.replace('_', ' '), *cells])} |")
    return "\n".join(lines) + "\n"


def show_calibration(found: Calibration, console: Console) -> None:
    """Errors seen and left out, and the parameters the data moved."""
    for words, where in _slices(found).items():
        for name, residuals in (("in the fit", found.seen), ("pair left out", found.unseen)):
            e = summary(residuals, where)
            console.print(
                f"{words}, {name}: {e['rows']} points, TTFT MAPE {e['ttft_mape']:.1%} median {e['ttft_median']:.1%}, "
                f"TPOT MAPE {e['tpot_mape']:.1%} median {e['tpot_median']:.1%}, TTFT trimmed {e['ttft_trimmed']:.1%}"
            )
    out = Table(box=None, pad_edge=False)
    for name in ("field", "of", "prior", "fitted", "moved, sd"):
        out.add_column(name)
    for row in found.table.to_dict("records"):
        figures = f"{row['prior']:.3g}", f"{row['value']:.3g}", f"{row['moved_sd']:+.1f}"
        out.add_row(row["field"], row["owner"], *figures)
    console.print(out)


def show_kernels(found: Sequence[FittedCurve], left: Mapping[str, int], console: Console) -> None:
    """Every curve with its errors, those of the catalogue marked; errors by kind of operator; rows left out."""
    out = Table(box=None, pad_edge=False)
    for name in ("operator", "generation", "kernel", "", "rows", "beyond caches", "median", "worst decile"):
        out.add_column(name, justify="left" if name in ("operator", "generation", "kernel", "") else "right")
    for row in curve_table(found).sort_values(["operator", "generation"]).to_dict("records"):
        kernel, mark = f"{row['library']} {row['variant']}".strip(), "shipped" if row["shipped"] else ""
        counts = f"{row['rows']:,.0f}", f"{row['beyond_caches']:,.0f}"
        errors = _cell(row["median"], ""), _cell(row["worst_decile"], "")
        out.add_row(row["operator"], row["generation"], kernel, mark, *counts, *errors)
    console.print(out)
    for words, only in (("all curves", False), ("the catalogue's", True)):
        for kind, e in errors_by_kind(found, only).items():
            console.print(
                f"{words}, {kind}: {e['rows']:,.0f} rows beyond the caches, "
                f"median error {e['median']:.1%}, worst decile {e['worst_decile']:.1%}"
            )
    for reason, count in left.items():
        console.print(f"  {count:>6,}  left out: {reason}")
