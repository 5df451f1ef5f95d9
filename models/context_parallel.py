r"""Context parallelism of a prefill pool: c ranks share each chunk's tokens and the KV cache, all hold the weights.

Each rank computes the products, and the attention, of a c-th of the tokens. In every layer the keys and values go round
the ranks in a ring (Liu et al., arXiv:2310.01889): a rank receives the others' (c - 1)/c of the cache so far while it
attends to what it has, so the ring costs

    max(0, passes x context x bytes per token x (c - 1)/c / link - attention),

and c - 1 hops of latency a layer. Causal chunks are dealt so that all ranks have as many pairs (striped attention,
arXiv:2311.09431).
"""

import dataclasses

import jax.numpy as jnp
from jax import Array

from breakeven.models.llm import LLM
from breakeven.models.operators import collective_latency_s
from breakeven.models.steps import Coefficients, collective_bytes_per_s, kv_shards
from breakeven.models.tables import ResolvedStage

SPREAD = (
    "collective_token_s",
    "activation_token_s",
    "projection_token_s",
    "pair_s",
    "selected_pair_s",
    "query_s",
    "token_s",
    "expert_token_s",
    "permute_token_s",
)  # seconds of a token or a pair, of which each rank has its share


def ranks(stage: ResolvedStage) -> Array | float:
    """Context-parallel ranks of an engine of the stage."""
    return 1.0 if stage.choice.context_parallel is None else stage.choice.context_parallel


def spread(side: Coefficients, stage: ResolvedStage) -> Coefficients:
    """A side's coefficients when its tokens are spread over the stage's ranks; as they are where no pool has any."""
    c = stage.choice.context_parallel
    if c is None:
        return side
    values = {name: getattr(side, name) for name in SPREAD}
    shared = {name: value / c for name, value in values.items() if value is not None}
    return dataclasses.replace(side, **shared, collective_root_s=side.collective_root_s / jnp.sqrt(c))


def with_ring(side: Coefficients, stage: ResolvedStage, llm: LLM, kv_bytes: Array) -> Coefficients:
    """An attention side with the exchange of keys and values between its ranks."""
    c = stage.choice.context_parallel
    if c is None:
        return side
    choice = stage.choice
    others = (c - 1.0) / c
    per_token = (llm.kv_elements_per_token + llm.index_elements_per_token) * kv_bytes / kv_shards(stage, llm)
    link = collective_bytes_per_s(stage.hardware, choice.tensor_parallel * choice.data_parallel * c)
    hop_s = collective_latency_s(stage.hardware.kernels["allreduce"], jnp.full_like(c, 2.0))
    return dataclasses.replace(
        side,
        ring_context_s=others * per_token / (link * choice.pipeline_parallel),
        collective_s=side.collective_s + (c - 1.0) * llm.layers * hop_s,
    )
