"""Optuna's choice of candidates: multi-objective ask-and-tell in batches, each batch one call of the model."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import optuna
from optuna.study import StudyDirection

from breakeven.models.topology import COLUMNS
from breakeven.optimizer.evaluator import REASONS, Columns, Evaluator
from breakeven.optimizer.front import MAXIMISED
from breakeven.optimizer.search import Found, Progress
from breakeven.optimizer.storage import sampler
from breakeven.spaces.space import AXES, AXIS_COLUMNS, POOL_FIELDS, Family, Space

BATCH = 50


_NAMED = ("accelerator", "weights", "expert_parallel")


@dataclass(frozen=True)
class Encoding:
    """Optuna parameters of a space, the same for every topology, so that samplers learn across topologies.

    Each phase has one categorical per pool field, over all values that any topology gives it. A joint pool reads the
    batch limit of its decode and everything else of its prefill; a number that a topology does not allow stands for
    the nearest one it does.
    """

    space: Space

    @cached_property
    def _rows(self) -> list[list[dict[tuple[int, ...], int]]]:
        """Row of each pool table by its values, per family."""
        return [[_row_numbers(table) for table in family.tables] for family in self.space.families]

    @cached_property
    def _choices(self) -> dict[str, list[Any]]:
        """Values of every parameter, in a fixed order."""
        families = self.space.families
        found: dict[str, list[Any]] = {"topology": [family.topology.name for family in families]}
        for phase in self.space.slots:
            for field in POOL_FIELDS:
                columns = [family.tables[_pool(family, phase)][field] for family in families]
                found[f"{phase}.{field}"] = [int(v) for v in np.unique(np.concatenate(columns))]
        for axis in AXES:
            found[axis] = [int(v) for v in np.unique(np.concatenate([getattr(f, axis) for f in families]))]
        return found

    def suggest(self, trial: optuna.Trial) -> int | None:
        """The candidate that a trial's parameters name, or None when they break a sharding rule."""
        chosen = {name: _suggest(trial, name, values) for name, values in self._choices.items()}
        f = self._choices["topology"].index(chosen["topology"])
        family = self.space.families[f]
        digits: list[int] = []
        for i, (table, rows) in enumerate(zip(family.tables, self._rows[f], strict=True)):
            phases = [phase for phase in self.space.slots if _pool(family, phase) == i]
            values = tuple(_nearest(field, chosen[_source(phases, field)], table[field]) for field in POOL_FIELDS)
            if values not in rows:
                return None
            digits.append(rows[values])
        for axis in AXES:
            allowed = getattr(family, axis)
            digits.append(int(np.argmax(allowed == chosen[axis])))
        return int(self.space.offsets[f] + np.ravel_multi_index(digits, family.radices))

    def parameters(self, candidate: int) -> dict[str, Any]:
        """Optuna parameters that name a candidate: what `suggest` reads back."""
        columns = self.space.columns(np.array([candidate]))
        f = int(columns["family"][0])
        values: dict[str, Any] = {"topology": self._choices["topology"][f]}
        for phase in self.space.slots:
            values |= {f"{phase}.{field}": int(columns[f"{phase}_{field}"][0]) for field in POOL_FIELDS}
        values |= {axis: int(columns[name][0]) for axis, name in AXIS_COLUMNS.items()}
        return {name: value for name, value in values.items() if len(self._choices[name]) > 1}


def _pool(family: Family, slot: str) -> int:
    """Number of the pool that a slot's stage stands in."""
    return family.topology.labels[COLUMNS.index(slot)]


def _source(phases: list[str], field: str) -> str:
    """The parameter that a field of a pool is read from."""
    phase = phases[-1] if field == "max_batch" else phases[0]
    return f"{phase}.{field}"


def _nearest(field: str, value: int, allowed: np.ndarray) -> int:
    """`value` if it is allowed, else the nearest number, or the first name."""
    values = np.unique(allowed)
    if value in values or field in _NAMED:
        return value if value in values else int(values[0])
    return int(values[np.argmin(np.abs(np.log(values / value)))])


def _row_numbers(table: dict[str, np.ndarray]) -> dict[tuple[int, ...], int]:
    rows = zip(*[table[field].tolist() for field in POOL_FIELDS], strict=True)
    return {row: i for i, row in enumerate(rows)}


def _suggest(trial: optuna.Trial, name: str, choices: list[Any]) -> Any:
    return choices[0] if len(choices) == 1 else trial.suggest_categorical(name, choices)


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
