"""Ways for the KV cache to get from prefill to decode: nothing changes where none is chosen, and what each buys."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from breakeven.models.inputs import InputError
from breakeven.models.kv_transfer import coding_s, kv_transfer_s, waited_s
from breakeven.models.performance import performance
from breakeven.models.support import lacking
from breakeven.models.tables import resolve
from breakeven.models.transfer_ways import TransferWay, transfer_way, transfers
from breakeven.optimizer.evaluator import SMALL
from breakeven.studies.deployment_file import choices, deployment_yaml, read_deployment

WAYS: list[Any] = [
    "full",
    "layer-wise",
    {"name": "half", "compression": 2.0},
    {"name": "returns", "returns": True},
    {"name": "staged", "staging": 0.5},
    {"name": "kept", "keeps": True},
    {"name": "few", "like": "conditional", "local_tokens": 500},
    {"name": "many", "like": "conditional", "local_tokens": 4000},
]


def test_ways_are_rows_or_variations():
    assert transfers([transfer_way("full")]) is None and transfer_way("full") == TransferWay("full")
    own = transfer_way({"like": "layer-wise", "compression": 2})
    assert (own.id, own.overlap, own.compression) == ("layer-wise,compression=2", True, 2.0)
    rows = transfers([transfer_way("full"), own])
    assert rows is not None and np.asarray(rows.overlap).tolist() == [0.0, 1.0]
    faults = ("fullest", "kv_transfer"), ({"compression": 0.5}, "compression"), ({"overlap": 1}, "overlap")
    coder = ({"encode_gbs": 10}, "encode_gbs"), ({"like": "compressed", "decode_gbs": 0}, "decode_gbs")
    for spec, field in (*faults, *coder, ({"local_tokens": 100}, "local_tokens")):
        with pytest.raises(InputError) as error:
            transfer_way(spec)
        assert error.value.field.endswith(field)


@pytest.fixture(scope="module")
def split(make_study):
    """Splits that differ in nothing but their link and the way."""
    return make_study(
        topologies="pd", accelerators="h100-sxm", tensor_parallel=4, pipeline_parallel=1, max_batch=64,
        token_budget=8192, weights="fp8", kv="bf16", replicas=[2, 4, 8], routing="affinity", kv_transfer=WAYS,
    )  # fmt: skip


@pytest.fixture(scope="module")
def found(split):
    """Columns of its candidates, (others, ways)."""
    columns = split.evaluator().in_blocks_of(SMALL)(np.arange(split.space.size))
    return {name: np.asarray(values).reshape(-1, len(WAYS)) for name, values in columns.items()}


def test_off_changes_nothing(split, found, make_study):
    """Beside other ways, and where a study names none, a full transfer is the same."""
    choices = {**split.data["space"], "kv_transfer": "full"}
    plain = make_study(**choices)
    assert plain.space.deployment(np.array([0])).kv_transfer is None
    columns = plain.evaluator().in_blocks_of(SMALL)(np.arange(plain.space.size))
    for name, values in columns.items():
        if name != "candidate":
            assert found[name][:, 0].astype(float) == pytest.approx(values.astype(float), rel=1e-5, abs=1e-9), name


def test_each_way_helps_where_it_should(split, found):
    """Overlap and compression shorten the wait for the link, returned KV the prefill; none touches decode."""
    here = (found["utilization_max"] < 0.9).all(axis=1) & found["feasible"].all(axis=1)
    assert here.sum() > 5
    ttft, link = found["ttft_mean_s"][here], found["utilization_link"][here]
    assert (ttft[:, 1:4] < ttft[:, :1]).all()
    assert link[:, 1] == pytest.approx(link[:, 0], rel=1e-6)  # as many bytes as before
    assert (link[:, 2] < 0.6 * link[:, 0]).all()
    prefill = found["utilization_prefill"][here]
    assert (prefill[:, 3] < prefill[:, 0]).all() and prefill[:, 1] == pytest.approx(prefill[:, 0], rel=1e-2)
    assert (found["tpot_mean_s"][here][:, 4] >= found["tpot_mean_s"][here][:, 0] * 0.999).all()
    # What decode keeps need not cross, and what it prefills itself leaves prefill and comes to lie on its own steps.
    slow = (split.space.frame(found["candidate"][:, 0])["link"] == "ib-ndr-400").to_numpy()[here]
    slow &= (found["utilization_decode"][here][:, 5] < 0.4) & (found["doubt_batch_limit"][here][:, 5] < 0.5)
    assert (ttft[slow, 5] < ttft[slow, 0]).all() and slow.sum() > 2  # else sticking to one crowded engine costs more
    assert (np.diff(link[slow][:, [0, 5, 6, 7]], axis=1) < 0.0).all()
    assert (np.diff(prefill[:, [5, 6, 7]], axis=1) < 0.0).all()
    assert (np.diff(found["tpot_mean_s"][here][:, [5, 6, 7]], axis=1) > 0.0).all()


def test_what_is_left_of_an_overlapped_transfer(split):
    """80 layers, 1 s on a link without latency: behind a long prefill an eightieth, behind none at all of it."""
    resolved = resolve(split.space.deployment(np.array([1])), split.catalog)
    latency_s = float(resolved.link_latency_s[0])
    prefill_s = jnp.array([[0.0, 0.4, 100.0]])
    late, slack = waited_s(resolved, split.catalog, jnp.full((1, 3), 1.0 + latency_s), prefill_s)
    assert np.asarray(late)[0] - latency_s == pytest.approx([1.0, 1.0 - 0.4 * 79 / 80, 1 / 80], abs=1e-5)
    assert np.asarray(slack)[0] == pytest.approx([0.0, 0.0, 99.0 * 79 / 80], rel=1e-5)


def test_coding_a_cache_takes_the_slowest_of_coder_and_link(make_study):
    """100,000 tokens of Llama-3.1-70B, 16 bit, are 32.768e9 bytes. Four accelerators compress 10e9 bytes a second each:
    0.8192 s; two restore 20e9 each: 0.8192 s; two ports of 45e9 carry a half. Layer by layer the slowest and an
    eightieth of the others; free coders, and infinitely fast ones, take what they took."""
    ways = [
        {"name": "free", "compression": 2.0},
        {"name": "fast", "compression": 2.0, "encode_gbs": 1e6, "decode_gbs": 1e6},
        {"name": "coded", "compression": 2.0, "encode_gbs": 10.0, "decode_gbs": 20.0},
        {"name": "slow", "compression": 2.0, "encode_gbs": 1.0},
    ]
    base: dict[str, Any] = {
        "topologies": "pd", "accelerators": "h200-sxm", "pipeline_parallel": 1, "weights": "fp8", "kv": "bf16",
        "replicas": 1, "routing": "affinity", "max_batch": 64, "token_budget": 8192,
        "prefill": {"tensor_parallel": 4}, "decode": {"tensor_parallel": 2},
        "links": [{"like": "nvlink4", "name": "own", "gbs": 45, "efficiency": 1.0, "latency_us": 0.0}],
    }  # fmt: skip
    study = make_study(**base, kv_transfer=ways)
    resolved = resolve(study.space.deployment(np.arange(4)), study.catalog)
    tokens = jnp.full(4, 1e5)
    found = np.asarray(kv_transfer_s(resolved, study.catalog, tokens))
    wire = 32.768 / 2 / (2 * 45)
    coded = 0.8192 + (0.8192 + wire) / 80
    slow = 8.192 + wire / 80
    assert found == pytest.approx([wire, wire, coded, slow], rel=1e-3)
    coding = coding_s(resolved, study.catalog, tokens)
    assert coding is not None
    assert np.asarray(coding)[:, 2] == pytest.approx([0.8192, 0.8192], rel=1e-5)
    back = np.asarray(kv_transfer_s(resolved, study.catalog, tokens, back=True))
    assert back[2] == pytest.approx(1.6384 + (0.4096 + wire) / 80, rel=1e-3)
    assert study.catalog.transfers is not None and study.catalog.transfers.encode_byte_s is not None
    plain = make_study(**base, kv_transfer=ways[:1])
    assert plain.catalog.transfers is not None and plain.catalog.transfers.encode_byte_s is None
    resolved = resolve(plain.space.deployment(np.arange(1)), plain.catalog)
    assert np.asarray(kv_transfer_s(resolved, plain.catalog, tokens[:1]))[0] == pytest.approx(found[1], rel=1e-4)
    assert coding_s(resolved, plain.catalog, tokens[:1]) is None


def test_a_deployment_file_keeps_its_way(split, tmp_path):
    row = split.space.frame(np.array([2])).iloc[0].to_dict() | {"cost_per_hour_usd": 1.0, "slo_attainment": 1.0}
    path = tmp_path / "one.yaml"
    path.write_text(deployment_yaml(split, row), encoding="utf-8")
    read = read_deployment(str(path)).study
    assert choices(read.space.frame(np.array([0])).iloc[0].to_dict())["kv_transfer"] == "half"
    resolved = resolve(read.space.deployment(np.array([0])), read.catalog)
    assert float(performance(resolved, read.workload, read.catalog).pools.moved.link_s[0]) > 0.0


def test_simulated_beside_the_model(make_study):
    """Times to the first token and utilizations over a slow link, by the model and played forward."""
    study = make_study(
        topologies="pd", accelerators="h100-sxm", tensor_parallel=8, pipeline_parallel=1, max_batch=64,
        token_budget=8192, weights="fp8", kv="fp8", replicas=4, routing="affinity",
        kv_transfer=[
            "full", "layer-wise", "returning", {"like": "layer-wise", "compression": 4}, "missing-blocks",
            "conditional", {"like": "conditional", "local_tokens": 1000, "returns": True},
            {"like": "compressed", "encode_gbs": 4, "decode_gbs": 8},
        ],
        links=[{"like": "ib-ndr-400", "name": "slow", "gbs": 6}],
    )  # fmt: skip
    for ready in study.simulator().ready(np.arange(8)):
        seen = ready.simulate(6000, 1)
        assert np.mean(seen.latencies()["ttft_s"]) == pytest.approx(ready["ttft_mean_s"], rel=0.06)
        assert seen.utilization("link") == pytest.approx(ready["utilization_link"], rel=0.08, abs=0.002)
        assert seen.utilization("prefill") == pytest.approx(ready["utilization_prefill"], rel=0.06, abs=0.005)
        steps = seen.calls["output"][seen.measured] - 1.0
        assert np.average(seen.latencies()["tpot_s"], weights=steps) == pytest.approx(ready["tpot_mean_s"], rel=0.03)


def test_launch_files_say_what_the_engine_lacks(make_study):
    assert lacking("vllm", "pd", [], "bf16", transfers=transfer_way("layer-wise").asks)
    assert not lacking("vllm", "pd", [], "bf16", transfers=transfer_way("full").asks)
    study = make_study("limits.deployable=today", topologies="pd", accelerators="h100-sxm", kv_transfer=WAYS[:2])
    assert {study.names.transfers[int(k)].id for f in study.space.families for k in f.kv_transfer} == {"full"}
