"""How the engines of a measured point were laid out: tensor, data and expert parallelism, and how many there were.

The table's size columns mean different things in different sources; the row's id and consistency tell which.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FROM_ID = re.compile(r"_tp(\d+)(?:_0)?_ep(\d+|none)(?:_|$)")
FROM_LABEL = re.compile(r"tp(\d+)/ep(\d+)/dpattn=(\d)/workers=(\d+)")
NODE = 8  # accelerators of the nodes that one engine of an `agg` row stands in
GENUINE_ATTENTION_DP = ("tensorrt-llm", "sglang")  # vLLM's flag is set where attention ran tensor parallel


@dataclass(frozen=True)
class Layout:
    """One engine (pool member): ranks of attention and experts; `workers` of them, nan where nobody says."""

    tensor_parallel: int
    data_parallel: int
    expert_parallel: int
    pipeline_parallel: int = 1
    workers: float = 1.0

    @property
    def accelerators(self) -> int:
        """Accelerators of one engine."""
        return self.tensor_parallel * self.data_parallel * self.pipeline_parallel


def spans_nodes(mode: str, layouts: tuple[Layout, ...]) -> bool:
    """True for an `agg` row whose sizes count the accelerators of a whole multi-node deployment."""
    return mode == "agg" and any(layout.accelerators > NODE for layout in layouts)


def read_layouts(row: Mapping[Any, Any], engine: str, model: str, label: Mapping[str, Any]) -> tuple[Layout, ...]:
    """The layout of an `agg` row, or those of prefill and decode; empty where the columns contradict each other."""
    if row["mode"] == "agg":
        found = [_agg(row, engine, model)]
    else:
        found = [_pool(row, phase, engine, model, label) for phase in ("prefill", "decode")]
    return tuple(layout for layout in found if layout) if all(found) else ()


def _whole(row: Mapping[Any, Any], name: str, missing: int = 0) -> int:
    value = row.get(name)
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return missing
    return int(value)


def _agg(row: Mapping[Any, Any], engine: str, model: str) -> Layout | None:
    """The id tells tensor and expert parallelism where it has them; else the sizes, which some sources multiply."""
    sizes = [_whole(row, name) for name in ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")]
    pipeline = _whole(row, "pp_size", 1)
    for name in row["ids"]:
        match = FROM_ID.search(name)
        if match and match.group(2) != "none":
            return _from_id(int(match.group(1)), int(match.group(2)), sizes, engine, pipeline)
    return _from_sizes(sizes, engine, pipeline)


def _from_id(ranks: int, experts: int, sizes: list[int], engine: str, pipeline: int) -> Layout:
    split = sizes[1] > 1 and engine in GENUINE_ATTENTION_DP
    return Layout(1 if split else ranks, ranks if split else 1, experts, pipeline)


def _from_sizes(sizes: list[int], engine: str, pipeline: int) -> Layout | None:
    """Ranks from the columns alone.

    moe_tp = moe_ep = g > 1 is what g accelerators with whole experts read in sources that multiply the two: both
    tp_size and attention_dp_size are then g times too large. attention_dp_size missing follows from
    attention ranks = expert ranks (tp x dp = moe_tp x moe_ep). A dense model has no expert ranks.
    """
    tensor, data, expert_tensor, experts = sizes
    if expert_tensor > 1 and expert_tensor == experts and expert_tensor**2 in (tensor, data):
        tensor, data = (tensor // experts, 1) if tensor > 1 else (1, data // experts)
        return Layout(tensor, data, experts, pipeline)
    if tensor < 1:
        return None
    if data > 1 and engine not in GENUINE_ATTENTION_DP:
        return Layout(tensor, 1, tensor if experts > 1 else 1, pipeline)
    if data > NODE and max(experts, 1) == 1:  # no one splits experts over more than a node: the column is not filled
        expert_tensor, experts = 1, tensor * data
    ranks = max(expert_tensor, 1) * max(experts, 1)
    if data < 1:
        data = max(ranks // tensor, 1)
    if ranks not in (1, tensor * data):
        return None
    return Layout(tensor, data, max(experts, 1), pipeline)


def _pool(row: Mapping[Any, Any], phase: str, engine: str, model: str, label: Mapping[str, Any]) -> Layout | None:
    """A pool of a split deployment. Only some sources count its workers; a matched label counts them as well."""
    match = FROM_LABEL.search(str(label.get(f"{phase}_par", "")))
    counted = int(match.group(4)) if match else 0
    if match and counted > 0 and match.group(1) != "1":  # tp1/ep1 is what a label says where nobody filled it in
        tensor, experts, split, workers = (int(group) for group in match.groups())
        return Layout(1 if split else tensor, tensor if split else 1, experts, 1, workers)
    names = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    sizes = [_whole(row, f"{phase}_{name}") for name in names]
    layout = _from_sizes(sizes, engine, _whole(row, f"{phase}_pp_size", 1))
    workers = counted or _whole(row, f"{phase}_num_workers")
    if layout is None:
        return None
    return Layout(
        layout.tensor_parallel,
        layout.data_parallel,
        layout.expert_parallel,
        layout.pipeline_parallel,
        float(workers) if workers > 0 else math.nan,
    )
