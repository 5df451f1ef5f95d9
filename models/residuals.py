"""How far predictions may be off: quantiles of measured over predicted, by what a deployment has in common with others.

The residuals are those of (model, accelerator) pairs that the fit did not see (residuals.toml, which `breakeven
calibrate` writes). A class is an engine, joint or split pools, and how full the KV cache is; one of few residuals
widens to all engines. Around a full KV cache the wait is nothing or minutes: the interval is a band, not a number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breakeven.models.catalog import table

Floats = NDArray[np.float64]
HELD = 0.8  # share of measured values that an interval should hold
TAILS = (0.1, 0.08, 0.06, 0.05, 0.04, 0.03, 0.02)  # residuals left outside on either side: the first that holds enough
LIKELY = 1.2816  # standard deviations on either side that hold 80 % of a normal distribution
ROOMY, NEAR, BAND, FULL = "below half", "0.5 to 0.7", "0.7 to 1.4", "above 1.4"  # sequences over those that fit
EDGES = (0.5, 0.7, 1.4)
FEWEST = 20  # residuals of a class
EVERY = "every engine"
METRICS = ("ttft", "tpot")


@dataclass(frozen=True)
class Interval:
    """Factors on predictions that hold the measured value in 80 % of the cases; shapes (n,)."""

    ttft_low: Floats
    ttft_high: Floats
    tpot_low: Floats
    tpot_high: Floats
    band: NDArray[np.bool_]  # the KV cache is about full: a band rather than a number


def fill_class(fill: Any) -> list[str]:
    """The class of each share of the KV capacity."""
    names = (ROOMY, NEAR, BAND, FULL)
    return [names[i] for i in np.digitize(np.nan_to_num(np.asarray(fill, float)), EDGES)]


def interval(engine: str, split: Any, fill: Any, rows: Sequence[Mapping[str, Any]] | None = None) -> Interval:
    """80 % interval of predictions on `engine`, for pools split (true) or not, at these shares of the KV capacity."""
    rows = table("residuals")["class"] if rows is None else rows
    known = {(row["engine"], row["pools"], row["kv_cache"]): row for row in rows or ()}
    found = [
        _class(known, engine, "split" if apart else "joint", room)
        for apart, room in zip(np.asarray(split).ravel().tolist(), fill_class(fill), strict=True)
    ]
    factors = {
        f"{metric}_{side}": np.array([row[metric][k] for row in found], float)
        for metric in METRICS
        for side, k in (("low", 0), ("high", 2))
    }
    return Interval(**factors, band=np.array([room == BAND for room in fill_class(fill)], bool))


def _class(known: Mapping[tuple[str, str, str], Any], engine: str, pools: str, room: str) -> Mapping[str, Any]:
    """The narrowest class that has residuals: all engines where one's own has none; unknown where none has."""
    tried = ((engine, pools, room), (EVERY, pools, room), (EVERY, "joint", room), (EVERY, pools, ROOMY))
    unknown = {metric: [np.nan] * 3 for metric in METRICS}
    return next((known[key] for key in (*tried, (EVERY, "joint", ROOMY)) if key in known), unknown)


def residual_classes(
    engine: Sequence[str], split: Sequence[bool], fill: Any, ratio: Floats, tails: tuple[float, float]
) -> list[dict[str, Any]]:
    """Rows of residuals.toml from measured / predicted of TTFT and TPOT, (points, 2)."""
    pools = np.array(["split" if apart else "joint" for apart in split])
    engines, room = np.array(list(engine)), np.array(fill_class(fill))
    usable = np.isfinite(ratio).all(1)
    rows = []
    for name in (*sorted(set(engines.tolist())), EVERY):
        for kind in ("joint", "split"):
            for part in (ROOMY, NEAR, BAND, FULL):
                here = usable & (pools == kind) & (room == part) & ((engines == name) | (name == EVERY))
                if here.sum() >= (FEWEST if name != EVERY else FEWEST // 4):
                    row: dict[str, Any] = {"engine": name, "pools": kind, "kv_cache": part, "rows": int(here.sum())}
                    for k, (metric, tail) in enumerate(zip(METRICS, tails, strict=True)):
                        quantiles = np.quantile(ratio[here, k], (tail, 0.5, 1.0 - tail))
                        row[metric] = [float(f"{value:.3g}") for value in quantiles]
                    rows.append(row)
    return rows


def inside(found: Interval, ratio: Floats) -> tuple[float, float]:
    """Share of measured / predicted, (points, 2), inside the interval: TTFT, TPOT."""
    shares = []
    for k, metric in enumerate(METRICS):
        low, high = getattr(found, f"{metric}_low"), getattr(found, f"{metric}_high")
        known = np.isfinite(ratio[:, k])
        shares.append(float(np.mean(((ratio[:, k] >= low) & (ratio[:, k] <= high))[known])) if known.any() else np.nan)
    return shares[0], shares[1]


def left_out_coverage(
    engine: Sequence[str],
    split: Sequence[bool],
    fill: Any,
    ratio: Floats,
    pair: Sequence[Any],
    tails: tuple[float, float],
) -> tuple[float, float]:
    """Share of each (model, accelerator) pair's points inside the interval that the other pairs give: TTFT, TPOT."""
    engines, pools, fills = np.array(list(engine)), np.array(list(split), bool), np.asarray(fill, float)
    keys = np.array([str(one) for one in pair])
    hits, known = np.zeros((2, 2))
    for key in sorted(set(keys.tolist())):
        own = keys == key
        rows = residual_classes(engines[~own].tolist(), pools[~own].tolist(), fills[~own], ratio[~own], tails)
        for name in set(engines[own].tolist()) if rows else ():
            here = own & (engines == name)
            shares = inside(interval(name, pools[here], fills[here], rows), ratio[here])
            count = np.isfinite(ratio[here]).sum(0)
            hits, known = hits + np.nan_to_num(shares) * count, known + count
    ttft, tpot = hits / np.maximum(known, 1.0)
    return float(ttft), float(tpot)


def residuals_toml(
    engine: Sequence[str], split: Sequence[bool], fill: Any, ratio: Floats, pair: Sequence[Any], source: str
) -> str:
    """The text of residuals.toml: the narrowest intervals that hold 80 % of what pairs left out measured."""
    given = engine, split, fill, ratio
    coverage = [left_out_coverage(*given, pair, (tail, tail)) for tail in TAILS]
    enough = [next((i for i, c in enumerate(coverage) if c[k] >= HELD), len(TAILS) - 1) for k in range(len(METRICS))]
    ttft, tpot = (coverage[i][k] for k, i in enumerate(enough))
    tails = TAILS[enough[0]], TAILS[enough[1]]
    lines = [
        "# Measured over predicted of points whose (model, accelerator) pair the fit did not see, by engine, pools and",
        "# share of the KV capacity in use: quantiles at `tail`, 1/2 and 1 - `tail`. `breakeven calibrate` writes it.",
        "# `coverage` is how often the interval of the other pairs holds what a pair measured; `tail` makes it 80 %.",
        f'source = "{source}"',
        f"tail = {{ ttft = {tails[0]:g}, tpot = {tails[1]:g} }}",
        f"coverage = {{ ttft = {ttft:.3f}, tpot = {tpot:.3f} }}",
    ]
    for row in residual_classes(*given, tails):
        quantiles = [f"{metric} = [{', '.join(f'{v:g}' for v in row[metric])}]" for metric in METRICS]
        words = [f'{name} = "{row[name]}"' for name in ("engine", "pools", "kv_cache")]
        lines += ["", "[[class]]", *words, f"rows = {row['rows']}", *quantiles]
    return "\n".join(lines) + "\n"
