"""Tables of measured kernels as samples of operators: sizes, seconds, and the group that one curve is fitted to.

A file's columns say which kernel it times; the schema is AIConfigurator's collection (its units: milliseconds, expert
all-to-all in microseconds, collectives in elements). Rows that no operator of the model stands for are counted with
their reason.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax import Array

from breakeven.models import operators as op
from breakeven.models.catalog import table
from breakeven.models.hardware import accelerators
from breakeven.models.inputs import InputError
from breakeven.models.steps import ACTIVATION_BYTES, collective_bytes_per_s
from breakeven.models.tables import arithmetic_rates
from breakeven.studies.kernel_logs import is_log, log_tables

Sizes = Mapping[str, Array]
SETTINGS = table("calibration")["kernels"]
SYSTEMS = {"a100": "a100-sxm-80gb", "b300": "b300-sxm", "gb200": "gb200-nvl72", "gb300": "gb300-nvl72"}
LATENT, ROPE, NOPE, VALUE = 512.0, 64.0, 128.0, 128.0  # widths of DeepSeek's latent attention, which the files time
MEASURED = "latency_ms", "latency_us"


@dataclass(frozen=True)
class Operator:
    """A kind of kernel: how its file is known, read and timed. `bounds` are (low, high) of each number of its curve."""

    kind: str
    columns: tuple[str, ...]
    read: Callable[[pd.DataFrame], pd.DataFrame]  # precision, variant, sizes, bytes
    seconds: Callable[[op.Curve, Sizes], Array]
    bounds: Mapping[str, tuple[float, float]]
    spans: tuple[str, ...]  # sizes whose range the fitted file states


@dataclass(frozen=True)
class Samples:
    """Rows of one operator in one precision on one generation, by one library's kernel."""

    operator: Operator
    generation: str
    precision: str
    library: str
    variant: str  # what tells kernels of the same precision apart, may be empty
    systems: tuple[str, ...]
    sizes: Mapping[str, np.ndarray]
    seconds: np.ndarray
    beyond: np.ndarray  # True where the operands exceed the cache

    @property
    def name(self) -> str:
        """The operator of kernels.toml that a curve of these samples can be."""
        return f"{self.operator.kind}_{self.precision}" if self.precision else self.operator.kind


def _system(name: str) -> str:
    short = name.removesuffix("_sxm").removesuffix("_server")
    dashed = name.replace("_", "-")
    return SYSTEMS.get(short, dashed if dashed in accelerators() else "")


def _hardware(frame: pd.DataFrame, precision: str = "") -> pd.DataFrame:
    """Peaks, bandwidth and cache of each row's accelerator, as the cost model sees them."""
    found = []
    for name, arithmetic in zip(
        frame["accelerator"], frame["arithmetic"] if precision else frame["accelerator"], strict=True
    ):
        a = accelerators()[name]
        rates = arithmetic_rates(a)
        peak = rates.get(f"{arithmetic.removesuffix('_block')}_flops_per_s", rates["bf16_flops_per_s"])
        found.append((peak, a.memory_bandwidth_bytes_per_s, a.sram_bytes))
    return pd.DataFrame(found, columns=["peak", "bandwidth", "cache"], index=frame.index)


# --- GEMM ---------------------------------------------------------------------------------------------------------

_GEMM = {  # dtype of the file: (arithmetic of the model, bytes per weight, bytes per input element)
    "bfloat16": ("bf16", 2.0, 2.0),
    "fp8": ("fp8", 1.0, 1.0),
    "fp8_block": ("fp8_block", 1.0, 1.0),
    "nvfp4": ("fp4", 0.5625, 0.5625),
    "sq": ("int8", 1.0, 1.0),
}


def _read_gemm(rows: pd.DataFrame) -> pd.DataFrame:
    rows = rows.loc[rows["dtype"].isin(list(_GEMM))].copy()
    kinds = [_GEMM[name] for name in rows["dtype"]]
    rows["precision"], rows["variant"] = [k[0] for k in kinds], rows["dtype"]
    weight, inputs = (np.array([k[i] for k in kinds]) for i in (1, 2))
    m, n, k = (rows[name].to_numpy(float) for name in "mnk")
    rows["flops"], rows["bytes"] = 2.0 * m * n * k, n * k * weight + m * k * inputs + 2.0 * m * n
    rows["quantised"] = np.where(rows["dtype"] == "bfloat16", 0.0, m * k)
    return rows


def gemm_s(curve: op.Curve, x: Sizes) -> Array:
    """One product of [m, k] and [k, n]; quantising its input is a pass of its own, which serving engines fuse away."""
    return (
        op.kernel_s(
            curve["latency_s"],
            op.read_s(curve, x["bytes"], x["bandwidth"]),
            op.compute_s(curve, x["flops"], x["peak"]),
        )
        + curve["quantise_bytes"] * x["quantised"] / x["bandwidth"]
    )


# --- attention ----------------------------------------------------------------------------------------------------


def _kv(rows: pd.DataFrame) -> np.ndarray:
    return np.where(rows["kv_cache_dtype"] == "fp8", 1.0, 2.0)


def _attention(rows: pd.DataFrame) -> pd.DataFrame:
    rows = rows.copy()
    rows["precision"] = np.where(rows["kv_cache_dtype"] == "fp8", "fp8", "bf16")
    rows["variant"] = np.where(rows["attn_dtype"] == rows["kv_cache_dtype"], "", "16-bit arithmetic")
    return rows


def _read_prefill(rows: pd.DataFrame) -> pd.DataFrame:
    rows = _attention(rows)
    queries = rows["batch_size"] * rows["isl"]
    rows["head_flops"] = 4.0 * rows["head_dim"]
    rows["queries"], rows["pairs"] = queries, queries * (rows["isl"] + 1) / 2.0
    rows["bytes"] = (
        queries * rows["head_dim"] * 2.0 * ACTIVATION_BYTES * (rows["num_heads"] + rows["num_key_value_heads"])
    )
    return rows


def _read_vision(rows: pd.DataFrame) -> pd.DataFrame:
    rows = rows.copy()
    rows["precision"], rows["variant"], rows["backend"] = "bf16", "", "vllm"
    queries = rows["batch_size"] * rows["isl"]
    rows["head_flops"] = 4.0 * rows["head_dim"]
    rows["queries"], rows["pairs"] = queries, queries * rows["isl"].astype(float)
    rows["bytes"] = queries * rows["head_dim"] * 4.0 * ACTIVATION_BYTES * rows["num_heads"]
    return rows


def _read_prefill_mla(rows: pd.DataFrame) -> pd.DataFrame:
    rows = _attention(rows.assign(attn_dtype=rows["kv_cache_dtype"]))
    queries = rows["batch_size"] * rows["isl"]
    rows["head_flops"] = 2.0 * (NOPE + ROPE + VALUE)
    rows["queries"], rows["pairs"] = queries, queries * (rows["isl"] + 1) / 2.0
    rows["bytes"] = queries * rows["num_heads"] * ACTIVATION_BYTES * 2.0 * (NOPE + ROPE + VALUE)
    return rows


def prefill_attention_s(curve: op.Curve, x: Sizes) -> Array:
    """Attention of whole prompts, causal or not by its pairs; heads are those of one accelerator."""
    pair_s = op.pair_s(curve, x["num_heads"] * x["head_flops"], x["head_flops"], x["peak"])
    moved_s = x["bytes"] / (curve["read"] * x["bandwidth"])
    return op.kernel_s(curve["latency_s"], moved_s, pair_s * op.masked_pairs(curve, x["pairs"], x["queries"]))


def prefill_mla_s(curve: op.Curve, x: Sizes) -> Array:
    """The same for latent attention, whose one head size leaves the exponentials in the share."""
    return prefill_attention_s({**curve, "softmax_flops": jnp.zeros(())}, x)


def _read_decode(rows: pd.DataFrame) -> pd.DataFrame:
    rows = _attention(rows.assign(attn_dtype=rows["kv_cache_dtype"]))
    cached = rows["batch_size"] * (rows["step"] + 1.0)
    rows["context"] = rows["step"] + 1.0
    rows["flops"] = 4.0 * cached * rows["num_heads"] * rows["head_dim"]
    rows["bytes"] = 2.0 * cached * rows["num_key_value_heads"] * rows["head_dim"] * _kv(rows)
    return rows


def _read_decode_mla(rows: pd.DataFrame) -> pd.DataFrame:
    rows = _attention(rows.assign(attn_dtype=rows["kv_cache_dtype"]))
    cached = rows["batch_size"] * (rows["step"] + 1.0)
    rows["context"] = rows["step"] + 1.0
    rows["flops"] = 2.0 * cached * rows["num_heads"] * (2.0 * LATENT + ROPE)
    rows["bytes"] = cached * (LATENT + ROPE) * _kv(rows)
    return rows


def product_s(curve: op.Curve, x: Sizes) -> Array:
    """A kernel known by its bytes and FLOPs alone."""
    return op.kernel_s(
        curve["latency_s"], op.read_s(curve, x["bytes"], x["bandwidth"]), op.compute_s(curve, x["flops"], x["peak"])
    )


# --- experts ------------------------------------------------------------------------------------------------------

_EXPERTS = {
    "bfloat16": ("bf16", 2.0),
    "fp8": ("fp8", 1.0),
    "fp8_block": ("fp8_block", 1.0),
    "nvfp4": ("fp4", 0.5625),
    "w4a16_mxfp4": ("fp4", 0.53125),
    "w4a8_mxfp4_mxfp8": ("fp4", 0.53125),
}


def _read_experts(rows: pd.DataFrame) -> pd.DataFrame:
    """Balanced loads: a skewed one times the most loaded rank, which the model's imbalance stands for. Files without
    any balanced row (Ampere) are taken with their least skew."""
    rows = rows.loc[rows["moe_dtype"].isin(list(_EXPERTS))].copy()
    least = rows.groupby("system")["distribution"].transform("min")
    rows = rows.loc[rows["distribution"] == least].copy()
    kinds = [_EXPERTS[name] for name in rows["moe_dtype"]]
    rows["precision"] = [k[0] for k in kinds]
    rows["variant"] = rows["moe_dtype"]
    experts = rows["num_experts"] / rows["moe_ep_size"]
    hit = -np.expm1(rows["num_tokens"] * np.log1p(-np.minimum(rows["topk"] / rows["num_experts"], 0.999999)))
    weights = 3.0 * rows["hidden_size"] * rows["inter_size"] / rows["moe_tp_size"]
    copies = rows["num_tokens"] * rows["topk"] / rows["moe_ep_size"]
    rows["bytes"] = experts * hit * weights * np.array([k[1] for k in kinds])
    rows["flops"], rows["permuted"] = 2.0 * copies * weights, copies * rows["hidden_size"]
    return rows


def experts_s(curve: op.Curve, x: Sizes) -> Array:
    """Both grouped products of one layer's experts on one rank, with sorting tokens by expert and summing them."""
    return product_s(curve, x) + op.permute_s(curve["permute_bytes"], x["permuted"], x["bandwidth"])


# --- collectives --------------------------------------------------------------------------------------------------


def _link(rows: pd.DataFrame, ranks: str) -> np.ndarray:
    found = []
    for name, count in zip(rows["accelerator"], rows[ranks], strict=True):
        a = accelerators()[name]
        hw = SimpleNamespace(**{k: jnp.float32(v) for k, v in vars(a).items() if isinstance(v, int | float)})
        found.append(float(collective_bytes_per_s(cast(Any, hw), jnp.float32(count))))
    return np.array(found)


def _read_allreduce(rows: pd.DataFrame) -> pd.DataFrame:
    """Kernels inside a CUDA graph; eager ones time the launch as well."""
    rows = rows.loc[~rows["implementation"].str.contains("eager")].copy()
    rows["precision"], rows["variant"], rows["backend"] = "", "CUDA graph", "engines'"
    return _messages(rows)


def _read_nccl(rows: pd.DataFrame) -> pd.DataFrame:
    rows = rows.loc[(rows["op_name"] == "all_reduce") & (rows["nccl_dtype"] == "half")].copy()
    rows["precision"], rows["variant"], rows["backend"] = "", "", "nccl"
    return _messages(rows)


def _read_gather(rows: pd.DataFrame) -> pd.DataFrame:
    """All-gather and reduce-scatter: of the whole message each rank gets, or sends, the part of the others."""
    rows = rows.loc[rows["op_name"].isin(["all_gather", "reduce_scatter"]) & (rows["nccl_dtype"] == "half")].copy()
    rows["precision"], rows["variant"], rows["backend"] = "", "", "nccl"
    rows = _messages(rows)
    return rows.assign(bytes=rows["bytes"] * (rows["ranks"] - 1.0) / rows["ranks"])


def _messages(rows: pd.DataFrame) -> pd.DataFrame:
    """Every message counts: there is no cache to exceed; of more ranks than `most_ranks` none does."""
    most = [SETTINGS["most_ranks"].get(_generation(name), np.inf) for name in rows["accelerator"]]
    rows = rows.loc[rows["num_gpus"].to_numpy(float) <= np.array(most)].copy()
    rows["ranks"], rows["bytes"] = rows["num_gpus"], ACTIVATION_BYTES * rows["message_size"]
    return rows.assign(link=_link(rows, "num_gpus"), beyond_bytes=np.inf)


def allreduce_s(curve: op.Curve, x: Sizes) -> Array:
    """One all-reduce inside a node."""
    volume = op.allreduce_bytes(curve, x["bytes"], x["ranks"])
    return op.collective_latency_s(curve, x["ranks"]) + sum(op.exchange_s(curve, volume, x["link"]))


def gather_s(curve: op.Curve, x: Sizes) -> Array:
    """One all-gather or reduce-scatter inside a node."""
    return op.collective_latency_s(curve, x["ranks"]) + sum(op.exchange_s(curve, x["bytes"], x["link"]))


def _read_alltoall(rows: pd.DataFrame) -> pd.DataFrame:
    """Dispatch and combine of one layer together, by the faster of the modes for few and for many tokens."""
    rows = rows.copy()
    rows["mode"] = rows["comm_backend"].str.contains("ll").map({True: "few", False: "many"})
    keys = ["system", "backend", "accelerator", "hidden_size", "topk", "num_experts", "num_tokens", "ep_size"]
    grouped: Any = rows.groupby([*keys, "mode", "phase"])["latency_us"]
    phases = grouped.min().reset_index()
    both = phases.pivot_table(index=[*keys, "mode"], columns="phase", values="latency_us").dropna().reset_index()
    both["latency_us"] = both["dispatch"] + both["combine"]
    best = both.loc[both.groupby(keys)["latency_us"].idxmin()].copy()
    best["precision"], best["variant"], best["beyond_bytes"] = "", "", np.inf
    sent = np.asarray(op.hit_ranks(best["ep_size"].to_numpy(float), best["topk"].to_numpy(float)))
    best["bytes"] = 3.0 * best["num_tokens"] * sent * best["hidden_size"]
    best["link"] = _link(best, "ep_size")
    return best


def alltoall_s(curve: op.Curve, x: Sizes) -> Array:
    """Dispatch (1 byte) and combine (2 bytes an element) of each rank's tokens to the ranks that they must reach."""
    return curve["latency_s"] + sum(op.exchange_s(curve, x["bytes"], x["link"]))


_SHARE, _READ = (0.02, 1.0), (0.05, 1.0)
_LATENCY = (5e-7, 3e-4)
_PRODUCT = {"share": _SHARE, "read": _READ, "latency_s": _LATENCY}
_PREFILL = {"share": (0.02, 2.0), "half_keys": (1.0, 4096.0), "latency_s": _LATENCY, "read": _READ}
_SOFTMAX = {"softmax_flops": (1.0, 512.0)}
_EXCHANGE = {"share": (0.02, 2.0), "latency_s": _LATENCY, "half_bytes": (1.0, 1e8)}
_GATHER = _EXCHANGE | {"per_rank": (1e-3, 1.0)}
_ALLREDUCE = _GATHER | {"ring_power": (0.25, 4.0)}

OPERATORS = (
    Operator(
        "gemm",
        ("m", "n", "k", "dtype"),
        _read_gemm,
        gemm_s,
        _PRODUCT | {"quantise_bytes": (0.5, 40.0)},
        ("m", "n", "k"),
    ),
    Operator(
        "experts",
        ("moe_dtype", "num_experts", "num_tokens"),
        _read_experts,
        experts_s,
        _PRODUCT | {"permute_bytes": (0.5, 100.0)},
        ("num_tokens", "num_experts"),
    ),
    Operator("alltoall", ("comm_backend", "phase"), _read_alltoall, alltoall_s, _EXCHANGE, ("num_tokens", "ep_size")),
    Operator(
        "allreduce",
        ("allreduce_dtype", "implementation"),
        _read_allreduce,
        allreduce_s,
        _ALLREDUCE,
        ("bytes", "ranks"),
    ),
    Operator("allreduce", ("nccl_version", "op_name"), _read_nccl, allreduce_s, _ALLREDUCE, ("bytes", "ranks")),
    Operator("gather", ("nccl_version", "op_name"), _read_gather, gather_s, _GATHER, ("bytes", "ranks")),
    Operator(
        "prefill_mla", ("mla_dtype", "isl", "tp_size"), _read_prefill_mla, prefill_mla_s, _PREFILL, ("isl", "num_heads")
    ),
    Operator(
        "decode_mla", ("mla_dtype", "isl", "tp_size"), _read_decode_mla, product_s, _PRODUCT, ("context", "batch_size")
    ),
    Operator(
        "prefill_attention",
        ("attn_dtype", "kv_cache_dtype", "isl"),
        _read_prefill,
        prefill_attention_s,
        _PREFILL | _SOFTMAX,
        ("isl", "head_dim"),
    ),
    Operator(
        "decode_attention",
        ("attn_dtype", "kv_cache_dtype", "isl"),
        _read_decode,
        product_s,
        _PRODUCT,
        ("context", "batch_size"),
    ),
    Operator(
        "vision_attention",
        ("attn_dtype", "head_dim", "isl"),
        _read_vision,
        prefill_attention_s,
        _PREFILL | _SOFTMAX,
        ("isl", "head_dim"),
    ),
)
_BY_KIND = {operator.kind: operator for operator in OPERATORS}
_NOT_SIZES = ("system", "backend", "accelerator", "precision", "variant", "generation", "version", "arithmetic")


def recognised(table: pd.DataFrame) -> list[Operator]:
    """The operators that a table times, told from its columns and, for attention, from its decode rows of one token."""
    columns = set(table.columns)
    fits = [operator for operator in OPERATORS if set(operator.columns) <= columns]
    if fits and fits[0].kind.startswith(("prefill", "decode")):
        decode = bool((table["isl"] == 1).all())
        kind = fits[0].kind
        return [_BY_KIND[kind.replace("prefill", "decode") if decode else kind]]
    return [operator for operator in fits if operator.columns == fits[0].columns]


def kernel_files(paths: Sequence[str | Path]) -> list[Path]:
    """CSV files named, those of a named folder included."""
    found: list[Path] = []
    for path in map(Path, paths):
        found += sorted(path.glob("*.csv")) if path.is_dir() else [path]
    return found


def is_kernel_table(path: Path) -> bool:
    """True where a CSV times kernels (its header names latency and an operator's columns), for a log of them, and for
    a folder of such tables."""
    if path.is_dir() or is_log(path):
        return True
    try:
        head = pd.read_csv(path, nrows=2, low_memory=False)
    except (OSError, ValueError, UnicodeDecodeError):
        return False
    return any(name in head.columns for name in MEASURED) and bool(recognised(head))


def read_kernels(paths: Sequence[str | Path]) -> tuple[list[Samples], dict[str, int]]:
    """(samples, rows left out by reason) of kernel tables; files that time nothing known are a reason too."""
    samples: list[Samples] = []
    left: dict[str, int] = {}
    tables = [(path, frame) for path in kernel_files(paths) for frame in _tables(path)]
    for path, frame in tables:
        operators = recognised(frame)
        if not operators or not any(name in frame.columns for name in MEASURED):
            left[f"{path.name}: no kernel that the model has"] = len(frame)
            continue
        found, unknown, unused = _samples(operators, frame, path)
        samples += found
        if unknown:
            left[f"{path.name}: system is not in the catalogue"] = unknown
        if unused:
            left[f"{path.name}: another number format, a skewed load, launched eagerly, or a slower mode"] = unused
    if not samples:
        raise InputError("KERNELS", ", ".join(map(str, paths)), "tables or logs of measured kernels")
    return samples, left


def _tables(path: Path) -> list[pd.DataFrame]:
    return log_tables(path) if is_log(path) else [_read(path)]


def _read(path: Path) -> pd.DataFrame:
    try:
        frame = pd.read_csv(path, low_memory=False)
    except (OSError, ValueError, UnicodeDecodeError) as error:
        words = str(error).splitlines()
        raise InputError("KERNELS", str(path), f"a readable CSV file ({words[0] if words else ''})") from None
    for name in MEASURED:
        if name in frame.columns:
            numbers: Any = pd.to_numeric(frame[name], errors="coerce")
            values = numbers.to_numpy(float)
            if not (values > 0.0).all():
                row = int((~(values > 0.0)).argmax())
                raise InputError(f"row {row + 2}.{name}", float(values[row]), "a positive number", str(path))
    return frame


def _samples(operators: Sequence[Operator], frame: pd.DataFrame, path: Path) -> tuple[list[Samples], int, int]:
    """(samples, rows of systems that are not in the catalogue, rows that no operator reads)."""
    if "system" not in frame.columns:
        raise InputError("system", None, "is required: the accelerator of each row", str(path))
    frame = frame.assign(accelerator=[_system(str(name)) for name in frame["system"]])
    known = frame.loc[frame["accelerator"] != ""]
    found, used = [], 0
    for operator in operators:
        rows = _read_rows(operator, known, path)
        groups = rows.groupby(["generation", "precision", "backend", "variant"], sort=True)
        found += [_group(operator, cast(Any, key), part) for key, part in groups]
        used += len(rows)
    return found, len(frame) - len(known), len(known) - used


def _read_rows(operator: Operator, known: pd.DataFrame, path: Path) -> pd.DataFrame:
    try:
        rows = operator.read(known)
    except KeyError as error:
        raise InputError(
            str(error.args[0]), None, f"is required: a column of {operator.kind} kernels", str(path)
        ) from None
    rows = rows.assign(
        arithmetic=rows["precision"] if operator.kind in ("gemm", "experts") else "bf16",
        generation=[_generation(name) for name in rows["accelerator"]],
    )
    return pd.concat([rows, _hardware(rows, "given")], axis=1)


def _generation(accelerator: str) -> str:
    """Workstation Blackwell has neither NVLink nor HBM: not the generation that the catalogue's curves mean."""
    a = accelerators()[accelerator]
    return a.generation if a.scaleup_domain > 1 or a.generation != "blackwell" else "blackwell-workstation"


def _group(operator: Operator, key: tuple[str, ...], rows: pd.DataFrame) -> Samples:
    generation, precision, library, variant = key
    numbers = rows.select_dtypes("number").drop(columns=list(MEASURED), errors="ignore")
    size = rows["beyond_bytes" if "beyond_bytes" in rows.columns else "bytes"].to_numpy(float)
    unit = 1e-6 if "latency_us" in rows.columns else 1e-3
    return Samples(
        operator=operator,
        generation=generation,
        precision=precision,
        library=library,
        variant=variant,
        systems=tuple(sorted(set(rows["system"]))),
        sizes={name: numbers[name].to_numpy(float) for name in numbers.columns},
        seconds=rows["latency_us" if unit == 1e-6 else "latency_ms"].to_numpy(float) * unit,
        beyond=size > rows["cache"].to_numpy(float),
    )
