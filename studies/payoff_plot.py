"""The picture of a pay-off map: what the best split costs beside the best baseline, and which topology is cheapest."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, TwoSlopeNorm
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from breakeven.studies.figures import legend_below, made_by, plt, save, short, style, topology_colours
from breakeven.studies.payoff import sign

MOST_TICKS = 9
FEW = 150  # cells that have their ratio written into them
WIDEST = 1.0  # octaves either side of break-even that the colours resolve
NEITHER = "0.85"


def draw_payoff(table: pd.DataFrame, record: dict[str, Any], path: Path) -> None:
    """Write the map that payoff.csv and payoff.json hold."""
    x, y = record["x"], record["y"]
    shape = len(y["values"]), len(x["values"])
    with style(), sns.axes_style("white"):
        figure, (left, right) = plt.subplots(1, 2, figsize=(14.5, 6.6), layout="constrained", sharey=True)
        _ratios(left, table, shape, record)
        _winners(right, table, shape)
        for axes in (left, right):
            _contour(axes, table["ratio"].to_numpy(float).reshape(shape))
            _hatch(axes, _untrusted(table).reshape(shape))
            _ticks(axes, x, y)
        _simulated(left, table, shape)
        for axes in (left, right):
            _here(axes, x, y)
        words = "the best shared pool" if record["baseline"] == "shared" else f"the best {record['baseline']}"
        left.set_title(f"cost of the best split / cost of {words}", loc="left", fontsize="medium")
        right.set_title("cheapest topology", loc="left", fontsize="medium")
        _legend(figure, table, record)
        figure.suptitle(
            f"{record['study']}: where disaggregation pays, {record['workload']} on {record['llm']}, "
            f"SLO target {record['target']:g}",
            x=0.01,
            ha="left",
            weight="bold",
        )
        save(
            figure, path, made_by(record, f"{record['candidates_per_cell']:,} candidates in each of {len(table)} cells")
        )


def _octaves(ratio: np.ndarray) -> np.ndarray:
    """log2 of the ratio, held inside the colours; nan where neither side meets the target."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.clip(np.log2(ratio), -WIDEST, WIDEST)


def _ratios(axes: Axes, table: pd.DataFrame, shape: tuple[int, int], record: dict[str, Any]) -> None:
    values = _octaves(table["ratio"].to_numpy(float)).reshape(shape)
    few = shape[0] * shape[1] <= FEW
    words = np.array([_ratio_words(v) for v in table["ratio"]]).reshape(shape)
    sns.heatmap(
        values,
        ax=axes,
        cmap=sns.color_palette("vlag", as_cmap=True),
        norm=TwoSlopeNorm(0.0, -WIDEST, WIDEST),
        mask=np.isnan(values),
        annot=words if few else None,
        fmt="",
        annot_kws={"fontsize": "x-small"},
        cbar_kws={
            "label": "cost ratio (below 1, blue: the split pays)",
            "ticks": [-1, -0.75, -0.5, -0.25, 0, 0.25, 0.5, 0.75, 1],
        },
        rasterized=True,
    )
    bar = axes.collections[0].colorbar
    assert bar is not None
    bar.ax.set_yticklabels(
        ["≤ 0.5, or only the split", "0.59", "0.71", "0.84", "1", "1.19", "1.41", "1.68", "≥ 2, or only the baseline"]
    )
    axes.set_facecolor(NEITHER)
    axes.invert_yaxis()


def _ratio_words(value: float) -> str:
    if np.isnan(value):
        return ""
    return "split" if value == 0.0 else "base" if np.isinf(value) else f"{value:.2f}"


def _winners(axes: Axes, table: pd.DataFrame, shape: tuple[int, int]) -> None:
    colours = topology_colours()
    names = [name for name in colours if name in set(table["winner"])]
    codes = np.array([names.index(n) if n in names else np.nan for n in table["winner"]]).reshape(shape)
    axes.set_facecolor(NEITHER)
    if names:
        palette = ListedColormap([colours[name] for name in names])
        sns.heatmap(
            codes, ax=axes, cmap=palette, vmin=-0.5, vmax=len(names) - 0.5, mask=np.isnan(codes), cbar=False,
            rasterized=True,
        )  # fmt: skip
    axes.set_ylim(0, shape[0])


def _untrusted(table: pd.DataFrame) -> np.ndarray:
    """Cells where the model is outside its trusted region for either side, and simulation has not settled it."""
    doubt = (table["split_unverified"].fillna("") != "") | (table["baseline_unverified"].fillna("") != "")
    settled = table["ratio_simulated"].notna() if "ratio_simulated" in table else False
    return (doubt & ~np.asarray(settled)).to_numpy(bool)


def _hatch(axes: Axes, where: np.ndarray) -> None:
    for row, column in zip(*np.nonzero(where), strict=True):
        axes.add_patch(Rectangle((column, row), 1, 1, fill=False, hatch="////", edgecolor="0.35", linewidth=0.0))


def _contour(axes: Axes, ratio: np.ndarray) -> None:
    """The break-even line, along the edges between cells where different sides win."""
    signs = np.vectorize(sign)(ratio)
    options = {"colors": "black", "linewidth": 3.0, "zorder": 4}
    rows, columns = np.nonzero(signs[:, 1:] * signs[:, :-1] < 0)
    axes.vlines(columns + 1, rows, rows + 1, **options)
    rows, columns = np.nonzero(signs[1:] * signs[:-1] < 0)
    axes.hlines(rows + 1, columns, columns + 1, **options)


def _simulated(axes: Axes, table: pd.DataFrame, shape: tuple[int, int]) -> None:
    """A dot where simulation agrees on who wins, a cross where it does not."""
    if "ratio_simulated" not in table:
        return
    model, simulated = table["ratio"].to_numpy(float), table["ratio_simulated"].to_numpy(float)
    known = ~np.isnan(simulated)
    same = known & (np.vectorize(sign)(model) == np.vectorize(sign)(simulated))
    for where, marker in ((same, "o"), (known & ~same, "X")):
        rows, columns = np.divmod(np.flatnonzero(where), shape[1])
        size = min(60.0, 9000.0 / max(shape) ** 1.6)
        up = 0.78 if shape[0] * shape[1] <= FEW else 0.5  # beside the number
        axes.scatter(
            columns + 0.5, rows + up, s=size, marker=marker, color="white", edgecolor="black", linewidth=1.0, zorder=5
        )


def _ticks(axes: Axes, x: dict[str, Any], y: dict[str, Any]) -> None:
    for axis, name in ((axes.xaxis, x), (axes.yaxis, y)):
        count = len(name["values"])
        shown = np.arange(0, count, -(-count // MOST_TICKS))
        axis.set_ticks(shown + 0.5, [short(name["values"][i]) for i in shown], rotation=0)
    axes.set_xlabel(x["label"])
    axes.set_ylabel(y["label"] if axes.get_subplotspec().is_first_col() else "")  # type: ignore[union-attr]
    axes.tick_params(left=True, bottom=True)


def _here(axes: Axes, x: dict[str, Any], y: dict[str, Any]) -> None:
    """The study's own point, if the map holds it."""
    place = []
    for axis in (x, y):
        values, now = np.array(axis["values"], float), axis["current"]
        if now is None or not values[0] <= now <= values[-1]:
            return
        positive = values[0] > 0.0
        place.append(np.interp(np.log(now), np.log(values), range(len(values))) if positive else
                     np.interp(now, values, range(len(values))))  # fmt: skip
    axes.plot(place[0] + 0.5, place[1] + 0.5, "*", color="gold", markersize=17, markeredgecolor="black", zorder=6)


def _legend(figure: Any, table: pd.DataFrame, record: dict[str, Any]) -> None:
    colours = topology_colours()
    handles: list[Any] = [Patch(facecolor=colours[n], label=n) for n in colours if n in set(table["winner"])]
    handles += [
        Patch(facecolor=NEITHER, label="neither meets the target"),
        Patch(facecolor="white", edgecolor="0.35", hatch="////", label="outside the model's trusted region"),
        Line2D([], [], color="black", linewidth=3.0, label="break-even"),
        Line2D(
            [], [], linestyle="", marker="*", color="gold", markeredgecolor="black", markersize=13, label="the study"
        ),
    ]
    if "ratio_simulated" in table:
        plain: dict[str, Any] = {"linestyle": "", "color": "white", "markeredgecolor": "black", "markersize": 8}
        handles += [
            Line2D([], [], marker="o", label="simulated: the same side wins", **plain),
            Line2D([], [], marker="X", label="simulated: the other side wins", **plain),
        ]
    legend_below(figure, handles, 5)
