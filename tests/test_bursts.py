"""Prompts that share a step, and calls that join the least loaded engine, beside small simulations of both."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from breakeven.models.bursts import Burst, Step, burst, held_up
from breakeven.models.operating_point import own_load, unevenness
from breakeven.models.queueing import Moments, queue_wait

ONE = jnp.array(1.0)


def step(rate: float, fixed_s: float, mates: float = 1.0, budget_s: float = 1e6) -> Step:
    """Exponential prompts of one second on average, beside `fixed_s` a step."""
    first, second = 1.0 + fixed_s / mates, 2.0 + 2.0 * fixed_s / mates + (fixed_s / mates) ** 2
    service = Moments(*(jnp.array(x) for x in (first, second, 6.0)))
    return Step(jnp.array(rate), service, ONE, jnp.array(2.0), jnp.array(mates), jnp.array(budget_s), ONE)


def found(given: Step) -> Burst:
    return burst(given, ONE, jnp.array(0.0))


def played(rate: float, fixed_s: float, calls: int = 60_000) -> tuple[float, float, float]:
    """(mean wait, prompts of the same step before a call included; time of those behind it; prompts in a step) where
    a step takes all that came during the last one."""
    rng = np.random.default_rng(1)
    arrival, work = np.cumsum(rng.exponential(1.0 / rate, calls)), rng.exponential(1.0, calls)
    now, i, steps, waited, behind = 0.0, 0, 0, 0.0, 0.0
    while i < calls:
        now = max(now, arrival[i])
        j = int(np.searchsorted(arrival, now, side="right"))
        own = work[i:j]
        before = np.cumsum(own) - own
        waited += float(np.sum(now - arrival[i:j] + before))
        behind += float(np.sum(own.sum() - before - own))
        now, i, steps = now + fixed_s + float(own.sum()), j, steps + 1
    return waited / calls, behind / calls, calls / steps


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8])
def test_without_a_fixed_part_one_waits_as_long_as_one_by_one(rate):
    """Sharing a step changes the order of nothing: rho / (1 - rho) seconds of M/M/1, and the work behind as played."""
    around = found(step(rate, 0.0))
    assert float(around.shorter) == pytest.approx(1.0, rel=1e-4)
    waited, behind, _ = played(rate, 0.0)
    assert waited == pytest.approx(rate / (1.0 - rate), rel=0.05)
    assert rate * float(around.together.waited.average_s) == pytest.approx(behind, rel=0.1)


@pytest.mark.parametrize(("rate", "fixed_s"), [(0.1, 5.0), (0.3, 3.0), (0.5, 1.0), (0.6, 2.0)])
def test_steps_with_a_fixed_part_are_waited_for_as_long_as_played(rate, fixed_s):
    """Mean wait and the prompts behind, in steps whose fixed part all in them share; within a quarter."""
    waited, behind, mates = played(rate, fixed_s)
    given = step(rate, fixed_s, mates)
    around = found(given)
    queue = queue_wait(given.rate, given.service, ONE, ONE)
    assert float(queue.average_s * around.shorter) == pytest.approx(waited, rel=0.25)
    busy = rate * float(given.service.first)
    assert busy * float(around.together.waited.average_s) == pytest.approx(behind, rel=0.25)
    assert float(queue.average_s) > 1.1 * waited  # one by one would take longer


def test_nothing_fits_behind_where_a_step_holds_one_prompt():
    """Then all that came while one waited is left when one is done: rho (W + S)."""
    around = found(step(0.5, 0.0, budget_s=1e-3))
    assert float(around.shorter) == pytest.approx(1.0, rel=1e-3)
    assert float(around.together.waited.average_s) < 1e-3
    assert float(around.left_s) == pytest.approx(0.5 * (1.0 + 1.0), rel=1e-3)


def test_a_larger_budget_leaves_less_behind():
    left = [float(found(step(0.6, 0.0, budget_s=budget)).left_s) for budget in (0.01, 1.0, 10.0, 1e3)]
    assert all(a > b for a, b in itertools.pairwise(left))


def least_loaded(engines: int, mean: float, calls: int = 60_000) -> tuple[float, float]:
    """(variance of an engine's batch about the mean of all, others that a call finds beside the mean batch) where calls
    of an exponential second join the engine with the fewest of them: M/M/inf."""
    rng, batch = np.random.default_rng(2), np.zeros(engines)
    spent, uneven, total, seen = 0.0, 0.0, 0.0, 0.0
    for _ in range(2 * calls):
        rate = engines * mean + batch.sum()
        gap = 1.0 / rate
        spent, total = spent + gap, total + gap * batch.mean()
        uneven += gap * batch.var()
        seen += gap * float(np.sum(batch * batch))
        if rng.random() * rate < engines * mean:
            batch[rng.choice(np.flatnonzero(batch == batch.min()))] += 1.0
        else:
            batch[rng.choice(engines, p=batch / batch.sum())] -= 1.0
    return uneven / spent, seen / (total * engines) - total / spent


@pytest.mark.parametrize("engines", [2, 4, 8])
@pytest.mark.parametrize("mean", [0.3, 2.0, 20.0])
def test_calls_that_join_the_least_loaded_engine_are_spread_as_played(engines, mean):
    """Within a tenth, or 0.03 of the variance and 0.1 of the load: a call sees itself, and what that spread adds."""
    played_variance, played_load = least_loaded(engines, mean)
    b, r = jnp.array(mean), jnp.array(float(engines))
    uneven = unevenness(b, r)
    assert float(uneven) == pytest.approx(played_variance, rel=0.1, abs=0.03)
    assert float(own_load(b, uneven, r, ONE)) == pytest.approx(played_load, rel=0.1, abs=0.1)


def test_one_engine_is_as_even_as_its_own_mean():
    assert float(unevenness(jnp.array(3.0), ONE)) == 0.0
    assert float(own_load(jnp.array(3.0), jnp.array(0.0), ONE, ONE)) == 1.0


def test_a_call_that_meets_no_other_finds_nothing_around_it():
    around = found(step(0.0, 2.0))
    assert np.isfinite(jnp.array([*around.together.waited, around.shorter, around.even])).all()
    assert float(around.left_s) < 1e-5 and float(around.left_s2) < 1e-4


def second_stage_wait_s(rate: float, calls: int = 60_000) -> float:
    """Mean wait at the second of two stages, in both of which a prompt takes the same exponential second."""
    rng = np.random.default_rng(3)
    first = second = waited = 0.0
    for came, work in zip(np.cumsum(rng.exponential(1.0 / rate, calls)), rng.exponential(1.0, calls), strict=True):
        first = max(first, came) + work
        waited += max(second - first, 0.0)
        second = max(second, first) + work
    return waited / calls


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8])
def test_in_a_pipeline_calls_wait_for_longer_ones_before_them(rate):
    """Within a fifth of what is played; alike prompts and a single stage make nobody wait."""
    exponential, alike = (Moments(*(jnp.array(x) for x in m)) for m in ((1.0, 2.0, 6.0), (1.0, 1.0, 1.0)))
    busy, far = jnp.array(rate), jnp.array(1e6)
    assert float(held_up(busy, exponential, far, 2.0 * ONE).average_s) == pytest.approx(
        second_stage_wait_s(rate), rel=0.2
    )
    assert float(held_up(busy, exponential, far, ONE).probability) == 0.0
    assert float(held_up(busy, alike, far, 2.0 * ONE).average_s) < 1e-5
