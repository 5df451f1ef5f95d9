"""What sweeps, pay-off maps and break-even points print."""

from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

from breakeven.studies.attribution import GAINS, ROWS, Gain
from breakeven.studies.axes import Axis, unit
from breakeven.studies.figures import short
from breakeven.studies.optima import SHARED
from breakeven.studies.payoff import PayoffMap
from breakeven.studies.result import describe, records
from breakeven.studies.sensitivity import Sensitivity
from breakeven.studies.solve import BreakEven, Solved
from breakeven.studies.study import Study
from breakeven.studies.sweep import Sweep

MOST_LINES = 40


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _value(value: Any, path: str) -> str:
    """A value with its unit: `23 GB/s`."""
    text = short(float(value)) if isinstance(value, int | float | np.number) else str(value)
    words = unit(path)
    return f"{text} {words}".strip() if not words.startswith("×") else f"{text} {words}"


def show_sweep(found: Sweep, console: Console) -> None:
    """Print the chosen deployment at each point, and what it costs beside the first one."""
    out = Table(title="The optimum at each value", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for axis in found.axes:
        out.add_column(axis.path, justify="right", overflow="fold")
    for heading in ("USD/h", "beside the first", "attainment", "simulated"):
        out.add_column(heading, justify="right", no_wrap=True)
    for heading in ("topology", "deployment"):
        out.add_column(heading)
    rows = records(found.table.loc[found.table["chosen"].astype(bool)]) if len(found.table) else []
    first = next((row["cost_per_hour_usd"] for row in rows if row["topology"]), np.nan)
    for row in rows[:MOST_LINES]:
        out.add_row(*[_value(row[axis.path], axis.path) for axis in found.axes], *_chosen(row, first))
    console.print(out)
    if len(rows) > MOST_LINES:
        _say(console, f"{len(rows) - MOST_LINES} more in sweep.csv")
    for note in found.notes:
        _say(console, note)


def _chosen(row: dict[str, Any], first: float) -> list[str]:
    if not row["topology"]:
        return ["", "", "", "", "none", "nothing meets the target"]
    simulated = row.get("slo_attainment_simulated", np.nan)
    return [
        f"{row['cost_per_hour_usd']:,.2f}",
        f"{row['cost_per_hour_usd'] / first:.2f} ×",
        f"{row['slo_attainment']:.2%}",
        f"{simulated:.2%}" if np.isfinite(simulated) else "unverified" if row["unverified"] else "",
        str(row["topology"]),
        str(row["deployment"]),
    ]


def show_payoff(found: PayoffMap, console: Console) -> None:
    """Print where the split pays, row by row, and what simulation made of the contour."""
    signs, table = found.signs, found.table
    known = signs != 0
    words = "shared pool" if found.baseline == SHARED else found.baseline
    if not known.any():
        _say(console, "Neither a split nor the baseline meets the target in any cell.")
    else:
        ratios = table["ratio"].to_numpy(float)
        both = ratios[np.isfinite(ratios) & (ratios > 0.0)]
        span = (
            f": it costs {both.min():.2f} to {both.max():.2f} times the best {words} where both do" if len(both) else ""
        )
        _say(
            console,
            f"A split pays in {np.mean(signs[known] < 0):.0%} of the {known.sum()} cells where anything meets the "
            f"target{span}.",
        )
    _say(console, f"Along {found.x.path}, for each {found.y.path}:")
    for row, value in zip(signs, found.y.values, strict=True):
        _say(console, f"  {_value(value, found.y.path)}: {_along(row, found.x)}")
    _say(console, _agreement(table))
    for note in found.notes:
        _say(console, note)
    shortened = found.considered < found.study.space.size
    checked = f", a shortlist of {found.study.space.size:,}" if shortened else ""
    missed = f"; over all of them the optimum is up to {found.missed:.2%} cheaper" if shortened and found.missed else ""
    _say(
        console,
        f"{len(table)} cells × {found.considered:,} candidates{checked}{missed}; {found.evaluated:,} evaluated in "
        f"{found.seconds:.1f} s; {found.simulated} simulated.",
    )


def _along(row: np.ndarray, axis: Axis) -> str:
    """`pays from 3.6 to 50 GB/s`, stretch by stretch."""
    if not row.any():
        return "nothing meets the target"
    if (row >= 0).all():
        return "does not pay"
    parts, start = [], None
    for i, value in enumerate([*row, 0]):
        if value < 0 and start is None:
            start = i
        if value >= 0 and start is not None:
            low, high = axis.values[start], axis.values[i - 1]
            parts.append(
                _value(low, axis.path) if i - 1 == start else f"{_value(low, '')} to {_value(high, axis.path)}"
            )
            start = None
    return "pays at " + ", ".join(parts)


def _agreement(table: pd.DataFrame) -> str:
    from breakeven.studies.payoff import sign

    shown = table.dropna(subset="ratio_simulated") if "ratio_simulated" in table else table.iloc[:0]
    if shown.empty:
        return "Not simulated."
    same = sum(sign(a) == sign(b) for a, b in zip(shown["ratio"], shown["ratio_simulated"], strict=True))
    return f"Simulated along the contour: {same} of {len(shown)} cells have the same winner as by the model."


def show_solved(found: Solved, study: Study, console: Console) -> None:
    """Print the break-even points, and what moves the first."""
    path = found.axis.path
    if not found.crossings:
        finite = found.ratios[~np.isnan(found.ratios)]
        side = "pays nowhere" if len(finite) and (finite >= 1.0).all() else "always pays"
        what = f"the split {side}" if len(finite) else "nothing meets the target anywhere"
        low, high = found.axis.values[0], found.axis.values[-1]
        _say(console, f"No break-even between {_value(low, path)} and {_value(high, path)}: {what}.")
        return
    for point in found.crossings:
        _say(console, _crossing(point, found.axis))
    now = found.axis.current
    if now is not None:
        _say(console, f"The study has {_value(now, path)}.")
    if np.isfinite(found.slope):
        _say(console, f"There, 1 % more {path} changes the cost ratio by {found.slope:+.2f} % (over a factor of 1.25).")
    if found.shifts:
        out = Table(
            title="What moves the break-even", title_justify="left", title_style="bold", box=None, pad_edge=False
        )
        out.add_column("1 % more of")
        out.add_column("moves it by", justify="right")
        for shift in found.shifts:
            known = np.isfinite(shift.elasticity)
            out.add_row(shift.path, f"{shift.elasticity:+.2f} %" if known else "beyond a factor of 2")
        console.print(out)


def _crossing(point: BreakEven, axis: Axis) -> str:
    word = "from" if point.pays_above else "up to"
    sides = f"{_ratio(point.ratio_low)} ({point.winner_low} cheapest) below, {_ratio(point.ratio_high)} "
    return (
        f"The split pays {word} {_value(point.value, axis.path)} "
        f"(between {point.low:.5g} and {point.high:.5g}): cost ratio {sides}({point.winner_high} cheapest) above."
    )


def show_sensitivity(found: Sensitivity, console: Console) -> None:
    """Print what moves attainment and cost most, what flips the winner, and how sure the fit makes the answer."""
    row, table = found.row, found.table
    _say(
        console,
        f"{found.title}: {describe(row)} ({row['topology']}), {row['cost_per_hour_usd']:,.2f} USD per hour, attainment "
        f"{row['slo_attainment']:.2%}.",
    )
    weight = np.abs(table["attainment_points_per_percent"].to_numpy(float))
    weight = weight + np.abs(table["cost_elasticity"].to_numpy(float))
    flips = np.asarray(table["flips_below"].notna()) | np.asarray(table["flips_above"].notna())
    order = np.argsort(-weight, kind="stable")
    first = set(order[:MOST_INPUTS].tolist())
    shown = table.iloc[[int(i) for i in order if int(i) in first or flips[i]]]
    out = Table(title="1 % more of", title_justify="left", title_style="bold", box=None, pad_edge=False)
    out.add_column("")
    for heading in ("attainment, points", "cost, %", "cost at the same attainment, %", "flips the winner at"):
        out.add_column(heading, justify="right")
    for each in records(shown):
        held = each["cost_elasticity_at_attainment"]
        out.add_row(
            each["input"],
            f"{each['attainment_points_per_percent']:+.3f}",
            f"{each['cost_elasticity']:+.2f}",
            f"{held:+.2f}" if np.isfinite(held) else "size does not help",
            _flip(each),
        )
    console.print(out)
    _say(console, _most_by_sobol(table, np.isfinite(found.ratio)))
    if np.isfinite(found.ratio):
        fit, missed = found.quantiles["coefficients"], found.quantiles["coefficients and misses"]
        _say(
            console,
            f"The best split costs {found.ratio:.3f} times the best other; under the errors of the fitted coefficients "
            f"{fit['cost_ratio_p05']:.3f} to {fit['cost_ratio_p95']:.3f} (5 to 95 %), and it pays in "
            f"{fit['split_pays']:.0%} of the draws; in {missed['split_pays']:.0%} with what the model misses on unseen "
            f"hardware.",
        )
    for note in found.notes:
        _say(console, note)


def show_gain(found: Gain, console: Console) -> None:
    """Print what a deployment gains over another: gains, less what it adds in communication and complexity."""
    out = Table(title="Gain over the baseline", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading in ("", "seconds per call", "USD per hour"):
        out.add_column(heading, justify="left" if not heading else "right")
    for name in ROWS:
        seconds, money = found.seconds[name], found.usd_per_hour[name]
        if abs(seconds) < 1e-9 and abs(money) < 1e-9:
            continue
        minus = "" if name in GAINS else "less: "
        out.add_row(f"{minus}{name}", f"{seconds:+.4f}", f"{money:+,.2f}")
    out.add_row(
        "net benefit", f"{found.net(found.seconds):+.4f}", f"{found.net(found.usd_per_hour):+,.2f}", style="bold"
    )
    console.print(out)


MOST_INPUTS = 16


def _flip(each: dict[str, Any]) -> str:
    parts = [f"× {each[name]:.2f}" for name in ("flips_below", "flips_above") if np.isfinite(each[name])]
    return ", ".join(parts)


def _most_by_sobol(table: pd.DataFrame, both: bool) -> str:
    output = "cost_ratio" if both else "slo_attainment"
    known = table.dropna(subset=[f"sobol_total_{output}"]).sort_values(f"sobol_total_{output}", ascending=False)
    if known.empty:
        return "Over the stated ranges the decision does not vary."
    words = "the cost ratio" if both else "attainment"
    first = ", ".join(f"{r['input']} {r[f'sobol_total_{output}']:.0%}" for r in records(known.head(4)))
    return f"Of the variance of {words} over the stated ranges, with interactions: {first}."


def _ratio(value: float) -> str:
    return "only the split meets the target" if value == 0.0 else (
        "only the baseline meets the target" if np.isinf(value) else f"{value:.3f}"
    )  # fmt: skip
