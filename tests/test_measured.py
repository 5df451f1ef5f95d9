"""The traps of measured serving points, each on the smallest rows that show it."""

import math
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from breakeven.models.catalog import table
from breakeven.models.inputs import InputError
from breakeven.studies.measured import (
    UNKNOWN_DRAFT,
    UNKNOWN_SIZES,
    UNKNOWN_WORKERS,
    Point,
    accelerator_id,
    accepted_tokens,
    clean,
    digits,
    kv_precision,
    model_id,
    weight_scheme,
)
from breakeven.studies.measured_files import read_points, read_table
from breakeven.studies.measured_layout import Layout
from breakeven.studies.measured_limits import TOO_FAST, compute_share, memory_share, without_impossible

ROW: dict[str, Any] = {
    "id": "2026_04_06_llama_tp4_ep1_1",
    "silicon_data_source": "source_file=2026-04-06.csv; silicon_concurrency=16",
    "backend": "vllm",
    "model_path": "meta-llama/Llama-3.1-70B",
    "system": "h200_sxm",
    "precision": "fp8",
    "mode": "agg",
    "isl": 1000.0,
    "osl": 500.0,
    "batch_size": 16.0,
    "tp_size": 4.0,
    "pp_size": 1.0,
    "attention_dp_size": 1.0,
    "moe_tp_size": 4.0,
    "moe_ep_size": 1.0,
    "silicon_ttft_ms": 200.0,
    "silicon_tpot_ms": 10.0,
}
DEEPSEEK = {"model_path": "deepseek-ai/DeepSeek-R1", "backend": "trtllm", "system": "b200_sxm"}
DUMP = "db-dump/2026-04-27; config_id=1; silicon_concurrency=16"


def points(*changes: dict[str, Any], labels: Any = None) -> list[Point]:
    """Points of copies of `ROW` with these changes."""
    return clean(pd.DataFrame([ROW | change for change in changes]), labels)


def one(**changes: Any) -> Point:
    return points(changes)[0]


def layout(**changes: Any) -> Layout:
    return one(**changes).layouts[0]


def test_a_plain_row_is_a_point():
    point = one()
    assert (point.model, point.accelerator, point.engine) == ("llama-3.1-70b", "h200-sxm", "vllm")
    assert point.layouts == (Layout(4, 1, 1),)
    assert (point.concurrency, point.ttft_ms, point.tpot_ms, point.excluded) == (16.0, 200.0, 10.0, "")


def test_lengths_of_inferencex_are_nine_tenths_of_nominal_and_others_as_said():
    assert (one().prompt_tokens, one().output_tokens) == (900.0, 450.0)
    internal = one(silicon_data_source="internal benchmark csv (upstream)")
    assert (internal.prompt_tokens, internal.output_tokens) == (1000.0, 500.0)


def test_copies_of_a_run_are_one_measurement_with_the_labels_of_all():
    """A rounded copy from a less trusted source, with another layout; the dump gives the concurrency."""
    first, second = points(
        {"id": "a_tp4_0_ep1_0_1", "silicon_data_source": "source_file=2026-03-25.csv", "batch_size": math.nan},
        {"id": "dump_cfg1", "silicon_data_source": DUMP, "silicon_ttft_ms": 200.04, "silicon_tpot_ms": 10.004},
    )
    assert first.measurement == second.measurement == "dump_cfg1"
    assert (first.id, second.id) == ("a_tp4_0_ep1_0_1", "dump_cfg1")
    assert first.concurrency == 16.0 and first.layouts == second.layouts == (Layout(4, 1, 1),)


def test_other_lengths_or_times_are_other_measurements():
    assert len({p.measurement for p in points({"id": "a"}, {"id": "b", "osl": 501.0}, {"id": "c", "isl": 999.0})}) == 3
    assert len({p.measurement for p in points({"id": "a"}, {"id": "b", "silicon_tpot_ms": 10.1})}) == 2


SIZES = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")


@pytest.mark.parametrize(
    ("backend", "sizes", "expected"),
    [
        ("trtllm", (64, 1, 8, 8), Layout(8, 1, 8)),  # tp_size counted tensor times expert ranks
        ("sglang", (16, 1, 4, 4), Layout(4, 1, 4)),
        ("trtllm", (1, 64, 8, 8), Layout(1, 8, 8)),  # and so did attention_dp_size
        ("trtllm", (1, 16, 4, 4), Layout(1, 4, 4)),
        ("trtllm", (1, 8, 1, 8), Layout(1, 8, 8)),
        ("vllm", (4, 4, 1, 16), Layout(4, 1, 4)),  # the flag is false in vLLM's rows
        ("vllm", (2, 2, 1, 4), Layout(2, 1, 2)),
        ("trtllm", (8, 1, 8, 1), Layout(8, 1, 1)),
        ("trtllm", (8, 1, 2, 4), Layout(8, 1, 4)),
        ("vllm", (2, math.nan, 4, 1), Layout(2, 2, 1)),  # attention ranks = expert ranks
        ("vllm", (4, math.nan, 1, 1), Layout(4, 1, 1)),
    ],
)
def test_layout_from_sizes_alone(backend, sizes, expected):
    assert layout(id="cfg1", backend=backend, **dict(zip(SIZES, sizes, strict=True))) == expected


def test_the_id_tells_the_layout_where_it_has_one():
    sizes = dict(zip(SIZES, (64, 1, 8, 8), strict=True))
    assert layout(id="x_tp8_0_ep8_0_7", backend="trtllm", **sizes) == Layout(8, 1, 8)
    assert layout(id="x_tp4_epnone_7") == Layout(4, 1, 1)


def test_contradicting_sizes_exclude():
    point = one(id="cfg1", backend="trtllm", **dict(zip(SIZES, (4, 1, 1, 3), strict=True)))
    assert point.excluded == "layout: attention and expert ranks do not agree"


def test_several_nodes_labelled_agg_are_excluded():
    assert one(id="x_tp36_ep1_1", tp_size=36.0).excluded == "a deployment over several nodes labelled agg"


def test_speculation_is_none_mtp_or_unknown():
    export, dump = {"id": "x_tp8_ep1_1", **DEEPSEEK}, {"id": "d", "silicon_data_source": DUMP, **DEEPSEEK}
    v3 = {"id": "v", **DEEPSEEK, "model_path": "deepseek-ai/DeepSeek-V3"}
    assert points(export)[0].excluded == UNKNOWN_DRAFT
    assert points(dump)[0].excluded == points(v3)[0].excluded == ""
    assert [p.excluded for p in points(export, dump)] == ["", ""]  # copies share the label
    key = "200", "10"
    assert points(export, labels={key: {"spec_decode": "mtp"}})[0].excluded == ""
    assert points(export, labels={key: {"spec_decode": "none"}})[0].excluded == ""
    assert one().excluded == ""  # no draft head, nothing to doubt


def pools(**changes: Any) -> dict[str, Any]:
    sizes = {"tp_size": 1.0, "pp_size": 1.0, "attention_dp_size": 4.0, "moe_tp_size": 1.0, "moe_ep_size": 4.0}
    phases = {f"{phase}_{name}": value for phase in ("prefill", "decode") for name, value in sizes.items()}
    both = {"id": "d", "silicon_data_source": DUMP, "mode": "disagg", **DEEPSEEK, **phases, **changes}
    return {k: v for k, v in both.items() if k != "tp_size"}


def test_split_deployments_need_worker_counts():
    known = points(pools(prefill_num_workers=1.0, decode_num_workers=3.0))[0]
    assert known.layouts == (Layout(1, 4, 4, 1, 1.0), Layout(1, 4, 4, 1, 3.0)) and known.excluded == ""
    assert points(pools())[0].excluded == UNKNOWN_WORKERS
    label = {f"{phase}_par": "tp8/ep8/dpattn=0/workers=2" for phase in ("prefill", "decode")}
    named = points(pools(), labels={("200", "10"): label | {"spec_decode": "none"}})[0]
    assert named.layouts == (Layout(8, 1, 8, 1, 2.0),) * 2 and named.excluded == ""


def test_concurrency_is_the_clients_or_the_batch_of_all_ranks():
    assert one(silicon_data_source="source_file=2026-04-06.csv; silicon_concurrency=99").concurrency == 99.0
    plain = {"silicon_data_source": "internal", "batch_size": 8.0, "id": "c", "backend": "trtllm"}
    assert one(**plain, **dict(zip(SIZES, (1, 4, 1, 4), strict=True))).concurrency == 32.0
    assert one(silicon_data_source="internal", batch_size=math.nan).excluded == "concurrency is not given"


def test_precision_of_each_tensor():
    assert weight_scheme("qwen3-32b", "") == "bf16" and weight_scheme("llama-3.1-70b", "fp4") == "fp4"
    assert weight_scheme("gpt-oss-120b", "fp4") == "fp4-experts" and weight_scheme("deepseek-r1", "fp4") == "fp4-output"
    assert weight_scheme("deepseek-r1", "fp4", "nvidia/DeepSeek-R1-NVFP4") == "fp4-ffn"
    assert kv_precision("qwen3-32b", "vllm", "h100-sxm", "") == "bf16"
    assert kv_precision("qwen3-32b", "tensorrt-llm", "h100-sxm", "fp8") == "fp8"
    assert kv_precision("llama-3.1-70b", "vllm", "h200-sxm", "fp8") == "fp8"
    assert kv_precision("gpt-oss-120b", "vllm", "b200-sxm", "fp4") == "fp8"
    assert kv_precision("gpt-oss-120b", "vllm", "h200-sxm", "fp4") == "bf16"


def test_names():
    assert model_id("nvidia/DeepSeek-V3.1-NVFP4") == "deepseek-v3.1"
    assert model_id("deepseek-ai/DeepSeek-V3") == model_id("deepseek-ai/DeepSeek-R1") == "deepseek-r1"
    assert model_id("Qwen/Qwen3-235B-A22B-FP8") == "qwen3-235b-a22b" and model_id("acme/none") == ""
    assert accelerator_id("gb200") == "gb200-nvl72" and accelerator_id("abacus") == ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_path": "acme/none"}, "model acme/none is not in the catalogue"),
        ({"system": "abacus"}, "system abacus is not in the catalogue"),
        ({"backend": "hand"}, "backend hand is not an engine of the catalogue"),
        ({"mode": "both"}, "mode both is neither agg nor disagg"),
        ({"precision": "fp6"}, "precision fp6 is not known"),
    ],
)
def test_what_is_unknown_is_excluded_with_its_name(change, reason):
    change = {**change, **({f"{p}_tp_size": 1.0 for p in ("prefill", "decode")} if change.get("mode") else {})}
    assert one(**change).excluded == reason


def test_a_series_that_outpaces_the_kernels_is_excluded():
    """16 requests of 1,000 + 500 tokens in 0.2 s each: 70e9 x 2 x 1500 x 80 = 1.7e16 FLOP/s on 7.9e15 of four H200."""
    internal = {"silicon_data_source": "internal", "id": "c"}
    fast, slow = points({**internal, "silicon_ttft_ms": 100.0, "silicon_tpot_ms": 0.2}, {**internal, "id": "s"})
    assert compute_share(fast) == pytest.approx(16 / 0.1998 * 2 * 68.5e9 * 1500 / (4 * 1.979e15), rel=0.02)
    assert compute_share(slow) < 0.2
    assert [p.excluded for p in without_impossible([fast, slow])] == [TOO_FAST, TOO_FAST]
    assert without_impossible([slow]) == [slow]


def test_a_series_that_outpaces_the_memory_is_excluded():
    """448 calls of 4,500 tokens x 163,840 elements: 330 GB every 8.7 ms, from two engines of four H200."""
    pools = {"prefill_num_workers": 8.0, "prefill_tp_size": 1.0, "decode_num_workers": 2.0, "decode_tp_size": 4.0}
    pools |= {"mode": "disagg", "decode_batch_size": 224.0, "silicon_data_source": "internal", "id": "c"}
    fast = one(**pools, isl=4000.0, osl=1000.0, silicon_ttft_ms=1.0, silicon_tpot_ms=8.7)
    assert memory_share(fast) == pytest.approx(448 * 4500 * 163840 / (8 * 4.8e12 * 8.7e-3), rel=0.01)
    assert memory_share(fast) < 1.0 and memory_share(replace(fast, tpot_ms=4.0)) > 1.0
    assert without_impossible([replace(fast, tpot_ms=4.0)])[0].excluded == TOO_FAST


@pytest.mark.parametrize(
    ("text", "named"),
    [("", "MEASURED.csv"), ("id,backend\na,b\n", "model_path"), (None, "isl")],
)
def test_bad_files_are_named(tmp_path, text, named):
    path = tmp_path / "bad.csv"
    path.write_text(text if text is not None else pd.DataFrame([ROW | {"isl": "long"}]).to_csv(index=False))
    with pytest.raises(InputError, match=named):
        read_table(path)


def test_rows_keep_their_order_and_number(tmp_path):
    path = tmp_path / "m.csv"
    pd.DataFrame([ROW | {"id": f"r{i}", "silicon_ttft_ms": 100.0 + i % 3} for i in range(7)]).to_csv(path, index=False)
    found = read_points(path)
    assert [p.id for p in found] == [f"r{i}" for i in range(7)] and len({p.measurement for p in found}) == 3


def test_accepted_tokens_fall_with_concurrency():
    """1 + a + a^2 + a^3 tokens of three drafts where one call runs, never less than the token of any step."""
    found, a = [accepted_tokens(n) for n in (1.0, 16.0, 256.0, 1e20)], table("calibration")["speculation"]["acceptance"]
    assert found[0] == pytest.approx(1.0 + a + a**2 + a**3)
    assert found == sorted(found, reverse=True) and found[-1] == 1.0
    assert [accepted_tokens(1.0, n) for n in (0, 1)] == pytest.approx([1.0, 1.0 + a])
    export = DEEPSEEK | {"silicon_tpot_ms": 5.0}
    drafted = points(export, labels={digits(200.0, 5.0): {"spec_decode": "mtp"}})[0]
    assert drafted.accepted == pytest.approx(accepted_tokens(16.0)) and one().accepted == 1.0


@pytest.mark.parametrize(
    ("changes", "stack"),
    [
        ({}, "vllm"),
        ({"backend": "sglang", "backend_version": "0.5.9"}, "sglang"),
        ({"backend": "sglang", "backend_version": "0.5.6.post2"}, "sglang-2025"),
        ({"backend": "sglang", "silicon_data_source": f"{DUMP}; measured=2025-11-20"}, "sglang-2025"),
        ({"backend": "trtllm"}, "tensorrt-llm-stream20"),
        ({"backend": "trtllm", "isl": 8192.0}, "tensorrt-llm"),
        (DEEPSEEK, "tensorrt-llm-stream10"),
        ({"backend_version": "0.12.0", "model_path": "Qwen/Qwen3-235B-A22B-FP8"}, "vllm-eager"),
        ({"backend_version": "0.12.0"}, "vllm"),
    ],
)
def test_eras_and_modes_of_an_engine(changes, stack):
    assert one(**changes).stack == stack


def test_engines_of_one_accelerator_are_a_default_where_no_expert_model_fits():
    pools = {
        f"{phase}_{name}": 1.0
        for phase in ("prefill", "decode")
        for name in ("tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size", "num_workers")
    }
    export = DEEPSEEK | pools | {"mode": "disagg", "silicon_data_source": DUMP}
    assert one(**export).excluded == UNKNOWN_SIZES
    known = export | {"id": "b", "decode_attention_dp_size": 8.0, "prefill_attention_dp_size": 8.0}
    merged = points(export, known)  # copies of one run: the one that counted its ranks is believed
    assert {p.layouts[1].data_parallel for p in merged} == {8} and not merged[0].excluded
