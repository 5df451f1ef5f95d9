"""What a call waits for before its first token: prefill, the step in progress, batch mates, room to decode, link."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from breakeven.models.bursts import HeldUp, held_up
from breakeven.models.closed import by_chance
from breakeven.models.encoder import encode_busy, encode_load
from breakeven.models.llm import LLM
from breakeven.models.numerics import TINY, choose, gamma_cdf
from breakeven.models.operating_point import (
    HIGHEST,
    OperatingPoint,
    Pools,
    State,
    decode_step_at,
    decode_utilization,
    joined_share,
    most_sequences,
    operating_point,
    prefill_servers,
    prefix_found,
)
from breakeven.models.queueing import (
    Wait,
    add_waits,
    burstier,
    counted_wait,
    either_wait,
    followed,
    pipeline_probability,
    queue_wait,
    uniform_wait,
)
from breakeven.models.reload import continued_share
from breakeven.models.workload import Workload


class Reads(NamedTuple):
    """Prefixes read back from tiers below HBM; shapes (n,)."""

    wait: Wait  # of a call; never, without tiers
    share: Array  # of the calls whose prefix is read back
    utilization: Array  # of the busiest path to a tier


class Turn(NamedTuple):
    """What nearly all calls of a shared pool wait for, evenly spread: too even to be a gamma variable. Shapes (n,)."""

    mean_s: Array
    variance: Array


class CallWaits(NamedTuple):
    """A call's waits, and what is worth knowing of their parts; shapes (n,)."""

    long: Wait  # for prefill and for room to decode: behind whole prompts
    brief: Wait  # for the step in progress, for mates in the own one, for the link
    turn: Turn  # for the step of a decode that hardly ever rests
    admission: Wait
    link_utilization: Array
    departures_cv2: Array  # of calls that leave prefill
    reads: Reads
    encode: Wait  # for an encoder that does not stand in a pool that prefills
    encode_utilization: Array


def call_waits(point: OperatingPoint, pools: Pools, workload: Workload, llm: LLM, seen: Array) -> CallWaits:
    """Waits of a call at an operating point, taken as independent.

    `seen` is the share of the others' load that an arrival sees: 1 in an open system, (N-1)/N in a closed one.
    """
    admission = by_chance(_admission(point, pools, workload, llm), pools, workload)
    link, link_utilization, departures = _link(point, pools)
    reads = _reads(point, pools, workload)
    reload = reads.wait
    queue = _prefill(point, pools, workload, seen)
    turn, held = _pass_in_progress(point, pools), _held_up(point, pools)
    # The brief waits are part of every long one, so this one adds what is longer of it.
    more_s = jnp.maximum(held.busy.average_s - held.idle.average_s, 0.0) / jnp.maximum(held.busy.probability, 1e-6)
    queue = followed(queue, held.busy._replace(mean_s=more_s))
    decoding, step = _step_in_progress(point, pools)
    queue = _without(queue, decoding.mean_s)
    if pools.retained is not None:  # calls that decode prefills come by none of these
        reload, queue, turn, *link = (_thinned(wait, point.local) for wait in (reload, queue, turn, *link))
        queue = add_waits(queue, _local_queue(point, pools))
    parts = reload, queue, turn, admission
    encode, encode_utilization = _never(link_utilization), jnp.zeros_like(link_utilization)
    if pools.encode is not None:
        calls = point.decode_rate * pools.decode_replicas
        burst = 1.0 + (workload.arrival_cv2 - 1.0) / workload.calls_per_session
        found = encode_load(pools.encode, seen * calls, point.state.miss, point.step_s, burst)
        encode, encode_utilization = add_waits(*found.waits), encode_busy(pools.encode, calls, point.state.miss)
        parts = (*parts, *found.waits)
        link_utilization = jnp.maximum(link_utilization, found.link_utilization)
    long = add_waits(*parts)
    brief = add_waits(*step, point.burst.together.paused, held.idle, *link)
    return CallWaits(
        long,
        brief,
        decoding,
        admission,
        link_utilization,
        departures,
        reads,
        encode,
        encode_utilization,
    )


def _never(like: Array) -> Wait:
    zero = jnp.zeros_like(like)
    return Wait(zero, zero + 1e-6, zero + 1.0)


def _prefill(point: OperatingPoint, pools: Pools, workload: Workload, seen: Array) -> Wait:
    servers = prefill_servers(pools)
    # A session's burst is spread over its calls, and splitting over replicas thins it further.
    burst = (workload.arrival_cv2 - 1.0) / (workload.calls_per_session * pools.prefill_replicas / servers)
    queue = queue_wait(point.prefill_rate * seen, point.service, servers, 1.0 + burst)
    depth = pools.prefill_ways / pools.prefill_ranks
    # Long prompts hold the first stage nearly as long as the engine: their chunks follow one another.
    latency_s = pools.prefill_latency_s + point.state.miss * (pools.missed_latency_s - pools.prefill_latency_s)
    stages = jnp.clip(latency_s * point.stretch / point.service.first, 1.0, depth)
    probability = pipeline_probability(pools.prefill_replicas, point.prefill_utilization * seen, stages)
    balanced = (pools.prefill_balanced > 0.5) & (pools.prefill_replicas > 1.0)
    staged = balanced & (pools.shared <= 0.0) & (depth > 1.0)
    queue = queue._replace(probability=jnp.where(staged, probability, queue.probability))
    cv2 = queue.cv2 + point.burst.even * (1.0 / 3.0 - queue.cv2)
    alone = queue._replace(mean_s=queue.mean_s * point.burst.shorter, cv2=cv2)
    elsewhere, counted = _counted(point, pools, seen, queue.average_s)
    counted = counted._replace(mean_s=counted.mean_s * burstier(point.service, 1.0 + burst), cv2=queue.cv2)
    among = balanced & (elsewhere > 0.0) & (depth <= 1.0)
    alone = choose(among, counted, alone)
    return followed(alone, point.burst.together.waited)


def _counted(point: OperatingPoint, pools: Pools, seen: Array, waited_s: Array) -> tuple[Array, Wait]:
    """(calls of an engine that are not there for prefill, the wait where a call's engine is chosen by all of them)."""
    elsewhere = jnp.where(pools.shared > 0.0, point.state.batch, 0.0)
    if pools.encode is not None:
        elsewhere = elsewhere + point.prefill_rate * pools.encode.mean_s(point.state.miss)
    weight = pools.node_weight(point.state.miss)
    seconds = pools.alone_s * (point.service.first / jnp.sum(weight * pools.alone_s, -1))[:, None]
    calls = elsewhere + point.prefill_rate * (waited_s + point.service.first)
    joined = joined_share(calls, pools.prefill_replicas, jnp.ones_like(calls))
    rate = point.prefill_rate * seen
    return elsewhere, counted_wait(rate, seconds, weight, pools.prefill_replicas, calls, joined)


def _admission(point: OperatingPoint, pools: Pools, workload: Workload, llm: LLM) -> Wait:
    """Wait for room in the decode batch: the tail of the batch beyond its limit, geometric from there on."""
    most = most_sequences(pools, workload)
    full_s = decode_step_at(pools, llm, most, workload.decode_context).total_s * point.slowdown
    load = jnp.minimum(point.decode_rate * workload.mean_steps * full_s / most, HIGHEST)
    batch, variance = point.state.batch, point.batch_variance
    below = gamma_cdf(most - 0.5, batch, variance)
    at = jnp.maximum(gamma_cdf(most + 0.5, batch, variance) - below, 1e-12)
    tail = at / (1.0 - load)
    cv2 = jnp.maximum(workload.mean_steps2 / workload.mean_steps**2 - 1.0, 0.0)
    given = 0.5 * (1.0 + cv2) * workload.mean_steps * full_s / most / (1.0 - load)
    return Wait(tail / (below + tail), given, jnp.ones_like(given))


def _link(point: OperatingPoint, pools: Pools) -> tuple[tuple[Wait, Wait], Array, Array]:
    """(waits for the prefill engine's link, its utilization, squared CV of departures from prefill).

    Departures of a busy, irregular prefill come in bursts; the exponent 0.4 for them was read off simulations.
    """
    mean = point.moved.link_s
    rho = point.prefill_rate * mean / pools.prefill_workers
    busy = jnp.minimum(point.prefill_utilization, 1.0)
    service_cv2 = jnp.maximum(point.service.second / (point.service.first**2 + TINY) - 1.0, 0.0)
    departures = 1.0 + busy**2 * (service_cv2 - 1.0)
    exponent = jnp.where(departures > 1.5, 0.4, 1.0)
    transfer_cv2 = jnp.maximum(point.moved.link_s2 / jnp.maximum(mean**2, 1e-16) - 1.0, 0.0)
    held = jnp.clip(rho, TINY, HIGHEST)
    given = 0.5 * mean * (jnp.maximum(departures, 1.0) + transfer_cv2) / (1.0 - held)
    probability = jnp.where(rho > 0.0, held**exponent, 0.0)
    # Prompts of one step come together: each finds half of the others before it, M[X]/G/1.
    others = point.others
    ahead = jnp.maximum(0.5 * others, 1e-4)
    any_ahead = -jnp.expm1(-ahead)
    behind = Wait(probability, given, jnp.ones_like(given))
    together = Wait(any_ahead, ahead / any_ahead * mean / (1.0 - held), jnp.ones_like(given))
    alone = (pools.prefill_ranks <= 1.0) & (pools.prefill_workers <= 1.0)
    one = _behind_one(point, pools, mean, transfer_cv2 * mean**2)
    one = one._replace(mean_s=one.mean_s / (1.0 - held))
    behind = choose(alone, one, behind)
    if point.moved.hidden is not None:
        left = point.moved.hidden.share_left
        behind, together = (w._replace(probability=w.probability * left(w.mean_s)) for w in (behind, together))
    return (behind, together), jnp.maximum(rho, return_utilization(point.decode_rate, pools)), departures


def _behind_one(point: OperatingPoint, pools: Pools, sent_s: Array, variance: Array) -> Wait:
    """Wait for the cache that an engine sent before, where prompts leave it one by one: what its transfer, a standard
    deviation shorter or longer than the mean, takes beyond the prefill that follows, and the idle time before that."""
    depth = pools.prefill_ways / pools.prefill_ranks
    some = slice(1, None, 4)  # of the nodes, for speed
    seconds, weight = pools.alone_s.T[some] * (point.stretch / depth), pools.node_weight(point.state.miss).T[some]
    weight, steep = 0.5 * weight / jnp.sum(weight, 0), 5.0 / (seconds + TINY)
    busy, rate = jnp.minimum(point.prefill_utilization, 1.0), point.prefill_rate
    spread = jnp.minimum(jnp.sqrt(variance + 1e-18), sent_s)
    late = over_s = jnp.zeros_like(seconds)
    for transfer_s in (sent_s - spread, sent_s + spread):
        more_s = transfer_s - seconds
        left_s = jnp.maximum(more_s, 0.0)
        idle = (1.0 - busy) * jnp.minimum(rate * left_s, 1.0)
        late = late + busy * jnp.clip(0.5 + steep * more_s, 0.0, 1.0) + idle
        over_s = over_s + left_s * (busy + 0.5 * idle)
    probability = jnp.maximum(jnp.sum(weight * late, 0), 1e-9)
    return Wait(probability, jnp.sum(weight * over_s, 0) / probability, jnp.ones_like(probability))


def _thinned(wait: Wait, share: Array) -> Wait:
    """A wait that a `share` of the calls do not have."""
    return wait._replace(probability=wait.probability * (1.0 - share))


def _local_queue(point: OperatingPoint, pools: Pools) -> Wait:
    """What a call that decode prefills waits for there: the step in progress, and other such calls, M/G/1."""
    assert pools.retained is not None
    first, second, _ = pools.retained.local_moments
    rho = jnp.clip(point.decode_rate * point.local * first, 0.0, HIGHEST)
    step = uniform_wait(-jnp.expm1(-point.state.batch), jnp.maximum(point.step_s * pools.decode.yielded, 1e-6))
    behind = Wait(rho, 0.5 * second / (jnp.maximum(first, 1e-9) * (1.0 - rho)), jnp.ones_like(rho))
    return _thinned(add_waits(step, behind), 1.0 - point.local)


def return_utilization(decode_rate: Array, pools: Pools) -> Array:
    """Share of time that a decode engine sends KV of outputs back, over the link's other direction."""
    back_s = jnp.zeros_like(decode_rate) if pools.return_s is None else pools.return_s
    return decode_rate * back_s / pools.decode.workers


def _pass_in_progress(point: OperatingPoint, pools: Pools) -> Wait:
    """Data-parallel ranks share each step: a call waits for the one in progress though a rank may be idle.

    All that came during a step are computed in the next one, so with m arrivals a step it is followed by another with
    probability 1 - e^-m: e^m steps in a row, one idle time after them. One rank's part is in its queue's wait.
    """
    ranks = pools.prefill_ranks
    stage = point.service.scaled(ranks)
    came = jnp.clip(point.prefill_rate * stage.first, 0.0, 20.0)
    busy = came / (came + jnp.exp(-came))
    mean_s = 0.5 * stage.second / (stage.first + TINY)
    second = stage.third / (3.0 * stage.first + TINY)
    cv2 = jnp.maximum(second / (mean_s**2 + TINY) - 1.0, 0.3)
    return Wait(busy * (1.0 - 1.0 / ranks), mean_s, cv2)


def _held_up(point: OperatingPoint, pools: Pools) -> HeldUp:
    """A call's wait behind the first stage of a pipeline that prefills alone."""
    depth = pools.prefill_ways / pools.prefill_ranks
    ranks, weight = pools.prefill_ranks, pools.node_weight(point.state.miss)
    seconds = pools.alone_s / depth[:, None]
    found = held_up(point.prefill_rate / ranks, seconds, weight, pools.budget_s * ranks, depth)
    alone = (pools.shared <= 0.0) & (pools.prefill_workers <= 1.0)
    return HeldUp(*(w._replace(probability=jnp.where(alone, w.probability, 0.0)) for w in found))


def _reads(point: OperatingPoint, pools: Pools, workload: Workload) -> Reads:
    """Prefixes that the tiers below HBM hold.

    Reads of an engine from a tier follow one another, M/G/1; data-parallel ranks have paths of their own.
    """
    total, none = _never(point.prefill_rate), jnp.zeros_like(point.prefill_rate)
    if pools.reload is None:
        return Reads(total, none, none)
    busiest = read = none
    rate = point.prefill_rate * pools.prefill_replicas / workload.calls_per_session
    continued = continued_share(workload)
    above = prefix_found(pools, workload, rate, point.active_tokens, 0)
    reads = point.prefill_rate * continued / pools.reload.paths
    for k in range(pools.reload.shared.shape[-1]):
        found = prefix_found(pools, workload, rate, point.active_tokens, k + 1)
        share, above = jnp.maximum(found - above, 0.0), found
        read = read + continued * share
        mean, second = pools.reload.mean_s[:, k], pools.reload.second_s2[:, k]
        rho = reads * share * mean
        queue = 0.5 * reads * share * second / (1.0 - jnp.minimum(rho, HIGHEST))
        given = mean + queue
        variance = jnp.maximum(second - mean**2, 0.0) + queue**2
        wait = Wait(continued * share, given, variance / (given**2 + TINY))
        if pools.reload.ahead is not None:
            late, given, cv2 = pools.reload.ahead.waited(k, jnp.clip(rho, 0.0, HIGHEST), queue)
            wait = Wait(wait.probability * late, given, cv2)
        total = either_wait(total, wait)
        busiest = jnp.maximum(busiest, rho)
    return Reads(total, read, busiest)


def _step_in_progress(point: OperatingPoint, pools: Pools) -> tuple[Turn, tuple[Wait, Wait]]:
    """A call that arrives in a shared pool first waits for the step in progress to end: one of decode, or, where the
    micro-batches of a pipeline keep step with it, one with another call's chunk.

    Decode that is nearly always (a share of 0.9 of the time, else none from 0.7 on down) at work is a turn of all calls
    that find no prefill.
    """
    busy = -jnp.expm1(-point.state.batch)
    step_s = jnp.maximum(point.step_s * pools.decode.yielded, 1e-6)
    always = pools.shared * jnp.clip(5.0 * (busy - 0.7), 0.0, 1.0)
    turn = Turn(0.5 * always * busy * step_s, jnp.square(always * step_s) * busy * (1.0 / 3.0 - 0.25 * busy))
    decode = uniform_wait((pools.shared - always) * busy * (1.0 - point.prefill_share), step_s)
    others = pools.chunked * point.prefill_share * (1.0 - 1.0 / pools.prefill_ways)
    return turn, (decode, uniform_wait(others, jnp.maximum(point.chunk_step_s, 1e-6)))


def _without(wait: Wait, turn_s: Array) -> Wait:
    """A wait behind others' prefill, where all calls are said to wait for their turn, these too."""
    left = jnp.maximum(1.0 - turn_s / jnp.maximum(wait.mean_s, TINY), 0.05)
    return wait._replace(mean_s=wait.mean_s * left, cv2=wait.cv2 / left**2)


def sessions_in_progress(state: State, pools: Pools, workload: Workload, llm: LLM, rate: Array, seen: Array) -> Array:
    """Sessions in progress at session rate `rate` (Little's law); infinite where a pool is saturated."""
    point = operating_point(state, pools, workload, llm, rate, seen)
    waits = call_waits(point, pools, workload, llm, seen)
    waiting_s = waits.long.average_s + waits.brief.average_s + waits.turn.mean_s
    latency = pools.prefill_latency_s + state.miss * (pools.missed_latency_s - pools.prefill_latency_s)
    latency = latency * point.riding
    prefill_s = latency + point.moved.waited_s
    if pools.retained is not None:
        prefill_s = prefill_s + point.local * (pools.retained.local_moments.first - prefill_s)
    call_s = waiting_s + prefill_s + pools.request_s + point.state.batch / point.decode_rate
    if pools.encode is not None:
        call_s = call_s + pools.encode.mean_s(state.miss)
    session_s = workload.session_s(call_s)
    full = (point.prefill_utilization >= 1.0) | (decode_utilization(point, pools, workload, llm) >= 1.0)
    full = full | (waits.encode_utilization >= 1.0)
    return jnp.where(full, jnp.inf, rate * session_s)
