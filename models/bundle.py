r"""Attention engines and the feed-forward engines they share, as one machine: a bundle.

Where attention and feed-forward layers stand in one pool, a bundle is one engine that does both in turn. Where they
stand apart, R_A attention and R_F feed-forward engines form gcd(R_A, R_F) equal bundles. A step of a bundle cuts its
batch into m micro-batches that take turns on both sides (ping-pong): in each layer a micro-batch needs a seconds of
attention, c to get to the other side, f there and c' back. With all of them in flight a layer takes

    max(m a, m f, m max(c, c'), a + c + f + c')

by what is busiest: attention, feed-forward, a direction of the link, or the way round of a micro-batch that nothing
overlaps (StepMesh and MegaScale-Infer, arXiv:2507.19427 and 2504.02263, state the same for m >= 2 (1 + c / f)). The
feed-forward engines wait for the slowest of the attention engines, whose batches hold unlike numbers of cached tokens.
Of a, what shared experts take that stand with attention runs while the micro-batch is away: the way round is then
a - min(s, c + f + c') shorter than the sum.
"""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.special import ndtri

from breakeven.models.context_parallel import spread, with_ring
from breakeven.models.llm import LLM
from breakeven.models.numerics import TINY, once, smooth_max
from breakeven.models.placement import ports, shared_products, sides_with, traffic
from breakeven.models.placement_choices import Crossed
from breakeven.models.speculation import Speculations
from breakeven.models.steps import (
    Coefficients,
    StepTime,
    attention_coefficients,
    decode_time,
    ffn_coefficients,
    overlapped,
    prefill_chunks,
    prefill_marginal,
    prefill_per_cached,
    prefill_time,
    speculated_time,
)
from breakeven.models.tables import Catalog, Resolved, ResolvedStage

EUCLID_STEPS = 30  # enough for numbers below a million


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Apart:
    """What attention and feed-forward layers in two pools exchange, and wait for; shapes (n,)."""

    apart: Array  # 1.0 where they stand in two pools; 0.0: one engine does both
    workers: Array  # attention engines of a bundle
    ffn_engines: Array
    ffn_pipeline: Array  # pipeline groups of a feed-forward engine
    ffn_ranks: Array
    micro_batches: Array  # in flight
    straggle_tokens: Array  # cached tokens by which one sequence on each worker makes the slowest longer than the mean
    handoff_s: Array  # latency of all layers' hand-offs, one direction
    dispatch_token_s: Array  # activations of a token to the feed-forward side, all layers, over all ports of the bundle
    combine_token_s: Array  # and back
    worker_ports: Array  # share of those ports that one attention rank group has, at most 1
    shared_s: Array | None = None  # shared experts on an attention engine: reading them; None: nowhere
    shared_token_s: Array | None = None  # and their arithmetic per token of a rank

    def hidden_s(self, rank_tokens: Array, away_s: Array) -> Array:
        """Seconds that shared experts on attention engines run while a micro-batch of `rank_tokens` is away."""
        assert self.shared_s is not None and self.shared_token_s is not None
        return jnp.minimum(smooth_max(self.shared_s, self.shared_token_s * rank_tokens), away_s)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Bundle:
    """The machine that one phase (prefill or decode) runs on, and how many of it there are; shapes (n,)."""

    attention: Coefficients
    ffn: Coefficients
    count: Array  # bundles in the deployment
    pipeline_parallel: Array  # groups of one attention engine
    data_parallel: Array  # ranks of one attention engine
    split: Apart | None  # None: no candidate's attention stands apart from its feed-forward layers
    overlapped: Array | None = None  # parts of a step of one engine that hide each other's collectives
    speculation: Speculations | None = None  # of decode; None: every step yields one token

    @property
    def yielded(self) -> Array | float:
        """Tokens that a step yields a sequence; times are those of one token."""
        return 1.0 if self.speculation is None else self.speculation.yielded

    @property
    def engine(self) -> Coefficients:
        """Both sides on one engine."""
        return self.attention + self.ffn

    @property
    def workers(self) -> Array:
        """Attention engines of a bundle."""
        return jnp.ones_like(self.count) if self.split is None else self.split.workers

    @property
    def ffn_engines(self) -> Array:
        """Feed-forward engines of a bundle."""
        return jnp.ones_like(self.count) if self.split is None else self.split.ffn_engines

    @property
    def micro_batches(self) -> Array:
        """Parts of a batch that go through the layers one after another."""
        return self.pipeline_parallel if self.split is None else self.split.micro_batches

    @property
    def depth(self) -> Array:
        """Groups of a pipeline that chunks of a prefill follow one another through."""
        if self.split is None:
            return self.pipeline_parallel
        return jnp.where(self.split.apart > 0.5, 1.0, self.pipeline_parallel)

    @property
    def ways(self) -> Array:
        """Prefills that a bundle works on at once."""
        return self.depth * self.workers * self.data_parallel


class Critical(NamedTuple):
    """How often each part of a pass counts in the time of a step: what does not hide behind the busiest part."""

    attention: Array
    ffn: Array
    dispatch: Array
    combine: Array
    handoff: Array


def common_divisor(a: Array, b: Array) -> Array:
    """Greatest common divisor of whole numbers below a million, by Euclid; the number itself where both are equal."""

    def body(_: int, pair: tuple[Array, Array]) -> tuple[Array, Array]:
        high, low = pair
        rest = jnp.where(low > 0.5, high - jnp.floor(high / jnp.maximum(low, 1.0) + 1e-4) * low, 0.0)
        return jnp.where(low > 0.5, low, high), jnp.maximum(jnp.round(rest), 0.0)

    whole = lax.stop_gradient((jnp.round(a), jnp.round(b)))
    found, _ = lax.fori_loop(0, EUCLID_STEPS, body, whole)
    return jnp.where(a == b, a, found)


def slowest_of(count: Array) -> Array:
    """Expected largest of `count` standard normal variables (Blom 1958); 0 for one, within 0.03 of the exact value."""
    return ndtri((jnp.maximum(count, 1.0) - 0.375) / (jnp.maximum(count, 1.0) + 0.25))


def bundle(
    resolved: Resolved,
    catalog: Catalog,
    attention: ResolvedStage,
    ffn: ResolvedStage,
    count: Array,
    context_sd: Array,
    pace: Array | None = None,
    speculation: Speculations | None = None,
    crossed: Crossed | None = None,
) -> Bundle:
    """The bundle of an attention and a feed-forward stage of one phase, of which there are `count`.

    Sequences that decode on it differ in length by a standard deviation of `context_sd` tokens. `pace` is the measured
    time of both sides over the model's; `crossed` what crosses in this phase where projections stand with the
    feed-forward layers.
    """
    llm, engine, choice, place = catalog.llm, catalog.engine, attention.choice, resolved.placement
    split = _split(resolved, llm, attention, ffn, count, context_sd, crossed)
    queries = 1.0 if speculation is None else speculation.verified
    routed = 0.0 if split is None else split.apart if place is None else split.apart * place.routed
    sides = (
        attention_coefficients(attention, llm, engine, resolved.kv_bytes_per_element, queries),
        ffn_coefficients(ffn, llm, engine, routed, queries),
    )
    if split is not None and place is not None:
        sides = sides_with(sides, (attention, ffn), llm, engine, place, split.apart, queries)
        split = _with_shared(split, *shared_products(attention, llm, place), pace)
    if split is not None and speculation is not None:
        split = _per_token(split, speculation)
    sides = with_ring(spread(sides[0], attention), attention, llm, resolved.kv_bytes_per_element), spread(sides[1], ffn)
    if pace is not None:
        sides = jax.tree.map(lambda leaf: leaf * pace, sides)
    return Bundle(
        attention=sides[0],
        ffn=sides[1],
        count=count,
        pipeline_parallel=choice.pipeline_parallel,
        data_parallel=choice.data_parallel,
        split=split,
        overlapped=None if engine.overlapped_batches is None else engine.overlapped_batches * jnp.ones_like(count),
        speculation=speculation,
    )


def _with_shared(split: Apart, read_s: Array, token_s: Array, pace: Array | None) -> Apart:
    """With the seconds of shared experts on an attention engine, at the measured pace."""
    factor = split.apart if pace is None else split.apart * pace
    return dataclasses.replace(split, shared_s=read_s * factor, shared_token_s=token_s * factor)


def _per_token(split: Apart, way: Speculations) -> Apart:
    """What the sides exchange for one token of a step that verifies several and yields several."""
    share = way.verified / way.yielded
    return dataclasses.replace(
        split,
        handoff_s=split.handoff_s / way.yielded,
        dispatch_token_s=split.dispatch_token_s * share,
        combine_token_s=split.combine_token_s * share,
        shared_s=None if split.shared_s is None else split.shared_s / way.yielded,
        shared_token_s=None if split.shared_token_s is None else split.shared_token_s * share,
    )


def _step_time(machine: Bundle, side: Coefficients, llm: LLM, *sizes: Array) -> StepTime:
    """`decode_time` of one side or both, a token's share of it where steps yield several."""
    if machine.speculation is None:
        return decode_time(side, llm, *sizes)
    return speculated_time(side, llm, machine.speculation, *sizes)


def _split(
    resolved: Resolved,
    llm: LLM,
    attention: ResolvedStage,
    ffn: ResolvedStage,
    count: Array,
    context_sd: Array,
    crossed: Crossed | None,
) -> Apart | None:
    if resolved.activations is None:
        return None
    a, f = attention.choice, ffn.choice
    apart = jnp.where(a.pool == f.pool, 0.0, 1.0)
    workers = jnp.where(apart > 0.5, a.replicas / count, 1.0)
    ffn_engines = jnp.where(apart > 0.5, f.replicas / count, 1.0)
    depth = jnp.maximum(a.pipeline_parallel, f.pipeline_parallel)
    sent = traffic(llm, f.expert_parallel, resolved.placement, crossed)
    rate, worker_ports = ports(resolved.activations, attention, ffn, workers, ffn_engines)
    return Apart(
        apart=apart,
        workers=workers,
        ffn_engines=ffn_engines,
        ffn_pipeline=f.pipeline_parallel,
        ffn_ranks=f.data_parallel,
        micro_batches=jnp.where(
            apart > 0.5, jnp.maximum(resolved.activations.micro_batches, depth), a.pipeline_parallel
        ),
        straggle_tokens=apart * slowest_of(workers) * context_sd,
        handoff_s=apart * sent.handoffs * resolved.activations.latency_s,
        dispatch_token_s=apart * (sent.there_bytes / rate),
        combine_token_s=apart * (sent.back_bytes / rate),
        worker_ports=worker_ports,
    )


class _Parts(NamedTuple):
    """Seconds of a step in which each part of it would be busy alone."""

    attention: Array
    ffn: Array
    dispatch: Array
    combine: Array
    round: Array  # a micro-batch on its way round, nothing overlapping but shared experts that stand with attention
    seen: Array | float  # share of attention's seconds on that way that nothing hides


def _parts(
    machine: Bundle,
    split: Apart,
    attention_s: Array,
    ffn_s: Array,
    way: tuple[Array, Array],
    rank_tokens: Array,
) -> _Parts:
    """From the seconds of one micro-batch on each part, `rank_tokens` of it on a rank of an attention engine."""
    m, seen = split.micro_batches, 1.0
    around = attention_s + ffn_s + way[0] + way[1] + 2.0 * split.handoff_s
    if split.shared_s is not None:
        hidden_s = split.hidden_s(rank_tokens, around - attention_s)
        around, seen = around - hidden_s, 1.0 - hidden_s / jnp.maximum(attention_s, TINY)
    by_attention, by_ffn = m / machine.pipeline_parallel, m / split.ffn_pipeline
    return _Parts(attention_s * by_attention, ffn_s * by_ffn, way[0] * m, way[1] * m, around, seen)


def _makespan(split: Apart, parts: _Parts, together_s: Array) -> Array:
    """Seconds of a step: the busiest part of it, or both sides one after the other in one pool."""
    links = jnp.maximum(parts.dispatch, parts.combine)
    busiest = jnp.maximum(jnp.maximum(parts.attention, parts.ffn), jnp.maximum(links, parts.round))
    return jnp.where(split.apart > 0.5, busiest, together_s)


def _critical(machine: Bundle, split: Apart, parts: _Parts) -> Critical:
    """What a step's time is made of."""
    m, apart = split.micro_batches, split.apart > 0.5
    step_s = jnp.maximum(_makespan(split, parts, 0.0 * m), 0.0)
    chain = jnp.where(parts.round >= step_s, 1.0, 0.0)
    left, weights = 1.0 - chain, []
    numbers, chained = (m / machine.pipeline_parallel, m / split.ffn_pipeline, m, m), (parts.seen, 1.0, 1.0, 1.0)
    for part, number, seen in zip(parts[:4], numbers, chained, strict=True):
        binds = left * jnp.where(part >= step_s, 1.0, 0.0)
        left = left - binds
        weights.append(chain * seen + binds * number)
    together = (1.0, 1.0, 0.0, 0.0, 0.0)
    return Critical(*(jnp.where(apart, x, y) for x, y in zip((*weights, 2.0 * chain), together, strict=True)))


def _counted(
    weight: Critical, split: Apart, sides: tuple[StepTime, StepTime], way: tuple[Array, Array]
) -> tuple[StepTime, StepTime]:
    """Each side of a step as often as it counts, the way between them with the feed-forward side."""
    moved_s = weight.dispatch * way[0] + weight.combine * way[1] + weight.handoff * split.handoff_s
    return sides[0].scaled(weight.attention), sides[1].scaled(weight.ffn)._replace(transfer_s=moved_s)


class _Decode(NamedTuple):
    """A decode step of a bundle: one micro-batch on an attention engine and on a feed-forward engine, and its ways."""

    attention: StepTime
    ffn: StepTime
    way: tuple[Array, Array]
    parts: _Parts

    @property
    def together_s(self) -> Array:
        return self.attention.total_s + self.ffn.total_s


def _decode_apart(machine: Bundle, split: Apart, llm: LLM, batch: Array, context: Array) -> _Decode:
    tokens = batch / split.micro_batches
    sequences, fed = tokens / split.workers, tokens / split.ffn_engines
    ranked = sequences / machine.data_parallel
    longest = context + split.straggle_tokens * lax.rsqrt(ranked + 0.1)  # sums of n vary like sqrt(n); finite at 0
    attention = _step_time(machine, machine.attention, llm, sequences, ranked, longest)
    ffn = _step_time(machine, machine.ffn, llm, fed, fed / split.ffn_ranks, context)
    way = tokens * split.dispatch_token_s, tokens * split.combine_token_s
    return _Decode(attention, ffn, way, _parts(machine, split, attention.total_s, ffn.total_s, way, ranked))


def decode_step(machine: Bundle, llm: LLM, batch: Array, context: Array) -> StepTime:
    """One decode step of a bundle that holds `batch` sequences of `context` tokens each, by cause.

    A pipeline of p groups keeps p micro-batches in flight, so a token takes one pass of batch / p sequences through
    all layers; data-parallel ranks split them further, except before the experts.
    """
    split = machine.split
    if split is None:
        tokens = batch / machine.pipeline_parallel
        whole = _step_time(machine, machine.engine, llm, tokens, tokens / machine.data_parallel, context)
        if machine.overlapped is None:
            return whole
        part = tokens / machine.overlapped
        parts = _step_time(machine, machine.engine, llm, part, part / machine.data_parallel, context)
        return overlapped(whole, parts.scaled(machine.overlapped))
    attention, ffn = decode_sides(machine, llm, batch, context)
    return attention.plus(ffn)


def decode_sides(machine: Bundle, llm: LLM, batch: Array, context: Array) -> tuple[StepTime, StepTime]:
    """(attention, feed-forward layers with the activations' way to them) of `decode_step`, as far as each counts."""
    split = machine.split
    if split is None:
        sides = decode_work(machine, llm, batch, context)
        return sides if machine.overlapped is None else _summing_to(sides, decode_step(machine, llm, batch, context))
    found = _decode_apart(machine, split, llm, batch, context)
    weight = _critical(machine, split, found.parts)
    return _counted(weight, split, (found.attention, found.ffn), found.way)


def decode_work(machine: Bundle, llm: LLM, batch: Array, context: Array) -> tuple[StepTime, StepTime]:
    """What an attention and a feed-forward engine do in `decode_step` (for one micro-batch, where they stand apart),
    hidden behind the other or not."""
    if machine.split is None:
        tokens = batch / machine.pipeline_parallel
        given = llm, tokens, tokens / machine.data_parallel, context
        return _step_time(machine, machine.attention, *given), _step_time(machine, machine.ffn, *given)
    found = _decode_apart(machine, machine.split, llm, batch, context)
    return found.attention, found.ffn


def _summing_to(sides: tuple[StepTime, StepTime], step: StepTime) -> tuple[StepTime, StepTime]:
    """Both sides, part by part in the same proportion, as the shares of a step that they do not simply add up to."""
    factors = [whole / jnp.maximum(a + b, 1e-12) for a, b, whole in zip(*sides, step, strict=True)]
    first, second = (StepTime(*(part * f for part, f in zip(side, factors, strict=True))) for side in sides)
    return first, second


def decode_step_s(machine: Bundle, llm: LLM, batch: Array, context: Array) -> tuple[Array, Array]:
    """(seconds of that step, how often the seconds that attention takes for one micro-batch count in it)."""
    split = machine.split
    if split is None:
        return decode_step(machine, llm, batch, context).total_s, jnp.ones_like(batch)
    found = _decode_apart(machine, split, llm, batch, context)
    step_s = _makespan(split, found.parts, found.together_s)
    number = split.micro_batches / machine.pipeline_parallel
    counted = jnp.where(found.parts.attention >= step_s, number, jnp.where(found.parts.round >= step_s, 1.0, 0.0))
    return step_s, jnp.where(split.apart > 0.5, counted, 1.0)


class PrefillTime(NamedTuple):
    """Prefill of calls by a bundle, (n, nodes) unless said."""

    alone: StepTime  # while nothing else is prefilled; through one group of a pipeline
    sides: tuple[StepTime, StepTime]  # of it attention, and feed-forward layers with the activations' way to them
    work: tuple[StepTime, StepTime]  # what an engine of either side does, hidden behind the other or not
    busy_s: Array  # while all the bundle's `ways` prefill: what it can sustain
    attention_s: Array  # that its attention engine works on it (with the other side, where one engine does both)
    ffn_s: Array  # that all feed-forward engines of the bundle work on it
    token_s: Array  # what one more token adds to `busy_s` of the largest call, (n,)
    pair_s: Array  # the same for a query-key pair
    cached_s: Array  # what one more cached token before the call adds to `alone`


def prefill_call(
    machine: Bundle, llm: LLM, tokens: Array, pairs: Array, context: Array, token_budget: Array
) -> PrefillTime:
    """Prefill of calls of `tokens` uncached tokens with `pairs` query-key pairs in a prompt of `context` tokens, by
    rising size.

    Chunks of at most `token_budget` tokens (n,) follow one another. Where the sides stand apart each is cut into
    micro-batches, which read weights and cache again, and the calls of all ways share the feed-forward engines.
    """
    wide: Bundle = jax.tree.map(lambda leaf: once(leaf, machine.count)[:, None], machine)
    chunks, split = prefill_chunks(tokens, token_budget[:, None]), wide.split
    if split is not None:
        return _prefill_apart(machine, wide, split, llm, tokens, pairs, context, chunks)
    # Data-parallel ranks that all prefill share the experts: each of their tokens is arithmetic for all of them.
    alone, busy = (
        _prefill_joint(wide, llm, n * tokens, tokens, pairs, context, chunks) for n in (1.0, wide.data_parallel)
    )
    given = llm, tokens, tokens, pairs, context, chunks
    work = sides = prefill_time(wide.attention, *given), prefill_time(wide.ffn, *given)
    marginal = prefill_marginal(machine.engine, llm, machine.data_parallel, jnp.ones_like(machine.count))
    if machine.overlapped is not None:
        exchange_s = machine.engine.collective_token_s
        computed_s = jnp.maximum(marginal[0] - exchange_s, exchange_s)
        sides = _summing_to(sides, alone)
        marginal = jnp.minimum(marginal[0], computed_s), marginal[1]
    busy_s = busy.total_s
    cached_s = prefill_per_cached(wide.attention, llm, tokens, pairs, chunks)
    return PrefillTime(alone, sides, work, busy_s, busy_s, busy_s, *marginal, cached_s)


def _prefill_joint(
    machine: Bundle, llm: LLM, tokens: Array, rank_tokens: Array, pairs: Array, context: Array, chunks: Array
) -> StepTime:
    """`prefill_time` of both sides on one engine."""
    given = llm, tokens, rank_tokens, pairs, context
    whole = prefill_time(machine.engine, *given, chunks)
    if machine.overlapped is None:
        return whole
    return overlapped(whole, prefill_time(machine.engine, *given, chunks * machine.overlapped))


def _prefill_apart(
    machine: Bundle,
    wide: Bundle,
    split: Apart,
    llm: LLM,
    tokens: Array,
    pairs: Array,
    context: Array,
    chunks: Array,
) -> PrefillTime:
    apart = split.apart > 0.5
    passes, fed = chunks * jnp.where(apart, split.micro_batches, 1.0), tokens / split.ffn_engines
    attention = prefill_time(wide.attention, llm, tokens, tokens, pairs, context, passes)
    ranked = jnp.where(apart, fed / split.ffn_ranks, fed)
    ffn = prefill_time(wide.ffn, llm, fed, ranked, pairs, context, passes)
    shared = tokens * split.dispatch_token_s, tokens * split.combine_token_s
    way = shared[0] / split.worker_ports, shared[1] / split.worker_ports
    one = attention.total_s / passes, ffn.total_s / passes, (way[0] / passes, way[1] / passes), tokens / passes
    parts = _parts(wide, split, *one)
    weight = _critical(wide, split, parts)
    after_another = jnp.where(apart, 1.0 / split.micro_batches, 1.0)  # share of all passes
    weight = Critical(*(x * after_another for x in weight[:4]), handoff=weight.handoff * chunks)
    sides = _counted(weight, split, (attention, ffn), way)
    alone = sides[0].plus(sides[1])
    ffn_s = ffn.total_s / split.ffn_pipeline
    contended_s = wide.ways * jnp.maximum(ffn_s, jnp.maximum(*shared))
    busy_s = jnp.where(apart, jnp.maximum(alone.total_s, contended_s), alone.total_s)
    last = jax.tree.map(
        lambda x: x[:, -1], (weight, ffn_s >= jnp.maximum(*shared), apart & (contended_s > alone.total_s))
    )
    assert machine.split is not None
    marginal = _marginal(machine, machine.split, llm, *last)
    cached_s = weight.attention * prefill_per_cached(wide.attention, llm, tokens, pairs, passes)
    attention_s = attention.total_s / wide.pipeline_parallel
    return PrefillTime(alone, sides, (attention, ffn), busy_s, attention_s, ffn_s, *marginal, cached_s)


def _marginal(
    machine: Bundle, split: Apart, llm: LLM, weight: Critical, by_ffn: Array, contended: Array
) -> tuple[Array, Array]:
    """(seconds per token, seconds per pair) of a prefill so large that weight traffic vanishes beside arithmetic."""
    one = jnp.ones_like(machine.count)
    token_s, pair_s = prefill_marginal(machine.attention, llm, one, one)
    fed = 1.0 / split.ffn_engines
    ffn_token_s, _ = prefill_marginal(machine.ffn, llm, fed, jnp.where(split.apart > 0.5, fed / split.ffn_ranks, fed))
    moved_s = weight.dispatch * split.dispatch_token_s + weight.combine * split.combine_token_s
    alone = weight.attention * token_s + weight.ffn * ffn_token_s + moved_s / split.worker_ports
    link_s = jnp.maximum(split.dispatch_token_s, split.combine_token_s)
    rest = machine.ways * jnp.where(by_ffn, ffn_token_s / split.ffn_pipeline, link_s)
    return jnp.where(contended, rest, alone), jnp.where(contended, 0.0, weight.attention * pair_s)
