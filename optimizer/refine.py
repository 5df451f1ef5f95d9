"""Gradient refinement of a front: replicas, batch limits and token budgets as real numbers, then back to the space.

Each start (a member of the front, and copies with its numbers shaken) descends the smooth maximum of its objectives'
distance beyond the member, so that it moves towards whatever is better in all of them at once; the ratios between pools
move with their replicas. Where it ends is rounded up and down to values that the space has. The front keeps what is
better, so refinement never costs a member.
"""

import dataclasses
from collections.abc import Callable, Sequence
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from breakeven.models.attainment import Slo
from breakeven.models.deployment import Deployment
from breakeven.models.serving import Outcome, evaluate
from breakeven.models.tables import Catalog
from breakeven.models.topology import STAGES
from breakeven.models.workload import Workload
from breakeven.optimizer.evaluator import SMALL
from breakeven.optimizer.exhaustive import Task
from breakeven.optimizer.front import MAXIMISED
from breakeven.optimizer.search import Found
from breakeven.spaces.structures import NUMBERS, PoolShape, Structures

STEPS, RATE = 40, 0.08  # of Adam, in logarithms
SHARP = 30.0  # of the smooth maximum over objectives
SHAKE = 0.35  # standard deviation of the logarithm of a shaken number
BROKEN = 10.0  # what a relative excess over a limit weighs beside the objectives
COMBINED = 256  # roundings of one candidate at most

Numbers = dict[str, Array]  # field -> (n, pools): logarithms


def refinable(task: Task) -> bool:
    """Whether every objective is a smooth column of the model at a given load."""
    return not task.evaluator.max_load and set(task.objectives) <= set(Outcome._fields)


def refine(task: Task, structures: Structures, found: Found, seed: int = 0) -> int:
    """Merge what refinement finds into `found`; returns how many new members the front has."""
    members, costs = found.archive.ids, found.archive.costs
    if not len(members) or not refinable(task):
        return 0
    rng = np.random.default_rng(seed)
    chosen = np.linspace(0, len(members) - 1, min(len(members), SMALL // 2)).astype(int)
    starts = np.resize(chosen, SMALL)
    pools = max(map(len, structures.pools))
    values, low, high = ({name: v[:, :pools] for name, v in of.items()} for of in _numbers(structures, members[starts]))
    shaken = np.arange(SMALL) >= len(chosen)
    width = costs.max(0) - costs.min(0)
    evaluator = task.evaluator
    begin = {
        name: np.clip(v + SHAKE * rng.standard_normal(v.shape) * shaken[:, None], low[name], high[name])
        for name, v in values.items()
    }
    ends = _descend(
        {name: jnp.asarray(v, jnp.float32) for name, v in begin.items()},
        {name: (jnp.asarray(low[name], jnp.float32), jnp.asarray(high[name], jnp.float32)) for name in values},
        evaluator.deployment(members[starts], SMALL),
        jnp.asarray(costs[starts], jnp.float32),
        jnp.asarray(np.maximum(width, 1e-9), jnp.float32),
        evaluator.workload,
        evaluator.slo,
        evaluator.catalog,
        task.objectives,
    )
    near = _rounded(structures, members[starts], {name: np.exp(np.asarray(v)) for name, v in ends.items()})
    found.merge(task.judge(np.setdiff1d(near, members)))
    return int((~np.isin(found.archive.ids, members)).sum())


def _with_numbers(deployment: Deployment, numbers: Numbers) -> Deployment:
    """The deployment with each stage's numbers those of its pool."""
    stages = {}
    for name in STAGES:
        stage = getattr(deployment, name)
        own = {field: jnp.exp(jnp.take_along_axis(v, stage.pool[:, None], 1)[:, 0]) for field, v in numbers.items()}
        stages[name] = dataclasses.replace(stage, **own)
    return dataclasses.replace(deployment, **stages)


def _slopes(of: Callable[[Numbers], Array], numbers: Numbers) -> Numbers:
    """Derivatives of each candidate's value by its own numbers, forward and one number after another: the way back
    compiles for many minutes, and all at once need gigabytes."""
    count, pools = len(numbers), next(iter(numbers.values())).shape[1]

    def along(direction: Array) -> Array:
        moved = {
            name: jnp.broadcast_to(row, x.shape) for row, (name, x) in zip(direction, numbers.items(), strict=True)
        }
        return jax.jvp(of, (numbers,), (moved,))[1]

    found = lax.map(along, jnp.eye(count * pools, dtype=jnp.float32).reshape(-1, count, pools))
    return {name: found[k * pools : (k + 1) * pools].T for k, name in enumerate(numbers)}


def _descend_body(
    begin: Numbers,
    bounds: dict[str, tuple[Array, Array]],
    deployment: Deployment,
    member: Array,
    width: Array,
    workload: Workload,
    slo: Slo,
    catalog: Catalog,
    objectives: tuple[str, ...],
) -> Numbers:
    def loss(numbers: Numbers) -> Array:
        outcome = evaluate(_with_numbers(deployment, numbers), workload, slo, catalog)
        signs = [-1.0 if name in MAXIMISED else 1.0 for name in objectives]
        values = [sign * getattr(outcome, name) for sign, name in zip(signs, objectives, strict=True)]
        beyond = (jnp.stack(values, 1) - member) / width
        broken = sum(jnp.maximum(jnp.nan_to_num(excess, posinf=10.0), 0.0) for excess in outcome.violations)
        return jax.nn.logsumexp(SHARP * beyond, axis=1) / SHARP + BROKEN * jnp.minimum(broken, 10.0)

    def step(i: Array, carry: tuple[Numbers, Numbers, Numbers]) -> tuple[Numbers, Numbers, Numbers]:
        numbers, first, second = carry
        slope = jax.tree.map(jnp.nan_to_num, _slopes(loss, numbers))
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, slope)
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, second, slope)
        n = i + 1.0

        def move(x: Array, m: Array, v: Array) -> Array:
            return x - RATE * (m / (1.0 - 0.9**n)) / (jnp.sqrt(v / (1.0 - 0.99**n)) + 1e-6)

        moved = jax.tree.map(move, numbers, first, second)
        return {name: jnp.clip(x, *bounds[name]) for name, x in moved.items()}, first, second

    none = jax.tree.map(jnp.zeros_like, begin)
    return lax.fori_loop(0, STEPS, step, (begin, none, none))[0]


_descend = jax.jit(_descend_body, static_argnums=8)


def _each(structures: Structures, ids: np.ndarray) -> list[tuple[int, np.ndarray, list[np.ndarray]]]:
    """(family, positions of its candidates, their digits)."""
    space = structures.space
    families = space.family(ids)
    found = []
    for f in np.unique(families):
        here = np.flatnonzero(families == f)
        found.append((int(f), here, list(space.families[f].digits(ids[here] - space.offsets[f]))))
    return found


def _numbers(
    structures: Structures, ids: np.ndarray
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Logarithms of each pool's numbers, and of the least and the most that the space allows, (n, 5) by field."""
    value, low, high = ({name: np.zeros((len(ids), len(STAGES))) for name in NUMBERS} for _ in range(3))
    for f, here, digits in _each(structures, ids):
        for k, (pool, rows) in enumerate(zip(structures.pools[f], digits, strict=False)):
            for name in NUMBERS:
                axis = np.log(pool.axes[name])
                value[name][here, k] = np.log(pool.table[name][rows])
                low[name][here, k], high[name][here, k] = axis[0], axis[-1]
    return value, low, high


def _rounded(structures: Structures, ids: np.ndarray, ends: dict[str, np.ndarray]) -> np.ndarray:
    """Candidates of the same structures whose numbers are those of `ends`, each rounded down and up."""
    found = [np.empty(0, np.int64)]
    for f, here, digits in _each(structures, ids):
        pools, family = structures.pools[f], structures.space.families[f]
        rows = [
            _near_rows(pool, digit, {name: ends[name][here, k] for name in NUMBERS})
            for k, (pool, digit) in enumerate(zip(pools, digits, strict=False))
        ]
        joined = digits[len(pools) :]
        for chosen in list(product(*rows))[:COMBINED]:
            valid = np.all([row >= 0 for row in chosen], axis=0)
            number = np.ravel_multi_index(tuple(d[valid] for d in (*chosen, *joined)), family.radices)
            found.append(structures.space.offsets[f] + number)
    return np.unique(np.concatenate(found))


def _near_rows(pool: PoolShape, rows: np.ndarray, numbers: dict[str, np.ndarray]) -> Sequence[np.ndarray]:
    """Rows of the pool's table with each number at the level below or above, structures as they are."""
    sides = []
    for name, values in numbers.items():
        axis = pool.axes[name]
        above = np.clip(np.searchsorted(axis, values), 0, len(axis) - 1)
        below = np.clip(above - 1, 0, len(axis) - 1)
        sides.append((below, above) if len(axis) > 1 else (above,))
    return [pool.with_levels(rows, dict(zip(numbers, levels, strict=True))) for levels in product(*sides)]
