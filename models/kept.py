"""A KV cache that keeps a part of each sequence: heavy hitters, or the first tokens and a window of the last.

Heavy hitters (H2O, arXiv:2306.14048; SnapKV, arXiv:2404.14469) keep a fraction of the tokens that a prompt or an answer
left behind: memory, transfers and what a decoding token reads are that fraction of the whole. The time of prefill is
counted as without, an upper bound where a turn meets a cache that was thinned before. Attention sinks (StreamingLLM,
arXiv:2309.17453) make every layer one of a window: its tokens and the sinks are kept and attended to, in prefill, too.
What either does to answers is not predicted.
"""

import dataclasses

from breakeven.models.architecture import Architecture
from breakeven.models.inputs import InputError
from breakeven.models.llm import LLM

FIELD = "kv_kept"


def heavy_hitters(llm: LLM, architecture: Architecture, fraction: float) -> LLM:
    """The numbers of a model whose cache keeps a `fraction` of the tokens in its full layers. InputError with sparse
    attention, which selects tokens itself."""
    if architecture.sparse_topk:
        raise InputError(FIELD, fraction, f"nothing for {architecture.name}, whose attention selects tokens itself")
    return dataclasses.replace(
        llm,
        kv_elements_per_token=llm.kv_elements_per_token * fraction,
        decode_flops_per_pair=llm.decode_flops_per_pair * fraction,
    )


def sinks_and_window(llm: LLM, architecture: Architecture, tokens: float) -> LLM:
    """The numbers of a model whose full layers attend to `tokens`, sinks and window together. InputError where layers
    already have a window, a latent or a selection of their own."""
    if architecture.window_layers or architecture.latent or not architecture.full_layers:
        raise InputError(FIELD, tokens, f"a fraction: {architecture.name} has no plain attention in every layer")
    return dataclasses.replace(
        llm,
        full_layers=0.0 * llm.full_layers,
        window_layers=llm.full_layers,
        kv_elements_per_token=0.0 * llm.kv_elements_per_token,
        window_kv_elements_per_token=llm.kv_elements_per_token,
        window_tokens=llm.window_tokens + tokens,
        prefill_flops_per_pair=0.0 * llm.prefill_flops_per_pair,
        decode_flops_per_pair=0.0 * llm.decode_flops_per_pair,
        window_flops_per_pair=llm.prefill_flops_per_pair,
    )
