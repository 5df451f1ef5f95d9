"""How the layers of an LLM mix tokens: parameters, cache, state and FLOPs of each flavour, per layer.

Softmax attention (`Attention`: MHA, GQA, MQA and the factorised-query form), latent attention with or
without a sparse indexer (`LatentAttention`), and recurrences (`GatedDeltaNet`, `Mamba2`,
`LightningAttention`). Sizes are counts, never bytes; a multiply-add is two FLOPs.

[Ainslie2023] GQA, arXiv:2305.13245. [DeepSeek-V2 2024] arXiv:2405.04434.
[DeepSeek-V3.2 2025] arXiv:2512.02556. [Yang2024] Gated Delta Networks, arXiv:2412.06464.
[Dao2024] Transformers are SSMs, arXiv:2405.21060. [MiniMax-01 2025] arXiv:2501.08313.
Multi-matrix factorisation attention: Step-3, arXiv:2507.19427.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mixer:
    """Layers that mix tokens in the same way; counts are per layer. A flavour overrides what it has."""

    layers: int
    hidden: int
    heads: int

    @property
    def kind(self) -> str:
        """`full` reads every earlier token, `window` the latest few, `linear` only a state of fixed size."""
        return "full"

    @property
    def parameters(self) -> int:
        """Projections, and the norms and biases inside the mixer."""
        raise NotImplementedError

    @property
    def kv_elements(self) -> int:
        """Cached elements per token."""
        return 0

    @property
    def index_elements(self) -> int:
        """Cached elements per token of the sparse-attention indexer's keys."""
        return 0

    @property
    def state_elements(self) -> int:
        """Elements kept per sequence, whatever its length."""
        return 0

    @property
    def window_tokens(self) -> int:
        """Tokens that a window layer looks back."""
        return 0

    @property
    def kv_shards(self) -> int:
        """Ways to split the cache over tensor-parallel ranks before it is copied."""
        return 1

    @property
    def prefill_flops_per_pair(self) -> int:
        """FLOPs per (query token, key token), scores and weighted sum: 2 x heads x (qk + v)."""
        return 0

    @property
    def decode_flops_per_pair(self) -> int:
        """The same in the form that decoding runs."""
        return self.prefill_flops_per_pair

    @property
    def index_flops_per_pair(self) -> int:
        """FLOPs per (query token, key token) of the indexer's scores."""
        return 0

    @property
    def linear_flops_per_token(self) -> int:
        """FLOPs per token of the recurrent update and read-out."""
        return 0

    @property
    def projected_elements(self) -> int:
        """Elements of one token that the input projections hand on: queries, keys and values."""
        return 0

    @property
    def attended_elements(self) -> int:
        """Elements of one token that the output projection takes."""
        return 0

    @property
    def decode_projected_elements(self) -> int:
        """`projected_elements` in the form that decoding runs."""
        return self.projected_elements

    @property
    def decode_attended_elements(self) -> int:
        """`attended_elements` in the form that decoding runs."""
        return self.attended_elements


@dataclass(frozen=True)
class Attention(Mixer):
    """Softmax attention with H query heads over K key/value heads (MHA: K = H, MQA: K = 1, else GQA).

    Per layer ``h H qk (1 + gate) + h K (qk + v) + H v h`` parameters and ``K (qk + v)`` cached elements per
    token [Ainslie2023]; Llama-3.1-70B: 8 x (128 + 128) x 80 layers = 163,840. With `q_lora_rank` r the query
    projection is factorised, ``h r + r H qk`` (multi-matrix factorisation attention of Step-3).
    """

    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int = 0
    q_lora_rank: int = 0
    output_gate: bool = False
    keys_are_values: bool = False
    vectors: int = 0

    @property
    def kind(self) -> str:
        return "window" if self.window else "full"

    @property
    def window_tokens(self) -> int:
        return self.window

    @property
    def kv_shards(self) -> int:
        return self.kv_heads

    @property
    def parameters(self) -> int:
        query = self.heads * self.head_dim * (2 if self.output_gate else 1)
        keys, values = self.kv_heads * self.head_dim, self.kv_heads * self.v_head_dim
        key_value = keys if self.keys_are_values else keys + values
        rank = self.q_lora_rank
        query_weights = self.hidden * rank + rank + rank * query if rank else self.hidden * query
        output_weights = self.heads * self.v_head_dim * self.hidden
        return query_weights + self.hidden * key_value + output_weights + self.vectors

    @property
    def kv_elements(self) -> int:
        return self.kv_heads * (self.head_dim + self.v_head_dim)

    @property
    def prefill_flops_per_pair(self) -> int:
        return 2 * self.heads * (self.head_dim + self.v_head_dim)

    @property
    def projected_elements(self) -> int:
        """Llama-3.1-70B: 64 x 128 queries, and 2,048 cached: 10,240 a layer."""
        return self.heads * self.head_dim + self.kv_elements

    @property
    def attended_elements(self) -> int:
        return self.heads * self.v_head_dim


@dataclass(frozen=True)
class LatentAttention(Mixer):
    """Multi-head latent attention: one latent of rank c and one rotary key of width r serve every head.

    ``c + r`` cached elements per token and layer (DeepSeek-V3: 512 + 64, x 61 layers = 35,136)
    [DeepSeek-V2 2024, section 2.1]. Prefill multiplies the keys and values out, decoding absorbs them into
    the query and attends in the latent space: 2 H ((c + r) + c). With `sparse_topk` k each query reads only
    k tokens, in the absorbed form in both stages, picked by an indexer of `index_heads` heads
    [DeepSeek-V3.2 2025]; layers with `index_heads` = 0 use the picks of an earlier layer.
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    sparse_topk: int = 0
    index_heads: int = 0
    index_head_dim: int = 0

    @property
    def head_dim(self) -> int:
        """Width of a query head before absorption."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def parameters(self) -> int:
        rank, latent = self.q_lora_rank, self.kv_lora_rank
        query = self.heads * self.head_dim
        query_weights = self.hidden * rank + rank + rank * query if rank else self.hidden * query
        latent_weights = self.hidden * (latent + self.qk_rope_head_dim) + latent
        expanded = latent * self.heads * (self.qk_nope_head_dim + self.v_head_dim)
        output_weights = self.heads * self.v_head_dim * self.hidden
        return query_weights + latent_weights + expanded + output_weights + self.index_parameters

    @property
    def index_parameters(self) -> int:
        """Indexer: queries from the query latent, one key and one weight per head from the hidden state."""
        query_input = self.q_lora_rank or self.hidden
        query = query_input * self.index_heads * self.index_head_dim
        return query + self.hidden * (self.index_elements + self.index_heads) + 2 * self.index_elements

    @property
    def kv_elements(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def index_elements(self) -> int:
        return self.index_head_dim if self.index_heads else 0

    @property
    def prefill_flops_per_pair(self) -> int:
        if self.sparse_topk:
            return self.decode_flops_per_pair
        return 2 * self.heads * (self.head_dim + self.v_head_dim)

    @property
    def decode_flops_per_pair(self) -> int:
        return 2 * self.heads * (self.kv_elements + self.kv_lora_rank)

    @property
    def index_flops_per_pair(self) -> int:
        return 2 * self.index_heads * self.index_head_dim

    @property
    def projected_elements(self) -> int:
        """Queries, keys and values multiplied out beside the cached latent; absorbed where attention is sparse."""
        if self.sparse_topk:
            return self.decode_projected_elements
        return self.heads * (self.head_dim + self.qk_nope_head_dim + self.v_head_dim) + self.kv_elements

    @property
    def attended_elements(self) -> int:
        return self.decode_attended_elements if self.sparse_topk else self.heads * self.v_head_dim

    @property
    def decode_projected_elements(self) -> int:
        """Absorbed queries, the latent, and the indexer's: DeepSeek-V3: 129 x 576 = 74,304 a layer."""
        index = self.index_heads * (self.index_head_dim + 1) + self.index_elements
        return (self.heads + 1) * self.kv_elements + index

    @property
    def decode_attended_elements(self) -> int:
        """Weighted sums of latents; the values' projection comes after."""
        return self.heads * self.kv_lora_rank


@dataclass(frozen=True)
class Recurrence(Mixer):
    """A mixer that keeps one matrix state per sequence, and the last inputs of a short convolution."""

    @property
    def kind(self) -> str:
        return "linear"

    @property
    def matrix_elements(self) -> int:
        """Elements of the matrix state."""
        raise NotImplementedError

    @property
    def channels(self) -> int:
        """Channels that the short convolution smooths."""
        return 0

    @property
    def taps(self) -> int:
        """Length of the short convolution."""
        return 1

    @property
    def state_elements(self) -> int:
        return self.matrix_elements + (self.taps - 1) * self.channels

    @property
    def linear_flops_per_token(self) -> int:
        """Outer-product update and read-out, 2 FLOPs per element each, and the convolution."""
        return 4 * self.matrix_elements + 2 * self.taps * self.channels


@dataclass(frozen=True)
class GatedDeltaNet(Recurrence):
    """Gated delta rule ``S <- a S (1 - b k k^T) + b v k^T`` per value head [Yang2024]; `heads`: of keys."""

    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int

    @property
    def taps(self) -> int:
        return self.conv_kernel

    @property
    def channels(self) -> int:
        return 2 * self.heads * self.key_head_dim + self.value_heads * self.value_head_dim

    @property
    def parameters(self) -> int:
        value = self.value_heads * self.value_head_dim
        inputs = self.hidden * (self.channels + value + 2 * self.value_heads)
        small = self.taps * self.channels + 2 * self.value_heads + self.value_head_dim
        return inputs + value * self.hidden + small

    @property
    def matrix_elements(self) -> int:
        return self.value_heads * self.key_head_dim * self.value_head_dim

    @property
    def linear_flops_per_token(self) -> int:
        """The delta rule first reads what the state holds under the key: 2 FLOPs per element more."""
        return super().linear_flops_per_token + 2 * self.matrix_elements

    @property
    def projected_elements(self) -> int:
        """Keys, queries and values, a decay and a rate a head; the output's gate stays with the projections."""
        return self.channels + 2 * self.value_heads

    @property
    def attended_elements(self) -> int:
        return self.value_heads * self.value_head_dim


@dataclass(frozen=True)
class Mamba2(Recurrence):
    """State-space layer with scalar decay, ``S <- a S + dt x B^T, y = S C`` per head [Dao2024]."""

    head_dim: int
    groups: int
    state_size: int
    conv_kernel: int

    @property
    def taps(self) -> int:
        return self.conv_kernel

    @property
    def channels(self) -> int:
        return self.heads * self.head_dim + 2 * self.groups * self.state_size

    @property
    def parameters(self) -> int:
        inner = self.heads * self.head_dim
        inputs = self.hidden * (inner + self.channels + self.heads)
        return inputs + inner * self.hidden + (self.taps + 1) * self.channels + 3 * self.heads + inner

    @property
    def matrix_elements(self) -> int:
        return self.heads * self.head_dim * self.state_size

    @property
    def projected_elements(self) -> int:
        return self.channels + self.heads

    @property
    def attended_elements(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True)
class LightningAttention(Recurrence):
    """Linear attention with fixed decay and an output gate, ``S <- a S + v k^T`` [MiniMax-01 2025]."""

    head_dim: int

    @property
    def parameters(self) -> int:
        width = self.heads * self.head_dim
        return 5 * self.hidden * width + width

    @property
    def matrix_elements(self) -> int:
        return self.heads * self.head_dim**2

    @property
    def projected_elements(self) -> int:
        return 3 * self.heads * self.head_dim

    @property
    def attended_elements(self) -> int:
        return self.heads * self.head_dim
