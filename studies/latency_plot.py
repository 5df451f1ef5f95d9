"""The picture of a simulation: the share of calls that are done by a time, with the SLO's bounds."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from breakeven.studies.figures import made_by, plt, save

_TIMES = {"ttft_s": "time to first token", "tpot_s": "time per output token", "call_s": "time of a call"}

_SHARES = np.linspace(0.0, 1.0, 2001)


def latency(calls: pd.DataFrame, bounds_s: dict[str, float], title: str, path: Path, record: dict[str, Any]) -> None:
    """Write the distribution functions of the latencies in `calls`, each bound of the SLO as a line."""
    with sns.axes_style("whitegrid"), sns.plotting_context("notebook"):
        figure, axes = plt.subplots(1, len(_TIMES), figsize=(13, 4.4), layout="constrained", sharey=True)
        colours = sns.color_palette("colorblind", len(_TIMES))
        for ax, (name, words), colour in zip(axes, _TIMES.items(), colours, strict=True):
            taken = calls[name].to_numpy(float)
            values = taken[(taken > 0.0) & np.isfinite(taken)]
            if len(values):
                _curve(ax, np.quantile(values, _SHARES), colour)
            if name in bounds_s:
                _bound(ax, bounds_s[name], float(np.mean(taken <= bounds_s[name])))
            if ax.get_xscale() == "log":
                _ticks(ax)
            ax.set_xlabel(f"{words}, s")
        axes[0].set_ylabel("share of calls")
        axes[0].yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g} %"))
        figure.suptitle(f"{title}: {len(calls):,} simulated calls", x=0.01, ha="left", weight="bold")
        save(figure, path, made_by(record))


def _curve(ax: Axes, times_s: np.ndarray, colour: Any) -> None:
    """A distribution function; on a log scale where the times span more than a factor of ten."""
    sns.lineplot(x=times_s, y=_SHARES, ax=ax, color=colour, linewidth=2.2, errorbar=None)
    ax.set_xlim(times_s[2], times_s[-2])
    if times_s[-2] > 3.0 * times_s[2]:
        ax.set_xscale("log")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())


def _ticks(ax: Axes) -> None:
    """Ticks of a log axis at 1, 2 and 5 of each decade, or at its decades where there are many."""
    low, high = ax.get_xlim()
    decades = float(np.log10(high / low))
    subs = (1.0,) if decades > 4.0 else (1.0, 3.0) if decades > 2.0 else (1.0, 2.0, 5.0)
    if decades < 0.7:
        subs = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    ax.xaxis.set_major_locator(LogLocator(subs=subs, numticks=20))
    ax.xaxis.set_minor_locator(NullLocator())


def _bound(ax: Axes, bound_s: float, share: float) -> None:
    ax.set_xlim(right=max(ax.get_xlim()[1], 1.05 * bound_s))
    ax.axvline(bound_s, color="0.2", linestyle="--", linewidth=1.4)
    ax.annotate(
        f"SLO {bound_s:g} s: {share:.2%}",
        (bound_s, 0.04),
        xycoords=("data", "axes fraction"),
        xytext=(-5, 0),
        textcoords="offset points",
        ha="right",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8},
    )
