"""On which side of an attention/FFN split the parts of a model stand that belong to neither alone, as a study names it.

Projections stand with attention unless said otherwise, shared experts and the LM head (the embedding beside it) with
the feed-forward layers. Routers are taken as run before tokens cross, so that each goes to its experts' ranks, while
the gate's few weights count with the experts; a stated side has both.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from breakeven.models.architecture import Architecture
from breakeven.models.inputs import InputError, known_fields, pick

ATTENTION, FFN = SIDES = ("attention", "ffn")
UNSTATED, DEFAULT = "", "default"


@dataclass(frozen=True)
class Placement:
    """The side of each part, one of SIDES; where projections stand with the feed-forward layers, no hidden state comes
    to attention, so routers and shared experts stand there too whatever their fields say."""

    projections: str = ATTENTION
    router: str = UNSTATED
    shared_experts: str = FFN
    lm_head: str = FFN

    @property
    def stated(self) -> dict[str, str]:
        """The parts that do not stand where they do by default."""
        return {name: getattr(self, name) for name in PARTS if getattr(self, name) != getattr(Placement, name)}

    @property
    def id(self) -> str:
        """What tables call it: `projections=ffn`, `default`."""
        return ",".join(f"{name}={side}" for name, side in self.stated.items()) or DEFAULT


PARTS = tuple(field.name for field in fields(Placement))


def stated(name: str) -> dict[str, str]:
    """The parts that a placement's id says, whether there are such or not."""
    parts = (part.partition("=") for part in name.split(",") if part != DEFAULT)
    return {part.strip(): side.strip() for part, _, side in parts if part}


def placements(spec: Any, model: Architecture, field: str = "placement") -> tuple[Placement, ...]:
    """Every placement that differs for the model, from a mapping of parts to a side or a list of sides.

    Parts that the model lacks are left out. Raises InputError for unknown parts and sides, and for routers or shared
    experts that are kept with attention where projections are not.
    """
    if not isinstance(spec, Mapping):
        raise InputError(field, spec, f"a mapping of {', '.join(PARTS)} to attention, ffn or both in a list")
    known_fields(spec, PARTS, field)
    sides = {name: _sides(f"{field}.{name}", value) for name, value in spec.items()}
    moved = FFN in sides.get("projections", ())
    for name in ("router", "shared_experts"):
        if moved and name in sides and FFN not in sides[name]:
            allowed = "ffn (or both) where projections may stand there: no hidden state comes to attention"
            raise InputError(f"{field}.{name}", spec[name], allowed)
    lacking = {"router": model.experts == 0, "shared_experts": model.shared_parameters == 0}
    present = {name: values for name, values in sides.items() if not lacking.get(name, False)}
    made = (Placement(**dict(zip(present, values, strict=True))) for values in itertools.product(*present.values()))
    return tuple(dict.fromkeys(_plain(one) for one in made))


def _sides(field: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        return (pick(field, value, SIDES),)
    if not value:
        raise InputError(field, value, "at least one of attention, ffn")
    return tuple(pick(f"{field}.{i}", side, SIDES) for i, side in enumerate(value))


def _plain(one: Placement) -> Placement:
    """Without what follows from where the projections stand."""
    return one if one.projections == ATTENTION else Placement(FFN, lm_head=one.lm_head)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Crossed:
    """Elements of one token that cross where projections stand with the feed-forward layers, over all layers."""

    projected: Array  # to attention
    attended: Array  # and back


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Placements:
    """The placements of a study as arrays, shape (rows,); (n,) once gathered."""

    projections: Array  # 1.0: with the feed-forward layers
    gate: Array  # routers with attention: their share of the dense weights
    shared: Array  # shared experts with attention: the same
    head: Array  # 1.0: LM head and embedding with attention
    routed: Array  # 1.0: tokens are routed before they cross, and go to their experts' ranks
    prefill: Crossed
    decode: Crossed


def placement_rows(rows: Sequence[Placement], model: Architecture) -> Placements | None:
    """The rows of a study; None where everything stands where it does by default."""
    if all(row == Placement() for row in rows):
        return None
    dense = max(model.dense_parameters, 1)
    together = [row.projections == FFN for row in rows]

    def column(values: list[Any]) -> Array:
        return jnp.asarray([float(value) for value in values], jnp.float32)

    def everywhere(prefix: str) -> Crossed:
        counts = (model.over_layers(f"{prefix}{name}_elements") for name in ("projected", "attended"))
        return Crossed(*(column([count] * len(rows)) for count in counts))

    return Placements(
        projections=column(together),
        gate=column([model.router_parameters / dense * (row.router == ATTENTION) for row in rows]),
        shared=column([model.shared_parameters / dense * (row.shared_experts == ATTENTION) for row in rows]),
        head=column([row.lm_head == ATTENTION for row in rows]),
        routed=column([row.router != FFN and not moved for row, moved in zip(rows, together, strict=True)]),
        prefill=everywhere(""),
        decode=everywhere("decode_"),
    )
