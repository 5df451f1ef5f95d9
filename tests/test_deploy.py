"""Launch files: shell that parses, documented options, the deployment's numbers; and what cannot run today."""

import itertools
import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from breakeven.models.catalog import table
from breakeven.models.hardware import accelerators
from breakeven.models.inputs import InputError
from breakeven.models.support import PoolNeeds, engines, lacking
from breakeven.spaces.deployable import deployable
from breakeven.studies.cli import _main
from breakeven.studies.deploy import TARGETS, missing, notes, write_deployment
from breakeven.studies.deployment_file import Deployed
from breakeven.studies.launch import checked
from breakeven.studies.plan import Plan, plan

PD = {
    "topologies": "pd",
    "accelerators": ["h100-sxm"],
    "weights": "fp8",
    "kv": "fp8",
    "links": "ib-ndr-400",
    "routing": "affinity",
    "token_budget": 4096,
    "max_batch": 96,
    "prefill": {"tensor_parallel": 4, "pipeline_parallel": 1, "replicas": 3},
    "decode": {"tensor_parallel": 8, "pipeline_parallel": 2, "replicas": 2},
}
JOINT = PD | {"topologies": "chunked", "tensor_parallel": 8, "pipeline_parallel": 1, "replicas": 4}


@pytest.fixture
def planned(make_study: Callable[..., Any]) -> Callable[..., Plan]:
    return lambda *changes, **choices: plan(Deployed(make_study(*changes, **choices), "test"))


def options(script: str) -> dict[str, str]:
    """The options of the command that a script ends with."""
    words = shlex.split(script.split("\nexec ")[1].replace("\\\n", " "))
    pairs = zip(words, [*words[1:], ""], strict=True)
    return {a: "" if b.startswith("--") else b for a, b in pairs if a.startswith("--")}


def test_pd_on_vllm_has_the_numbers_of_the_deployment(planned: Callable[..., Plan], tmp_path: Path) -> None:
    names = write_deployment(planned(**PD), "vllm", tmp_path)
    assert names == ["prefill.sh", "decode.sh", "router.sh", "NOTES.md"]
    prefill, decode = (options((tmp_path / f"{role}.sh").read_text()) for role in ("prefill", "decode"))
    assert (prefill["--tensor-parallel-size"], prefill["--max-num-batched-tokens"]) == ("4", "4096")
    assert (decode["--tensor-parallel-size"], decode["--pipeline-parallel-size"]) == ("8", "2")
    assert decode["--max-num-seqs"] == "96" and decode["--nnodes"] == "2" and "--nnodes" not in prefill
    assert prefill["--kv-cache-dtype"] == decode["--kv-cache-dtype"] == "fp8"
    for found in (prefill, decode):
        assert json.loads(found["--kv-transfer-config"])["kv_connector"] == "NixlConnector"
    router = (tmp_path / "router.sh").read_text()
    assert "--vllm-pd-disaggregation" in router and "consistent_hash" in router and "3 prefill engines" in router


@pytest.mark.parametrize(("target", "option"), [("vllm", "--enable-dbo"), ("sglang", "--enable-two-batch-overlap")])
def test_two_batch_overlap_is_switched_on_where_experts_exchange_tokens(
    planned: Callable[..., Plan], tmp_path: Path, target: str, option: str
) -> None:
    wide = JOINT | {"tensor_parallel": 1, "data_parallel": 8, "expert_parallel": True}
    for batches, there in (("{like: vllm}", False), ("{like: vllm, overlapped_batches: 2}", True)):
        write_deployment(planned("llm=deepseek-v3", f"engine={batches}", **wide), target, tmp_path)
        assert (option in options((tmp_path / "pool.sh").read_text())) == there


def test_pd_on_sglang(planned: Callable[..., Plan], tmp_path: Path) -> None:
    write_deployment(planned(**PD), "sglang", tmp_path)
    prefill, decode = (options((tmp_path / f"{role}.sh").read_text()) for role in ("prefill", "decode"))
    assert (prefill["--disaggregation-mode"], decode["--disaggregation-mode"]) == ("prefill", "decode")
    assert (prefill["--chunked-prefill-size"], decode["--max-running-requests"]) == ("4096", "96")
    assert (decode["--tp-size"], decode["--pp-size"], prefill["--kv-cache-dtype"]) == ("8", "2", "fp8_e4m3")


def test_joint_pools_mix_chunks_where_the_deployment_does(planned: Callable[..., Plan], tmp_path: Path) -> None:
    write_deployment(planned(**JOINT), "sglang", tmp_path)
    assert "--enable-mixed-chunk" in options((tmp_path / "pool.sh").read_text())
    colocated = planned(**JOINT | {"topologies": "colocated"})
    write_deployment(colocated, "sglang", tmp_path)
    assert "--enable-mixed-chunk" not in options((tmp_path / "pool.sh").read_text())
    assert not missing(colocated, "sglang")
    assert any("colocated is not supported" in line for line in missing(colocated, "vllm"))
    assert "## What it cannot do" in notes(colocated, "vllm")


def test_experts_and_data_parallel_attention(planned: Callable[..., Plan], tmp_path: Path) -> None:
    """DP4 x TP2 with whole experts per rank: vLLM counts ranks per replica, SGLang all of them."""
    choices = JOINT | {"tensor_parallel": 2, "data_parallel": 4, "expert_parallel": True}
    made = planned("llm=deepseek-v3", **choices)
    write_deployment(made, "vllm", tmp_path)
    found = options((tmp_path / "pool.sh").read_text())
    assert (found["--tensor-parallel-size"], found["--data-parallel-size"]) == ("2", "4")
    assert "--enable-expert-parallel" in found and found["--max-num-seqs"] == "24"
    write_deployment(made, "sglang", tmp_path)
    found = options((tmp_path / "pool.sh").read_text())
    assert (found["--tp-size"], found["--dp-size"], found["--ep-size"]) == ("8", "4", "8")
    assert "--enable-dp-attention" in found


def test_offload_below_hbm(planned: Callable[..., Plan], tmp_path: Path) -> None:
    """200 GB of host memory for each accelerator that prefills: 800 GB for an engine of four."""
    made = planned(**PD | {"kv_tiers": "host-dram"})
    assert made.offload_bytes == 200e9
    write_deployment(made, "vllm", tmp_path)
    transfer = json.loads(options((tmp_path / "prefill.sh").read_text())["--kv-transfer-config"])
    nixl, offload = transfer["kv_connector_extra_config"]["connectors"]
    assert (transfer["kv_connector"], nixl["kv_connector"]) == ("MultiConnector", "NixlConnector")
    assert offload["kv_connector_extra_config"]["cpu_bytes_to_use"] == 800_000_000_000
    write_deployment(made, "sglang", tmp_path)
    found = options((tmp_path / "prefill.sh").read_text())
    assert "--enable-hierarchical-cache" in found and found["--hicache-size"] == "200"
    assert "--enable-hierarchical-cache" not in options((tmp_path / "decode.sh").read_text())


def test_manifests_are_yaml_with_the_same_numbers(planned: Callable[..., Plan], tmp_path: Path) -> None:
    made = planned(**PD)
    write_deployment(made, "dynamo", tmp_path)
    graph = yaml.safe_load((tmp_path / "deployment.yaml").read_text())
    services = graph["spec"]["services"]
    assert (graph["kind"], services["VllmPrefillWorker"]["replicas"]) == ("DynamoGraphDeployment", 3)
    assert services["VllmDecodeWorker"]["multinode"] == {"nodeCount": 2}
    assert services["VllmDecodeWorker"]["resources"]["limits"]["gpu"] == "8"
    arguments = services["VllmDecodeWorker"]["extraPodSpec"]["mainContainer"]["args"]
    assert arguments[arguments.index("--disaggregation-mode") + 1] == "decode"
    write_deployment(made, "llm-d", tmp_path)
    values = yaml.safe_load((tmp_path / "values.yaml").read_text())
    assert (values["prefill"]["replicas"], values["prefill"]["parallelism"]["tensor"]) == (3, 4)
    assert values["decode"]["replicas"] == 2 and values["routing"]["proxy"]["connector"] == "nixlv2"
    assert any("data parallelism only" in line for line in missing(made, "llm-d"))


def test_all_scripts_are_shell(planned: Callable[..., Plan], tmp_path: Path) -> None:
    for choices, target in itertools.product((PD, JOINT), ("vllm", "sglang")):
        write_deployment(planned(**choices), target, tmp_path)
        for script in tmp_path.glob("*.sh"):
            subprocess.run(["bash", "-n", str(script)], check=True)
            script.unlink()


def test_only_documented_options_are_written() -> None:
    with pytest.raises(KeyError, match="--tensor-parallel"):
        checked("vllm", [("--tensor-parallel", "8")])


def test_a_command_writes_them(
    planned: Callable[..., Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment = {
        "deployment": {
            "topology": "chunked",
            "pool": {"accelerator": "gaudi3", "tensor_parallel": 8, "replicas": 2, "weights": "fp8"},
            "kv": "bf16",
        },
        "study": {
            "llm": "llama-3.1-70b",
            "workload": "chat",
            "load": {"calls_per_second": 1},
            "slo": {"ttft_s": 2},
            "prices": {"own": {"gaudi3": 1.0}},
        },
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(deployment))
    assert _main(["deploy", str(tmp_path / "mine.yaml"), "--engine", "sglang", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert re.search(r"Not today: accelerator gaudi3 is not supported", said)
    assert (tmp_path / "out" / "NOTES.md").exists()
    assert _main(["deploy", str(tmp_path / "mine.yaml"), "--engine", "vlm"]) == 2
    assert "did you mean" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_today_keeps_exactly_what_the_engine_supports(make_study: Callable[..., Any], engine: str) -> None:
    """Against the table, candidate by candidate. Unlike weights in two pools stay, and are named by `deploy`."""
    made = make_study(
        accelerators=["h100-sxm", "a100-sxm-80gb", "mi300x", "b200-sxm"],
        weights=["bf16", "fp8", "int8"],
        kv=["bf16", "fp8", "int4"],
        tensor_parallel=8,
        pipeline_parallel=1,
        replicas=1,
        max_batch=64,
        token_budget=2048,
        links="ib-ndr-400",
        routing="affinity",
    )
    kinds = {a.id: a for a in made.accelerators}

    def runs(row: Any) -> bool:
        pools = [PoolNeeds(kinds[row[f"{p}_accelerator"]], row[f"{p}_weights"]) for p in ("prefill", "decode")]
        lacks = lacking(engine, row["topology"], pools, row["kv"])
        return not [line for line in lacks if "different weight formats" not in line]

    def described(space: Any) -> set[tuple[str, ...]]:
        frame = space.frame(np.arange(space.size))
        columns = ["topology", "kv", *[f"{p}_{n}" for p in ("prefill", "decode") for n in ("accelerator", "weights")]]
        return {tuple(row[c] for c in columns) for _, row in frame.iterrows() if space is not made.space or runs(row)}

    kept = deployable(made.space, engine)
    assert described(kept) == described(made.space) and 0 < kept.size < made.space.size


def test_nothing_deployable_is_said(make_study: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match="sglang runs none of this space"):
        made = make_study("limits.deployable=today", "engine=sglang", accelerators=["l40s"], weights="fp4")
        assert made.space.size


def test_every_fact_has_a_source_and_a_known_name() -> None:
    generations = {a.generation for a in accelerators().values()}
    precisions = table("precisions")
    for name in engines():
        row = table("support")[name]
        facts = [fact for group in ("topologies", "generations", "weights", "kv") for fact in row[group].values()]
        for fact in [*facts, row["mixed_vendors"], row["offload"], row["unlike_weights"]]:
            assert fact["source"] and fact.get("status", "yes") in ("yes", "experimental", "no")
            assert set(fact.get("generations", [])) <= generations
        assert set(row["generations"]) <= generations
        assert set(row["weights"]) <= set(precisions["weights"]) and set(row["kv"]) <= set(precisions["kv"])
    assert {engine for engine, _ in TARGETS.values()} <= set(engines())
