"""Result files of serving benchmarks: what each says of its load, and files that are none."""

import json
from pathlib import Path
from typing import Any

import pytest

from breakeven.models.inputs import InputError
from breakeven.studies.benchmark_files import read_observations

VLLM: dict[str, Any] = {
    "request_rate": "inf",
    "max_concurrency": 32,
    "completed": 320,
    "total_input_tokens": 320_000,
    "total_output_tokens": 160_000,
    "request_throughput": 4.2,
    "mean_ttft_ms": 210.5,
    "mean_tpot_ms": 12.25,
}
AIPERF: dict[str, Any] = {
    "request_throughput": {"unit": "requests/sec", "avg": 13.2},
    "time_to_first_token": {"unit": "ms", "avg": 1588.8},
    "inter_token_latency": {"unit": "ms", "avg": 51.76},
    "input_sequence_length": {"unit": "tokens", "avg": 550.0},
    "output_sequence_length": {"unit": "tokens", "avg": 96.85},
    "request_count": {"unit": "requests", "avg": 200.0},
    "input_config": {"loadgen": {"concurrency": 100, "request_rate_mode": "concurrency_burst"}},
}
INFERENCE_PERF: dict[str, Any] = {
    "load_summary": {"count": 300, "requested_rate": 5.0, "achieved_rate": 4.98},
    "successes": {
        "count": 300,
        "latency": {"time_to_first_token": {"mean": 0.12}, "time_per_output_token": {"mean": 0.0158}},
        "prompt_len": {"mean": 2000.0},
        "output_len": {"mean": 250.0},
    },
}


def read(folder: Path, data: Any) -> Any:
    path = folder / "result.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return read_observations(path)[0]


def test_vllm_without_a_rate_is_a_closed_loop_with_a_first_wave(tmp_path):
    seen = read(tmp_path, VLLM)
    assert (seen.concurrency, seen.requests, seen.input_tokens, seen.output_tokens) == (32.0, 320.0, 1000.0, 500.0)
    assert (seen.ttft_ms, seen.tpot_ms, seen.closed) == (210.5, 12.25, True)


def test_a_rate_that_requests_kept_up_with_is_an_open_load_else_the_limit_holds(tmp_path):
    assert read(tmp_path, VLLM | {"request_rate": 4.3}).requests_per_second == 4.3
    assert read(tmp_path, VLLM | {"request_rate": 40.0}).concurrency == 32.0


def test_aiperf_and_genai_perf(tmp_path):
    seen = read(tmp_path, AIPERF)
    assert (seen.concurrency, seen.ttft_ms, seen.tpot_ms, seen.requests) == (100.0, 1588.8, 51.76, 200.0)
    older = AIPERF | {"input_config": {"perf_analyzer": {"stimulus": {"concurrency": 8}}}}
    assert read(tmp_path, older | {"time_to_first_token": {"unit": "us", "avg": 5000}}).ttft_ms == pytest.approx(5.0)


def test_inference_perf_is_in_seconds_and_names_lengths_in_two_ways(tmp_path):
    seen = read(tmp_path, INFERENCE_PERF)
    assert (seen.requests_per_second, seen.input_tokens, seen.output_tokens) == (5.0, 2000.0, 250.0)
    assert (seen.ttft_ms, seen.tpot_ms) == (pytest.approx(120.0), pytest.approx(15.8))
    successes = INFERENCE_PERF["successes"] | {"prompt_tokens": {"mean": 1900.0}}
    assert read(tmp_path, INFERENCE_PERF | {"successes": successes}).input_tokens == 1900.0


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("{", "valid JSON"),
        ("[1]", "a JSON object"),
        ({"a": 1}, "a result of vllm bench serve"),
        (VLLM | {"max_concurrency": None}, "all came at once"),
        (VLLM | {"mean_ttft_ms": "fast"}, "mean_ttft_ms"),
        (VLLM | {"mean_tpot_ms": -1.0}, "tpot_ms"),
        (AIPERF | {"time_to_first_token": {"unit": "hours", "avg": 1}}, "time_to_first_token.unit"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(data, words, tmp_path):
    with pytest.raises(InputError) as error:
        read(tmp_path, data)
    assert words in str(error.value) and "result.json" in str(error.value) and "\n" not in str(error.value)
