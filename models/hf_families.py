"""Families of LLMs: what a model type's layers are made of, and how its config.json describes them.

`FAMILIES` holds the facts that a config leaves out; one function per attention flavour reads the rest. Field
names are those of Hugging Face transformers. A field that a family needs and a config lacks is an
`InputError`: nothing is guessed.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from breakeven.models.architecture import Ffn
from breakeven.models.fields import Fields
from breakeven.models.inputs import InputError
from breakeven.models.mixers import (
    Attention,
    GatedDeltaNet,
    LatentAttention,
    LightningAttention,
    Mamba2,
    Mixer,
)

LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers")
HEAD_KEYS = ("num_attention_heads", "n_head")
HIDDEN_KEYS = ("hidden_size", "n_embed")
CONTEXT_KEYS = ("max_position_embeddings", "max_position_embedding", "seq_length", "n_positions")
OWN_KEYS = {  # keys of one kind of layer, where a family gives it its own
    "full": {"kv_heads": ("num_global_key_value_heads",), "head_dim": ("global_head_dim",)},
    "window": {
        "heads": ("swa_num_attention_heads",),
        "kv_heads": ("swa_num_key_value_heads",),
        "head_dim": ("swa_head_dim",),
        "v_head_dim": ("swa_v_head_dim",),
    },
}
LAYER_LABELS: dict[str, dict[Any, str]] = {
    "layer_types": {
        "full_attention": "full",
        "deepseek_sparse_attention": "full",
        "sliding_attention": "window",
        "chunked_attention": "window",
        "linear_attention": "linear",
    },
    "hybrid_layer_pattern": {0: "full", 1: "window"},
    "attn_type_list": {1: "full", 0: "linear"},
}
ACTIVE_KEYS = (
    "num_experts_per_tok",
    "experts_per_token",
    "num_experts_per_token",
    "top_k_experts",
    "moe_top_k",
)
BLOCK_LABELS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}


class Pattern(NamedTuple):
    """Every `interval`-th layer (config field `key`, plus `offset`) is full attention, the others `other`."""

    key: str
    interval: int
    other: str
    offset: int = 0


@dataclass(frozen=True)
class Family:
    """What the layers of a model type are made of, where its config does not say."""

    mixers: "Callable[[Fields, Family], tuple[Mixer, ...]]"
    ffns: "Callable[[Fields, Family, int], tuple[Ffn, ...]]"
    moe: bool = False
    pattern: Pattern | None = None
    recurrence: Callable[[Fields, int], Mixer] | None = None
    windowed: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    head_norm: str = ""
    output_gate: bool = False
    sparse: bool = False
    matrices: int = 3
    biased: bool = False
    norms: int = 2
    norm_bias: bool = False
    tied: bool = False
    shared_experts: int = 0
    width_keys: tuple[str, ...] = ("intermediate_size", "ffn_dim", "n_inner")
    width_ratio: int = 0
    spare_positions: int | None = None


def layer_count(f: Fields) -> int:
    return f.whole(*LAYER_KEYS, high=10_000)


def _layer_kinds(f: Fields, family: Family) -> Counter[str]:
    """How many layers are full, window and linear: as listed, else by the family's pattern."""
    layers = layer_count(f)
    for key, kinds in LAYER_LABELS.items():
        labels = f.labels(key, kinds, layers)
        if labels is not None:
            return Counter(kinds[label] for label in labels)
    if family.pattern:
        key, interval, other, offset = family.pattern
        full = layers // (f.whole(key, high=10_000, default=interval - offset) + offset)
        return Counter({"full": full, other: layers - full})
    sliding = f.flag("use_sliding_window", family.windowed and f.get("sliding_window") is not None)
    if not sliding:
        return Counter({"full": layers})
    full = 0 if family.windowed else f.whole("max_window_layers", low=0, high=layers)
    return Counter({"full": full, "window": layers - full})


def _softmax(f: Fields, family: Family) -> tuple[Mixer, ...]:
    """Layers of softmax attention, and the recurrent ones between them in a hybrid."""
    return tuple(_mixer(f, family, kind, n) for kind, n in _layer_kinds(f, family).items() if n)


def _mixer(f: Fields, family: Family, kind: str, layers: int) -> Mixer:
    if kind != "linear":
        return _attention(f, family, kind, layers)
    if family.recurrence is None:
        raise InputError("layer_types", "linear_attention", "not a layer of this model_type")
    return family.recurrence(f, layers)


def _attention(f: Fields, family: Family, kind: str, layers: int) -> Attention:
    own = OWN_KEYS[kind]
    hidden = f.whole(*HIDDEN_KEYS)
    heads = f.whole(*own.get("heads", ()), *HEAD_KEYS)
    kv_heads = f.divisor(heads, *own["kv_heads"], "num_key_value_heads", "num_attention_groups")
    width = f.head_dim(hidden, heads, *own["head_dim"], "head_dim", "attention_head_dim")
    value_width = f.whole(*own.get("v_head_dim", ()), "v_head_dim", default=width)
    return Attention(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        v_head_dim=value_width,
        window=f.whole("sliding_window", "attention_chunk_size") if kind == "window" else 0,
        q_lora_rank=f.whole("share_q_dim", low=0, default=0),
        output_gate=f.flag("attn_output_gate", family.output_gate),
        keys_are_values=kind == "full" and f.flag("attention_k_eq_v", False),
        vectors=_vectors(f, family, heads * width, kv_heads * width, kv_heads * value_width),
    )


def _vectors(f: Fields, family: Family, query: int, key: int, value: int) -> int:
    """Biases and head norms of one attention layer."""
    bias = f.flag("attention_bias", f.flag("qkv_bias", family.qkv_bias))
    biases = query + key + value + (f.whole(*HIDDEN_KEYS) if family.out_bias else 0) if bias else 0
    return biases + (query + key if family.head_norm == "layer" else 0)


def _latent(f: Fields, family: Family) -> tuple[Mixer, ...]:
    """Latent attention; with an indexer, the layers that have one and those that use its picks."""
    layers = layer_count(f)
    shape = {
        "hidden": f.whole(*HIDDEN_KEYS),
        "heads": f.whole(*HEAD_KEYS),
        "q_lora_rank": f.whole("q_lora_rank", low=0, default=0),
        "kv_lora_rank": f.whole("kv_lora_rank"),
        "qk_nope_head_dim": f.whole("qk_nope_head_dim"),
        "qk_rope_head_dim": f.whole("qk_rope_head_dim"),
        "v_head_dim": f.whole("v_head_dim"),
    }
    if not family.sparse:
        return (LatentAttention(layers=layers, **shape),)
    shape |= {"sparse_topk": f.whole("index_topk"), "index_head_dim": f.whole("index_head_dim")}
    index_heads = f.whole("index_n_heads")
    types = f.labels("indexer_types", ("full", "shared"), layers) or ["full"] * layers
    groups = ((types.count("full"), index_heads), (types.count("shared"), 0))
    return tuple(LatentAttention(layers=n, index_heads=heads, **shape) for n, heads in groups if n)


def _gated_delta(f: Fields, layers: int) -> Mixer:
    return GatedDeltaNet(
        layers=layers,
        hidden=f.whole(*HIDDEN_KEYS),
        heads=f.whole("linear_num_key_heads"),
        value_heads=f.whole("linear_num_value_heads"),
        key_head_dim=f.whole("linear_key_head_dim"),
        value_head_dim=f.whole("linear_value_head_dim"),
        conv_kernel=f.whole("linear_conv_kernel_dim", high=1000),
    )


def _lightning(f: Fields, layers: int) -> Mixer:
    hidden, heads = f.whole(*HIDDEN_KEYS), f.whole(*HEAD_KEYS)
    width = f.head_dim(hidden, heads, "head_dim")
    return LightningAttention(layers=layers, hidden=hidden, heads=heads, head_dim=width)


def _blocks(f: Fields) -> Counter[str]:
    """Blocks of a Nemotron-H stack by kind: each is a mixer or a feed-forward network alone."""
    names = tuple(BLOCK_LABELS.values())
    listed = f.labels("layers_block_type", names)
    pattern = f.labels("hybrid_override_pattern", BLOCK_LABELS) if listed is None else None
    blocks = Counter(listed or (BLOCK_LABELS[label] for label in pattern or ()))
    if not blocks:
        raise InputError("hybrid_override_pattern", None, "missing; one of M * E - per layer")
    stated = f.whole(*LAYER_KEYS, high=10_000, default=blocks.total())
    if stated != blocks.total():
        raise InputError(LAYER_KEYS[0], stated, f"{blocks.total()}, as many as the pattern has blocks")
    return blocks


def _nemotron_mixers(f: Fields, family: Family) -> tuple[Mixer, ...]:
    blocks = _blocks(f)
    mamba = Mamba2(
        layers=blocks["mamba"],
        hidden=f.whole(*HIDDEN_KEYS),
        heads=f.whole("mamba_num_heads"),
        head_dim=f.whole("mamba_head_dim"),
        groups=f.whole("n_groups"),
        state_size=f.whole("ssm_state_size"),
        conv_kernel=f.whole("conv_kernel", high=1000),
    )
    mixers = (_attention(f, family, "full", blocks["attention"]), mamba)
    if not any(m.layers for m in mixers):
        raise InputError("hybrid_override_pattern", None, "at least one attention (*) or Mamba (M) block")
    return tuple(m for m in mixers if m.layers)


def _nemotron_ffns(f: Fields, family: Family, _: int) -> tuple[Ffn, ...]:
    blocks = _blocks(f)
    dense = _dense(f, family, blocks["mlp"]) if blocks["mlp"] else ()
    return dense + (_experts(f, family, blocks["moe"]) if blocks["moe"] else ())


def _width(f: Fields, family: Family) -> int:
    ratio = family.width_ratio
    return f.whole(*family.width_keys, default=ratio * f.whole(*HIDDEN_KEYS) if ratio else None)


def _dense(f: Fields, family: Family, layers: int) -> tuple[Ffn, ...]:
    hidden, width = f.whole(*HIDDEN_KEYS), _width(f, family)
    return (Ffn(layers, hidden, width, matrices=family.matrices, biased=family.biased),)


def _experts(f: Fields, family: Family, layers: int, beside: int = 0) -> tuple[Ffn, ...]:
    """Layers of routed experts, with the shared expert and a dense network of width `beside`."""
    experts = f.whole("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", high=100_000)
    width = f.whole("moe_intermediate_size", "intermediate_size")
    shared = f.whole("n_shared_experts", "num_shared_experts", low=0, default=family.shared_experts) * width
    keys = ("shared_expert_intermediate_size", "share_expert_dim", "moe_shared_expert_intermediate_size")
    moe = Ffn(
        layers=layers,
        hidden=f.whole(*HIDDEN_KEYS),
        matrices=family.matrices,
        biased=family.biased,
        experts=experts,
        experts_active=f.whole(*ACTIVE_KEYS, high=experts),
        expert_intermediate=width,
        expert_hidden=f.whole("moe_latent_size", low=0, default=0),
        shared_intermediate=beside + f.whole(*keys, "shared_intermediate_size", low=0, default=shared),
    )
    return (moe,)


def _moe_layers(f: Fields, layers: int) -> int:
    """Layers with routed experts: as listed, else all but the first few, or every n-th."""
    kinds = f.labels("mlp_layer_types", ("dense", "sparse"), layers)
    if kinds is not None:
        return kinds.count("sparse")
    listed = f.indices("moe_layers_enum", layers)
    if listed is not None:
        return len(listed)
    if isinstance(f.get("moe_layer_freq"), list):
        return (f.labels("moe_layer_freq", (0, 1), layers) or []).count(1)
    step = f.whole("moe_layer_freq", "decoder_sparse_step", "interleave_moe_layer_step", default=1)
    dense = f.whole("first_k_dense_replace", low=0, high=layers, default=0)
    return (layers - dense) // step - len(f.indices("mlp_only_layers", layers) or [])


def _ffns(f: Fields, family: Family, layers: int) -> tuple[Ffn, ...]:
    moe_layers = max(0, _moe_layers(f, layers)) if family.moe else 0
    dense = _dense(f, family, layers - moe_layers) if moe_layers < layers else ()
    return dense + (_experts(f, family, moe_layers) if moe_layers else ())


def _gemma4_ffns(f: Fields, family: Family, layers: int) -> tuple[Ffn, ...]:
    """Every layer has a dense network; with experts, they stand beside it.

    The small models' per-layer embeddings and shared caches are not described here, so they are refused.
    """
    for key in ("num_kv_shared_layers", "hidden_size_per_layer_input"):
        if f.whole(key, low=0, default=0):
            raise InputError(key, f.get(key), "0; per-layer embeddings and shared caches are not supported")
    if not f.flag("enable_moe_block", False):
        return _dense(f, family, layers)
    return _experts(f, family, layers, beside=_width(f, family))


def _family(**facts: Any) -> Family:
    return Family(**{"mixers": _softmax, "ffns": _ffns} | facts)


_QWEN3_NEXT = {
    "pattern": Pattern("full_attention_interval", 4, "linear"),
    "recurrence": _gated_delta,
    "output_gate": True,
}
_LATENT_MOE = {"mixers": _latent, "moe": True, "shared_experts": 1}
_GPT_LIKE = {
    "qkv_bias": True,
    "out_bias": True,
    "matrices": 2,
    "biased": True,
    "norm_bias": True,
    "tied": True,
}

FAMILIES: dict[str, Family] = {
    "bloom": _family(**_GPT_LIKE, width_ratio=4),
    "deepseek_v3": _family(**_LATENT_MOE),
    "deepseek_v32": _family(**_LATENT_MOE, sparse=True),
    "gemma3_text": _family(pattern=Pattern("sliding_window_pattern", 6, "window"), norms=4, tied=True),
    "gemma4_text": _family(
        pattern=Pattern("sliding_window_pattern", 6, "window"), ffns=_gemma4_ffns, norms=4, tied=True
    ),
    "glm4_moe": _family(moe=True, qkv_bias=True, shared_experts=1),
    "glm4_moe_lite": _family(**_LATENT_MOE),
    "glm_moe_dsa": _family(**_LATENT_MOE, sparse=True),
    "gpt_oss": _family(
        pattern=Pattern("sliding_window_pattern", 2, "window"),
        moe=True,
        qkv_bias=True,
        out_bias=True,
        biased=True,
    ),
    "kimi_k2": _family(**_LATENT_MOE),
    "llama": _family(out_bias=True),
    "llama4_text": _family(
        pattern=Pattern("no_rope_layer_interval", 4, "window"),
        moe=True,
        shared_experts=1,
        width_keys=("intermediate_size_mlp",),
    ),
    "mimo": _family(qkv_bias=True),
    "mimo_v2_flash": _family(moe=True),
    "minimax_m1": _family(
        pattern=Pattern("linear_per_softmax", 8, "linear", offset=1), recurrence=_lightning, moe=True
    ),
    "minimax_m2": _family(moe=True, head_norm="layer"),
    "mistral": _family(windowed=True),
    "mixtral": _family(moe=True, windowed=True),
    "nemotron_h": _family(mixers=_nemotron_mixers, ffns=_nemotron_ffns, matrices=2),
    "opt": _family(**_GPT_LIKE, spare_positions=2),
    "phi3": _family(windowed=True),
    "qwen2": _family(qkv_bias=True),
    "qwen3": _family(),
    "qwen3_5_moe_text": _family(**_QWEN3_NEXT, moe=True),
    "qwen3_5_text": _family(**_QWEN3_NEXT),
    "qwen3_moe": _family(moe=True),
    "qwen3_next": _family(**_QWEN3_NEXT, moe=True),
    "step3_text": _family(moe=True),
}
