"""A KV cache that keeps a part: by hand, at its limits, and on the link, in memory and in a decode step."""

import jax.numpy as jnp
import numpy as np
import pytest

from breakeven.models.inputs import InputError
from breakeven.models.memory import kv_bytes_per_token
from breakeven.studies.deploy import missing
from breakeven.studies.deployment_file import Deployed
from breakeven.studies.explain import explain
from breakeven.studies.plan import plan

SPACE = {
    "topologies": ["colocated", "pd"], "accelerators": "h100-sxm", "tensor_parallel": 8, "pipeline_parallel": 1,
    "max_batch": 64, "token_budget": 8192, "weights": "fp8", "kv": "bf16", "links": "ib-ndr-400", "routing": "affinity",
    "replicas": [1, 2, 4],
}  # fmt: skip


@pytest.fixture(scope="module")
def found(make_study):
    def of(kept):
        study = make_study("load.sessions_per_second=0.02", f"kv_kept={kept}", **SPACE)
        return study.evaluator()(np.arange(study.space.size))

    return {kept: of(kept) for kept in ("1", "0.5", "0.1", "{window: 2000}")}


def test_memory_and_the_reading_of_a_token_are_a_fraction_of_the_whole(make_study):
    llm = {kept: make_study(f"kv_kept={kept}").catalog.llm for kept in (1, 0.25)}
    for name in ("kv_elements_per_token", "decode_flops_per_pair"):
        assert float(getattr(llm[0.25], name)) == pytest.approx(0.25 * float(getattr(llm[1], name))), name
    assert float(llm[0.25].prefill_flops_per_pair) == float(llm[1].prefill_flops_per_pair)
    window = make_study("kv_kept={sinks: 4, window: 8188}").catalog.llm
    assert float(window.window_tokens) == 8192.0 and float(window.kv_elements_per_token) == 0.0
    assert float(window.window_kv_elements_per_token) == 163_840.0


def test_a_smaller_cache_holds_more_sessions_decodes_faster_and_crosses_the_link_sooner(found):
    for less, more in (("0.5", "1"), ("0.1", "0.5")):
        assert (found[less]["cache_hit"] >= found[more]["cache_hit"] - 1e-4).all()
        assert (found[less]["tpot_mean_s"] < found[more]["tpot_mean_s"]).all()
        moved = found[more]["utilization_link"] > 0.0
        assert (
            moved.any()
            and (found[less]["utilization_link"][moved] < 0.6 * found[more]["utilization_link"][moved]).all()
        )


def test_a_window_holds_whole_what_is_shorter_and_no_more_of_what_is_longer(make_study, found):
    whole, window = (make_study(f"kv_kept={kept}").catalog.llm for kept in ("1", "{sinks: 0, window: 2000}"))
    lengths, two = jnp.array([500.0, 2000.0, 20_000.0]), jnp.float32(2.0)
    held = [[float(n * kv_bytes_per_token(llm, two, n)) for n in lengths] for llm in (whole, window)]
    assert held[1] == pytest.approx([held[0][0], held[0][1], held[0][1]])
    for name in ("tpot_mean_s", "ttft_mean_s"):
        assert (found["{window: 2000}"][name] < found["1"][name]).all(), name


def test_a_deployment_keeps_it_and_what_makes_no_sense_is_refused(make_study):
    study = make_study(
        "load.sessions_per_second=0.02", "kv_kept=0.25", **{**SPACE, "topologies": "pd", "replicas": [2]}
    )
    assert explain(Deployed(study, "one")).sections
    for kept, says in (("0", r"kv_kept = 0"), ("{sinks: 4}", r"kv_kept\.window = None"), ("2", r"kv_kept = 2")):
        with pytest.raises(InputError, match=says):
            make_study(f"kv_kept={kept}")
    with pytest.raises(InputError, match="has no plain attention in every layer"):
        make_study("llm=deepseek-v3", "kv_kept={window: 4096}")
    with pytest.raises(InputError, match="whose attention selects tokens itself"):
        make_study("llm=deepseek-v3.2", "kv_kept=0.5")


def test_no_engine_of_today_does_it(make_study):
    one = {**SPACE, "topologies": "pd", "replicas": [2]}
    found = plan(Deployed(make_study("kv_kept=0.25", **one), "one"))
    assert any("kv_kept" in line for line in missing(found, "vllm"))
    with pytest.raises(InputError, match=r"kv_kept = 0\.25: 1\.0 with `limits\.deployable: today`"):
        make_study("kv_kept=0.25", "limits.deployable=today", **one)
