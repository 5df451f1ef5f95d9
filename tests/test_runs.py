"""Published runs in the uniform schema: what the readers make of each kind of row, and that a run is played as sent."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from breakeven.models.inputs import InputError
from breakeven.studies import cli
from breakeven.studies.replayed import replayed
from breakeven.studies.runs import BATCH, CLOSED, HALF_LAYOUT, NO_LAYOUT, NO_LENGTHS, OPEN, QUEUED, Run, read_runs
from breakeven.studies.validate_runs import errors, report, validate_runs

RECORDED = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "calibration" / "simulators"
ROW: dict[str, Any] = {
    "row_id": "A-1",
    "source": "made up",
    "model": "Llama-3.1-8B",
    "gpu": "H200",
    "n_gpus": 1,
    "framework": "tensorrt-llm (pytorch backend)",
    "precision_weights": "fp8",
    "precision_kv": "fp8",
    "spec_decode": "none",
    "tp": 1.0,
    "pp": 1.0,
    "ep": np.nan,
    "dp": np.nan,
    "isl": 128,
    "osl": 128,
    "concurrency_or_batch": np.nan,
    "request_rate": "inf",
    "arrival": "offline (all requests queued)",
    "dataset": "random tokens",
    "ttft_ms": np.nan,
    "tpot_ms": np.nan,
    "output_tok_s_total": 28000.0,
    "notes": "",
}
BATCHED = {"arrival": "closed_loop (batch threads)", "framework": "lmdeploy-turbomind", "concurrency_or_batch": 16}
POISSON = {"arrival": "open loop (poisson assumed)", "dataset": "500 requests; lengths given are dataset means"}


@pytest.fixture
def table(tmp_path):
    """Writes rows that differ from `ROW` so and returns their file."""

    def write(*changes: dict[str, Any]):
        rows = [ROW | {"row_id": f"A-{k}"} | change for k, change in enumerate(changes)]
        pd.DataFrame(rows).to_csv(tmp_path / "runs.csv", index=False)
        return tmp_path / "runs.csv"

    return write


def test_each_kind_of_load_becomes_its_requests(table):
    closed = {"arrival": "closed_loop", "concurrency_or_batch": 64, "dataset": "synthetic"}
    opened = {"request_rate": 4.0, "source": "online serving table", "isl": 467, "osl": 256} | POISSON
    queued, batch, loop, opened = read_runs(table({}, BATCHED, closed, opened))
    assert [run.load for run in (queued, batch, loop, opened)] == [QUEUED, BATCH, CLOSED, OPEN]
    assert len(queued.starts_s) == 30000 and not queued.starts_s.any()  # perf-overview.md, 128/128
    assert len(batch.starts_s) == 16 and batch.point.token_budget == 16 * 128
    assert np.isfinite(loop.starts_s).sum() == 64 and len(loop.starts_s) == 30000
    assert len(opened.starts_s) == 500 and opened.starts_s[-1] == pytest.approx(500 / 4.0, rel=0.15)
    assert np.all(opened.output_tokens == 256.0)  # a limit that all reach
    assert opened.prompt_tokens.std() == pytest.approx(467.0, rel=0.15)  # a mean of a data set: drawn


def test_a_row_that_cannot_be_predicted_says_why(table):
    moe = {"model": "Qwen3-235B-A22B", "n_gpus": 8, "tp": 8.0, "notes": "but the table label gives TP only"}
    runs = read_runs(
        table({"isl": np.nan}, {"tp": np.nan}, moe, {"model": "X-1"}, {"gpu": "Z"}, {"framework": "CUDA"}, {"tp": 3})
    )
    pool, sessions = read_runs(table({"topology": "pd"}, {"arrival": "closed loop over sessions"}))
    assert pool.point.excluded.startswith("not one pool") and sessions.point.excluded.startswith("sessions of")
    words = [NO_LENGTHS, NO_LAYOUT, HALF_LAYOUT, "model X-1 is", "accelerator Z is", "framework CUDA: how", NO_LAYOUT]
    assert [run.point.excluded.startswith(w) for run, w in zip(runs, words, strict=True)] == [True] * 7


def test_layouts_and_weights_follow_the_labels(table):
    attention = {"model": "Qwen3-235B-A22B", "n_gpus": 8, "tp": np.nan, "dp": 8.0, "ep": 8.0}
    replicas = {"n_gpus": 8, "tp": 2.0}
    deepseek = {"model": "DeepSeek-R1-0528"} | {k: attention[k] for k in ("n_gpus", "tp", "dp", "ep")}
    ranks, two, native = (run.point for run in read_runs(table(attention, replicas, deepseek)))
    assert (ranks.layouts[0].data_parallel, ranks.layouts[0].expert_parallel, ranks.layouts[0].workers) == (8, 8, 1)
    (limited,) = read_runs(table({"notes": "engine max batch 512; max_num_tokens 4608"}))
    assert (limited.point.max_batch, limited.point.token_budget) == (512.0, 4608.0)
    assert ranks.max_batch == 8 * 2048 and ranks.weights == "fp8"
    assert two.layouts[0].workers == 4.0 and native.weights == "fp8-block"


def test_rates_near_the_measured_most_are_not_below_saturation(table):
    lengths = {"source": "online serving table", "isl": 467, "osl": 256}
    runs = read_runs(
        table(
            lengths | {"output_tok_s_total": 2560.0},
            lengths | POISSON | {"request_rate": 8.0, "output_tok_s_total": 2000.0},
            lengths | POISSON | {"request_rate": 9.0, "output_tok_s_total": 2200.0},
        )
    )
    assert [run.kind for run in runs] == [QUEUED, f"{OPEN}, below saturation", f"{OPEN}, at or above saturation"]
    alone, overloaded = (
        lengths | POISSON | {"request_rate": 8.0, "output_tok_s_total": pace} for pace in (2000.0, 500.0)
    )
    words = f"{OPEN}, saturating rate not measured", f"{OPEN}, at or above saturation"
    assert [run.kind for run in read_runs(table(alone, overloaded))] == list(words)


def test_requests_of_a_run_are_summed_up(tmp_path, table):
    came = np.arange(4.0)
    pd.DataFrame(
        {"gpu": "H200", "model": "Llama-3.1-8B", "input_toks": 100, "output_toks": 11, "queued_ts": came + 50.0}
        | {"first_token_ts": came + 50.5, "last_token_ts": came + 51.5}
    ).to_csv(tmp_path / "requests.csv", index=False)
    (run,) = read_runs(tmp_path / "requests.csv", table({"framework": "vllm"}))
    expected = {"ttft_ms": 500.0, "tpot_ms": 100.0, "e2e_s": 1.5, "output_tok_s_total": 44.0 / 4.5}
    assert {name: run.measured[name] for name in expected} == pytest.approx(expected)
    assert run.point.excluded == "" and list(run.starts_s) == [0.0, 1.0, 2.0, 3.0] and run.point.engine == "vllm"
    (unknown,) = read_runs(tmp_path / "requests.csv")
    assert unknown.point.excluded.startswith(NO_LAYOUT)


def test_a_folder_of_requests_has_its_deployments_beside_it(tmp_path):
    """The engine's own arguments, and the cache that it said it had; a file without them is left out."""
    stamps = {"queued_s": [0.0, 1.0], "first_token_s": [0.5, 1.5], "last_token_s": [1.5, 2.5]}
    for name in ("x_vllm_H200_Llama-3.1-8B", "other"):
        pd.DataFrame({"input_toks": 100, "output_toks": 11} | stamps).to_csv(tmp_path / f"{name}.csv", index=False)
    given = {"model": "meta-llama/Llama-3.1-8B", "tensor_parallel_size": 2, "dtype": "bfloat16", "max_num_seqs": 64}
    meta = {"engine_kwargs": given, "kv_cache": {"num_kv_tokens": 5000}}
    (tmp_path / "x_H200_Llama-3.1-8B_meta.json").write_text(json.dumps(meta))
    (run,) = read_runs(tmp_path)
    assert run.point.excluded == "" and run.kv_tokens == 5000.0 and run.point.max_batch == 64.0
    assert run.point.layouts[0].tensor_parallel == 2 and run.measured["e2e_s"] == 1.5
    (tmp_path / "x_H200_Llama-3.1-8B_meta.json").write_text("[]")
    with pytest.raises(InputError, match="engine_kwargs"):
        read_runs(tmp_path)
    (tmp_path / "x_H200_Llama-3.1-8B_meta.json").unlink()
    with pytest.raises(InputError, match=r"meta\.json"):
        read_runs(tmp_path)


@pytest.mark.skipif(not RECORDED.exists(), reason="the recorded runs are not on this machine")
def test_recorded_vllm_runs_are_predicted_request_by_request():
    """Three hundred ShareGPT requests on real vLLM 0.19, four times: also where it preempts (RTX 4090)."""
    table = validate_runs(RECORDED)
    assert table["excluded"].tolist() == [""] * 4
    for metric, within in (("ttft_ms", 0.15), ("tpot_ms", 0.10), ("e2e_p99_s", 0.20)):
        assert np.abs(table[metric] / table[f"measured_{metric}"] - 1.0).max() < within, metric


def test_a_batch_of_one_takes_its_prompt_and_its_steps(table):
    """Output tokens over the time of the call; its first token after the prefill, then a step each."""
    (run,) = read_runs(table(BATCHED | {"concurrency_or_batch": 1, "precision_weights": "fp16", "gpu": "A100"}))
    (found,) = replayed([run])
    call_s = found["ttft_ms"] / 1e3 + 127 * found["tpot_ms"] / 1e3
    assert found["output_tok_s_total"] == pytest.approx(128.0 / call_s, rel=1e-6)
    assert found["e2e_s"] == pytest.approx(call_s, rel=1e-6)
    weights_s = 16.06e9 / 2.039e12  # bytes of the weights over the memory's rate
    assert weights_s < found["tpot_ms"] / 1e3 < 1.6 * weights_s


def test_a_batch_gets_its_first_tokens_together(table):
    (run,) = read_runs(table(BATCHED | {"isl": 2048, "tpot_stat": "p50 (1 ms resolution)"}))
    assert run.medians == ("tpot_ms",)
    alone = dataclasses.replace(run, starts_s=run.starts_s[:1], prompt_tokens=run.prompt_tokens[:1])
    alone = dataclasses.replace(alone, output_tokens=run.output_tokens[:1])
    sixteen, one = replayed([run, alone])
    assert sixteen["ttft_p99_ms"] < 1.1 * sixteen["ttft_ms"]  # one after another the mean were half of it
    assert 8.0 < sixteen["ttft_ms"] / one["ttft_ms"] < 17.0


def test_validate_writes_every_row_and_counts_reasons(table, tmp_path, capsys):
    path, out, tables = table(BATCHED, {"model": "X-1"}), tmp_path / "pred.csv", tmp_path / "tables.md"
    with pytest.raises(SystemExit) as end:
        cli.main(["validate", str(path), "--out", str(out), "--markdown", str(tables)])
    assert end.value.code == 0
    written = pd.read_csv(out)
    assert list(written["id"]) == ["A-0", "A-1"] and written["output_tok_s_total"].notna().tolist() == [True, False]
    assert "1  excluded: model X-1 is not in the catalogue" in capsys.readouterr().out
    assert "| predicted | 1 |" in tables.read_text()
    with pytest.raises(SystemExit) as end:
        cli.main(["validate", str(path), "--local-points", "2"])
    assert end.value.code == 2


def test_errors_of_known_ratios(table):
    found = validate_runs(table({"model": "X-1"}, {"model": "X-1"}, {"model": "X-1"})).assign(excluded="")
    found["output_tok_s_total"] = [28000.0 * 1.1, 28000.0 * 0.8, 28000.0 * 1.6]
    assert errors(found, "output_tok_s_total") == pytest.approx(
        {"rows": 3, "mape": 0.3, "median": 0.2, "bias": 0.1, "within": 2 / 3}
    )
    assert errors(found, "ttft_ms") == {"rows": 0}
    assert [line[2] for line in report(found)] == ["output tokens/s"]


def test_runs_keep_the_model_below_its_own_limit(table):
    """All queued: no more than the engine's batch decodes at once, so more requests do not make it faster."""
    (run,) = read_runs(table({}))

    def pace(count: int) -> float:
        some: Run = dataclasses.replace(run, starts_s=np.zeros(count), prompt_tokens=run.prompt_tokens[:count])
        return replayed([dataclasses.replace(some, output_tokens=run.output_tokens[:count])])[0]["output_tok_s_total"]

    assert pace(20000) == pytest.approx(pace(10000), rel=0.1)
    assert pace(200) < pace(10000)
