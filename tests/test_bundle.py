"""Attention and feed-forward layers together and apart: known limits, the published best ratio, all 52 partitions."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breakeven.models.bundle import Apart, Bundle, common_divisor, decode_step, slowest_of
from breakeven.models.llm import LLM, llms
from breakeven.models.performance import performance
from breakeven.models.serving import evaluate
from breakeven.models.steps import Coefficients
from breakeven.models.tables import resolve
from breakeven.models.topology import STAGES, all_partitions, partition
from breakeven.optimizer.evaluator import SMALL

DENSE = LLM.from_architecture(llms()["llama-3.1-70b"])
EXACT = 2e-4  # of a metric: the iteration's rounding in 32 bit


# The machine ---------------------------------------------------------------------------------------------------------


def linear(step_s: float, token_s: float = 0.0, context_s: float = 0.0) -> Coefficients:
    """A side that takes step_s + (token_s + context_s context) a token."""
    zero = jnp.zeros(1)
    side = Coefficients(zero + step_s, zero, zero, zero, zero + token_s, zero)
    return dataclasses.replace(side, context_s=zero + context_s, selected_context_s=zero) if context_s else side


def bundle(attention: Coefficients, ffn: Coefficients, workers: Any, micro_batches: float, **apart: Any) -> Bundle:
    """So many attention engines to one feed-forward engine, apart."""
    one = jnp.ones(1)
    numbers: dict[str, Any] = {
        "apart": 1.0,
        "workers": workers,
        "ffn_engines": 1.0,
        "ffn_pipeline": 1.0,
        "ffn_ranks": 1.0,
        "micro_batches": micro_batches,
        "straggle_tokens": 0.0,
        "handoff_s": 0.0,
        "dispatch_token_s": 0.0,
        "combine_token_s": 0.0,
        "worker_ports": 1.0,
    }
    split = Apart(**{k: jnp.ones(1) * v for k, v in (numbers | apart).items()})
    return Bundle(attention, ffn, one, one, one, split)


def step_s(machine: Bundle, batch: float, context: float = 1000.0) -> float:
    return float(decode_step(machine, DENSE, jnp.array([batch]), jnp.array([context])).total_s[0])


def test_one_micro_batch_takes_the_whole_way_round():
    """40 tokens: 10 ms of attention, 1 ms there, 6 ms of experts, 2 ms back, and 2 x 0.5 ms of hand-offs."""
    way = {"dispatch_token_s": 1e-3 / 40, "combine_token_s": 2e-3 / 40, "handoff_s": 0.5e-3}
    machine = bundle(linear(0.002, 0.008 / 40), linear(0.001, 0.005 / 40), 1.0, 1.0, **way)
    assert step_s(machine, 40.0) == pytest.approx(0.020, rel=1e-5)


@pytest.mark.parametrize(("exchange_s", "seconds"), [(0.003, 0.012), (0.02, 0.02), (0.001, 0.011)])
def test_two_batches_hide_the_collectives_of_each_other(exchange_s: float, seconds: float):
    """40 tokens: sides of 1 + 4 and 1 + 4 ms, or 12 in two parts: the longer of that and the exchange; as a whole where
    10 ms and the exchange are less."""
    sides = linear(0.001, 0.004 / 40), linear(0.001, 0.004 / 40)
    sides = sides[0], dataclasses.replace(sides[1], collective_token_s=jnp.array([exchange_s / 40]))
    one = jnp.ones(1)
    assert step_s(Bundle(*sides, one, one, one, None, 2.0 * one), 40.0) == pytest.approx(seconds, rel=1e-5)


@pytest.mark.parametrize(("m", "seconds"), [(1, 0.016), (2, 0.012), (4, 0.016)])
def test_ping_pong_hides_the_shorter_side(m: int, seconds: float):
    """Sides of 2 + 8 and 1 + 5 ms: two micro-batches take 2 x (2 + 4) on the longer, four pay its 2 ms four times."""
    machine = bundle(linear(0.002, 0.008 / 40), linear(0.001, 0.005 / 40), 1.0, float(m))
    assert step_s(machine, 40.0) == pytest.approx(seconds, rel=1e-5)


def test_a_slow_link_binds():
    """Three micro-batches, each of them 10 ms on its way back."""
    machine = bundle(linear(0.001), linear(0.001), 1.0, 3.0, dispatch_token_s=5e-3 / 10, combine_token_s=1e-3)
    assert step_s(machine, 30.0) == pytest.approx(0.030, rel=1e-5)


def test_causes_add_up_to_the_step():
    machine = bundle(linear(0.002, 1e-4, 1e-8), linear(0.001, 3e-4), 4.0, 3.0, dispatch_token_s=1e-5, handoff_s=1e-4)
    found = decode_step(machine, DENSE, jnp.array([400.0]), jnp.array([1e4]))
    parts = [float(jnp.sum(x)) for x in found]
    assert sum(parts) == pytest.approx(float(found.total_s[0]), rel=1e-6) and min(parts) >= 0.0


@settings(max_examples=20)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 2000))
def test_bundles_are_the_greatest_common_divisor(a: int, b: int, k: int):
    found = common_divisor(jnp.float32(a * k), jnp.float32(b * k))
    assert int(found) == np.gcd(a * k, b * k)


@pytest.mark.parametrize(("count", "expected"), [(1, 0.0), (2, 0.5642), (4, 1.0294), (8, 1.4236), (64, 2.3437)])
def test_the_slowest_of_several(count: int, expected: float):
    """Expected maxima of standard normal samples (Harter 1961)."""
    assert float(slowest_of(jnp.float32(count))) == pytest.approx(expected, abs=0.03)


def test_the_barrier_is_that_of_samples():
    """Eight workers of 30 sequences, contexts lognormal: the slowest worker's tokens, simulated."""
    rng, n, sd = np.random.default_rng(0), 30, 4000.0
    sigma = np.sqrt(np.log(1 + (sd / 1e4) ** 2))
    tokens = rng.lognormal(np.log(1e4) - sigma**2 / 2, sigma, (4000, 8, n)).sum(-1).max(-1).mean()
    straggle = float(slowest_of(jnp.float32(8.0))) * sd
    machine = bundle(linear(0.0, 0.0, 1e-8), linear(0.0), 8.0, 1.0, straggle_tokens=straggle)
    assert step_s(machine, 8.0 * n, 1e4) == pytest.approx(1e-8 * tokens, rel=0.01)


def best_ratio(fixed: tuple[float, float, float], token_s: tuple[float, float, float], batch: float) -> float:
    """r* = max(r_A, r_C, r_peak) of arXiv:2601.21351 for an rA-1F bundle.

    Attention takes t_A whatever r is; feed-forward and communication take beta + alpha r B. Throughput per engine
    grows with r as long as the feed-forward side has to wait, and has its peak beyond at sqrt(beta_F / (alpha_F B)).
    """
    (beta_a, beta_c, beta_f), (alpha_a, alpha_c, alpha_f) = fixed, token_s
    attention_s = beta_a + alpha_a * batch
    r_a = (attention_s - beta_f) / (alpha_f * batch)
    r_c = (beta_c - beta_f) / (batch * (alpha_f - alpha_c))
    return max(r_a, r_c, (beta_f / (alpha_f * batch)) ** 0.5)


@pytest.mark.parametrize("binds", ["attention", "link", "peak"])
@settings(max_examples=6)
@given(scale=st.floats(0.7, 1.4), batch=st.sampled_from([32.0, 128.0, 512.0]))
def test_the_best_ratio_is_the_published_one(binds: str, scale: float, batch: float):
    """Tokens per second and engine over r = 0.5, 0.55, ...: the best r is r* within 10 %."""
    alpha_f = 1e-3 / batch * scale
    fixed, token_s = {
        "attention": ((1e-3, 1e-4, 2e-3), (9e-3 / batch, 1e-4 / batch, alpha_f)),
        "link": ((2e-3, 6e-3, 1e-3), (1e-3 / batch, 0.1 * alpha_f, alpha_f)),
        "peak": ((5e-4, 1e-4, 16e-3), (1e-4 / batch, 1e-4 / batch, alpha_f)),
    }[binds]
    ratios = np.arange(0.5, 20.0, 0.05)
    r = jnp.asarray(ratios, jnp.float32)
    # The paper's one communication time, its fixed part too, as seconds per token of either direction.
    link = fixed[1] / (r * batch) + token_s[1]
    machine = bundle(linear(fixed[0], token_s[0]), linear(fixed[2], token_s[2]), r, 6.0, dispatch_token_s=link)
    tokens = r * batch * 6.0
    per_engine = tokens / decode_step(machine, DENSE, tokens, jnp.ones(1)).total_s / (r + 1.0)
    found = ratios[int(jnp.argmax(per_engine))]
    assert found == pytest.approx(best_ratio(fixed, token_s, batch), rel=0.1)


# Whole deployments ---------------------------------------------------------------------------------------------------


def labelled(deployment, labels, micro_batches=None, link=None):
    """The same choices per stage in other pools; with micro-batches, in the model that knows of activations."""
    stages = {
        name: dataclasses.replace(getattr(deployment, name), pool=jnp.full_like(deployment.kv, label))
        for name, label in zip(STAGES, labels, strict=True)
    }
    if micro_batches is not None:
        row = deployment.link if link is None else jnp.full_like(deployment.link, link)
        parts = jnp.full_like(deployment.balanced, micro_batches)
        stages |= {"activation_link": row, "micro_batches": parts, "link": row}
    return dataclasses.replace(deployment, **stages)


def with_choice(deployment, **values):
    """Every stage with these choices."""
    stages = {}
    for name in STAGES:
        stage = getattr(deployment, name)
        stages[name] = dataclasses.replace(stage, **{k: jnp.full_like(stage.replicas, v) for k, v in values.items()})
    return dataclasses.replace(deployment, **stages)


@pytest.fixture(scope="module")
def tried(study):
    """The model of every partition, on the fixture's study."""

    def run(deployment, workload=study.workload, catalog=study.catalog):
        return evaluate(deployment, workload, study.slo, catalog)

    return run


def columns(outcome):
    return {k: np.asarray(v, float) for k, v in outcome._asdict().items() if k not in ("violations", "doubts")}


def test_one_pool_is_colocated_exactly(deployment, tried):
    """The partition with one pool, in the model that knows of activations, is the colocated topology."""
    joint = labelled(same_machines(deployment), (0, 0, 0, 0, 0))
    before, after = columns(tried(joint)), columns(tried(labelled(joint, (0, 0, 0, 0, 0), 2.0)))
    assert np.array_equal(after["feasible"], before["feasible"])
    stable = (before["utilization_max"] < 0.95) & (before["feasible"] > 0.5)  # beyond, rounding is magnified
    assert stable.sum() > 100
    for name, values in before.items():
        assert after[name][stable] == pytest.approx(values[stable], rel=EXACT, abs=1e-5), name


def test_renaming_pools_changes_nothing(deployment, tried):
    """Only which labels are equal counts."""
    before = columns(tried(labelled(deployment, (0, 1, 2, 3, 2), 2.0)))
    after = columns(tried(labelled(deployment, (4, 0, 7, 1, 7), 2.0)))
    assert partition((4, 0, 7, 1, 7)) == (0, 1, 2, 3, 2)
    for name, values in before.items():
        assert np.array_equal(after[name], values), name


@pytest.mark.parametrize("first", range(0, 52, 13))
def test_every_partition_is_evaluated(deployment, tried, first):
    """Numbers everywhere, and each pool is paid for."""
    for labels in all_partitions()[first : first + 13]:
        made = labelled(same_machines(deployment), labels, 2.0)
        found = columns(tried(made))
        for name, values in found.items():
            assert np.isfinite(values).all(), (labels, name)
        p = made.encode
        size = np.asarray(p.replicas * p.tensor_parallel * p.data_parallel * p.pipeline_parallel)
        assert found["accelerators"] == pytest.approx((max(labels) + 1) * size, rel=1e-5)


def fast(catalog):
    """A catalogue whose links take no time."""
    links = catalog.links
    return dataclasses.replace(
        catalog,
        links=dataclasses.replace(
            links,
            bytes_per_s=links.bytes_per_s * 1e9,
            latency_s=links.latency_s * 0.0,
            through_nic=links.through_nic * 0.0,
        ),
    )


def same_machines(deployment):
    """As many engines of one kind for every stage: prefill's choices everywhere."""
    p = deployment.prefill_attention
    stages = {name: dataclasses.replace(p, pool=getattr(deployment, name).pool) for name in STAGES}
    return dataclasses.replace(deployment, **stages)


@pytest.mark.parametrize(
    ("labels", "joint"),
    [((0, 0, 0, 1, 2), (0, 0, 0, 1, 1)), ((0, 0, 1, 2, 3), (0, 0, 0, 1, 1)), ((0, 0, 1, 0, 1), (0, 0, 0, 0, 0))],
    ids=["afd", "pdaf", "af"],
)
def test_a_split_over_an_infinitely_fast_link_costs_only_lost_sharing(study, deployment, tried, labels, joint):
    """Identical engines, one for one, one micro-batch in flight: each step takes what it takes in one pool."""
    made = with_choice(same_machines(deployment), pipeline_parallel=1.0, max_batch=256.0, token_budget=2048.0)
    instant = fast(study.catalog)
    apart, together = (tried(labelled(made, x, 1.0), catalog=instant) for x in (labels, joint))
    here = np.asarray(together.feasible) & (np.asarray(together.cache_hit) > 0.9999)
    here = here & ~np.asarray(together.doubts.batch_limit) & (np.asarray(together.utilization_decode) < 0.6)
    assert here.sum() > 20 and np.asarray(apart.feasible)[here].all()
    for name in ("tpot_mean_s", "ttft_mean_s", "call_mean_s"):
        assert np.asarray(getattr(apart, name))[here] == pytest.approx(
            np.asarray(getattr(together, name))[here], rel=3e-3
        ), name
    pools = max(labels) + 1, max(joint) + 1
    assert np.asarray(apart.accelerators)[here] == pytest.approx(
        np.asarray(together.accelerators)[here] * pools[0] / pools[1]
    )


@pytest.mark.parametrize("labels", [(0, 0, 0, 1, 2), (0, 0, 1, 0, 1), (0, 1, 2, 3, 4)], ids=["afd", "af", "five"])
def test_a_faster_link_never_generates_slower(study, deployment, tried, labels):
    made = labelled(deployment, labels, 3.0)
    before, after = tried(made), tried(made, catalog=fast(study.catalog))
    here = np.asarray(before.feasible)
    assert here.sum() > 20 and np.asarray(after.feasible)[here].all()
    assert (np.asarray(after.tpot_mean_s) <= np.asarray(before.tpot_mean_s) * (1 + 1e-4))[here].all()


def test_feed_forward_devices_hold_no_cache(study, deployment):
    """Apart, attention has the memory that the other side's weights took; feed-forward devices add nothing to it."""

    @jax.jit
    def capacity(made):
        pools = performance(resolve(made, study.catalog), study.workload, study.catalog).pools
        return pools.decode_memory.capacity_tokens / pools.decode.workers

    pd, afd = (capacity(labelled(deployment, x, 1.0)) for x in ((0, 0, 0, 1, 1), (0, 0, 0, 1, 2)))
    more = dataclasses.replace(deployment.decode_ffn, replicas=deployment.decode_ffn.replicas * 4.0)
    wider = capacity(labelled(dataclasses.replace(deployment, decode_ffn=more), (0, 0, 0, 1, 2), 1.0))
    fits = np.asarray(pd) > 0.0
    assert (np.asarray(afd)[fits] > np.asarray(pd)[fits]).all()
    assert np.asarray(wider) == pytest.approx(np.asarray(afd))


def test_a_pool_that_prefills_for_one_side_holds_decode_up_less(study, deployment):
    """Feed-forward layers of prefill in the decode pool take part of the time that whole prefills take there."""

    @jax.jit
    def share(made):
        return performance(resolve(made, study.catalog), study.workload, study.catalog).pools.shared

    made = same_machines(deployment)
    whole, half, none = (share(labelled(made, x, 2.0)) for x in ((0, 0, 0, 0, 0), (0, 1, 0, 0, 0), (0, 0, 0, 1, 1)))
    assert np.asarray(whole) == pytest.approx(1.0) and not np.asarray(none).any()
    assert (np.asarray(half) > 0.05).all() and (np.asarray(half) <= 1.0).all()
    assert len(deployment) == SMALL
