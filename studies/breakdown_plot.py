"""The picture of bills: where a call's time and an hour's dollars go, for the best of each topology."""

from pathlib import Path
from typing import Any

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from breakeven.studies.attribution import ROWS, STAGES, Bill
from breakeven.studies.figures import legend_below, made_by, plt, save, style

HATCHES = ("", "//", "..", "xx")


def breakdown(bills: dict[str, Bill], record: dict[str, Any], path: Path) -> None:
    """Write stacked bars of every topology's bills; a topology that gains by less than nothing shows it below zero."""
    palette = sns.color_palette("colorblind")
    looks = {name: (palette[i % len(palette)], HATCHES[i // len(palette)]) for i, name in enumerate(ROWS)}
    with style():
        figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.6), layout="constrained")
        _stacked(left, {name: bill.seconds for name, bill in bills.items()}, looks)
        _stacked(right, {name: bill.usd_per_hour for name, bill in bills.items()}, looks)
        left.set(title="a mean call", ylabel="s")
        right.set(title="an hour", ylabel="USD per hour")
        shown = [n for n in ROWS if any(b.seconds[n] or b.usd_per_hour[n] for b in bills.values())]
        handles = [
            Patch(facecolor=looks[n][0], hatch=looks[n][1], edgecolor="black", label=_words(n, bills)) for n in shown
        ]
        legend_below(figure, handles, 4)
        resolved = record["resolved"]
        figure.suptitle(
            f"{record['study']['name']}: where time and money go, {resolved['workload']['name']} on "
            f"{resolved['llm']['name']}",
            x=0.01,
            ha="left",
            weight="bold",
        )
        save(figure, path, made_by(record, "the best of each topology"))


def _words(name: str, bills: dict[str, Bill]) -> str:
    """A row; of a stage with the term that dominates it, where that is the same for all."""
    terms = {bill.dominant[name] for bill in bills.values() if name in STAGES}
    return f"{name} ({terms.pop()})" if len(terms) == 1 else name


def _stacked(axes: Axes, rows: dict[str, dict[str, float]], looks: dict[str, tuple[Any, str]]) -> None:
    at = np.arange(len(rows))
    above, below = np.zeros(len(rows)), np.zeros(len(rows))
    for name in ROWS:
        values = np.array([row[name] for row in rows.values()])
        bottom = np.where(values >= 0.0, above, below)
        colour, hatch = looks[name]
        axes.bar(at, values, 0.6, bottom=bottom, color=colour, hatch=hatch, edgecolor="black", linewidth=0.7)
        above, below = above + np.maximum(values, 0.0), below + np.minimum(values, 0.0)
    for x, top, row in zip(at, above, rows.values(), strict=True):
        axes.annotate(f"{sum(row.values()):,.4g}", (x, top), xytext=(0, 3), textcoords="offset points", ha="center")
    axes.axhline(0.0, color="0.2", linewidth=1.0)
    axes.set_ylim(top=1.1 * float(above.max()))
    axes.set_xticks(at, list(rows))
    axes.grid(visible=False, axis="x")
