"""Inputs of the model as factors: what a relative change of each means for the arrays that `evaluate` takes.

Every input is a factor on some of the leaves of a scenario (workload, SLO, catalogue) or of a deployment; those of a
workload keep its nodes consistent. The same code runs on numbers (one changed scenario) and traced
(derivatives by the logarithm of the factors).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from breakeven.models.attainment import Slo
from breakeven.models.deployment import Deployment
from breakeven.models.tables import Catalog, Hardware
from breakeven.models.topology import STAGES
from breakeven.models.workload import PrefillNodes, Workload

Factor = Any  # a number, or a traced scalar

PEAKS = ("bf16_flops_per_s", "fp8_flops_per_s", "int8_flops_per_s", "fp4_flops_per_s")
WEIGHTS = ("attention_weights", "dense_weights", "expert_weights", "head_weights", "embedding_weights")
KV = ("kv_elements_per_token", "index_elements_per_token", "window_kv_elements_per_token", "state_elements")


@dataclass(frozen=True)
class Input:
    """One input: its name, what it scales, and the range of factors it is taken to lie in."""

    path: str  # as --set names it, where a study can state it
    part: str  # hardware, kernels, links, engine, economy, llm, slo or workload
    fields: tuple[str, ...] = ()
    row: int | None = None  # of the catalogue
    low: float = 0.8
    high: float = 1.25


def varied(
    workload: Workload, slo: Slo, catalog: Catalog, inputs: Sequence[Input], factors: Sequence[Factor]
) -> tuple[Workload, Slo, Catalog]:
    """A scenario with every input times its factor."""
    hardware, links = catalog.hardware, catalog.links
    tables: dict[str, Any] = {
        "hardware": hardware,
        "links": links,
        "engine": catalog.engine,
        "economy": catalog.economy,
        "llm": catalog.llm,
    }
    for each, factor in zip(inputs, factors, strict=True):
        if each.part in tables:
            tables[each.part] = _scaled(tables[each.part], each, factor)
        elif each.part == "kernels":
            tables["hardware"] = _faster(tables["hardware"], each, factor)
        elif each.part == "slo":
            slo = _bound(slo, each.fields, factor)
        elif each.part == "workload":
            workload = _WORKLOAD[each.fields[0]](workload, factor)
    return workload, slo, dataclasses.replace(catalog, **tables)


def resized(deployment: Deployment, factor: Factor) -> Deployment:
    """A deployment with every pool's replicas times a factor."""
    stages = {}
    for name in STAGES:
        stage = getattr(deployment, name)
        stages[name] = dataclasses.replace(stage, replicas=stage.replicas * factor)
    return dataclasses.replace(deployment, **stages)


def _scaled(table: Any, each: Input, factor: Factor) -> Any:
    changes = {}
    for name in each.fields:
        leaf = getattr(table, name)
        if each.row is None:
            changes[name] = leaf * factor
        else:
            mask = np.zeros(leaf.shape, np.float32)
            mask[each.row] = 1.0
            changes[name] = leaf * (1.0 + mask * (factor - 1.0))
    return dataclasses.replace(table, **changes)


def _faster(hardware: Hardware, each: Input, factor: Factor) -> Hardware:
    """Kernels of one accelerator faster by a factor, at any size: higher shares of the peaks, a shorter latency."""
    kernels = dict(hardware.kernels)
    for operator in each.fields:
        curve = dict(kernels[operator])
        mask = np.zeros(curve["share"].shape, np.float32)
        mask[each.row] = 1.0
        speed = 1.0 + mask * (factor - 1.0)
        curve |= {name: curve[name] * speed for name in ("share", "read") if name in curve}
        curve["latency_s"] = curve["latency_s"] / speed
        kernels[operator] = curve
    return dataclasses.replace(hardware, kernels=kernels)


def _bound(slo: Slo, names: Sequence[str], factor: Factor) -> Slo:
    changes = {}
    for name in names:
        bound = getattr(slo, name)
        changes[name] = dataclasses.replace(bound, bound_s=bound.bound_s * factor)
    return dataclasses.replace(slo, **changes)


def _load(w: Workload, f: Factor) -> Workload:
    if w.concurrent_sessions is not None:
        return dataclasses.replace(w, concurrent_sessions=w.concurrent_sessions * f)
    return dataclasses.replace(w, sessions_per_second=w.sessions_per_second * f)


def _gaps(w: Workload, f: Factor) -> Workload:
    """Gaps times f: a cache of C tokens then holds what one of C / f did, for the same sessions per second."""
    longer = {"gap_mean_s": w.gap_mean_s * f, "gap_var_s": w.gap_var_s * f * f}
    return dataclasses.replace(w, **longer, cache_work=w.cache_work + _log(f))


def _new_tokens(w: Workload, f: Factor) -> Workload:
    """Uncached tokens of every call times f, prompts as long as before."""
    nodes = {name: _fresh(getattr(w, name), f) for name in ("resident", "recomputed")}
    return dataclasses.replace(w, **nodes)


def _fresh(nodes: PrefillNodes, f: Factor) -> PrefillNodes:
    """u -> f u in q = u (ctx - u/2)."""
    square = nodes.moments[2, 0] * nodes.mean_tokens**2
    return dataclasses.replace(
        nodes,
        tokens=nodes.tokens * f,
        pairs=f * nodes.pairs + 0.5 * f * (1.0 - f) * nodes.tokens**2,
        mean_tokens=nodes.mean_tokens * f,
        mean_pairs=f * nodes.mean_pairs + 0.5 * f * (1.0 - f) * square,
    )


def _context(w: Workload, f: Factor) -> Workload:
    """Prompts times f, as many of their tokens uncached as before."""
    nodes = {name: _longer(getattr(w, name), f) for name in ("resident", "recomputed")}
    nodes["missed"] = _fresh(_longer(w.missed, f), f)
    half_steps = 0.5 * w.output_steps
    half_weighted = 0.5 * w.mean_steps2 / w.mean_steps
    more = (f - 1.0) * w.mean_prompt
    left = 1.0 + more / jnp.maximum(w.idle_tokens, 1.0)
    return dataclasses.replace(
        w,
        **nodes,
        output_context=f * (w.output_context - half_steps) + half_steps,
        output_context_var=w.output_context_var * f * f,
        decode_context=f * (w.decode_context - half_weighted) + half_weighted,
        decode_context_var=w.decode_context_var * f * f,
        mean_prompt=w.mean_prompt * f,
        mean_prompt2=w.mean_prompt2 * f * f,
        max_tokens=w.max_tokens * f,
        mean_need=w.mean_need + more,
        mean_need2=w.mean_need2 * (1.0 + more / w.mean_need) ** 2,
        decode_need=w.decode_need + (f - 1.0) * (w.decode_context - half_weighted),
        decode_need_var=w.decode_need_var * f * f,
        idle_tokens=w.idle_tokens * left,
        last_tokens=w.last_tokens * left,
        cache_work=w.cache_work + _log(left),
    )


def _longer(nodes: PrefillNodes, f: Factor) -> PrefillNodes:
    """ctx -> f ctx in q = u (ctx - u/2)."""
    square = nodes.moments[2, 0] * nodes.mean_tokens**2
    return dataclasses.replace(
        nodes,
        context=nodes.context * f,
        pairs=f * nodes.pairs + 0.5 * (f - 1.0) * nodes.tokens**2,
        mean_pairs=f * nodes.mean_pairs + 0.5 * (f - 1.0) * square,
    )


def _output(w: Workload, f: Factor) -> Workload:
    """Outputs times f, prompts as they were."""
    more = f - 1.0
    half_weighted = 0.5 * w.mean_steps2 / w.mean_steps
    return dataclasses.replace(
        w,
        output_steps=w.output_steps * f,
        output_context=w.output_context + 0.5 * more * w.output_steps,
        mean_steps=w.mean_steps * f,
        mean_steps2=w.mean_steps2 * f * f,
        mean_output=w.mean_output * f,
        decode_context=w.decode_context + more * half_weighted,
        mean_need=w.mean_need + more * w.mean_output,
        decode_need=w.decode_need + 2.0 * more * half_weighted,
    )


def _log(f: Factor) -> Any:
    return jnp.log(f) if isinstance(f, Array) else np.log(f)


_WORKLOAD = {
    "load": _load,
    "gaps": _gaps,
    "new_tokens": _new_tokens,
    "context": _context,
    "output": _output,
}

WORKLOAD_INPUTS: Mapping[str, str] = {
    "gaps": "gaps between calls",
    "new_tokens": "new prompt tokens of a call",
    "context": "prompt length",
    "output": "output length",
}
