"""How well the model predicts measured points: prediction beside measurement, and errors by what may explain them.

Errors are of ratios q = predicted / measured: MAPE = mean |q - 1|, median APE, bias = median q - 1, Spearman's rank
correlation. Copies of one run count once; excluded points are predicted where they can be, and count in no figure.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd

from breakeven.models.residuals import LIKELY, interval
from breakeven.studies.benchmark import inputs, predict_jitted
from breakeven.studies.local_calibration import deployments, fit_local, spread_choice, times_of
from breakeven.studies.measured import LACKING, UNKNOWN_DRAFT, Point
from breakeven.studies.measured_files import read_points

BAND = (0.7, 1.4)  # concurrency over capacity where a prediction of TTFT is a coin's toss
CONCURRENCY = (0, 4, 16, 64, 256, np.inf)
NO_ROOM = "the weights or one sequence do not fit into the memory by this model"
SPENT = "its deployment was corrected by it"
GROUPS = ("mode", "speculation", "model", "system", "backend", "concurrency")
METRICS = ("ttft", "tpot")


def validate(path: str | Path, labels: str | Path | None = None, local_points: int = 0) -> pd.DataFrame:
    """One row per row of the file: id, predicted and measured milliseconds, why it is excluded, and its groups.

    With `local_points`, each deployment is first corrected by that many of its own points, and judged on the others.
    """
    points = read_points(path, labels)
    table = predictions(points)
    return corrected_locally(table, points, local_points) if local_points else table


def corrected_locally(table: pd.DataFrame, points: Sequence[Point], each: int) -> pd.DataFrame:
    """The table of `predictions` with the predictions of corrected deployments; what corrected them counts no more."""
    counts = table["excluded"].to_numpy() == ""
    leads = {points[i].measurement: i for i in reversed(np.flatnonzero(counts).tolist())}
    if not leads:
        return table
    used = [points[i] for i in leads.values()]
    number = deployments(used)
    chosen = spread_choice(used, number, each)
    measured_ms = np.array([[p.ttft_ms, p.tpot_ms] for p in used])
    found = fit_local(times_of(inputs(used)), measured_ms, number, chosen)
    served = np.isin(number, number[chosen])
    row = {point.measurement: k for k, point in enumerate(used)}
    table = table.copy()
    for i in np.flatnonzero(counts).tolist():
        k = row[points[i].measurement]
        table.loc[i, ["ttft_ms", "tpot_ms"]] = 1e3 * found.times_s[k]
        for side, sign in (("low", -1.0), ("high", 1.0)):
            width = np.exp(sign * LIKELY * found.spread[k])
            table.loc[i, [f"ttft_{side}_ms", f"tpot_{side}_ms"]] = 1e3 * found.times_s[k] * width
        if chosen[k] or not served[k]:
            table.loc[i, "excluded"] = SPENT if chosen[k] else f"its deployment has no more than {each} points"
    for name in METRICS:
        table[f"{name}_ratio"] = table[f"{name}_ms"] / table[f"measured_{name}_ms"]
    return table


def predictions(points: Sequence[Point]) -> pd.DataFrame:
    """The table of `validate` of points, in their order."""
    table = pd.DataFrame([_row(point) for point in points])
    able = [i for i, point in enumerate(points) if not point.excluded or point.excluded == UNKNOWN_DRAFT]
    figures: dict[str, np.ndarray] = {k: np.full(len(points), np.nan) for k in ("ttft_ms", "tpot_ms", "fill", "excess")}
    if able:
        found = predict_jitted(inputs([points[i] for i in able]))
        for name, value in zip(figures, jax.tree.map(np.asarray, found), strict=True):
            figures[name][able] = value * (1e3 if name.endswith("_ms") else 1.0)
    table["ttft_ms"], table["tpot_ms"] = figures["ttft_ms"], figures["tpot_ms"]
    table["fill"] = figures["fill"]
    short = figures["excess"] > 0.0
    table.loc[short, ["ttft_ms", "tpot_ms"]] = np.nan
    table.loc[short & (table["excluded"] == ""), "excluded"] = NO_ROOM
    for name in METRICS:
        table[f"{name}_ratio"] = table[f"{name}_ms"] / table[f"measured_{name}_ms"]
    return _with_interval(table).loc[:, _COLUMNS]


def _with_interval(table: pd.DataFrame) -> pd.DataFrame:
    """The table with the interval that holds 80 % of measured values, by the residuals of each row's class."""
    table = table.assign(**{f"{name}_{side}_ms": np.nan for name in METRICS for side in ("low", "high")})
    for engine in sorted(set(table.loc[table["ttft_ms"].notna(), "backend"])):
        here = ((table["backend"] == engine) & table["ttft_ms"].notna()).to_numpy()
        found = interval(engine, table["mode"].to_numpy()[here] == "disagg", table["fill"].to_numpy(float)[here])
        for name in METRICS:
            for side in ("low", "high"):
                factor = getattr(found, f"{name}_{side}")
                table.loc[here, f"{name}_{side}_ms"] = table[f"{name}_ms"].to_numpy(float)[here] * factor
    return table


def held(table: pd.DataFrame) -> dict[str, float]:
    """Share of counted measured values inside their interval, by metric."""
    used = counted(table)
    inside = {}
    for name in METRICS:
        value = used[f"measured_{name}_ms"]
        inside[name] = float(value.between(used[f"{name}_low_ms"], used[f"{name}_high_ms"]).mean())
    return inside


_COLUMNS = [
    "id",
    "ttft_ms",
    "tpot_ms",
    "measured_ttft_ms",
    "measured_tpot_ms",
    "ttft_low_ms",
    "ttft_high_ms",
    "tpot_low_ms",
    "tpot_high_ms",
    "excluded",
    "measurement",
    "mode",
    "model",
    "system",
    "backend",
    "precision",
    "prompt_tokens",
    "output_tokens",
    "concurrency",
    "accelerators",
    "fill",
    "internal",
    "accepted",
    "ttft_ratio",
    "tpot_ratio",
]


def _row(point: Point) -> dict[str, Any]:
    row = {field.name: getattr(point, field.name) for field in dataclasses.fields(point)}
    count = sum(x.accelerators * x.workers for x in point.layouts) if point.layouts else np.nan
    row |= {"system": point.accelerator, "backend": point.engine, "accelerators": count}
    return row | {"measured_ttft_ms": point.ttft_ms, "measured_tpot_ms": point.tpot_ms}


def _where(table: pd.DataFrame, chosen: Any) -> pd.DataFrame:
    return table.loc[chosen]


def counted(table: pd.DataFrame) -> pd.DataFrame:
    """The predicted measurements that errors are taken over: not excluded, copies of one run once."""
    return _where(table, table["excluded"] == "").drop_duplicates("measurement")


def errors(table: pd.DataFrame) -> dict[str, float]:
    """Figures of some counted rows: shares (0.1 = 10 %), rank correlation, and their number."""
    found: dict[str, float] = {"rows": len(table)}
    for name in METRICS:
        ratio = table[f"{name}_ratio"].to_numpy(float)
        off = np.abs(ratio - 1.0)
        found |= {f"{name}_mape": off.mean(), f"{name}_median": float(np.median(off))}
        found[f"{name}_bias"] = float(np.median(ratio)) - 1.0
        found[f"{name}_rank"] = spearman(table[f"{name}_ms"], table[f"measured_{name}_ms"])
    return found


def spearman(a: Any, b: Any) -> float:
    """Rank correlation; nan for fewer than three rows."""
    if len(a) < 3:
        return float("nan")
    x, y = (pd.Series(values).rank().to_numpy(float) for values in (a, b))
    spread = x.std() * y.std()
    return float(np.mean((x - x.mean()) * (y - y.mean())) / spread) if spread > 0.0 else float("nan")


def coverage(table: pd.DataFrame) -> dict[str, float]:
    """Rows, the share of them that counts as predicted, of all and of those that carry the fields a prediction needs
    (`able`), and distinct measurements."""
    good = _where(table, table["excluded"] == "")
    able = len(table) - int(np.isin(np.asarray(table["excluded"]), LACKING).sum())
    return {
        "rows": len(table),
        "predicted": len(good),
        "share": len(good) / max(len(table), 1),
        "able": able,
        "able_share": len(good) / max(able, 1),
        "measurements": len(set(table["measurement"])),
        "predicted_measurements": len(set(good["measurement"])),
    }


def excluded(table: pd.DataFrame) -> pd.Series:
    """Rows by the reason that excludes them."""
    reasons = table.loc[table["excluded"] != "", "excluded"]
    return reasons.value_counts()


def in_band(table: pd.DataFrame) -> pd.Series:
    """True where the KV cache is nearly full: the wait for room decides TTFT there."""
    return table["fill"].between(*BAND)


def report(table: pd.DataFrame) -> list[tuple[str, str, dict[str, float]]]:
    """(group, value, errors): all counted rows, those away from the KV limit, then each group's values."""
    used = counted(table)
    if used.empty:
        return []
    bins = np.digitize(used["concurrency"], CONCURRENCY[1:-1], right=True)
    used = used.assign(concurrency=np.array(_bin_names())[bins])
    used = used.assign(speculation=np.where(used["accepted"] > 1.0, "draft head, acceptance fitted", "none"))
    found = [("all", "", errors(used))]
    away = _where(used, ~in_band(used))
    if len(away):
        found.append(("all", f"outside {BAND[0]}-{BAND[1]} of KV capacity", errors(away)))
    for group in GROUPS:
        values = used[group]
        order = _bin_names() if group == "concurrency" else sorted(set(values))
        found += [(group, str(v), errors(_where(used, values == v))) for v in order if v in set(values)]
    return found


def _bin_names() -> list[str]:
    edges = CONCURRENCY
    return [f"{a + 1}-{b}" if b < np.inf else f"{a + 1}+" for a, b in itertools.pairwise(edges)]


def best_order(table: pd.DataFrame) -> float:
    """Median over workloads of the rank correlation of output tokens per second and accelerator; nan if too few."""
    used = counted(table)
    keys = ["model", "system", "prompt_tokens", "output_tokens"]
    pace = {name: used[f"{prefix}tpot_ms"] for name, prefix in (("predicted", ""), ("measured", "measured_"))}
    used = used.assign(**{name: used["concurrency"] / value / used["accelerators"] for name, value in pace.items()})
    ranks = [spearman(g["predicted"], g["measured"]) for _, g in used.groupby(keys) if len(g) >= 8]
    return float(np.median(ranks)) if ranks else float("nan")
