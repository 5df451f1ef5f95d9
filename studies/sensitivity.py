"""Sensitivity of an answer: elasticities, Sobol indices, what flips the winner, and the fitted model's own error."""

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd

from breakeven.models.deployment import Deployment
from breakeven.models.variation import Input, varied
from breakeven.optimizer.evaluator import SMALL
from breakeven.optimizer.optima import Optimizer, Scenario, probe, shortlist, structures
from breakeven.optimizer.search import Progress
from breakeven.optimizer.sensitivity import Elasticities, Judge, Judged, Sobol, elasticities, sobol
from breakeven.studies.deployment_file import read_record
from breakeven.studies.fit_error import coefficient_draws, log_sd, misses
from breakeven.studies.inputs_of import inputs_of, with_ranges
from breakeven.studies.optima import is_split, scenario, workers
from breakeven.studies.result import describe, records, versions
from breakeven.studies.study import Study

TABLE, DRAWN, RECORD = "sensitivity.csv", "sensitivity_draws.csv", "sensitivity.json"
SOBOL_INPUTS = 12  # those whose range moves attainment or cost most
SAMPLES = 128
DRAWS = 400
FLIP_STEPS = np.geomspace(1.0, 4.0, 9)[1:]  # factors tried either way
SCOUTS = 24  # random scenarios whose optima join the candidates that are re-optimised over
OUTPUTS = ("slo_attainment", "cost_per_good_call_usd", "cost_ratio")


@dataclass
class Sensitivity:
    """One row per input; Sobol indices are nan of inputs left out."""

    study: Study
    title: str
    row: dict[str, Any]  # the chosen deployment
    table: pd.DataFrame
    ratio: float  # cost of the best split over the best other; nan without both
    quantiles: dict[str, dict[str, float]]  # what is drawn -> quantiles of the outputs
    draws: pd.DataFrame  # outputs under drawn coefficients, and with what the model misses
    candidates: int
    seconds: float
    notes: list[str] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """sensitivity.json: what a picture, or a repetition, needs."""
        study = self.study
        return {
            "study": study.written.name,
            "file": study.file,
            "title": self.title,
            "llm": study.architecture.name,
            "workload": study.workload_name,
            "seed": study.written.search.seed,
            "target": study.written.slo.target,
            "deployment": describe(self.row),
            "topology": self.row["topology"],
            "slo_attainment": self.row["slo_attainment"],
            "cost_per_hour_usd": self.row["cost_per_hour_usd"],
            "cost_ratio": None if np.isnan(self.ratio) else self.ratio,
            "fit_error": self.quantiles,
            "candidates": self.candidates,
            "seconds": self.seconds,
            "notes": self.notes,
            "versions": versions(),
        }

    def save(self, folder: Path) -> None:
        """Write sensitivity.csv, sensitivity_draws.csv and sensitivity.json."""
        folder.mkdir(parents=True, exist_ok=True)
        self.table.to_csv(folder / TABLE, index=False, float_format="%.6g")
        self.draws.to_csv(folder / DRAWN, index=False, float_format="%.6g")
        (folder / RECORD).write_text(json.dumps(self.record(), indent=2, default=float), encoding="utf-8")


@dataclass(frozen=True)
class Chosen:
    """A deployment in the space it was chosen from."""

    study: Study
    candidate: int
    title: str


def chosen(target: str, study: Study | None) -> Chosen:
    """The deployment to look at: the cheapest of a study by the model, or the best of an output folder."""
    if study is None:
        record = read_record(Path(target))
        study = Study.parse(record["study"], record["file"])
        best = record["best"]
        if best is not None:
            return Chosen(study, int(best["candidate"]), target)
    whole = probe(study.space, scenario(study))
    best_of = whole.best(study.space)
    if best_of:
        return Chosen(study, min(best_of.values())[1], study.written.name)
    most = int(np.argmax(whole.attainment))
    return Chosen(study, most, f"{study.written.name} (nothing meets the target: the highest attainment)")


def sensitivity(
    picked: Chosen, samples: int = SAMPLES, ranges: Sequence[str] = (), progress: Progress | None = None
) -> Sensitivity:
    """Everything about one deployment's inputs: see the module."""
    clock = time.perf_counter()
    study = picked.study
    given = scenario(study)
    optimizer = Optimizer(study.space, shortlist(study.space, [probe(study.space, given)]))
    found = optimizer.best(given)
    ids = [picked.candidate, *[o.candidate for o in found.values()]]
    frame = study.space.frame(np.array(ids))
    inputs = with_ranges(inputs_of(study, records(frame)), ranges)
    slopes = elasticities(study.space.deployment(np.array(ids[:1])), given, inputs)[0]
    candidates = _candidates(picked.candidate, optimizer, given, inputs, study.written.search.seed)
    judge = _judge(study, candidates, given, inputs)
    base = judge.at([1.0] * len(inputs))
    table = _table(inputs, slopes, study)
    both = bool(judge.split.any() and not judge.split.all())
    if progress:
        progress(1, 4)
    flips = [_flips(judge, i, base) if both else (np.nan, np.nan) for i in range(len(inputs))]
    table["flips_below"], table["flips_above"] = zip(*flips, strict=True)
    if progress:
        progress(2, 4)
    indices, kept = _sobol(judge, inputs, slopes, samples, study.written.search.seed)
    for name, each in zip(OUTPUTS, indices, strict=True):
        _add_sobol(table, name, each, kept)
    if progress:
        progress(3, 4)
    draws = _draws(judge, study, inputs)
    if progress:
        progress(4, 4)
    row = _row(study, picked.candidate, base)
    quantiles = {str(what): _quantiles(rows) for what, rows in draws.groupby("what")}
    seconds = time.perf_counter() - clock
    return Sensitivity(study, picked.title, row, table, base.ratio, quantiles, draws, len(candidates), seconds)


def _row(study: Study, candidate: int, base: Judged) -> dict[str, Any]:
    row = records(study.space.frame(np.array([candidate])))[0]
    found = probe_one(study, candidate)
    return {**row, **found, "slo_attainment": base.attainment}


def probe_one(study: Study, candidate: int) -> dict[str, Any]:
    """The analytic figures of one candidate."""
    columns = study.evaluator()(np.array([candidate]))
    return {name: columns[name][0].item() for name in ("cost_per_hour_usd", "slo_attainment", "feasible")}


def _candidates(first: int, optimizer: Optimizer, given: Scenario, inputs: Sequence[Input], seed: int) -> np.ndarray:
    """At most SMALL candidates to re-optimise over, the chosen one first: what is best in the scenario or in scenarios
    drawn from twice the inputs' ranges, and all that differ from these in replicas alone."""
    rng = np.random.default_rng(seed)
    numbers: Scenario = jax.tree.map(np.asarray, given)
    votes: dict[int, int] = {}
    for k in range(SCOUTS):
        factors = [1.0] * len(inputs)
        if k:
            wide = [(2.0 * np.log(e.low), 2.0 * np.log(e.high)) for e in inputs]
            factors = [float(np.exp(rng.uniform(*ends))) for ends in wide]
        changed = Scenario(*varied(*numbers, inputs, [np.float32(f) for f in factors]))
        for optimum in optimizer.best(changed).values():
            votes[optimum.candidate] = votes.get(optimum.candidate, 0) + 1 + SCOUTS * (k == 0)
    structure = structures(optimizer.space, optimizer.ids)
    order = [first]
    for candidate in sorted(votes, key=lambda c: -votes[c]):
        at = int(np.searchsorted(optimizer.ids, candidate))
        order += [candidate, *optimizer.ids[structure == structure[at]].tolist()]
    kept = list(dict.fromkeys(int(c) for c in order))
    return np.array(kept[:SMALL], np.int64)


def _judge(study: Study, candidates: np.ndarray, given: Scenario, inputs: Sequence[Input]) -> Judge:
    families = study.space.family(candidates)
    split = np.array([is_split(study.space.families[f].topology.name) for f in families])
    deployment: Deployment = study.space.deployment(candidates)
    return Judge.of(deployment, split, given, inputs)


def _table(inputs: Sequence[Input], slopes: Elasticities, study: Study) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "input": [each.path for each in inputs],
            "attainment_points_per_percent": slopes.attainment,
            "cost_elasticity": slopes.cost,
            "cost_elasticity_at_attainment": slopes.cost_held,
            "ttft_elasticity": slopes.ttft,
            "tpot_elasticity": slopes.tpot,
            "range_low": [each.low for each in inputs],
            "range_high": [each.high for each in inputs],
            "fit_log_sd": [log_sd(study, each) for each in inputs],
        }
    )


def _many(judge: Judge, factors: np.ndarray) -> list[Judged]:
    """Verdicts of many rows of factors, on all cores."""
    with ThreadPoolExecutor(workers()) as pool:
        return list(pool.map(judge.at, factors))


def _side(verdict: Judged) -> int:
    return 0 if np.isnan(verdict.ratio) else -1 if verdict.ratio < 1.0 - 1e-4 else 1


def _flips(judge: Judge, position: int, base: Judged) -> tuple[float, float]:
    """Nearest factors below and above one at which another side wins; nan where none does within a factor of four."""
    side, found = _side(base), []
    for direction in (-1.0, 1.0):
        at = np.nan
        before = 1.0
        for step in FLIP_STEPS:
            factor = float(step**direction)
            if _side(judge.at(_one(judge, position, factor))) not in (side, 0):
                at = _bisect(judge, position, before, factor, side)
                break
            before = factor
        found.append(at)
    return found[0], found[1]


def _one(judge: Judge, position: int, factor: float) -> list[float]:
    factors = [1.0] * len(judge.inputs)
    factors[position] = factor
    return factors


def _bisect(judge: Judge, position: int, same: float, other: float, side: int) -> float:
    for _ in range(6):
        middle = float(np.sqrt(same * other))
        if _side(judge.at(_one(judge, position, middle))) == side:
            same = middle
        else:
            other = middle
    return float(np.sqrt(same * other))


def _sobol(
    judge: Judge, inputs: Sequence[Input], slopes: Elasticities, samples: int, seed: int
) -> tuple[list[Sobol], list[int]]:
    """Indices of every output over the inputs that matter most in their range, and which these are."""
    width = np.log([each.high / each.low for each in inputs])
    weight = np.abs(slopes.attainment) * width + np.abs(np.nan_to_num(slopes.cost)) * width
    kept = sorted(np.argsort(-weight, kind="stable")[:SOBOL_INPUTS].tolist())
    low, high = (np.log([getattr(inputs[i], end) for i in kept]) for end in ("low", "high"))

    def model(points: np.ndarray) -> np.ndarray:
        factors = np.ones((len(points), len(inputs)))
        factors[:, kept] = np.exp(points)
        return np.array([_outputs(verdict) for verdict in _many(judge, factors)])

    return sobol(model, low, high, samples, seed), kept


def _outputs(verdict: Judged) -> tuple[float, float, float]:
    """Attainment, cost per good call, and the logarithm of the cost ratio, held finite."""
    ratio = verdict.ratio
    log_ratio = 0.0 if np.isnan(ratio) else float(np.clip(np.log(max(ratio, 1e-9)), -2.0, 2.0))
    return verdict.attainment, min(verdict.cost_per_good_call_usd, 1e6), log_ratio


def _add_sobol(table: pd.DataFrame, name: str, each: Sobol, kept: Sequence[int]) -> None:
    for what, values in (
        ("first", each.first),
        ("first_half_width", each.first_half_width),
        ("total", each.total),
        ("total_half_width", each.total_half_width),
    ):
        column = np.full(len(table), np.nan)
        column[list(kept)] = values
        table[f"sobol_{what}_{name}"] = column


def _draws(judge: Judge, study: Study, inputs: Sequence[Input]) -> pd.DataFrame:
    """Outputs under the calibration's own uncertainty, and with what the model misses on unseen hardware besides."""
    seed = study.written.search.seed
    fitted = coefficient_draws(study, inputs, DRAWS, seed)
    frames = []
    for what, factors in (("coefficients", fitted), ("coefficients and misses", fitted * misses(inputs, DRAWS, seed))):
        verdicts = _many(judge, factors)
        rows = [(v.attainment, v.cost_per_good_call_usd, v.ratio) for v in verdicts]
        frames.append(pd.DataFrame(rows, columns=list(OUTPUTS)).assign(what=what))
    return pd.concat(frames, ignore_index=True)


def _quantiles(draws: pd.DataFrame) -> dict[str, float]:
    """5th, 50th and 95th percentiles of each output, and how often the split is the cheaper side."""
    out: dict[str, float] = {}
    for name in OUTPUTS:
        values = draws[name].to_numpy(float)
        values = values[~np.isnan(values)]
        for share in (0.05, 0.5, 0.95):
            out[f"{name}_p{round(100 * share):02d}"] = (
                float(np.quantile(values, share, method="nearest")) if len(values) else np.nan
            )
    ratio = draws["cost_ratio"].to_numpy(float)
    known = ~np.isnan(ratio)
    out["split_pays"] = float(np.mean(ratio[known] < 1.0 - 1e-4)) if known.any() else np.nan
    return out
