"""The catalogue as arrays: one row per choice a study allows, gathered into each candidate's own numbers.

`catalog(...)` builds the tables on the host, `resolve(deployment, catalog)` gathers. The cost model is
differentiated with respect to what `resolve` returns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from breakeven.models.catalog import table
from breakeven.models.deployment import BALANCED, RANDOM, Deployment, Stage
from breakeven.models.hardware import Accelerator, Link
from breakeven.models.inputs import pick
from breakeven.models.kernel_curves import curves
from breakeven.models.llm import LLM
from breakeven.models.local import Correction, Local, correction
from breakeven.models.placement_choices import Placements
from breakeven.models.speculation import Speculation, Speculations, speculations
from breakeven.models.tiers import Stack, TierRows, tier_rows
from breakeven.models.topology import STAGES
from breakeven.models.transfer_ways import Transfers, TransferWay, transfers

ARITHMETIC = ("bf16", "int8", "fp8", "fp8_block", "fp4")
TENSOR_CLASSES = ("attention", "dense", "experts", "head")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Hardware:
    """Accelerators as arrays: shape (accelerators,) in the catalogue, (n,) once gathered for a stage."""

    bf16_flops_per_s: Array
    fp8_flops_per_s: Array
    int8_flops_per_s: Array
    fp4_flops_per_s: Array
    memory_bytes: Array
    memory_bandwidth_bytes_per_s: Array
    scaleup_bytes_per_s: Array  # per direction, all peers together
    scaleup_pair_bytes_per_s: Array  # between two of them
    scaleup_domain: Array
    per_instance: Array
    nic_bytes_per_s: Array
    host_bytes_per_s: Array
    power_w: Array
    all_in_power_w: Array
    usd_per_hour: Array
    electricity_usd_per_hour: Array  # of an owned one at full use, beside usd_per_hour; 0.0 where rented
    available: Array  # how many one can have
    hopper: Array  # 1.0 where the host launches slower (engines.toml)
    kernels: dict[str, dict[str, Array]]  # what operators achieve (kernels.toml): operator -> number of its curve


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Links:
    """Links between pools, shape (links,)."""

    bytes_per_s: Array  # per port and direction, achieved
    latency_s: Array
    through_nic: Array  # 1.0: the accelerator's NIC limits it too


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WeightSchemes:
    """Bytes per parameter, shape (schemes, tensor classes), and one-hot arithmetic (schemes, classes, formats)."""

    bytes_per_weight: Array
    arithmetic: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Engine:
    """What the serving engine adds (engines.toml); scalars in seconds, bytes and shares."""

    layer_s: Array
    latent_layer_s: Array
    moe_layer_s: Array
    step_s: Array
    sequence_s: Array
    allreduce_s: Array  # beside the kernel's own latency
    alltoall_share: Array  # of the latency of the measured dispatch and combine
    hopper_factor: Array
    request_s: Array
    request_token_s: Array  # of each prompt token
    first_chunk_steps: Array  # decode steps until the first token reaches the user
    crowd_s: Array  # by which each request in flight delays a first token: tokenizer and stream share one process
    handover_s: Array  # routing and handshake of a call that decodes on another engine
    launch_share: Array  # of the kernels' latency that is left where launches overlap
    activation_passes: Array  # memory passes over a layer's hidden state beside its matrix products
    expert_imbalance: Array  # slowest rank over the mean where whole experts sit on ranks
    burst_factor: Array  # time of a prompt in a burst of prompts over its time alone
    reserve_output_share: Array  # of the output, what admission counts beside the prompt (mean need: 0.5)
    preempts: (
        Array  # 1.0: simulations admit by the prompt and preempt when the cache is full, 0.0: they reserve the output
    )
    memory_fraction: Array
    reserve_bytes: Array
    overlapped_batches: Array | None = None  # parts of a step that hide each other's collectives (two-batch overlap)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Economy:
    """What money and power depend on beside the accelerators; scalars."""

    whole_instances: Array  # 1.0: accelerators are paid by whole instances of `per_instance`
    pool_usd_per_hour: Array  # running cost of each pool beyond the first
    second_kind_usd_per_hour: Array  # and of each kind of accelerator beyond the first
    idle_power_share: Array  # share of an accelerator's power that it draws when idle
    power_overhead: Array  # PUE
    budget_usd_per_hour: Array
    max_power_w: Array  # provisioned, all in
    success_rate: Array  # sessions that solve their task, a share


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EncoderFormats:
    """Formats of a vision encoder's weights and products, shape (formats,), in the catalogue; (n,) once gathered."""

    bytes_per_weight: Array
    flops_per_s: Array  # achieved, (formats, accelerators) in the catalogue


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Catalog:
    """Everything a deployment is evaluated against, all of it traced."""

    hardware: Hardware
    links: Links
    weight_schemes: WeightSchemes
    kv_bytes_per_element: Array
    llm: LLM
    engine: Engine
    economy: Economy
    local: Local | None = None  # corrections from the user's own measurements
    tiers: TierRows | None = None  # of KV cache below HBM
    speculations: Speculations | None = None  # ways to decode speculatively
    transfers: Transfers | None = None  # ways for the KV cache to get from prefill to decode
    encoders: EncoderFormats | None = None  # of the vision encoder, where a study allows others than 16 bit
    placements: Placements | None = None  # of what could stand on either side of an attention/FFN split


ROWS = 8  # tables have a multiple of so many, so that studies of other lengths run what one has compiled


def _floats(values: Sequence[float]) -> Array:
    return jnp.asarray(np.asarray(values, np.float64), jnp.float32)


def _filled(rows: Any) -> Any:
    """A table with its last row again and again, up to a multiple of `ROWS`; no candidate refers to those."""

    def fill(column: Array) -> Array:
        more = -len(column) % ROWS
        return jnp.asarray(np.pad(column, [(0, more)] + [(0, 0)] * (column.ndim - 1), mode="edge"))

    return jax.tree.map(fill, rows)


def arithmetic_rates(accelerator: Accelerator) -> dict[str, float]:
    """FLOP/s per arithmetic; where the hardware lacks one, that of the next wider one it has."""
    own = {
        "bf16": accelerator.bf16_flops_per_s,
        "int8": accelerator.int8_flops_per_s,
        "fp8": accelerator.fp8_flops_per_s,
        "fp4": accelerator.fp4_flops_per_s,
    }
    widest = own["bf16"] or own["fp8"] or own["int8"] or own["fp4"]
    wider = {"bf16": widest, "fp8": own["fp8"] or widest, "int8": own["int8"] or own["fp8"] or widest}
    wider["fp4"] = own["fp4"] or wider["fp8"]
    return {f"{key}_flops_per_s": rate for key, rate in wider.items()}


def _hardware_row(
    accelerator: Accelerator, usd_per_hour: float, available: float, electricity_usd_per_hour: float
) -> dict[str, float]:
    copied = [
        "memory_bytes",
        "memory_bandwidth_bytes_per_s",
        "scaleup_bytes_per_s",
        "scaleup_pair_bytes_per_s",
        "scaleup_domain",
        "per_instance",
        "nic_bytes_per_s",
        "host_bytes_per_s",
        "power_w",
        "all_in_power_w",
    ]
    row = {name: float(getattr(accelerator, name)) for name in copied}
    row |= arithmetic_rates(accelerator)
    hopper = float(accelerator.generation == "hopper")
    money = {"usd_per_hour": usd_per_hour, "electricity_usd_per_hour": electricity_usd_per_hour}
    return row | money | {"available": available, "hopper": hopper}


def _kernel_columns(accelerators: Sequence[Accelerator]) -> dict[str, dict[str, Array]]:
    rows = [curves(accelerator.generation) for accelerator in accelerators]
    for accelerator, row in zip(accelerators, rows, strict=True):
        for operator, share in accelerator.product_shares.items():
            row[operator]["share"] = share
    return {
        operator: {name: _floats([row[operator][name] for row in rows]) for name in numbers}
        for operator, numbers in rows[0].items()
    }


def engine_row(name: str) -> dict[str, Any]:
    """The row of an engine; an era or mode of it (`like`) states only what differs."""
    rows = table("engines")
    own = rows[pick("engine", name, rows)]
    return engine_row(own["like"]) | own if "like" in own else own


def engine(name: str, overrides: Mapping[str, float] | None = None) -> Engine:
    """The engine's terms by name, any of them overridden."""
    row = engine_row(name) | dict(overrides or {})
    return Engine(**{field: jnp.float32(row[field]) for field in Engine.__dataclass_fields__ if field in row})


def _weight_schemes(names: Sequence[str]) -> WeightSchemes:
    data = table("precisions")
    size, arithmetic = [], []
    for name in names:
        row = data["weights"][pick("weights", name, data["weights"])]
        formats = [data["formats"][row[tensor]] for tensor in TENSOR_CLASSES]
        size.append([f["bytes"] for f in formats])
        parts = [{f["arithmetic"]: 1.0} if isinstance(f["arithmetic"], str) else f["arithmetic"] for f in formats]
        arithmetic.append([[part.get(a, 0.0) for a in ARITHMETIC] for part in parts])
    return WeightSchemes(_floats(size), _floats(arithmetic))


def catalog(
    accelerators: Sequence[Accelerator],
    usd_per_hour: Sequence[float],
    available: Sequence[float],
    links: Sequence[Link],
    weights: Sequence[str],
    kv: Sequence[str],
    llm: LLM,
    engine: Engine,
    economy: Economy,
    electricity_usd_per_hour: Sequence[float] | None = None,
    kv_tiers: Sequence[Stack] = (),
    local: Local | None = None,
    speculation: Sequence[Speculation] = (),
    kv_transfer: Sequence[TransferWay] = (),
    encoder_weights: Sequence[str] = (),
    placements: Placements | None = None,
) -> Catalog:
    """The tables of a study, rows in the order given (candidates refer to rows by number), and more behind them."""
    electricity = [0.0] * len(accelerators) if electricity_usd_per_hour is None else electricity_usd_per_hour
    rows = [_hardware_row(*row) for row in zip(accelerators, usd_per_hour, available, electricity, strict=True)]
    kv_rows = table("precisions")["kv"]
    columns = {name: _floats([row[name] for row in rows]) for name in rows[0]}
    hardware = _filled(Hardware(**columns, kernels=_kernel_columns(accelerators)))
    wires = Links(
        _floats([link.bytes_per_s * link.efficiency for link in links]),
        _floats([link.latency_s for link in links]),
        _floats([float(link.kind == "scale-out") for link in links]),
    )
    return Catalog(
        hardware=hardware,
        links=_filled(wires),
        weight_schemes=_filled(_weight_schemes(weights)),
        kv_bytes_per_element=_filled(_floats([kv_rows[pick("kv", name, kv_rows)] for name in kv])),
        llm=jax.tree.map(lambda leaf: jnp.float32(min(float(leaf), 1e12)), llm),
        engine=engine,
        economy=economy,
        local=local,
        tiers=_filled(tier_rows(kv_tiers)),
        speculations=_filled(speculations(speculation)),
        transfers=_filled(transfers(kv_transfer)),
        encoders=_filled(_encoders(encoder_weights, hardware)),
        placements=_filled(placements),
    )


PLAIN_ENCODER = "bf16"


def _encoders(names: Sequence[str], hardware: Hardware) -> EncoderFormats | None:
    """The formats of precisions.toml that an encoder may have; None where all are 16 bit."""
    if all(name == PLAIN_ENCODER for name in names):
        return None
    formats = table("precisions")["formats"]
    chosen = [formats[name] for name in names]
    peaks = [getattr(hardware, f"{f['arithmetic'].removesuffix('_block')}_flops_per_s") for f in chosen]
    shares = [hardware.kernels[f"gemm_{f['arithmetic']}"]["share"] for f in chosen]
    rates = jnp.stack([peak * share for peak, share in zip(peaks, shares, strict=True)])
    return EncoderFormats(_floats([f["bytes"] for f in chosen]), rates)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ResolvedStage:
    """A stage's choices with the numbers they stand for, each of shape (n,)."""

    choice: Stage
    hardware: Hardware
    attention_bytes: Array  # bytes per parameter, per tensor class
    dense_bytes: Array
    experts_bytes: Array
    head_bytes: Array
    attention_flops_per_s: Array  # achieved FLOP/s per accelerator, per tensor class
    dense_flops_per_s: Array
    experts_flops_per_s: Array
    head_flops_per_s: Array
    attention_read_bytes_per_s: Array  # achieved bandwidth of reading weights
    dense_read_bytes_per_s: Array
    experts_read_bytes_per_s: Array
    head_read_bytes_per_s: Array
    experts_latency_s: Array  # of one layer's grouped products
    experts_permute_bytes: Array  # per element of a token's copies


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Activations:
    """How attention and feed-forward pools that stand apart exchange activations, shapes (n,)."""

    bytes_per_s: Array  # of one port and direction
    latency_s: Array
    through_nic: Array
    micro_batches: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Resolved:
    """A deployment with its catalogue numbers gathered; `performance` is differentiated with respect to these."""

    encode: ResolvedStage
    prefill_attention: ResolvedStage
    prefill_ffn: ResolvedStage
    decode_attention: ResolvedStage
    decode_ffn: ResolvedStage
    kv_bytes_per_element: Array
    link_bytes_per_s: Array
    link_latency_s: Array
    link_through_nic: Array
    routing: Array  # code of deployment.ROUTING
    tiers: TierRows | None  # (n, LEVELS)
    activations: Activations | None = None  # None: no candidate's attention stands apart from its feed-forward layers
    correction: Correction | None = None
    speculation: Speculations | None = None  # None: no candidate speculates
    transfers: Transfers | None = None  # None: all KV crosses after prefill, and none goes back
    encoder: EncoderFormats | None = None  # None: 16 bit everywhere
    placement: Placements | None = None  # None: every part stands where it does by default

    @property
    def balanced(self) -> Array:
        """1.0 where calls go to the least loaded replica."""
        return jnp.where(self.routing == BALANCED, 1.0, 0.0)

    @property
    def scattered(self) -> Array:
        """1.0 where a session's calls go to any replica, whichever holds its prefix."""
        return jnp.where(self.routing == RANDOM, 1.0, self.balanced)

    @property
    def stages(self) -> tuple[ResolvedStage, ...]:
        """The five stages in the order of `topology.STAGES`."""
        return tuple(getattr(self, name) for name in STAGES)


def of_row(column: Array, row: Array) -> Array:
    """Elements of a column by row; rows are numbers of the space, never negative or beyond it."""
    return jnp.take(column, row, axis=0, mode="clip")


def _resolve_stage(stage: Stage, catalog: Catalog, hw: Hardware) -> ResolvedStage:
    """`hw`: the accelerators of the stage's pool."""
    schemes, kernels = catalog.weight_schemes, catalog.hardware.kernels

    def of_class(tensor: str, name: str, peak: bool = False) -> Array:
        """A number of the product's curve, for the arithmetic that the weight scheme gives this tensor class; the
        harmonic mean of several, whose times add up. Looked up in a table of accelerators by schemes."""
        kind, c = "experts" if tensor == "experts" else "gemm", TENSOR_CLASSES.index(tensor)
        numbers = [kernels[f"{kind}_{arithmetic}"][name] for arithmetic in ARITHMETIC]
        if peak:
            peaks = [getattr(catalog.hardware, f"{name.removesuffix('_block')}_flops_per_s") for name in ARITHMETIC]
            numbers = [number * flops_per_s for number, flops_per_s in zip(numbers, peaks, strict=True)]
        inverse = jnp.dot(1.0 / jnp.stack(numbers, -1), schemes.arithmetic[:, c].T, precision="highest")
        return of_row((1.0 / inverse).reshape(-1), stage.accelerator * inverse.shape[1] + stage.weights)

    rates = {f"{tensor}_flops_per_s": of_class(tensor, "share", peak=True) for tensor in TENSOR_CLASSES}
    for tensor in TENSOR_CLASSES:
        rates[f"{tensor}_read_bytes_per_s"] = hw.memory_bandwidth_bytes_per_s * of_class(tensor, "read")
    for name in ("latency_s", "permute_bytes"):
        rates[f"experts_{name}"] = of_class("experts", name)
    sizes = {f"{t}_bytes": of_row(schemes.bytes_per_weight[:, c], stage.weights) for c, t in enumerate(TENSOR_CLASSES)}
    return ResolvedStage(choice=stage, hardware=hw, **sizes, **rates)


def _activations(deployment: Deployment, catalog: Catalog) -> Activations | None:
    row = deployment.activation_link
    if row is None or deployment.micro_batches is None:
        return None
    links = catalog.links
    return Activations(links.bytes_per_s[row], links.latency_s[row], links.through_nic[row], deployment.micro_batches)


def _speculation(deployment: Deployment, catalog: Catalog) -> Speculations | None:
    row = deployment.speculation
    return None if row is None else jax.tree.map(lambda column: of_row(column, row), catalog.speculations)


def _encoder(deployment: Deployment, catalog: Catalog) -> EncoderFormats | None:
    row, formats = deployment.encoder, catalog.encoders
    if row is None or formats is None:
        return None
    return EncoderFormats(formats.bytes_per_weight[row], formats.flops_per_s[row, deployment.encode.accelerator])


def _transfers(deployment: Deployment, catalog: Catalog) -> Transfers | None:
    row = deployment.kv_transfer
    return None if row is None else jax.tree.map(lambda column: of_row(column, row), catalog.transfers)


def _placement(deployment: Deployment, catalog: Catalog) -> Placements | None:
    row = deployment.placement
    return None if row is None else jax.tree.map(lambda column: of_row(column, row), catalog.placements)


def resolve(deployment: Deployment, catalog: Catalog) -> Resolved:
    """Gather each candidate's peaks, bandwidths, efficiencies and prices; every leaf gets shape (n,)."""

    # Feed-forward layers that stand with their attention run on the same accelerators: gathered once.
    own = STAGES if deployment.activation_link is not None else [name for name in STAGES if not name.endswith("ffn")]
    rows = {name: getattr(deployment, name).accelerator for name in own}
    hardware = {
        name: jax.tree.map(lambda column, row=row: of_row(column, row), catalog.hardware) for name, row in rows.items()
    }
    stages = {
        name: _resolve_stage(
            getattr(deployment, name), catalog, hardware.get(name, hardware[name.replace("ffn", "attention")])
        )
        for name in STAGES
    }
    return Resolved(
        **stages,
        kv_bytes_per_element=of_row(catalog.kv_bytes_per_element, deployment.kv),
        link_bytes_per_s=of_row(catalog.links.bytes_per_s, deployment.link),
        link_latency_s=of_row(catalog.links.latency_s, deployment.link),
        link_through_nic=of_row(catalog.links.through_nic, deployment.link),
        routing=deployment.routing,
        correction=None if catalog.local is None else correction(deployment, catalog.local),
        tiers=jax.tree.map(lambda column: of_row(column, deployment.kv_tiers), catalog.tiers),
        activations=_activations(deployment, catalog),
        speculation=_speculation(deployment, catalog),
        transfers=_transfers(deployment, catalog),
        encoder=_encoder(deployment, catalog),
        placement=_placement(deployment, catalog),
    )
