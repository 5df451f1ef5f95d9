"""What may stand on either side of an attention/FFN split: counts by hand, what is conserved, what only moves."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from breakeven.models.bundle import Bundle, decode_sides, decode_step, prefill_call
from breakeven.models.inputs import InputError
from breakeven.models.llm import LLM, llms
from breakeven.models.memory import pool_weights_bytes
from breakeven.models.placement import traffic
from breakeven.models.placement_choices import Placement, placement_rows, placements, stated
from breakeven.models.pools import machines as bundles
from breakeven.models.pools import pools
from breakeven.models.simulation.machine import Window, machines, plan
from breakeven.models.simulation.step_times import apart_decode_s, apart_prefill_s
from breakeven.models.tables import resolve
from breakeven.models.topology import STAGES
from breakeven.spaces.structures import Structures
from breakeven.studies.deployment_file import choices, deployment_yaml, read_deployment

LLAMA, DEEPSEEK = llms()["llama-3.1-70b"], llms()["deepseek-v3"]
BOTH = ["attention", "ffn"]
EVERYWHERE = {"projections": BOTH, "router": BOTH, "shared_experts": BOTH, "lm_head": BOTH}
MOE: dict[str, Any] = {
    "topologies": "pdaf", "accelerators": "h200-sxm", "tensor_parallel": 8, "data_parallel": 1, "expert_parallel": True,
    "pipeline_parallel": 1, "replicas": 1, "max_batch": 256, "token_budget": 8192, "weights": "fp8", "kv": "bf16",
    "links": [{"like": "nvlink4", "name": "instant", "gbs": 1e6, "latency_us": 0.0}], "micro_batches": 1,
    "routing": "affinity",
}  # fmt: skip

REACHED = 16 * (1 - (15 / 16) ** 8)
PLAYED: dict[str, Any] = {
    "tensor_parallel": 1, "data_parallel": 8, "links": "ib-ndr-400", "micro_batches": 2, "token_budget": 65536,
}  # fmt: skip


# What a study says ----------------------------------------------------------------------------------------------------


def test_only_what_differs_for_the_model_is_counted():
    """A dense model has no routers or shared experts; without projections attention has no hidden state to route."""
    assert placements({}, LLAMA) == (Placement(),)
    assert len(placements(EVERYWHERE, LLAMA)) == 4
    assert len(placements(EVERYWHERE, DEEPSEEK)) == 2 * 2 * 2 + 2
    alone = placements({"projections": "ffn"}, DEEPSEEK)
    assert [one.id for one in alone] == ["projections=ffn"]
    assert alone[0] in placements(EVERYWHERE, DEEPSEEK)
    for one in placements(EVERYWHERE, DEEPSEEK):
        assert placements(stated(one.id), DEEPSEEK) == (one,)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ("ffn", "placement"),
        ({"experts": "ffn"}, "placement.experts"),
        ({"router": "gpu"}, "placement.router"),
        ({"lm_head": ["ffn", 1]}, "placement.lm_head.1"),
        ({"projections": []}, "placement.projections"),
        ({"projections": BOTH, "router": "attention"}, "placement.router"),
        ({"projections": "ffn", "shared_experts": "attention"}, "placement.shared_experts"),
    ],
)
def test_what_means_nothing_is_refused(spec, field):
    with pytest.raises(InputError) as error:
        placements(spec, DEEPSEEK)
    assert error.value.field == field and "\n" not in str(error.value)


def test_placements_multiply_candidates_only_where_sides_are_apart(make_study):
    """Of a dense model two parts move: PD stays as it is, AFD has four times the candidates, each with its row."""
    plain = make_study(topologies=["pd", "afd"])
    made = make_study(topologies=["pd", "afd"], placement=EVERYWHERE)
    pd, afd = plain.space.families
    assert [family.size for family in made.space.families] == [pd.size, 4 * afd.size]
    assert plain.space.deployment(np.array([0])).placement is None
    ids = np.array([0, int(made.space.offsets[1]) + 1, int(made.space.offsets[1]) + 3])
    assert made.space.frame(ids)["placement"].tolist() == ["", "default", "projections=ffn"]
    near = made.space.frame(Structures(made.space).neighbours(ids[1:2]))["placement"]
    assert set(near) == {one.id for one in made.names.placements}
    assert make_study(topologies="pd", placement=EVERYWHERE).space.deployment(np.array([0])).placement is None


def test_a_deployment_file_keeps_its_placement(make_study, tmp_path):
    made = make_study(topologies="afd", placement={"projections": "ffn", "lm_head": "attention"})
    row = made.space.frame(np.array([5])).iloc[0].to_dict() | {"cost_per_hour_usd": 1.0, "slo_attainment": 1.0}
    path = tmp_path / "one.yaml"
    path.write_text(deployment_yaml(made, row), encoding="utf-8")
    read = read_deployment(str(path)).study
    shown = choices(read.space.frame(np.array([0])).iloc[0].to_dict())
    assert shown == choices(row) and shown["placement"] == "projections=ffn,lm_head=attention"
    resolved = resolve(read.space.deployment(np.array([0])), read.catalog)
    assert resolved.placement is not None
    sent = traffic(read.catalog.llm, jnp.ones(1), resolved.placement, resolved.placement.decode)
    assert [float(x[0]) for x in sent] == [2 * 8192 * (80 + 1), 2 * (10240 * 80 + 8192), 81]


# Counts ---------------------------------------------------------------------------------------------------------------


def test_elements_of_queries_keys_and_values():
    """Llama-3.1-70B: 64 query heads and 2 x 8 of keys and values, 128 each. DeepSeek-V3: 128 heads; prefill multiplies
    keys and values out (192 + 128 + 128) beside the 576 cached, decode has queries of 576 and sums of 512."""
    assert LLAMA.over_layers("projected_elements") == 80 * (64 + 16) * 128
    assert LLAMA.over_layers("decode_attended_elements") == 80 * 64 * 128
    assert DEEPSEEK.over_layers("projected_elements") == 61 * (128 * (192 + 128 + 128) + 576)
    assert DEEPSEEK.over_layers("attended_elements") == 61 * 128 * 128
    assert DEEPSEEK.over_layers("decode_projected_elements") == 61 * 129 * 576
    assert DEEPSEEK.over_layers("decode_attended_elements") == 61 * 128 * 512
    assert all(one.over_layers("projected_elements") > 0 for one in llms().values())


@pytest.mark.parametrize(
    ("spec", "there", "back"),
    [
        ({}, 58 * (REACHED + 1), 2 * 58 * (REACHED + 1)),
        ({"router": "attention"}, 58 * (REACHED + 1), 2 * 58 * (REACHED + 1)),
        ({"shared_experts": "attention"}, 58 * REACHED, 2 * 58 * REACHED),
        ({"router": "ffn"}, 2 * 58, 2 * 58),
        ({"lm_head": "attention"}, 58 * (REACHED + 1), 2 * 58 * (REACHED + 1)),
    ],
    ids=["default", "router", "shared", "routed there", "head"],
)
def test_bytes_of_a_token_of_deepseek_v3(spec, there, back):
    """58 layers of 256 experts on 16 ranks, of which a token's 8 reach 16 (1 - (15/16)^8) = 6.45, and three dense
    layers in 16 bit; 8 bits to the experts, 16 back, 16 to a router on the other side."""
    rows = placement_rows(placements(spec, DEEPSEEK), DEEPSEEK)
    place = None if rows is None else jax.tree.map(lambda column: column[:1], rows)
    sent = traffic(LLM.from_architecture(DEEPSEEK), jnp.array([16.0]), place, None if place is None else place.decode)
    assert float(sent.there_bytes[0]) == pytest.approx(7168 * (there + 3 * 2), rel=1e-5)
    assert float(sent.back_bytes[0]) == pytest.approx(7168 * (back + 3 * 2), rel=1e-5)
    assert float(sent.handoffs[0]) == 61


def test_bytes_and_weights_of_attention_without_projections(one):
    """Llama-3.1-70B in 16 bit: 2 x 10,240 bytes a layer come, 2 x 8,192 go; of 141.1 GB attention keeps nothing, and an
    engine of the other side reads 24.2 GB more a step and does 2 x 12.1e9 FLOPs more a token."""
    base: dict[str, Any] = {"topologies": "afd", "tensor_parallel": 8, "pipeline_parallel": 1}
    plain, moved = (one(**base, placement=spec)[0] for spec in ({}, {"projections": "ffn"}))
    study = one(**base)[1]
    assert moved.placement is not None
    sent = traffic(study.catalog.llm, jnp.ones(1), moved.placement, moved.placement.decode)
    assert [float(x[0]) for x in sent] == [80 * 2 * 8192, 80 * 2 * 10240, 80]
    before, after = (decode_machine(resolved, study) for resolved in (plain, moved))
    stage = moved.decode_ffn
    parameters = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024)
    assert not np.asarray(after.attention.projection_s).any() and before.ffn.projection_s is None
    assert after.ffn.projection_s is not None and after.ffn.projection_token_s is not None
    read_s = 2.0 * parameters / (8 * float(stage.attention_read_bytes_per_s[0]))
    assert float(after.ffn.projection_s[0]) == pytest.approx(read_s, rel=1e-3)
    token_s = 2.0 * parameters / (8 * float(stage.attention_flops_per_s[0]))
    assert float(after.ffn.projection_token_s[0]) == pytest.approx(token_s, rel=1e-3)
    assert float(pool_weights_bytes(moved, moved.decode_attention.choice.pool, study.catalog.llm)[0]) == 0.0


# Laws -----------------------------------------------------------------------------------------------------------------


def decode_machine(resolved, study) -> Bundle:
    return bundles(resolved, study.catalog)[1]


@pytest.fixture(scope="module")
def moe(make_study):
    """DeepSeek-V3 on four equal pools over an instant link, at every placement."""
    return make_study("llm=deepseek-v3", **MOE, placement=EVERYWHERE)


@pytest.fixture(scope="module")
def everywhere(moe):
    return resolve(moe.space.deployment(np.arange(moe.space.size)), moe.catalog)


def pool_bytes(moe, resolved, labels) -> np.ndarray:
    """Weights per accelerator of each pool when the stages stand in these, (pools, n)."""
    stages = {}
    for name, label in zip(STAGES, labels, strict=True):
        stage = getattr(resolved, name)
        choice = dataclasses.replace(stage.choice, pool=jnp.full_like(stage.choice.pool, label))
        stages[name] = dataclasses.replace(stage, choice=choice)
    made = dataclasses.replace(resolved, **stages)
    pools = [jnp.full_like(made.encode.choice.pool, label) for label in range(max(labels) + 1)]
    return np.stack([np.asarray(pool_weights_bytes(made, pool, moe.catalog.llm)) for pool in pools])


def test_weights_of_both_sides_are_the_same_in_sum(moe, everywhere):
    """Whatever stands where, of each phase or of both in two pools; a pool with both sides of a phase has it all."""
    plain = dataclasses.replace(everywhere, placement=None)
    for labels in ((0, 0, 1, 2, 3), (0, 0, 1, 0, 1)):
        found, before = pool_bytes(moe, everywhere, labels), pool_bytes(moe, plain, labels)
        assert found.sum(0) == pytest.approx(before.sum(0), rel=1e-5) and found.min() >= 0.0
        assert len(np.unique(np.round(found[0] / 1e6))) > 5
    joint = (0, 0, 0, 0, 1)
    assert pool_bytes(moe, everywhere, joint)[0] == pytest.approx(pool_bytes(moe, plain, joint)[0], rel=1e-5)


@pytest.mark.parametrize("batch", [8.0, 200.0])
def test_over_an_instant_link_only_the_busy_side_changes(moe, everywhere, batch):
    """Equal pools: both sides of a decode step and of a prefill take the same in sum, whatever stands where. Shared
    experts with attention hide behind the other side."""
    llm, context = moe.catalog.llm, jnp.full(moe.space.size, 8000.0)
    prefill, decode = bundles(everywhere, moe.catalog)
    seconds = [
        [side.total_s for side in decode_sides(whole(decode), llm, batch * jnp.ones_like(context), context)],
        [side.total_s[:, 0] for side in prefill_call(whole(prefill), llm, *calls(moe.space.size, batch)).sides],
    ]
    for sides in seconds:
        total = np.asarray(sides[0] + sides[1])
        # Read beside other products, the head's weights hide behind their arithmetic; alone they do not.
        assert total == pytest.approx(np.full_like(total, total[0]), rel=2e-3 if sides is seconds[0] else 0.03)
        assert len(np.unique(np.round(np.asarray(sides[0]), 9))) > 4
    step_s = np.asarray(decode_step(decode, llm, batch * jnp.ones_like(context), context).total_s)
    hidden = np.array(["shared_experts=attention" in one.id for one in moe.names.placements])
    total = np.asarray(seconds[0][0] + seconds[0][1])
    assert (step_s[hidden] < total[hidden]).all() and step_s[~hidden] == pytest.approx(total[~hidden], rel=1e-4)


def whole(machine: Bundle) -> Bundle:
    """The same without anything that hides."""
    assert machine.split is not None
    return dataclasses.replace(machine, split=dataclasses.replace(machine.split, shared_s=None, shared_token_s=None))


def calls(count: int, tokens: float) -> tuple[jax.Array, ...]:
    """So many equal prefills of `tokens` after 2,000, and a token budget."""
    size = jnp.full((count, 1), tokens * 10.0)
    return size, size * 2000.0, size + 2000.0, jnp.full(count, 8192.0)


def test_a_slower_link_never_favours_what_sends_more(moe, everywhere):
    """Of two placements, one of which sends more each way: once it is the slower one it stays so as the link slows."""
    llm, batch, context = moe.catalog.llm, 128.0 * jnp.ones(moe.space.size), jnp.full(moe.space.size, 4000.0)
    links = 1e12 * 0.5 ** np.arange(14)
    times, ways = [], None
    for rate in links:
        link = everywhere.activations
        assert link is not None
        slow = dataclasses.replace(everywhere, activations=dataclasses.replace(link, bytes_per_s=0.0 * context + rate))
        machine = bundles(slow, moe.catalog)[1]
        assert machine.split is not None
        times.append(np.asarray(decode_step(machine, llm, batch, context).total_s))
        ways = np.stack([np.asarray(machine.split.dispatch_token_s), np.asarray(machine.split.combine_token_s)])
    times = np.array(times)
    assert ways is not None and (np.diff(times, axis=0) >= -1e-7).all()
    sends_more = (ways[:, :, None] >= ways[:, None]).all(0) & (ways[:, :, None] > ways[:, None]).any(0)
    pairs = np.argwhere(sends_more)
    assert len(pairs) > 10
    for more, fewer in pairs:
        slower = times[:, more] >= times[:, fewer]
        assert slower[-1]
        since = np.argmax(slower)
        assert (times[since:, more] >= times[since:, fewer] * (1 - 1e-5)).all()


def test_the_default_beside_others_is_what_it_was(make_study):
    """Everything that the load does not change, of the same candidates with and without placements to choose from."""
    base: dict[str, Any] = {
        "topologies": ["pd", "afd", "af", "pdaf"], "replicas": 4, "tensor_parallel": 8, "pipeline_parallel": 1,
        "micro_batches": [1, 3], "accelerators": ["h100-sxm", "h200-sxm"], "token_budget": 8192, "max_batch": 64,
        "links": "nvlink4", "routing": "affinity", "kv": "bf16",
    }  # fmt: skip
    plain, made = make_study(**base), make_study(**base, placement={"lm_head": ["ffn", "attention"]})
    frame = made.space.frame(np.arange(made.space.size))
    ids = np.flatnonzero((frame["placement"] == "default") | (frame["topology"] == "pd").to_numpy())
    assert len(ids) == plain.space.size > 100
    found, before = (
        jax.jit(pools)(resolve(study.space.deployment(rows), study.catalog), study.workload, study.catalog)
        for study, rows in ((made, ids), (plain, np.arange(plain.space.size)))
    )
    for name in ("resident", "missed", "alone_s", "mate_s", "prefill_memory", "decode_memory", "shared", "moved"):
        for a, b in zip(jax.tree.leaves(getattr(found, name)), jax.tree.leaves(getattr(before, name)), strict=True):
            assert np.asarray(a) == pytest.approx(np.asarray(b), rel=1e-4, abs=1e-9), name
    batch, context = 20.0 * jnp.ones(len(ids)), 30_000.0 * jnp.ones(len(ids))
    steps = [decode_step(machines.decode, plain.catalog.llm, batch, context) for machines in (found, before)]
    assert np.asarray(steps[0].total_s) == pytest.approx(np.asarray(steps[1].total_s), rel=1e-5)


@pytest.mark.parametrize("spec", [{"projections": "ffn", "lm_head": "attention"}, {"shared_experts": "attention"}])
def test_the_simulation_plays_the_same_steps(make_study, spec):
    """A decode step and a prefill chunk on four attention and two feed-forward engines, by the model and played."""
    pools: dict[str, Any] = {"attention": {"replicas": 4}, "ffn": {"replicas": 2}}
    made = make_study("llm=deepseek-v3", **MOE | PLAYED | pools, placement=spec)
    resolved = resolve(made.space.deployment(np.array([0])), made.catalog)
    found = machines(resolved, made.workload, made.catalog)
    ready = plan(found, resolved, made.workload, made.catalog, Window(0.0, 1.0, 1.0))
    prefill, decode = found.bundles
    for batch, context in ((3.0, 900.0), (64.0, 30_000.0), (512.0, 4_000.0)):
        simulated = apart_decode_s(ready.decode_split, batch, batch * context, batch * context)
        expected = decode_step(decode, made.catalog.llm, jnp.array([batch]), jnp.array([context])).total_s[0]
        assert simulated == pytest.approx(float(expected), rel=1e-4)
    for tokens, context in ((50.0, 5_000.0), (30_000.0, 60_000.0)):
        pairs = tokens * (context - 0.5 * tokens)
        simulated = apart_prefill_s(ready.prefill_split, tokens, pairs, pairs, context, 1.0)
        u, q, c = (jnp.array([[x]]) for x in (tokens, pairs, context))
        time = prefill_call(prefill, made.catalog.llm, u, q, c, jnp.array([65536.0]))
        assert simulated == pytest.approx((float(time.alone.total_s[0, 0]), float(time.busy_s[0, 0])), rel=1e-3)
