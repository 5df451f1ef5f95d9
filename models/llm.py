"""LLMs by name, from a config.json, or as a variation on either; and their numbers for the cost model."""

import functools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax import Array

from breakeven.models.architecture import Architecture
from breakeven.models.catalog import table
from breakeven.models.hf_config import config_name, flat_config, from_config, load_config, read_config
from breakeven.models.inputs import InputError, pick


@functools.cache
def llms() -> dict[str, Architecture]:
    """The catalogue's LLMs by name (shared: do not change it)."""
    return {name: from_config(row, name) for name, row in table("llms").items()}


def llm(spec: Any, field: str = "llm", base_dir: str | Path | None = None) -> Architecture:
    """The LLM that a user names.

    Args:
        spec: a catalogue name; the path of a config.json or of a folder that holds one; or a mapping of
            config fields, ``{like: llama-3.1-70b, name: ..., num_hidden_layers: 96}``, which vary the model
            `like` (a name or a path) or, without `like`, describe one in full.
        field: where `spec` stands in the user's file, for errors.
        base_dir: the folder that paths are relative to; the working directory if None.
    """
    if isinstance(spec, Mapping):
        return _variation(spec, field, base_dir)
    path = _path(spec, base_dir)
    return llms()[pick(field, spec, llms())] if path is None else read_config(path)


def _path(spec: Any, base_dir: str | Path | None) -> Path | None:
    """The path that `spec` is, or None where it reads as a name."""
    if not isinstance(spec, str) or spec in llms():
        return None
    path = Path(base_dir or ".", os.path.expanduser(spec))
    looks_like_one = "/" in spec or "\\" in spec or spec.endswith(".json")
    return path if looks_like_one or (spec and _exists(path)) else None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # too long for a file name
        return False


def _variation(spec: Mapping[Any, Any], field: str, base_dir: str | Path | None) -> Architecture:
    changes = {key: value for key, value in spec.items() if key not in ("like", "name")}
    like = spec.get("like")
    base, file, default_name = _fields_of(like, f"{field}.like", base_dir) if like is not None else ({}, None, "")
    name = spec.get("name", f"{default_name} varied" if changes else default_name) or "custom"
    if not isinstance(name, str):
        raise InputError(f"{field}.name", name, "a text")
    source = changes.get("source", _varied(base.get("source") or file or "stated by the user", changes))
    try:
        return from_config(flat_config(base) | changes | {"source": source}, name, must_read=changes)
    except InputError as error:
        raise error.inside(field, file if error.field not in changes else None) from None


def _varied(source: str, changes: Mapping[Any, Any]) -> str:
    return f"{source}; varied: {', '.join(map(str, changes))}" if changes else source


def _fields_of(like: Any, field: str, base_dir: str | Path | None) -> tuple[Mapping[str, Any], str | None, str]:
    """The config fields of the model that a variation starts from, their file if any, and its name."""
    path = _path(like, base_dir)
    if path is None:
        name = pick(field, like, llms())
        return _without_counts(table("llms")[name]), None, name
    return load_config(path), str(path), config_name(path)


def _without_counts(row: Mapping[str, Any]) -> dict[str, Any]:
    """A catalogue row without the vendor's parameter counts, which no variation keeps."""
    return {key: value for key, value in row.items() if not key.endswith("_parameters_b")}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LLM:
    """The numbers of one LLM that costs follow from, all of them leaves: another model does not recompile.

    Weights are parameters over all layers; elements and FLOPs are sums over the layers of their kind.
    """

    layers: Array
    hidden: Array
    moe_layers: Array
    experts: Array  # routed experts per layer, 0 for a dense model
    experts_active: Array
    shared_experts: Array  # 1 where every token also passes a shared expert, else 0
    attention_weights: Array
    dense_weights: Array  # dense networks, shared experts, routers, norms
    expert_weights: Array
    head_weights: Array
    embedding_weights: Array
    encoder_weights: Array
    encoder_layers: Array  # of the vision encoder, as the rest of its numbers: 0 without one
    encoder_hidden: Array
    encoder_heads: Array  # 1 without one
    encoder_attention_weights: Array
    encoder_dense_weights: Array  # networks, patch embedding, projectors
    encoder_patch_weights: Array  # of these, what one patch passes
    encoder_flops_per_pair: Array  # per pair of patches, scores and values
    encoder_token_elements: Array  # that a visual token hands to the language model
    expert_width_weights: Array  # one expert in one layer
    full_layers: Array
    window_layers: Array
    linear_layers: Array
    kv_elements_per_token: Array  # full layers: K and V, or the latent
    index_elements_per_token: Array  # keys of the sparse-attention indexer
    window_kv_elements_per_token: Array
    window_tokens: Array
    state_elements: Array  # per sequence
    kv_shards: Array  # ways that tensor parallelism splits the cache: K/V heads, 1 for a latent
    prefill_flops_per_pair: Array  # per (query token, key token), scores and values, full layers
    decode_flops_per_pair: Array  # the same in the absorbed form of latent attention
    index_flops_per_pair: Array
    head_pair_flops: Array  # prefill FLOPs per pair of one head
    window_flops_per_pair: Array
    sparse_topk: Array  # keys that a query reads at most; inf without sparse attention
    linear_flops_per_token: Array
    latent: Array  # 1 with latent attention, else 0
    mla: Array  # 1 where latent or linear attention makes kernels slower per layer, else 0
    max_context: Array  # tokens

    @classmethod
    def from_architecture(cls, architecture: Architecture) -> "LLM":
        """The traced view of an architecture; every leaf a Python float."""
        a, e = architecture, architecture.encoder
        numbers = {
            "layers": a.layers,
            "hidden": a.hidden,
            "moe_layers": a.moe_layers,
            "experts": a.experts,
            "experts_active": a.experts_active,
            "shared_experts": a.moe is not None and a.moe.shared_intermediate > 0,
            "attention_weights": a.attention_parameters,
            "dense_weights": a.dense_parameters,
            "expert_weights": a.expert_parameters,
            "head_weights": a.head_parameters,
            "embedding_weights": a.embedding_parameters,
            "encoder_weights": a.encoder_parameters,
            "encoder_layers": e.layers if e else 0,
            "encoder_hidden": e.hidden if e else 0,
            "encoder_heads": e.heads if e else 1,
            "encoder_attention_weights": e.attention_parameters if e else 0,
            "encoder_dense_weights": e.dense_parameters if e else 0,
            "encoder_patch_weights": e.patch_parameters if e else 0,
            "encoder_flops_per_pair": e.flops_per_pair if e else 0,
            "encoder_token_elements": e.token_elements if e else 0,
            "expert_width_weights": a.moe.expert_parameters if a.moe else 0,
            "full_layers": a.full_layers,
            "window_layers": a.window_layers,
            "linear_layers": a.linear_layers,
            "kv_elements_per_token": a.kv_elements_per_token,
            "index_elements_per_token": a.index_elements_per_token,
            "window_kv_elements_per_token": a.window_kv_elements_per_token,
            "window_tokens": a.window_tokens,
            "state_elements": a.state_elements,
            "kv_shards": a.kv_heads,
            "prefill_flops_per_pair": a.over_layers("prefill_flops_per_pair", "full"),
            "decode_flops_per_pair": a.over_layers("decode_flops_per_pair", "full"),
            "index_flops_per_pair": a.over_layers("index_flops_per_pair"),
            "head_pair_flops": a.head_pair_flops,
            "window_flops_per_pair": a.over_layers("prefill_flops_per_pair", "window"),
            "sparse_topk": a.sparse_topk or math.inf,
            "linear_flops_per_token": a.over_layers("linear_flops_per_token"),
            "latent": a.latent is not None,
            "mla": a.latent is not None or a.linear_layers > 0,
            "max_context": a.max_context,
        }
        leaves: dict[str, Any] = {name: float(value) for name, value in numbers.items()}
        return cls(**leaves)
