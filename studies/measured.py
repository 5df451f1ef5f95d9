"""Measured serving points: makes each row a benchmark point, or says why it cannot be one.

The table has the columns of AIConfigurator's collection of silicon measurements (many of them InferenceX runs):
closed loop, fixed lengths, mean TTFT and TPOT in milliseconds. Its labels are partly wrong, so every rule below says
what it mends. Nothing is dropped: a row that cannot be trusted keeps its reason in `excluded`.
"""

import math
import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import pandas as pd

from breakeven.models.catalog import table
from breakeven.models.hardware import accelerators
from breakeven.models.llm import llms
from breakeven.studies.measured_layout import Layout, read_layouts, spans_nodes
from breakeven.studies.recipes import recipe

ENGINES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt-llm", "tensorrt-llm": "tensorrt-llm"}
SYSTEMS = {"gb200": "gb200-nvl72", "gb300": "gb300-nvl72", "b200": "b200-sxm", "h100": "h100-sxm", "h200": "h200-sxm"}
MODELS = {"llama-3.3-70b": "llama-3.1-70b", "deepseek-v3": "deepseek-r1"}  # the same architecture
CHECKPOINT = re.compile(r"-(instruct|it|hf|fp8|fp4|nvfp4|bf16|mxfp4|fp8-static-pertensor|instruct-fp8|0528|2507)$")
DRAFTS = ("deepseek", "qwen3.5", "qwen3-next", "glm", "mimo")  # checkpoints with a multi-token-prediction head
NOMINAL_SHARE = 0.9  # InferenceX draws lengths from U[0.8, 1.0] of the nominal ones (0.900 +- 0.005 from its E2E times)
TRUST = ("db-dump", "2026-04-06", "2026-03-25", "gap-analysis")  # whose label counts where copies of a run disagree

UNKNOWN_DRAFT = "speculative decoding is not said, and the checkpoint has a draft head"
SEVERAL_NODES = "a deployment over several nodes labelled agg"
UNKNOWN_SIZES = "sizes of its engines are not given: one accelerator each is a default"
NO_CONCURRENCY = "concurrency is not given"
UNKNOWN_WORKERS = "number of prefill or decode workers is not given: concurrency per worker is unknown"


LACKING = (UNKNOWN_DRAFT, UNKNOWN_WORKERS, UNKNOWN_SIZES, SEVERAL_NODES, NO_CONCURRENCY)  # a field a prediction needs


@dataclass(frozen=True)
class Point:
    """One row as a benchmark point. Lengths in tokens as they were sent, times in milliseconds."""

    id: str
    model: str  # catalogue id, empty where it has none
    accelerator: str
    engine: str
    mode: str  # agg or disagg
    precision: str
    prompt_tokens: float
    output_tokens: float
    concurrency: float  # all workers together
    weights: str
    kv: str
    layouts: tuple[Layout, ...]  # one, or prefill and decode
    stack: str  # row of engines.toml: the engine, or its era or mode
    ttft_ms: float
    tpot_ms: float
    source: str = ""
    measurement: str = ""  # id of the row that leads the copies of one run
    internal: bool = False  # another client than InferenceX's: no burst of ten times the concurrency is known
    accepted: float = 1.0  # tokens per decode step with speculation, a prior
    excluded: str = ""
    max_batch: float = math.nan  # sequences of an engine; nan: no limit of its own is known
    token_budget: float = math.nan  # new tokens per step; nan: the engine's

    @property
    def combination(self) -> tuple[str, str]:
        """What is left out together when a fit is judged."""
        return self.model, self.accelerator


def digits(ttft_ms: float, tpot_ms: float) -> tuple[str, str]:
    """What identifies a run across exports that round differently."""
    return f"{ttft_ms:.4g}", f"{tpot_ms:.4g}"


Row = dict[Hashable, Any]


def clean(table: pd.DataFrame, labels: Mapping[tuple[str, str], Mapping[str, Any]] | None = None) -> list[Point]:
    """Points of a table of measured rows, one per row and in its order."""
    rows: list[Row] = cast(Any, table).to_dict("records")
    keys = [_measurement(row) for row in rows]
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row, key in zip(rows, keys, strict=True):
        groups.setdefault(key, []).append(row)
    merged = {key: _union(copies) for key, copies in groups.items()}
    points = {key: _point(row, (labels or {}).get(_row_digits(row), {})) for key, row in merged.items()}
    return [replace(points[key], id=str(row["id"])) for row, key in zip(rows, keys, strict=True)]


def _row_digits(row: Row) -> tuple[str, str]:
    return digits(row["silicon_ttft_ms"], row["silicon_tpot_ms"])


def _measurement(row: Row) -> tuple[Any, ...]:
    """What makes two rows copies of one run: the sources repeat each other, some rounded to 0.1 and 0.01 ms."""
    times = round(row["silicon_ttft_ms"], 1), round(row["silicon_tpot_ms"], 2)
    path = str(row["model_path"])
    return (*times, model_id(path) or path, *(row[name] for name in ("system", "backend", "mode", "isl", "osl")))


def _given(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value)) and value != ""


def _source(row: Row) -> str:
    return str(row.get("silicon_data_source", "") or "")


def _rank(row: Row) -> int:
    return next((i for i, name in enumerate(TRUST) if name in _source(row)), len(TRUST))


def _defaulted(copy: Row) -> bool:
    names = [f"{phase}_{name}" for phase in ("prefill", "decode") for name in ("tp_size", "attention_dp_size")]
    return copy["mode"] == "disagg" and all(copy.get(name) == 1 for name in names)


def _union(copies: list[Row]) -> Row:
    """One row of the copies of a run: each field from the most trusted copy that has it; all ids and sources.

    A copy whose pools are of one accelerator each left its sizes at their defaults.
    """
    ordered = sorted(copies, key=lambda copy: (_defaulted(copy), _rank(copy)))
    row: Row = {}
    for copy in ordered:
        for name, value in copy.items():
            if _given(value) and not _given(row.get(name)):
                row[name] = value
    row["ids"] = [str(copy["id"]) for copy in ordered]
    row["sources"] = [_source(copy) for copy in ordered]
    row["paths"] = [str(copy["model_path"]) for copy in ordered]
    return row


def model_id(path: str) -> str:
    """The catalogue's model of a checkpoint path; empty where it has none.

    >>> model_id("nvidia/Llama-3.1-8B-Instruct-FP8")
    'llama-3.1-8b'
    """
    name = path.rsplit("/", 1)[-1].lower().removeprefix("meta-")
    while name not in llms() and CHECKPOINT.search(name):
        name = CHECKPOINT.sub("", name)
    name = MODELS.get(name, name)
    return name if name in llms() else ""


def accelerator_id(system: str) -> str:
    """The catalogue's accelerator of a system name; empty where it has none.

    >>> accelerator_id("b200_sxm")
    'b200-sxm'
    """
    name = system.lower().replace("_", "-")
    name = SYSTEMS.get(name, name)
    return name if name in accelerators() else ""


def weight_scheme(model: str, precision: str, path: str = "") -> str:
    """Which tensors a checkpoint's precision really covers.

    A blank one is 16 bit. FP8 checkpoints of DeepSeek, Qwen3 and MiniMax carry scales per block, those of Llama per
    tensor. The 4-bit checkpoints of expert models quantize the experts alone (MiniMax NVFP4, gpt-oss MXFP4: attention
    and head stay in 16 bit); those of dense models all linear layers. DeepSeek's NVFP4 checkpoints leave attention in
    16 bit, but for its output projection in the second version, which InferenceX runs (its recipes name
    DeepSeek-R1-0528-FP4-v2).
    """
    if precision == "fp8" and not model.startswith("llama"):
        return "fp8-block"
    if precision != "fp4":
        return precision or "bf16"
    if model.startswith("deepseek"):
        return "fp4-ffn" if "NVFP4" in path else "fp4-output"
    return "fp4-experts" if model and llms()[model].moe else "fp4"


def kv_precision(model: str, engine: str, accelerator: str, precision: str) -> str:
    """KV precision is not a column; the choice that agrees with the published recipes of each stack."""
    if precision in ("", "bf16"):
        return "bf16"
    if engine == "tensorrt-llm" or (engine == "vllm" and model.startswith("llama-3.1-70b")):
        return "fp8"
    blackwell = accelerator in accelerators() and accelerators()[accelerator].generation.startswith("blackwell")
    return "fp8" if engine == "vllm" and blackwell and model.startswith(("minimax", "gpt-oss")) else "bf16"


def _concurrency(row: Row, layouts: Iterable[Layout]) -> float:
    """Requests in flight over all workers: as the client was told, else the batch per rank times what holds one."""
    found = [re.search(r"silicon_concurrency=(\d+)", source) for source in row["sources"]]
    stated = [float(match.group(1)) for match in found if match]
    if stated:
        return stated[0]
    last = list(layouts)[-1]
    name = "batch_size" if row["mode"] == "agg" else "decode_batch_size"
    batch = row.get(name)
    if not _given(batch):
        return math.nan
    ranks = row.get("attention_dp_size" if row["mode"] == "agg" else "decode_attention_dp_size")
    workers = 1.0 if row["mode"] == "agg" else last.workers
    return float(cast(Any, batch)) * (float(cast(Any, ranks)) if _given(ranks) else 1.0) * workers


def _version(row: Row) -> tuple[int, ...]:
    """Leading numbers of the engine's version; (0,) where none is given."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", str(row.get("backend_version") or ""))
    return tuple(int(part) for part in found.group(1).split(".")) if found else (0,)


def _year(row: Row) -> int:
    found = [re.search(r"measured=(\d{4})", source) for source in row["sources"]]
    return max((int(match.group(1)) for match in found if match), default=0)


def _stack(row: Row, engine: str, model: str, layouts: tuple[Layout, ...], internal: bool) -> str:
    """The engine's era or mode.

    SGLang's API took far longer before 0.5.9; its split deployments have another front end. vLLM 0.12 ran expert models
    at 50 ms a token whatever the load: eagerly.
    InferenceX runs TensorRT-LLM with stream intervals of its own per model and workload: the first chunk of DeepSeek
    comes after 8 to 12 steps, that of Llama-70B after 20 to 22 at 1k/1k on up to four accelerators and after 3 to 5
    in every other set-up, alike on H200 and B200.
    """
    version, year = _version(row), _year(row)
    if engine == "tensorrt-llm" and not internal and row["mode"] == "agg":
        if model == "deepseek-r1":
            return "tensorrt-llm-stream10"
        short = row["isl"] < 2000 and row["osl"] < 2000 and all(x.accelerators <= 4 for x in layouts)
        if model == "llama-3.1-70b" and short:
            return "tensorrt-llm-stream20"
    if engine == "sglang" and row["mode"] == "agg" and (year == 2025 or (0, 0) < version < (0, 5, 9)):
        return "sglang-2025"
    if engine == "vllm" and (0, 12) <= version < (0, 13) and model and llms()[model].moe:
        return "vllm-eager"
    return engine


def accepted_tokens(concurrency: float, drafts: int | None = None) -> float:
    """Tokens per decode step of a draft head, as fitted: 1 + a + a^2 + ... of its drafts, falling with load."""
    fitted = table("calibration")["speculation"]
    a, count = fitted["acceptance"], fitted["drafts"] if drafts is None else drafts
    return max(sum(a**i for i in range(count + 1)) * max(concurrency, 1.0) ** -fitted["decay"], 1.0)


def _speculation(row: Row, model: str, label: Mapping[str, Any]) -> str:
    """none, mtp or unknown. Rows labelled DeepSeek-V3 and all of the database dump ran without; exports mix both."""
    if str(label.get("spec_decode", "")) in ("none", "mtp"):
        return str(label["spec_decode"])
    if any("db-dump" in source for source in row["sources"]) or any(p.endswith("DeepSeek-V3") for p in row["paths"]):
        return "none"
    return "unknown" if model.startswith(DRAFTS) else "none"


def _point(row: Row, label: Mapping[str, Any]) -> Point:
    model, accelerator = model_id(str(row["model_path"])), accelerator_id(str(row["system"]))
    engine = ENGINES.get(str(row["backend"]), "")
    precision = str(row["precision"]) if _given(row.get("precision")) else ""
    layouts = read_layouts(row, engine, model, label)
    inferencex = any(name in source for source in row["sources"] for name in TRUST)
    share = NOMINAL_SHARE if inferencex else 1.0
    concurrency = _concurrency(row, layouts) if layouts else math.nan
    speculation = _speculation(row, model, label)
    names, lengths = (model, engine, accelerator, precision), (row["isl"], row["osl"])
    batch, drafts = recipe(names, lengths, layouts, concurrency, speculation == "mtp")
    point = Point(
        id=row["ids"][0],
        model=model,
        accelerator=accelerator,
        engine=engine,
        mode=str(row["mode"]),
        precision=precision,
        prompt_tokens=share * row["isl"],
        output_tokens=share * row["osl"],
        concurrency=concurrency,
        weights=weight_scheme(model, precision, row["paths"][0]),
        kv=kv_precision(model, engine, accelerator, precision),
        layouts=layouts,
        stack=_stack(row, engine, model, layouts, not inferencex),
        ttft_ms=row["silicon_ttft_ms"],
        tpot_ms=row["silicon_tpot_ms"],
        source=row["sources"][0],
        measurement=row["ids"][0],
        internal=not inferencex,
        accepted=accepted_tokens(concurrency, drafts) if speculation == "mtp" and concurrency > 0.0 else 1.0,
        max_batch=batch,
    )
    return replace(point, excluded=_excluded(point, row, speculation))


def _excluded(point: Point, row: Row, speculation: str) -> str:
    """Why a point cannot be predicted or its measurement not be trusted; empty where it can."""
    workers = [layout.workers for layout in point.layouts]
    reasons = {
        f"backend {row['backend']} is not an engine of the catalogue": not point.engine,
        f"model {row['model_path']} is not in the catalogue": not point.model,
        f"system {row['system']} is not in the catalogue": not point.accelerator,
        f"mode {row['mode']} is neither agg nor disagg": point.mode not in ("agg", "disagg"),
        f"precision {point.precision} is not known": point.precision not in ("", "bf16", "fp8", "fp4", "int8", "int4"),
        "layout: attention and expert ranks do not agree": not point.layouts,
        SEVERAL_NODES: spans_nodes(point.mode, point.layouts),
        UNKNOWN_WORKERS: any(math.isnan(count) for count in workers),
        UNKNOWN_SIZES: _defaulted(row) and bool(point.model) and llms()[point.model].moe is not None,
        NO_CONCURRENCY: math.isnan(point.concurrency),
        UNKNOWN_DRAFT: speculation == "unknown",
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
