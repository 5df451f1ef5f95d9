"""A space seen as structures times numbers.

A structure is what hardware, sharding and precision a deployment has: a topology, an accelerator, parallelism and
weights per pool, a KV precision, a link, a routing. Its numbers are the replicas, batch limits and token budgets inside
it. Structures are numbered like candidates are: mixed radix within a topology, one topology after another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from breakeven.spaces.space import Family, Space

NUMBERS = ("replicas", "max_batch", "token_budget")
NAMED = ("accelerator", "weights", "expert_parallel")  # every other value is a neighbour; of numbers, the next ones

Table = dict[str, np.ndarray]


@dataclass(frozen=True)
class PoolShape:
    """The configurations of a pool, a row each, by structure and by level (the position of a value on its axis)."""

    table: Table

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """What a structure of the pool consists of."""
        return tuple(name for name in self.table if name not in NUMBERS)

    @cached_property
    def _distinct(self) -> tuple[np.ndarray, np.ndarray]:
        keys = np.stack([self.table[name] for name in self.fields], 1)
        values, inverse = np.unique(keys, axis=0, return_inverse=True)
        return values, inverse.reshape(-1)

    @property
    def structures(self) -> np.ndarray:
        """Values of `fields`, one structure a row."""
        return self._distinct[0]

    @property
    def structure(self) -> np.ndarray:
        """Number of each row's structure."""
        return self._distinct[1]

    @cached_property
    def rows(self) -> tuple[np.ndarray, ...]:
        """Rows of each structure."""
        order = np.argsort(self.structure, kind="stable")
        cuts = np.searchsorted(self.structure[order], np.arange(1, len(self.structures)))
        return tuple(np.split(order, cuts))

    @cached_property
    def axes(self) -> dict[str, np.ndarray]:
        """Distinct values of each field."""
        return {name: np.unique(column) for name, column in self.table.items()}

    @cached_property
    def levels(self) -> dict[str, np.ndarray]:
        """Position of each row's value on the axis of each field."""
        return {name: np.searchsorted(self.axes[name], column) for name, column in self.table.items()}

    @cached_property
    def _row_of_levels(self) -> np.ndarray:
        """Row at every combination of levels, -1 where no configuration is valid."""
        rows = np.full([len(axis) for axis in self.axes.values()], -1, np.int64)
        rows[tuple(self.levels.values())] = np.arange(len(self.structure))
        return rows

    def thinned(self, structure: int, counts: dict[str, int]) -> np.ndarray:
        """Rows of a structure at `counts` levels of each number, evenly spread with both ends."""
        rows = self.rows[structure]
        kept = np.ones(len(rows), bool)
        for name, count in counts.items():
            size = len(self.axes[name])
            chosen = (
                np.unique(np.round(np.linspace(0, size - 1, max(count, 1))).astype(int)) if count > 1 else [size // 2]
            )
            kept &= np.isin(self.levels[name][rows], chosen)
        return rows[kept] if kept.any() else rows[-1:]

    def with_levels(self, rows: np.ndarray, levels: dict[str, np.ndarray]) -> np.ndarray:
        """The rows with other levels of some fields; -1 where no configuration has them."""
        place = [levels.get(name, self.levels[name][rows]) for name in self.table]
        return self._row_of_levels[tuple(place)]

    def moves(self, rows: np.ndarray, fields: Sequence[str]) -> list[np.ndarray]:
        """Rows that differ in one of `fields` by one level (by anything in a named one); -1 where there is none."""
        place = np.stack([self.levels[name][rows] for name in self.table], 0)
        found = []
        for k, name in enumerate(self.table):
            size = len(self.axes[name])
            if name not in fields or size == 1:
                continue
            for step in range(1, size) if name in NAMED else (1, -1):
                moved = place.copy()
                moved[k] = (place[k] + step) % size if name in NAMED else place[k] + step
                inside = (moved[k] >= 0) & (moved[k] < size)
                moved[k] = np.clip(moved[k], 0, size - 1)
                found.append(np.where(inside, self._row_of_levels[tuple(moved)], -1))
        return found


@dataclass(frozen=True)
class Structures:
    """The structures of a space."""

    space: Space

    @cached_property
    def pools(self) -> tuple[tuple[PoolShape, ...], ...]:
        """The pools of each family."""
        return tuple(tuple(PoolShape(table) for table in family.tables) for family in self.space.families)

    @cached_property
    def radices(self) -> tuple[tuple[int, ...], ...]:
        """Structures of each pool, then the choices that join the pools, per family."""
        return tuple(
            (*[len(pool.structures) for pool in pools], *family.radices[len(pools) :])
            for pools, family in zip(self.pools, self.space.families, strict=True)
        )

    @cached_property
    def offsets(self) -> np.ndarray:
        """First structure of each family, and their number."""
        return np.cumsum([0, *[prod(r) for r in self.radices]])

    @property
    def size(self) -> int:
        return int(self.offsets[-1])

    def digits(self, structure: int) -> tuple[int, tuple[int, ...]]:
        """(family, a structure of each pool and the choices that join them)."""
        f = int(np.searchsorted(self.offsets, structure, side="right")) - 1
        return f, tuple(int(d) for d in np.unravel_index(structure - self.offsets[f], self.radices[f]))

    def number(self, family: int, digits: Sequence[int]) -> int:
        """The structure that has these digits."""
        return int(self.offsets[family] + np.ravel_multi_index(tuple(digits), self.radices[family]))

    def of(self, ids: np.ndarray) -> np.ndarray:
        """The structure of each candidate."""
        out = np.empty(len(ids), np.int64)
        families = self.space.family(ids)
        for f in np.unique(families):
            here = families == f
            pools = self.pools[f]
            digits = self.space.families[f].digits(ids[here] - self.space.offsets[f])
            own = [pool.structure[d] for pool, d in zip(pools, digits, strict=False)]
            number = np.ravel_multi_index((*own, *digits[len(pools) :]), self.radices[f])
            out[here] = self.offsets[f] + number
        return out

    def candidates(self, structure: int, most: int) -> tuple[np.ndarray, bool]:
        """(candidates of a structure, whether they are all): thinned evenly in every number to about `most`."""
        f, digits = self.digits(structure)
        pools = self.pools[f]
        rows = [pool.rows[d] for pool, d in zip(pools, digits, strict=False)]
        whole = prod(len(r) for r in rows) <= most
        if not whole:
            counts = _thinner([pool.axes for pool in pools], most)
            rows = [pool.thinned(d, c) for pool, d, c in zip(pools, digits, counts, strict=False)]
        return self._ids(f, rows, digits[len(pools) :]), whole

    def coarse(self, structures: np.ndarray, points: int) -> np.ndarray:
        """About `points` candidates of each structure, evenly spread over its numbers."""
        parts = [self.candidates(int(s), points)[0] for s in structures]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _ids(self, f: int, rows: Sequence[np.ndarray], joined: Sequence[int]) -> np.ndarray:
        grid = np.meshgrid(*rows, indexing="ij")
        digits = [g.ravel() for g in grid]
        digits += [np.full(len(digits[0]), d) for d in joined]
        return self.space.offsets[f] + np.ravel_multi_index(tuple(digits), self.space.families[f].radices)

    def neighbours(self, ids: np.ndarray, numbers_only: bool = False) -> np.ndarray:
        """Candidates one step away in one choice (`numbers_only`: of replicas, batch limits, token budgets), sorted."""
        found = [np.empty(0, np.int64)]
        families = self.space.family(ids)
        for f in np.unique(families):
            here, pools = ids[families == f], self.pools[f]
            family = self.space.families[f]
            digits = family.digits(here - self.space.offsets[f])
            strides = _strides(family)
            for pool, digit, stride in zip(pools, digits, strides, strict=False):
                fields = NUMBERS if numbers_only else tuple(pool.table)
                for rows in pool.moves(digit, fields):
                    found.append((here + (rows - digit) * stride)[rows >= 0])
            if not numbers_only:
                for k in range(len(pools), len(family.radices)):
                    for step in range(1, family.radices[k]):
                        found.append(here + ((digits[k] + step) % family.radices[k] - digits[k]) * strides[k])
        return np.unique(np.concatenate(found))


def _strides(family: Family) -> list[int]:
    return [prod(family.radices[k + 1 :]) for k in range(len(family.radices))]


def _thinner(axes: Sequence[dict[str, np.ndarray]], most: int) -> list[dict[str, int]]:
    """How many levels of each number each pool keeps, so that their product is at most about `most`."""
    counts = [{name: len(pool[name]) for name in NUMBERS if name in pool} for pool in axes]
    while prod(n for pool in counts for n in pool.values()) > most:
        pool, name = max(((p, k) for p in counts for k in p), key=lambda at: at[0][at[1]])
        if pool[name] == 1:
            break
        pool[name] = max(int(pool[name] * 0.7), 1)
    return counts
