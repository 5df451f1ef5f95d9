"""The picture of a sweep: small multiples of cost, attainment, topology and pool sizes over its first field."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullFormatter

from breakeven.models.topology import TOPOLOGIES, topology
from breakeven.studies.deployment_file import pool_slots
from breakeven.studies.figures import legend_below, made_by, plt, save, short, style, topology_colours

MOST_ROWS = 6  # combinations of the further fields
HATCHES = ("", "//", "..", "\\\\", "xx", "--", "++", "oo", "||")  # of pools


def draw_sweep(table: pd.DataFrame, record: dict[str, Any], path: Path) -> None:
    """Write the picture of sweep.csv and sweep.json."""
    x, *others = record["axes"]
    groups = _groups(table, [axis["path"] for axis in others])
    with style():
        figure, grid = plt.subplots(
            len(groups), 3, figsize=(15, 0.9 + 3.5 * len(groups)), layout="constrained", sharex=True, squeeze=False
        )
        for row, (words, rows) in zip(grid, groups, strict=True):
            frame = _placed(rows, x)
            _cost(row[0], frame)
            _attainment(row[1], frame, record["target"])
            _pools(row[2], frame)
            row[0].set_title(words, loc="left", fontsize="medium")
            for axes in row:
                _x_axis(axes, x)
        for axes in grid[-1]:
            axes.set_xlabel(x["label"])
        _legend(figure, table)
        figure.suptitle(
            f"{record['study']}: the optimum at each value, {record['workload']} on {record['llm']}",
            x=0.01,
            ha="left",
            weight="bold",
        )
        save(figure, path, made_by(record, f"{record['candidates_per_point']:,} candidates at each point"))


def _groups(table: pd.DataFrame, paths: list[str]) -> list[tuple[str, pd.DataFrame]]:
    """A panel row per combination of the further fields, evenly chosen where there are too many."""
    if not paths:
        return [("", table)]
    every = [
        (", ".join(f"{path} = {_word(rows[path].iloc[0])}" for path in paths), rows)
        for _, rows in table.groupby(paths, sort=False)
    ]
    chosen = np.unique(np.linspace(0, len(every) - 1, min(len(every), MOST_ROWS)).round().astype(int))
    return [every[i] for i in chosen]


def _word(value: Any) -> str:
    return short(float(value)) if isinstance(value, int | float | np.number) else str(value)


def _numeric(axis: dict[str, Any]) -> bool:
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in axis["values"])


def _placed(rows: pd.DataFrame, x: dict[str, Any]) -> pd.DataFrame:
    """Rows with their place along the axis: the number, or the position of a name."""
    if _numeric(x):
        return rows.assign(at=rows[x["path"]].astype(float))
    names = [str(v) for v in x["values"]]
    return rows.assign(at=rows[x["path"]].astype(str).map(names.index).astype(float))


def _lines(axes: Axes, frame: pd.DataFrame, y: str) -> None:
    met = frame.loc[frame["topology"] != ""]
    if met.empty:
        axes.text(0.5, 0.5, "nothing meets the target", transform=axes.transAxes, ha="center")
        return
    colours = topology_colours()
    sns.lineplot(
        met, x="at", y=y, hue="topology", palette=colours, ax=axes, marker="o", errorbar=None, legend=False, linewidth=2
    )
    best = met.loc[met["chosen"].astype(bool)]
    axes.scatter(best["at"], best[y], s=110, facecolor="none", edgecolor="black", linewidth=1.6, zorder=5)


def _cost(axes: Axes, frame: pd.DataFrame) -> None:
    _lines(axes, frame, "cost_per_hour_usd")
    axes.set_ylabel("cost, USD per hour")
    axes.set_ylim(bottom=0.0)


def _attainment(axes: Axes, frame: pd.DataFrame, target: float) -> None:
    _lines(axes, frame, "slo_attainment")
    if "slo_attainment_simulated" in frame:
        shown = frame.loc[frame["slo_attainment_simulated"].notna()]
        colours = [topology_colours()[name] for name in shown["topology"]]
        axes.scatter(shown["at"], shown["slo_attainment_simulated"], marker="D", s=34, facecolor="white",
                     edgecolor=colours, linewidth=1.5, zorder=6)  # fmt: skip
    axes.axhline(target, color="0.2", linestyle="--", linewidth=1.4)
    axes.set_ylabel("SLO attainment")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.4g} %"))


def _pools(axes: Axes, frame: pd.DataFrame) -> None:
    """Accelerators of each pool of the chosen deployment, stacked."""
    best = frame.loc[frame["chosen"].astype(bool) & (frame["topology"] != "")].sort_values("at")
    axes.set_ylabel("accelerators of the cheapest")
    if best.empty:
        return
    looks, colours = _hatches(best["topology"]), topology_colours()
    at, tallest = best["at"].to_numpy(float), 0.0
    for x, width, (_, row) in zip(at, _widths(at), best.iterrows(), strict=True):
        bottom, kinds = 0.0, dict[str, None]()
        for name, slot in _slots(str(row["topology"])):
            parts = ("replicas", "tensor_parallel", "data_parallel", "pipeline_parallel", "context_parallel")
            size = float(np.prod([float(row.get(f"{slot}_{part}", 1)) for part in parts]))
            own = colours[row["topology"]]
            axes.bar(x, size, width, bottom=bottom, color=own, edgecolor="black", linewidth=0.8, hatch=looks[name])
            bottom += size
            kinds[str(row[f"{slot}_accelerator"]).split("-")[0]] = None
        tallest = max(tallest, bottom)
        words = "\n".join(reversed(kinds))
        axes.annotate(words, (x, bottom), xytext=(0, 3), textcoords="offset points", ha="center", fontsize="x-small")
    axes.set_ylim(top=1.25 * tallest)  # room for the words


def _slots(name: str) -> list[tuple[str, str]]:
    """(name of a pool, what columns call its first stage), in the order of the pools."""
    chosen = topology(name)
    return list(zip(chosen.pools, pool_slots(chosen), strict=True))


def _pool_words(pool: str) -> str:
    return "one pool" if pool == "pool" else f"{pool.replace('_', ' ')} pool"


def _hatches(topologies: pd.Series) -> dict[str, str]:
    """A hatch for every pool of those topologies; the named ones have the same in every picture."""
    known = [pool for each in TOPOLOGIES.values() for pool in each.pools]
    shown = [pool for name in topologies.unique() if name for pool in topology(name).pools]
    marks = dict(zip(dict.fromkeys([*known, *shown]), itertools.cycle(HATCHES)))
    return {pool: marks[pool] for pool in marks if pool in shown}


def _widths(at: np.ndarray) -> np.ndarray:
    """Bars that do not touch, on linear and on geometric axes."""
    if len(at) < 2:
        return np.array([max(0.2 * abs(at[0]), 0.4)])
    return 0.6 * np.gradient(at)


def _x_axis(axes: Axes, x: dict[str, Any]) -> None:
    if not _numeric(x):
        axes.set_xticks(range(len(x["values"])), [str(v) for v in x["values"]], rotation=20, ha="right")
        return
    if x["log"]:
        axes.set_xscale("log")
        shown = x["values"] if len(x["values"]) <= 8 else x["values"][:: -(-len(x["values"]) // 8)]
        axes.set_xticks(shown)
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: short(v)))


def _legend(figure: Any, table: pd.DataFrame) -> None:
    colours = topology_colours()
    plain: dict[str, Any] = {"linestyle": "", "markeredgecolor": "black", "markersize": 9}
    handles = [
        *[Line2D([], [], color=colours[n], marker="o", label=n) for n in colours if n in set(table["topology"])],
        Line2D([], [], marker="o", color="none", label="the cheapest", **plain),
        Line2D([], [], marker="D", color="white", label="simulated", **plain),
        *[
            Patch(facecolor="white", edgecolor="black", hatch=hatch, label=_pool_words(label))
            for label, hatch in _hatches(table.loc[table["chosen"].astype(bool), "topology"]).items()
        ],
    ]
    legend_below(figure, handles, len(handles))
