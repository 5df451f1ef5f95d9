"""A deployment, or a batch of them, as a struct of arrays: five stages, each with its pool's and its own choices."""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from breakeven.models.topology import STAGES


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stage:
    """What serves one stage. Stages of one pool repeat its accelerator, replicas, pipeline and limits. Shapes (n,)."""

    pool: Array  # label of the pool, a restricted-growth string over the stages
    accelerator: Array  # row of catalog.accelerators
    replicas: Array  # engine instances
    tensor_parallel: Array  # ranks that share each layer
    data_parallel: Array  # attention replicas inside one engine; experts are spread over all its ranks
    expert_parallel: Array  # 1: experts are split by tensor parallelism; else whole experts per rank
    pipeline_parallel: Array  # layer groups in sequence
    max_batch: Array  # sequences one engine decodes together
    token_budget: Array  # new tokens one step may take
    chunked: Array  # 1.0: prefill chunks ride with the decode batch; 0.0: prefill first
    weights: Array  # row of catalog.weight_schemes
    context_parallel: Array | None = None  # ranks that share the tokens of a prefill; None: no pool has any

    @property
    def accelerators(self) -> Array:
        """Accelerators of one engine."""
        count = self.tensor_parallel * self.data_parallel * self.pipeline_parallel
        return count if self.context_parallel is None else count * self.context_parallel


# Where a call goes: to the replica drawn for its session, to the one with the fewest calls, to the one that holds its
# session's prefix (else to the one with the fewest calls), to any.
ROUTING = ("affinity", "balanced", "prefix-aware", "random")
AFFINITY, BALANCED, PREFIX_AWARE, RANDOM = range(4)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Deployment:
    """Five stages and what joins them. Every leaf has shape (n,): one entry per candidate."""

    encode: Stage
    prefill_attention: Stage
    prefill_ffn: Stage
    decode_attention: Stage
    decode_ffn: Stage
    kv: Array  # row of catalog.kv_bytes_per_element
    kv_tiers: Array  # row of catalog.tiers: what holds the KV cache below HBM
    link: Array  # row of catalog.links: KV cache and embeddings between pools cross it
    routing: Array  # code of ROUTING: the replica that a call goes to
    activation_link: Array | None = None  # row of catalog.links that activations between attention and feed-forward
    micro_batches: Array | None = None  # pools cross, in so many parts that take turns; None: no such pools
    speculation: Array | None = None  # row of catalog.speculations; None: no candidate speculates
    encoder: Array | None = None  # row of catalog.encoders: the vision encoder's format; None: 16 bit everywhere
    kv_transfer: Array | None = None  # row of catalog.transfers; None: all KV crosses after prefill, and none goes back
    placement: Array | None = None  # row of catalog.placements; None: every part stands where it does by default

    @property
    def balanced(self) -> Array:
        """1.0 where calls go to the least loaded replica."""
        return jnp.where(jnp.asarray(self.routing) == BALANCED, 1.0, 0.0)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The five stages in the order of `topology.STAGES`."""
        return tuple(getattr(self, name) for name in STAGES)

    def __len__(self) -> int:
        return int(self.kv.shape[0])


STAGE_FIELDS = tuple(field.name for field in dataclasses.fields(Stage))


def take(deployment: Deployment, index: object) -> Deployment:
    """The candidates at `index` (an int keeps a batch of one)."""
    rows = [index] if isinstance(index, int) else index
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[jnp.asarray(rows)], deployment)
