"""The picture of a sensitivity analysis: tornado, Sobol indices, and the answer under the fit's own error."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from breakeven.studies.figures import legend_below, made_by, plt, save, short, style

BARS = 14
_MORE, _LESS = sns.color_palette("colorblind")[:2]


def draw_sensitivity(table: pd.DataFrame, draws: pd.DataFrame, record: dict[str, Any], path: Path) -> None:
    """Write the picture of sensitivity.csv, sensitivity_draws.csv and sensitivity.json."""
    both = record["cost_ratio"] is not None
    with style():
        figure, grid = plt.subplots(2, 2, figsize=(15, 11.5), layout="constrained")
        _tornado(grid[0, 0], table, "attainment_points_per_percent", "change of attainment per +1 %, points")
        _tornado(grid[0, 1], table, "cost_elasticity_at_attainment",
                 "change of cost per +1 % at equal attainment, %")  # fmt: skip
        _sobol(grid[1, 0], table, "cost_ratio" if both else "slo_attainment")
        _fit_error(grid[1, 1], draws, record, both)
        grid[0, 0].set_title(
            "elasticities of the deployment (automatic differentiation)", loc="left", fontsize="medium"
        )
        _legend(figure)
        figure.suptitle(
            f"{record['study']}: what the answer depends on, {record['topology']}: {record['deployment']}\n"
            f"{record['workload']} on {record['llm']}, SLO attainment {record['slo_attainment']:.2%}, "
            f"{record['cost_per_hour_usd']:,.2f} USD per hour",
            x=0.01,
            ha="left",
            weight="bold",
            fontsize="medium",
        )
        save(figure, path, made_by(record, f"{record['candidates']} candidates re-optimised over"))


def _tornado(axes: Axes, table: pd.DataFrame, column: str, label: str) -> None:
    """The largest elasticities, sign by colour."""
    values = table.set_index("input")[column].astype(float).dropna()
    values = values.loc[values.abs() > 1e-4]
    shown = values.loc[values.abs().sort_values(ascending=False).index[:BARS]]
    if shown.empty:
        axes.text(0.5, 0.5, "no input moves it", transform=axes.transAxes, ha="center")
        return
    sns.barplot(x=shown.to_numpy(), y=[str(name) for name in shown.index], ax=axes, orient="h",
                hue=shown.to_numpy() > 0.0, palette={True: _MORE, False: _LESS}, legend=False)  # fmt: skip
    for place, value in enumerate(shown):
        axes.annotate(f"{value:+.2g}", (value, place), xytext=(3 if value > 0 else -3, 0), textcoords="offset points",
                      ha="left" if value > 0 else "right", va="center", fontsize="x-small")  # fmt: skip
    axes.axvline(0.0, color="0.2", linewidth=1.0)
    axes.margins(x=0.15)
    axes.set(xlabel=label, ylabel="")


def _sobol(axes: Axes, table: pd.DataFrame, output: str) -> None:
    """First-order and total indices with their intervals."""
    total = f"sobol_total_{output}"
    known = table.dropna(subset=[total]).sort_values(total, ascending=False)
    words = {"cost_ratio": "ln(cost of best split / other)", "slo_attainment": "SLO attainment"}[output]
    axes.set_title(f"Sobol indices of {words}", loc="left", fontsize="medium")
    if known.empty:
        axes.text(0.5, 0.5, "it does not vary over the ranges", transform=axes.transAxes, ha="center")
        return
    at = np.arange(len(known))
    for shift, name, colour in ((-0.2, "total", _MORE), (0.2, "first", _LESS)):
        values, half = known[f"sobol_{name}_{output}"], known[f"sobol_{name}_half_width_{output}"]
        axes.barh(at + shift, values, 0.38, xerr=half, color=colour, error_kw={"elinewidth": 1.0, "capsize": 2.0})
    ends = zip(known["input"], known["range_low"], known["range_high"], strict=True)
    axes.set_yticks(at, [f"{name} ×{short(low)}–{short(high)}" for name, low, high in ends])
    axes.invert_yaxis()
    axes.set(xlabel="share of the variance", xlim=(min(0.0, axes.get_xlim()[0]), None))


def _fit_error(axes: Axes, draws: pd.DataFrame, record: dict[str, Any], both: bool) -> None:
    """The distribution of the answer under the errors of the fitted coefficients."""
    column = "cost_ratio" if both else "slo_attainment"
    shown = draws.loc[np.isfinite(draws[column].astype(float))]
    if both:
        shown = shown.assign(**{column: shown[column].clip(0.25, 4.0)})
    for what, colour, width in (("coefficients and misses", _LESS, 2.0), ("coefficients", _MORE, 3.0)):
        values = shown.loc[shown["what"] == what, column].to_numpy(float)
        if len(values):
            sns.ecdfplot(x=values, ax=axes, color=colour, linewidth=width)
    fit = record["fit_error"]["coefficients"]
    words = "cost of the best split / best other" if both else "SLO attainment of the deployment"
    axes.set(xlabel=words, ylabel="share of the draws")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g} %"))
    title = "under the fitted model's own error"
    if both:
        axes.axvline(1.0, color="0.2", linestyle="--", linewidth=1.4)
        missed = record["fit_error"]["coefficients and misses"]
        title += f"\nthe split pays in {fit['split_pays']:.0%} (with misses {missed['split_pays']:.0%})"
    axes.set_title(title, loc="left", fontsize="medium")


def _legend(figure: Any) -> None:
    handles = [
        Patch(facecolor=_MORE, label="more of it raises · total index"),
        Patch(facecolor=_LESS, label="more of it lowers · first-order index"),
        Line2D([], [], color=_MORE, linewidth=3.0, label="errors of the fitted coefficients"),
        Line2D([], [], color=_LESS, linewidth=2.0, label="and what the model misses on unseen hardware"),
    ]
    legend_below(figure, handles, 4)
