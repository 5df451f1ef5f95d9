"""The bills of a deployment, and what one gains over another: per stage, communication and complexity.

The bill of time is the mean call's seconds, the bill of money the fleet's dollars per hour; each is split over the same
rows and sums to what the model says. So the difference of two bills is exact:

    net benefit = gains of the stages - communication - complexity.

An accelerator's dollars go to the stages by the share of time that its pool works on each, the rest to head room.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from breakeven.models.performance import Performance, coefficients, performance
from breakeven.models.steps import (
    Coefficients,
    StepTime,
    decode_time,
    expert_hit_share,
    prefill_chunks,
    prefill_time,
)
from breakeven.models.tables import Resolved, resolve
from breakeven.optimizer.evaluator import Evaluator
from breakeven.studies.deployment_file import Deployed
from breakeven.studies.study import Study

STAGES = ("prefill attention", "prefill FFN", "decode attention", "decode FFN")
WAITING, LOST, INTERFERENCE, HANDLING = "waiting", "lost prefixes", "interference", "handling of the request"
TRANSFER, COLLECTIVES = "KV transfer", "collectives"
HEAD_ROOM, COMPLEXITY = "head room", "further pools and kinds"
GAINS = (*STAGES, WAITING, LOST, INTERFERENCE, HANDLING, HEAD_ROOM)
COMMUNICATION = (TRANSFER, COLLECTIVES)
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
    workload = evaluator.workload_at(evaluator(ids)["sessions_per_second"])
    resolved = resolve(evaluator.deployment(ids, 1), study.catalog)
    found: Performance = performance_of(resolved, workload, study.catalog)
    prefill, decode, dominant = _stages(resolved, workload, study.catalog, found)
    seconds = _seconds(prefill, decode, found, workload)
    return Bill(title, seconds, _dollars(prefill, decode, found, resolved), dominant | _others(seconds))


@jax.jit
def performance_of(resolved: Any, workload: Any, catalog: Any) -> Performance:
    """`performance`, compiled once for everything that shows its terms."""
    return performance(resolved, workload, catalog)


def _number(value: Any) -> float:
    return float(np.asarray(value, np.float64).ravel()[0])


Parts = dict[str, float]  # of one phase: its two stages and collectives


def _stages(resolved: Resolved, workload: Any, catalog: Any, found: Performance) -> tuple[Parts, Parts, dict[str, str]]:
    """(seconds of a mean call's prefill, of its decode steps, what dominates each stage), alone and undisturbed."""
    llm, pools = catalog.llm, found.pools
    nodes = workload.recomputed if _number(pools.moves) > 0.5 else workload.resident
    chunks = prefill_chunks(nodes.tokens, resolved.prefill_attention.choice.token_budget)
    machine = pools.decode
    tokens = found.point.state.batch / machine.micro_batches
    ranks, context = tokens / machine.data_parallel / machine.workers, workload.decode_context

    def prefill(side: Coefficients) -> StepTime:
        terms = prefill_time(side, llm, nodes.tokens, nodes.tokens, nodes.pairs, nodes.context, chunks)
        return StepTime(*[jnp.sum(nodes.weight * term) for term in terms])

    def decode(side: Coefficients) -> StepTime:
        return decode_time(side, llm, tokens, ranks, context).scaled(workload.mean_steps)

    parts, dominant = [], dict[str, str]()
    sides = zip(("prefill", "decode"), coefficients(resolved, catalog), (prefill, decode), strict=True)
    for phase, (attention, ffn), run in sides:
        times = {f"{phase} attention": (attention, run(attention)), f"{phase} FFN": (ffn, run(ffn))}
        part = {name: _number(time.total_s) - _number(time.collective_s) for name, (_, time) in times.items()}
        part[COLLECTIVES] = sum(_number(time.collective_s) for _, time in times.values())
        parts.append(part)
        for name, (side, time) in times.items():
            given = (nodes, chunks) if phase == "prefill" else None
            dominant[name] = _dominant(side, llm, workload, given, (tokens, ranks, context), _number(time.overhead_s))
    return parts[0], parts[1], dominant


def _of(value: Any) -> Any:
    """A coefficient, 0 where a stage has none."""
    return 0.0 if value is None else value


def _dominant(
    c: Coefficients,
    llm: Any,
    workload: Any,
    prefill: tuple[Any, Any] | None,
    decode: tuple[Any, Any, Any],
    launch_s: float,
) -> str:
    """The largest of a stage's memory traffic, arithmetic and launches."""
    weights, products = _of(c.projection_s) + _of(c.weight_s), _of(c.projection_token_s) + _of(c.token_s)
    experts = _of(c.expert_s)
    if prefill is not None:
        nodes, chunks = prefill
        tokens = nodes.tokens
        memory = (weights + experts * expert_hit_share(tokens / chunks, llm)) * chunks
        memory = jnp.sum(nodes.weight * (memory + _of(c.prefill_context_s) * nodes.context * chunks))
        selected = jnp.minimum(nodes.pairs, tokens * llm.sparse_topk)
        compute = (products + _of(c.expert_token_s) + _of(c.query_s)) * tokens
        compute = compute + _of(c.pair_s) * nodes.pairs + _of(c.selected_pair_s) * selected
        compute = jnp.sum(nodes.weight * compute)
    else:
        tokens, ranks, context = decode
        cached = _of(c.context_s) * context + _of(c.selected_context_s) * jnp.minimum(context, llm.sparse_topk)
        memory = (weights + experts * expert_hit_share(tokens, llm) + ranks * cached) * workload.mean_steps
        compute = (products * ranks + _of(c.expert_token_s) * tokens) * workload.mean_steps
    sizes = {"memory": _number(memory), "compute": _number(compute), "launches": launch_s}
    return max(sizes, key=lambda name: sizes[name])


def _seconds(prefill: Parts, decode: Parts, found: Performance, workload: Any) -> Parts:
    """The mean call, from its arrival to its last token; what is left of prefill and decode is interference."""
    latency, pools = found.latency, found.pools
    token_s = jnp.sum(workload.output_weight * workload.output_steps * latency.token.mean_s, -1)
    first_s = _number(jnp.sum(latency.prefill_weight * latency.prefill_s, -1))
    lost_s = _number(found.point.state.miss * (pools.missed_latency_s - pools.prefill_latency_s))
    transfer_s, handling_s = _transfer_s(found), _number(pools.request_s)
    alone_s = sum(prefill.values()) + lost_s + transfer_s + handling_s
    disturbed_s = first_s - alone_s + _number(token_s) - sum(decode.values())
    rows: Parts = dict.fromkeys(ROWS, 0.0)
    rows |= {name: value for part in (prefill, decode) for name, value in part.items() if name != COLLECTIVES}
    return rows | {
        WAITING: _number(latency.wait.average_s),
        LOST: lost_s,
        INTERFERENCE: disturbed_s,
        HANDLING: handling_s,
        TRANSFER: transfer_s,
        COLLECTIVES: prefill[COLLECTIVES] + decode[COLLECTIVES],
    }


def _transfer_s(found: Performance) -> float:
    return _number(found.pools.transfer_s)


def _dollars(prefill: Parts, decode: Parts, found: Performance, resolved: Resolved) -> Parts:
    """USD per hour of the fleet: pools by the share of time they work on each stage, the rest is head room."""
    total = _number(found.fleet.cost_per_hour_usd)
    complexity = _number(found.fleet.complexity_usd_per_hour)
    shared = _number(found.pools.moves) < 0.5
    busy_prefill = min(_number(found.utilization_prefill), 1.0)
    busy_decode = min(_number(found.utilization_decode), 1.0)
    if shared:
        busy_decode = max(busy_decode - busy_prefill, 0.0)
    owned = [
        _number(count) * _number(stage.hardware.usd_per_hour + stage.hardware.electricity_usd_per_hour)
        for count, stage in zip(found.fleet.by_stage, resolved.stages, strict=True)
    ]
    paid = total - complexity
    weights = (sum(owned), sum(owned)) if shared else (sum(owned[:3]), sum(owned[3:]))
    scale = paid / sum(owned)  # whole instances, and electricity by use
    rows: Parts = dict.fromkeys(ROWS, 0.0)
    for part, busy, weight in ((prefill, busy_prefill, weights[0]), (decode, busy_decode, weights[1])):
        whole = sum(part.values())
        for name, value in part.items():
            rows[name] += scale * weight * busy * value / whole
    rows[HEAD_ROOM] = paid - sum(rows.values())
    rows[COMPLEXITY] = complexity
    return rows


def _others(seconds: Parts) -> dict[str, str]:
    """What dominates the rows that are no stage."""
    named = {
        WAITING: "waiting",
        LOST: "compute",
        INTERFERENCE: "interference",
        HANDLING: "waiting",
        TRANSFER: "transfer",
        COLLECTIVES: "transfer",
        HEAD_ROOM: "waiting",
    }
    return {name: word for name, word in named.items() if seconds.get(name, 0.0) or name == HEAD_ROOM}
