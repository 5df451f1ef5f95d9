"""Measurements that cannot be right: faster than the fastest measured kernels compute, or than memory can be read."""

import math
from collections.abc import Sequence
from dataclasses import replace

from breakeven.models.hardware import accelerators
from breakeven.models.llm import llms
from breakeven.studies.measured import Point

# Best share of the dense peak that GEMM kernels reach on H100, H200 and B200 (AIConfigurator 0.12.0, TensorRT-LLM and
# vLLM): 899 of 989 TFLOP/s in 16 bit, 1,584 of 1,979 in FP8, 4,643 of 9,000 in NVFP4.
FASTEST = {"bf16": 0.91, "fp8": 0.80, "fp4": 0.52}
EIGHT_BIT = 1.0  # byte per element of the smallest cache that the published engines keep
TOO_FAST = "some runs of this series outpace the fastest kernels or the memory: cached prompts, or a wrong label"


def compute_share(point: Point) -> float:
    """Share of the dense peak that the measured throughput implies if every token is computed; nan where unknown.

    By Little's law X = N / (TTFT + (O - 1) TPOT) requests per second, each 2 FLOPs per active weight and token. Engines
    that only prefill compute the prompts.
    """
    if not (point.model and point.accelerator and point.layouts):
        return math.nan
    a, hardware = llms()[point.model], accelerators()[point.accelerator]
    active = a.attention_parameters + a.dense_parameters
    if a.moe:
        active += a.expert_parameters * a.experts_active / a.experts
    peak = {"fp8": hardware.fp8_flops_per_s, "fp4": hardware.fp4_flops_per_s or hardware.fp8_flops_per_s}
    prefill = point.layouts[0]
    rate = peak.get(point.precision, hardware.bf16_flops_per_s) * prefill.accelerators * prefill.workers
    tokens = point.prompt_tokens + (point.output_tokens if len(point.layouts) == 1 else 0.0)
    return point.concurrency / _seconds(point) * 2.0 * active * tokens / rate if rate > 0.0 else math.nan


def _seconds(point: Point) -> float:
    return (point.ttft_ms + (point.output_tokens - 1.0) * point.tpot_ms) / 1e3


def memory_share(point: Point) -> float:
    """Share of the memory bandwidth that reading the cache of all that decodes takes, at 8 bits; nan where unknown."""
    if not (point.model and point.accelerator and point.layouts):
        return math.nan
    a, decode = llms()[point.model], point.layouts[-1]
    step_s = point.tpot_ms / 1e3
    running = point.concurrency * point.output_tokens * step_s / _seconds(point)
    cached = running * (point.prompt_tokens + 0.5 * point.output_tokens) * a.kv_elements_per_token * EIGHT_BIT
    bandwidth = accelerators()[point.accelerator].memory_bandwidth_bytes_per_s
    return cached / (step_s * point.accepted * decode.accelerators * decode.workers * bandwidth)


def _series(point: Point) -> tuple[str, ...]:
    """Runs of one client, stack and model on one system."""
    return point.source if point.internal else point.id, point.model, point.engine, point.accelerator, point.mode


def _too_fast(point: Point) -> bool:
    return compute_share(point) > FASTEST.get(point.precision, FASTEST["bf16"]) or memory_share(point) > 1.0


def without_impossible(points: Sequence[Point]) -> list[Point]:
    """The points, with those of a series excluded when one of them outpaces the fastest kernels."""
    fast = {_series(p) for p in points if _too_fast(p)}
    return [replace(p, excluded=TOO_FAST) if not p.excluded and _series(p) in fast else p for p in points]
