"""Topologies as data: which of the five stages of LLM inference share a pool.

A partition is a restricted-growth string over the stages in `STAGES`: the first stage has label 0, and each
later one either a label already used or the next. Renaming pools therefore cannot change a partition, and
there are exactly 52 of them (the fifth Bell number).
"""

from collections.abc import Sequence
from dataclasses import dataclass

STAGES = ("encode", "prefill_attention", "prefill_ffn", "decode_attention", "decode_ffn")

COLUMNS = ("encode", "prefill", "prefill_ffn", "decode", "decode_ffn")  # what tables call each stage's pool
SHORT = ("E", "PA", "PF", "DA", "DF")
ANY = "any"

Partition = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Topology:
    """A named partition: its labels per stage, the scheduler of its pools, and what its pools are called."""

    name: str
    labels: Partition
    chunked: bool
    pools: tuple[str, ...]
    about: str

    @property
    def encode_apart(self) -> bool:
        """Whether the vision encoder stands in another pool than prefill attention."""
        return self.labels[0] != self.labels[1]

    @property
    def kv_moves(self) -> bool:
        """Whether prefill attention and decode attention stand in two pools."""
        return self.labels[1] != self.labels[3]

    @property
    def prefill_apart(self) -> bool:
        """Whether prefill attention and its feed-forward layers stand in two pools."""
        return self.labels[1] != self.labels[2]

    @property
    def decode_apart(self) -> bool:
        """Whether decode attention and its feed-forward layers stand in two pools."""
        return self.labels[3] != self.labels[4]

    @property
    def sides_apart(self) -> bool:
        """Whether they do in prefill or in decode."""
        return self.prefill_apart or self.decode_apart

    def stages(self, pool: int) -> tuple[str, ...]:
        """The stages of a pool."""
        return tuple(name for name, label in zip(STAGES, self.labels, strict=True) if label == pool)


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
        Topology(
            "epd",
            (0, 1, 1, 2, 2),
            False,
            ("encode", "prefill", "decode"),
            "vision encoder, prefill and decode pools: embeddings and KV cross a link",
        ),
        Topology(
            "e-colocated", (0, 1, 1, 1, 1), False, ("encode", "pool"), "vision encoder apart, prefill first in the rest"
        ),
        Topology(
            "e-chunked", (0, 1, 1, 1, 1), True, ("encode", "pool"), "vision encoder apart, the rest prefills in chunks"
        ),
        Topology(
            "afd",
            (0, 0, 0, 1, 2),
            False,
            ("prefill", "attention", "ffn"),
            "decode attention apart from its feed-forward layers: activations cross twice a layer, each step",
        ),
        Topology(
            "af",
            (0, 0, 1, 0, 1),
            False,
            ("attention", "ffn"),
            "attention on one kind, feed-forward layers on another, no prefill pool",
        ),
        Topology(
            "pdaf",
            (0, 0, 1, 2, 3),
            False,
            ("prefill_attention", "prefill_ffn", "decode_attention", "decode_ffn"),
            "all four apart",
        ),
    )
}
PLAIN = ("colocated", "chunked", "pd")  # what a study searches that names no topology
_BY_LABELS = {topology.labels: topology for topology in TOPOLOGIES.values() if not topology.chunked}


def topology(name: str) -> Topology:
    """A topology by name, or by its pools as in `E PA PF | DA | DF`. Raises KeyError for anything else."""
    if name in TOPOLOGIES:
        return TOPOLOGIES[name]
    pools = [part.split() for part in name.split("|")]
    found = {stage: i for i, part in enumerate(pools) for stage in part}
    if sorted(stage for part in pools for stage in part) != sorted(SHORT):
        raise KeyError(name)
    return of_partition(partition([found[stage] for stage in SHORT]))


def of_partition(labels: Partition) -> Topology:
    """The topology of a partition: a named one, else one that is called by its pools."""
    if labels in _BY_LABELS:
        return _BY_LABELS[labels]
    members = [[s for s, label in zip(SHORT, labels, strict=True) if label == i] for i in range(max(labels) + 1)]
    return Topology(
        " | ".join(" ".join(part) for part in members),
        labels,
        False,
        tuple("_".join(part).lower() for part in members),
        "a partition without a name",
    )


def any_topology(images: bool = False) -> list[Topology]:
    """Every topology whose encoder stands with prefill attention, 15 partitions; with `images` to encode all 52. Those
    in which all of the rest shares one pool come in both of its schedulers."""
    found = [of_partition(labels) for labels in all_partitions() if images or labels[0] == labels[1]]
    chunked = [t for t in TOPOLOGIES.values() if t.chunked and (images or not t.encode_apart)]
    return [TOPOLOGIES["colocated"], *chunked, *[t for t in found if t.name != "colocated"]]
