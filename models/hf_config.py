"""Read an LLM's config.json into an `Architecture`: families, vision towers and number formats.

`WRAPPERS` are the multimodal model types around a language model of `FAMILIES`. The same reader serves the
catalogue, whose rows hold config fields too.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from breakeven.models.architecture import NATIVE_DTYPES, Architecture, Encoder
from breakeven.models.fields import Fields
from breakeven.models.hf_families import CONTEXT_KEYS, FAMILIES, HIDDEN_KEYS, Family
from breakeven.models.inputs import InputError, number, pick


@dataclass(frozen=True)
class Tower:
    """What the vision tower of a wrapper is made of, where its config does not say.

    `merge` patches a side become one token, side by side for the projector unless `pooled`; the projector's
    inner width is its input's, or the language model's (`narrow`), or it is one matrix (`single`).
    """

    merge: int = 1
    matrices: int = 2
    pooled: bool = False
    projector: str = "wide"


@dataclass(frozen=True)
class Wrapper:
    """A model type that holds a language model of family `text`, and a vision tower."""

    text: str
    tower: Tower


WRAPPERS = {
    "gemma3": Wrapper("gemma3_text", Tower(merge=4, pooled=True, projector="single")),
    "gemma4": Wrapper("gemma4_text", Tower(merge=3, matrices=3, pooled=True, projector="single")),
    "internvl": Wrapper("qwen2", Tower(merge=2, projector="narrow")),
    "kimi_k25": Wrapper("kimi_k2", Tower(merge=2)),
    "llama4": Wrapper("llama4_text", Tower(merge=2, projector="narrow")),
    "llava": Wrapper("llama", Tower(projector="narrow")),
    "qwen2_5_vl": Wrapper("qwen2", Tower(merge=2, matrices=3)),
    "qwen3_5": Wrapper("qwen3_5_text", Tower(merge=2)),
    "qwen3_5_moe": Wrapper("qwen3_5_moe_text", Tower(merge=2)),
    "qwen3_vl": Wrapper("qwen3", Tower(merge=2)),
    "qwen3_vl_moe": Wrapper("qwen3_moe", Tower(merge=2)),
    "step3_vl": Wrapper("step3_text", Tower(merge=4, pooled=True, projector="narrow")),
}
OUTER_KEYS = ("model_type", "tie_word_embeddings", "quantization_config")
FORMATS = {
    "awq": "int4",
    "fbgemm_fp8": "fp8",
    "fp8": "fp8",
    "gptq": "int4",
    "mxfp4": "fp4",
    "nvfp4": "fp4",
    "w4a16_nvfp4": "fp4",
}


def read_config(path: str | Path) -> Architecture:
    """The LLM of a config.json, or of a folder that holds one; its name is the file's or the folder's."""
    mapping = load_config(Path(path))
    try:
        return from_config(mapping, config_name(Path(path)))
    except InputError as error:
        raise error.inside(file=str(path)) from None


def config_name(path: Path) -> str:
    """What to call the LLM at `path`: by the folder of a config.json, else by the file."""
    full = path.resolve()
    if full.name == "config.json":
        return full.parent.name or "config"
    return full.stem if full.suffix == ".json" else full.name


def load_config(path: Path) -> dict[str, Any]:
    """The mapping in a config.json, or in that of a folder."""
    try:
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise InputError("file", str(file), "no such file; give a config.json or a folder that holds one")
        mapping = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError("file", str(path), f"cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError("file", str(path), f"not valid JSON: {error}") from None
    if not isinstance(mapping, dict):
        raise InputError("file", str(path), "a JSON object with the fields of a config.json")
    return mapping


def flat_config(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The same fields on one level: a `text_config` lifted out, beside what belongs to the whole model."""
    text = Fields(mapping).inner("text_config")
    if text is None:
        return dict(mapping)
    outer = {k: v for k, v in mapping.items() if k != "text_config"}
    whole = {k: outer[k] for k in OUTER_KEYS if outer.get(k) is not None}
    return outer | dict(text.mapping) | whole | {"text_model_type": text.get("model_type")}


def from_config(mapping: Mapping[str, Any], name: str, must_read: Iterable[str] = ()) -> Architecture:
    """The LLM that these config fields describe.

    Beside the config's own fields it takes `native_dtype`, `advertised_parameters_b` and
    `active_parameters_b` (1e9), `source`, `as_of` and `unverified`. A field of `must_read` that no part of
    the architecture reads is an `InputError`.
    """
    f = Fields(flat_config(mapping))
    model_type = _model_type(f)
    family, wrapper = _family(f, model_type), WRAPPERS.get(model_type)
    mixers = family.mixers(f, family)
    layers, hidden = sum(m.layers for m in mixers), f.whole(*HIDDEN_KEYS)
    ffns = family.ffns(f, family, layers)
    context = f.whole(*CONTEXT_KEYS, high=10**9)
    architecture = Architecture(
        name=name,
        family=model_type,
        hidden=hidden,
        vocab=f.whole("vocab_size"),
        mixers=mixers,
        ffns=ffns,
        max_context=context,
        tied_embeddings=f.flag("tie_word_embeddings", family.tied),
        learned_positions=0 if family.spare_positions is None else context + family.spare_positions,
        norm_parameters=(family.norms * layers + 1) * hidden * (2 if family.norm_bias else 1),
        encoder=_encoder(f, wrapper.tower, hidden) if wrapper else None,
        native_dtype=_native_dtype(f, any(ffn.experts for ffn in ffns)),
        advertised_parameters=_billions(f, "advertised_parameters_b"),
        advertised_active_parameters=_billions(f, "active_parameters_b"),
        source=f.text("source"),
        as_of=f.text("as_of"),
        unverified=_texts(f, "unverified"),
    )
    f.unread(must_read)
    return architecture


def _model_type(f: Fields) -> str:
    value = f.get("model_type")
    if value is None:
        raise InputError("model_type", None, "missing; it names the family of the model")
    return pick("model_type", value, sorted(FAMILIES | WRAPPERS), shown=60)


def _family(f: Fields, model_type: str) -> Family:
    """The language model's family: its own type in a wrapper that takes several, else the wrapper's."""
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    inner = f.get("text_model_type")
    known = isinstance(inner, str) and inner in FAMILIES
    return FAMILIES[inner if known else WRAPPERS[model_type].text]


def _encoder(f: Fields, tower: Tower, output: int) -> Encoder | None:
    vision = f.inner("vision_config")
    if vision is None:
        return None
    try:
        return _vision(vision, tower, output)
    except InputError as error:
        raise error.inside("vision_config") from None


def _vision(v: Fields, tower: Tower, output: int) -> Encoder:
    hidden = v.whole("vt_hidden_size", "hidden_size")
    patch, image = v.whole("patch_size", high=1000), v.whole("image_size", low=0, high=100_000, default=0)
    merge = _merge(v, tower)
    merged = hidden if tower.pooled else hidden * merge**2
    narrow = v.whole("vision_output_dim", default=output)
    layers = v.whole("vt_num_hidden_layers", "num_hidden_layers", "depth", high=10_000)
    return Encoder(
        hidden=hidden,
        layers=layers,
        intermediate=v.whole("vt_intermediate_size", "intermediate_size"),
        heads=v.whole("vt_num_attention_heads", "num_attention_heads", "num_heads"),
        patch=patch,
        merge=merge,
        image_size=image,
        output=output,
        matrices=tower.matrices,
        temporal_patch=v.whole("temporal_patch_size", high=1000, default=1),
        positions=_positions(v, image // patch),
        projector_input=merged,
        projector_hidden={"wide": merged, "narrow": narrow, "single": 0}[tower.projector],
        projectors=1 + len(v.indices("deepstack_visual_indexes", layers) or []),
    )


def _merge(v: Fields, tower: Tower) -> int:
    """Patches a side that become one token."""
    kernel = v.get("merge_kernel_size")
    if isinstance(kernel, list) and kernel:
        return Fields({"merge_kernel_size": kernel[0]}).whole("merge_kernel_size", high=100)
    return v.whole("spatial_merge_size", "pooling_kernel_size", high=100, default=tower.merge)


def _positions(v: Fields, patches_a_side: int) -> int:
    """Rows of the position embeddings: as stated, else one per patch of the largest image."""
    side = v.whole("init_pos_emb_height", low=0, default=patches_a_side)
    across = v.whole("init_pos_emb_width", low=0, default=side)
    two_tables = 2 * v.whole("position_embedding_size", low=0, default=0)
    return v.whole("num_position_embeddings", low=0, default=two_tables or side * across)


def _native_dtype(f: Fields, moe: bool) -> str:
    """How the checkpoint ships: as stated, else from its quantisation, else 16 bits."""
    stated = f.get("native_dtype")
    if stated is not None:
        return pick("native_dtype", stated, NATIVE_DTYPES)
    quantization = f.inner("quantization_config")
    if quantization is None:
        return "fp8" if "float8" in str(f.get("torch_dtype", "dtype")) else "bf16"
    try:
        weights = _weight_format(quantization)
    except InputError as error:
        raise error.inside("quantization_config") from None
    skipped = str(quantization.get("ignore", "modules_to_not_convert", "exclude_modules"))
    if weights.endswith("4") and "attn" in skipped:
        return f"{weights}-experts" if moe else "mixed"
    return weights


def _weight_format(q: Fields) -> str:
    """The format of the quantised matrices: by the algorithm's name, else by the bits of its groups."""
    names = [str(q.get(key)).lower() for key in ("quant_algo", "quant_method")]
    if "mixed_precision" in names:
        return "mixed"
    groups = q.get("config_groups")
    if isinstance(groups, Mapping) and groups and "compressed-tensors" in names:
        formats = {_group_format(group) for group in groups.values()}
        return formats.pop() if len(formats) == 1 else "mixed"
    for name in names:
        if name in FORMATS:
            return "int8" if q.get("bits") == 8 and FORMATS[name] == "int4" else FORMATS[name]
    allowed = ", ".join([*FORMATS, "compressed-tensors with config_groups", "mixed_precision"])
    raise InputError("quant_method", q.get("quant_method"), f"one of {allowed}, or state native_dtype")


def _group_format(group: Any) -> str:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    bits = weights.get("num_bits") if isinstance(weights, Mapping) else None
    kind = weights.get("type") if isinstance(weights, Mapping) else None
    name = f"{'fp' if kind == 'float' else 'int'}{bits}"
    if name not in NATIVE_DTYPES:
        raise InputError("config_groups", group, "weights of 4 or 8 bits, or state native_dtype")
    return name


def _billions(f: Fields, name: str) -> float | None:
    value = f.get(name)
    return None if value is None else 1e9 * number(name, value, 1e-6, 1e6)


def _texts(f: Fields, name: str) -> tuple[str, ...]:
    value = f.get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InputError(name, value, "a list of field names")
    return tuple(value)
