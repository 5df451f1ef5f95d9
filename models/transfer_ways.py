"""Ways for a call's KV cache to get from prefill to decode, as a study names them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from breakeven.models.catalog import table
from breakeven.models.inputs import InputError, known_fields, number, pick

FULL = "full"
_RANGES = {
    "compression": (1.0, 100.0),
    "encode_gbs": (1e-3, 1e6),
    "decode_gbs": (1e-3, 1e6),
    "local_tokens": (0.0, 1e6),
    "staging": (0.0, 0.9),
}
_FLAGS = ("overlap", "returns", "keeps")
_CODERS = ("encode_gbs", "decode_gbs")
_ASKED = ("overlap", "compression", "returns", "keeps", "local_tokens")


@dataclass(frozen=True)
class TransferWay:
    """A way (transfers.toml says what its fields are); the default sends everything once prefill is done."""

    id: str
    overlap: bool = False
    compression: float = 1.0
    returns: bool = False
    keeps: bool = False
    local_tokens: float = 0.0
    staging: float = 0.0
    encode_gbs: float = math.inf  # of cache, by one accelerator
    decode_gbs: float = math.inf

    @property
    def asks(self) -> tuple[str, ...]:
        """What an engine must be able to do for it, by the names of support.toml."""
        return tuple(name for name in _ASKED if getattr(self, name) != getattr(TransferWay, name))


def transfer_way(spec: Any, field: str = "kv_transfer") -> TransferWay:
    """`full`, a row of the catalogue (`layer-wise`), or a mapping: `{like: layer-wise, compression: 2}`. Raises
    InputError."""
    if spec == FULL:
        return TransferWay(FULL)
    rows = table("transfers")
    given = {"like": spec} if isinstance(spec, str) else spec
    if not isinstance(given, Mapping):
        raise InputError(field, spec, "full, a name or a mapping of fields")
    known_fields(given, ("like", "name", "source", *_FLAGS, *_RANGES), field)
    like = given.get("like", FULL)
    where = field if isinstance(spec, str) else f"{field}.like"
    pick(where, like, [FULL, *rows])
    row = {**rows.get(like, {}), **given}
    values: dict[str, Any] = {}
    for name in (name for name in _FLAGS if name in row):
        if not isinstance(row[name], bool):
            raise InputError(f"{field}.{name}", row[name], "true or false")
        values[name] = row[name]
    for name, (low, high) in _RANGES.items():
        if name in row:
            values[name] = number(f"{field}.{name}", row[name], low, high)
    if values.get("local_tokens", 0.0) > 0.0 and not values.get("keeps"):
        allowed = "0 unless keeps is true: a decode pool that keeps nothing would prefill whole prompts"
        raise InputError(f"{field}.local_tokens", values["local_tokens"], allowed)
    for name in (name for name in _CODERS if name in values and values.get("compression", 1.0) == 1.0):
        raise InputError(f"{field}.{name}", values[name], "nothing unless compression is above 1: nothing is coded")
    return replace(TransferWay(transfer_id(spec)), **values)


def transfer_id(spec: Any) -> str:
    """What a way is called: its name, else what it is like and its own fields."""
    if not isinstance(spec, Mapping):
        return str(spec)
    own = [f"{name}={value}".lower() for name, value in spec.items() if name not in ("like", "name", "source")]
    return str(spec.get("name", ",".join([str(spec.get("like", FULL)), *own])))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Transfers:
    """The ways of a study as arrays, shape (rows,); (n,) once gathered."""

    overlap: Array  # 1.0: all layers but the last cross during prefill
    compression: Array
    returns: Array  # 1.0: the output's KV goes back
    keeps: (
        Array | None
    )  # 1.0: decode keeps a session's KV between its calls, so only the rest crosses; None: no way does
    local_tokens: Array | None  # calls with at most so many new tokens, their session kept, are prefilled by decode
    staging: Array
    encode_byte_s: Array | None  # of one accelerator that compresses, per byte of cache; None: coding takes no time
    decode_byte_s: Array | None


def transfers(ways: Sequence[TransferWay]) -> Transfers | None:
    """The rows of a study; None where it knows none but full ones."""
    if all(replace(way, id=FULL) == TransferWay(FULL) for way in ways):
        return None
    names = [field.name for field in fields(Transfers) if not field.name.endswith("_byte_s")]
    found: dict[str, Any] = {name: jnp.asarray([float(getattr(way, name)) for way in ways]) for name in names}
    coded = any(getattr(way, name) < math.inf for way in ways for name in _CODERS)
    for name in _CODERS:
        byte_s = jnp.asarray([1e-9 / getattr(way, name) for way in ways]) if coded else None
        found[name.replace("gbs", "byte_s")] = byte_s
    if not any(way.keeps for way in ways):
        found |= {"keeps": None, "local_tokens": None}
    return Transfers(**found)
