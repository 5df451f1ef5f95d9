"""Published runs in the uniform schema of measurements: each row's deployment and protocol, or why it has none.

Rows say what was sent: a batch at once, a closed loop, requests at a rate, or all of them queued. What they leave out
of engine and protocol stands in `catalog/runs.toml`.
"""

import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd

from breakeven.models.catalog import table
from breakeven.models.distributions import Floats
from breakeven.models.hardware import accelerators
from breakeven.models.inputs import InputError
from breakeven.models.llm import llms
from breakeven.studies.measured import Point, kv_precision, model_id, weight_scheme
from breakeven.studies.measured_layout import Layout
from breakeven.studies.request_folder import read_folder

REQUIRED = ("row_id", "model", "gpu", "n_gpus", "framework", "precision_weights", "tp", "arrival", "request_rate")
METRICS = ("ttft_ms", "tpot_ms", "e2e_s", "ttft_p99_ms", "tpot_p99_ms", "e2e_p99_s", "output_tok_s_total")
PER_REQUEST = ("gpu", "model", "input_toks", "output_toks", "queued_ts", "first_token_ts", "last_token_ts")
STATS = {"ttft_ms": "ttft_stat", "tpot_ms": "tpot_stat", "e2e_s": "e2e_stat"}  # columns that say: mean or median
BATCH, CLOSED, OPEN, QUEUED = "batch at once", "closed loop", "open loop", "all queued"
SATURATED = 0.85  # of the measured saturating rate: an offered rate above it does not count as below saturation
OVERLOADED = 0.5  # of the offered rate: less throughput than that is no end effect of a short run
ROUNDS = 10  # waves of a closed loop whose number of requests is not known

NO_LENGTHS = "prompt lengths are not published"
NO_LAYOUT = "parallelism is not published"
HALF_LAYOUT = "tensor parallelism alone is given where the recipe also sets attention and expert parallelism"
SPECULATIVE = "speculative decoding of unknown acceptance"


@dataclass(frozen=True)
class Run:
    """One run: its deployment (a `Point` without times), what was sent, and what was measured."""

    point: Point
    load: str  # BATCH, CLOSED, OPEN or QUEUED
    starts_s: Floats  # of every request; infinite: when another one ends
    prompt_tokens: Floats
    output_tokens: Floats
    measured: dict[str, float]
    overrides: dict[str, float] = field(default_factory=dict)  # of the engine
    medians: tuple[str, ...] = ()  # metrics of it that are medians, not means
    rate: float = math.nan  # offered, per second
    kv_tokens: float = math.nan  # cache that the engine said it had; nan where it did not
    saturation: float = math.nan  # offered over the measured saturating rate; nan where that was not measured

    @property
    def kind(self) -> str:
        """Its load in the words of the report."""
        if self.load != OPEN:
            return self.load
        if math.isnan(self.saturation):
            return f"{OPEN}, saturating rate not measured"
        return f"{OPEN}, {'at or above' if self.saturation > SATURATED else 'below'} saturation"

    @property
    def pace(self) -> float:
        """Measured requests per second."""
        return self.measured["output_tok_s_total"] / self.point.output_tokens


def is_table_of_runs(path: str | Path) -> bool:
    """Whether the file's first line names the columns of either kind of runs, or it is a folder of requests."""
    if Path(path).is_dir():
        return True
    try:
        with Path(path).open(encoding="utf-8") as file:
            names = set(file.readline().strip().split(","))
    except (OSError, UnicodeDecodeError):
        return False
    return {"row_id", "arrival", "output_tok_s_total"} <= names or set(PER_REQUEST) <= names


def read_runs(path: str | Path, labels: str | Path | None = None) -> list[Run]:
    """Runs of a file, one per row in its order; of a file of requests one per (gpu, model), whose deployments the rows
    of `labels` tell; of a folder one per file of requests."""
    if Path(path).is_dir():
        return _per_request(*read_folder(Path(path)))
    given = _read(path)
    if set(PER_REQUEST) <= set(given.columns):
        return _per_request(given, _records(_read(labels)) if labels else [])
    for name in REQUIRED:
        if name not in given.columns:
            raise InputError(name, None, "is required: a column of the measured runs", str(path))
    return _with_saturation([_run(row) for row in _records(given)])


def _read(path: str | Path) -> pd.DataFrame:
    try:
        return pd.read_csv(path, low_memory=False)
    except (OSError, ValueError, UnicodeDecodeError) as error:
        words = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError("MEASURED.csv", str(path), f"a readable CSV file ({words})") from None


def _records(given: pd.DataFrame) -> list[dict[str, Any]]:
    return cast(Any, given).to_dict("records")


def _number(row: dict[str, Any], name: str) -> float:
    value = row.get(name)
    try:
        return float(cast(Any, value)) if value is not None else math.nan
    except ValueError:
        return math.nan


def _text(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    return "" if pd.isna(cast(Any, value)) else str(value)


def _framework(name: str) -> dict[str, Any]:
    """The framework whose name is the longest beginning of this one."""
    rows = table("runs")["frameworks"]
    found = [key for key in rows if name.lower().startswith(key.lower())]
    return rows[max(found, key=len)] if found else {}


def _model(name: str) -> str:
    return model_id(table("runs")["models"].get(name.lower(), name))


def _layout(row: dict[str, Any]) -> Layout | None:
    """Ranks and replicas; attention data parallelism where `dp` is given. None: not published."""
    tensor, data, depth, experts = (_number(row, name) for name in ("tp", "dp", "pp", "ep"))
    if not (tensor > 0.0 or data > 1.0):
        return None
    tensor = tensor if tensor > 0.0 else 1.0
    sizes = [int(x) if x > 0.0 else 1 for x in (tensor, data, experts, depth)]
    each = sizes[0] * sizes[1] * sizes[3]
    workers = _number(row, "n_gpus") / each
    return Layout(*sizes, workers=workers) if workers >= 1.0 and workers == int(workers) else None


def _limit(row: dict[str, Any], pattern: str) -> float:
    """A limit that a row states in words; nan where it does not."""
    words = " ".join(_text(row, name) for name in ("concurrency_or_batch", "topology", "notes"))
    found = re.search(pattern, words)
    return float(found.group(1)) if found else math.nan


def _lengths(row: dict[str, Any]) -> tuple[float, float]:
    means = [_number(row, f"{name}_mean_actual") for name in ("isl", "osl")]
    nominal = [_number(row, name) for name in ("isl", "osl")]
    found = [mean if mean > 0.0 else other for mean, other in zip(means, nominal, strict=True)]
    if math.isnan(found[1]) and "first-token" in _text(row, "notes"):
        found[1] = 2.0
    return found[0], found[1]


def _drawn(row: dict[str, Any], mean: float, count: int, seed: int) -> Floats:
    """Lengths of every request. Of a real data set of which only means are published they are drawn exponentially, an
    assumption; a power of two is a limit of the client that all reach."""
    known = not re.search(r"sharegpt \(|dataset means", _text(row, "dataset").lower())
    if known or (mean == int(mean) and int(mean).bit_count() == 1):
        return np.full(count, mean)
    return np.rint(np.random.default_rng(seed).exponential(mean, count))


def _requests(row: dict[str, Any], prompt: float, output: float) -> int:
    """Requests of a run that does not say."""
    given = table("runs")["requests"]
    source = f"{_text(row, 'source')} {_text(row, 'dataset')}".lower()
    named = [count for name, count in given.items() if name != "lengths" and name in source]
    return int(named[0] if named else given["lengths"].get(f"{prompt:g}/{output:g}", 3000))


def _starts(load: str, requests: int, held: float, rate: float) -> Floats:
    """When each request comes: at once, `held` at once and one when another ends, or at random at `rate`."""
    if load in (BATCH, QUEUED):
        return np.zeros(requests)
    if load == CLOSED:
        return np.where(np.arange(requests) < held, 0.0, np.inf)
    return np.cumsum(np.random.default_rng(0).exponential(1.0 / rate, requests))


def _load(row: dict[str, Any]) -> str:
    arrival = _text(row, "arrival")
    if "batch" in arrival:
        return BATCH
    if arrival.startswith("closed_loop"):
        return CLOSED
    return QUEUED if arrival.startswith("offline") else OPEN


def _run(row: dict[str, Any]) -> Run:
    load, (prompt, output) = _load(row), _lengths(row)
    held, rate = _number(row, "concurrency_or_batch"), _number(row, "request_rate")
    point = _point(row, prompt, output)
    reasons = {
        NO_LENGTHS: not (prompt > 0.0 and output > 0.0),
        "concurrency is not given": load in (BATCH, CLOSED) and not held > 0.0,
        "request rate is not given": load == OPEN and not (rate > 0.0 and math.isfinite(rate)),
        "nothing of what is predicted was measured": not any(_number(row, name) > 0.0 for name in METRICS),
    }
    excluded = point.excluded or next((reason for reason, holds in reasons.items() if holds), "")
    count = 0 if excluded else _requests(row, prompt, output)
    if not excluded and load in (BATCH, CLOSED):
        count = int(held) if load == BATCH else max(count, ROUNDS * int(held))
    if load == BATCH:  # one pass over all prompts: the first tokens of all come at its end
        point = replace(point, token_budget=max(held * prompt, 1.0))
    return Run(
        replace(point, concurrency=held if held > 0.0 else math.nan, excluded=excluded),
        load,
        _starts(load, count, held, rate),
        np.maximum(_drawn(row, prompt, count, 1), 1.0) if count else np.zeros(0),
        np.maximum(_drawn(row, output, count, 2), 2.0) if count else np.zeros(0),
        {name: _number(row, name) for name in METRICS},
        dict(_framework(_text(row, "framework")).get("overrides", {})),
        tuple(name for name, stat in STATS.items() if _text(row, stat).startswith(("p50", "median"))),
        rate if load == OPEN else math.nan,
    )


def _point(row: dict[str, Any], prompt: float, output: float) -> Point:
    """The deployment of a row; `excluded` says why it cannot be predicted."""
    known = table("runs")
    framework, layout = _framework(_text(row, "framework")), _layout(row)
    model = _model(_text(row, "model"))
    accelerator = known["accelerators"].get(_text(row, "gpu"), "")
    precision = known["weights"].get(_text(row, "precision_weights"), "")
    engine = framework.get("engine", "")
    kv = {"fp8": "fp8", "fp16": "bf16", "bf16": "bf16"}.get(_text(row, "precision_kv"), "")
    ranks = layout.data_parallel if layout else 1
    batch, tokens = _limit(row, r"max[_ ](?:batch|num_seqs) (\d+)"), _limit(row, r"max_num(?:_batched)?_tokens (\d+)")
    experts = bool(model) and llms()[model].moe is not None
    reasons = {
        f"framework {_text(row, 'framework')}: how it is run is not known": not engine,
        "not one pool of engines that do both phases": not f"{_text(row, 'topology')}colocated".startswith("colocated"),
        "sessions of several calls": "sessions" in _text(row, "arrival"),
        f"model {_text(row, 'model')} is not in the catalogue": not model,
        f"accelerator {_text(row, 'gpu')} is not in the catalogue": accelerator not in accelerators(),
        f"precision {_text(row, 'precision_weights')} is not known": not precision,
        SPECULATIVE: _text(row, "spec_decode") not in ("", "none"),
        NO_LAYOUT: layout is None,
        HALF_LAYOUT: "gives TP only" in _text(row, "notes") and experts and _number(row, "n_gpus") > 1.0,
        "flagged as suspect": _number(row, "suspect") > 0.0,
        "its source or unit is in doubt": _text(row, "confidence") == "C",
    }
    return Point(
        id=_text(row, "row_id"),
        model=model,
        accelerator=accelerator if accelerator in accelerators() else "",
        engine=engine,
        mode="agg",
        precision=precision,
        prompt_tokens=prompt,
        output_tokens=output,
        concurrency=math.nan,
        weights=_weights(model, precision, engine),
        kv=kv or kv_precision(model, engine, accelerator, precision),
        layouts=(layout,) if layout else (),
        stack=engine,
        ttft_ms=_number(row, "ttft_ms"),
        tpot_ms=_number(row, "tpot_ms"),
        source=_text(row, "source"),
        measurement=_text(row, "row_id"),
        excluded=next((reason for reason, holds in reasons.items() if holds), ""),
        max_batch=ranks * (batch if batch > 0.0 else framework.get("max_batch", math.nan)),
        token_budget=tokens,
    )


def _weights(model: str, precision: str, engine: str) -> str:
    """TensorRT-LLM's FP8 checkpoints carry a scale per tensor (ModelOpt), but for DeepSeek's own."""
    per_tensor = precision == "fp8" and engine == "tensorrt-llm" and not model.startswith("deepseek")
    return "fp8" if per_tensor else weight_scheme(model, precision)


def _deployment(run: Run) -> tuple[Any, ...]:
    """What runs of one deployment and workload have in common: lengths to two digits, as logs count them anew."""
    p = run.point
    return p.model, p.accelerator, p.engine, p.precision, p.layouts, f"{p.prompt_tokens:.2g}", f"{p.output_tokens:.2g}"


def _with_saturation(runs: list[Run]) -> list[Run]:
    """Open loops with their rate over the most that their deployment was measured to do with all requests queued, or
    over their own throughput where it is below `OVERLOADED` of the rate."""
    most: dict[tuple[Any, ...], float] = {}
    for run in runs:
        if run.load == QUEUED:
            most[_deployment(run)] = max(most.get(_deployment(run), 0.0), run.pace)

    def saturation(run: Run) -> float:
        known = run.pace if run.pace < OVERLOADED * run.rate else most.get(_deployment(run), math.nan)
        return run.rate / known if run.load == OPEN and known > 0.0 else math.nan

    return [replace(run, saturation=saturation(run)) for run in runs]


def _per_request(given: pd.DataFrame, labels: list[dict[str, Any]]) -> list[Run]:
    """Runs of which every request was recorded: when it came, its lengths, its first and last token."""
    names = table("runs")["accelerators"]

    def key(gpu: str, model: str) -> tuple[str, str]:
        return names.get(gpu, gpu), _model(model) or model

    told = {key(_text(row, "gpu"), _text(row, "model")): row for row in labels}
    runs = []
    for (gpu, model), group in cast(Any, given).groupby(["gpu", "model"], sort=False):
        label = told.get(key(str(gpu), str(model)), {})
        row = {"gpu": gpu, "model": model} | label | {"row_id": f"{gpu}/{model}"}
        part = group.sort_values("queued_ts")
        came, first, last = (part[name].to_numpy(float) for name in ("queued_ts", "first_token_ts", "last_token_ts"))
        prompt, output = (np.maximum(part[name].to_numpy(float), 1.0) for name in ("input_toks", "output_toks"))
        point = _point(row, float(prompt.mean()), float(output.mean()))
        if not label:
            point = replace(point, excluded=f"{NO_LAYOUT}: no row of --labels has its accelerator and model")
        ttft, tpot = 1e3 * (first - came), 1e3 * (last - first)[output > 1.0] / (output[output > 1.0] - 1.0)
        measured = figures(ttft, tpot, last - came, float(output.sum() / (last.max() - came.min())))
        framework = _framework(_text(row, "framework"))
        rate = (len(part) - 1.0) / float(np.ptp(came))
        runs.append(
            Run(
                replace(point, ttft_ms=measured["ttft_ms"], tpot_ms=measured["tpot_ms"]),
                OPEN,
                came - came.min(),
                prompt,
                output,
                measured,
                dict(framework.get("overrides", {})),
                rate=rate,
                kv_tokens=_number(label, "kv_tokens"),
            )
        )
    return _with_saturation(runs)


def figures(
    ttft_ms: Floats, tpot_ms: Floats, call_s: Floats, pace: float, medians: tuple[str, ...] = ()
) -> dict[str, float]:
    """What the table of runs measures, of requests: milliseconds, seconds, output tokens per second."""
    values = {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "e2e_s": call_s}
    found = {name: _middle(x, name in medians) for name, x in values.items()}
    found |= {f"{name}_p99_ms": _p99(x) for name, x in (("ttft", ttft_ms), ("tpot", tpot_ms))}
    found["e2e_p99_s"] = _p99(call_s)
    return found | {"output_tok_s_total": pace}


def _middle(values: Floats, median: bool) -> float:
    return math.nan if not len(values) else float(np.median(values) if median else values.mean())


def _p99(values: Floats) -> float:
    return float(np.quantile(values, 0.99)) if len(values) else math.nan
