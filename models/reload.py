"""Reading prefixes back from the tiers of KV cache below HBM: how long it takes, how much it holds, who finds it."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from breakeven.models.context_parallel import ranks
from breakeven.models.llm import LLM
from breakeven.models.memory import kv_bytes_per_token
from breakeven.models.numerics import TINY
from breakeven.models.steps import kv_shards
from breakeven.models.tables import Resolved
from breakeven.models.tiers import TierRows
from breakeven.models.workload import PrefillNodes, Workload


class Ahead(NamedTuple):
    """Reading that begins before its call comes, as an agent's framework announces it while the tool still runs."""

    lead_s: Array  # (n, LEVELS)
    read_s: Array  # by node of continued calls, (n, LEVELS, nodes)
    weight: Array  # of the nodes, (n, nodes)

    def waited(self, k: int, busy: Array, queue_s: Array) -> tuple[Array, Array, Array]:
        """(probability that a read from tier k outlasts its lead, mean of what is left if it does, its squared CV).

        A read of r seconds waits behind others with probability `busy`, exponentially: what is left of an exponential
        wait is as long.
        """
        late = self.read_s[:, k] - self.lead_s[:, k, None]
        tail_s = (queue_s / jnp.maximum(busy, TINY))[:, None]
        wait = busy[:, None] * jnp.exp(jnp.minimum(late, 0.0) / jnp.maximum(tail_s, TINY))
        sure = jnp.maximum(late, 0.0)
        chance = jnp.sum(self.weight * jnp.where(late > 0.0, 1.0, wait), -1)
        first = jnp.sum(self.weight * (sure + wait * tail_s), -1)
        second = jnp.sum(self.weight * (sure**2 + 2.0 * wait * tail_s * (sure + tail_s)), -1)
        mean = first / jnp.maximum(chance, TINY)
        return chance, mean, jnp.maximum(second / jnp.maximum(chance * mean**2, TINY) - 1.0, 0.0)


class Reload(NamedTuple):
    """The tiers of an engine that prefills, nearest first; shapes (n, LEVELS)."""

    capacity_tokens: (
        Array  # of one bundle of engines, or of the whole pool where it is shared; 0 where reading takes too long
    )
    mean_s: Array  # of reading a continued call's prefix
    second_s2: Array
    shared: Array
    paths: Array  # ways a bundle reads at once, (n,)
    ahead: Ahead | None  # None: reading begins when the call comes


def tier_bytes_per_s(tiers: TierRows, nic_bytes_per_s: Array, host_bytes_per_s: Array) -> Array:
    """What one accelerator reads from each tier, (n, LEVELS): the tier's own rate or the achieved one of its path."""
    path = jnp.where(tiers.through_nic > 0.5, nic_bytes_per_s[:, None], host_bytes_per_s[:, None])
    return jnp.minimum(tiers.read_bytes_per_s, tiers.path_efficiency * path)


def reload(
    resolved: Resolved, nodes: PrefillNodes, workload: Workload, llm: LLM, recompute_s: Array, workers: Array
) -> Reload | None:
    """Tiers of each candidate, (n, LEVELS); None where the catalogue has none.

    Every rank that holds a shard of the cache reads it over its own path. `recompute_s` is what computing a lost
    prefix anew adds to a continued call, mean, (n,): a tier that a call waits longer for is not used. `workers` engines
    share a prefill bundle.
    """
    tiers = resolved.tiers
    if tiers is None:
        return None
    stage = resolved.prefill_attention
    choice, kv = stage.choice, resolved.kv_bytes_per_element
    accelerators = choice.accelerators
    ports = kv_shards(stage, llm) * choice.pipeline_parallel * ranks(stage)
    rate = tier_bytes_per_s(tiers, stage.hardware.nic_bytes_per_s, stage.hardware.host_bytes_per_s)
    size = _own_tokens(nodes, workload) * kv_bytes_per_token(llm, kv[:, None], nodes.context)
    continued = continued_share(workload)
    first = nodes.mean(size) / continued
    second = nodes.mean(size**2) / continued
    pace = 1.0 / (ports[:, None] * rate)
    mean_s = tiers.latency_s + first[:, None] * pace
    second_s2 = tiers.latency_s * (2.0 * mean_s - tiers.latency_s) + second[:, None] * pace**2
    per_token = kv_bytes_per_token(llm, kv, workload.mean_prompt)
    held = tiers.capacity_bytes * (accelerators / per_token)[:, None]
    held = held * jnp.where(tiers.shared > 0.5, choice.replicas[:, None], workers[:, None])
    ahead, waited_s = None, mean_s
    if tiers.prefetch_s is not None:
        read_s = tiers.latency_s[..., None] + size[:, None, :] * pace[..., None]
        weight = nodes.weight * jnp.where(size > 0.0, 1.0, 0.0)
        ahead = Ahead(tiers.prefetch_s, read_s, weight / jnp.maximum(jnp.sum(weight, -1, keepdims=True), TINY))
        waited_s = jnp.sum(ahead.weight[:, None] * jnp.maximum(read_s - ahead.lead_s[..., None], 0.0), -1)
    quicker = waited_s < recompute_s[:, None]
    paths = choice.data_parallel * workers
    return Reload(jnp.where(quicker, held, 0.0), mean_s, second_s2, tiers.shared, paths, ahead)


def continued_share(workload: Workload) -> Array:
    """Share of the calls that continue a session."""
    return jnp.maximum(1.0 - 1.0 / workload.calls_per_session, 1e-6)


def _own_tokens(nodes: PrefillNodes, workload: Workload) -> Array:
    """Tokens of the session itself that a call finds cached, by node; none in first calls."""
    return jnp.maximum(nodes.context - nodes.tokens - workload.shared_prefix_tokens, 0.0)


def prefix_tokens(workload: Workload) -> Array:
    """Mean tokens of a continued call's prefix beside what all sessions share."""
    nodes = workload.resident
    return nodes.mean(_own_tokens(nodes, workload)) / continued_share(workload)
