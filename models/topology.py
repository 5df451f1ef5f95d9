"""Topologies as data: which of the five stages of LLM inference share a pool.

A partition is a restricted-growth string over the stages in `STAGES`: the first stage has label 0, and each
later one either a label already used or the next. Renaming pools therefore cannot change a partition, and
there are exactly 52 of them (the fifth Bell number).
"""

from collections.abc import Sequence
from dataclasses import dataclass

STAGES = ("encode", "prefill_attention", "prefill_ffn", "decode_attention", "decode_ffn")

Partition = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Topology:
    """A named partition: its labels per stage, the scheduler of its pools, and what its pools are called."""

    name: str
    labels: Partition
    chunked: bool
    pools: tuple[str, ...]
    about: str


def partition(labels: Sequence[object]) -> Partition:
    """The restricted-growth string of any labelling of the five stages.

    >>> partition(["p", "p", "p", "d", "d"])
    (0, 0, 0, 1, 1)
    """
    if len(labels) != len(STAGES):
        raise ValueError(f"a partition labels {len(STAGES)} stages, not {len(labels)}")
    first: dict[object, int] = {}
    growth = [first.setdefault(label, len(first)) for label in labels]
    return (growth[0], growth[1], growth[2], growth[3], growth[4])


def all_partitions() -> list[Partition]:
    """Every partition of the five stages, 52 in all, in lexicographic order."""
    found: list[tuple[int, ...]] = [(0,)]
    for _ in STAGES[1:]:
        found = [(*head, label) for head in found for label in range(max(head) + 2)]
    return [partition(labels) for labels in found]


TOPOLOGIES = {
    topology.name: topology
    for topology in (
        Topology("colocated", (0, 0, 0, 0, 0), False, ("pool",), "one pool, prefill first: decode stalls behind it"),
        Topology("chunked", (0, 0, 0, 0, 0), True, ("pool",), "one pool, prefill in chunks beside the decode batch"),
        Topology("pd", (0, 0, 0, 1, 1), False, ("prefill", "decode"), "prefill and decode pools: KV crosses a link"),
    )
}
