"""Model against simulation: `python benchmarks/agreement.py [--cases 320] [--out FOLDER]` on random deployments.

Each feasible deployment (topology, model, workload, engines, pipeline, routing, load) is simulated until the standard
error of every share is below 0.01, or two million calls are spent. The bounds are the model's own 50th, 90th, 95th and
99th percentiles of TTFT, TPOT, call time and session time, each alone; TPOT is nearly deterministic, so the model's
share is held to lie between those simulated at a bound 1 % tighter and 1 % wider. Writes every comparison and the
scatter; what was found is written in docs/simulation.md.
"""

import argparse
import functools
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from breakeven.models.attainment import Latency, call_cdf, percentile, session_cdf, tpot_cdf, ttft_cdf
from breakeven.models.performance import performance
from breakeven.models.serving import evaluate
from breakeven.models.sessions import sample_sessions
from breakeven.models.simulation import Bounds, Replications
from breakeven.models.tables import resolve
from breakeven.models.topology import TOPOLOGIES
from breakeven.optimizer.evaluator import SMALL
from breakeven.optimizer.simulator import Ready, Simulator
from breakeven.studies.result import table
from breakeven.studies.study import Study

SHARES = (0.5, 0.9, 0.95, 0.99)
MOST_CALLS, FIRST_CALLS, RUNS = 2_000_000, 30_000, 6
STANDARD_ERROR, WITHIN, HIT_WITHIN, SLACK = 0.01, 0.03, 0.02, 0.01
RATES = np.geomspace(1e-4, 3e3, SMALL)

MODELS: dict[str, tuple[dict[str, Any], ...]] = {
    "llama-3.1-8b": (
        {"accelerators": "h100-sxm", "tensor_parallel": 1},
        {"accelerators": "h200-sxm", "tensor_parallel": 2},
    ),
    "llama-3.1-70b": (
        {"accelerators": "h100-sxm", "tensor_parallel": 4},
        {"accelerators": "h200-sxm", "tensor_parallel": 4},
        {"accelerators": "b200-sxm", "tensor_parallel": 8},
    ),
    "gpt-oss-120b": (
        {"accelerators": "h100-sxm", "tensor_parallel": 2},
        {"accelerators": "b200-sxm", "tensor_parallel": 4},
        {"accelerators": "b200-sxm", "tensor_parallel": 1, "data_parallel": 4, "expert_parallel": True},
    ),
}
WITH_IMAGES = {"qwen3-vl-8b": ({"accelerators": "h100-sxm", "tensor_parallel": 1},)}  # of an encoder apart
WORKLOADS = ("coding-agent", "tool-agent", "chat", "rag-docqa")


def drawn(rng: np.random.Generator) -> dict[str, Any]:
    """A random deployment, without its load."""
    topology = str(rng.choice(list(TOPOLOGIES)))
    images = TOPOLOGIES[topology].encode_apart
    models = WITH_IMAGES if images else MODELS
    llm = str(rng.choice(list(models)))
    pools = {name: {"replicas": int(rng.integers(1, 9))} for name in TOPOLOGIES[topology].pools}
    return {
        "llm": llm,
        "workload": "gui-agent" if images else str(rng.choice(WORKLOADS)),
        "space": {
            **models[llm][rng.integers(len(models[llm]))],
            "pools": pools,
            "topologies": [topology],
            "pipeline_parallel": int(rng.choice([1, 1, 2])),
            "weights": "fp8",
            "kv": "fp8",
            "max_batch": int(rng.choice([128, 256, 512])),
            "token_budget": int(rng.choice([2048, 8192])),
            "routing": str(rng.choice(["affinity", "balanced"])),
        },
    }


def study(made: dict[str, Any], rate: float) -> Study:
    """The deployment at a rate of sessions."""
    data = {"name": "agreement", "slo": {"ttft_s": 1.0, "tpot_s": 0.05}, "load": {"sessions_per_second": rate}}
    return Study.parse({**data, **made}, "agreement")


@functools.lru_cache(maxsize=16)
def sample(workload: str, context: float) -> Any:
    """The sessions that every simulation of a workload draws from."""
    spec = study({"llm": "llama-3.1-8b", "workload": workload, "space": {"accelerators": "h100-sxm"}}, 1.0).session_spec
    return sample_sessions(spec, int(np.clip(400_000 / spec.calls_per_session.mean(), 500, 50_000)), 1, context)


def at_use(made: dict[str, Any], use: float) -> Ready | None:
    """The deployment at the load that makes its busiest part `use` busy; None where nothing comes near."""
    base = study(made, 1.0)
    every = base.workload.__class__(**{**base.workload.__dict__, "sessions_per_second": RATES.astype(np.float32)})
    found = evaluate(base.evaluator().deployment(np.array([0]), SMALL), every, base.slo, base.catalog)
    busy = np.where(np.asarray(found.feasible), np.asarray(found.utilization_max), np.nan)
    if not np.nanmax(busy, initial=-1.0) >= 0.9 * use:
        return None
    ready = study(made, float(RATES[np.nanargmin(np.abs(busy - use))]))
    context = float(ready.architecture.max_context)
    simulator = Simulator(ready.evaluator(), lambda _: sample(made["workload"], context))
    found_ready = simulator.ready(np.array([0]))[0]
    return found_ready if found_ready["feasible"] else None


def _call_cdf(latency: Latency, x_s: jax.Array) -> jax.Array:
    far = jnp.full_like(x_s, 1e9)
    return call_cdf(latency, far, far, x_s)


CDFS = {"ttft": ttft_cdf, "tpot": tpot_cdf, "call": _call_cdf, "session": session_cdf}


@jax.jit
def model(deployment: Any, workload: Any, catalog: Any) -> dict[str, tuple[jax.Array, jax.Array]]:
    """(bounds in seconds, shares within them) of each latency, one per share of `SHARES`."""
    latency = performance(resolve(deployment, catalog), workload, catalog).latency
    found = {}
    for name, cdf in CDFS.items():
        bounds = jnp.stack([percentile(cdf, latency, share) for share in SHARES])
        found[name] = bounds[:, 0], jnp.stack([cdf(latency, bound)[0] for bound in bounds])
    return found


def compare(ready: Ready, most_calls: int, sessions: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of one deployment, one per latency and bound, and what was found of it as a whole."""
    evaluator = ready.simulator.evaluator
    points = model(evaluator.deployment(np.array([0]), 1), evaluator.workload, evaluator.catalog)
    bounds = {name: tuple(np.asarray(x) for x in point) for name, point in points.items()}
    of_sessions = {"session": bounds.pop("session")}
    found, rows = measured(ready, bounds, most_calls, whole_sessions=False)
    if sessions:
        rows += measured(ready, of_sessions, most_calls, whole_sessions=True)[1]
    whole = {"calls": found.calls, "hit": ready["cache_hit"], "hit_simulated": found.cache_hit.value}
    return rows, whole | {"saturated": found.saturated(ready.calls_per_s)}


def measured(
    ready: Ready, bounds: dict[str, tuple[np.ndarray, ...]], most_calls: int, whole_sessions: bool
) -> tuple[Replications, list[dict[str, Any]]]:
    """Simulations until every share's standard error is small enough, and the rows they give."""
    runs, spent, calls = [], 0, FIRST_CALLS // RUNS
    while True:
        runs += [ready.simulate(calls, len(runs) + k, whole_sessions=whole_sessions) for k in range(RUNS)]
        found = Replications(tuple(runs))
        rows = [row for name, point in bounds.items() for row in shares(found, name, *point)]
        spent += sum(int(np.isfinite(run.calls["arrival_s"]).sum()) for run in runs[-RUNS:])
        if max(row["error"] for row in rows) < STANDARD_ERROR or 3 * spent > most_calls:
            return found, rows
        calls = 2 * calls


def shares(found: Replications, name: str, bounds: np.ndarray, modelled: np.ndarray) -> list[dict[str, Any]]:
    """The model's share within each bound beside the simulated one, and by how much it is outside of it."""

    def simulated(bound: float) -> tuple[float, float]:
        share = found.attainment(Bounds()._replace(**{f"{name}_s": float(bound)}))[name]  # pyright: ignore[reportArgumentType]
        return share.value, share.half_width / 2.0

    rows = []
    for share, bound, value in zip(SHARES, bounds, modelled, strict=True):
        seen, error = simulated(bound)
        low, high = seen, seen
        if name == "tpot":
            low, high = simulated((1.0 - SLACK) * bound)[0], simulated((1.0 + SLACK) * bound)[0]
        apart = float(value - np.clip(value, low, high))
        rows.append(
            {"metric": name, "share": share, "bound_s": float(bound), "model": float(value)}
            | {"simulated": seen, "error": error, "apart": apart}
        )
    return rows


def main() -> None:
    """Simulate the deployments, print how well they agree, draw them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=320)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", type=int, default=MOST_CALLS, help="of one deployment, at most")
    parser.add_argument("--sessions", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, default=Path("out/agreement"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rng, rows, begun = np.random.default_rng(options.seed), [], time.perf_counter()
    case = 0
    while case < options.cases:
        made, use = drawn(rng), float(rng.uniform(0.2, 0.9))
        ready = at_use(made, use)
        if ready is None:
            continue
        row = table(ready.simulator.evaluator, np.array([0])).iloc[0]
        points, whole = compare(ready, options.calls, options.sessions)
        named = {"case": case, "llm": made["llm"], "workload": made["workload"], "topology": row["topology"]}
        named |= {"deployment": row["deployment"], "depth": made["space"]["pipeline_parallel"]}
        named |= {"routing": row["routing"], "prefill_engines": row["prefill_replicas"], "rate": ready.calls_per_s}
        named |= {name: ready[f"utilization_{name}"] for name in ("max", "prefill", "decode", "link")}
        named |= {"unverified": row["unverified"]}
        rows += [named | whole | point for point in points]
        case += 1
        print(
            f"{case}/{options.cases} {time.perf_counter() - begun:.0f} s: {row['topology']} {made['workload']}",
            flush=True,
        )
        if case % 20 == 0 or case == options.cases:
            pd.DataFrame(rows).to_csv(options.out / "agreement.csv", index=False)
    frame = pd.DataFrame(rows)
    print(summary(frame))
    draw(frame, options.out / "agreement.png")


def resolved(frame: pd.DataFrame) -> pd.DataFrame:
    """The comparisons that the simulation resolves, with whether the model is trusted and which pools there are."""
    trusted = frame["unverified"].fillna("").eq("")
    pools = [len(TOPOLOGIES[name].pools) for name in frame["topology"]]
    known = frame["error"].lt(STANDARD_ERROR) & ~frame["saturated"]
    return frame.assign(trusted=trusted, pool=np.where(np.array(pools) == 1, "shared", "apart")).loc[known]


def summary(frame: pd.DataFrame) -> str:
    """How often the two are within 0.03, of the comparisons that the simulation resolves."""
    known = resolved(frame)
    trusted = frame.loc[frame["unverified"].fillna("").eq("")]
    parts = [f"{len(set(frame['case']))} deployments, {len(set(trusted['case']))} in the trusted region"]
    parts.append(f"{len(frame) - len(known)} of {len(frame)} comparisons unresolved or saturated")
    for by in (["metric"], ["metric", "pool"], ["metric", "workload"], ["metric", "share"]):
        grouped = known.assign(far=known["apart"].abs()).groupby(["trusted", *by])
        table = grouped.agg(points=("apart", "size"), mean=("apart", "mean"), mean_distance=("far", "mean"))
        parts.append(table.assign(within=grouped["far"].apply(lambda x: (x <= WITHIN).mean())).round(3).to_string())
    near = [_near(some) for some in (trusted, frame)]
    parts.append(f"hit ratio within {HIT_WITHIN}: {near[0]:.3f} of the trusted, {near[1]:.3f} of all")
    return "\n\n".join(parts)


def _near(frame: pd.DataFrame) -> float:
    cases = frame.loc[~frame["saturated"]].groupby("case").first()
    return float(np.mean(np.abs(cases["hit"] - cases["hit_simulated"]) <= HIT_WITHIN))


def draw(frame: pd.DataFrame, path: Path) -> None:
    """The model's shares against the simulated ones, one panel per latency, crosses outside the trusted region."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    import seaborn as sns

    known = resolved(frame)
    shown = known.assign(trust=np.where(known["trusted"], "trusted", "unverified"))
    with sns.axes_style("whitegrid"), sns.plotting_context("notebook"):
        figure, axes = plt.subplots(2, 2, figsize=(11.0, 10.0), layout="constrained", sharex=True, sharey=True)
        for ax, name in zip(axes.flat, CDFS, strict=True):
            part = shown.loc[shown["metric"].eq(name)]
            sns.scatterplot(
                part, x="model", y="simulated", hue="topology", style="trust", style_order=["trusted", "unverified"],
                palette="colorblind", alpha=0.7, ax=ax, legend=name == "ttft",
            )  # fmt: skip
            ax.plot([0.0, 1.0], [0.0, 1.0], color="0.3", linewidth=1.2)
            ax.set_title(name.upper() if name in ("ttft", "tpot") else f"{name} time")
            ax.set_xlabel("share in time by the model")
            ax.set_ylabel("share in time, simulated")
        figure.savefig(path, dpi=150)
        plt.close(figure)


if __name__ == "__main__":
    main()
