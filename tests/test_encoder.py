"""Images in a prompt: patches and tokens, the encoder's seconds, where they are encoded, and what that changes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from breakeven.models.encoder import encode_load, encode_time, encoder_coefficients, encoding
from breakeven.models.inputs import InputError
from breakeven.models.llm import LLM, llms
from breakeven.models.media import media, seen_by
from breakeven.models.memory import pool_weights_bytes
from breakeven.models.serving import evaluate
from breakeven.models.sessions import sample_sessions, session_spec
from breakeven.models.tables import resolve
from breakeven.models.topology import STAGES, all_partitions
from breakeven.models.workload import Images, PrefillNodes
from breakeven.optimizer.evaluator import SMALL
from breakeven.studies.deployment_file import deployment_yaml

QWEN = llms()["qwen3-vl-8b"]


def seen(llm: str, **fields: Any):
    found = media(fields, "workload")
    assert found is not None
    return seen_by(found, llms()[llm].encoder)


@pytest.mark.parametrize(
    ("llm", "size", "patches", "tokens"),
    [
        ("qwen2.5-vl-7b", (1280, 800), 5336, 1334),  # 46 x 29 groups of 28 pixels
        ("qwen3-vl-8b", (1280, 800), 4000, 1000),  # 40 x 25 groups of 32
        ("gemma-3-27b", (1280, 800), 4096, 256),  # scaled to 896 x 896, pooled 4 x 4
    ],
)
def test_patches_and_tokens_of_an_image(llm: str, size: tuple[int, int], patches: int, tokens: int):
    found = seen(llm, images_per_call=1, image_size=size)
    assert (found.patches, found.tokens) == (patches, tokens)
    assert seen(llm, images_per_call=1, image_size=size, visual_tokens_kept=0.5).tokens == tokens / 2
    fixed = seen(llm, images_per_call=1, image_size=size, tokens_per_image=64)
    assert (fixed.patches, fixed.tokens) == (patches, 64)


def test_video_and_audio_are_items_too():
    """10 s of video at 2 frames/s, two at a time; 60 s of audio are two windows of 1,500 positions, 25 tokens/s."""
    video = seen("qwen3-vl-8b", video_s_per_call=10, image_size=(640, 640))
    assert video.items.mean() == pytest.approx(10.0) and video.patches == 1600
    audio = seen("qwen3-vl-8b", audio_s_per_call=60)
    assert (audio.items.mean(), audio.patches, audio.tokens) == (2.0, 1500.0, 750.0)
    with pytest.raises(InputError, match="one kind of media"):
        media({"images_per_call": 1, "audio_s_per_call": 1}, "workload")
    with pytest.raises(InputError, match="image_size"):
        seen("qwen3-vl-8b", images_per_call=1)
    with pytest.raises(InputError, match="no vision encoder"):
        seen("llama-3.1-70b", images_per_call=1, image_size=(100, 100))


def test_images_stay_in_the_prompt_until_it_is_compacted():
    """A screenshot a call: the k-th prompt holds k, and a compaction to half of the context about half of them."""
    sample = sample_sessions(session_spec("gui-agent"), 200, 0, 1e5)
    assert sample.images is not None and sample.images_held is not None and (sample.images == 1.0).all()
    never = sample.session[sample.compacted]
    plain = ~np.isin(sample.session, never)
    assert sample.images_held[plain] == pytest.approx(sample.index[plain] + 1.0)
    own = (sample.prompt_tokens - sample.shared_tokens)[sample.compacted]
    assert sample.images_held[sample.compacted] == pytest.approx(own / (1334.0 + 20.0 + 180.0), rel=0.25)
    assert (sample.images_found[sample.compacted] == sample.images_held[sample.compacted]).all()
    some = sample_sessions(session_spec({"preset": "gui-agent", "images_per_call": 0.3}), 400, 0, 1e5)
    assert some.images is not None and some.images.mean() == pytest.approx(0.3, abs=0.02)


def test_seconds_of_an_image_are_a_roofline(one):
    """4,000 patches of Qwen3-VL's tower: 2 FLOPs a weight and patch and 4 h a pair, at the shares of the curves."""
    resolved, made = one("llm=qwen3-vl-8b", accelerators="h100-sxm", tensor_parallel=1)
    llm: LLM = made.catalog.llm
    side = encoder_coefficients(resolved.encode, llm, made.catalog.engine)
    image = Images(*(jnp.float32(x) for x in (4000.0, 1000.0, 1.0, 0.0)))
    alone, two = (
        encode_time(side, llm, image, jnp.array([n]), jnp.ones(1), jnp.ones(1)).total_s[0] for n in (1.0, 2.0)
    )
    hw, tower = resolved.encode.hardware, QWEN.encoder
    assert tower is not None
    peak, curve = float(hw.bf16_flops_per_s[0]), hw.kernels["vision_attention_bf16"]
    products = 2.0 * 4000.0 * (tower.attention_parameters + tower.patch_parameters)
    products /= float(hw.kernels["gemm_bf16"]["share"][0]) * peak
    scores = 4.0 * tower.hidden * tower.layers * 4000.0 * (4000.0 + float(curve["half_keys"][0]))
    scores *= 1.0 + float(curve["softmax_flops"][0]) / (4.0 * tower.hidden / tower.heads)
    scores /= float(curve["share"][0]) * peak
    assert float(alone) == pytest.approx(products + scores, rel=0.25)  # launches and small kernels beside them
    assert float(alone) > products + scores and float(two) == pytest.approx(2.0 * float(alone), rel=1e-5)
    assert 0.005 < float(alone) < 0.03


# Whole deployments ---------------------------------------------------------------------------------------------------

SCREENS = {"preset": "gui-agent", "tokens_per_image": None, "image_size": [1280, 800]}


@pytest.fixture(scope="module")
def made(make_study):
    """One pool, E | rest and E | P | D, engines alike; every stage apart is there so that all compile as one."""
    return make_study(
        "llm=qwen3-vl-8b",
        "load.sessions_per_second=0.05",
        topologies=["colocated", "e-colocated", "pd", "epd", "E | PA | PF | DA | DF"],
        accelerators="h100-sxm",
        tensor_parallel=1,
        pipeline_parallel=1,
        max_batch=64,
        token_budget=8192,
        replicas=4,
        weights="bf16",
        kv="bf16",
        links="nvlink4",
        encode={"max_batch": 1},
    )


@pytest.fixture(scope="module")
def tried(made, make_study):
    """Outcomes of the first candidate of each topology under a workload, and its study."""

    def run(workload: Any, **changes: Any):
        data = {**made.data, "workload": workload, **changes}
        study = type(made).parse(data, "test")
        ids = np.resize(study.space.offsets[:-1], SMALL)
        return evaluate(study.space.deployment(ids), study.workload, study.slo, study.catalog), study

    return run


def column(outcome: Any, name: str) -> np.ndarray:
    return np.asarray(getattr(outcome, name), np.float64)[:5]


def test_kept_features_cost_nothing_and_reuse_never_costs(tried):
    """With every feature kept nothing is encoded: an encoder apart then changes nothing but what it costs."""
    found = [tried(SCREENS | {"image_reuse": r})[0] for r in (0.0, 0.5, 1.0)]
    times = [column(outcome, "ttft_mean_s") for outcome in found]
    assert (times[0] > times[1]).all() and (times[1] > times[2]).all()
    for name in ("ttft_mean_s", "tpot_mean_s", "call_mean_s", "slo_attainment", "utilization_prefill"):
        one = column(found[2], name)
        assert one[[1, 3]] == pytest.approx(one[[0, 2]], rel=1e-6), name
    assert not column(found[2], "utilization_encode").any()


def test_an_encoder_apart_adds_a_queue_and_a_link_and_takes_work_away(tried):
    outcome, _ = tried(SCREENS)
    prefill, encode = column(outcome, "utilization_prefill"), column(outcome, "utilization_encode")
    assert encode[[0, 2]].tolist() == [0.0, 0.0] and (encode[[1, 3, 4]] > 0.003).all()
    assert prefill[1] == pytest.approx(prefill[0] - encode[1], rel=0.02)  # engines alike, as many of both
    assert prefill[3] == pytest.approx(prefill[2] - encode[3], rel=0.02)
    ttft = column(outcome, "ttft_mean_s")
    assert ttft[1] == pytest.approx(ttft[0], rel=0.05) and ttft[3] == pytest.approx(ttft[2], rel=0.05)
    accelerators = column(outcome, "accelerators")
    assert accelerators.tolist() == [4.0, 8.0, 8.0, 12.0, 20.0]
    busy, _ = tried(SCREENS, load={"sessions_per_second": 30.0})
    assert (np.asarray(busy.violations.encode)[[1, 3]] > 0.0).all()


def test_every_partition_is_evaluated_with_images(made):
    """Numbers everywhere, and what the encoder's pool shares decides where its seconds stand."""
    study = type(made).parse({**made.data, "workload": SCREENS}, "test")
    base = study.space.deployment(np.resize(study.space.offsets[-2:-1], SMALL))
    labels = np.resize(np.array(all_partitions()), (SMALL, 5))
    stages = {
        name: dataclasses.replace(getattr(base, name), pool=jnp.asarray(labels[:, i], jnp.int32))
        for i, name in enumerate(STAGES)
    }
    deployment = dataclasses.replace(base, **stages)
    outcome = evaluate(deployment, study.workload, study.slo, study.catalog)
    for name, value in outcome._asdict().items():
        if name not in ("violations", "doubts"):
            assert np.isfinite(np.asarray(value, float)).all(), name
    own = (np.asarray(outcome.utilization_encode) > 0.0)[:52]
    prefills = (labels[:52, 0] == labels[:52, 1]) | (labels[:52, 0] == labels[:52, 2])
    assert (own == ~prefills).all()


def test_times_have_derivatives_by_the_encoder_where_it_is_apart_and_where_it_is_not(made):
    study = type(made).parse({**made.data, "workload": SCREENS}, "test")
    resolved = resolve(study.space.deployment(study.space.offsets[:-1]), study.catalog)
    workload, one = study.workload, jnp.ones(5)

    def time(factor: jax.Array) -> jax.Array:
        hw = dataclasses.replace(
            resolved.encode.hardware, bf16_flops_per_s=resolved.encode.hardware.bf16_flops_per_s * factor
        )
        moved = dataclasses.replace(resolved, encode=dataclasses.replace(resolved.encode, hardware=hw))
        found = encoding(moved, workload, study.catalog, *(_wide(x) for x in (workload.resident, workload.missed)))
        assert found is not None
        waits = encode_load(found, 50.0 * one, 0.1 * one, 0.01 * one, one).waits
        return sum(wait.average_s + wait.variance_s2 for wait in waits) + found.seconds.sum(-1)

    slope = np.asarray(jax.jacfwd(time)(jnp.float32(1.0))), np.asarray(jax.jacrev(time)(jnp.float32(1.0)))
    assert (slope[0] < 0.0).all() and slope[1] == pytest.approx(slope[0], rel=1e-3)


def _wide(nodes: PrefillNodes) -> PrefillNodes:
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (5, *leaf.shape)), nodes)


def test_text_alone_takes_no_time(make_study):
    """A model without an encoder, and a workload without images, have nothing to encode."""
    assert make_study("workload=gui-agent").workload.images is None
    assert make_study("llm=qwen3-vl-8b").workload.images is None
    assert make_study("llm=qwen3-vl-8b", "workload=gui-agent").workload.images is not None


def test_an_encoder_in_8_bit_is_lighter_and_faster_and_16_bit_as_before(make_study):
    """Half the weights, products at the rate of 8-bit ones, attention as before; as it was where none is named."""
    choices = {
        "topologies": ["epd", "colocated"], "accelerators": "h100-sxm", "tensor_parallel": 1, "pipeline_parallel": 1,
        "replicas": 4, "max_batch": 64, "token_budget": 8192, "weights": "bf16", "kv": "bf16", "links": "ib-ndr-400",
        "routing": "affinity",
    }  # fmt: skip
    changes = "llm=qwen3-vl-8b", "workload=gui-agent", "load.sessions_per_second=0.02"
    plain = make_study(*changes, **choices)
    study = make_study(*changes, **choices, encoder_weights=["bf16", "int8", "fp8"])
    assert plain.space.deployment(np.array([0])).encoder is None
    found, usual = study.evaluator()(np.arange(6)), plain.evaluator()(np.arange(2))
    for name, values in usual.items():
        if name != "candidate":
            assert found[name][::3].astype(float) == pytest.approx(values.astype(float), rel=1e-6), name
    for rows in (found["ttft_mean_s"].reshape(2, 3), found["utilization_encode"].reshape(2, 3)[:1]):
        assert (rows[:, 1:] < rows[:, :1]).all() and (rows[:, 1:] > 0.5 * rows[:, :1]).all()
    resolved = resolve(study.space.deployment(np.arange(3)), study.catalog)
    weights = np.asarray(pool_weights_bytes(resolved, resolved.encode.choice.pool, study.catalog.llm))
    assert weights[1:] == pytest.approx(weights[0] / 2.0)
    row = study.space.frame(np.array([2])).iloc[0].to_dict() | {"cost_per_hour_usd": 1.0, "slo_attainment": 1.0}
    assert "encoder: fp8" in deployment_yaml(study, row)
    with pytest.raises(InputError, match="encoder_weights"):
        make_study(*changes, **choices, encoder_weights="fp3")
