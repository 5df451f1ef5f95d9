"""What profilers and collective benchmarks print, as tables of kernels: nccl-tests, PyTorch Profiler, Nsight Systems.

nccl-tests (`all_reduce_perf`, `all_gather_perf`, `reduce_scatter_perf`) print a line per message size. A PyTorch trace
(`export_chrome_trace`, with `record_shapes=True`, launched eagerly: a CUDA graph hides which operator a kernel is of)
has the sizes of matrix products and collectives beside the kernels they launched. A kernel summary of Nsight Systems
(`nsys stats --report cuda_gpu_kern_sum --format csv`) has no sizes: it tells the time of a step, not of an operator.
"""

import gzip
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pandas as pd

from breakeven.models.inputs import InputError

DEVICES = {  # part of a device's name, the catalogue's accelerator; the longest that fits
    "GB300": "gb300-nvl72",
    "GB200": "gb200-nvl72",
    "B300": "b300-sxm",
    "B200": "b200-sxm",
    "H200": "h200-sxm",
    "H100": "h100-sxm",
    "H100 PCIe": "h100-pcie",
    "A100-SXM4-80GB": "a100-sxm-80gb",
    "L40S": "l40s",
    "RTX PRO 6000": "rtx-pro-6000-server",
    "RTX 4090": "rtx-4090",
}
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")
HALF_BYTES = 2.0  # tables of collectives count 16-bit elements
ELEMENT_BYTES = {"Float": 4.0, "Half": 2.0, "BFloat16": 2.0, "Float8_e4m3fn": 1.0, "Byte": 1.0}
PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::_scaled_mm": 0}  # operator: which input is the first factor
INPUTS = {"c10::BFloat16": "bfloat16", "c10::Half": "bfloat16", "c10::Float8_e4m3fn": "fp8"}
SUMMARY = ("Total Time (ns)", "Instances", "Name")


def device_id(name: str) -> str:
    """The catalogue's accelerator of a device's name; the name itself where it has none.

    >>> device_id("NVIDIA H100 80GB HBM3")
    'h100-sxm'
    """
    found = [part for part in DEVICES if part.lower() in name.lower()]
    return DEVICES[max(found, key=len)] if found else name


def is_log(path: Path) -> bool:
    """Whether a file is the output of nccl-tests or a PyTorch trace."""
    return is_trace(path) or "nccl-tests" in _head(path) or "busbw" in _head(path)


def is_trace(path: Path) -> bool:
    """Whether a file is a PyTorch trace, zipped or not."""
    return path.name.endswith((".json", ".json.gz")) and "traceEvents" in _trace_head(path)


def is_kernel_summary(path: Path) -> bool:
    """Whether a CSV is a kernel summary of Nsight Systems."""
    return all(name in _head(path) for name in SUMMARY)


def _head(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(20_000)
    except (OSError, UnicodeDecodeError):
        return ""


def _trace_head(path: Path) -> str:
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            return file.read(200_000)
    except (OSError, UnicodeDecodeError, EOFError):
        return ""


def log_tables(path: Path) -> list[pd.DataFrame]:
    """Tables of the kernels in a log, in the columns of `studies.kernels`; InputError where it has none."""
    found = _trace_tables(_trace(path), path) if is_trace(path) else [_collectives(path)]
    if not any(len(frame) for frame in found):
        raise InputError("KERNELS", str(path), "products with their input shapes, or collectives, eagerly launched")
    return [frame for frame in found if len(frame)]


# --- nccl-tests ---------------------------------------------------------------------------------------------------


def _collectives(path: Path) -> pd.DataFrame:
    text = _head(path)
    ranks = re.findall(r"^#\s+Rank\s+\d+ .*\]\s*(.+?)\s*$", text, re.MULTILINE)
    operation = next((name for name in OPERATIONS if re.search(rf"\b{name}_perf", text)), None)
    operation = operation or next((name for name in OPERATIONS if name in path.name), None)
    if not ranks:
        raise InputError("KERNELS", str(path), "a line `#  Rank  0 ...` for each rank, as nccl-tests prints them")
    if operation is None:
        raise InputError("KERNELS", str(path), f"the name of its program in it or in its file's name: {OPERATIONS}")
    columns = next((line.strip("# ").split() for line in text.splitlines() if "busbw" in line), [])
    if "time" not in columns:
        raise InputError("KERNELS", str(path), "the heading `size count type ... time algbw busbw`")
    rows = [line.split() for line in text.splitlines() if re.match(r"\s*\d+\s+\d+\s+[a-z]", line)]
    timed = [(float(row[0]), _first_number(row, columns)) for row in rows]
    measured = [(size, us) for size, us in timed if us > 0.0 and size > 0.0]
    return pd.DataFrame([_collective(device_id(ranks[0]), operation, len(ranks), *pair) for pair in measured])


def _first_number(row: Sequence[str], columns: Sequence[str]) -> float:
    """The time out of place, in place where that was not run; microseconds."""
    for column, name in enumerate(columns):
        if name == "time" and column < len(row) and re.fullmatch(r"[\d.]+", row[column]):
            return float(row[column])
    return 0.0


def _collective(system: str, operation: str, ranks: float, size_bytes: float, us: float) -> dict[str, Any]:
    return {
        "system": system,
        "nccl_version": "",
        "op_name": operation,
        "nccl_dtype": "half",
        "num_gpus": ranks,
        "message_size": size_bytes / HALF_BYTES,
        "latency_ms": us / 1e3,
    }


# --- PyTorch Profiler ---------------------------------------------------------------------------------------------


def _trace(path: Path) -> Mapping[str, Any]:
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            data = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        words = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError("KERNELS", str(path), f"a readable trace ({words})") from None
    if not isinstance(data, Mapping) or not isinstance(data.get("traceEvents"), list):
        raise InputError("KERNELS", str(path), "a trace with traceEvents")
    return data


def _kernels(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [e for e in data["traceEvents"] if isinstance(e, Mapping) and e.get("cat") == "kernel" and "dur" in e]


def _trace_tables(data: Mapping[str, Any], path: Path) -> list[pd.DataFrame]:
    devices = data.get("deviceProperties") or [{}]
    system = device_id(str(devices[0].get("name", "")))
    if not system:
        raise InputError("KERNELS", str(path), "deviceProperties with the name of the accelerator")
    return [pd.DataFrame(_products(data, system)), pd.DataFrame(_traced_collectives(data, system))]


def _products(data: Mapping[str, Any], system: str) -> list[dict[str, Any]]:
    """Matrix products: the operator's shapes, and all kernels that it launched."""
    launched: dict[Any, float] = {}
    for kernel in _kernels(data):
        number = kernel.get("args", {}).get("External id")
        launched[number] = launched.get(number, 0.0) + float(kernel["dur"])
    rows = []
    for event in data["traceEvents"]:
        args = event.get("args", {}) if isinstance(event, Mapping) else {}
        number, first = args.get("External id"), PRODUCTS.get(str(event.get("name"))) if args else None
        shapes, types = args.get("Input Dims", []), args.get("Input type", [])
        if first is None or number not in launched or len(shapes) < first + 2:
            continue
        (a, b), dtype = shapes[first : first + 2], INPUTS.get(str(types[first]) if len(types) > first else "")
        if dtype and len(a) == 2 and len(b) == 2:
            rows.append(
                {"system": system, "backend": "pytorch", "dtype": dtype, "m": a[0], "n": b[1], "k": a[1]}
                | {"latency_ms": launched[number] / 1e3}
            )
    return rows


def _traced_collectives(data: Mapping[str, Any], system: str) -> list[dict[str, Any]]:
    rows = []
    for kernel in _kernels(data):
        args = kernel.get("args", {})
        name = str(args.get("Collective name", "")).strip("_").replace("_", "").removesuffix("base")
        operation = next((o for o in OPERATIONS if name.startswith(o.replace("_", ""))), None)
        size = ELEMENT_BYTES.get(str(args.get("dtype")), 0.0)
        elements = float(args.get("Out msg nelems" if operation == "all_gather" else "In msg nelems", 0))
        if operation and size * elements > 0.0 and args.get("Group size", 0) > 1:
            rows.append(_collective(system, operation, args["Group size"], size * elements, float(kernel["dur"])))
    return rows


# --- the time of a step -------------------------------------------------------------------------------------------


def step_s(path: Path, steps: float | None, ranks: float | None) -> float:
    """Seconds that kernels take in a step, on one accelerator: all that a profile of decode recorded over its steps.

    A trace counts its own steps (`ProfilerStep#`) and accelerators; of a summary both must be told (one accelerator
    where `ranks` is None). Gaps between kernels are not in it.
    """
    if is_trace(path):
        data = _trace(path)
        names = {str(e.get("name")) for e in data["traceEvents"] if isinstance(e, Mapping)}
        steps = steps or float(sum(name.startswith("ProfilerStep#") for name in names))
        kernels = _kernels(data)
        ranks = float(len({kernel.get("args", {}).get("device", 0) for kernel in kernels}) or 1)
        total_s = sum(float(kernel["dur"]) for kernel in kernels) / 1e6
    elif is_kernel_summary(path):
        lines = path.read_text(encoding="utf-8").splitlines()
        start = next(i for i, line in enumerate(lines) if SUMMARY[0] in line)
        table = pd.read_csv(path, skiprows=start, thousands=",")
        times: Any = pd.to_numeric(cast(Any, table[SUMMARY[0]]), errors="coerce")
        total_s = float(times.sum()) / 1e9
    else:
        raise InputError("profile", str(path), "a PyTorch trace, or a cuda_gpu_kern_sum of nsys as CSV")
    if not steps or not total_s > 0.0:
        raise InputError("profile_steps", steps, f"how many decode steps {path.name} recorded")
    return total_s / (steps * (ranks or 1.0))
