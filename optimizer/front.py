"""Pareto fronts: a running archive of the candidates no other one beats in every objective."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import moocore
import numpy as np

MAXIMISED = (
    "goodput_per_s",
    "slo_attainment",
    "sessions_per_accelerator",
    "sessions_per_kw",
    "solved_tasks_per_hour",
)
OBJECTIVES = (
    "cost_per_hour_usd",
    "cost_per_million_tokens_usd",
    "cost_per_session_usd",
    "cost_per_solved_task_usd",
    "goodput_per_s",
    "slo_attainment",
    "session_p95_s",
    "energy_per_token_j",
    "accelerators",
    "sessions_per_accelerator",
    "sessions_per_kw",
    "solved_tasks_per_hour",
)


def as_costs(values: dict[str, np.ndarray], objectives: tuple[str, ...]) -> np.ndarray:
    """Objectives as a matrix to be minimised, shape (n, objectives)."""
    signs = [-1.0 if name in MAXIMISED else 1.0 for name in objectives]
    return np.stack([sign * np.asarray(values[name], float) for sign, name in zip(signs, objectives, strict=True)], 1)


def non_dominated(costs: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Positions of the non-dominated rows, in order of `ids`; of equal rows the lowest id stands for all."""
    order = np.argsort(ids, kind="stable")
    if not len(order):
        return order
    return order[moocore.is_nondominated(costs[order], keep_weakly=False)]


@dataclass
class Archive:
    """The front of all candidates seen so far; adding blocks in any order gives the same front."""

    ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    costs: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))

    def add(self, ids: np.ndarray, costs: np.ndarray) -> None:
        """Merge a block of feasible candidates."""
        if not len(ids):
            return
        if len(self.ids):
            ids, costs = np.concatenate([self.ids, ids]), np.concatenate([self.costs, costs])
        kept = non_dominated(costs, ids)
        self.ids, self.costs = ids[kept], costs[kept]

    def state(self) -> dict[str, list[Any]]:
        """The front as plain numbers that JSON holds exactly."""
        return {"ids": self.ids.tolist(), "costs": self.costs.tolist()}

    @classmethod
    def restored(cls, state: Mapping[str, list[Any]]) -> "Archive":
        """The front that `state` was taken of."""
        return cls(np.array(state["ids"], np.int64), np.array(state["costs"], float)) if state["ids"] else cls()


def hypervolume(costs: np.ndarray, reference: np.ndarray) -> float:
    """Volume dominated by `costs` up to `reference`, both to be minimised."""
    inside = costs[(costs < reference).all(1)]
    return float(moocore.hypervolume(inside, ref=reference)) if len(inside) else 0.0
