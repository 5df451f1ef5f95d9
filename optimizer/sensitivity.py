"""Sensitivity: elasticities by automatic differentiation, Sobol indices, and what flips a decision."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from breakeven.models.attainment import attain
from breakeven.models.deployment import Deployment
from breakeven.models.performance import performance
from breakeven.models.serving import evaluate
from breakeven.models.tables import resolve
from breakeven.models.variation import Input, resized, varied
from breakeven.optimizer.evaluator import SMALL
from breakeven.optimizer.optima import Scenario

Floats = NDArray[np.float64]
LEAST_GAIN = 1e-3  # attainment per relative size, below which no resizing can make up for anything


class Measures(NamedTuple):
    """What is differentiated, shapes (n,)."""

    attainment: Array
    log_cost: Array
    log_ttft: Array
    log_tpot: Array


def measures(deployment: Deployment, scenario: Scenario, inputs: Sequence[Input], z: Array) -> Measures:
    """Attainment, logarithms of cost and mean latencies, at input i times exp(z[i]); the last z resizes all pools."""
    factors = jnp.exp(z)
    workload, slo, catalog = varied(*scenario, inputs, [factors[i] for i in range(len(inputs))])
    found = performance(resolve(resized(deployment, factors[-1]), catalog), workload, catalog)
    met = attain(found.latency, slo)
    logs = (found.fleet.cost_per_hour_usd, found.latency.ttft_mean_s, found.latency.tpot_mean_s)
    return Measures(met.slo, *[jnp.log(each) for each in logs])


@functools.partial(jax.jit, static_argnames="inputs")
def slope(deployment: Deployment, scenario: Scenario, inputs: tuple[Input, ...], direction: Array) -> Measures:
    """Derivatives of every measure along `direction` in the logarithms of the inputs and the size, shapes (n,).

    Forward mode: a deployment does not see the others, so one pass serves all of them; compiled once for all inputs.
    """
    model = functools.partial(measures, deployment, scenario, inputs)
    return jax.jvp(model, (jnp.zeros_like(direction),), (direction,))[1]


def jacobian(deployment: Deployment, scenario: Scenario, inputs: Sequence[Input]) -> Measures:
    """Derivatives of every measure by the logarithm of every input and, last, of all pools' sizes: (n, inputs + 1)."""
    unit = np.eye(len(inputs) + 1, dtype=np.asarray(deployment.balanced).dtype)
    columns = [slope(deployment, scenario, tuple(inputs), jnp.asarray(row)) for row in unit]
    stacked: Any = [np.stack([np.asarray(c[i]) for c in columns], -1) for i in range(len(Measures._fields))]
    return Measures(*stacked)


@dataclass(frozen=True)
class Elasticities:
    """Of one deployment, by input: shapes (inputs,)."""

    attainment: Floats  # points of attainment per 1 %
    cost: Floats  # d ln(cost): the deployment as it is
    cost_held: Floats  # d ln(cost) with all pools resized so that attainment stays; nan where size does not help
    ttft: Floats  # d ln(mean)
    tpot: Floats


def elasticities(deployment: Deployment, scenario: Scenario, inputs: Sequence[Input]) -> list[Elasticities]:
    """Elasticities of each deployment of a batch."""
    found = [np.asarray(each, float) for each in jacobian(deployment, scenario, inputs)]
    out = []
    for attainment, cost, ttft, tpot in zip(*found, strict=True):
        gain = attainment[-1]
        resize = -attainment[:-1] / gain if abs(gain) > LEAST_GAIN else np.full(len(inputs), np.nan)
        held = cost[:-1] + resize * cost[-1]
        out.append(Elasticities(attainment[:-1], cost[:-1], held, ttft[:-1], tpot[:-1]))
    return out


@dataclass(frozen=True)
class Sobol:
    """First-order and total indices with their 95 % half widths, shapes (inputs,)."""

    first: Floats
    first_half_width: Floats
    total: Floats
    total_half_width: Floats


Model = Callable[[Floats], Floats]  # (samples, inputs) -> (samples,) or (samples, outputs)


def sobol(model: Model, low: Floats, high: Floats, samples: int, seed: int) -> list[Sobol]:
    """Sobol indices of each output of a model over independent uniform inputs (Saltelli sampling, SALib).

    Takes samples x (inputs + 2) evaluations. Of an output that does not vary, every index is nan.
    """
    from SALib.analyze import sobol as analysis
    from SALib.sample import sobol as sampling

    problem = {
        "num_vars": len(low),
        "names": [str(i) for i in range(len(low))],
        "bounds": np.stack([low, high], 1).tolist(),
    }
    points = sampling.sample(problem, samples, calc_second_order=False, seed=seed)
    outputs = np.asarray(model(points), float).reshape(len(points), -1)
    found = []
    for column in outputs.T:
        if np.ptp(column) == 0.0:
            found.append(Sobol(*[np.full(len(low), np.nan)] * 4))
            continue
        each = analysis.analyze(problem, column, calc_second_order=False, seed=seed)
        found.append(Sobol(*[np.asarray(each[name], float) for name in ("S1", "S1_conf", "ST", "ST_conf")]))
    return found


class Judged(NamedTuple):
    """A scenario's verdict: the chosen deployment there, and the best of each side."""

    attainment: float
    cost_per_good_call_usd: float
    split_usd_per_hour: float  # infinite where none meets the target
    other_usd_per_hour: float

    @property
    def ratio(self) -> float:
        """Cost of the best split over the best other; nan where neither meets the target."""
        both = np.array([self.split_usd_per_hour, self.other_usd_per_hour])
        return float("nan") if np.isinf(both).all() else float(both[0] / both[1])


@dataclass(frozen=True)
class Judge:
    """Evaluates a few candidates (the first is the chosen one) in changed scenarios, a block each."""

    deployment: Deployment  # SMALL candidates
    split: NDArray[np.bool_]
    scenario: Scenario
    inputs: tuple[Input, ...]

    @classmethod
    def of(
        cls, deployment: Deployment, split: NDArray[np.bool_], scenario: Scenario, inputs: Sequence[Input]
    ) -> "Judge":
        """A judge over up to SMALL candidates, which are padded with the last one."""
        count = len(split)
        if count > SMALL:
            raise ValueError(f"at most {SMALL} candidates, not {count}")
        rows = np.minimum(np.arange(SMALL), count - 1)
        padded: Any = jax.tree.map(lambda leaf: np.asarray(leaf)[rows], deployment)
        numbers: Any = jax.tree.map(np.asarray, scenario)
        return cls(padded, split[rows], Scenario(*numbers), tuple(inputs))

    def at(self, factors: Sequence[float]) -> Judged:
        """The verdict with every input times its factor."""
        changed = varied(*self.scenario, self.inputs, [np.float32(f) for f in factors])
        found = evaluate(self.deployment, *changed)
        meets, cost = np.asarray(found.meets_slo), np.asarray(found.cost_per_hour_usd, float)
        paid = np.where(meets, cost, np.inf)
        good = float(found.goodput_per_s[0])
        each = cost[0] / 3600.0 / good if good > 0.0 else np.inf
        sides = [float(paid[where].min(initial=np.inf)) for where in (self.split, ~self.split)]
        return Judged(float(found.slo_attainment[0]), each, *sides)
