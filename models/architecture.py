"""What one LLM is made of: its layers, and the parameters, cache and state that follow from them.

An `Architecture` is a stack of token mixers (attention of some flavour, or a recurrence), of feed-forward
networks and an optional vision encoder. All sizes are counts (parameters, elements, FLOPs), never bytes:
the number format is a choice of the deployment. Multi-token-prediction modules, router biases and scalar
gates are left out (vendors count the first apart, the rest are below 0.01 %).
"""

import math
from dataclasses import dataclass

from breakeven.models.mixers import LatentAttention, Mixer

NATIVE_DTYPES = ("bf16", "fp8", "int8", "fp4", "int4", "fp4-experts", "int4-experts", "mixed")
"""How a checkpoint ships its matrices: `-experts` is 4-bit routed experts and 16 bits elsewhere; `mixed` is
any other blend, which no single number describes."""


@dataclass(frozen=True)
class Ffn:
    """Feed-forward layers of one shape: dense (`intermediate`), or routed experts beside a shared one.

    `matrices` is 3 when gated, 2 when not; `expert_hidden` is the experts' own input width where they work
    in a smaller space than the model (0: the model's).
    """

    layers: int
    hidden: int
    intermediate: int = 0
    matrices: int = 3
    biased: bool = False
    experts: int = 0
    experts_active: int = 0
    expert_intermediate: int = 0
    expert_hidden: int = 0
    shared_intermediate: int = 0

    def _network(self, hidden: int, width: int) -> int:
        biases = (self.matrices - 1) * width + hidden if self.biased and width else 0
        return self.matrices * hidden * width + biases

    @property
    def dense_parameters(self) -> int:
        """Per layer and token: dense network, shared expert, router, projections to the experts."""
        dense = self._network(self.hidden, self.intermediate)
        return dense + self.shared_parameters + self.router_parameters + self.hidden * 2 * self.expert_hidden

    @property
    def shared_parameters(self) -> int:
        """Of one layer's shared experts."""
        return self._network(self.hidden, self.shared_intermediate)

    @property
    def router_parameters(self) -> int:
        """Of one layer's gate."""
        return self.hidden * self.experts

    @property
    def expert_parameters(self) -> int:
        """Of one routed expert in one layer."""
        return self._network(self.expert_hidden or self.hidden, self.expert_intermediate)


@dataclass(frozen=True)
class Encoder:
    """A vision transformer and the projector that hands its patches, merged m x m, to the language model.

    `image_size` in pixels is the largest square input, 0 where any resolution is taken; `projector_input` is
    the projector's input width, `projector_hidden` its inner width (0: a single matrix), `projectors` how
    many there are.
    """

    hidden: int
    layers: int
    intermediate: int
    heads: int
    patch: int
    merge: int
    image_size: int
    output: int
    matrices: int = 2
    temporal_patch: int = 1
    positions: int = 0
    projector_input: int = 0
    projector_hidden: int = 0
    projectors: int = 1

    def patches(self, width: float, height: float) -> float:
        """Patches of an image in pixels, whole groups that are merged; of a fixed input size those it has.

        Qwen2.5-VL, 1280 x 800 pixels: 46 x 29 groups of 28 pixels, 5,336 patches for 1,334 tokens.
        """
        if self.image_size:
            return float((self.image_size // self.patch) ** 2)
        group = self.patch * self.merge
        return float(math.ceil(width / group) * math.ceil(height / group) * self.merge**2)

    @property
    def attention_parameters(self) -> int:
        """Of the blocks' attention, biases and norms left out."""
        return self.layers * 4 * self.hidden**2

    @property
    def dense_parameters(self) -> int:
        """Of the blocks' networks, the patch embedding and the projectors, biases and norms left out."""
        return self._block_parameters + self._projector_parameters

    @property
    def patch_parameters(self) -> float:
        """Of `dense_parameters` those that one patch passes: merged patches share a pass of the projectors."""
        return self._block_parameters + self._projector_parameters / self.merge**2

    @property
    def flops_per_pair(self) -> int:
        """Scores and weighted sum of one pair of patches, over all layers: 2 x 2 x hidden."""
        return 4 * self.hidden * self.layers

    @property
    def token_elements(self) -> int:
        """Elements of one visual token that the language model receives."""
        return self.output * self.projectors

    @property
    def _block_parameters(self) -> int:
        return self.layers * self.matrices * self.hidden * self.intermediate + self._patch_embedding

    @property
    def _patch_embedding(self) -> int:
        return 3 * self.temporal_patch * self.patch**2 * self.hidden

    @property
    def _projector_parameters(self) -> int:
        inner = self.projector_hidden
        ends = self.projector_input + self.output
        return self.projectors * (inner * ends if inner else self.projector_input * self.output)

    @property
    def parameters(self) -> int:
        """Blocks (attention, MLP, biases and norms), patch and position embeddings, projectors."""
        vectors = self.layers * (9 * self.hidden + (self.matrices - 1) * self.intermediate)
        return self.attention_parameters + self.dense_parameters + vectors + self.hidden * self.positions


@dataclass(frozen=True)
class Architecture:
    """One large language model. Counts are whole numbers over all layers unless they say otherwise."""

    name: str
    family: str
    hidden: int
    vocab: int
    mixers: tuple[Mixer, ...]
    ffns: tuple[Ffn, ...]
    max_context: int
    tied_embeddings: bool = False
    learned_positions: int = 0
    norm_parameters: int = 0
    encoder: Encoder | None = None
    native_dtype: str = "bf16"
    advertised_parameters: float | None = None
    advertised_active_parameters: float | None = None
    source: str = ""
    as_of: str = ""
    unverified: tuple[str, ...] = ()

    def over_layers(self, count: str, *kinds: str) -> int:
        """Sum over layers of a `Mixer` count, over those of the given kinds (default: all)."""
        return sum(m.layers * getattr(m, count) for m in self.mixers if not kinds or m.kind in kinds)

    def layers_of(self, *kinds: str) -> int:
        """How many layers mix tokens in one of these ways (`full`, `window`, `linear`; default: any)."""
        return sum(m.layers for m in self.mixers if not kinds or m.kind in kinds)

    @property
    def layers(self) -> int:
        """Layers, each a token mixer and its feed-forward network."""
        return self.layers_of()

    @property
    def full_layers(self) -> int:
        return self.layers_of("full")

    @property
    def window_layers(self) -> int:
        return self.layers_of("window")

    @property
    def linear_layers(self) -> int:
        return self.layers_of("linear")

    @property
    def window_tokens(self) -> int:
        """Longest look-back of a window layer, 0 without any."""
        return max(m.window_tokens for m in self.mixers)

    @property
    def heads(self) -> int:
        """Query heads (those of the layers that read every token, where kinds differ)."""
        return self._main_mixer.heads

    @property
    def kv_heads(self) -> int:
        """Key/value heads of the layers that read most; 1 for a latent, which all heads share."""
        return self._main_mixer.kv_shards

    @property
    def head_dim(self) -> int:
        """Width of a query head."""
        return getattr(self._main_mixer, "head_dim", 0)

    @property
    def head_pair_flops(self) -> float:
        """Prefill FLOPs of one query head for one (query, key) pair; 1 without attention."""
        return self._main_mixer.prefill_flops_per_pair / self.heads or 1.0

    @property
    def shardable_heads(self) -> int:
        """Largest number of tensor-parallel ranks that divides the heads of every layer."""
        return math.gcd(*(m.heads for m in self.mixers))

    @property
    def _main_mixer(self) -> Mixer:
        order = {"full": 0, "window": 1, "linear": 2}
        return min(self.mixers, key=lambda m: order[m.kind])

    @property
    def latent(self) -> LatentAttention | None:
        """The latent attention of this model, if that is what it has."""
        main = self._main_mixer
        return main if isinstance(main, LatentAttention) else None

    @property
    def sparse_topk(self) -> int:
        """Tokens that a query of sparse attention reads, 0 where it reads them all."""
        return self.latent.sparse_topk if self.latent else 0

    @property
    def moe(self) -> Ffn | None:
        """The feed-forward layers with routed experts, if any."""
        return next((f for f in self.ffns if f.experts), None)

    @property
    def moe_layers(self) -> int:
        return self.moe.layers if self.moe else 0

    @property
    def experts(self) -> int:
        """Routed experts per layer, 0 for a dense model."""
        return self.moe.experts if self.moe else 0

    @property
    def experts_active(self) -> int:
        return self.moe.experts_active if self.moe else 0

    @property
    def attention_parameters(self) -> int:
        """Projections of all token mixers, indexers with them."""
        return self.over_layers("parameters")

    @property
    def dense_parameters(self) -> int:
        """Feed-forward weights that every token reads: dense, shared experts, routers; and the norms."""
        return sum(f.layers * f.dense_parameters for f in self.ffns) + self.norm_parameters

    @property
    def shared_parameters(self) -> int:
        """All shared experts of all layers."""
        return sum(f.layers * f.shared_parameters for f in self.ffns)

    @property
    def router_parameters(self) -> int:
        """All gates of all layers."""
        return sum(f.layers * f.router_parameters for f in self.ffns)

    @property
    def expert_parameters(self) -> int:
        """All routed experts of all layers."""
        return sum(f.layers * f.experts * f.expert_parameters for f in self.ffns)

    @property
    def head_parameters(self) -> int:
        """The output head, which each decoding step reads even where it is tied to the embedding."""
        return self.vocab * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Stored beside the head and only looked up: input embedding unless tied, learned positions."""
        return (0 if self.tied_embeddings else self.head_parameters) + self.learned_positions * self.hidden

    @property
    def encoder_parameters(self) -> int:
        return self.encoder.parameters if self.encoder else 0

    @property
    def total_parameters(self) -> int:
        """Stored parameters, a tied embedding counted once."""
        body = self.attention_parameters + self.dense_parameters + self.expert_parameters
        return body + self.head_parameters + self.embedding_parameters + self.encoder_parameters

    @property
    def active_parameters(self) -> int:
        """Read for one text token: k of E experts, the head counted, input embedding and encoder not."""
        routed = sum(f.layers * f.experts_active * f.expert_parameters for f in self.ffns)
        return self.attention_parameters + self.dense_parameters + routed + self.head_parameters

    @property
    def kv_elements_per_token(self) -> int:
        """Cached elements per token of the layers that read every token, index keys apart."""
        return self.over_layers("kv_elements", "full")

    @property
    def index_elements_per_token(self) -> int:
        """Cached index keys per token, in elements."""
        return self.over_layers("index_elements")

    @property
    def window_kv_elements_per_token(self) -> int:
        """Cached elements per token of the window layers, while the token is in the window."""
        return self.over_layers("kv_elements", "window")

    @property
    def state_elements(self) -> int:
        """Elements that the linear layers keep per sequence."""
        return self.over_layers("state_elements")

    def kv_bytes(self, tokens: float, bytes_per_element: float) -> float:
        """Bytes that a sequence of `tokens` keeps: caches, index keys, windows and recurrent states."""
        full = tokens * (self.kv_elements_per_token + self.index_elements_per_token)
        windows = min(tokens, self.window_tokens) * self.window_kv_elements_per_token
        return (full + windows + self.state_elements) * bytes_per_element
