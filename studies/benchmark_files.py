"""Result files of serving benchmarks as observations: `vllm bench serve`, AIPerf and GenAI-Perf, inference-perf.

Each tool writes one JSON object per load. What is read: means of TTFT and TPOT, mean lengths, and the load.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from breakeven.models.inputs import InputError
from breakeven.studies.observations import Observation, checked, read_observations_csv

Found = dict[str, Any]  # fields of an observation
KEPT_UP = 0.9  # share of the requested rate that requests must come at for the load to be that rate


def read_observations(path: str | Path) -> list[Observation]:
    """Observations in a file: a CSV of them, or what a benchmark wrote."""
    if Path(path).suffix.lower() != ".json":
        return read_observations_csv(path)
    file = str(path)
    data = _json(file)
    for reader, belongs in READERS:
        if belongs(data):
            try:
                return [checked({k: v for k, v in reader(data).items() if v is not None}, file)]
            except InputError as error:
                raise error.inside(file=file) from None
    raise InputError(
        "file", Path(file).name, "a result of vllm bench serve, AIPerf, GenAI-Perf or inference-perf", file
    )


def _json(file: str) -> Mapping[str, Any]:
    try:
        data = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError("--local", file, f"a readable file ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        words = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError("--local", file, f"valid JSON ({words})") from None
    if not isinstance(data, Mapping):
        raise InputError("file", Path(file).name, "a JSON object", file)
    return data


def _at(data: Any, *path: str) -> Any:
    """The value at a path of keys, None where there is none."""
    for key in path:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def _number(data: Any, *path: str) -> float | None:
    """A finite number at a path, also where it is written as text; None where there is none."""
    value = _at(data, *path)
    try:
        found = math.nan if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        raise InputError(".".join(path), value, "a number") from None
    return found if math.isfinite(found) else None


def _ratio(total: float | None, count: float | None) -> float | None:
    return total / count if total is not None and count else None


def _load(concurrency: float | None, rate: float | None, achieved: float | None) -> Found:
    """A rate that requests really came at, else the concurrency that held them back; error where neither is given."""
    if rate is not None and (concurrency is None or achieved is None or achieved >= KEPT_UP * rate):
        return {"requests_per_second": rate}
    if concurrency is None:
        raise InputError("concurrency", None, "a limit on requests in flight, or a request rate: all came at once")
    return {"concurrency": concurrency}


def _vllm(data: Mapping[str, Any]) -> Found:
    """`vllm bench serve --save-result`; a request_rate of "inf": concurrency alone holds requests back."""
    done = _number(data, "completed")
    load = _load(_number(data, "max_concurrency"), _number(data, "request_rate"), _number(data, "request_throughput"))
    return load | {
        "ttft_ms": _number(data, "mean_ttft_ms"),
        "tpot_ms": _number(data, "mean_tpot_ms"),
        "input_tokens": _ratio(_number(data, "total_input_tokens"), done),
        "output_tokens": _ratio(_number(data, "total_output_tokens"), done),
        "requests": done if "concurrency" in load else None,
    }


MILLISECONDS = {"ms": 1.0, "s": 1e3, "sec": 1e3, "us": 1e-3, "ns": 1e-6}


def _aiperf(data: Mapping[str, Any]) -> Found:
    """profile_export_aiperf.json, and profile_export_genai_perf.json, which states its load under other names."""
    load = _load(
        _first(
            data,
            ("input_config", "loadgen", "concurrency"),
            ("input_config", "perf_analyzer", "stimulus", "concurrency"),
        ),
        _first(
            data,
            ("input_config", "loadgen", "request_rate"),
            ("input_config", "perf_analyzer", "stimulus", "request_rate"),
        ),
        _number(data, "request_throughput", "avg"),
    )
    return load | {
        "ttft_ms": _milliseconds(data, "time_to_first_token"),
        "tpot_ms": _milliseconds(data, "inter_token_latency"),
        "input_tokens": _number(data, "input_sequence_length", "avg"),
        "output_tokens": _number(data, "output_sequence_length", "avg"),
        "requests": _number(data, "request_count", "avg") if "concurrency" in load else None,
    }


def _first(data: Mapping[str, Any], *paths: tuple[str, ...]) -> float | None:
    return next((value for path in paths if (value := _number(data, *path)) is not None), None)


def _milliseconds(data: Mapping[str, Any], name: str) -> float | None:
    value, unit = _number(data, name, "avg"), _at(data, name, "unit")
    if value is None:
        return None
    if unit not in MILLISECONDS:
        raise InputError(f"{name}.unit", unit, "one of " + ", ".join(MILLISECONDS))
    return value * MILLISECONDS[unit]


def _inference_perf(data: Mapping[str, Any]) -> Found:
    """stage_N_lifecycle_metrics.json: seconds; lengths are `prompt_len` in older, `prompt_tokens` in newer ones."""
    times = "successes", "latency"
    rate = _number(data, "load_summary", "requested_rate")
    load = _load(_number(data, "load_summary", "concurrency"), rate, _number(data, "load_summary", "achieved_rate"))
    seconds = {name: _number(data, *times, name, "mean") for name in ("time_to_first_token", "time_per_output_token")}
    ttft, tpot = (None if value is None else 1e3 * value for value in seconds.values())
    return load | {
        "ttft_ms": ttft,
        "tpot_ms": tpot,
        "input_tokens": _first(data, ("successes", "prompt_tokens", "mean"), ("successes", "prompt_len", "mean")),
        "output_tokens": _first(data, ("successes", "output_tokens", "mean"), ("successes", "output_len", "mean")),
        "requests": _number(data, "successes", "count") if "concurrency" in load else None,
    }


Reader = Callable[[Mapping[str, Any]], Found]
READERS: tuple[tuple[Reader, Callable[[Mapping[str, Any]], bool]], ...] = (
    (_vllm, lambda data: "mean_ttft_ms" in data),
    (_aiperf, lambda data: isinstance(data.get("time_to_first_token"), Mapping)),
    (_inference_perf, lambda data: isinstance(_at(data, "successes", "latency"), Mapping)),
)
