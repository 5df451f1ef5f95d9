"""Numbered spaces: every candidate once, and the same candidate in arrays, columns and names."""

import dataclasses

import numpy as np
import pytest

from breakeven.models.inputs import InputError
from breakeven.models.topology import STAGES
from breakeven.spaces.space import POOL_FIELDS, ROUTING, why_invalid
from breakeven.studies.deployment_file import choices, deployment_yaml, read_deployment


@pytest.fixture(scope="module")
def some(study, random_ids):
    edges = np.concatenate([study.space.offsets[:-1], study.space.offsets[1:] - 1])
    return np.concatenate([edges, random_ids(study, 300, 7)])


def test_size_is_the_product_of_the_choices(study):
    """5 accelerators x 4 TP x 2 PP x 6 replicas x 3 batches x 2 budgets x 2 weights; times KV, link, routing."""
    pool = 5 * 4 * 2 * 6 * 2
    joint = pool * 3 * 2 * 2 * 2  # batches, budgets, KV, routing: a shared pool needs no link
    split = (pool * 2) * (pool * 3) * 2 * 2 * 2  # prefill has no batch, decode no budget
    assert [family.size for family in study.space.families] == [joint, joint, split]
    assert study.space.size == 2 * joint + split


def test_no_candidate_comes_twice(make_study):
    small = make_study(accelerators=["h100-sxm", "l40s"], replicas=[1, 2], weights="fp8", kv="fp8", max_batch=64)
    ids = np.arange(small.space.size)
    rows = small.space.frame(ids).drop(columns="candidate")
    assert len(rows) == small.space.size and not rows.duplicated().any()


def test_mixed_radix_round_trip(study, some):
    """The digits of a number name it again."""
    families = study.space.family(some)
    for f, family in enumerate(study.space.families):
        here = some[families == f]
        digits = family.digits(here - study.space.offsets[f])
        assert np.array_equal(np.ravel_multi_index(digits, family.radices) + study.space.offsets[f], here)


def test_columns_frame_and_deployment_agree(study, some):
    columns, frame, deployment = study.space.columns(some), study.space.frame(some), study.space.deployment(some)
    assert frame["candidate"].tolist() == some.tolist()
    for stage in STAGES:
        phase, arrays = stage.split("_")[0].replace("encode", "prefill"), getattr(deployment, stage)
        for name in set(study.space.pool_fields) - {"expert_parallel"}:
            assert np.array_equal(np.asarray(getattr(arrays, name)), columns[f"{phase}_{name}"])
        for name in ("tensor_parallel", "pipeline_parallel", "replicas", "max_batch", "token_budget"):
            assert np.array_equal(np.asarray(getattr(arrays, name)), frame[f"{phase}_{name}"])
        ids = np.array(study.names.accelerator_ids)
        assert (ids[np.asarray(arrays.accelerator)] == frame[f"{phase}_accelerator"]).all()
        assert (np.array(study.names.weights)[np.asarray(arrays.weights)] == frame[f"{phase}_weights"]).all()
        topologies = [study.space.families[f].topology for f in columns["family"]]
        assert [t.labels[STAGES.index(stage)] for t in topologies] == np.asarray(arrays.pool).tolist()
        assert [float(t.chunked) for t in topologies] == np.asarray(arrays.chunked).tolist()
    assert (np.array(study.names.kv)[np.asarray(deployment.kv)] == frame["kv"]).all()
    assert (np.array(ROUTING)[np.asarray(deployment.routing).astype(int)] == frame["routing"]).all()


def test_stages_of_a_shared_pool_repeat_its_choices(study, some):
    columns = study.space.columns(some)
    joint = columns["family"] < 2
    for name in POOL_FIELDS:
        assert np.array_equal(columns[f"prefill_{name}"][joint], columns[f"decode_{name}"][joint])


def test_a_link_is_named_only_where_pools_are_apart(study, some):
    frame = study.space.frame(some)
    assert ((frame["link"] != "") == (frame["topology"] == "pd")).all()


def test_blocks_cover_every_id_once(study):
    small = study.space
    blocks = list(small.blocks(1_000_003))
    assert np.array_equal(np.concatenate(blocks), np.arange(small.size))
    assert max(len(block) for block in blocks) == 1_000_003


def test_invalid_sharding_is_left_out(make_study):
    """TP must divide the heads and stay in a node; experts must divide over whole ranks."""
    dense = make_study(tensor_parallel=[1, 3, 8, 16], topologies="colocated")
    assert set(np.unique(dense.space.families[0].tables[0]["tensor_parallel"])) == {1, 8}
    moe = make_study(
        "llm=qwen3-30b-a3b", tensor_parallel=[1, 4], data_parallel=[1, 2, 3], expert_parallel=[False, True]
    )
    table = moe.space.families[0].tables[0]
    ranks, whole = table["tensor_parallel"] * table["data_parallel"], table["expert_parallel"] > 0
    assert (128 % ranks[whole] == 0).all() and (ranks[whole] > 1).all() and ranks.max() == 8
    assert (table["data_parallel"][~whole] == 1).all()
    assert why_invalid(table, moe.names, moe.architecture)[0].all()


def test_a_space_without_any_valid_candidate_names_the_rule(make_study):
    with pytest.raises(InputError, match="tensor_parallel divides 64 heads"):
        make_study(tensor_parallel=[3, 5])


def test_padding_and_order_change_no_candidate(study, some):
    """A candidate is the same alone and in any batch."""
    batch = study.space.deployment(some[::-1])
    alone = study.space.deployment(some[:1])
    for name in STAGES:
        for field in dataclasses.fields(getattr(alone, name)):
            if field.name == "context_parallel":
                assert getattr(getattr(batch, name), field.name) is None
                continue
            values = getattr(getattr(batch, name), field.name)
            assert values[-1] == getattr(getattr(alone, name), field.name)[0]


def test_pools_of_one_side_have_columns_and_choices_of_their_own(make_study):
    """AFD beside PD: three pools, the feed-forward one of another kind; a row reads back as the same deployment."""
    made = make_study(
        topologies=["pd", "afd"], ffn={"accelerators": ["b200-sxm"], "replicas": [1, 2]}, micro_batches=[2, 3]
    )
    pd, afd = made.space.families
    assert [len(f.tables) for f in (pd, afd)] == [2, 3] and pd.micro_batches.tolist() == [1]
    assert made.space.slots == ("prefill", "decode", "decode_ffn")
    ids = np.array([0, int(made.space.offsets[1]), made.space.size - 1])
    frame, deployment = made.space.frame(ids), made.space.deployment(ids)
    assert frame["decode_ffn_accelerator"].tolist()[1:] == ["b200-sxm"] * 2
    assert frame["micro_batches"].tolist() == [1, 2, 3]
    labels = np.stack([np.asarray(stage.pool) for stage in deployment.stages], 1)
    assert labels.tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 1, 2], [0, 0, 0, 1, 2]]
    assert np.asarray(deployment.decode_ffn.replicas).tolist()[1:] == [1.0, 2.0]


def test_any_topology_is_every_partition_whose_encoder_prefills(make_study):
    made = make_study(topologies="any", tensor_parallel=8, replicas=1, max_batch=64, token_budget=2048)
    assert len(made.space.families) == 16
    assert len({f.topology.labels for f in made.space.families}) == 15


def test_a_row_reads_back_as_the_same_deployment(make_study, tmp_path):
    """Every choice of an AFD candidate, micro-batches too, survives its deployment file."""
    made = make_study(topologies=["pd", "afd", "E PA | PF DF | DA"], micro_batches=[1, 2, 3])
    offsets = made.space.offsets
    for candidate in (int(offsets[0]) + 77, int(offsets[1]) + 123_457, int(offsets[2]) + 98_765, made.space.size - 1):
        row = made.space.frame(np.array([candidate])).iloc[0].to_dict()
        row |= {"cost_per_hour_usd": 1.0, "slo_attainment": 1.0}
        path = tmp_path / "one.yaml"
        path.write_text(deployment_yaml(made, row), encoding="utf-8")
        read = read_deployment(str(path)).study
        assert read.space.size == 1
        assert choices(read.space.frame(np.array([0])).iloc[0].to_dict()) == choices(row)
