"""LLM architectures: parameter counts against the vendors', hand-checked caches, and what bad input says."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breakeven.models.architecture import Architecture, Ffn
from breakeven.models.catalog import table
from breakeven.models.hf_config import from_config, read_config
from breakeven.models.inputs import InputError
from breakeven.models.llm import LLM, llm, llms
from breakeven.models.mixers import Attention, GatedDeltaNet, LatentAttention

DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data"
CONFIGS = sorted((DATA / "hf_configs").glob("*.json"))
UNSUPPORTED = {
    "deepseek_ref",
    "deepseek_v4",
    "kimi_k3",
    "minimax_m3",
    "minimax_m3_vl",
    "nemotron-nas",
    "step3p7",
}
NAMES = sorted(llms())

# Beyond 7 % of the vendor's active count, with or without the input embedding and the encoder
LOOSE_ACTIVE = {"qwen3-next-80b-a3b": 0.19}  # "A3B" rounds 3.56 B down


@pytest.mark.parametrize("name", NAMES)
def test_total_parameters_are_the_vendors_within_one_percent(name: str):
    a = llms()[name]
    assert a.total_parameters == pytest.approx(a.advertised_parameters, rel=0.01)


@pytest.mark.parametrize("name", [n for n in NAMES if llms()[n].advertised_active_parameters])
def test_active_parameters_are_the_vendors(name: str):
    """Vendors count the input embedding and the encoder as active or not: theirs lies between, within 7 %."""
    a = llms()[name]
    advertised, slack = a.advertised_active_parameters or math.nan, LOOSE_ACTIVE.get(name, 0.07)
    most = a.active_parameters + a.embedding_parameters + a.encoder_parameters
    assert a.active_parameters * (1 - slack) <= advertised <= most * (1 + slack)


@pytest.mark.parametrize("name", NAMES)
def test_every_row_has_a_source_and_nothing_unread(name: str):
    a = llms()[name]
    assert a.source
    assert a.as_of
    assert a.source.startswith("config.json of") or "reconstructed" in a.source or a.unverified
    row = table("llms")[name]
    assert from_config(row, name, must_read=row) == a


def test_the_catalogue_is_wide():
    assert len(NAMES) >= 30
    assert {"llama-3.1-70b", "deepseek-r1", "kimi-k2.5", "gpt-oss-120b", "opt-175b"} <= set(NAMES)


def test_llama_70b_by_hand():
    a = llm("llama-3.1-70b")
    attention = 80 * (2 * 8192 * 8192 + 2 * 8192 * 8 * 128)
    assert a.attention_parameters == attention
    assert a.dense_parameters == 80 * 3 * 8192 * 28672 + (2 * 80 + 1) * 8192
    assert a.total_parameters == 70_553_706_496
    assert a.active_parameters == a.total_parameters - 128_256 * 8192
    assert a.kv_elements_per_token == 163_840
    assert a.kv_bytes(1, 2) == 327_680
    assert (a.layers, a.heads, a.kv_heads, a.head_dim, a.experts) == (80, 64, 8, 128, 0)


def test_deepseek_v3_caches_one_latent():
    a = llm("deepseek-v3")
    assert a.kv_elements_per_token == 61 * (512 + 64) == 35_136
    assert (a.kv_heads, a.heads, a.moe_layers, a.experts_active) == (1, 128, 58, 8)
    assert a.native_dtype == "fp8"
    traced = LLM.from_architecture(a)
    assert traced.prefill_flops_per_pair == 61 * 2 * 128 * (192 + 128)
    assert traced.decode_flops_per_pair == 61 * 2 * 128 * (576 + 512)


def test_sparse_attention_keeps_index_keys_beside_the_latent():
    a, traced = llm("deepseek-v3.2"), LLM.from_architecture(llm("deepseek-v3.2"))
    assert (a.kv_elements_per_token, a.index_elements_per_token) == (35_136, 61 * 128)
    assert traced.sparse_topk == 2048
    assert traced.index_flops_per_pair == 61 * 2 * 64 * 128
    assert traced.prefill_flops_per_pair == traced.decode_flops_per_pair
    assert LLM.from_architecture(llm("deepseek-v3")).sparse_topk == math.inf


def test_shared_index_layers_have_no_indexer():
    row = table("llms")["glm-5"]
    types = ["full"] + ["shared"] * 77
    shared = from_config({**row, "indexer_types": types}, "shared")
    assert shared.index_elements_per_token == 128
    assert shared.kv_elements_per_token == llm("glm-5").kv_elements_per_token
    assert shared.attention_parameters < llm("glm-5").attention_parameters


def test_gpt_oss_alternates_windows():
    a = llm("gpt-oss-120b")
    assert (a.full_layers, a.window_layers, a.window_tokens) == (18, 18, 128)
    assert a.kv_elements_per_token == a.window_kv_elements_per_token == 18 * 2 * 8 * 64
    assert a.kv_bytes(1000, 1) == 18_432 * 1000 + 18_432 * 128
    assert a.kv_bytes(100, 1) == 2 * 18_432 * 100
    assert a.native_dtype == "fp4-experts"


def test_linear_layers_keep_a_state():
    a = llm("qwen3-next-80b-a3b")
    state = 32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128)
    assert (a.full_layers, a.linear_layers) == (12, 36)
    assert a.state_elements == 36 * state
    assert a.kv_bytes(0, 2) == 2 * a.state_elements
    assert LLM.from_architecture(a).mla == 1.0


def test_layers_of_different_shapes_are_told_apart():
    a = llm("gemma-4-26b-a4b")
    assert a.kv_elements_per_token == 5 * 2 * 2 * 512
    assert a.window_kv_elements_per_token == 25 * 2 * 8 * 256
    assert (a.kv_heads, a.head_dim, a.shardable_heads) == (2, 512, 16)


def test_tied_embeddings_are_stored_once_and_read_each_step():
    a = llm("gemma-3-27b")
    assert (a.embedding_parameters, a.head_parameters) == (0, 262_208 * 5376)
    assert llm("opt-175b").embedding_parameters == 2050 * 12_288


def test_stored_parts_make_the_total():
    for a in llms().values():
        parts = a.attention_parameters + a.dense_parameters + a.expert_parameters
        ends = a.head_parameters + a.embedding_parameters + a.encoder_parameters
        assert a.total_parameters == parts + ends
        assert a.active_parameters <= a.total_parameters


def test_flavours_by_hand():
    gqa = Attention(layers=1, hidden=10, heads=4, kv_heads=2, head_dim=3, v_head_dim=5)
    assert gqa.parameters == 10 * 12 + 10 * 6 + 10 * 10 + 20 * 10
    assert (gqa.kv_elements, gqa.prefill_flops_per_pair) == (16, 2 * 4 * 8)
    latent = LatentAttention(1, 10, 4, 6, 5, 3, 2, 7)
    assert latent.parameters == 10 * 6 + 6 + 6 * 20 + 10 * 7 + 5 + 5 * 4 * 10 + 28 * 10
    delta = GatedDeltaNet(1, 10, 2, value_heads=4, key_head_dim=3, value_head_dim=5, conv_kernel=4)
    assert delta.state_elements == 4 * 3 * 5 + 3 * (2 * 2 * 3 + 4 * 5)
    ffn = Ffn(1, 10, experts=8, experts_active=2, expert_intermediate=4, shared_intermediate=5)
    assert (ffn.dense_parameters, ffn.expert_parameters) == (3 * 10 * 5 + 80, 120)


def test_traced_view_is_a_pytree_of_floats_that_does_not_recompile():
    traces = []

    @jax.jit
    def weights(model: LLM):
        traces.append(1)
        return model.attention_weights + model.expert_weights

    for name in NAMES:
        view = LLM.from_architecture(llms()[name])
        leaves = jax.tree.leaves(view)
        assert all(isinstance(leaf, float) for leaf in leaves)
        a = llms()[name]
        assert weights(view) == pytest.approx(a.attention_parameters + a.expert_parameters, rel=1e-5)
    assert len(traces) == 1


def test_expert_width_and_cache_shards():
    moe, dense = LLM.from_architecture(llm("mixtral-8x7b")), LLM.from_architecture(llm("llama-2-7b"))
    assert moe.expert_width_weights * 8 * 32 == moe.expert_weights
    assert (dense.experts, dense.expert_weights, dense.kv_shards, dense.mla) == (0, 0, 32, 0)


# Published configuration files


def _reference() -> dict[str, dict[str, str]]:
    path = DATA / "catalog" / "models.csv"
    if not path.exists():
        return {}
    with path.open(encoding="utf-8") as file:
        return {row["hf_config_file"]: row for row in csv.DictReader(file)}


REFERENCE = _reference()
needs_configs = pytest.mark.skipif(not CONFIGS, reason="the folder of published config.json files is absent")


def _model_type(path: Path) -> str:
    return json.loads(path.read_text())["model_type"]


@needs_configs
@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_published_configs(path: Path):
    """Counted within 1 % of the advertised total, or of the computed one where the file lacks the tower."""
    if _model_type(path) in UNSUPPORTED:
        with pytest.raises(InputError, match="model_type"):
            read_config(path)
        return
    a = read_config(path)
    row = REFERENCE.get(path.name)
    if row is not None:
        totals = [float(row[f"total_params_b_{kind}"]) for kind in ("advertised", "computed")]
        assert min(abs(a.total_parameters / 1e9 / total - 1) for total in totals) <= 0.01


@needs_configs
def test_published_caches():
    for name, row in REFERENCE.items():
        path = DATA / "hf_configs" / name
        if _model_type(path) in UNSUPPORTED | {"gemma4"}:  # gemma4: that table stores K = V once
            continue
        a = read_config(path)
        cached = a.kv_elements_per_token + a.index_elements_per_token
        assert cached == int(row["kv_elems_per_token_full"]), name
        assert a.window_kv_elements_per_token == int(row["kv_elems_per_token_in_window"]), name


# What users write


def _write(path: Path, config: Any) -> Path:
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.fixture
def config() -> dict[str, Any]:
    return dict(table("llms")["llama-3.1-8b"])


def test_a_path_a_folder_and_a_name_give_the_same_model(tmp_path: Path, config: dict[str, Any]):
    folder = tmp_path / "my-llama"
    folder.mkdir()
    _write(folder / "config.json", config)
    for spec in ("my-llama", "my-llama/config.json", str(folder)):
        a = llm(spec, base_dir=tmp_path)
        assert a.name == "my-llama"
        assert a.total_parameters == llm("llama-3.1-8b").total_parameters


def test_a_byte_order_mark_is_read_past(tmp_path: Path, config: dict[str, Any]):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(config), encoding="utf-8-sig")
    assert read_config(path).name == "model"


def test_a_variation_changes_what_it_names():
    base, wide = llm("llama-3.1-70b"), llm({"like": "llama-3.1-70b", "name": "deep", "num_hidden_layers": 96})
    assert (wide.name, wide.layers, wide.heads) == ("deep", 96, base.heads)
    assert wide.kv_elements_per_token == base.kv_elements_per_token * 96 // 80
    assert wide.advertised_parameters is None
    assert "varied: num_hidden_layers" in wide.source


def test_a_variation_of_a_file_reaches_into_its_text_config(tmp_path: Path):
    row = dict(table("llms")["qwen3-vl-8b"])
    outer = {key: row.pop(key) for key in ("model_type", "vision_config")}
    path = _write(tmp_path / "vl.json", outer | {"text_config": row})
    a = llm({"like": str(path), "num_hidden_layers": 72})
    assert a.layers == 72
    assert a.encoder_parameters == llm("qwen3-vl-8b").encoder_parameters


def test_a_mapping_in_full(config: dict[str, Any]):
    a = llm({key: config[key] for key in config if not key.endswith("_b")} | {"name": "mine"})
    assert a.total_parameters == llm("llama-3.1-8b").total_parameters


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("llama-3.1-70", "did you mean llama-3.1-70b"),
        ("Llama-3.1-70B", "did you mean llama-3.1-70b"),
        ("no/such/config.json", "no such file"),
        ("x" * 5000, "unknown"),
        ("a\0b", "unknown"),
        ("a/\0b", "no such file"),
        ("", "unknown"),
        (70, "unknown"),
        (None, "unknown"),
        ([], "unknown"),
        ({}, "llm.model_type"),
        ({"like": "llama-3.1-70"}, "llm.like"),
        ({"like": ["llama-3.1-70b"]}, "llm.like"),
        ({"like": "llama-3.1-70b", "name": 3}, "llm.name"),
        ({"like": "llama-3.1-70b", "num_hiden_layers": 3}, "did you mean num_hidden_layers"),
        ({"like": "llama-3.1-70b", 3: 3}, "llm.3"),
        ({"like": "llama-3.1-70b", "num_hidden_layers": "many"}, "llm.num_hidden_layers = 'many'"),
        ({"like": "llama-3.1-70b", "num_hidden_layers": -1}, "from 1 to 10000"),
        ({"like": "llama-3.1-70b", "num_hidden_layers": 2.5}, "whole number"),
        ({"like": "llama-3.1-70b", "hidden_size": 10**400}, "whole number"),
        ({"like": "llama-3.1-70b", "num_key_value_heads": 7}, "divisor of the 64"),
        ({"like": "llama-3.1-70b", "num_attention_heads": 72}, "multiple of the 72"),
        ({"like": "llama-3.1-70b", "model_type": "lama"}, "did you mean llama"),
        ({"like": "llama-3.1-70b", "native_dtype": "fp7"}, "native_dtype"),
        ({"like": "mixtral-8x7b", "num_experts_per_tok": 9}, "from 1 to 8"),
        ({"like": "gemma-4-26b-a4b", "num_kv_shared_layers": 4}, "not supported"),
        ({"like": "nemotron-h-56b", "hybrid_override_pattern": "MX"}, "one of M, *, E, -"),
        ({"like": "nemotron-h-56b", "num_hidden_layers": 100}, "118"),
        ({"like": "qwen3-vl-8b", "vision_config": {"depth": 2}}, "llm.vision_config.hidden_size"),
        (
            {
                "like": "qwen3-vl-8b",
                "vision_config": table("llms")["qwen3-vl-8b"]["vision_config"] | {"deepstack_visual_indexes": True},
            },
            "llm.vision_config.deepstack_visual_indexes = True",
        ),
    ],
)
def test_bad_specs_name_the_field_and_what_is_allowed(spec: Any, message: str):
    with pytest.raises(InputError) as caught:
        llm(spec)
    assert message in str(caught.value)


def test_errors_of_a_file_name_it(tmp_path: Path, config: dict[str, Any]):
    path = _write(tmp_path / "bad.json", config | {"hidden_size": -4096})
    with pytest.raises(InputError) as caught:
        llm(str(path))
    assert str(caught.value) == f"{path}: hidden_size = -4096: a whole number from 1 to 10000000"
    for spec in ({"like": str(path)}, {"like": str(path), "vocab_size": 5}):
        with pytest.raises(InputError, match=r"bad\.json"):
            llm(spec)


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"\xff\xfe{}", b"[" * 100_000, b"9" * 5000, b"not json"])
def test_files_that_are_no_config(tmp_path: Path, content: bytes):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"config\.json"):
        read_config(path)


def test_an_empty_folder_is_no_model(tmp_path: Path):
    with pytest.raises(InputError, match="no such file"):
        read_config(tmp_path)


def test_a_config_cut_short_anywhere_is_an_input_error(tmp_path: Path, config: dict[str, Any]):
    path, text = tmp_path / "cut.json", json.dumps(config).encode()
    for end in range(len(text)):
        path.write_bytes(text[:end])
        with pytest.raises(InputError):
            read_config(path)


@pytest.mark.parametrize(
    ("quantization", "moe", "expected"),
    [
        ({"quant_method": "fp8", "modules_to_not_convert": ["self_attn.k_norm"]}, True, "fp8"),
        ({"quant_algo": "FP8"}, False, "fp8"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn"]}, True, "fp4-experts"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["l.0.self_attn*"]}, False, "mixed"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, False, "fp4"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, True, "mixed"),
        ({"quant_method": "gptq", "bits": 8}, False, "int8"),
        ({"quant_method": "awq", "bits": 4}, False, "int4"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}},
                "ignore": ["re:.*self_attn.*"],
            },
            True,
            "int4-experts",
        ),
    ],
)
def test_how_a_checkpoint_ships(quantization: dict[str, Any], moe: bool, expected: str):
    row = dict(table("llms")["mixtral-8x7b" if moe else "llama-3.1-8b"])
    assert from_config(row | {"quantization_config": quantization}, "x").native_dtype == expected


def test_an_unknown_quantisation_is_an_error_not_a_guess(config: dict[str, Any]):
    with pytest.raises(InputError, match=r"quantization_config\.quant_method"):
        from_config(config | {"quantization_config": {"quant_method": "magic"}}, "x")


def test_an_unknown_family_suggests_close_ones(config: dict[str, Any]):
    with pytest.raises(InputError, match="did you mean qwen3"):
        from_config(config | {"model_type": "qwen3_omni"}, "x")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=600, deadline=None)
@given(data=st.data(), value=JSON)
def test_any_one_field_replaced_gives_a_model_or_an_input_error(data: st.DataObject, value: Any):
    name = data.draw(st.sampled_from(NAMES))
    row = dict(table("llms")[name])
    target, key = row, data.draw(st.sampled_from([*sorted(row), "quantization_config", "text_config"]))
    if key == "vision_config" and data.draw(st.booleans()):
        row[key] = target = dict(row[key])
        key = data.draw(st.sampled_from(sorted(target)))
    target[key] = value
    try:
        a = from_config(row, name)
    except InputError as error:
        assert str(error)
        return
    assert isinstance(a, Architecture)
    assert all(math.isfinite(leaf) for leaf in jax.tree.leaves(LLM.from_architecture(a)) if leaf != math.inf)


FREE_DEPTH = [name for name in NAMES if not any(key.startswith("hybrid") for key in table("llms")[name])]


@settings(max_examples=100, deadline=None)
@given(name=st.sampled_from(FREE_DEPTH), more=st.integers(1, 12))
def test_more_layers_are_more_of_everything(name: str, more: int):
    row = table("llms")[name]
    layers = row["num_hidden_layers"]
    deeper = llm({"like": name, "num_hidden_layers": layers + 12 * more})
    assert deeper.layers == layers + 12 * more
    assert deeper.total_parameters > llms()[name].total_parameters
    assert deeper.kv_bytes(10_000, 2) > llms()[name].kv_bytes(10_000, 2)


@settings(max_examples=100, deadline=None)
@given(name=st.sampled_from(NAMES), tokens=st.integers(0, 10**6))
def test_a_longer_sequence_never_keeps_less(name: str, tokens: int):
    a = llms()[name]
    assert a.kv_bytes(tokens + 1, 1) >= a.kv_bytes(tokens, 1)
    assert a.kv_bytes(tokens, 2) == 2 * a.kv_bytes(tokens, 1)
