r"""What moving KV caches between pools takes: seconds on the link, and seconds that a call waits for them.

A prompt of C tokens takes T = latency + C b / (ports x port) on the link. Sent after prefill, a call waits for all of
it. Sent layer by layer while the S seconds of prefill go on, the cache of layer l of L can leave at S l / L, so

    waited = latency + max(T' / L, T' - S (1 - 1 / L)),    T' = T - latency:

the last layer's part at least, else what the link was too slow for (Splitwise, arXiv:2311.18677, section 4.3). The link
is as busy as before.

Where coding a compressed cache takes time, layers are compressed, sent and restored one after another, each while the
others do the next one: of the seconds e, w and d that a byte takes in the three, it takes

    max(e, w, d) + (e + w + d - max(e, w, d)) / L,

the slowest of them, and a layer's time in the two others. A prefill engine's coder and link serve one cache at a time,
beside its prefill; all accelerators that hold a part of a cache code it.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from breakeven.models.context_parallel import ranks
from breakeven.models.memory import kv_bytes_per_token
from breakeven.models.steps import kv_shards
from breakeven.models.tables import Catalog, Resolved
from breakeven.models.transfer_ways import Transfers


class Hidden(NamedTuple):
    """Prefill that is left to hide a wait for the link behind, by node, shapes (n, nodes)."""

    slack_s: Array
    weight: Array

    def share_left(self, wait_s: Array) -> Array:
        """Share of exponential waits of mean `wait_s` (n,) that outlast the slack; what is left of one is as long."""
        left = jnp.exp(-self.slack_s / jnp.maximum(wait_s, 1e-9)[:, None])
        return jnp.sum(self.weight * left, -1)


class Moved(NamedTuple):
    """A call's KV transfer; shapes (n,)."""

    waited_s: Array  # what the call waits for, mean
    link_s: Array  # the whole of it
    link_s2: Array  # its second moment
    hidden: Hidden | None  # prefill that waits for the link may hide behind; None: every transfer comes after it

    def mixed(self, other: "Moved", share: Array) -> "Moved":
        """A mixture that is `other` with probability `share`."""
        waited_s, link_s, link_s2 = (a + share * (b - a) for a, b in zip(self[:3], other[:3], strict=True))
        hidden = None
        if self.hidden is not None and other.hidden is not None:
            parts = (self.hidden, 1.0 - share), (other.hidden, share)
            weight = [part.weight * own[:, None] for part, own in parts]
            slack_s = jnp.concatenate([self.hidden.slack_s, other.hidden.slack_s], -1)
            hidden = Hidden(slack_s, jnp.concatenate(weight, -1))
        return Moved(waited_s, link_s, link_s2, hidden)


def moved(resolved: Resolved, catalog: Catalog, tokens: Array, prefill_s: Array, weight: Array) -> tuple[Moved, Array]:
    """(the transfer of `tokens` whose prefill takes `prefill_s`, what each node waits for), by node, (n, nodes).

    The means are over the first nodes, by their `weight`, (n, nodes) or (nodes,).
    """
    link_s = kv_transfer_s(resolved, catalog, tokens)
    late_s, slack_s = waited_s(resolved, catalog, link_s, prefill_s)
    count = weight.shape[-1]

    def mean(values: Array) -> Array:
        return jnp.sum(weight * values[:, :count], -1)

    hidden = Hidden(slack_s[:, :count], weight * jnp.ones_like(slack_s[:, :count]))
    return Moved(mean(late_s), mean(link_s), mean(link_s**2), None if resolved.transfers is None else hidden), late_s


def _shards(resolved: Resolved, catalog: Catalog) -> tuple[Array, Array]:
    """Accelerators that a call's cache is spread over, where it is prefilled and where it decodes."""
    stages = resolved.prefill_attention, resolved.decode_attention
    p, d = (kv_shards(s, catalog.llm) * s.choice.pipeline_parallel * ranks(s) for s in stages)
    return p, d


def _byte_s(way: Transfers, shards: tuple[Array, Array], wire_byte_s: Array, layers: Array) -> Array:
    """Seconds per byte of cache that is coded on its way between so many accelerators, (n,)."""
    if way.encode_byte_s is None or way.decode_byte_s is None:
        return wire_byte_s
    encode_s, decode_s = way.encode_byte_s / shards[0], way.decode_byte_s / shards[1]
    slowest = jnp.maximum(wire_byte_s, jnp.maximum(encode_s, decode_s))
    return slowest + (wire_byte_s + encode_s + decode_s - slowest) / jnp.maximum(layers, 1.0)


def coding_s(resolved: Resolved, catalog: Catalog, tokens: Array) -> tuple[Array, Array] | None:
    """Seconds that compressing and restoring the cache of `tokens` take by themselves, (n,); None if both are free."""
    way = resolved.transfers
    if way is None or way.encode_byte_s is None or way.decode_byte_s is None:
        return None
    size = tokens * kv_bytes_per_token(catalog.llm, resolved.kv_bytes_per_element, tokens)
    p, d = _shards(resolved, catalog)
    return size * way.encode_byte_s / p, size * way.decode_byte_s / d


def kv_transfer_s(resolved: Resolved, catalog: Catalog, context: Array, back: bool = False) -> Array:
    """Seconds one call's KV cache of `context` tokens takes from the prefill to the decode engine, or `back`, (n, ...).

    Every rank that holds a shard sends it over its own port, as many ports as the side with fewer shards has.
    """
    llm, p, d = catalog.llm, resolved.prefill_attention, resolved.decode_attention
    sides = _shards(resolved, catalog)
    ports = jnp.minimum(*sides)
    nic = jnp.minimum(p.hardware.nic_bytes_per_s, d.hardware.nic_bytes_per_s)
    port = jnp.where(
        resolved.link_through_nic > 0.5,
        jnp.minimum(resolved.link_bytes_per_s, nic),
        resolved.link_bytes_per_s,
    )
    way = resolved.transfers
    wire = ports * port if way is None else ports * port * way.compression
    shape = (-1, *[1] * (context.ndim - 1))
    per_token = kv_bytes_per_token(llm, resolved.kv_bytes_per_element.reshape(shape), context)
    sent_s = context * per_token / wire.reshape(shape)
    if way is not None and way.encode_byte_s is not None:
        coded = _byte_s(way, (sides[1], sides[0]) if back else sides, 1.0 / wire, llm.layers)
        sent_s = context * per_token * coded.reshape(shape)
    time = resolved.link_latency_s.reshape(shape) + sent_s
    apart = p.choice.pool != d.choice.pool
    return jnp.where(apart.reshape(shape), time, 0.0)


def waited_s(resolved: Resolved, catalog: Catalog, transfer_s: Array, prefill_s: Array) -> tuple[Array, Array]:
    """(what a call waits for of a transfer of `transfer_s`, prefill left to hide more behind), (n, nodes)."""
    way = resolved.transfers
    if way is None:
        return transfer_s, jnp.zeros_like(transfer_s)
    last = 1.0 / jnp.maximum(catalog.llm.layers, 1.0)
    moved_s = jnp.maximum(transfer_s - resolved.link_latency_s[:, None], 0.0)
    before_s = prefill_s * (1.0 - last)
    late_s = transfer_s - moved_s + jnp.maximum(moved_s * last, moved_s - before_s)
    overlap = (way.overlap[:, None] > 0.5) & (transfer_s > 0.0)
    slack_s = jnp.maximum(before_s - moved_s * (1.0 - last), 0.0)
    return jnp.where(overlap, late_s, transfer_s), jnp.where(overlap, slack_s, 0.0)


def return_s(resolved: Resolved, catalog: Catalog, mean_output: Array) -> Array | None:
    """Seconds that the KV of a call's output takes back to the pool that prefills, mean, (n,)."""
    if resolved.transfers is None:
        return None
    tokens = mean_output * jnp.ones_like(resolved.link_latency_s)
    return resolved.transfers.returns * kv_transfer_s(resolved, catalog, tokens, back=True)
