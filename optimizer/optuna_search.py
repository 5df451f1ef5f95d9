"""Optuna's choice of candidates: multi-objective ask-and-tell in batches, each batch one call of the model."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import optuna
from optuna.study import StudyDirection

from breakeven.optimizer.evaluator import REASONS, Columns, Evaluator
from breakeven.optimizer.front import MAXIMISED
from breakeven.optimizer.search import Found, Progress
from breakeven.spaces.space import POOL_FIELDS, Family, Space

BATCH = 50


@dataclass(frozen=True)
class Encoding:
    """Optuna parameters of a space: the topology, then each choice of its pools as a categorical."""

    space: Space

    @cached_property
    def _rows(self) -> list[list[dict[tuple[int, ...], int]]]:
        """Row of each pool table by its values, per family."""
        return [[_row_numbers(table) for table in family.tables] for family in self.space.families]

    def suggest(self, trial: optuna.Trial) -> int | None:
        """The candidate that a trial's parameters name, or None when they break a sharding rule."""
        names = [family.topology.name for family in self.space.families]
        f = names.index(trial.suggest_categorical("topology", names))
        family = self.space.families[f]
        digits: list[int | None] = []
        for pool, table, rows in zip(family.topology.pools, family.tables, self._rows[f], strict=True):
            values = tuple(
                _suggest(trial, f"{names[f]}.{pool}.{field}", np.unique(table[field])) for field in POOL_FIELDS
            )
            digits.append(rows.get(values))
        for name, axis in (("kv", family.kv), ("link", family.links), ("routing", family.routing)):
            digits.append(_suggest(trial, f"{names[f]}.{name}", np.arange(len(axis))))
        if any(digit is None for digit in digits):
            return None
        return int(self.space.offsets[f] + np.ravel_multi_index([int(d or 0) for d in digits], family.radices))

    def parameters(self, candidate: int) -> dict[str, Any]:
        """The Optuna parameters that name a candidate: what `suggest` reads back."""
        f = int(self.space.family(np.array([candidate]))[0])
        family: Family = self.space.families[f]
        name = family.topology.name
        digits = [int(d) for d in family.digits(np.array(candidate - self.space.offsets[f]))]
        found: dict[str, Any] = {"topology": name}
        for pool, table, digit in zip(family.topology.pools, family.tables, digits, strict=False):
            for field in POOL_FIELDS:
                if len(np.unique(table[field])) > 1:
                    found[f"{name}.{pool}.{field}"] = int(table[field][digit])
        axes = (("kv", family.kv), ("link", family.links), ("routing", family.routing))
        for (axis, values), digit in zip(axes, digits[len(family.tables) :], strict=True):
            if len(values) > 1:
                found[f"{name}.{axis}"] = digit
        return found


def _row_numbers(table: dict[str, np.ndarray]) -> dict[tuple[int, ...], int]:
    rows = zip(*[table[field].tolist() for field in POOL_FIELDS], strict=True)
    return {row: i for i, row in enumerate(rows)}


def _suggest(trial: optuna.Trial, name: str, values: np.ndarray) -> int:
    choices = [int(v) for v in values]
    return choices[0] if len(choices) == 1 else trial.suggest_categorical(name, choices)


def sampler(name: str, seed: int) -> optuna.samplers.BaseSampler:
    """An Optuna sampler by name."""
    if name == "tpe":
        return optuna.samplers.TPESampler(seed=seed)
    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    return optuna.samplers.NSGAIISampler(seed=seed, population_size=BATCH)


def _batches(study: optuna.Study, encoding: Encoding, trials: int) -> Iterator[list[tuple[optuna.Trial, int | None]]]:
    for start in range(0, trials, BATCH):
        asked = [study.ask() for _ in range(min(BATCH, trials - start))]
        yield [(trial, encoding.suggest(trial)) for trial in asked]


def _tell(
    study: optuna.Study, trial: optuna.Trial, columns: Columns | None, row: int, objectives: tuple[str, ...]
) -> None:
    """Report one candidate; one that breaks a rule or a limit is told as infeasible, with by how much."""
    if columns is None:
        trial.set_constraint("sharding", 1.0)
        study.tell(trial, [0.0 if name in MAXIMISED else 1e12 for name in objectives])
        return
    for name in REASONS:
        trial.set_constraint(name, float(np.clip(columns[f"excess_{name}"][row], -1.0, 1e6)))
    trial.set_user_attr("candidate", int(columns["candidate"][row]))
    study.tell(trial, [float(np.nan_to_num(columns[name][row], nan=1e12, posinf=1e12)) for name in objectives])


def optuna_search(
    evaluator: Evaluator,
    found: Found,
    trials: int,
    sampler_name: str,
    seed: int,
    rank_by: str,
    progress: Progress,
    storage: str | None = None,
    study_name: str = "breakeven",
) -> Found:
    """Let Optuna choose `trials` candidates; each is evaluated once, however often it is asked for."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    directions = [
        StudyDirection.MAXIMIZE if name in MAXIMISED else StudyDirection.MINIMIZE for name in found.objectives
    ]
    study = optuna.create_study(
        storage=storage,
        study_name=study_name,
        sampler=sampler(sampler_name, seed),
        directions=directions,
        load_if_exists=storage is not None,
    )
    encoding = Encoding(evaluator.space)
    seen: dict[int, tuple[Columns, int]] = {}
    told = 0
    for batch in _batches(study, encoding, trials):
        new = np.array(sorted({c for _, c in batch if c is not None} - set(seen)), np.int64)
        if len(new):
            columns = evaluator(new)
            found.add(columns, evaluator.space.family(new), rank_by)
            seen |= {int(c): (columns, i) for i, c in enumerate(new)}
        for trial, candidate in batch:
            columns, row = seen[candidate] if candidate is not None else (None, 0)
            _tell(study, trial, columns, row, found.objectives)
        told += len(batch)
        progress(told, trials)
    return found
