"""Model against simulation: `python benchmarks/agreement.py [PICTURE.png]` simulates a grid of deployments, draws it.

For every topology, workload, pipeline depth, routing and load the joint attainment of bounds on TTFT and TPOT is
compared at four pairs of bounds: the model's own 50th, 75th, 90th and 95th percentiles, the TPOT bound 2 % wider, for
TPOT is nearly deterministic. What was found is written in docs/simulation.md.
"""

import itertools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from breakeven.models.attainment import percentile, tpot_cdf, ttft_cdf
from breakeven.models.performance import performance
from breakeven.models.simulation import Bounds, Replications
from breakeven.models.tables import resolve
from breakeven.optimizer.evaluator import DOUBTS
from breakeven.optimizer.simulator import Ready
from breakeven.studies.study import Study

SHARES = (0.5, 0.75, 0.9, 0.95)
USES = (0.2, 0.35, 0.5, 0.7)
CALLS, RUNS = 20_000, 6
SLACK = 1.02
POOLS: tuple[dict[str, Any], ...] = (
    {"llm": "llama-3.1-70b", "workload": "coding-agent", "accelerators": "b200-sxm", "tensor_parallel": 8},
    {"llm": "llama-3.1-8b", "workload": "tool-agent", "accelerators": "h100-sxm", "tensor_parallel": 1},
    {"llm": "llama-3.1-70b", "workload": "chat", "accelerators": "h100-sxm", "tensor_parallel": 4},
    {"llm": "llama-3.1-70b", "workload": "rag-docqa", "accelerators": "h200-sxm", "tensor_parallel": 4},
)


def study(pool: dict[str, Any], topology: str, replicas: int, depth: int, routing: str, rate: float) -> Study:
    """One deployment at a rate of sessions."""
    space = {k: v for k, v in pool.items() if k not in ("llm", "workload")} | {
        "topologies": [topology],
        "replicas": replicas,
        "pipeline_parallel": depth,
        "weights": "fp8",
        "kv": "fp8",
        "max_batch": 256,
        "token_budget": 8192,
        "routing": routing,
    }
    data: dict[str, Any] = {"name": "agreement", "space": space, "slo": {"ttft_s": 1.0, "tpot_s": 0.05}}
    data |= {k: pool[k] for k in ("llm", "workload")} | {"load": {"sessions_per_second": rate}}
    return Study.parse(data, "agreement")


def at_use(use: float, pool: dict[str, Any], topology: str, replicas: int, depth: int, routing: str) -> Ready:
    """The deployment at the load that makes its busiest part `use` busy."""

    def at(rate: float) -> Ready:
        return study(pool, topology, replicas, depth, routing, rate).simulator().ready(np.array([0]))[0]

    rate, ready = 0.02, at(0.02)
    for _ in range(7):
        rate *= float(np.clip(use / max(ready["utilization_max"], 1e-6), 0.2, 5.0)) ** 0.9
        ready = at(rate)
    return ready


@jax.jit
def model(deployment: Any, workload: Any, catalog: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(TTFT bounds, TPOT bounds, joint attainment), one per share."""
    latency = performance(resolve(deployment, catalog), workload, catalog).latency
    ttft = jnp.stack([percentile(ttft_cdf, latency, share)[0] for share in SHARES])
    tpot = SLACK * jnp.stack([percentile(tpot_cdf, latency, share)[0] for share in SHARES])
    joint = jnp.stack([(ttft_cdf(latency, a) * tpot_cdf(latency, b))[0] for a, b in zip(ttft, tpot, strict=True)])
    return ttft, tpot, joint


def compare(ready: Ready) -> list[dict[str, Any]]:
    """Rows of one deployment: the joint attainment by the model and by simulation at each pair of bounds."""
    evaluator = ready.simulator.evaluator
    bounds = model(evaluator.deployment(np.array([0]), 1), evaluator.workload, evaluator.catalog)
    found: Replications = ready.replicate(RUNS, CALLS, 0)
    rows = []
    for share, ttft, tpot, joint in zip(SHARES, *(np.asarray(x) for x in bounds), strict=True):
        simulated = found.attainment(Bounds(float(ttft), float(tpot)))["slo"]
        rows.append(
            {"share": share, "model": float(joint), "simulated": simulated.value, "error": simulated.half_width}
        )
    use = {"use": ready["utilization_max"], "hit": ready["cache_hit"], "hit_simulated": found.cache_hit.value}
    doubted = any(ready[f"doubt_{name}"] for name in DOUBTS)
    return [row | use | {"unverified": doubted} for row in rows]


def main() -> None:
    """Simulate the grid, print how well it agrees, draw it."""
    rows: list[dict[str, Any]] = []
    for pool, topology, replicas, depth, use in itertools.product(
        POOLS, ("colocated", "chunked", "pd"), (2, 6), (1, 2), USES
    ):
        routing = "balanced" if depth == 1 and replicas == 6 and pool["workload"] != "coding-agent" else "affinity"
        ready = at_use(use, pool, topology, replicas, depth, routing)
        if ready["feasible"]:
            named = {"workload": pool["workload"], "topology": topology, "replicas": replicas, "depth": depth}
            rows += [named | {"routing": routing} | row for row in compare(ready)]
            print(rows[-1], flush=True)
    frame = pd.DataFrame(rows)
    frame["apart"] = (frame["model"] - frame["simulated"]).abs()
    print(summary(frame))
    draw(frame, Path(sys.argv[1] if len(sys.argv) > 1 else "agreement.png"))


def summary(frame: pd.DataFrame) -> str:
    """Mean difference and shares within three distances, by trust and topology, and by the bounds' percentile."""
    return "\n\n".join(_distances(frame, by) for by in (["unverified", "topology"], ["unverified", "share"]))


def _distances(frame: pd.DataFrame, by: list[str]) -> str:
    table = frame.groupby(by)["apart"].agg(
        points="size",
        mean="mean",
        within_003=lambda x: (x <= 0.03).mean(),
        within_005=lambda x: (x <= 0.05).mean(),
        within_010=lambda x: (x <= 0.10).mean(),
    )
    return table.round(3).to_string()


def draw(frame: pd.DataFrame, path: Path) -> None:
    """The model's attainment against the simulated one, a colour per topology, crosses where it is unverified."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    import seaborn as sns

    with sns.axes_style("whitegrid"), sns.plotting_context("notebook"):
        figure, axes = plt.subplots(figsize=(7.5, 7.0), layout="constrained")
        shown = frame.assign(trust=np.where(frame["unverified"], "unverified", "trusted"))
        sns.scatterplot(
            shown, x="model", y="simulated", hue="topology", style="trust", palette="colorblind", alpha=0.7, ax=axes
        )
        axes.plot([0.0, 1.0], [0.0, 1.0], color="0.3", linewidth=1.2)
        axes.set_xlabel("attainment by the model")
        axes.set_ylabel("attainment simulated")
        figure.savefig(path, dpi=150)
        plt.close(figure)


if __name__ == "__main__":
    main()
