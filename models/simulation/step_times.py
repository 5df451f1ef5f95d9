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
    """Launches, matrix products, experts and collectives of a step; `rank_tokens` of them on the busiest rank."""
    hit = -expm1(tokens * speed.log_expert_miss)
    return (
        speed.step
        + _smooth_max(speed.attention_weight, speed.attention_token * rank_tokens)
        + _smooth_max(speed.ffn_weight, speed.ffn_token * rank_tokens)
        + _smooth_max(speed.expert * hit, speed.expert_token * tokens)
        + speed.permute_token * tokens
        + speed.collective_token * rank_tokens
        + speed.collective_root * sqrt(rank_tokens)
    )


@compiled
def decode_s(speed: Speed, batch: float, context: float, selected: float) -> float:
    """One decode step of `batch` sequences that hold `context` tokens together, of which they attend to `selected`; a
    token's share of it where steps yield several.

    In a pipeline it is one micro-batch that passes through all stages.
    """
    attention = (speed.context * context + speed.selected_context * selected) / speed.ranks
    beside = speed.sequence * batch + attention
    plain = _products_s(speed, batch / speed.ranks, batch) + beside
    if speed.drafts <= 0.0:
        return plain
    fed = batch * (1.0 + speed.drafts)
    draft = speed.weights_share * plain + (speed.layers_share - speed.weights_share) * speed.step
    return (_products_s(speed, fed / speed.ranks, fed) + beside + speed.drafts * draft) / speed.yielded


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
    prefill = share * (speed.pair * pairs + speed.selected_pair * selected_pairs + speed.prefill_context * read)
    prefill += share * speed.query * tokens
    attention = (speed.context * context + speed.selected_context * selected) / speed.ranks
    attention += max(prefill, share * speed.ring * read)
    products = _products_s(speed, batch / speed.ranks + share * tokens, batch + tokens)
    return products + speed.sequence * (batch + speed.ranks * share * done) + attention


@compiled
def _makespan_s(split: SplitPlan, attention_s: float, ffn_s: float, tokens: float, ports: float) -> float:
    """A step of all micro-batches, from the seconds of one of `tokens` on each side."""
    there, back = tokens * split.dispatch_token / ports, tokens * split.combine_token / ports
    around_s = attention_s + ffn_s + there + back + 2.0 * split.handoff_s
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
    return _makespan_s(split, attention_s, decode_s(split.ffn, fed, 0.0, 0.0), tokens, 1.0)


@compiled
def apart_prefill_s(
    split: SplitPlan, tokens: float, pairs: float, selected_pairs: float, read: float, done: float
) -> tuple[float, float]:
    """(seconds of a prefill step of such a bundle, the same while all its attention engines prefill)."""
    m = split.micro_batches
    fed, ended = tokens / split.ffn_engines / m, done / m
    attention_s = mixed_s(split.attention, 0.0, 0.0, 0.0, tokens / m, pairs / m, selected_pairs / m, read, ended, 1.0)
    ffn_s = mixed_s(split.ffn, 0.0, 0.0, 0.0, fed, 0.0, 0.0, 0.0, ended, 1.0 / split.ffn.ranks)
    alone_s = _makespan_s(split, attention_s, ffn_s, tokens / m, split.worker_ports)
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
