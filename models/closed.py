"""What only a closed population does to latency: it waits where it does not fit, and a benchmark starts all at once."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from breakeven.models.attainment import Latency
from breakeven.models.operating_point import OperatingPoint, Pools, most_sequences
from breakeven.models.queueing import Wait, add_waits
from breakeven.models.tables import Engine
from breakeven.models.workload import Workload

UNSETTLED = 0.01  # of a call's time: what bisection and interpolation leave open in a population that fits


def by_chance(wait: Wait, pools: Pools, workload: Workload) -> Wait:
    """A `wait` for room to decode, as an open load's fluctuations cause it, for a closed population.

    It cannot exceed its own number: where all of it fits nobody waits, and where nobody thinks nothing fluctuates, so
    that only the excess waits (`held_back`). Sessions bound to an engine may still crowd one.
    """
    if workload.concurrent_sessions is None:
        return wait
    each = workload.concurrent_sessions / pools.decode_replicas
    shared = (pools.decode_balanced > 0.5) | (pools.decode_replicas <= 1.0)
    fits = (each <= most_sequences(pools, workload)) | (workload.calls_per_session <= 1.0)
    return wait._replace(probability=jnp.where(shared & fits, 0.0, wait.probability))


def held_back(latency: Latency, rate: Array, workload: Workload) -> Latency:
    """`latency` with the wait of a population that does not fit into the cache or the batch.

    A full deployment works at the rate it can; by Little's law N = rate x session time, and what calls and gaps do
    not explain of N / rate is spent waiting for admission.
    """
    assert workload.concurrent_sessions is not None
    calls = workload.calls_per_session
    session_s = workload.concurrent_sessions / rate
    explained_s = workload.session_s(latency.call_mean_s, latency.call_variance)
    held_s = jnp.maximum((session_s - explained_s) / calls - UNSETTLED * latency.call_mean_s, 0.0)
    one = jnp.ones_like(held_s)
    wait = add_waits(latency.wait, Wait(jnp.where(held_s > 0.0, one, 0.0), held_s, 0.05 * one))
    return dataclasses.replace(latency, wait=wait, call_mean_s=latency.call_mean_s + held_s)


def first_wave(latency: Latency, point: OperatingPoint, pools: Pools, workload: Workload, engine: Engine) -> Latency:
    """`latency` of a benchmark that sends its first N requests at once, a share of all its requests.

    The first wave is prefilled prompt after prompt, so its members wait for half of the others on average; as many as
    the token budget holds share the weight traffic and launches of a step.
    Part of the protocol, never of a user's traffic. Fitted factors on the half agree with simulation: 0.4 to 0.7 of
    the wave for chunks, 1/2 for prefill first. Each request in flight also takes its time in the process that serves
    the API.
    """
    assert workload.concurrent_sessions is not None and workload.first_wave_share is not None
    others = jnp.maximum(workload.concurrent_sessions / pools.prefill_replicas - 1.0, 0.0)
    mates = jnp.clip(pools.token_budget / workload.resident.mean_tokens, 1.0, others / pools.prefill_ways + 1.0)
    marginal_s = pools.marginal_s / pools.prefill_ways
    prompt_s = marginal_s + jnp.maximum(point.service.first - marginal_s, 0.0) / mates
    wave_s = 0.5 * others * prompt_s * engine.burst_factor
    share = workload.first_wave_share * jnp.ones_like(wave_s)
    wait = add_waits(latency.wait, Wait(share, wave_s, jnp.full_like(wave_s, 1.0 / 3.0)))
    crowd_s = engine.crowd_s * workload.concurrent_sessions
    chunks = (part._replace(shown_s=part.shown_s + crowd_s) for part in (latency.chunk, latency.brief_chunk))
    chunk, brief_chunk = chunks
    return dataclasses.replace(latency, wait=wait, chunk=chunk, brief_chunk=brief_chunk)
