"""Speculative decoding: what a step yields and costs, nothing where it is off, and monotone in what is accepted."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from breakeven.models import settle
from breakeven.models.attainment import attain
from breakeven.models.bundle import decode_step
from breakeven.models.inputs import InputError
from breakeven.models.llm import llms
from breakeven.models.performance import performance
from breakeven.models.serving import evaluate
from breakeven.models.simulation import Window, machines, plan
from breakeven.models.simulation.step_times import decode_s
from breakeven.models.speculation import speculation, speculations
from breakeven.models.tables import resolve
from breakeven.optimizer.evaluator import SMALL
from breakeven.studies.deployment_file import choices, deployment_yaml, read_deployment

V3 = llms()["deepseek-v3"]


def test_tokens_of_a_step_and_their_spread():
    """Accepted up to position 1 in 80 % and up to 2 in 50 % of the steps: 1, 2 or 3 tokens with 0.2, 0.3 and 0.5."""
    way = speculation({"kind": "ngram", "tokens": 2, "acceptance": [0.8, 0.5]}, V3)
    rows = speculations([speculation("none", V3), way])
    assert rows is not None and speculations([speculation("none", V3)]) is None
    assert np.asarray(rows.yielded) == pytest.approx([1.0, 2.3]) and np.asarray(rows.verified).tolist() == [1.0, 3.0]
    assert np.asarray(rows.variance) == pytest.approx([0.0, 0.2 + 1.2 + 4.5 - 2.3**2], abs=1e-6)
    assert (way.layers_share, way.weights_share, way.parameters) == (0.0, 0.0, 0.0)


def test_what_a_draft_costs():
    """A layer and the head of DeepSeek-V3 for its own module; all of a small model's layers for a draft of it."""
    own = speculation("mtp", V3)
    active, head = V3.active_parameters, V3.head_parameters
    assert own.weights_share == pytest.approx(((active - head) / 61 + head) / active)
    assert own.layers_share == pytest.approx(1 / 61) and 8e9 < own.parameters < 13e9
    small = speculation({"draft": "llama-3.1-8b", "tokens": 2, "acceptance": [0.7, 0.5]}, llms()["llama-3.1-70b"])
    assert small.layers_share == pytest.approx(32 / 80) and small.weights_share == pytest.approx(7.5 / 69.5, rel=0.02)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ("mtpp", "speculation"),
        ({"kind": "ngram", "acceptance": [0.5, 0.6]}, "acceptance"),
        ({"kind": "ngram"}, "acceptance"),
        ({"like": "mtp", "tokens": 9}, "tokens"),
        ({"draft": "no-model", "tokens": 1, "acceptance": [0.5]}, "draft"),
    ],
)
def test_bad_input_names_its_field(spec: Any, field: str):
    with pytest.raises(InputError) as error:
        speculation(spec, V3)
    assert error.value.field.endswith(field)


def test_off_changes_nothing_and_more_accepted_never_costs(make_study, tmp_path):
    """One batch of candidates, each with every way: k = 0 as none, and tokens come faster the more are accepted."""
    ways = [
        "none",
        {"name": "zero", "kind": "ngram", "tokens": 0, "acceptance": [0.5]},
        {"name": "poor", "like": "eagle", "tokens": 3, "acceptance": [0.5, 0.2, 0.1]},
        {"name": "good", "like": "eagle", "tokens": 3, "acceptance": [0.8, 0.6, 0.5]},
        {"name": "perfect", "like": "eagle", "tokens": 3, "acceptance": [1.0, 1.0, 1.0]},
    ]
    study = make_study(
        topologies=["colocated", "pd"], speculation=ways, accelerators="h200-sxm", tensor_parallel=8, max_batch=64
    )
    ids = np.concatenate([np.arange(f, f + 5 * (SMALL // 10)) for f in study.space.offsets[:-1]])
    ids = np.pad(ids, (0, SMALL - len(ids)), mode="edge")
    outcome = evaluate(study.space.deployment(ids), study.workload, study.slo, study.catalog)
    feasible = np.asarray(outcome.feasible)[:510].reshape(-1, 5)
    here = feasible.all(axis=1) & (np.asarray(outcome.utilization_decode)[:510].reshape(-1, 5) < 0.8).all(axis=1)
    assert here.sum() > 10
    for name in ("ttft_mean_s", "tpot_mean_s", "slo_attainment", "utilization_decode", "cost_per_hour_usd"):
        found = np.asarray(getattr(outcome, name), float)[:510].reshape(-1, 5)[here]
        assert found[:, 1] == pytest.approx(found[:, 0], rel=1e-6), name
        if name == "tpot_mean_s":
            assert (np.diff(found[:, 2:], axis=1) < 0.0).all() and (found[:, 3] < found[:, 0]).all()
    row = study.space.frame(ids[3:4]).iloc[0].to_dict() | {"cost_per_hour_usd": 1.0, "slo_attainment": 1.0}
    path = tmp_path / "one.yaml"
    path.write_text(deployment_yaml(study, row), encoding="utf-8")
    read = read_deployment(str(path)).study
    assert choices(read.space.frame(np.array([0])).iloc[0].to_dict())["speculation"] == "good"


def test_simulated_steps_are_those_of_the_model(make_study):
    study = make_study("llm=deepseek-v3", topologies="pd", speculation="mtp", tensor_parallel=8, weights="fp8")
    resolved = resolve(study.space.deployment(np.array([0])), study.catalog)
    found = machines(resolved, study.workload, study.catalog)
    speed = plan(found, resolved, study.workload, study.catalog, Window(0.0, 1.0, 1.0)).decode
    for batch, context in ((1.0, 900.0), (64.0, 30_000.0)):
        expected = decode_step(found.bundles[1], study.catalog.llm, jnp.array([batch]), jnp.array([context])).total_s[0]
        assert decode_s(speed, batch, batch * context, batch * context) == pytest.approx(float(expected), rel=1e-4)


def test_derivatives_are_those_of_finite_differences(make_study):
    """Of TTFT, TPOT and attainment by what a step yields, by its drafts, by bandwidth, link and KV compression, with
    speculation and ways of the KV cache on: within 1 % (64 bit)."""
    way = {"like": "eagle", "tokens": 3, "acceptance": [0.8, 0.6, 0.5]}
    study = make_study(
        "load.sessions_per_second=0.03", topologies=["colocated", "chunked", "pd"], speculation=[way], replicas=4,
        accelerators="h200-sxm", tensor_parallel=8, pipeline_parallel=1, max_batch=64, weights="fp8", kv="fp8",
        token_budget=8192, routing="affinity", links="ib-ndr-400",
        kv_transfer=["full", {"like": "layer-wise", "compression": 2}, {"like": "conditional", "overlap": True}],
    )  # fmt: skip
    size, h = study.space.size, 1e-6

    def in_64_bit(tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf: jnp.asarray(leaf, float) if np.asarray(leaf).dtype == np.float32 else leaf, tree
        )

    with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
        patch.setattr(settle, "ITERATIONS", 60)
        deployment = study.space.deployment(np.arange(size))
        slo = dataclasses.replace(study.slo, call=None, session=None)
        resolved, workload, slo, made = in_64_bit(
            (resolve(deployment, study.catalog), study.workload, slo, study.catalog)
        )
        names = ("yielded", "drafts", "bandwidth", "link", "compression")
        ones = {name: jnp.ones(size) for name in names}

        def scaled(factors: dict[str, Any]) -> Any:
            own = resolved.speculation
            own = dataclasses.replace(own, **{name: getattr(own, name) * factors[name] for name in names[:2]})
            stage = resolved.decode_attention
            faster = stage.hardware.memory_bandwidth_bytes_per_s * factors["bandwidth"]
            hardware = dataclasses.replace(stage.hardware, memory_bandwidth_bytes_per_s=faster)
            ways = dataclasses.replace(
                resolved.transfers, compression=resolved.transfers.compression * factors["compression"]
            )
            return dataclasses.replace(
                resolved,
                speculation=own,
                transfers=ways,
                link_bytes_per_s=resolved.link_bytes_per_s * factors["link"],
                decode_attention=dataclasses.replace(stage, hardware=hardware),
            )

        def measures(factors: dict[str, Any]) -> Any:
            found = performance(scaled(factors), workload, made)
            met = attain(found.latency, slo)
            return jnp.stack([found.latency.ttft_mean_s, found.latency.tpot_mean_s, met.slo, found.utilization_link])

        @jax.jit
        def along(factors: dict[str, Any], direction: dict[str, Any]) -> Any:
            return jax.jvp(measures, (factors,), (direction,))

        still = {name: jnp.zeros(size) for name in names}
        level = jnp.maximum(jnp.abs(along(ones, still)[0]), 1e-6)
        for name in names:
            found = np.asarray((along(ones, still | {name: ones[name]})[1] / level).sum(0))
            up, down = (along(ones | {name: ones[name] + sign * h}, still)[0] / level for sign in (1.0, -1.0))
            difference = np.asarray((up - down).sum(0)) / (2.0 * h)
            assert np.isfinite(found).all(), name
            assert (np.abs(found - difference) <= 0.01 * np.abs(difference) + 1e-4).all(), name
            assert np.abs(found).max() > 1e-3, name


def test_simulated_tokens_take_what_the_model_says(make_study):
    """In a pool that also prefills, where prefixes hold: within 4 %, over as many calls as its heavy prompts need."""
    way = {"kind": "ngram", "tokens": 3, "acceptance": [0.8, 0.6, 0.5]}
    study = make_study(
        "load.sessions_per_second=0.03", topologies="colocated", accelerators="h200-sxm", tensor_parallel=8, kv="fp8",
        pipeline_parallel=1, max_batch=256, token_budget=8192, weights="fp8", replicas=4, routing="affinity",
        speculation=["none", way],
    )  # fmt: skip
    for ready in study.simulator().ready(np.arange(2)):
        seen = [ready.simulate(20_000, seed) for seed in range(8)]
        weight = [run.calls["output"][run.measured] - 1.0 for run in seen]
        tokens = np.mean([np.average(r.latencies()["tpot_s"], weights=w) for r, w in zip(seen, weight, strict=True)])
        assert tokens == pytest.approx(ready["tpot_mean_s"], rel=0.04)
