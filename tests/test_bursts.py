"""Prompts that share a step, and calls that join the least loaded engine, beside small simulations of both."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from breakeven.models.bursts import Burst, HeldUp, Step, burst, held_up, in_the_last
from breakeven.models.operating_point import joined_share, own_load, unevenness
from breakeven.models.queueing import Moments, pipeline_probability, queue_wait

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


@pytest.mark.parametrize("alike", [True, False], ids=["alike", "exponential"])
@pytest.mark.parametrize(("before_s", "room"), [(0.2, 0.3), (1.0, 0.5), (2.0, 0.9), (4.0, 0.1), (0.0, 0.5), (3.0, 0.0)])
def test_what_comes_during_earlier_steps_fills_the_last_one(alike, before_s, room):
    """Prompts of a second, Poisson, 0.6 a second, as far as they fit into the rest of a budget of two: mean and
    standard deviation as drawn, within 0.06 and 0.1 of a second."""
    rng = np.random.default_rng(4)
    count = rng.poisson(0.6 * before_s, 40_000)
    work = count if alike else rng.gamma(np.maximum(count, 1e-9))
    drawn = np.minimum(work, 2.0 * room)
    given = step(0.6, 0.0, budget_s=2.0)
    given = given._replace(marginal_s2=jnp.array(1.0 if alike else 2.0))
    given = jax.tree.map(lambda x: x[None], given)
    mean, variance = in_the_last(given, jnp.ones(1), jnp.array([[before_s]]), jnp.array([[room]]))
    assert float(mean[0, 0]) == pytest.approx(drawn.mean(), abs=0.06)
    assert float(variance[0, 0]) ** 0.5 == pytest.approx(drawn.std(), abs=0.1)


def least_loaded(engines: int, mean: float, calls: int = 30_000) -> tuple[float, float, float]:
    """(variance of an engine's batch about the mean of all, others that a call finds beside the mean batch, rate at
    which calls come to its engine over their mean rate) where calls of an exponential second join the engine with the
    fewest of them: M/M/inf."""
    rng, batch = np.random.default_rng(2), np.zeros(engines)
    spent, uneven, total, seen, came, met = 0.0, 0.0, 0.0, 0.0, 0, 0.0
    for _ in range(2 * calls):
        rate = engines * mean + batch.sum()
        gap = 1.0 / rate
        spent, total = spent + gap, total + gap * batch.mean()
        uneven += gap * batch.var()
        seen += gap * float(np.sum(batch * batch))
        if rng.random() * rate < engines * mean:
            chosen = rng.choice(np.flatnonzero(batch == batch.min()))
            came, met = came + 1, met + float(batch[chosen])
            batch[chosen] += 1.0
        else:
            batch[rng.choice(engines, p=batch / batch.sum())] -= 1.0
    return uneven / spent, seen / (total * engines) - total / spent, met / came / (total / spent)


@pytest.mark.parametrize("engines", [2, 4, 8])
@pytest.mark.parametrize("mean", [0.3, 2.0, 20.0])
def test_calls_that_join_the_least_loaded_engine_are_spread_as_played(engines, mean):
    """Within a tenth, or 0.03 of the variance and 0.1 of the load: a call sees itself, and what that spread adds. So
    many fewer calls come to it meanwhile, within 0.08 of their rate."""
    played_variance, played_load, played_joined = least_loaded(engines, mean)
    b, r = jnp.array(mean), jnp.array(float(engines))
    uneven = unevenness(b, r)
    assert float(uneven) == pytest.approx(played_variance, rel=0.1, abs=0.03)
    assert float(own_load(b, uneven, r, ONE)) == pytest.approx(played_load, rel=0.1, abs=0.1)
    assert float(joined_share(b, r, ONE)) == pytest.approx(played_joined, abs=0.08)
    assert float(joined_share(b, r, 0.0 * ONE)) == 1.0


def test_one_engine_is_as_even_as_its_own_mean():
    assert float(unevenness(jnp.array(3.0), ONE)) == 0.0
    assert float(own_load(jnp.array(3.0), jnp.array(0.0), ONE, ONE)) == 1.0


def test_a_call_that_meets_no_other_finds_nothing_around_it():
    around = found(step(0.0, 2.0))
    assert np.isfinite(jnp.array([*around.together.waited, around.shorter, around.even])).all()
    assert float(around.left_s) < 1e-5 and float(around.left_s2) < 1e-4


PROMPTS = -np.log1p(-(np.arange(16) + 0.5) / 16)  # of an exponential second


def second_stage(rate: float, calls: int = 60_000) -> tuple[np.ndarray, np.ndarray]:
    """Waits at both of two stages, in each of which a prompt takes the same time."""
    rng = np.random.default_rng(3)
    first = second = 0.0
    waits = np.empty((2, calls))
    for n, (came, work) in enumerate(
        zip(np.cumsum(rng.exponential(1.0 / rate, calls)), rng.choice(PROMPTS, calls), strict=True)
    ):
        begun = max(first, came)
        first = begun + work
        waits[:, n] = begun - came, max(second - first, 0.0)
        second = max(second, first) + work
    return waits[0], waits[1]


def behind(rate: float, seconds: np.ndarray, depth: float) -> HeldUp:
    """What equally frequent prompts wait for behind the first stage."""
    weight = jnp.full((1, len(seconds)), 1.0 / len(seconds))
    return held_up(jnp.array([rate]), jnp.array(seconds)[None], weight, jnp.array([1e6]), jnp.array([depth]))


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8])
def test_in_a_pipeline_calls_wait_for_longer_ones_before_them(rate):
    """Of calls that find the first stage idle and of those that wait there, as many as played and as long, within a
    quarter."""
    found = behind(rate, PROMPTS, 2.0)
    first, second = second_stage(rate)
    for wait, some in ((found.idle, first <= 0.0), (found.busy, first > 0.0)):
        assert float(wait.probability[0]) == pytest.approx(np.mean(second[some] > 1e-9), abs=0.1)
        assert float(wait.average_s[0]) == pytest.approx(second[some].mean(), rel=0.25)


def test_nobody_waits_behind_alike_prompts_or_in_a_single_stage():
    assert float(behind(0.5, np.ones(16), 2.0).busy.average_s[0]) < 1e-3
    for wait in behind(0.5, np.linspace(0.1, 2.0, 16), 1.0):
        assert float(wait.probability[0]) == 0.0 and np.isfinite(jnp.array([*wait])).all()


def first_stage_waits(rate: float, engines: int, calls: int = 40_000) -> float:
    """Share of calls that wait for the first of two stages, an exponential second each, of the least busy engine."""
    rng = np.random.default_rng(5)
    free, out, waited = np.zeros(engines), np.zeros(engines), 0
    leaves: list[list[float]] = [[] for _ in range(engines)]
    came = np.cumsum(rng.exponential(1.0 / (rate * engines), calls))
    for now, work in zip(came, rng.exponential(1.0, calls), strict=True):
        leaves = [[end for end in engine if end > now] for engine in leaves]
        count = np.array([len(engine) for engine in leaves])
        chosen = rng.choice(np.flatnonzero(count == count.min()))
        waited += free[chosen] > now
        free[chosen] = max(free[chosen], now) + work
        out[chosen] = max(free[chosen], out[chosen]) + work
        leaves[chosen].append(out[chosen])
    return waited / calls


@pytest.mark.parametrize("engines", [1, 2, 6])
@pytest.mark.parametrize("rate", [0.3, 0.6, 0.8])
def test_the_calls_in_a_pipeline_tell_little_of_its_first_stage(rate, engines):
    """As many wait for it as played, within 0.06; more than for engines of one stage."""
    count, busy = jnp.array(float(engines)), jnp.array(rate)
    found = float(pipeline_probability(count, busy, 2.0 * ONE))
    assert found == pytest.approx(first_stage_waits(rate, engines), abs=0.06)
    assert found >= float(pipeline_probability(count, busy, ONE)) - 1e-6
