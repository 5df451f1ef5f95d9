"""The command line: outputs and exit statuses that other programs rely on; every fault is one line, no traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from breakeven.studies.cli import _main

SMALL: dict[str, Any] = {
    "name": "small",
    "llm": "llama-3.1-8b",
    "workload": "tool-agent",
    "load": {"calls_per_second": 4},
    "slo": {"ttft_s": 1, "tpot_s": 0.05, "target": 0.9},
    "space": {
        "topologies": ["colocated", "chunked", "pd"],
        "accelerators": ["h100-sxm", "l40s"],
        "tensor_parallel": [1, 2],
        "weights": ["bf16", "fp8"],
        "replicas": [1, 2],
        "max_batch": 64,
        "links": ["ib-ndr-400"],
    },
}


def write(folder: Path, data: object, name: str = "study.yaml") -> str:
    path = folder / name
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data), encoding="utf-8")
    return str(path)


def changed(path: str, value: object) -> dict[str, Any]:
    """SMALL with one field changed (or removed when the value is None)."""
    data: dict[str, Any] = json.loads(json.dumps(SMALL))
    *parents, last = path.split(".")
    node: Any = data
    for key in parents:
        node = node.setdefault(key, {})
    if value is None:
        del node[last]
    else:
        node[last] = value
    return data


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of one run."""
    folder = tmp_path_factory.mktemp("run")
    assert _main(["run", write(folder, SMALL), "--out", str(folder / "out")]) == 0
    return folder / "out"


def test_run_writes_what_the_design_names(ran: Path) -> None:
    front = pd.read_csv(ran / "front.csv")
    promised = "cost_per_hour_usd slo_attainment topology ttft_p50_s ttft_p95_s tpot_p50_s tpot_p95_s session_p95_s"
    promised += " cost_per_million_tokens_usd utilization_max mfu_prefill mbu_decode unverified"
    assert set(promised.split()) <= set(front.columns)
    record = json.loads((ran / "study.json").read_text())
    assert (
        record["candidates_evaluated"]
        == record["candidates_in_space"]
        == len(pd.read_parquet(ran / "evaluations.parquet"))
    )
    assert record["evaluation_seconds"] > 0 and record["seed"] == 0 and record["study"]["llm"] == "llama-3.1-8b"
    assert (ran / "pareto.png").read_bytes()[:4] == b"\x89PNG"
    assert "data:image/png;base64," in (ran / "report.html").read_text()


def test_the_front_is_non_dominated_and_holds_the_cheapest(ran: Path) -> None:
    front = pd.read_csv(ran / "front.csv").sort_values("cost_per_hour_usd")
    assert (np.diff(front["slo_attainment"].to_numpy()) > 0).all()
    evaluations = pd.read_parquet(ran / "evaluations.parquet")
    meets = evaluations.loc[evaluations["meets_slo"]]
    best = yaml.safe_load((ran / "best.yaml").read_text())["deployment"]
    assert best["expected_cost_per_hour_usd"] == pytest.approx(meets["cost_per_hour_usd"].min(), rel=1e-5)


def test_every_infeasible_candidate_has_a_reason(ran: Path) -> None:
    evaluations = pd.read_parquet(ran / "evaluations.parquet")
    explained = evaluations["reason"].astype(str).to_numpy() != ""
    assert (explained == ~evaluations["feasible"].to_numpy(bool)).all()
    numbers = evaluations.select_dtypes("number")
    assert numbers.notna().all().all()


def test_explain_agrees_with_the_run(ran: Path, capsys: pytest.CaptureFixture[str]) -> None:
    front = pd.read_csv(ran / "front.csv")
    assert _main(["explain", f"{ran}:0", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["SLO"]["attainment"] == pytest.approx(front["slo_attainment"][0], abs=2e-5)
    assert shown["money and power"]["cost_per_hour_usd"] == pytest.approx(front["cost_per_hour_usd"][0])
    step = shown["decode step, mean"]
    causes = [
        v
        for k, v in step.items()
        if k.split("_s")[0]
        in ("matrix products", "attention and KV cache", "collectives", "launches and scheduling", "experts")
    ]
    assert sum(causes) == pytest.approx(step["step_s"], rel=1e-4)
    assert _main(["explain", str(ran / "best.yaml"), "--against", f"{ran}:0"]) == 0
    assert "difference" in capsys.readouterr().out


def test_plot_and_catalogue(ran: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (ran / "pareto.png").unlink()
    assert _main(["plot", str(ran)]) == 0
    assert (ran / "pareto.png").stat().st_size > 10_000
    for what in ("accelerators", "llms", "links", "prices", "workloads", "topologies"):
        assert _main(["catalog", what]) == 0
    assert "h100-sxm" in capsys.readouterr().out


def test_set_changes_any_field(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["run", write(tmp_path, SMALL), "--out", str(out), "--set", "space.topologies=[chunked]"]
    assert _main([*arguments, "--set", "llm.num_hidden_layers=16", "--set", "workload.tool_gap_s=3"]) == 0
    assert set(pd.read_csv(out / "front.csv")["topology"]) == {"chunked"}
    assert json.loads((out / "study.json").read_text())["study"]["llm"] == {
        "like": "llama-3.1-8b",
        "num_hidden_layers": 16,
    }


@pytest.mark.parametrize(
    ("change", "binds"),
    [
        (("slo.ttft_s", 0.001), "SLO attainment"),
        (("load.calls_per_second", 1e5), "saturated"),
        (("limits", {"budget_usd_per_hour": 0.1}), "budget_usd_per_hour"),
        (("limits", {"inventory": {"l40s": 0}}), "inventory"),
        (("llm", "deepseek-v3"), "weights do not fit"),
    ],
)
def test_nothing_feasible_says_what_binds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, object], binds: str
) -> None:
    """Exit 1, with the binding constraint and by how much."""
    data = changed(*change)
    assert _main(["run", write(tmp_path, data), "--out", str(tmp_path / "out")]) == 1
    output = capsys.readouterr().out
    assert binds in output and ("misses by" in output or "reaches" in output)
    assert not (tmp_path / "out" / "best.yaml").exists()


BAD_FIELDS = [
    ("space.accelerators", ["h100-sx"], ("space.accelerators.0", "h100-sx", "h100-sxm")),
    ("llm", "llama-3.1-71b", ("llm", "llama-3.1-70b")),
    ("space.topologies", ["pdd"], ("space.topologies.0", "pdd", "pd")),
    ("space.replica", [1], ("space.replica", "unknown field", "replicas")),
    ("slo.tftt_s", 1, ("slo.tftt_s", "unknown field", "ttft_s")),
    ("spase", {}, ("spase", "unknown field", "space")),
    ("slo.ttft_s", -1, ("slo.ttft_s", "-1", "greater than 0")),
    ("slo.target", 95, ("slo.target", "95", "less than or equal to 1")),
    ("space.tensor_parallel", [0], ("space.tensor_parallel", "0")),
    ("space.tensor_parallel", [], ("space.tensor_parallel",)),
    ("space.replicas", {"from": 4, "to": 1}, ("space.replicas", "from")),
    ("space.accelerators", None, ("space.accelerators",)),
    ("space.tensor_parallel", 7, ("space", "tensor_parallel divides 32 heads")),
    ("space.weights", ["fp7"], ("space.weights", "fp7", "fp8")),
    ("space.links", ["ib-ndr-40"], ("space.links.0", "ib-ndr-400")),
    ("space.accelerators", [{"like": "h100-sxm", "compute": -2}], ("space.accelerators.0.compute", "-2")),
    ("workload", "coding-agents", ("workload", "coding-agent")),
    ("workload", {"preset": "chat", "tool_gap": 5}, ("workload.tool_gap", "tool_gap_s")),
    ("load", {"sessions_per_second": -1}, ("load.sessions_per_second", "-1")),
    ("load", {"sessions_per_second": 1, "concurrent_sessions": 5}, ("load", "exactly one")),
    ("load", "most", ("load", "most", "max")),
    ("objectives", ["cost_per_hour_usd", "slo_atainment"], ("objectives.1", "slo_attainment")),
    ("prices", {"provider": "awz"}, ("awz", "aws")),
    ("prices", {"own": {"h100": 1.0}}, ("prices.own.h100", "h100-sxm")),
    ("limits", {"inventory": {"h1": 3}}, ("limits.inventory.h1",)),
    ("engine", "vlm", ("engine", "vllm")),
    ("llm", {"like": "llama-3.1-8b", "num_hidden_layers": -3}, ("llm.num_hidden_layers", "-3")),
    ("name", None, ("name", "required")),
]


@pytest.mark.parametrize(("path", "value", "said"), BAD_FIELDS, ids=[f"{p}={v!r}"[:60] for p, v, _ in BAD_FIELDS])
def test_a_bad_field_is_one_line_with_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str, value: object, said: tuple[str, ...]
) -> None:
    study = write(tmp_path, changed(path, value))
    assert _main(["run", study, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Traceback" not in error
    assert "study.yaml" in error
    for words in said:
        assert words in error, error


BAD_FILES = {
    "truncated.yaml": "name: x\nslo: {ttft_s: 1",
    "empty.yaml": "",
    "list.yaml": "- 1\n- 2\n",
    "tabs.yaml": "name: x\n\tslo: 1\n",
    "binary.yaml": "\x00\x01",
}


@pytest.mark.parametrize("name", [*BAD_FILES, "missing.yaml", "."])
def test_an_unreadable_study_is_one_line_with_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    if name in BAD_FILES:
        write(tmp_path, BAD_FILES[name], name)
    assert _main(["run", str(tmp_path / name), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and Path(tmp_path / name).name in error


@pytest.mark.parametrize(
    "text", ['{"model_type": "llama"', '{"model_type": "gpt9"}', "[]", '{"model_type": "llama", "hidden_size": -4}']
)
def test_a_bad_config_json_is_one_line_with_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "config.json").write_text(text)
    study = write(tmp_path, changed("llm", "./config.json"))
    assert _main(["run", study, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "config.json" in error


@pytest.mark.parametrize(
    "arguments",
    [
        ["runn"],
        ["run"],
        ["run", "coding-agent", "--trials", "many"],
        ["run", "coding-agent", "--trials", "0"],
        ["run", "coding-agent", "--search", "magic"],
        ["run", "coding-agent", "--set", "slo.target"],
        ["run", "coding-agent", "--set", "slo.target=2"],
        ["run", "coding-agent", "--out", "/proc/nothing/here"],
        ["explain", "nowhere"],
        ["explain", "."],
        ["plot", "nowhere"],
        ["plot", ".", "--what", "circles"],
        ["catalog", "acelerators"],
    ],
    ids=" ".join,
)
def test_bad_arguments_are_one_line_with_exit_2(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert _main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Traceback" not in error


def test_rows_and_deployment_files_are_checked(ran: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(["explain", f"{ran}:9999"]) == 2
    data = yaml.safe_load((ran / "best.yaml").read_text())
    pool = next(v for v in data["deployment"].values() if isinstance(v, dict))
    pool["accelerator"] = "h10"
    assert _main(["explain", write(tmp_path, data, "own.yaml")]) == 2
    pool["accelerator"], pool["replica"] = "h100-sxm", 3
    assert _main(["explain", write(tmp_path, data, "own.yaml")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3 and all("breakeven: " in line for line in errors)


def test_the_command_starts_without_heavy_imports() -> None:
    """`--help` must not wait for JAX."""
    code = "import sys, breakeven.studies.cli; sys.exit(any(m in sys.modules for m in ('jax', 'pandas', 'seaborn')))"
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == 0
