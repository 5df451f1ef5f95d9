"""What fits, checked by hand: Llama-3.1-70B has 70.55e9 parameters, 80 layers and 8 KV heads of 128."""

import jax.numpy as jnp
import numpy as np
import pytest

from breakeven.models.llm import LLM, llms
from breakeven.models.memory import kv_bytes_per_token, pool_memory, pool_weights_bytes

HEAD = 128256 * 8192  # parameters of the LM head, and again of the embedding


def weights(resolved, study):
    return float(pool_weights_bytes(resolved, resolved.decode_attention.choice.pool, study.catalog.llm)[0])


def memory(resolved, study, tokens=1000.0):
    stage, made = resolved.decode_attention, study.catalog
    return pool_memory(resolved, stage, made.llm, made.engine, jnp.array([tokens]))


def test_weights_of_llama_70b_in_16_bit(one):
    """70.55e9 parameters of 2 bytes are 141.1 GB."""
    assert weights(*one(tensor_parallel=1, pipeline_parallel=1)) == pytest.approx(141.1e9, rel=1e-3)


def test_weights_of_llama_70b_in_8_bit(one):
    """1 byte each, but head and embedding stay in 16 bit: 70.55e9 + 2 x 1.05e9 = 72.66e9."""
    expected = 70.5537e9 + 2 * HEAD
    assert weights(*one(tensor_parallel=1, pipeline_parallel=1, weights="fp8")) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("tensor", "pipeline"), [(8, 1), (4, 2), (1, 2)])
def test_sharding_divides_the_weights(one, tensor, pipeline):
    whole = weights(*one(tensor_parallel=1, pipeline_parallel=1))
    part = weights(*one(tensor_parallel=tensor, pipeline_parallel=pipeline))
    assert part == pytest.approx(whole / (tensor * pipeline), rel=1e-5)


def test_separate_pools_hold_all_weights_each(one):
    resolved, study = one(topologies="pd", tensor_parallel=4, pipeline_parallel=1)
    pools = [s.choice.pool for s in (resolved.prefill_attention, resolved.decode_attention)]
    sizes = [float(pool_weights_bytes(resolved, pool, study.catalog.llm)[0]) for pool in pools]
    assert sizes == pytest.approx([141.1e9 / 4] * 2, rel=1e-3)


def test_kv_cache_of_llama_70b():
    """2 x 8 heads x 128 x 80 layers x 2 bytes = 327,680 bytes a token, whatever the length."""
    llm = LLM.from_architecture(llms()["llama-3.1-70b"])
    assert np.asarray(kv_bytes_per_token(llm, jnp.array(2.0), jnp.array([1.0, 1e5]))).tolist() == [327680.0, 327680.0]


def test_kv_cache_of_a_latent():
    """DeepSeek-V3: (512 latent + 64 rotary) x 61 layers x 2 bytes = 70,272 bytes a token."""
    llm = LLM.from_architecture(llms()["deepseek-v3"])
    assert float(kv_bytes_per_token(llm, jnp.array(2.0), jnp.array(1.0))) == 70272.0


def test_windows_hold_no_more_than_their_length():
    """gpt-oss-120b: 18 full and 18 window layers of 128 tokens, 8 heads of 64: a long sequence keeps half."""
    llm = LLM.from_architecture(llms()["gpt-oss-120b"])
    per_layer = 2 * 8 * 64 * 2
    found = np.asarray(kv_bytes_per_token(llm, jnp.array(2.0), jnp.array([128.0, 128e3])))
    assert found == pytest.approx([36 * per_layer, 18 * per_layer * (1 + 1e-3)], rel=1e-6)


def test_capacity_is_free_memory_over_kv_bytes(one):
    """Eight H100: 8 (0.92 x 85.52 - 2 - 141.1/8 - activations) GB over 327,680 bytes."""
    share = "engine={like: vllm, memory_fraction: 0.92}"
    resolved, study = one(share, tensor_parallel=8, pipeline_parallel=1, token_budget=8192)
    activations = 24.0 * 8192 * 8192 / 8
    free = 0.92 * 85.5235362816e9 - 2e9 - 141.1074e9 / 8 - activations
    found = memory(resolved, study)
    assert float(found.free_bytes[0]) == pytest.approx(free, rel=1e-4)
    assert float(found.capacity_tokens[0]) == pytest.approx(8 * free / 327680, rel=1e-4)


def test_weights_that_do_not_fit_leave_no_room(one):
    found = memory(*one(tensor_parallel=1, pipeline_parallel=1))
    assert float(found.free_bytes[0]) < 0.0 and float(found.capacity_tokens[0]) == 0.0


def test_a_latent_is_replicated_over_tensor_parallel_ranks(one):
    """MLA has one KV shard: more ranks hold the same tokens each, data-parallel ranks hold their own."""
    choices = {"accelerators": "gb300-nvl72", "weights": "fp8", "expert_parallel": True, "pipeline_parallel": 1}
    price = "prices.own.gb300-nvl72=10"
    resolved, study = one("llm=deepseek-v3", price, tensor_parallel=8, **choices)
    split, _ = one("llm=deepseek-v3", price, tensor_parallel=1, data_parallel=8, **choices)
    together, apart = memory(resolved, study), memory(split, study)
    per_token = float(study.catalog.llm.kv_elements_per_token) * 2.0
    assert float(together.capacity_tokens[0]) == pytest.approx(float(together.free_bytes[0]) / per_token, rel=1e-4)
    assert float(apart.capacity_tokens[0]) == pytest.approx(8.0 * float(apart.free_bytes[0]) / per_token, rel=1e-4)
