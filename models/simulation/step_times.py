"""The step times of `breakeven.models.steps` for a real batch: its own cached tokens, chunks and micro-batches.

The same coefficients and the same formula, in 64 bit and compiled; a test holds the two together.
"""

from math import expm1, sqrt

from breakeven.models.simulation.compiled import compiled
from breakeven.models.simulation.state import Speed


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
    """One decode step of `batch` sequences that hold `context` tokens together, of which they attend to `selected`.

    In a pipeline it is one micro-batch that passes through all stages.
    """
    attention = (speed.context * context + speed.selected_context * selected) / speed.ranks
    return _products_s(speed, batch / speed.ranks, batch) + speed.sequence * batch + attention


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
    done: int,
    share: float,
) -> float:
    """A step that prefills `tokens` (with their query-key pairs, after `read` cached tokens) beside a decode batch.

    `done` prompts are completed by it; `share` of the prefill falls on the busiest data-parallel rank.
    """
    attention = (speed.context * context + speed.selected_context * selected) / speed.ranks
    attention += share * (speed.pair * pairs + speed.selected_pair * selected_pairs + speed.prefill_context * read)
    attention += share * speed.query * tokens
    products = _products_s(speed, batch / speed.ranks + share * tokens, batch + tokens)
    return products + speed.sequence * (batch + speed.ranks * share * done) + attention
