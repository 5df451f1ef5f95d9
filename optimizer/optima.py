"""The cheapest deployment of each topology, found again in many scenarios of one space.

A scenario changes what a deployment is evaluated against (load, SLO, hardware, prices), never which deployments there
are, so everything that its axes do not touch is shared: candidates are arrays made once, and what each costs at least
(all of it but the electricity of an owned fleet's use) is known before any evaluation. In a scenario they are evaluated
in that order until one of a topology meets the target for less than all that are left. Of spaces too large for that,
probes (scenarios evaluated in full) choose which structures, everything but the numbers of replicas, can be cheapest.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from breakeven.models.attainment import Slo
from breakeven.models.deployment import Deployment
from breakeven.models.economics import fleet
from breakeven.models.limits import Doubts
from breakeven.models.serving import evaluate
from breakeven.models.tables import Catalog, resolve
from breakeven.models.topology import STAGES
from breakeven.models.workload import Workload
from breakeven.optimizer.evaluator import SMALL, Evaluator
from breakeven.optimizer.search import Progress
from breakeven.spaces.space import Family, Space

EXACT = 20_000  # candidates that every scenario searches; of more, a shortlist
STRUCTURES = 40  # that a probe adds of each topology
PRICE_LISTS = 64  # kept in memory
SAME = 1.0 + 1e-5  # costs closer than that are equal

Rows = np.ndarray


class Scenario(NamedTuple):
    """What deployments are evaluated against."""

    workload: Workload
    slo: Slo
    catalog: Catalog


class Optimum(NamedTuple):
    """The cheapest deployment of a topology that meets the target; of equally cheap ones the most reliable."""

    candidate: int
    cost_per_hour_usd: float
    slo_attainment: float
    doubts: int  # bit i: the i-th of `evaluator.DOUBTS`


@jax.jit
def _least_costs(deployment: Deployment, catalog: Catalog) -> jax.Array:
    """Cost per hour of each candidate when nothing is used."""
    unused = [0.0 * deployment.balanced] * len(STAGES)
    return fleet(resolve(deployment, catalog), catalog.economy, unused).cost_per_hour_usd


def _structures(family: Family) -> tuple[list[np.ndarray], tuple[int, ...]]:
    """Per pool, the structure of each row of its table (all but replicas); and the radices of a structure number."""
    labels = []
    for table in family.tables:
        rows = np.stack([column for name, column in table.items() if name != "replicas"], 1)
        labels.append(np.unique(rows, axis=0, return_inverse=True)[1].ravel())
    counts = tuple(int(label.max()) + 1 for label in labels)
    return labels, (*counts, *family.radices[len(counts) :])


def structures(space: Space, ids: np.ndarray) -> np.ndarray:
    """A number per candidate that is the same where two differ in replicas alone."""
    out, numbers, base = np.zeros(len(ids), np.int64), space.family(ids), 0
    for f, family in enumerate(space.families):
        here = np.flatnonzero(numbers == f)
        labels, radices = _structures(family) if family.size else ([], (1,))
        if len(here):
            digits = family.digits(ids[here] - space.offsets[f])
            pools = [label[digit] for label, digit in zip(labels, digits, strict=False)]
            out[here] = base + np.ravel_multi_index((*pools, *digits[len(pools) :]), radices)
        base += int(np.prod(radices))
    return out


@dataclass
class Probed:
    """All candidates of a space in one scenario."""

    cost: np.ndarray
    attainment: np.ndarray
    meets: np.ndarray
    fits: np.ndarray

    def best(self, space: Space) -> dict[int, tuple[float, int]]:
        """(cost, candidate) of the cheapest of each family that meets the target."""
        family = space.family(np.arange(space.size))
        out = {}
        for f in np.unique(family[self.meets]):
            rows = np.flatnonzero(self.meets & (family == f))
            first = rows[np.lexsort((rows, -self.attainment[rows], self.cost[rows]))[0]]
            out[int(f)] = float(self.cost[first]), int(first)
        return out


def probe(space: Space, scenario: Scenario, progress: Progress | None = None) -> Probed:
    """Every candidate of the space in a scenario."""
    evaluator = Evaluator(space, *scenario)
    names = ("cost_per_hour_usd", "slo_attainment", "meets_slo", "excess_weights", "excess_kv_cache")
    parts: list[list[np.ndarray]] = []
    pending = None
    for ids in [*space.blocks(evaluator.block), None]:
        started = None if ids is None else evaluator.start(ids)
        if pending is not None:
            columns = evaluator.finish(pending)
            parts.append([columns[name] for name in names])
            if progress:
                progress(int(columns["candidate"][-1]) + 1, space.size)
        pending = started
    cost, attainment, meets, weights, kv = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Probed(cost, attainment, meets, (weights <= 0.0) & (kv <= 0.0))


def shortlist(space: Space, probes: Sequence[Probed]) -> np.ndarray:
    """Candidates that can be cheapest between the probes: those that fit memory in one of them; of a large space, only
    those of the structures that were among the cheapest to meet the target, or came closest to it, in one of them."""
    fits = np.logical_or.reduce([found.fits for found in probes])
    ids = np.flatnonzero(fits)
    if len(ids) <= EXACT:
        return ids
    structure, family = structures(space, ids), space.family(ids)
    kept: set[int] = set()
    for found in probes:
        for f in range(len(space.families)):
            rows = np.flatnonzero(family == f)
            kept |= set(_leading(structure[rows], found, ids[rows]))
    return ids[np.isin(structure, list(kept))]


def _leading(structure: np.ndarray, found: Probed, ids: np.ndarray) -> Iterator[int]:
    """The structures of the cheapest that meet the target, then of those nearest to it."""
    meets = found.meets[ids]
    order = np.lexsort((-found.attainment[ids], np.where(meets, found.cost[ids], np.inf)))
    first = np.unique(structure[order], return_index=True)[1]
    for position in np.sort(first)[:STRUCTURES]:
        yield int(structure[order[position]])


@dataclass
class Optimizer:
    """Finds the cheapest of each topology among `ids`, scenario by scenario; safe to share between threads."""

    space: Space
    ids: np.ndarray
    evaluated: int = 0
    _by_price: dict[bytes, tuple[np.ndarray, dict[int, Rows]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.deployment: Deployment = jax.tree.map(np.asarray, self.space.deployment(self.ids))
        self.family = self.space.family(self.ids)

    def add(self, candidate: int) -> None:
        """Let a candidate join, and all that differ from it in replicas alone."""
        f = int(self.space.family(np.array([candidate]))[0])
        ids = np.arange(self.space.offsets[f], self.space.offsets[f + 1])
        structure = structures(self.space, ids)
        same = ids[structure == structure[candidate - self.space.offsets[f]]]
        self.ids = np.union1d(self.ids, same)
        self._by_price.clear()
        self.__post_init__()

    def _priced(self, catalog: Catalog) -> tuple[np.ndarray, dict[int, Rows]]:
        """(least cost of each candidate, rows of each family in its order)."""
        hardware = catalog.hardware
        money = (hardware.usd_per_hour, hardware.electricity_usd_per_hour, hardware.per_instance, catalog.economy)
        key = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(money))
        known = self._by_price.get(key)
        if known is None:
            if len(self._by_price) >= PRICE_LISTS:
                self._by_price.clear()
            cost = np.asarray(_least_costs(self.deployment, catalog))
            order = np.lexsort((self.ids, cost))
            rows = {int(f): order[self.family[order] == f] for f in np.unique(self.family)}
            known = self._by_price[key] = cost, rows
        return known

    def _evaluate(self, rows: Rows, scenario: Scenario) -> "_Block":
        """Up to SMALL candidates."""
        padded = np.concatenate([rows, np.full(SMALL - len(rows), rows[-1])])
        some: Any = jax.tree.map(lambda leaf: leaf[padded], self.deployment)
        found = evaluate(some, *scenario)
        self.evaluated += len(rows)
        columns = (found.meets_slo, found.cost_per_hour_usd, found.slo_attainment, _doubt_bits(found.doubts))
        return _Block(self.ids[rows], *[np.asarray(column)[: len(rows)] for column in columns])

    def best(self, scenario: Scenario) -> dict[int, Optimum]:
        """The optimum of each family in which any candidate meets the target."""
        least, order = self._priced(scenario.catalog)
        at, found = dict.fromkeys(order, 0), dict[int, Optimum]()
        while at:
            share = SMALL // len(at)
            parts = {f: order[f][start : start + share] for f, start in at.items()}
            block = self._evaluate(np.concatenate(list(parts.values())), scenario)
            begin = 0
            for f, rows in parts.items():
                best = _best(block.part(begin, begin + len(rows)), found.get(f))
                begin += len(rows)
                at[f] += len(rows)
                if best is not None:
                    found[f] = best
                dearer = f in found and len(rows) and least[rows[-1]] > SAME * found[f].cost_per_hour_usd
                if dearer or at[f] >= len(order[f]):
                    del at[f]
        return found

    def meeting(self, scenario: Scenario) -> dict[int, list[Optimum]]:
        """Per family, cheapest first, those that meet the target of which none costs less and attains more."""
        _, order = self._priced(scenario.catalog)
        out: dict[int, list[Optimum]] = {}
        for f, rows in order.items():
            blocks = [self._evaluate(rows[i : i + SMALL], scenario) for i in range(0, len(rows), SMALL)]
            optima = [optimum for block in blocks for optimum in block.meeting()]
            out[f] = rising(optima)
        return out


def rising(optima: Iterable[Optimum]) -> list[Optimum]:
    """Cheapest first, those that attain more than all cheaper ones."""
    out: list[Optimum] = []
    for optimum in sorted(optima, key=lambda o: (o.cost_per_hour_usd, -o.slo_attainment, o.candidate)):
        if not out or optimum.slo_attainment > out[-1].slo_attainment:
            out.append(optimum)
    return out


class _Block(NamedTuple):
    """Evaluated candidates."""

    ids: np.ndarray
    meets: np.ndarray
    cost: np.ndarray
    attainment: np.ndarray
    doubts: np.ndarray

    def part(self, start: int, stop: int) -> "_Block":
        return _Block(*[column[start:stop] for column in self])

    def optimum(self, row: int) -> Optimum:
        cost, attainment = float(self.cost[row]), float(self.attainment[row])
        return Optimum(int(self.ids[row]), cost, attainment, int(self.doubts[row]))

    def meeting(self) -> list[Optimum]:
        return [self.optimum(int(row)) for row in np.flatnonzero(self.meets)]


def _best(block: _Block, known: Optimum | None) -> Optimum | None:
    """The cheapest of a block that meets the target, or what was known; of equal costs the higher attainment."""
    rows = np.flatnonzero(block.meets)
    if not len(rows):
        return known
    lowest = min(float(block.cost[rows].min()), np.inf if known is None else known.cost_per_hour_usd)
    rows = rows[block.cost[rows] <= SAME * lowest]
    entries = [block.optimum(int(row)) for row in rows]
    if known is not None and known.cost_per_hour_usd <= SAME * lowest:
        entries.append(known)
    return max(entries, key=lambda o: (o.slo_attainment, -o.candidate))


def _doubt_bits(doubts: Doubts) -> np.ndarray:
    code = np.zeros(len(np.asarray(doubts[0])), np.int64)
    for bit, value in enumerate(doubts):
        code |= np.asarray(value).astype(np.int64) << bit
    return code
