"""Published runs played again: every request through the simulation, with the protocol it was measured by."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from breakeven.models.deployment import Deployment
from breakeven.models.llm import LLM
from breakeven.models.sessions import Sessions
from breakeven.models.simulation import Machines, Window, machines, plan, replay, simulate
from breakeven.models.tables import Catalog, Engine, Resolved, engine, resolve
from breakeven.models.workload import Workload
from breakeven.studies.benchmark import Inputs, inputs, stacked
from breakeven.studies.runs import METRICS, Run, figures

BLOCK = 64  # runs at once, so that files of any length compile alike


class Ready(NamedTuple):
    """Runs' deployments, each leaf (runs, 1)."""

    resolved: Resolved
    machines: Machines


def _one(deployment: Deployment, load: Workload, llm: LLM, own: Engine, shared: Catalog) -> Ready:
    catalog = dataclasses.replace(shared, llm=llm, engine=own)
    resolved = resolve(deployment, catalog)
    return Ready(resolved, machines(resolved, load, catalog))


_ready: Callable[..., Ready] = jax.jit(jax.vmap(_one, in_axes=(0, 0, 0, 0, None)))


def replayed(runs: Sequence[Run]) -> list[dict[str, float]]:
    """What each run's table would say of it by simulation; nan where it does not fit or never ends."""
    able = [i for i, run in enumerate(runs) if not run.point.excluded]
    out = [_nothing() for _ in runs]
    for begin in range(0, len(able), BLOCK):
        some = able[begin : begin + BLOCK]
        for i, found in zip(some, _block([runs[i] for i in some]), strict=True):
            out[i] = found
    return out


def _nothing() -> dict[str, float]:
    return {name: math.nan for name in METRICS}


def _block(runs: Sequence[Run]) -> list[dict[str, float]]:
    padded = [*runs, *[runs[-1]] * (BLOCK - len(runs))]
    given = inputs([dataclasses.replace(run.point, concurrency=float(len(run.starts_s))) for run in padded])
    own: Engine = stacked([engine(run.point.stack, run.overrides) for run in padded])
    found = jax.tree.map(np.asarray, _ready(given.deployment, given.workload, given.llm, own, given.shared))
    return [_played(run, i, given, own, found) for i, run in enumerate(runs)]


def _played(run: Run, i: int, given: Inputs, own: Engine, found: Ready) -> dict[str, float]:
    def pick(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: np.asarray(leaf)[i], tree)

    resolved, machine, load = pick(found.resolved), pick(found.machines), pick(given.workload)
    room = run.kv_tokens if run.kv_tokens > 0.0 else float(machine.prefill_capacity.reshape(-1)[0])
    if not room > float((run.prompt_tokens + run.output_tokens).max()):
        return _nothing()
    catalog = dataclasses.replace(given.shared, llm=pick(given.llm), engine=pick(own))
    window = Window(0.0, np.inf, np.inf, True)
    ready = plan(machine, resolved, load, catalog, window)._replace(prefill_capacity=room)
    seen = simulate(ready, replay(_calls(run), run.starts_s, ready.prefill_engines, False, seed=0))
    times = dataclasses.replace(seen, every=True).latencies()
    written = seen.calls["output"] > 1.0
    pace = float(run.output_tokens.sum() / seen.end_s)
    tpot = 1e3 * times["tpot_s"][written[seen.measured]]
    return figures(1e3 * times["ttft_s"], tpot, times["call_s"], pace, run.medians)


def _calls(run: Run) -> Sessions:
    """Its requests as sessions of one call each."""
    n = len(run.starts_s)
    zero, no = np.zeros(n), np.zeros(n, bool)
    return Sessions(
        session=np.arange(n),
        index=np.zeros(n, np.int64),
        prompt_tokens=run.prompt_tokens,
        shared_tokens=zero,
        observation_tokens=zero,
        previous_output_kept_tokens=zero,
        stripped=no,
        broken=no,
        compacted=no,
        break_tokens=zero,
        output_tokens=run.output_tokens,
        thinking_tokens=zero,
        gap_after_s=np.full(n, np.nan),
    )
