"""Benchmark points through the model: closed loop of fixed concurrency, single-call sessions of fixed lengths.

Every point is a deployment of its own with its own model, engine, workload and population, so the points are mapped
over one by one inside a single jitted function. What differs between engines but is no number of the traced model
(scheduler, token budget) stands in engines.toml as well.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from breakeven.models.catalog import table
from breakeven.models.deployment import BALANCED, Deployment, Stage
from breakeven.models.hardware import accelerators, links
from breakeven.models.llm import LLM, llms
from breakeven.models.local import Correction
from breakeven.models.performance import performance
from breakeven.models.sessions import session_spec
from breakeven.models.tables import Catalog, Economy, Engine, catalog, engine, engine_row, resolve
from breakeven.models.workload import Workload, workload
from breakeven.studies.measured import Point
from breakeven.studies.measured_layout import Layout

MOST_BATCH = 65536.0  # no batch limit of its own: published recipes raise it above the concurrency they measure
# Share of the requests that a benchmark sends at once. InferenceX sends ten per concurrent one; its client of split
# deployments five (ishandhanani/srt-slurm at 09211b64, sa-bench/bench.sh). Others: taken over.
FIRST_WAVE = {"agg": 0.1, "disagg": 0.2}
LINK = "ib-ndr-400"  # between the pools of split deployments where nothing is said
KV = ("bf16", "fp8")
WEIGHTS = tuple(table("precisions")["weights"])
SAMPLES, MAX_CONTEXT = 1000, 1e7  # sessions of one fixed call are all alike


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Inputs:
    """Points as arrays, each leaf (points, ...), and the tables that they share."""

    deployment: Deployment
    workload: Workload
    llm: LLM
    engine: Array  # row of `engines`
    engines: Engine  # each leaf (engines,)
    step_factor: Array  # step time with speculation over without, per token
    shared: Catalog
    correction: Correction  # measured on each point's own deployment; each leaf (points, 1)


class Predicted(NamedTuple):
    """Model's figures of each point, shape (points,)."""

    ttft_s: Array
    tpot_s: Array
    fill: Array  # concurrency of a decode engine over the sequences whose cache fits; under open load, its mean batch
    excess: Array  # how far its weights or one sequence miss the memory, relative; <= 0 where they fit


def stacked(trees: Sequence[Any]) -> Any:
    """Trees of numbers as one, with an axis for them in front, in 32 bit."""
    return jax.tree.map(
        lambda *leaves: jnp.asarray(np.stack([np.asarray(leaf, np.float32) for leaf in leaves])), *trees
    )


@functools.lru_cache(maxsize=512)
def _lengths(prompt: float, output: float) -> Workload:
    spec = session_spec({"first_prompt_tokens": max(prompt, 1.0), "output_tokens": max(output, 2.0)})
    return workload(spec, MAX_CONTEXT, sessions=SAMPLES)


def _workload(point: Point) -> Workload:
    """Speculation leaves fewer decode steps than tokens."""
    return dataclasses.replace(
        _lengths(point.prompt_tokens, point.output_tokens / point.accepted),
        concurrent_sessions=np.float32(point.concurrency),
        first_wave_share=np.float32(FIRST_WAVE[point.mode]),
    )


@functools.cache
def _accelerator_rows() -> dict[str, int]:
    return {name: row for row, name in enumerate(accelerators())}


def _row_number(row: int) -> Any:
    return np.array([row], np.int32)


def _stage(point: Point, layout: Layout, pool: float) -> Stage:
    row = engine_row(point.stack)
    numbers = {
        "pool": pool,
        "replicas": layout.workers,
        "tensor_parallel": layout.tensor_parallel,
        "data_parallel": layout.data_parallel,
        "expert_parallel": layout.expert_parallel,
        "pipeline_parallel": layout.pipeline_parallel,
        "max_batch": point.max_batch if point.max_batch > 0.0 else MOST_BATCH,
        "token_budget": point.token_budget if point.token_budget > 0.0 else row["token_budget"],
        "chunked": float(row["scheduler"] == "chunked" and point.mode == "agg"),
    }
    return Stage(
        **{name: np.float32([value]) for name, value in numbers.items()},  # type: ignore[arg-type]
        accelerator=_row_number(_accelerator_rows()[point.accelerator]),
        weights=_row_number(WEIGHTS.index(point.weights)),
    )


def _deployment(point: Point) -> Deployment:
    first, last = _stage(point, point.layouts[0], 0.0), _stage(point, point.layouts[-1], len(point.layouts) - 1.0)
    zero = _row_number(0)
    kv = _row_number(KV.index(point.kv))
    return Deployment(first, first, first, last, last, kv=kv, kv_tiers=zero, link=zero, routing=np.float32([BALANCED]))  # type: ignore


def _economy() -> Economy:
    return Economy(*(jnp.float32(x) for x in (0.0, 0.0, 0.0, 0.0, 1.0, 1e12, 1e12, 1.0)))


def _step_factor(point: Point) -> float:
    return table("calibration")["speculation"]["step_cost"] / point.accepted if point.accepted > 1.0 else 1.0


def inputs(points: Sequence[Point]) -> Inputs:
    """Points that are not excluded, as arrays."""
    names = list(table("engines"))
    rows = list(accelerators().values())
    models = {name: LLM.from_architecture(llms()[name]) for name in {point.model for point in points}}
    finite = {name: jax.tree.map(lambda x: min(float(x), 1e12), llm) for name, llm in models.items()}
    unit = [1.0] * len(rows)
    shared = catalog(
        rows, unit, unit, [links()[LINK]], WEIGHTS, KV, finite[points[0].model], engine(names[0]), _economy()
    )
    each = [_deployment(point) for point in points]
    deployment: Deployment = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *each)
    return Inputs(
        deployment,
        stacked([_workload(point) for point in points]),
        stacked([finite[point.model] for point in points]),
        jnp.asarray([names.index(point.stack) for point in points]),
        stacked([engine(name) for name in names]),
        jnp.asarray([_step_factor(point) for point in points], jnp.float32),
        shared,
        uncorrected(len(points)),
    )


def uncorrected(points: int) -> Correction:
    """The correction that changes nothing."""
    one = jnp.ones((points, 1))
    return Correction(one, one, jnp.zeros_like(one))


def _one(
    deployment: Deployment, load: Workload, llm: LLM, number: Array, correction: Correction, given: Inputs
) -> Predicted:
    own: Engine = jax.tree.map(lambda column: column[number], given.engines)
    own_catalog = dataclasses.replace(given.shared, llm=llm, engine=own)
    resolved = dataclasses.replace(resolve(deployment, own_catalog), correction=correction)
    found = performance(resolved, load, own_catalog)
    running = found.point.state.batch
    if load.concurrent_sessions is not None:
        running = load.concurrent_sessions / found.pools.decode_replicas
    fill = running * found.pools.reserve_tokens / jnp.maximum(found.pools.decode_memory.capacity_tokens, 1.0)
    excess = jnp.maximum(found.violations.weights, found.violations.kv_cache)
    return Predicted(found.latency.ttft_mean_s[0], found.latency.tpot_mean_s[0], fill[0], excess[0])


def predict(given: Inputs) -> Predicted:
    """TTFT and TPOT of every point, traced."""
    each = jax.vmap(_one, in_axes=(0, 0, 0, 0, 0, None))
    found = each(given.deployment, given.workload, given.llm, given.engine, given.correction, given)
    return found._replace(tpot_s=found.tpot_s * given.step_factor)


predict_jitted: Callable[[Inputs], Predicted] = jax.jit(predict)
