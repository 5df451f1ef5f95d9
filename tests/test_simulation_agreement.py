"""The simulation beside the model it shares its step times with: the same seconds, the same shares in time."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from breakeven.models.attainment import percentile, tpot_cdf, ttft_cdf
from breakeven.models.bundle import Bundle, decode_step, prefill_call
from breakeven.models.performance import performance
from breakeven.models.simulation import Bounds, Load, Window, machines, plan, traffic
from breakeven.models.simulation.step_times import apart_decode_s, apart_prefill_s, decode_s, mixed_s
from breakeven.models.tables import resolve
from breakeven.optimizer.verify import Verification
from breakeven.studies.study import Study


def study(rate: float = 0.05, slo: dict[str, Any] | None = None, **space: Any) -> Study:
    choices: dict[str, Any] = {
        "accelerators": "b200-sxm",
        "tensor_parallel": 8,
        "replicas": 4,
        "max_batch": 256,
        "token_budget": 8192,
        "weights": "fp8",
        "kv": "fp8",
    }
    own = {key: space.pop(key) for key in ("llm", "workload", "engine") if key in space}
    data = {"name": "t", "llm": "llama-3.1-70b", "workload": "coding-agent", **own}
    data |= {"load": {"sessions_per_second": rate}, "slo": slo or {"ttft_s": 2.0, "tpot_s": 0.02, "target": 0.9}}
    return Study.parse({**data, "space": choices | space}, "test")


@pytest.mark.parametrize(
    ("llm", "depth", "ranks", "parts"),
    [
        ("llama-3.1-70b", 1, 1, 1),
        ("deepseek-v3", 2, 1, 1),
        ("gpt-oss-120b", 2, 1, 1),
        ("deepseek-v3", 1, 8, 1),
        ("deepseek-v3", 1, 8, 2),
    ],
)
def test_step_times_are_those_of_the_model(llm: str, depth: int, ranks: int, parts: int) -> None:
    """A decode step and a prefill that fits one chunk take the seconds that the model's own functions give."""
    space: dict[str, Any] = {"data_parallel": ranks, "expert_parallel": True} if ranks > 1 else {}
    if parts > 1:
        space["engine"] = {"like": "sglang", "overlapped_batches": parts}
    overlapped = jnp.full(1, float(parts)) if parts > 1 else None
    tensor = 1 if ranks > 1 else 8
    made = study(llm=llm, topologies="colocated", pipeline_parallel=depth, tensor_parallel=tensor, **space)
    resolved = resolve(made.space.deployment(np.array([0])), made.catalog)
    found = machines(resolved, made.workload, made.catalog)
    speed = plan(found, resolved, made.workload, made.catalog, Window(0.0, 1.0, 1.0)).decode
    for batch, context in ((1.0, 900.0), (16.0, 30_000.0), (200.0, 4_000.0)):
        n = batch / depth
        simulated = decode_s(speed, n, n * context, n * min(context, speed.sparse_topk))
        one, p, d, b, c = (jnp.array([float(x)]) for x in (1.0, depth, ranks, batch, context))
        attention, ffn = found.decode
        expected = decode_step(Bundle(attention, ffn, one, p, d, None, overlapped), made.catalog.llm, b, c).total_s[0]
        assert simulated == pytest.approx(float(expected), rel=1e-4)
    for tokens, context in ((50.0, 5_000.0), (4_000.0, 4_000.0)):
        pairs = tokens * (context - 0.5 * tokens)
        selected = min(pairs, tokens * speed.sparse_topk)
        simulated = mixed_s(speed, 0.0, 0.0, 0.0, tokens, pairs, selected, context, 1, 1.0)
        u, q, c = (jnp.array([[x]]) for x in (tokens, pairs, context))
        attention, ffn = found.prefill
        whole = Bundle(attention, ffn, jnp.ones(1), jnp.ones(1), jnp.ones(1), None, overlapped)
        expected = prefill_call(whole, made.catalog.llm, u, q, c, jnp.array([8192.0])).alone.total_s[0, 0]
        assert simulated == pytest.approx(float(expected), rel=1e-4)
        # as many such prompts as there are data-parallel ranks, one on each
        share, n = 1.0 / ranks, float(ranks)
        simulated = mixed_s(speed, 0.0, 0.0, 0.0, n * tokens, n * pairs, n * selected, n * context, ranks, share)
        every = Bundle(attention, ffn, jnp.ones(1), jnp.ones(1), jnp.full(1, n), None, overlapped)
        expected = prefill_call(every, made.catalog.llm, u, q, c, jnp.array([8192.0])).busy_s[0, 0]
        assert simulated == pytest.approx(float(expected), rel=1e-4)
        whole_s = mixed_s(
            speed._replace(parts=1.0), 0.0, 0.0, 0.0, n * tokens, n * pairs, n * selected, n * context, ranks, share
        )
        assert simulated < whole_s if parts > 1 and tokens > 1_000.0 else simulated == whole_s


def test_step_times_of_sides_apart_are_those_of_the_model() -> None:
    """A decode step and a prefill of a chunk on four attention and two feed-forward engines, two micro-batches."""
    pools: dict[str, Any] = {"attention": {"replicas": 4}, "ffn": {"replicas": 2, "tensor_parallel": 4}}
    made = study(llm="deepseek-v3", topologies="pdaf", token_budget=65536, micro_batches=2, **pools)
    resolved = resolve(made.space.deployment(np.array([0])), made.catalog)
    found = machines(resolved, made.workload, made.catalog)
    ready = plan(found, resolved, made.workload, made.catalog, Window(0.0, 1.0, 1.0))
    prefill, decode = found.bundles
    assert (ready.prefill_engines, ready.decode_engines, ready.prefill.depth) == (2, 2, 2)
    for batch, context in ((3.0, 900.0), (64.0, 30_000.0), (512.0, 4_000.0)):
        simulated = apart_decode_s(ready.decode_split, batch, batch * context, batch * context)
        expected = decode_step(decode, made.catalog.llm, jnp.array([batch]), jnp.array([context])).total_s[0]
        assert simulated == pytest.approx(float(expected), rel=1e-4)
    for tokens, context in ((50.0, 5_000.0), (4_000.0, 4_000.0), (30_000.0, 60_000.0)):
        pairs = tokens * (context - 0.5 * tokens)
        simulated = apart_prefill_s(ready.prefill_split, tokens, pairs, pairs, context, 1.0)
        u, q, c = (jnp.array([[x]]) for x in (tokens, pairs, context))
        time = prefill_call(prefill, made.catalog.llm, u, q, c, jnp.array([65536.0]))
        assert simulated == pytest.approx((float(time.alone.total_s[0, 0]), float(time.busy_s[0, 0])), rel=1e-3)


def test_sessions_in_progress_at_the_beginning_are_those_of_the_steady_state() -> None:
    """As many as Little's law says, half of their calls behind them, and as many calls a second as offered."""
    made = study(topologies="chunked")
    sample = made.simulator().sample
    expected = np.full(len(sample.session), 3.0)
    found = traffic(sample, Load(0.05), expected, 4000.0, 4, False, 1e6, 0)
    gap = np.where(sample.last, 0.0, sample.gap_after_s)
    live = 0.05 * (expected + gap).sum() / sample.last.sum()
    started = found.sessions["start_s"][: found.playing]
    assert abs(len(found.warm) - live) < 5.0 * np.sqrt(live) + 2.0 * 1e6 / 1e4
    assert (np.diff(started[found.starts]) >= 0.0).all() and started.min() >= 0.0
    calls = found.calls
    assert (calls["first"][found.sessions["first_call"][: found.playing]] | (started < 3603.0)).all()
    assert np.array_equal(np.unique(calls["session"]), np.arange(found.playing))
    again = traffic(sample, Load(0.05), expected, 4000.0, 4, False, 1e6, 0)
    assert np.array_equal(calls["prompt"], again.calls["prompt"])


SCREENS = {"llm": "qwen3-vl-8b", "tensor_parallel": 1, "workload": "gui-agent"}
GRID = [
    pytest.param({"topologies": "colocated", "replicas": 4}, 0.04, 0.04, id="colocated"),
    pytest.param({"topologies": "colocated", "replicas": 8}, 0.05, 0.04, id="colocated-idle"),
    pytest.param({"topologies": "chunked", "replicas": 4}, 0.04, 0.04, id="chunked"),
    pytest.param({"topologies": "chunked", "replicas": 7}, 0.1, 0.04, id="chunked-shipped"),
    pytest.param({"topologies": "chunked", "replicas": 4, "pipeline_parallel": 2}, 0.06, 0.06, id="chunked-pipeline"),
    pytest.param({"topologies": "pd", "replicas": 3}, 0.03, 0.05, id="pd"),
    pytest.param({"topologies": "pd", "replicas": 6}, 0.1, 0.05, id="pd-many"),
    pytest.param({"topologies": "pd", "replicas": 3, "pipeline_parallel": 2}, 0.05, 0.05, id="pd-pipeline"),
    pytest.param({"topologies": "pd", "replicas": 4, "workload": "chat"}, 2.0, 0.05, id="pd-chat"),
    pytest.param({"topologies": "chunked", "replicas": 4, "workload": "tool-agent"}, 2.0, 0.05, id="chunked-tool"),
    pytest.param({"topologies": "colocated", "replicas": 4, "workload": "chat"}, 2.0, 0.05, id="colocated-chat"),
    pytest.param(
        {"topologies": "pd", "replicas": 4, "routing": "balanced", "workload": "rag-docqa"}, 2.0, 0.05, id="rag"
    ),
    # The time to the first token hardly varies here: a bound 1 % off is met by 7 % more calls.
    pytest.param({"topologies": "E | PA PF | DA | DF", "replicas": 2, **SCREENS}, 0.4, 0.08, id="encoder-afd"),
    pytest.param(
        {"topologies": "afd", "replicas": 4, "placement": {"projections": "ffn", "lm_head": "attention"}},
        0.03,
        0.05,
        id="afd-placed",
    ),
    pytest.param({"topologies": "pd", "replicas": 4, "routing": "random", "workload": "chat"}, 1.0, 0.05, id="random"),
    pytest.param({"topologies": "pd", "replicas": 4, "routing": "prefix-aware"}, 0.03, 0.05, id="prefix-aware"),
]


@pytest.mark.parametrize(("space", "rate", "tolerance"), GRID)
def test_attainment_agrees(space: dict[str, Any], rate: float, tolerance: float) -> None:
    """At the model's 90th percentile of TTFT and of TPOT (2 % wider: it is nearly deterministic), each within the
    tolerance of what is simulated, beyond the simulation's own uncertainty; the prefix hits within 0.02."""
    made = study(rate, **space)
    ready = made.simulator().ready(np.array([0]))[0]
    assert ready["feasible"], ready["utilization_max"]
    found = ready.replicate(6, 5000, 1)
    args = made.space.deployment(np.array([0])), made.workload, made.catalog
    ttft, tpot, shares = _model(*args)
    simulated = found.attainment(Bounds(float(ttft), float(tpot)))
    for name, expected in zip(("slo", "ttft", "tpot"), shares, strict=True):
        slack = tolerance + simulated[name].half_width
        assert simulated[name].value == pytest.approx(float(expected), abs=slack), name
    assert found.cache_hit.value == pytest.approx(ready["cache_hit"], abs=0.02 + found.cache_hit.half_width)
    assert found.throughput.value == pytest.approx(ready.calls_per_s, rel=0.02 + found.throughput.half_width)
    assert not found.saturated(ready.calls_per_s)


@jax.jit
def _model(deployment: Any, workload: Any, catalog: Any) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    latency = performance(resolve(deployment, catalog), workload, catalog).latency
    ttft, tpot = percentile(ttft_cdf, latency, 0.9), 1.02 * percentile(tpot_cdf, latency, 0.9)
    within = ttft_cdf(latency, ttft)[0], tpot_cdf(latency, tpot)[0]
    return ttft[0], tpot[0], [within[0] * within[1], *within]


def test_a_closed_population_keeps_its_sessions_and_its_rate() -> None:
    made = study(topologies="chunked", replicas=2, workload="tool-agent")
    made = Study.parse({**made.data, "load": {"concurrent_sessions": 200}}, "test")
    ready = made.simulator().ready(np.array([0]))[0]
    found = ready.replicate(6, 5000, 0)
    assert found.throughput.value == pytest.approx(ready.calls_per_s, rel=0.04)
    run = found.runs[0]
    first = run.sessions["first_call"]
    begun = run.calls["arrival_s"][first[first < len(run.calls)]]
    assert np.isfinite(begun).sum() > 200  # some ended, and others took their place


def test_a_candidate_that_fails_in_simulation_is_passed_over(outcome_of) -> None:
    """The walk ends at the first of a list that holds there; with no time left, at the first that was not tried."""
    made = study(0.1, {"ttft_s": 2.0, "tpot_s": 0.0167, "target": 0.9}, topologies="chunked", replicas=[4, 5, 7, 9, 12])
    columns = outcome_of(made)
    assert (np.diff(np.asarray(columns.slo_attainment, np.float64)) > 0.0).all()
    verification = Verification(made.simulator(), made.slo)
    told: list[tuple[int, int]] = []
    end = verification.run([list(range(5))], [4], lambda *x: told.append(x))[0]
    assert end is not None and verification.verdicts[end].meets
    assert not any(verification.verdicts[k].meets for k in range(end)) and end > 0
    assert told[-1][0] == told[-1][1]
    hurried = Verification(made.simulator(), made.slo, seconds=0.0)
    assert hurried.run([list(range(5))], [], lambda *_: None) == {0: 0} and not hurried.verdicts
