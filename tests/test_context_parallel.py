"""Context parallelism of prefill pools: nothing changes where there is none, and what the ranks share."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from breakeven.models.bundle import prefill_call
from breakeven.models.pools import machines, pools
from breakeven.models.simulation import Window, plan
from breakeven.models.simulation import machines as ready_machines
from breakeven.models.simulation.step_times import mixed_s
from breakeven.models.tables import resolve
from breakeven.studies.deployment_file import Deployed, choices, deployment_yaml, read_deployment
from breakeven.studies.launch import vllm_options
from breakeven.studies.plan import plan as launch_plan
from breakeven.studies.study import Study

SPACE = {
    "topologies": ["chunked", "pd"], "accelerators": "h100-sxm", "tensor_parallel": [1, 8], "pipeline_parallel": 1,
    "max_batch": 64, "token_budget": 8192, "weights": "int4", "kv": "fp8", "links": "ib-ndr-400",
    "routing": "affinity", "replicas": [2, 4],
}  # fmt: skip
CP = [1, 2, 4, 8]
PUBLISHED = Path(__file__).parents[1] / "studies" / "published"


@pytest.fixture(scope="module")
def study(make_study):
    return make_study(**SPACE, context_parallel=CP)


def test_a_study_without_it_is_as_before(study, make_study):
    """Pools that decode have none; candidates of one rank are those of a study that does not know of any."""
    plain = make_study(**SPACE)
    assert plain.space.deployment(np.array([0])).prefill_attention.context_parallel is None
    frame = study.space.frame(np.arange(study.space.size))
    assert (frame["decode_context_parallel"] == 1).all() and set(frame["prefill_context_parallel"]) == set(CP)
    assert set(frame.loc[frame["topology"] == "chunked", "prefill_context_parallel"]) == {1}
    same = np.flatnonzero(frame["prefill_context_parallel"] == 1)
    assert len(same) == plain.space.size
    found, usual = study.evaluator()(same), plain.evaluator()(np.arange(plain.space.size))
    for name, values in usual.items():
        if name != "candidate":
            assert found[name].astype(float) == pytest.approx(values.astype(float), rel=1e-5, abs=1e-9), name


def _of(study, tensor_parallel: int):
    """Split candidates that differ in their context-parallel ranks alone, resolved."""
    frame = study.space.frame(np.arange(study.space.size))
    own = frame["topology"].eq("pd") & frame["prefill_tensor_parallel"].eq(tensor_parallel)
    own &= frame["prefill_replicas"].eq(2) & frame["decode_replicas"].eq(2) & frame["decode_tensor_parallel"].eq(8)
    ids = frame.index[own].to_numpy()
    assert frame.loc[ids, "prefill_context_parallel"].tolist() == CP
    return ids, resolve(study.space.deployment(ids), study.catalog)


def _prefill_s(resolved, study, tokens: float, context: float) -> np.ndarray:
    prefill, _ = machines(resolved, study.catalog)
    u, q, c = (jnp.full((4, 1), x) for x in (tokens, tokens * (context - 0.5 * tokens), context))
    return np.asarray(prefill_call(prefill, study.catalog.llm, u, q, c, jnp.full(4, 8192.0)).alone.total_s)[:, 0]


def test_ranks_share_tokens_and_cache_and_cost(study):
    ids, resolved = _of(study, 8)
    long_s, short_s = _prefill_s(resolved, study, 131072.0, 131072.0), _prefill_s(resolved, study, 128.0, 131072.0)
    assert (np.diff(long_s) < 0.0).all() and (long_s * np.array(CP) >= long_s[0] * 0.999).all()
    assert long_s[1] < 0.62 * long_s[0]  # hidden behind attention, most of a long prompt is shared
    assert short_s[3] > 0.7 * short_s[0]  # weights are read by each, and the ring has nothing to hide behind
    memory = pools(resolved, study.workload, study.catalog).prefill_memory
    assert np.asarray(memory.capacity_tokens) == pytest.approx(np.asarray(memory.free_bytes * np.array(CP)) *
        float(memory.capacity_tokens[0] / memory.free_bytes[0]), rel=1e-5)  # fmt: skip
    assert np.asarray(memory.weights_bytes) == pytest.approx(float(memory.weights_bytes[0]))
    columns = study.evaluator()(ids)
    assert columns["accelerators"].tolist() == [2 * 8 * c + 16 for c in CP]


def test_a_slower_ring_is_never_faster(study):
    _, resolved = _of(study, 1)
    stage = resolved.prefill_attention
    slower = dataclasses.replace(stage.hardware, scaleup_bytes_per_s=stage.hardware.scaleup_bytes_per_s / 100.0)
    worse = dataclasses.replace(resolved, prefill_attention=dataclasses.replace(stage, hardware=slower))
    for tokens, context in ((128.0, 131072.0), (131072.0, 131072.0)):
        before, after = (_prefill_s(each, study, tokens, context) for each in (resolved, worse))
        assert after[0] == pytest.approx(before[0]) and (after >= before * (1.0 - 1e-6)).all()
    assert (after[2:] > before[2:]).all()


def test_simulated_prefill_is_that_of_the_model(study):
    ids, resolved = _of(study, 8)
    found = ready_machines(resolved, study.workload, study.catalog)
    for i, c in enumerate(CP):
        speed = plan(found, resolved, study.workload, study.catalog, Window(0.0, 1.0, 1.0), i).prefill
        assert (speed.ring > 0.0) == (c > 1)
        for tokens, context in ((128.0, 100_000.0), (4_000.0, 4_000.0)):
            pairs = tokens * (context - 0.5 * tokens)
            simulated = mixed_s(speed, 0.0, 0.0, 0.0, tokens, pairs, pairs, context, 1.0, 1.0)
            assert simulated == pytest.approx(_prefill_s(resolved, study, tokens, context)[i], rel=1e-3)
    ready = study.simulator().ready(ids[1:2])[0]
    seen = ready.simulate(4000, 1)
    assert np.mean(seen.latencies()["ttft_s"]) == pytest.approx(ready["ttft_mean_s"], rel=0.06)


def test_a_million_tokens_wait_as_evaluated():
    """Prompts of a million tokens, a quarter of the time of sixteen nodes: M/D/1, by the model and played."""
    changes = "load.sessions_per_second=0.004", "space.prefill.context_parallel=16", "space.decode.pipeline_parallel=2"
    study = Study.load(PUBLISHED / "million-tokens.yaml", changes)
    ready = study.simulator().ready(np.array([0]))[0]
    assert ready["feasible"] and ready["utilization_prefill"] == pytest.approx(0.26, abs=0.02)
    ttft_s = np.concatenate([run.latencies()["ttft_s"] for run in ready.replicate(4, 2000, 1).runs])
    assert np.mean(ttft_s) == pytest.approx(ready["ttft_mean_s"], rel=0.02)


def test_files_keep_it(study, tmp_path):
    ids, _ = _of(study, 8)
    row = study.space.frame(ids[2:3]).iloc[0].to_dict() | {"cost_per_hour_usd": 1.0, "slo_attainment": 1.0}
    path = tmp_path / "one.yaml"
    path.write_text(deployment_yaml(study, row), encoding="utf-8")
    read = read_deployment(str(path)).study
    assert choices(read.space.frame(np.array([0])).iloc[0].to_dict())["prefill"]["context_parallel"] == 4
    ready = launch_plan(Deployed(read, "one"))
    assert ready.pools[0].accelerators == 32
    assert ("--prefill-context-parallel-size", "4") in vllm_options(ready, ready.pools[0])
