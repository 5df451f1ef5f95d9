"""How well published runs are predicted when they are played again: per load, metric and kind of deployment."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

from breakeven.studies.replayed import replayed
from breakeven.studies.runs import METRICS, Run, read_runs
from breakeven.studies.validate import NO_ROOM, excluded

WORDS = {
    "ttft_ms": "TTFT",
    "tpot_ms": "TPOT",
    "e2e_s": "call time",
    "ttft_p99_ms": "TTFT p99",
    "tpot_p99_ms": "TPOT p99",
    "e2e_p99_s": "call time p99",
    "output_tok_s_total": "output tokens/s",
}
GROUPS = ("load", "source", "system", "model")
EACH = 12  # runs that are shown one by one
EACH_HEADINGS = ("run", "metric", "predicted", "measured", "error")
HEADINGS = ("by", "", "metric", "rows", "MAPE", "median", "bias", "within 30 %")


def validate_runs(path: str | Path, labels: str | Path | None = None) -> pd.DataFrame:
    """One row per run: its predictions, what was measured, why it is excluded, and its groups."""
    runs = read_runs(path, labels)
    return pd.DataFrame([_row(run, found) for run, found in zip(runs, replayed(runs), strict=True)])


def _row(run: Run, found: dict[str, float]) -> dict[str, Any]:
    point = run.point
    short = not point.excluded and np.isnan(found["output_tok_s_total"])
    layout = point.layouts[0] if point.layouts else None
    return (
        {"id": point.id}
        | found
        | {f"measured_{name}": run.measured[name] for name in METRICS}
        | {
            "excluded": NO_ROOM if short else point.excluded,
            "load": run.kind,
            "source": point.source,
            "model": point.model,
            "system": point.accelerator,
            "backend": point.engine,
            "precision": point.precision,
            "prompt_tokens": point.prompt_tokens,
            "output_tokens": point.output_tokens,
            "concurrency": point.concurrency,
            "requests_per_second": run.rate,
            "requests": len(run.starts_s),
            "accelerators": layout.accelerators * layout.workers if layout else np.nan,
        }
    )


def errors(table: pd.DataFrame, metric: str) -> dict[str, float]:
    """Figures of one metric over the rows that measured it and count: shares (0.1 = 10 %), and their number."""
    ratio = (table[metric] / table[f"measured_{metric}"]).to_numpy(float)
    ratio = ratio[np.isfinite(ratio) & (table["excluded"] == "").to_numpy()]
    if not len(ratio):
        return {"rows": 0}
    off = np.abs(ratio - 1.0)
    return {
        "rows": len(ratio),
        "mape": float(off.mean()),
        "median": float(np.median(off)),
        "bias": float(np.median(ratio)) - 1.0,
        "within": float(np.mean(off <= 0.3)),
    }


def report(table: pd.DataFrame) -> list[tuple[str, str, str, dict[str, float]]]:
    """(group, value, metric, errors) of every group that has rows of a metric."""
    used = table.loc[table["excluded"] == ""]
    lines = []
    for group in GROUPS:
        values = sorted(set(used[group]))
        for value in values if group == "load" or len(values) > 1 else ():
            here = used.loc[used[group] == value]
            found = [(name, errors(here, name)) for name in METRICS]
            lines += [(group, str(value), WORDS[name], e) for name, e in found if e["rows"]]
    return lines


def _cells(line: tuple[str, str, str, dict[str, float]]) -> list[str]:
    group, value, metric, e = line
    shares = f"{e['mape']:.1%}", f"{e['median']:.1%}", f"{e['bias']:+.0%}", f"{e['within']:.0%}"
    return [group, value, metric, f"{e['rows']:,.0f}", *shares]


def _counts(table: pd.DataFrame) -> list[tuple[str, int]]:
    good = len(table.loc[table["excluded"] == ""])
    counts: dict[str, int] = cast(Any, excluded(table)).to_dict()
    reasons = [(f"excluded: {reason}", count) for reason, count in counts.items()]
    return [("all", len(table)), ("predicted", good), *reasons]


def each(table: pd.DataFrame) -> list[list[str]]:
    """Of few runs a line per metric: predicted, measured and the error; none where there are many."""
    used = table.loc[table["excluded"] == ""]
    rows = cast(Any, used).to_dict("records") if len(used) <= EACH else []
    return [
        [str(row["id"]), WORDS[name], f"{row[name]:,.4g}", f"{seen:,.4g}", f"{row[name] / seen - 1.0:+.1%}"]
        for row in rows
        for name in METRICS
        if (seen := row[f"measured_{name}"]) > 0.0
    ]


def show(table: pd.DataFrame, console: Console) -> None:
    """Rows, reasons, each of few runs, and errors by load, source, system and model."""
    for words, count in _counts(table):
        console.print(f"{count:>7,}  {words}", highlight=False)
    alone = Table(*EACH_HEADINGS, box=None, pad_edge=False)
    for line in each(table):
        alone.add_row(*line)
    if alone.rows:
        console.print(alone)
    out = Table(box=None, pad_edge=False)
    for k, name in enumerate(HEADINGS):
        out.add_column(name, justify="left" if k < 3 else "right")
    for line in report(table):
        out.add_row(*_cells(line))
    console.print(out)


def markdown(table: pd.DataFrame) -> str:
    """The same as Markdown tables, for docs."""
    lines = ["| rows | |", "|---|---:|", *[f"| {words} | {count:,} |" for words, count in _counts(table)], ""]
    if each(table):
        lines += [f"| {' | '.join(EACH_HEADINGS)} |", "|---|---|---:|---:|---:|"]
        lines += [*(f"| {' | '.join(line)} |" for line in each(table)), ""]
    lines += [f"| {' | '.join(HEADINGS)} |", "|---|---|---|" + "---:|" * (len(HEADINGS) - 3)]
    lines += [f"| {' | '.join(_cells(line))} |" for line in report(table)]
    return "\n".join(lines) + "\n"
