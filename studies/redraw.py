"""Pictures from what commands wrote into a folder, drawn again or anew."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from breakeven.models.inputs import InputError, pick
from breakeven.studies.deployment_file import FAMILIES, FRONT, read_deployment, read_record
from breakeven.studies.result import EVALUATIONS, SIMULATED, records

LATENCY = "latency.json"


def draw(folder: Path, what: str) -> Path:
    """Draw one picture into `folder`, PNG and SVG; returns the PNG's path. Raises InputError."""
    pick("--what", what, PICTURES)
    if not folder.is_dir():
        raise InputError("folder", str(folder), "an output folder")
    path = folder / f"{what}.png"
    PICTURES[what](folder, path)
    return path


def _pareto(folder: Path, path: Path) -> None:
    from breakeven.studies.plots import pareto

    record = read_record(folder)
    try:
        evaluations = pd.read_parquet(folder / EVALUATIONS)
        tables = [
            pd.read_csv(folder / name, keep_default_na=False, na_values={c: [""] for c in SIMULATED})
            for name in (FAMILIES, FRONT)
        ]
    except (OSError, ValueError):
        raise InputError("folder", str(folder), f"{EVALUATIONS}, {FAMILIES} or {FRONT} cannot be read") from None
    objectives = record["objectives"]
    pair = ("cost_per_hour_usd", "slo_attainment")
    if not set(pair) <= set(objectives):
        pair = (objectives[0], objectives[1])
    best = records(tables[0])[0] if len(tables[0]) else None
    simulated = pd.concat(tables).drop_duplicates("candidate") if set(SIMULATED) <= set(tables[0]) else None
    pareto(evaluations, best, record, path, pair, simulated)


def _read(folder: Path, table: str, record: str, command: str) -> tuple[pd.DataFrame, dict[str, Any]]:
    """A table, its words never nan, and the record beside it."""
    try:
        frame = pd.read_csv(folder / table)
        found = json.loads((folder / record).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError("folder", str(folder), f"{table} and {record}, as `breakeven {command}` writes them") from None
    words = [name for name in frame if frame[name].dtype.kind not in "fiub"]
    return frame.fillna(dict.fromkeys([*words, "split_unverified", "baseline_unverified"], "")), found


def _payoff(folder: Path, path: Path) -> None:
    from breakeven.studies.payoff import RECORD, TABLE
    from breakeven.studies.payoff_plot import draw_payoff

    draw_payoff(*_read(folder, TABLE, RECORD, "payoff"), path)


def _sweep(folder: Path, path: Path) -> None:
    from breakeven.studies.sweep import RECORD, TABLE
    from breakeven.studies.sweep_plot import draw_sweep

    draw_sweep(*_read(folder, TABLE, RECORD, "sweep"), path)


def _sensitivity(folder: Path, path: Path) -> None:
    from breakeven.studies.sensitivity import DRAWN, RECORD, TABLE
    from breakeven.studies.sensitivity_plot import draw_sensitivity

    table, record = _read(folder, TABLE, RECORD, "sensitivity")
    draws, _ = _read(folder, DRAWN, RECORD, "sensitivity")
    draw_sensitivity(table, draws, record, path)


def _latency(folder: Path, path: Path) -> None:
    from breakeven.studies.latency_plot import latency

    try:
        calls = pd.read_parquet(folder / "calls.parquet")
        record = json.loads((folder / LATENCY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        allowed = f"calls.parquet and {LATENCY}, as `breakeven simulate {folder} --out {folder}` writes them"
        raise InputError("folder", str(folder), allowed) from None
    latency(calls, record["bounds_s"], record["title"], path, record)


def _breakdown(folder: Path, path: Path) -> None:
    from breakeven.studies.attribution import bill_of
    from breakeven.studies.breakdown_plot import breakdown

    record = read_record(folder)
    try:
        topologies = [str(name) for name in pd.read_csv(folder / FAMILIES)["topology"]]
    except (OSError, ValueError, KeyError):
        raise InputError("folder", str(folder), f"{FAMILIES} cannot be read") from None
    if not topologies:
        raise InputError("folder", str(folder), "a run in which some deployment meets the target")
    bills = {name: bill_of(read_deployment(f"{folder}:{name}")) for name in topologies}
    breakdown(bills, record, path)


PICTURES: dict[str, Callable[[Path, Path], None]] = {
    "pareto": _pareto,
    "payoff": _payoff,
    "sensitivity": _sensitivity,
    "latency": _latency,
    "breakdown": _breakdown,
    "sweep": _sweep,
}
