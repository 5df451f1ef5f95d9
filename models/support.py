"""What serving engines can do today, each fact with its source (support.toml)."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from breakeven.models.catalog import table
from breakeven.models.hardware import Accelerator
from breakeven.models.inputs import pick

DONE = "yes"


class Fact(NamedTuple):
    """Whether an engine does something, who says so, and what to know about it."""

    status: str  # yes, experimental or no
    source: str
    note: str = ""

    @property
    def today(self) -> bool:
        """Whether a user can rely on it."""
        return self.status == DONE


UNKNOWN = Fact("no", "not documented")


class PoolNeeds(NamedTuple):
    """What a pool asks of its engine."""

    accelerator: Accelerator
    weights: str


def engines() -> tuple[str, ...]:
    """The engines that support.toml knows."""
    return tuple(name for name, row in table("support").items() if isinstance(row, Mapping))


def _fact(row: Mapping[str, Any] | None, generation: str = "") -> Fact:
    if row is None:
        return UNKNOWN
    status = row.get("status") or (DONE if generation in row["generations"] else "no")
    return Fact(status, row["source"], row.get("note", ""))


def topology_support(engine: str, topology: str) -> Fact:
    """Whether an engine runs a topology."""
    return _fact(_engine(engine)["topologies"].get(topology))


def accelerator_support(engine: str, accelerator: Accelerator) -> Fact:
    """Whether an engine runs on an accelerator; on one that is only announced nothing does. A variation counts as the
    row it is like."""
    if accelerator.status.startswith("announced"):
        return Fact("no", f"{accelerator.name} is {accelerator.status}")
    return _fact(_engine(engine)["generations"].get(accelerator.generation))


def weights_support(engine: str, weights: str, accelerator: Accelerator) -> Fact:
    """Whether an engine has a weight format on an accelerator."""
    return _fact(_engine(engine)["weights"].get(weights), accelerator.generation)


def kv_support(engine: str, kv: str, accelerator: Accelerator) -> Fact:
    """Whether an engine has a KV cache format on an accelerator."""
    return _fact(_engine(engine)["kv"].get(kv), accelerator.generation)


def transfer_support(engine: str, what: str) -> Fact:
    """Whether an engine's KV transfer can `overlap` with prefill, use `compression`, or `returns` outputs' caches."""
    return _fact(_engine(engine).get("transfers", {}).get(what))


def joint_support(engine: str, what: str) -> Fact:
    """`mixed_vendors`, `offload` or `unlike_weights`."""
    return _fact(_engine(engine).get(what))


def _engine(name: str) -> Mapping[str, Any]:
    return table("support")[pick("engine", name, engines())]


def lacking(
    engine: str,
    topology: str,
    pools: Sequence[PoolNeeds],
    kv: str,
    offload: bool = False,
    transfers: Sequence[str] = (),
) -> list[str]:
    """What an engine cannot do, or does only experimentally, of a deployment; empty where it can do everything."""
    asked: list[tuple[str, Fact]] = [(f"topology {topology}", topology_support(engine, topology))]
    for needs in dict.fromkeys(pools):
        a = needs.accelerator
        asked.append((f"accelerator {a.id}", accelerator_support(engine, a)))
        asked.append((f"weights {needs.weights} on {a.id}", weights_support(engine, needs.weights, a)))
        asked.append((f"KV cache {kv} on {a.id}", kv_support(engine, kv, a)))
    if len({needs.accelerator.vendor for needs in pools}) > 1:
        asked.append(("pools on accelerators of different makers", joint_support(engine, "mixed_vendors")))
    if len({needs.weights for needs in pools}) > 1:
        asked.append(("pools with different weight formats", joint_support(engine, "unlike_weights")))
    if offload:
        asked.append(("KV cache below HBM", joint_support(engine, "offload")))
    asked += [(f"kv_transfer, {what}", transfer_support(engine, what)) for what in transfers]
    return [_words(what, fact) for what, fact in asked if not fact.today]


def _words(what: str, fact: Fact) -> str:
    verdict = "is experimental" if fact.status == "experimental" else "is not supported"
    note = f"; {fact.note}" if fact.note else ""
    return f"{what} {verdict} ({fact.source}{note})"
