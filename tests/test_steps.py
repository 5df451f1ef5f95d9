"""Step times against bytes over bandwidth and FLOPs over peaks, and the traps of sharding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from breakeven.models import operators
from breakeven.models.bundle import Bundle, decode_step, prefill_call
from breakeven.models.kernel_curves import curves
from breakeven.models.llm import LLM, llms
from breakeven.models.performance import performance
from breakeven.models.steps import (
    attention_coefficients,
    collective_bytes_per_s,
    expert_hit_share,
    ffn_coefficients,
    kv_shards,
    prefill_chunks,
)
from breakeven.models.tables import resolve

ONE = jnp.array([1.0])
HOPPER = curves("hopper")  # as fitted


def machine(resolved, study, phase="decode"):
    """One engine that does both sides."""
    attention, ffn = getattr(resolved, f"{phase}_attention"), getattr(resolved, f"{phase}_ffn")
    made, choice = study.catalog, attention.choice
    return Bundle(
        attention_coefficients(attention, made.llm, made.engine, resolved.kv_bytes_per_element),
        ffn_coefficients(ffn, made.llm, made.engine),
        ONE,
        choice.pipeline_parallel,
        choice.data_parallel,
        None,
    )


def step(resolved, study, batch=1.0, context=1.0):
    return decode_step(machine(resolved, study), study.catalog.llm, batch * ONE, context * ONE)


def moved_s(resolved, study, batch):
    """What collectives take beside their latency."""
    return float(step(resolved, study, batch).collective_s[0] - machine(resolved, study).engine.collective_s[0])


def test_decode_of_one_sequence_reads_the_weights_once(one):
    """70B on 8 H100: 139.0 GB without the embedding / 8 / (3.35 TB/s x 0.794) = 6.53 ms."""
    found = step(*one(tensor_parallel=8, pipeline_parallel=1))
    read_s = 2.0 * (70.5537e9 - 128256 * 8192) / 8 / (3.35e12 * HOPPER["gemm_bf16"]["read"])
    assert float(found.products_s[0]) == pytest.approx(read_s, rel=0.02)


def test_decode_attention_reads_the_kv_cache(one):
    """64 sequences of 10,000 tokens: 64 x 10^4 x 327,680 bytes / 8 / (3.35 TB/s x 0.80) = 9.8 ms."""
    found = step(*one(tensor_parallel=8, pipeline_parallel=1), batch=64.0, context=1e4)
    assert float(found.attention_s[0]) == pytest.approx(
        64e4 * 327680 / 8 / (3.35e12 * HOPPER["decode_attention_bf16"]["read"]), rel=0.02
    )


@pytest.mark.parametrize(("weights", "peak"), [("bf16", 989e12), ("fp8", 1979e12)])
def test_prefill_of_a_long_prompt_is_arithmetic(one, weights, peak):
    """2 x 68.45e9 x tokens / (8 x peak x efficiency), 1 % above for the traffic under it."""
    resolved, study = one(tensor_parallel=8, pipeline_parallel=1, weights=weights)
    tokens, llm = 32768.0 * ONE[:, None], study.catalog.llm
    found = prefill_call(machine(resolved, study, "prefill"), llm, tokens, 0.5 * tokens**2, tokens, 32768.0 * ONE).alone
    arithmetic_s = 2.0 * (70.5537e9 - 2 * 128256 * 8192) * 32768 / (8 * peak * HOPPER[f"gemm_{weights}"]["share"])
    assert float(found.products_s[0, 0]) == pytest.approx(arithmetic_s, rel=0.01)
    curve = HOPPER["prefill_attention_bf16"]
    pairs = 0.5 * 32768.0**2 + curve["half_keys"] * 32768.0
    flops = 2621440 * (1.0 + curve["softmax_flops"] / (4 * 128))
    attention_s = pairs * flops / (8 * 989e12 * curve["share"])
    assert float(found.attention_s[0, 0]) == pytest.approx(attention_s, rel=0.02)


def test_a_prompt_is_computed_in_chunks_of_the_budget():
    assert np.asarray(prefill_chunks(jnp.array([1.0, 2048.0, 8192.0]), jnp.array(2048.0))).tolist() == [1.0, 1.0, 4.0]


def test_one_rank_reduces_nothing(one):
    """No all-reduce at tensor_parallel 1, also on an accelerator without any scale-up link."""
    for accelerator in ("h100-sxm", "l40s"):
        found = step(*one(accelerators=accelerator, tensor_parallel=1, pipeline_parallel=1), batch=8.0)
        assert float(found.collective_s[0]) == 0.0


def test_an_all_reduce_moves_its_volume_and_loses_to_short_messages(one):
    """Two in each of 80 layers: 100 tokens x 8192 x 2 bytes, (v + sqrt(v half)) over a share of 450 GB/s each, beside
    their latency."""
    resolved, study = one(tensor_parallel=8, pipeline_parallel=1)
    curve = HOPPER["allreduce"]
    volume = 100 * 8192 * 2 * (2 * 7 / 8) ** curve["ring_power"]
    expected_s = 160 * (volume + (volume * curve["half_bytes"]) ** 0.5) / (450e9 * curve["share"])
    assert moved_s(resolved, study, 100.0) == pytest.approx(expected_s, rel=1e-4)


def test_a_mesh_gives_two_ranks_one_narrow_link(one):
    """MI300X: 64 GB/s to each of seven peers, so two ranks share 64 of the 448 GB/s and eight share them all."""
    resolved, _ = one(accelerators="mi300x", tensor_parallel=8)
    found = collective_bytes_per_s(resolved.decode_ffn.hardware, jnp.array([2.0, 4.0, 8.0]))
    assert np.asarray(found) == pytest.approx([64e9, 192e9, 448e9], rel=1e-5)


def test_beyond_the_scale_up_domain_ranks_share_the_host_link_then_the_nic(one):
    resolved, _ = one(accelerators="l40s", tensor_parallel=8)
    hw = resolved.decode_ffn.hardware
    found = np.asarray(collective_bytes_per_s(hw, jnp.array([2.0, 8.0, 16.0])))
    expected = [float(hw.host_bytes_per_s[0])] * 2 + [float(hw.nic_bytes_per_s[0])]
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(("name", "layers", "hidden"), [("deepseek-v3", 58, 7168.0), ("gpt-oss-120b", 36, 2880.0)])
def test_tokens_are_gathered_on_few_ranks_and_sent_to_their_experts_on_many(one, name, layers, hidden):
    """On 8 ranks, with 1 byte an element there and 2 back: of 8 experts a token everywhere, of 4 where they stand."""
    layout = {"tensor_parallel": 1, "data_parallel": 8, "expert_parallel": True, "pipeline_parallel": 1}
    resolved, study = one(f"llm={name}", weights="fp8", **layout)
    link = float(collective_bytes_per_s(resolved.decode_ffn.hardware, 8.0 * ONE)[0])
    if name == "deepseek-v3":
        sizes, curve = [7.0 * hidden * 64.0, 2.0 * 7.0 * hidden * 64.0], HOPPER["gather"]
    else:
        sizes, curve = [3.0 * float(operators.hit_ranks(8.0, 4.0)) * hidden * 64.0], HOPPER["alltoall"]
    expected = layers * sum(sum(operators.exchange_s(curve, size, link)) for size in sizes)
    assert moved_s(resolved, study, 512.0) == pytest.approx(float(expected), rel=1e-3)


@pytest.mark.parametrize(("name", "ranks", "shards"), [("llama-3.1-70b", 4, 4), ("llama-3.1-70b", 16, 8)])
def test_tensor_parallelism_splits_at_most_every_kv_head(one, name, ranks, shards):
    resolved, study = one(f"llm={name}", "prices.own.trainium2=2", accelerators="trainium2", tensor_parallel=ranks)
    assert float(kv_shards(resolved.decode_attention, study.catalog.llm)[0]) == shards


def test_a_latent_is_not_split(one):
    resolved, study = one("llm=deepseek-v3", tensor_parallel=8)
    assert float(kv_shards(resolved.decode_attention, study.catalog.llm)[0]) == 1.0


def test_expected_distinct_experts():
    """One token hits exactly its k of E, many hit all: E (1 - (1 - k/E)^T)."""
    llm = LLM.from_architecture(llms()["deepseek-v3"])  # 8 of 256
    tokens = np.array([1.0, 2.0, 32.0, 1e4])
    found = 256 * np.asarray(expert_hit_share(jnp.array(tokens), llm))
    assert found == pytest.approx(256 * (1 - (1 - 8 / 256) ** tokens), rel=1e-5)
    assert found[0] == pytest.approx(8.0) and found[-1] == pytest.approx(256.0)


def test_experts_of_one_token_are_read_once(one):
    """Qwen3-235B, one token: 8 of 128 experts in 94 layers, each 3 x 4096 x 1536 parameters of 2 bytes."""
    resolved, study = one("llm=qwen3-235b-a22b", accelerators="h200-sxm", tensor_parallel=4, pipeline_parallel=1)
    read_s = 94 * 8 * 3 * 4096 * 1536 * 2 / 4 / (4.8e12 * HOPPER["experts_bf16"]["read"])
    permute_s = 94 * 8 * 4096 * HOPPER["experts_bf16"]["permute_bytes"] / 4.8e12
    assert float(step(resolved, study).experts_s[0]) == pytest.approx(read_s + permute_s, rel=0.02)


def test_a_dense_model_has_no_expert_time(one):
    assert float(step(*one(tensor_parallel=8), batch=64.0).experts_s[0]) == 0.0


FASTER = ("memory_bandwidth_bytes_per_s", "bf16_flops_per_s", "scaleup_bytes_per_s")


@pytest.mark.parametrize("factor", [1.02, 3.0])
@pytest.mark.parametrize("name", FASTER)
def test_faster_hardware_never_makes_a_step_slower(study, deployment, compiled, name, factor):
    """More bandwidth or peak: no decode step at a fixed batch and no prefill takes longer, on any candidate."""
    hardware = study.catalog.hardware
    changed = {name: getattr(hardware, name) * factor}
    if name.startswith("scaleup"):
        changed["scaleup_pair_bytes_per_s"] = hardware.scaleup_pair_bytes_per_s * factor
    faster = dataclasses.replace(study.catalog, hardware=dataclasses.replace(hardware, **changed))
    before, after = compiled(deployment, study.catalog), compiled(deployment, faster)
    for old, new in zip(before, after, strict=True):
        assert (np.asarray(new) <= np.asarray(old) * (1 + 1e-5)).all()


@pytest.fixture(scope="module")
def compiled(study):
    """(mean prefill latency, decode step of 8 sequences) of a batch of deployments on a catalogue."""

    @jax.jit
    def both(deployment, catalog):
        resolved = resolve(deployment, catalog)
        pools = performance(resolved, study.workload, catalog).pools
        eight = jnp.full_like(pools.token_budget, 8.0)
        step = decode_step(pools.decode, catalog.llm, eight, study.workload.decode_context)
        return pools.prefill_latency_s, step.total_s

    return both
