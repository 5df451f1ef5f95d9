"""Model against simulation: `python benchmarks/agreement.py [--techniques] [--cases 320] [--keep FOLDER]`.

Random feasible deployments (topology, model, workload, engines, pipeline, routing, load; with `--techniques`, in each
one technique that is off by default) are simulated one after another until the standard error of every share is below
0.01, or `--calls` are spent, and what their calls took is kept in FOLDER, where a later run goes on. Then the model is
compiled once for all cases of one structure and held against them. The bounds are its own 50th, 90th, 95th and 99th
percentiles of TTFT, TPOT, call and session time, each alone; TPOT is nearly deterministic, so the model's share is held
to lie between those simulated at a bound 1 % tighter and 1 % wider. Writes every comparison and the scatter; what was
found is written in docs/simulation.md.
"""

import argparse
import dataclasses
import functools
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from breakeven.models.attainment import Latency, call_cdf, percentile, session_cdf, tpot_cdf, ttft_cdf
from breakeven.models.inputs import InputError
from breakeven.models.performance import performance
from breakeven.models.sessions import sample_sessions
from breakeven.models.simulation import Replications
from breakeven.models.simulation.replications import pooled
from breakeven.models.tables import resolve
from breakeven.models.topology import TOPOLOGIES
from breakeven.optimizer.evaluator import DOUBTS, SMALL
from breakeven.optimizer.simulator import Ready, Simulator
from breakeven.studies.study import Study

SHARES = (0.5, 0.9, 0.95, 0.99)
MOST_CALLS, FIRST_CALLS, RUNS = 2_000_000, 30_000, 6
STANDARD_ERROR, WITHIN, HIT_WITHIN, SLACK = 0.01, 0.03, 0.02, 0.01
LONGEST = 4.0  # sessions are followed to their end where that takes at most so many times a simulation's calls
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
# Each off by default, by what it needs: anything, a link that the KV cache crosses, attention and feed-forward apart.
EVERYWHERE: dict[str, dict[str, Any]] = {
    "sub-agents": {"workload": {"forks": {"probability": 0.1, "width": 3, "calls": 4}}},
    "tiers": {"space": {"kv_tiers": "host-dram+nvme"}},
    "tiers read ahead": {"space": {"kv_tiers": [{"like": "host-dram", "name": "ahead", "prefetch_s": 2}]}},
    "cache time-to-live": {"workload": {"cache_ttl_s": 60}},
    "speculation": {"space": {"speculation": "eagle"}},
    "kept KV": {"kv_kept": 0.5},
    "prefix-aware": {"space": {"routing": "prefix-aware"}},
    "random": {"space": {"routing": "random"}},
    "bursts": {"arrivals": {"cv": 2.0}},
}
OVER_A_LINK: dict[str, dict[str, Any]] = {
    "context parallelism": {"space": {"context_parallel": 4}},
    **{way: {"space": {"kv_transfer": way}} for way in ("layer-wise", "compressed", "missing-blocks", "conditional")},
}
APART: dict[str, dict[str, Any]] = {
    "projections with FFN": {"space": {"placement": {"projections": "ffn"}}},
    "head with attention": {"space": {"placement": {"lm_head": "attention"}}},
    "micro-batches": {"space": {"micro_batches": 3}},
}


def with_technique(made: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """The deployment with one technique that its topology can have."""
    of = TOPOLOGIES[made["space"]["topologies"][0]]
    choices = EVERYWHERE | (OVER_A_LINK if of.kv_moves else {}) | (APART if of.sides_apart else {})
    name = str(rng.choice(list(choices)))
    found = {**made, "technique": name}
    for key, value in choices[name].items():
        whole = {"preset": made[key]} if key == "workload" else made.get(key)
        found[key] = whole | value if isinstance(whole, dict) else value
    return found


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


class Case(NamedTuple):
    """One deployment as simulated."""

    made: dict[str, Any]
    rate: float  # sessions per second
    hit: float
    saturated: bool
    seconds: dict[str, list[np.ndarray]]  # of each latency, one array per simulation


def study(made: dict[str, Any], rate: float) -> Study:
    """The deployment at a rate of sessions."""
    data = {"name": "agreement", "slo": {"ttft_s": 1.0, "tpot_s": 0.05}, "load": {"sessions_per_second": rate}}
    return Study.parse({**data, **{key: value for key, value in made.items() if key != "technique"}}, "agreement")


@functools.lru_cache(maxsize=16)
def sample(workload: str, context: float) -> Any:
    """The sessions that every simulation of a workload, as JSON, draws from."""
    made = {"llm": "llama-3.1-8b", "workload": json.loads(workload), "space": {"accelerators": "h100-sxm"}}
    spec = study(made, 1.0).session_spec
    return sample_sessions(spec, int(np.clip(400_000 / spec.calls_per_session.mean(), 500, 50_000)), 1, context)


def at_use(made: dict[str, Any], use: float) -> Ready | None:
    """The deployment at the load that makes its busiest part `use` busy; None where nothing comes near, or where it
    cannot be."""
    try:
        base = study(made, 1.0)
    except InputError as error:
        print(f"not possible: {error}", flush=True)
        return None
    loads = dataclasses.replace(base.workload, sessions_per_second=RATES.astype(np.float32))
    evaluator = dataclasses.replace(base.evaluator(), workload=loads)  # a candidate per load
    context = float(base.architecture.max_context)
    found = Simulator(evaluator, lambda _: sample(json.dumps(made["workload"]), context)).ready(
        np.zeros(SMALL, np.int64)
    )
    busy = np.array([ready["utilization_max"] if ready["feasible"] else np.nan for ready in found])
    if not np.nanmax(busy, initial=-1.0) >= 0.9 * use:
        return None
    return found[int(np.nanargmin(np.abs(busy - use)))]


def simulated(made: dict[str, Any], use: float, most_calls: int, sessions: bool) -> Case | None:
    """Simulations of a deployment until the standard error of every share is small enough; None: it is not feasible."""
    ready = at_use(made, use)
    if ready is None:
        return None
    calls, spent, runs = FIRST_CALLS // RUNS, 0, []
    whole = sessions and ready.longest_session_s * ready.calls_per_s < LONGEST * calls
    while True:
        runs += [ready.simulate(calls, len(runs) + k, whole_sessions=whole) for k in range(RUNS)]
        spent += sum(int(np.isfinite(run.calls["arrival_s"]).sum()) for run in runs[-RUNS:])
        seconds = {name: [run.latencies()[f"{name}_s"] for run in runs] for name in ("ttft", "tpot", "call")}
        if whole:
            seconds["session"] = [run.session_times()[1] for run in runs]
        if max(_error(parts) for parts in seconds.values()) < STANDARD_ERROR or 3 * spent > most_calls:
            break
        calls = 2 * calls
    found = Replications(tuple(runs))
    rate = ready["sessions_per_second"]
    return Case(made, rate, found.cache_hit.value, found.saturated(ready.calls_per_s), seconds)


def _error(parts: list[np.ndarray]) -> float:
    """The largest standard error of a share below the percentiles."""
    points = np.quantile(np.concatenate(parts), SHARES, method="lower")
    return max(share(parts, float(point))[1] for point in points)


def share(parts: list[np.ndarray], bound_s: float) -> tuple[float, float]:
    """Share of the values of independent simulations within a bound, and its standard error."""
    found = pooled([part <= bound_s for part in parts])
    return found.value, found.half_width / 2.0


def keep(case: Case | None, made: dict[str, Any], path: Path) -> None:
    """Write a case, or that the deployment is not feasible."""
    known = {} if case is None else {"rate": case.rate, "hit": case.hit, "saturated": case.saturated}
    parts = {} if case is None else case.seconds
    seconds = {f"{name}-{k}": np.float32(part) for name, runs in parts.items() for k, part in enumerate(runs)}
    np.savez(path, allow_pickle=False, about=np.array(json.dumps({"made": made, **known})), **seconds)


def kept(path: Path) -> Case | None:
    """A case that was written; None where it was not feasible."""
    with np.load(path) as file:
        about, seconds = json.loads(str(file["about"])), {}
        if "rate" not in about:
            return None
        for key in file.files:
            name, _, run = key.partition("-")
            if run:
                seconds.setdefault(name, []).append(file[key])
    return Case(**about, seconds=seconds)


def _call_cdf(latency: Latency, x_s: jax.Array) -> jax.Array:
    far = jnp.full_like(x_s, 1e9)
    return call_cdf(latency, far, far, x_s)


CDFS = {"ttft": ttft_cdf, "tpot": tpot_cdf, "call": _call_cdf, "session": session_cdf}


@jax.jit
@jax.vmap
def model(deployment: Any, workload: Any, catalog: Any) -> tuple[dict[str, tuple[jax.Array, jax.Array]], Any, Any]:
    """Of each case: (bounds in seconds, shares within them) of each latency, one per share of `SHARES`; what is known
    of it as a whole; its doubts."""
    found = performance(resolve(deployment, catalog), workload, catalog)
    points = {}
    for name, cdf in CDFS.items():
        bounds = jax.vmap(lambda share, cdf=cdf: percentile(cdf, found.latency, share)[0])(jnp.array(SHARES))
        points[name] = bounds, jax.vmap(lambda bound, cdf=cdf: cdf(found.latency, bound)[0])(bounds)
    whole = {name: getattr(found, f"utilization_{name}")[0] for name in ("prefill", "decode", "link", "encode")}
    whole |= {"hit": 1.0 - found.point.state.miss[0], "prefill_engines": found.pools.prefill_replicas[0]}
    return points, whole, {name: value[0] for name, value in found.doubts._asdict().items()}


def scored(cases: list[Case]) -> pd.DataFrame:
    """The model beside the simulations: a row per case, latency and bound. It compiles once per structure of its
    arguments."""
    groups: dict[Any, list[tuple[int, Any]]] = {}
    for number, case in enumerate(cases):
        evaluator = study(case.made, case.rate).evaluator()
        given = evaluator.deployment(np.array([0]), 1), evaluator.workload, evaluator.catalog
        leaves, structure = jax.tree.flatten(given)
        groups.setdefault((structure, *map(np.shape, leaves)), []).append((number, given))
    rows = []
    for group in groups.values():
        numbers, given = zip(*group, strict=True)
        points, whole, doubts = model(*jax.tree.map(lambda *leaves: np.stack(leaves), *given))
        for k, number in enumerate(numbers):
            case, space = cases[number], cases[number].made["space"]
            workload = case.made["workload"]
            named = {"case": number, "llm": case.made["llm"]}
            named |= {"workload": workload["preset"] if isinstance(workload, dict) else workload}
            named |= {"technique": case.made.get("technique", "")}
            named |= {"topology": space["topologies"][0], "depth": space["pipeline_parallel"]}
            named |= {"routing": space["routing"], "rate": case.rate, "saturated": case.saturated}
            named |= {name: float(value[k]) for name, value in whole.items()} | {"hit_simulated": case.hit}
            why = "; ".join(DOUBTS[name] for name, value in doubts.items() if value[k])
            named |= {"calls": sum(map(len, case.seconds["ttft"])), "unverified": why}
            for name, parts in case.seconds.items():
                bounds, shares = (np.asarray(x[k]) for x in points[name])
                rows += [named | row for row in compared(name, parts, bounds, shares)]
    return pd.DataFrame(rows).sort_values("case", kind="stable")


def compared(name: str, parts: list[np.ndarray], bounds: np.ndarray, modelled: np.ndarray) -> list[dict[str, Any]]:
    """The model's share within each bound beside the simulated one, and by how much it is outside of it."""
    rows = []
    for of, bound, value in zip(SHARES, map(float, bounds), map(float, modelled), strict=True):
        seen, error = share(parts, bound)
        low, high = seen, seen
        if name == "tpot":
            low, high = share(parts, (1.0 - SLACK) * bound)[0], share(parts, (1.0 + SLACK) * bound)[0]
        rows.append(
            {"metric": name, "share": of, "bound_s": bound, "model": value}
            | {"simulated": seen, "error": error, "apart": value - float(np.clip(value, low, high))}
        )
    return rows


def main() -> None:
    """Simulate the deployments, print how well they agree, draw them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=320)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", type=int, default=MOST_CALLS, help="of one deployment, at most")
    parser.add_argument("--minutes", type=float, default=np.inf, help="of simulation, at most")
    parser.add_argument("--techniques", action="store_true", help="one in each deployment that is off by default")
    parser.add_argument("--sessions", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, default=Path("out/agreement"))
    parser.add_argument("--keep", type=Path, help="folder of the simulations (OUT/cases)")
    options = parser.parse_args()
    cases = _simulations(options, options.keep or options.out / "cases")
    options.out.mkdir(parents=True, exist_ok=True)
    frame = scored(cases)
    frame.to_csv(options.out / "agreement.csv", index=False)
    print(summary(frame))
    draw(frame, options.out / "agreement.png")


def _simulations(options: argparse.Namespace, folder: Path) -> list[Case]:
    """As many cases as asked for: those that are kept, then new ones."""
    folder.mkdir(parents=True, exist_ok=True)
    cases, begun, number = [], time.perf_counter(), 0
    while len(cases) < options.cases:
        path = folder / f"{options.seed}{'-with' * options.techniques}-{number:04d}.npz"
        if not path.exists():
            if time.perf_counter() - begun > 60.0 * options.minutes:
                break
            rng = np.random.default_rng([options.seed, number])
            made, use = drawn(rng), float(rng.uniform(0.2, 0.9))
            made = with_technique(made, rng) if options.techniques else made
            keep(simulated(made, use, options.calls, options.sessions), made, path)
        number += 1
        case = kept(path)
        if case is None:
            continue
        cases.append(case)
        of = case.made["space"]["topologies"][0], case.made["workload"], case.made.get("technique", "")
        print(f"{len(cases)}/{options.cases} {time.perf_counter() - begun:.0f} s:", *of, flush=True)
    return cases


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
    techniques = [["metric", "technique"]] if any(known["technique"]) else []
    for by in (["metric"], ["metric", "pool"], ["metric", "workload"], ["metric", "share"], *techniques):
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
