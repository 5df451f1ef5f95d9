r"""Decode pools that keep their sessions' KV: only what is missing crosses, and short prompts are prefilled there.

A session's calls then go to one decode engine. While that engine still holds the session (with a probability kept, by
the same LRU as prefill's caches), a call sends it only the tokens that are new since the last call; where these are at
most `local_tokens` the call does not go to the prefill pool at all (Dynamo's conditional disaggregation): decode stops
for the step that computes them. What the prefill pool has not seen of such calls it computes with the session's next
one to come to it, unless outputs and prompts return.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from breakeven.models.bundle import Bundle, prefill_call
from breakeven.models.kv_transfer import Moved, moved
from breakeven.models.numerics import TINY
from breakeven.models.queueing import Moments
from breakeven.models.tables import Catalog, Resolved
from breakeven.models.workload import PrefillNodes, Workload


class Retained(NamedTuple):
    """What a decode pool that keeps its sessions' KV does; shapes (n,), by node (n, nodes)."""

    keeps: Array  # 1.0 where it does
    partial: Moved  # transfer of a call that goes to prefill, session held by decode
    partial_s: Array  # of it what each node waits for
    local: Array  # share of each node's calls that are short enough to be prefilled on the decode engine
    local_weight: Array  # share of all calls that these are
    local_s: Array  # seconds of that prefill, by node
    local_moments: Moments  # of them, given that a call is local
    spared: Moments  # what local calls would have taken of their prefill engine: sums over all calls
    caught_up: Moments  # what the next prefill of a session takes longer per local call before it, of the engine
    caught_up_s: Array  # and in latency

    @property
    def local_share(self) -> Array:
        """Calls that are short enough, of all."""
        return jnp.sum(self.local_weight, -1)


def _short(tokens: Array, most: Array) -> Array:
    """Share of each node's calls of at most `most` tokens (n,), each node's evenly spread between the middles to its
    neighbours; (n, nodes)."""
    middle = 0.5 * (tokens[..., 1:] + tokens[..., :-1])
    low = jnp.concatenate([0.0 * tokens[..., :1], middle], -1)
    high = jnp.concatenate([middle, 2.0 * tokens[..., -1:] - middle[..., -1:]], -1)
    return jnp.clip((most[:, None] - low) / jnp.maximum(high - low, 1e-6), 0.0, 1.0)


def retained(
    resolved: Resolved,
    workload: Workload,
    catalog: Catalog,
    hit: PrefillNodes,
    prefill_s: Array,
    busy_s: Array,
    marginal: tuple[Array, Array],
    ways: Array,
    decode: Bundle,
) -> Retained | None:
    """None where no candidate's way to move the KV cache keeps any at decode.

    `hit` are the nodes of calls that find their prefix at prefill, which take `prefill_s` and occupy an engine for
    `busy_s` (n, nodes) by `ways` at once; `marginal` are seconds per token and per pair of a larger prefill.
    """
    way = resolved.transfers
    if way is None or way.keeps is None or way.local_tokens is None:
        return None
    p, d = resolved.prefill_attention.choice, resolved.decode_attention.choice
    apart = jnp.where(p.pool != d.pool, 1.0, 0.0)
    keeps, fresh = apart * way.keeps, workload.resident
    weight = hit.weight * apart[:, None]
    local = _short(fresh.tokens, keeps * way.local_tokens) * keeps[:, None]
    tokens = fresh.tokens * jnp.ones_like(weight)
    here = prefill_call(
        decode, catalog.llm, tokens, fresh.pairs + 0.0 * tokens, fresh.context + 0.0 * tokens, d.token_budget
    )
    local_weight, local_s = weight * local, here.alone.total_s
    share = jnp.sum(local_weight, -1) + TINY
    remote = hit.weight * (1.0 - local) / jnp.maximum(1.0 - share, TINY)[:, None]
    partial, partial_s = moved(resolved, catalog, tokens, prefill_s, remote)
    later_s = marginal[0][:, None] * hit.tokens + marginal[1][:, None] * hit.pairs
    later_s = later_s * (1.0 - way.returns)[:, None]
    return Retained(
        keeps=keeps,
        partial=partial,
        partial_s=partial_s,
        local=local,
        local_weight=local_weight,
        local_s=local_s,
        local_moments=Moments(*(jnp.sum(local_weight * local_s**k, -1) / share for k in (1, 2, 3))),
        spared=Moments(*(jnp.sum(local_weight * busy_s**k, -1) / ways**k for k in (1, 2, 3))),
        caught_up=Moments(*(jnp.sum(local_weight * later_s**k, -1) / share / ways**k for k in (1, 2, 3))),
        caught_up_s=jnp.sum(local_weight * later_s, -1) / share,
    )


def calls_ahead(local: Array, calls_per_session: Array) -> Array:
    """Local calls (a share `local` of all) of a session before one of its others, mean; none follows its last ones."""
    others = 1.0 - local
    after = (1.0 - local**calls_per_session) / (others * calls_per_session)  # of a session's calls
    return local / others * jnp.maximum(1.0 - after, 0.0)


def remote_service(kept: Retained, held: Moments, lost: Moments, miss: Array, local: Array, ahead: Array) -> Moments:
    """Moments of the prefill of a call that goes to the prefill pool, where a share `local` of all calls do not.

    `held` and `lost` are those of all calls, their prefix found there or not. Before such a call `ahead` local ones
    came, a geometric variable, whose tokens it has to compute, too.
    """
    spared = Moments(*(x * local / (kept.local_share + TINY) for x in kept.spared))
    left = Moments(*(jnp.maximum(a - b, 0.0) / (1.0 - local) for a, b in zip(held, spared, strict=True)))
    one, two, three = kept.caught_up
    late = Moments(
        ahead * one,
        ahead * two + 2.0 * (ahead * one) ** 2,
        ahead * three + 6.0 * ahead**2 * one * two + 6.0 * (ahead * one) ** 3,
    )
    more = Moments(
        left.first + late.first,
        left.second + 2.0 * left.first * late.first + late.second,
        left.third + 3.0 * left.second * late.first + 3.0 * left.first * late.second + late.third,
    )
    return more.mixed(lost, miss)


class Nodes(NamedTuple):
    """Calls by node: their prefill, what they wait for the KV cache to cross, and how many they are, (n, nodes)."""

    latency_s: Array
    transfer_s: Array
    spread_s: Array  # standard deviation of that transfer within a node
    weight: Array


def by_kind(kept: Retained, calls: Nodes, found: Array, ahead: Array) -> Nodes:
    """`calls` (those that find their prefix at prefill first) by what decode holds of their session, with a probability
    `found` (n,): nothing, so all crosses; the session, so that the rest does, or nothing if decode prefills it."""
    nodes = kept.local.shape[-1]
    local = jnp.concatenate([kept.local, kept.local_share[:, None] + 0.0 * calls.weight[:, nodes:]], -1)
    held = found[:, None] * calls.weight
    late_s = (ahead * kept.caught_up_s)[:, None]
    latency_s = calls.latency_s + jnp.concatenate([0.0 * kept.local + late_s, 0.0 * calls.weight[:, nodes:]], -1)
    lost_s = kept.partial.waited_s[:, None] + 0.0 * calls.weight[:, nodes:]
    partial_s = jnp.concatenate([kept.partial_s, lost_s], -1)
    return Nodes(
        jnp.concatenate([latency_s, latency_s, kept.local_s], -1),
        jnp.concatenate([calls.transfer_s, partial_s, 0.0 * kept.local_s], -1),
        jnp.concatenate([calls.spread_s, 0.0 * partial_s, 0.0 * kept.local_s], -1),
        jnp.concatenate(
            [(1.0 - found)[:, None] * calls.weight, held * (1.0 - local), found[:, None] * kept.local_weight], -1
        ),
    )
