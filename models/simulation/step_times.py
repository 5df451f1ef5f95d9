"""The step times of `breakeven.models.steps` for a real batch: its own cached tokens, chunks and micro-batches.

The same coefficients and the same formula, in 64 bit and compiled; a test holds the two together.
"""

from math import expm1, sqrt

from breakeven.models.simulation.compiled import compiled
from breakeven.models.simulation.state import EncodePlan, Speed, SplitPlan


@compiled
def _smooth_max(a: float, b: float) -> float:
    """(a^4 + b^4)^(1/4), as `breakeven.models.numerics.smooth_max`."""
    high, low = max(a, b), min(a, b)
    if high <= 0.0:
        return 0.0
    ratio = (low / high) ** 2
    return high * sqrt(sqrt(1.0 + ratio * ratio))


@compiled
def _products_s(speed: Speed, rank_tokens: float, tokens: float) -> float:
    """Launches, matrix products, experts and activations of a step; `rank_tokens` of them on the busiest rank."""
    hit = -expm1(tokens * speed.log_expert_miss)
    return (
        speed.step
        + _smooth_max(speed.attention_weight, speed.attention_token * rank_tokens)
        + _smooth_max(speed.ffn_weight, speed.ffn_token * rank_tokens)
        + _smooth_max(speed.expert * hit, speed.expert_token * tokens)
        + speed.permute_token * tokens
        + speed.activation_token * rank_tokens
    )


@compiled
def _collectives_s(speed: Speed, rank_tokens: float) -> float:
    """All-reduce and all-to-all of a step."""
    return speed.collective + speed.collective_token * rank_tokens + speed.collective_root * sqrt(rank_tokens)


@compiled
def _decode_parts_s(speed: Speed, batch: float, beside: float) -> tuple[float, float]:
    """(computed, in collectives) of a decode step of `batch` sequences that takes `beside` for attention and
    sequences; a token's share of both where steps yield several."""
    computed = _products_s(speed, batch / speed.ranks, batch) + beside
    exchanged = _collectives_s(speed, batch / speed.ranks)
    if speed.drafts <= 0.0:
        return computed, exchanged
    fed, further = batch * (1.0 + speed.drafts), speed.layers_share - speed.weights_share
    drafted = speed.weights_share * computed + further * speed.step
    drafted_exchange = speed.weights_share * exchanged + further * speed.collective
    verified = _products_s(speed, fed / speed.ranks, fed) + beside
    verified_exchange = _collectives_s(speed, fed / speed.ranks)
    return (
        (verified + speed.drafts * drafted) / speed.yielded,
        (verified_exchange + speed.drafts * drafted_exchange) / speed.yielded,
    )


@compiled
def decode_s(speed: Speed, batch: float, context: float, selected: float) -> float:
    """One decode step of `batch` sequences that hold `context` tokens together, of which they attend to `selected`; a
    token's share of it where steps yield several.

    In a pipeline it is one micro-batch that passes through all stages. Parts of a step hide their collectives behind
    one another where that is faster (`breakeven.models.steps.overlapped`).
    """
    attention = (speed.context * context + speed.selected_context * selected) / speed.ranks
    beside = speed.sequence * batch + attention
    computed, exchanged = _decode_parts_s(speed, batch, beside)
    whole = computed + exchanged
    if speed.parts <= 1.0:
        return whole
    computed, exchanged = _decode_parts_s(speed, batch / speed.parts, beside / speed.parts)
    return min(whole, speed.parts * max(computed, exchanged))


@compiled
def mixed_s(
    speed: Speed,
    batch: float,
    context: float,
    selected: float,
    tokens: float,
    pairs: float,
    selected_pairs: float,
    read: float,
    done: float,
    share: float,
) -> float:
    """A step that prefills `tokens` (with their query-key pairs, after `read` cached tokens) beside a decode batch.

    `done` prompts are completed by it; `share` of the prefill falls on the busiest data-parallel rank.
    """
    scores = share * (speed.pair * pairs + speed.selected_pair * selected_pairs + speed.query * tokens)
    cached, ring = share * speed.prefill_context * read, share * speed.ring * read
    decode = (speed.context * context + speed.selected_context * selected) / speed.ranks
    beside = speed.sequence * (batch + speed.ranks * share * done) + decode
    rank_tokens, every = batch / speed.ranks + share * tokens, batch + tokens
    whole = _products_s(speed, rank_tokens, every) + max(scores + cached, ring) + beside
    whole += _collectives_s(speed, rank_tokens)
    if speed.parts <= 1.0:
        return whole
    m = speed.parts  # each of them reads the weights and the cache before the chunk
    attention = scores + m * cached
    exchanged = m * _collectives_s(speed, rank_tokens / m) + max(m * ring - attention, 0.0)
    return min(whole, max(m * _products_s(speed, rank_tokens / m, every / m) + attention + beside, exchanged))


@compiled
def _makespan_s(
    split: SplitPlan, attention_s: float, ffn_s: float, tokens: float, ports: float, rank_tokens: float
) -> float:
    """A step of all micro-batches, from the seconds of one of `tokens` on each side, of which a rank of an attention
    engine has `rank_tokens`."""
    there, back = tokens * split.dispatch_token / ports, tokens * split.combine_token / ports
    away_s = ffn_s + there + back + 2.0 * split.handoff_s
    around_s = attention_s + away_s - min(_smooth_max(split.shared, split.shared_token * rank_tokens), away_s)
    sides_s = max(attention_s / split.pipeline, ffn_s / split.ffn_pipeline)
    return max(split.micro_batches * max(sides_s, there, back), around_s)


@compiled
def apart_decode_s(split: SplitPlan, batch: float, context: float, selected: float) -> float:
    """One decode step of a bundle whose sides stand apart, `decode_s` of one whose sides do not."""
    tokens = batch / split.micro_batches
    sequences, fed = tokens / split.workers, tokens / split.ffn_engines
    longer = split.straggle_tokens / sqrt(sequences / split.attention.ranks + 0.1)
    longest, most = context / batch + longer, min(selected / batch + longer, split.attention.sparse_topk)
    attention_s = decode_s(split.attention, sequences, sequences * longest, sequences * most)
    ranked = sequences / split.attention.ranks
    return _makespan_s(split, attention_s, decode_s(split.ffn, fed, 0.0, 0.0), tokens, 1.0, ranked)


@compiled
def apart_prefill_s(
    split: SplitPlan, tokens: float, pairs: float, selected_pairs: float, read: float, done: float
) -> tuple[float, float]:
    """(seconds of a prefill step of such a bundle, the same while all its attention engines prefill)."""
    m = split.micro_batches
    fed, ended = tokens / split.ffn_engines / m, done / m
    attention_s = mixed_s(split.attention, 0.0, 0.0, 0.0, tokens / m, pairs / m, selected_pairs / m, read, ended, 1.0)
    ffn_s = mixed_s(split.ffn, 0.0, 0.0, 0.0, fed, 0.0, 0.0, 0.0, ended, 1.0 / split.ffn.ranks)
    alone_s = _makespan_s(split, attention_s, ffn_s, tokens / m, split.worker_ports, tokens / m)
    shared_s = max(m * ffn_s / split.ffn_pipeline, tokens * max(split.dispatch_token, split.combine_token))
    return alone_s, max(alone_s, split.ways * shared_s)


@compiled
def encode_s(encode: EncodePlan, images: float) -> float:
    """Seconds that encoding `images` takes, as far as their features are not held."""
    if images <= 0.0 or encode.patches <= 0.0:
        return 0.0
    count = images * (1.0 - encode.reuse)
    passes = max(count / encode.per_pass, 1.0 - encode.reuse**images)
    if passes <= 0.0:
        return 0.0
    patches = count * encode.patches / passes
    pairs = patches * encode.patches
    return passes * mixed_s(encode.speed, 0.0, 0.0, 0.0, patches, pairs, 0.0, 0.0, 0.0, 1.0)
