"""A folder of recorded requests: CSV files of time stamps, each with the arguments of the engine that served it.

LLMServingSim's bench writes both: one row per request, and `*meta.json` with vLLM's arguments. A file belongs to the
JSON file all of whose words (parted by _) its name has, so `a_vllm_b.csv` to `a_b_meta.json`, and `requests.csv` to
`meta.json`; one of the words names the accelerator (`models/catalog/runs.toml`).
"""

import json
from pathlib import Path
from typing import Any

import pandas as pd

from breakeven.models.catalog import table
from breakeven.models.inputs import InputError

STAMPS = {"queued_s": "queued_ts", "first_token_s": "first_token_ts", "last_token_s": "last_token_ts"}
_COLUMNS = {"input_toks", "output_toks", *STAMPS.values()}
_WIDTHS = {"bfloat16": "bf16", "float16": "fp16", "auto": "bf16", "fp8": "fp8"}


def read_folder(folder: Path) -> tuple[pd.DataFrame, list[dict[str, Any]]]:
    """(every request with its accelerator and model, one row of labels per file). Raises InputError."""
    parts, labels = [], []
    for path in sorted(folder.glob("*.csv")):
        requests = pd.read_csv(path).rename(columns=STAMPS)
        meta = _meta(path)
        if set(requests.columns) >= _COLUMNS and meta is not None:
            label = _label(path, meta)
            labels.append(label)
            parts.append(requests.assign(gpu=label["gpu"], model=label["model"]))
    if not parts:
        allowed = "a folder with CSV files of requests and the meta.json of each, as LLMServingSim's bench writes them"
        raise InputError("MEASURED", str(folder), allowed)
    return pd.concat(parts, ignore_index=True), labels


def _words(name: str) -> set[str]:
    return set(filter(None, name.split("_")))


def _meta(path: Path) -> dict[str, Any] | None:
    """The engine's arguments and facts that belong to a file of requests."""
    own = {p: _words(p.name.removesuffix("meta.json")) for p in sorted(path.parent.glob("*meta.json"))}
    found = [p for p, words in own.items() if words <= _words(path.stem)]
    if not found:
        return None
    best = max(found, key=lambda p: len(own[p]))
    try:
        read = json.loads(best.read_text(encoding="utf-8"))
        _ = read["engine_kwargs"]["model"]
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            "engine_kwargs", None, "is required: the engine's arguments, its model among them", str(best)
        ) from None
    return read


def _label(path: Path, meta: dict[str, Any]) -> dict[str, Any]:
    """The deployment of a file of requests, in the columns of a table of runs."""
    given = meta["engine_kwargs"]
    tensor, data, depth = (int(given.get(f"{name}_parallel_size") or 1) for name in ("tensor", "data", "pipeline"))
    known = [word for word in table("runs")["accelerators"] if word in _words(path.stem)]
    width = _WIDTHS.get(str(given.get("dtype", "auto")), "")
    cache = str(given.get("kv_cache_dtype", "auto"))
    tokens = (meta.get("kv_cache") or {}).get("num_kv_tokens")
    return {
        "gpu": known[0] if known else path.stem,
        "model": str(given["model"]).rsplit("/", 1)[-1],
        "n_gpus": tensor * data * depth,
        "framework": "vllm",
        "precision_weights": given.get("quantization") or width,
        "precision_kv": width if cache == "auto" else cache,
        "spec_decode": "none" if not given.get("speculative_config") else "given",
        "tp": tensor,
        "dp": data,
        "pp": depth,
        "ep": tensor * data if given.get("enable_expert_parallel") else 1,
        "topology": f"colocated (max_num_batched_tokens {given.get('max_num_batched_tokens') or 'default'})",
        "concurrency_or_batch": f"max_num_seqs {given.get('max_num_seqs') or 'default'}",
        "source": path.parent.name,
        "kv_tokens": tokens,
    }
