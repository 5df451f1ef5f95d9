"""Measurements that cannot be right: prompts computed faster than the hardware's fastest measured kernels would."""

import math
from collections.abc import Sequence
from dataclasses import replace

from breakeven.models.hardware import accelerators
from breakeven.models.llm import llms
from breakeven.studies.measured import Point

# Best share of the dense peak that GEMM kernels reach on H100, H200 and B200 (AIConfigurator 0.12.0, TensorRT-LLM and
# vLLM): 899 of 989 TFLOP/s in 16 bit, 1,584 of 1,979 in FP8, 4,643 of 9,000 in NVFP4.
FASTEST = {"bf16": 0.91, "fp8": 0.80, "fp4": 0.52}
TOO_FAST = "some runs of this series outpace the fastest kernels: prompts were cached, or a label is wrong"


def compute_share(point: Point) -> float:
    """Share of the dense peak that the measured throughput implies if every token is computed; nan where unknown.

    By Little's law X = N / (TTFT + (O - 1) TPOT) requests per second, each 2 FLOPs per active weight and token.
    """
    if not (point.model and point.accelerator and point.layouts):
        return math.nan
    a, hardware = llms()[point.model], accelerators()[point.accelerator]
    active = a.attention_parameters + a.dense_parameters
    if a.moe:
        active += a.expert_parameters * a.experts_active / a.experts
    peak = {"fp8": hardware.fp8_flops_per_s, "fp4": hardware.fp4_flops_per_s or hardware.fp8_flops_per_s}
    rate = peak.get(point.precision, hardware.bf16_flops_per_s) * sum(x.accelerators * x.workers for x in point.layouts)
    seconds = (point.ttft_ms + (point.output_tokens - 1.0) * point.tpot_ms) / 1e3
    work = 2.0 * active * (point.prompt_tokens + point.output_tokens)
    return point.concurrency / seconds * work / rate if rate > 0.0 else math.nan


def _series(point: Point) -> tuple[str, ...]:
    """Runs of one client, stack and model on one system."""
    return point.source if point.internal else point.id, point.model, point.engine, point.accelerator, point.mode


def without_impossible(points: Sequence[Point]) -> list[Point]:
    """The points, with those of a series excluded when one of them outpaces the fastest kernels."""
    fast = {_series(p) for p in points if compute_share(p) > FASTEST.get(p.precision, FASTEST["bf16"])}
    return [replace(p, excluded=TOO_FAST) if not p.excluded and _series(p) in fast else p for p in points]
