"""The part of a space whose formats of weights and KV cache are allowed together."""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from breakeven.models.hardware import Accelerator
from breakeven.spaces.space import Family, Names, Space

Allowed = Callable[[Accelerator, str, str], bool]  # an accelerator, weights on it, a KV cache beside them


def by_kv(family: Family, names: Names, allowed: Allowed) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(KV formats, which weights are allowed on which accelerator beside them), formats that agree together."""
    alike: dict[bytes, tuple[list[int], np.ndarray]] = {}
    for k in family.kv:
        found = np.array([[allowed(a, w, names.kv[k]) for w in names.weights] for a in names.accelerators], bool)
        alike.setdefault(found.tobytes(), ([], found))[0].append(int(k))
    for formats, found in alike.values():
        yield np.array(formats), found


def part(family: Family, kv: np.ndarray, allowed: np.ndarray) -> Family:
    """The candidates of these KV formats whose pools have weights that are allowed on their accelerators."""
    masks = [allowed[table["accelerator"], table["weights"]] for table in family.tables]
    tables = tuple(
        {name: column[mask] for name, column in table.items()} for table, mask in zip(family.tables, masks, strict=True)
    )
    return dataclasses.replace(family, tables=tables, kv=kv)


def good_enough(space: Space, scores: dict[tuple[str, str], float], least: float) -> Space:
    """The candidates each of whose pools has weights and a KV cache that score at least so much.

    `scores` by (weights, kv); what has none is left out: nobody has shown that it is good enough.
    """

    def allowed(accelerator: Accelerator, weights: str, kv: str) -> bool:
        del accelerator
        return scores.get((weights, kv), -np.inf) >= least

    parts = [part(f, kv, mask) for f in space.families for kv, mask in by_kv(f, space.names, allowed)]
    return Space(tuple(family for family in parts if family.size), space.names)
