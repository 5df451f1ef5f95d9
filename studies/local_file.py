"""The small file that `calibrate --local` writes: corrections of deployments, read by studies and deployment files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import yaml

from breakeven.models.inputs import InputError, known_fields, number
from breakeven.models.local import LAYOUT, Local, Pace
from breakeven.spaces.space import Names
from breakeven.studies.schema import read_yaml

NUMBERS = ("prefill_factor", "decode_factor", "first_token_s")
POOL = ("accelerator", "tensor_parallel", "data_parallel", "expert_parallel", "pipeline_parallel", "weights")
FIELDS = ("llm", "engine", "prefill", "decode", *NUMBERS, "points", "remaining_spread", "measured")
HEAD = """\
# Written by `breakeven calibrate --local`. explain, simulate and run take it with `--local FILE`; a study or deployment
# file names it as `local: FILE`. Factors are on the model's step times, first_token_s is added to TTFT;
# remaining_spread is the standard deviation of ln(measured / corrected) that a new point should have.
"""


@dataclass(frozen=True)
class Corrected:
    """A deployment's correction and what it was measured on; `decode` is None where one pool does both."""

    llm: str
    engine: str
    prefill: Mapping[str, Any]  # fields of POOL
    decode: Mapping[str, Any] | None
    prefill_factor: float
    decode_factor: float
    first_token_s: float
    points: int
    remaining_spread: Mapping[str, float]  # ttft, tpot
    measured: str

    def words(self) -> str:
        """The correction in words."""
        return (
            f"decode steps × {self.decode_factor:.3g}, prefill × {self.prefill_factor:.3g}, "
            f"TTFT {self.first_token_s * 1e3:+.3g} ms, from {self.points} points"
        )

    def where(self) -> str:
        """What it was measured on, in words."""
        pools = [self.prefill] if self.decode is None else [self.prefill, self.decode]
        return f"{self.llm} on {self.engine}, " + " → ".join(_pool_words(pool) for pool in pools)


def _pool_words(pool: Mapping[str, Any]) -> str:
    ranks = f"TP{pool['tensor_parallel']}"
    for name, letters in (("pipeline_parallel", "PP"), ("data_parallel", "DP")):
        ranks += f" {letters}{pool[name]}" if pool[name] > 1 else ""
    return f"{pool['accelerator']} {ranks}{' EP' if pool['expert_parallel'] else ''} {pool['weights']}"


def local_yaml(corrections: Sequence[Corrected]) -> str:
    """The file's text."""
    rows = []
    for one in corrections:
        row = {name: getattr(one, name) for name in FIELDS if getattr(one, name) is not None}
        row |= {name: float(f"{row[name]:.4g}") for name in NUMBERS}
        row["remaining_spread"] = {k: float(f"{v:.3g}") for k, v in one.remaining_spread.items()}
        rows.append(row)
    return HEAD + yaml.safe_dump({"corrections": rows}, sort_keys=False, allow_unicode=True)


def read_local(path: str | Path) -> tuple[Corrected, ...]:
    """The corrections in a file; InputError for the first thing that is wrong."""
    file = str(path)
    data = read_yaml(path)
    try:
        known_fields(data, ("corrections",))
        rows = data.get("corrections")
        if not isinstance(rows, list) or not rows:
            raise InputError("corrections", rows, "a list of at least one correction")
        return tuple(_corrected(row, f"corrections.{i}") for i, row in enumerate(rows))
    except InputError as error:
        raise error.inside(file=file) from None


def _corrected(row: Any, field: str) -> Corrected:
    if not isinstance(row, Mapping):
        raise InputError(field, row, "a mapping of " + ", ".join(FIELDS))
    known_fields(row, FIELDS, field)
    for name in ("llm", "engine"):
        if not isinstance(row.get(name), str):
            raise InputError(f"{field}.{name}", row.get(name), "a name")
    values = {
        name: number(f"{field}.{name}", row.get(name), *((-1e4, 1e4) if name.endswith("_s") else (0.01, 100.0)))
        for name in NUMBERS
    }
    spread = row.get("remaining_spread")
    if not isinstance(spread, Mapping):
        raise InputError(f"{field}.remaining_spread", spread, "a mapping of ttft, tpot")
    known_fields(spread, ("ttft", "tpot"), f"{field}.remaining_spread")
    return Corrected(
        llm=row["llm"],
        engine=row["engine"],
        prefill=_pool(row.get("prefill"), f"{field}.prefill"),
        decode=None if row.get("decode") is None else _pool(row["decode"], f"{field}.decode"),
        points=int(number(f"{field}.points", row.get("points", 1), 1, 1e9, whole=True)),
        remaining_spread={
            name: number(f"{field}.remaining_spread.{name}", spread.get(name), 0.0, 10.0) for name in ("ttft", "tpot")
        },
        measured=str(row.get("measured", "")),
        **values,
    )


def _pool(given: Any, field: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise InputError(field, given, "a mapping of " + ", ".join(POOL))
    known_fields(given, POOL, field)
    for name in ("accelerator", "weights"):
        if not isinstance(given.get(name), str):
            raise InputError(f"{field}.{name}", given.get(name), "a name")
    counts = ("tensor_parallel", "data_parallel", "pipeline_parallel")
    ranks = {name: int(number(f"{field}.{name}", given.get(name, 1), 1, 1e6, whole=True)) for name in counts}
    whole = given.get("expert_parallel", False)
    if not isinstance(whole, bool):
        raise InputError(f"{field}.expert_parallel", whole, "true or false")
    return {name: given[name] for name in ("accelerator", "weights")} | ranks | {"expert_parallel": whole}


def applicable(corrections: Sequence[Corrected], llm: str, engine: str, names: Names) -> tuple[Corrected, ...]:
    """Those of this model and engine on an accelerator of the study; InputError where there is none."""
    ids = names.accelerator_ids
    found = tuple(
        one
        for one in corrections
        if (one.llm, one.engine) == (llm, engine)
        and any(pool["accelerator"] in ids for pool in (one.prefill, one.decode or one.prefill))
    )
    if not found:
        known = "; ".join(dict.fromkeys(one.where() for one in corrections))
        raise InputError(
            "local", f"{llm} on {engine}, {', '.join(ids)}", f"measured for none of these, but for {known}"
        )
    return found


def as_arrays(corrections: Sequence[Corrected], names: Names) -> Local:
    """Corrections as arrays of the model, rows numbered as in the study's catalogue."""

    def pace(pools: Sequence[Mapping[str, Any]], factors: Sequence[float]) -> Pace:
        def rows(name: str, known: Sequence[str]) -> Any:
            return jnp.asarray([known.index(p[name]) if p[name] in known else -1 for p in pools], jnp.int32)

        ranks = {name: jnp.asarray([float(p[name]) for p in pools]) for name in LAYOUT if name != "weights"}
        return Pace(
            accelerator=rows("accelerator", names.accelerator_ids),
            split=jnp.asarray([float(one.decode is not None) for one in corrections]),
            expert_parallel=jnp.asarray([1.0 + p["expert_parallel"] for p in pools]),
            weights=rows("weights", names.weights),
            factor=jnp.asarray(factors),
            **ranks,
        )

    return Local(
        pace([one.prefill for one in corrections], [one.prefill_factor for one in corrections]),
        pace([one.decode or one.prefill for one in corrections], [one.decode_factor for one in corrections]),
        jnp.asarray([one.first_token_s for one in corrections]),
    )
