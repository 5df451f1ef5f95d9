"""The bills of a deployment, and what one gains over another: per stage, communication and complexity.

The bill of time is the mean call's seconds, the bill of money the fleet's dollars per hour; each is split over the same
rows and sums to what the model says. So the difference of two bills is exact:

    net benefit = gains of the stages - communication - complexity.

An accelerator's dollars go to the stages by the share of time that each holds its pool, the rest to head room. Where
attention and feed-forward layers stand in two pools, a step holds both, and its time goes to what is busiest.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from breakeven.models.bundle import Bundle, decode_sides, decode_work, prefill_call
from breakeven.models.performance import Performance
from breakeven.models.pools import machines
from breakeven.models.steps import Coefficients, StepTime, expert_hit_share, prefill_chunks
from breakeven.models.tables import Resolved
from breakeven.optimizer.evaluator import Evaluator
from breakeven.studies.deployment_file import Deployed
from breakeven.studies.study import Study

ENCODE = "vision encoder"
STAGES = ("prefill attention", "prefill FFN", "decode attention", "decode FFN")
WAITING, LOST, INTERFERENCE, HANDLING = "waiting", "lost prefixes", "interference", "handling of the request"
TRANSFER, COLLECTIVES, ACTIVATIONS = "KV transfer", "collectives", "activation transfer"
EMBEDDINGS = "embedding transfer"
HEAD_ROOM, COMPLEXITY = "head room", "further pools and kinds"
GAINS = (ENCODE, *STAGES, WAITING, LOST, INTERFERENCE, HANDLING, HEAD_ROOM)
COMMUNICATION = (TRANSFER, EMBEDDINGS, COLLECTIVES, ACTIVATIONS)
ROWS = (*GAINS, *COMMUNICATION, COMPLEXITY)


@dataclass(frozen=True)
class Bill:
    """What a mean call takes and an hour costs, by row; and what dominates each."""

    title: str
    seconds: dict[str, float]
    usd_per_hour: dict[str, float]
    dominant: dict[str, str]  # compute, memory, transfer, waiting or interference

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def total_usd_per_hour(self) -> float:
        return sum(self.usd_per_hour.values())


@dataclass(frozen=True)
class Gain:
    """What `bill` gains over `base`: rows of seconds per call and dollars per hour, and their sum."""

    seconds: dict[str, float]  # positive: the deployment takes less; communication and complexity as what they add
    usd_per_hour: dict[str, float]

    def record(self) -> dict[str, dict[str, float]]:
        """Rows and nets, as JSON."""
        both = {"seconds_per_call": self.seconds, "usd_per_hour": self.usd_per_hour}
        return {name: {**rows, "net": self.net(rows)} for name, rows in both.items()}

    @staticmethod
    def net(rows: dict[str, float]) -> float:
        """Gains - communication - complexity."""
        added = sum(rows[name] for name in (*COMMUNICATION, COMPLEXITY))
        return sum(rows[name] for name in GAINS) - added


def gain(bill: Bill, base: Bill) -> Gain:
    """The gain of one deployment over another."""

    def rows(own: dict[str, float], other: dict[str, float]) -> dict[str, float]:
        return {name: other[name] - own[name] if name in GAINS else own[name] - other[name] for name in ROWS}

    return Gain(rows(bill.seconds, base.seconds), rows(bill.usd_per_hour, base.usd_per_hour))


def bill_of(deployed: Deployed) -> Bill:
    """The bills of a deployment file or row."""
    return bill(deployed.study, deployed.study.evaluator(), 0, deployed.title)


def bill(study: Study, evaluator: Evaluator, candidate: int, title: str) -> Bill:
    """The bills of a candidate of a study's space."""
    ids = np.array([candidate], np.int64)
    rate = float(evaluator(ids)["sessions_per_second"][0])
    return bill_from(study, title, *evaluator.performance(candidate, rate))


def bill_from(study: Study, title: str, workload: Any, resolved: Resolved, found: Performance) -> Bill:
    """The bills of a candidate, from all that the model says of it (`Evaluator.performance`)."""
    parts, dominant = _stages(resolved, workload, study.catalog, found)
    seconds = _seconds(parts, found, workload)
    return Bill(title, seconds, _dollars(parts, found, resolved), dominant | _others(seconds))


def _number(value: Any) -> float:
    return float(np.asarray(value, np.float64).ravel()[0])


@dataclass(frozen=True)
class Part:
    """What one phase spends on one stage, seconds of a mean call."""

    stage: str  # one of STAGES
    computed_s: float
    collective_s: float
    transfer_s: float  # activations on their way to the stage's pool and back
    held: tuple[float, float]  # (computed, collective) as they hold the stage's pool, hidden behind another or not


Rows = dict[str, float]


def _stages(resolved: Resolved, workload: Any, catalog: Any, found: Performance) -> tuple[list[Part], dict[str, str]]:
    """(a mean call's prefill and decode steps by stage, what dominates each stage), alone and undisturbed."""
    back = 0.0 if resolved.transfers is None else _number(resolved.transfers.returns)
    unseen = _number(found.pools.moves) > 0.5 > back
    terms = jax.device_get(_terms(resolved, workload, catalog, found, unseen))
    encoder, dominant = _encoder(found)
    parts = [encoder]
    for name, (time, work, sizes) in terms.items():
        computed_s, collective_s = _two(time)
        parts.append(Part(name, computed_s, collective_s, _number(time.transfer_s), _two(work)))
        words = {word: _number(size) for word, size in sizes.items()} | {"launches": _number(time.overhead_s)}
        dominant[name] = max(words, key=lambda word: words[word])
    return parts, dominant


def _two(time: StepTime) -> tuple[float, float]:
    """Seconds that it computes, launches included, and that its collectives take."""
    computed_s = sum(map(_number, (time.products_s, time.experts_s, time.attention_s, time.overhead_s)))
    return computed_s, _number(time.collective_s)


@functools.partial(jax.jit, static_argnames="unseen")
def _terms(
    resolved: Resolved, workload: Any, catalog: Any, found: Performance, unseen: bool
) -> dict[str, tuple[StepTime, StepTime, dict[str, Any]]]:
    """Of each stage: seconds of a mean call by cause, what an engine works on it, and seconds of its memory traffic
    and arithmetic. Prefill computes the last output again where it is `unseen`."""
    llm = catalog.llm
    nodes = workload.recomputed if unseen else workload.resident
    prefill, decode = machines(resolved, catalog, jnp.sqrt(workload.decode_context_var))
    budget, context = resolved.prefill_attention.choice.token_budget, workload.decode_context
    tokens, pairs, sequence = nodes.tokens[None], nodes.pairs[None], nodes.context[None]
    first = prefill_call(prefill, llm, tokens, pairs, sequence, budget)
    given = decode, llm, found.point.state.batch, context
    steps, worked = decode_sides(*given), decode_work(*given)
    times, work = (
        [
            *[StepTime(*(jnp.sum(nodes.weight * term) for term in side)) for side in of_prefill],
            *[side.scaled(workload.mean_steps) for side in of_decode],
        ]
        for of_prefill, of_decode in ((first.sides, steps), (first.work, worked))
    )
    passes = prefill_chunks(nodes.tokens, budget) * _fed(prefill).micro
    batch = found.point.state.batch / decode.micro_batches
    joined, fed = batch / decode.workers, batch / decode.ffn_engines
    sizes = [
        _prefill_sizes(prefill.attention, llm, nodes, nodes.tokens, passes),
        _prefill_sizes(prefill.ffn, llm, nodes, nodes.tokens / prefill.ffn_engines, passes),
        _decode_sizes(decode.attention, llm, workload, joined, joined / decode.data_parallel),
        _decode_sizes(decode.ffn, llm, workload, fed, fed / _fed(decode).ranks),
    ]
    return dict(zip(STAGES, zip(times, work, sizes, strict=True), strict=True))


def _encoder(found: Performance) -> tuple[Part, dict[str, str]]:
    """What a mean call's images take, nothing where it has none; and what dominates it."""
    encode = found.pools.encode
    if encode is None:
        return Part(ENCODE, 0.0, 0.0, 0.0, (0.0, 0.0)), {}
    terms = encode.terms
    computed_s, collective_s = held = _two(terms)
    launch_s = _number(terms.overhead_s)
    word = "launches" if launch_s > 0.5 * computed_s else "compute"  # its weights are read for hundreds of patches
    return Part(ENCODE, computed_s, collective_s, 0.0, held), {ENCODE: word}


class _Fed(NamedTuple):
    micro: Any  # passes that a chunk of a prefill takes
    ranks: Any  # data-parallel ranks of the feed-forward side


def _fed(machine: Bundle) -> _Fed:
    split = machine.split
    if split is None:
        return _Fed(1.0, machine.data_parallel)
    apart = split.apart > 0.5
    return _Fed(jnp.where(apart, split.micro_batches, 1.0), jnp.where(apart, split.ffn_ranks, machine.data_parallel))


def _of(value: Any) -> Any:
    """A coefficient, 0 where a stage has none."""
    return 0.0 if value is None else value


def _prefill_sizes(c: Coefficients, llm: Any, nodes: Any, tokens: Any, chunks: Any) -> dict[str, Any]:
    """Seconds that a mean call's prefill takes a stage's memory, and its arithmetic."""
    memory = (_of(c.projection_s) + _of(c.weight_s) + _of(c.expert_s) * expert_hit_share(tokens / chunks, llm)) * chunks
    memory = jnp.sum(nodes.weight * (memory + _of(c.prefill_context_s) * nodes.context * chunks))
    selected = jnp.minimum(nodes.pairs, tokens * llm.sparse_topk)
    compute = (_of(c.projection_token_s) + _of(c.token_s) + _of(c.expert_token_s) + _of(c.query_s)) * tokens
    compute = compute + _of(c.pair_s) * nodes.pairs + _of(c.selected_pair_s) * selected
    return {"memory": memory, "compute": jnp.sum(nodes.weight * compute)}


def _decode_sizes(c: Coefficients, llm: Any, workload: Any, tokens: Any, ranks: Any) -> dict[str, Any]:
    """The same of its decode steps."""
    context = workload.decode_context
    cached = _of(c.context_s) * context + _of(c.selected_context_s) * jnp.minimum(context, llm.sparse_topk)
    weights = _of(c.projection_s) + _of(c.weight_s) + _of(c.expert_s) * expert_hit_share(tokens, llm)
    products = (_of(c.projection_token_s) + _of(c.token_s)) * ranks + _of(c.expert_token_s) * tokens
    return {"memory": (weights + ranks * cached) * workload.mean_steps, "compute": products * workload.mean_steps}


def _seconds(parts: list[Part], found: Performance, workload: Any) -> Rows:
    """The mean call, from its arrival to its last token; what is left of prefill and decode is interference."""
    latency, pools = found.latency, found.pools
    token_s = jnp.sum(workload.output_weight * workload.output_steps * latency.token.mean_s, -1)
    first_s = _number(jnp.sum(latency.prefill_weight * latency.prefill_s, -1))
    lost_s = _number(found.point.state.miss * (pools.missed_latency_s - pools.prefill_latency_s))
    embeddings_s, encode = 0.0, pools.encode
    if encode is not None:
        embeddings_s = _number(encode.link_s)
        lost_s += _number(found.point.state.miss * (encode.lost_mean_s - encode.found_mean_s))
    transfer_s, handling_s = _number((1.0 - found.point.local) * found.point.moved.waited_s), _number(pools.request_s)
    rows: Rows = dict.fromkeys(ROWS, 0.0)
    rows |= {part.stage: part.computed_s for part in parts}
    rows |= {
        WAITING: _number(latency.waiting_s),
        LOST: lost_s,
        HANDLING: handling_s,
        TRANSFER: transfer_s,
        EMBEDDINGS: embeddings_s,
        COLLECTIVES: sum(part.collective_s for part in parts),
        ACTIVATIONS: sum(part.transfer_s for part in parts),
    }
    alone_s = sum(rows.values()) - rows[WAITING]
    return rows | {INTERFERENCE: first_s + _number(token_s) - alone_s}


def _dollars(parts: list[Part], found: Performance, resolved: Resolved) -> Rows:
    """USD per hour of the fleet: every pool by the share of time it is held by each stage, the rest is head room."""
    total, complexity = _number(found.fleet.cost_per_hour_usd), _number(found.fleet.complexity_usd_per_hour)
    stages = list(resolved.stages)
    pools = [int(_number(stage.choice.pool)) for stage in stages]
    owned = dict.fromkeys(pools, 0.0)
    for pool, count, stage in zip(pools, found.fleet.by_stage, stages, strict=True):
        owned[pool] += _number(count) * _number(stage.hardware.usd_per_hour + stage.hardware.electricity_usd_per_hour)
    paid = total - complexity
    scale = paid / sum(owned.values())  # whole instances, and electricity by use
    rows: Rows = dict.fromkeys(ROWS, 0.0)
    for pool, usd_per_hour in owned.items():
        here = [p == pool for p in pools]
        for held, busy in zip(_held(parts, here), _busy(found, here), strict=True):
            for name, share in held.items():
                rows[name] += scale * usd_per_hour * busy * share
    return rows | {HEAD_ROOM: paid - sum(rows.values()), COMPLEXITY: complexity}


def _busy(found: Performance, here: list[bool]) -> tuple[float, float]:
    """Shares of time that prefill (or the encoder where it stands apart) and decode hold a pool of those stages."""
    encode, prefill, decode = (
        min(_number(use), 1.0)
        for use in (found.utilization_encode, found.utilization_prefill, found.utilization_decode)
    )
    before = prefill if any(here[1:3]) else encode
    if any(here[:3]) and any(here[3:]):
        decode = max(decode - before, 0.0)  # the use of a shared pool counts prefill in
    return before, decode


def _held(parts: list[Part], here: list[bool]) -> tuple[Rows, Rows]:
    """What share of its time in a pool of those stages goes to each row: of prefill, of decode."""
    found: list[Rows] = []
    for phase in (slice(0, 3), slice(3, 5)):
        mine = [part for part, inside in zip(parts[phase], here[phase], strict=True) if inside]
        rows = {part.stage: part.held[0] for part in mine} | {COLLECTIVES: sum(part.held[1] for part in mine)}
        whole = sum(rows.values())
        if mine and not whole:  # nothing is encoded
            rows, whole = {part.stage: 1.0 for part in mine}, float(len(mine))
        found.append({name: value / whole for name, value in rows.items()} if mine else {})
    return found[0], found[1]


def _others(seconds: Rows) -> dict[str, str]:
    """What dominates the rows that are no stage."""
    named = {
        WAITING: "waiting",
        LOST: "compute",
        INTERFERENCE: "interference",
        HANDLING: "waiting",
        TRANSFER: "transfer",
        EMBEDDINGS: "transfer",
        COLLECTIVES: "transfer",
        ACTIVATIONS: "transfer",
        HEAD_ROOM: "waiting",
    }
    return {name: word for name, word in named.items() if seconds.get(name, 0.0) or name == HEAD_ROOM}
