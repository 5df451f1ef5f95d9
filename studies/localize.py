"""`calibrate --local`: corrects deployments by a few points measured on them, and says what that leaves open."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from breakeven.models.inputs import InputError
from breakeven.models.residuals import LIKELY
from breakeven.studies.benchmark import inputs, predict_jitted, uncorrected
from breakeven.studies.benchmark_files import read_observations
from breakeven.studies.deployment_file import Deployed, choices
from breakeven.studies.local_calibration import Floats, LocalFit, Times, deployments, fit_local, times_of
from breakeven.studies.local_file import POOL, Corrected
from breakeven.studies.measured import Point
from breakeven.studies.measured_files import is_table_of_points, read_points
from breakeven.studies.measured_layout import Layout
from breakeven.studies.observations import Observation, times_of_observations


@dataclass(frozen=True)
class Localized:
    """Corrections, and each point that they come from: its load, measured, predicted before and after (ms)."""

    corrections: tuple[Corrected, ...]
    words: tuple[str, ...]  # of each point
    deployment: NDArray[np.int64]  # number of the correction, by point
    measured_ms: Floats  # (points, 2): TTFT, TPOT
    before_ms: Floats
    after_ms: Floats


def calibrate_local(files: Sequence[Path], deployed: Deployed | None) -> Localized:
    """Correct `deployed` by what the files measured on it, or the deployments that a table of serving points names."""
    tables = [file for file in files if is_table_of_points(file)]
    if deployed is None:
        other = next((file for file in files if file not in tables), None)
        if other is not None:
            raise InputError("DEPLOYMENT.yaml", None, f"is required: {other} does not say what it was measured on")
        return _of_points([point for file in tables for point in read_points(file)])
    if tables:
        raise InputError("--local", str(tables[0]), "without DEPLOYMENT.yaml: each of its rows names its deployment")
    return _of_observations(deployed, [one for file in files for one in read_observations(file)])


def _of_observations(deployed: Deployed, seen: Sequence[Observation]) -> Localized:
    measured_ms = np.array([[one.ttft_ms, one.tpot_ms] for one in seen])
    times = times_of_observations(deployed, seen)
    number = np.zeros(len(seen), np.int64)
    study = deployed.study
    pools = choices(study.space.frame(np.array([0], np.int64)).iloc[0].to_dict())
    parts = [{name: pools[pool][name] for name in POOL} for pool in ("pool", "prefill", "decode") if pool in pools]
    known = {"llm": study.architecture.name, "engine": study.engine_name, "prefill": parts[0]}
    known |= {"decode": parts[1] if len(parts) > 1 else None}
    files = ", ".join(dict.fromkeys(Path(one.file).name for one in seen))
    return _localized(times, measured_ms, number, [known], [files], [one.words() for one in seen])


def _of_points(points: Sequence[Point]) -> Localized:
    used = [point for point in points if not point.excluded]
    if used:
        short = np.asarray(predict_jitted(inputs(used)).excess) > 0.0
        used = [point for point, small in zip(used, short, strict=True) if not small]
    if not used:
        reasons = "; ".join(dict.fromkeys(point.excluded for point in points if point.excluded))
        raise InputError(
            "--local", f"{len(points)} rows", f"at least one that can be predicted ({reasons or 'no room'})"
        )
    number = deployments(used)
    leads = [used[int(np.flatnonzero(number == k)[0])] for k in range(int(number.max()) + 1)]
    words = [
        Observation(p.ttft_ms, p.tpot_ms, p.concurrency, np.nan, p.prompt_tokens, p.output_tokens).words() for p in used
    ]
    measured_ms = np.array([[p.ttft_ms, p.tpot_ms] for p in used])
    return _localized(
        times_of(inputs(used)), measured_ms, number, [_known(p) for p in leads], [p.id for p in leads], words
    )


def _known(point: Point) -> dict[str, Any]:
    pools = [_pool(point, layout) for layout in point.layouts]
    decode = pools[1] if len(pools) > 1 else None
    return {"llm": point.model, "engine": point.engine, "prefill": pools[0], "decode": decode}


def _pool(point: Point, layout: Layout) -> dict[str, Any]:
    row = dataclasses.asdict(layout) | {"accelerator": point.accelerator, "weights": point.weights}
    return {name: row[name] for name in POOL} | {"expert_parallel": layout.expert_parallel > 1}


def _localized(
    times: Times,
    measured_ms: Floats,
    number: NDArray[np.int64],
    known: Sequence[Mapping[str, Any]],
    sources: Sequence[str],
    words: Sequence[str],
) -> Localized:
    before_s = times(uncorrected(len(words)))
    if not np.isfinite(before_s).all():
        row = int((~np.isfinite(before_s)).any(1).argmax())
        raise InputError("--local", words[row], "a load that the deployment can carry by the model")
    found = fit_local(times, measured_ms, number, np.ones(len(words), bool))
    return Localized(
        tuple(_corrected(found, number, k, known[k], sources[k]) for k in range(len(known))),
        tuple(words),
        number,
        measured_ms,
        1e3 * before_s,
        1e3 * found.times_s,
    )


def _corrected(found: LocalFit, number: NDArray[np.int64], k: int, known: Mapping[str, Any], source: str) -> Corrected:
    spread = found.spread[number == k].mean(0)
    return Corrected(
        **known,
        prefill_factor=float(found.prefill_factor[k]),
        decode_factor=float(found.decode_factor[k]),
        first_token_s=float(found.first_token_s[k]),
        points=int(np.sum(number == k)),
        remaining_spread={"ttft": float(spread[0]), "tpot": float(spread[1])},
        measured=source,
    )


def show_local(found: Localized, console: Console) -> None:
    """Each point before and after, and each correction with what remains open."""
    for k, one in enumerate(found.corrections):
        table = Table(title=one.where(), title_justify="left", title_style="bold", box=None, pad_edge=False)
        table.add_column("")
        for metric in ("TTFT", "TPOT"):
            for what in ("measured", "model", "corrected"):
                table.add_column(f"{metric} {what}", justify="right")
        for i in np.flatnonzero(found.deployment == k):
            parts = (found.measured_ms[i], found.before_ms[i], found.after_ms[i])
            table.add_row(found.words[i], *[_ms(part[m]) for m in (0, 1) for part in parts])
        console.print(table)
        low, high = (np.exp(LIKELY * sign * one.remaining_spread["tpot"]) - 1.0 for sign in (-1.0, 1.0))
        first, last = (np.exp(LIKELY * sign * one.remaining_spread["ttft"]) - 1.0 for sign in (-1.0, 1.0))
        console.print(
            f"{one.words()}. Another point should be measured within {low:+.0%} to {high:+.0%} of its TPOT and "
            f"{first:+.0%} to {last:+.0%} of its TTFT in 8 of 10 cases.",
            highlight=False,
            soft_wrap=True,
        )
        console.print()


def _ms(value: float) -> str:
    return f"{value:,.4g} ms" if np.isfinite(value) else "–"
