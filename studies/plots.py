"""Pictures of a run: cost against SLO attainment, a colour per topology family, legible at a glance."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from breakeven.optimizer.front import MAXIMISED, as_costs, non_dominated
from breakeven.studies.figures import plt, save

LABELS = {
    "cost_per_hour_usd": "cost, USD per hour",
    "cost_per_million_tokens_usd": "cost, USD per million output tokens",
    "cost_per_session_usd": "cost, USD per session",
    "cost_per_solved_task_usd": "cost, USD per solved task",
    "goodput_per_s": "goodput, calls per second that meet the SLO",
    "slo_attainment": "SLO attainment, share of calls",
    "session_p95_s": "session time, 95th percentile, s",
    "energy_per_token_j": "energy, J per output token",
    "accelerators": "accelerators",
    "sessions_per_accelerator": "sessions in progress per accelerator",
    "sessions_per_kw": "sessions in progress per kW of provisioned power",
    "solved_tasks_per_hour": "solved tasks per hour",
}
_TICKS = (0.05, 0.2, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9999)
_LOWEST = 0.02
MAX_DOTS = 4000


def pareto(
    evaluations: pd.DataFrame,
    best: dict[str, Any] | None,
    record: dict[str, Any],
    path: Path,
    objectives: tuple[str, str],
    simulated: pd.DataFrame | None = None,
) -> None:
    """Write the picture of a run: candidates as dots, each family's own front as a line, the cheapest marked, and
    what simulation showed of those in `simulated`."""
    x, y = objectives
    frame = evaluations.loc[evaluations["feasible"] & (evaluations["slo_attainment"] > _LOWEST)]
    families = [str(name) for name in dict.fromkeys(frame["topology"].astype(str))]
    with sns.axes_style("whitegrid"), sns.plotting_context("notebook"):
        figure, axes = plt.subplots(figsize=(10, 6.2), layout="constrained")
        colours = dict(zip(families, sns.color_palette("colorblind", len(families)), strict=True))
        _dots(axes, frame, x, y, colours)
        for name in families:
            _family_front(axes, frame.loc[frame["topology"].astype(str) == name], x, y, name, colours[name])
        _target(axes, y, float(record["target"]))
        _scales(axes, frame, x, y)
        if simulated is not None and y == "slo_attainment":
            _simulated(axes, simulated, x)
        if best is not None:
            _mark(axes, best, x, y)
        if families:
            axes.legend(loc="lower right", title="topology, its own front", frameon=True)
        else:
            axes.text(0.5, 0.5, "no feasible candidate serves any call in time", transform=axes.transAxes, ha="center")
        resolved, searched = record["resolved"], record["candidates_evaluated"]
        workload = resolved["workload"]["name"]
        axes.set_title(f"{record['study']['name']}: {workload} on {resolved['llm']['name']}", loc="left", weight="bold")
        figure.supxlabel(
            f"{searched:,} candidates evaluated · study {record['study']['name']} · seed {record['seed']}",
            fontsize="small",
            color="0.4",
        )
        save(figure, path)


def _dots(axes: Axes, frame: pd.DataFrame, x: str, y: str, colours: dict[str, Any]) -> None:
    """At most MAX_DOTS candidates, every k-th, small and pale."""
    shown = frame.iloc[:: max(len(frame) // MAX_DOTS, 1)]
    axes.scatter(
        shown[x],
        shown[y].clip(upper=_TICKS[-1]) if y == "slo_attainment" else shown[y],
        s=6,
        alpha=0.25,
        linewidths=0,
        color=[colours[name] for name in shown["topology"].astype(str)],
        rasterized=True,
    )


def _family_front(axes: Axes, frame: pd.DataFrame, x: str, y: str, name: str, colour: Any) -> None:
    costs = as_costs({x: frame[x].to_numpy(), y: frame[y].to_numpy()}, (x, y))
    front = frame.iloc[non_dominated(costs, frame["candidate"].to_numpy())].sort_values(x)
    values = front[y].clip(upper=_TICKS[-1]) if y == "slo_attainment" else front[y]
    step = "post" if (x in MAXIMISED) == (y in MAXIMISED) or y in MAXIMISED else "pre"
    axes.step(front[x], values, where=step, color=colour, linewidth=2.2, label=name)
    axes.plot(front[x], values, "o", color=colour, markersize=4.5)


def _simulated(axes: Axes, frame: pd.DataFrame, x: str) -> None:
    """Simulated attainment with its confidence interval, tied to what the model said."""
    shown = frame.loc[frame["slo_attainment_simulated"].notna() & (frame["slo_attainment_simulated"] > _LOWEST)]
    if shown.empty:
        return
    value, model = (shown[name].clip(_LOWEST, _TICKS[-1]) for name in ("slo_attainment_simulated", "slo_attainment"))
    low = (value - shown["slo_attainment_simulated_low"].clip(_LOWEST, _TICKS[-1])).clip(lower=0.0)
    high = (shown["slo_attainment_simulated_high"].clip(_LOWEST, _TICKS[-1]) - value).clip(lower=0.0)
    axes.vlines(shown[x], value, model, color="0.55", linewidth=0.8, linestyle=":")
    axes.errorbar(shown[x], value, yerr=[low, high], fmt="D", color="black", markerfacecolor="white", markersize=5.5,
                  elinewidth=1.0, capsize=2.0, label="simulated, 95 % interval", zorder=4)  # fmt: skip


def _target(axes: Axes, y: str, target: float) -> None:
    if y == "slo_attainment" and target < _TICKS[-1]:
        axes.axhline(target, color="0.2", linestyle="--", linewidth=1.4)
        axes.annotate(
            f"target {target:g}",
            (0.01, target),
            xycoords=("axes fraction", "data"),
            xytext=(0, 4),
            textcoords="offset points",
            color="0.2",
        )


def _scales(axes: Axes, frame: pd.DataFrame, x: str, y: str) -> None:
    axes.set_xlabel(LABELS[x])
    axes.set_ylabel(LABELS[y])
    if len(frame) and x not in MAXIMISED:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.6g}"))
        axes.xaxis.set_minor_formatter(FuncFormatter(lambda v, _: f"{v:,.6g}" if _leading(v) in (2, 5) else ""))
        axes.tick_params(axis="x", which="both", length=0.0, pad=7.0)  # labels of both in one line
    if y == "slo_attainment":
        axes.set_yscale("logit")
        axes.set_yticks(_TICKS)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.6g} %"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.minorticks_on()
        axes.yaxis.set_tick_params(which="minor", left=False)
        top = min(float(frame[y].to_numpy(float).max()), _TICKS[-1]) if len(frame) else 0.99
        axes.set_ylim(_LOWEST, min(1.0 - 0.5 * (1.0 - max(top, 0.97)), 0.99995))


def _leading(value: float) -> int:
    return round(value / 10.0 ** np.floor(np.log10(value))) if value > 0 else 0


def _mark(axes: Axes, best: dict[str, Any], x: str, y: str) -> None:
    shown = best.get("slo_attainment_simulated", np.nan) if y == "slo_attainment" else np.nan
    value = float(shown if isinstance(shown, float) and np.isfinite(shown) else best[y])
    value = min(value, _TICKS[-1]) if y == "slo_attainment" else value
    axes.plot(float(best[x]), value, "*", color="black", markersize=18, markeredgecolor="white", zorder=5)
    axes.annotate(
        f"cheapest that meets the target:\n{best['deployment']}\n{best['topology']}, "
        f"${float(best['cost_per_hour_usd']):,.2f} per hour",
        (float(best[x]), value),
        xytext=(0.28, 0.16),
        textcoords="axes fraction",
        va="top",
        fontsize="small",
        bbox={"boxstyle": "round", "facecolor": "white", "edgecolor": "0.6"},
        arrowprops={"arrowstyle": "->", "color": "0.2", "connectionstyle": "arc3,rad=-0.15"},
        zorder=6,
    )
