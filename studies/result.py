"""What a study found, as tables: the front, the cheapest deployment that meets the target, the best of each family."""

import json
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from breakeven.models.topology import topology
from breakeven.optimizer.evaluator import REASONS, Evaluator, doubts, reasons
from breakeven.optimizer.quality import History
from breakeven.optimizer.search import Found
from breakeven.optimizer.uncertainty import risk
from breakeven.optimizer.verify import Verification
from breakeven.studies.decision import decision
from breakeven.studies.deployment_file import BEST, FAMILIES, FRONT, RECORD, anchored, deployment_yaml, pool_slots
from breakeven.studies.economics import economics, sentences
from breakeven.studies.study import Study

if TYPE_CHECKING:
    from breakeven.studies.mixed import Mixed

EXPLANATION = "explanation.json"
EVALUATIONS = "evaluations.parquet"
MIXED_FILES = ("mixed.csv", "first-cell.yaml", "second-cell.yaml")  # pairs of cells, and each cell of the cheapest
SIMULATED = ("slo_attainment_simulated", "slo_attainment_simulated_low", "slo_attainment_simulated_high")

_FLAGS = ("excess_", "doubt_")

Row = dict[str, Any]


def records(frame: pd.DataFrame) -> list[Row]:
    """The rows of a frame as plain mappings."""
    return [{str(k): v for k, v in row.items()} for row in frame.to_dict("records")]


def describe(row: Row) -> str:
    """A deployment in a few words: `3 x h200-sxm TP4 + 2 x b200-sxm TP2`."""

    def pool(phase: str) -> str:
        ranks = [f"TP{row[f'{phase}_tensor_parallel']}"]
        for name, letters in (("pipeline_parallel", "PP"), ("data_parallel", "DP"), ("context_parallel", "CP")):
            if row.get(f"{phase}_{name}", 1) > 1:
                ranks.append(f"{letters}{row[f'{phase}_{name}']}")
        if row[f"{phase}_expert_parallel"]:
            ranks.append("EP")
        hardware = f"{row[f'{phase}_replicas']} × {row[f'{phase}_accelerator']} {' '.join(ranks)}"
        return f"{hardware} {row[f'{phase}_weights']}"

    return " → ".join(pool(slot) for slot in pool_slots(topology(row["topology"])))


def table(evaluator: Evaluator, ids: np.ndarray) -> pd.DataFrame:
    """Choices, metrics, percentiles and doubts of candidates, one row each."""
    columns = evaluator(ids)
    frame = evaluator.space.frame(ids)
    frame.insert(1, "deployment", [describe(row) for row in records(frame)])
    metrics = {k: v for k, v in columns.items() if not k.startswith(_FLAGS) and k != "candidate"}
    metrics |= evaluator.details(ids, columns["sessions_per_second"])
    frame = frame.assign(**metrics)
    for phase, pool_share in _pool_costs(evaluator, frame).items():
        frame[f"idle_cost_{phase}_usd_per_hour"] = pool_share * (1.0 - frame[f"utilization_{phase}"]).clip(0.0, 1.0)
    frame["unverified"] = doubts(columns)
    frame["reason"] = reasons(columns)
    return frame


def with_verdicts(frame: pd.DataFrame, verification: Verification) -> pd.DataFrame:
    """The frame with the simulated attainment and its confidence interval where there is one, doubts cleared there."""
    verdicts = [verification.verdicts.get(int(c)) for c in frame["candidate"]]
    found = [None if v is None else v.attainment for v in verdicts]
    shown = [(np.nan,) * 3 if e is None else tuple(e) for e in found]
    values = np.array(shown, float).reshape(-1, 3)
    frame = frame.assign(**{name: values[:, i] for i, name in enumerate(SIMULATED)})
    frame["unverified"] = [doubt if e is None else "" for doubt, e in zip(frame["unverified"], found, strict=True)]
    return frame


def with_risk(study: Study, frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with what draws of uncertain inputs say of each row; as it is where nothing is uncertain."""
    uncertain = study.written.uncertain
    if uncertain is None or not len(frame):
        return frame
    found = risk(study.evaluator(), study.draws(uncertain.draws), frame["candidate"].to_numpy(np.int64))
    return frame.assign(**found._asdict())


def _pool_costs(evaluator: Evaluator, frame: pd.DataFrame) -> dict[str, pd.Series]:
    """Cost per hour of the prefill and of the decode pool; a shared pool counts once, as decode."""
    usd_per_hour = np.asarray(evaluator.catalog.hardware.usd_per_hour, float)
    kinds = list(evaluator.space.names.accelerator_ids)
    costs = {}
    for phase in ("prefill", "decode"):
        sizes = ("replicas", "tensor_parallel", "data_parallel", "pipeline_parallel", "context_parallel")
        ranks = [name for name in (f"{phase}_{size}" for size in sizes) if name in frame]
        price = usd_per_hour[[kinds.index(name) for name in frame[f"{phase}_accelerator"]]]
        costs[phase] = frame[ranks].prod(axis=1) * price
    costs["prefill"] = costs["prefill"].where(frame["link"] != "", 0.0)
    return costs


@dataclass
class Result:
    """What a run found, and what it took."""

    study: Study
    front: pd.DataFrame
    families: pd.DataFrame  # the best of each topology that meets the target, cheapest first
    found: Found
    seconds: float
    search: str
    interrupted: bool = False
    verification: Verification | None = None
    history: History | None = None  # of an Optuna search
    mixed: "Mixed | None" = None  # two cells with unlike accelerators, where the study asks for them

    @property
    def best(self) -> Row | None:
        """The cheapest deployment that meets the target (for `load: max` the one that carries most), or None."""
        return records(self.families.iloc[:1])[0] if len(self.families) else None

    @property
    def rank_by(self) -> str:
        return rank_by(self.study)

    def answer(self) -> list[str]:
        """The decision in sentences, then what it means in money, then what a mix of accelerators costs."""
        families = records(self.families)
        said = decision(self.study, families, self.rank_by, self.why_not)
        mixed = [] if self.mixed is None else self.mixed.sentences()
        return [*said, *sentences(self.study, self.best, families), *mixed]

    def why_not(self) -> str:
        """In one line, why nothing meets the target: which constraint binds, and by how much."""
        slo, found = self.study.written.slo, self.found
        if found.best and self.verification is not None:
            tried = self.verification.verdicts.values()
            return (
                f"{len(found.best)} topologies meet it by the model, but none of their candidates does when simulated; "
                f"the best of {len(tried)} reaches {max(v.attainment.value for v in tried):.4f}"
            )
        if found.feasible:
            bounds = {name: getattr(slo, f"{name}_s") for name in found.alone}
            hardest = min((name for name in bounds if bounds[name] is not None), key=lambda name: found.alone[name][0])
            share, mean = found.alone[hardest]
            return (
                f"SLO attainment binds: the best of {found.feasible:,} feasible candidates reaches "
                f"{found.highest_attainment:.4f}; hardest alone is {hardest}_s, met by at most {share:.2%}, "
                f"with a mean of {mean:.3g} s at best"
            )
        name = max(found.stopped, key=lambda key: found.stopped[key])
        return (
            f"{REASONS[name]} binds for {found.stopped[name]:,} of {found.evaluated:,} candidates; "
            f"the nearest misses by {found.nearest[name]:.1%}"
        )

    def save(self, folder: Path) -> None:
        """Write front.csv, families.csv, evaluations.parquet, best.yaml and study.json."""
        folder.mkdir(parents=True, exist_ok=True)
        self.front.to_csv(folder / FRONT, index=False)
        self.families.to_csv(folder / FAMILIES, index=False)
        self._evaluations().to_parquet(folder / EVALUATIONS, index=False)
        best = self.best
        if best is not None:
            (folder / BEST).write_text(deployment_yaml(self.study, best), encoding="utf-8")
        else:
            (folder / BEST).unlink(missing_ok=True)
        for name in MIXED_FILES:
            (folder / name).unlink(missing_ok=True)
        if self.mixed is not None:
            self.mixed.save(folder)
        (folder / RECORD).write_text(json.dumps(self.record(), indent=2, default=str), encoding="utf-8")

    def _evaluations(self) -> pd.DataFrame:
        """Every evaluated candidate that was kept, and always the front and the best of each family."""
        columns = self.found.rows()
        if not columns:
            return self.front
        frame = self.study.space.frame(columns["candidate"])
        frame = frame.assign(**{k: v for k, v in columns.items() if not k.startswith(_FLAGS)})
        frame["reason"] = reasons(columns)
        frame["unverified"] = doubts(columns)
        for name in ("reason", "unverified"):
            frame[name] = frame[name].astype("category")
        always = pd.concat([self.front, self.families]).loc[:, list(frame.columns)]
        missing = always.loc[~np.isin(always["candidate"].to_numpy(), columns["candidate"])]
        missing = missing.loc[~missing["candidate"].duplicated()]
        return pd.concat([frame, missing]) if len(missing) else frame

    def record(self) -> dict[str, Any]:
        """study.json: counts, seconds, seed, versions and the whole resolved study."""
        study = self.study
        best = self.best
        return {
            "candidates_evaluated": self.found.evaluated,
            "candidates_in_space": study.space.size,
            "candidates_ruled_out_beforehand": self.found.screened,
            "candidates_feasible": self.found.feasible,
            "infeasible_by_reason": {REASONS[k]: v for k, v in sorted(self.found.stopped.items())},
            "evaluation_seconds": self.seconds,
            "seed": study.written.search.seed,
            "search": self.search,
            "hypervolume": None if self.history is None else self.history.record(),
            "interrupted": self.interrupted,
            "objectives": list(self.found.objectives),
            "target": study.written.slo.target,
            "candidates_simulated": 0 if self.verification is None else len(self.verification.verdicts),
            "best": None if best is None else _plain(best),
            "answer": self.answer(),
            "mixed": None if self.mixed is None else self.mixed.record(),
            "economics": economics(study, best, records(self.families)),
            "versions": versions(),
            "study": anchored(study.data, study.file),
            "resolved": resolved(study),
            "file": study.file,
        }


def save_answer(folder: Path, answer: pd.DataFrame, table_file: str, record: dict[str, Any], record_file: str) -> None:
    """Write the table of an answer and the record of how it was found."""
    folder.mkdir(parents=True, exist_ok=True)
    answer.to_csv(folder / table_file, index=False, float_format="%.7g")
    (folder / record_file).write_text(json.dumps(record, indent=2, default=str), encoding="utf-8")


def versions() -> dict[str, str]:
    """What computed a result."""
    names = ("breakeven", "jax", "numba", "numpy", "optuna", "pandas")
    return {name: version(name) for name in names} | {"python": platform.python_version()}


def resolved(study: Study) -> dict[str, Any]:
    """What the study's names stood for: model, workload means, accelerators with prices and what is uncertain."""
    w, a = study.workload, study.architecture
    return {
        "llm": {
            "name": a.name,
            "parameters": a.total_parameters,
            "active_parameters": a.active_parameters,
            "kv_elements_per_token": a.kv_elements_per_token,
            "max_context": a.max_context,
            "source": a.source,
        },
        "workload": {
            "name": study.workload_name,
            **{
                name: float(np.asarray(getattr(w, name)))
                for name in ("calls_per_session", "mean_prompt", "mean_output", "max_tokens", "gap_mean_s")
            },
            "new_prefill_tokens_per_call": float(np.asarray(w.resident.mean_tokens)),
            **({"recorded": "; ".join(study.recorded.notes(a.max_context))} if study.recorded else {}),
        },
        "accelerators": {
            a.id: {
                "usd_per_hour": price,
                "recalled": list(a.recalled),
                "disputed": dict(a.disputed),
                "sources": list(a.sources),
            }
            for a, price in zip(study.accelerators, study.prices_usd_per_hour, strict=True)
        },
    }


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {k: v.item() if isinstance(v, np.generic) else v for k, v in values.items()}


def rank_by(study: Study) -> str:
    """The column that orders deployments that meet the target."""
    return "goodput_per_s" if study.max_load else "cost_per_hour_usd"
