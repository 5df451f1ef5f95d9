"""Queues whose answer is known, played by the same compiled loop: processor sharing, repairman, flow shop."""

import numpy as np
import pytest
from test_simulation import ONE_TOKEN_A_SECOND, PLAN, single

from breakeven.models.simulation import Traffic, simulate
from breakeven.models.simulation.state import COLOCATED, SPLIT, new_calls, new_sessions

ALONE = PLAN._replace(
    prefill_engines=1,
    prefill=ONE_TOKEN_A_SECOND,
    decode=ONE_TOKEN_A_SECOND,
    max_batch=1,
    token_budget=1e9,
    shared_prefix=0.0,
    request_s=0.0,
    link_latency_s=0.0,
    link_token_s=0.0,
)


@pytest.mark.parametrize("law", ["deterministic", "exponential", "two kinds"])
def test_processor_sharing_does_not_see_the_distribution(law: str) -> None:
    """M/G/1-PS: the mean sojourn is E[S] / (1 - rho), and that of a call of length x is x / (1 - rho)."""
    rng, n, rho, quantum_s = np.random.default_rng(3), 60_000, 0.6, 0.01
    if law == "two kinds":
        service = np.where(rng.random(n) < 0.9, 0.5, 5.5)
    else:
        service = np.ones(n) if law == "deterministic" else rng.exponential(1.0, n)
    steps = np.maximum(np.rint(service / quantum_s), 1.0)
    traffic = single(np.ones(n), np.cumsum(rng.exponential(1.0 / rho, n)))
    traffic.calls["output"] = steps + 1.0
    # A step gives each sequence a token and lasts as long as there are sequences; prompts take no time to speak of.
    plan = ALONE._replace(
        mode=SPLIT,
        decode_engines=1,
        prefill=ONE_TOKEN_A_SECOND._replace(query=1e-9),
        decode=ONE_TOKEN_A_SECOND._replace(sequence=quantum_s, query=0.0),
        max_batch=500,
    )
    calls = simulate(plan, traffic).calls
    sojourn = calls["end_s"] - calls["arrival_s"]
    assert sojourn.mean() == pytest.approx(1.0 / (1.0 - rho), rel=0.06)
    if law == "two kinds":
        long = steps > 100.0
        ratio = sojourn[long].mean() / sojourn[~long].mean()
        assert ratio == pytest.approx(11.0, rel=0.06)


@pytest.mark.parametrize("machines", [1, 4, 10])
def test_machines_and_a_repairman(machines: int) -> None:
    """Closed: N machines that run for Z on average and wait for one repairman. With a = 1 / Z and repairs of 1 s,
    p0 = 1 / sum_k N! / (N - k)! a^k, and 1 - p0 are repaired per second."""
    rng, up_s, repairs = np.random.default_rng(7), 4.0, 20_000
    each = repairs // machines
    n = each * machines
    calls, rows = new_calls(n), new_sessions(machines)
    calls["session"] = np.repeat(np.arange(machines), each)
    calls["first"], calls["last"] = np.arange(n) % each == 0, np.arange(n) % each == each - 1
    work = rng.exponential(1.0, n)
    calls["prompt"] = calls["hit_tokens"] = calls["missed_tokens"] = work
    calls["output"], calls["gap_s"] = 1.0, rng.exponential(up_s, n)
    rows["first_call"], rows["start_s"] = np.arange(machines) * each, 0.0
    traffic = Traffic(calls, rows, np.arange(machines), np.arange(0), machines)
    until_s = 0.8 * each * (up_s + 1.0)  # before the first machine has had all its repairs
    found = simulate(ALONE._replace(mode=COLOCATED, window_end_s=until_s, horizon_s=until_s), traffic)
    terms = np.cumprod(np.concatenate([[1.0], np.arange(machines, 0, -1) / up_s]))
    assert found.throughput == pytest.approx(1.0 - 1.0 / terms.sum(), rel=0.03)


def flow_shop_s(first: list[int], second: list[int]) -> np.ndarray:
    """When each job leaves a shop of two machines: one prefills a token a second, the other decodes one a second."""
    traffic = single(np.array(first, float), np.zeros(len(first)))
    traffic.calls["output"] = np.array(second, float) + 1.0
    plan = ALONE._replace(
        mode=SPLIT,
        decode_engines=1,
        token_budget=1.0,  # one job at a time
        decode=ONE_TOKEN_A_SECOND._replace(step=1.0, query=0.0),
    )
    return np.asarray(simulate(plan, traffic).calls["end_s"])


def test_a_flow_shop_of_two_machines() -> None:
    """Johnson (1954): jobs (3,6) (5,2) (1,2) (6,6) (7,5) are all done after 24 in his order, never sooner."""
    jobs = [(3, 6), (5, 2), (1, 2), (6, 6), (7, 5)]
    best = [jobs[i] for i in (2, 0, 3, 4, 1)]
    assert flow_shop_s([a for a, _ in best], [b for _, b in best]).max() == pytest.approx(24.0, abs=1e-9)
    rng = np.random.default_rng(0)
    for _ in range(20):
        order = [jobs[i] for i in rng.permutation(5)]
        assert flow_shop_s([a for a, _ in order], [b for _, b in order]).max() > 24.0 - 1e-9
    first, second = rng.integers(1, 9, 200), rng.integers(1, 9, 200)
    left, free = np.cumsum(first), 0.0
    for end, ready, work in zip(flow_shop_s(list(first), list(second)), left, second, strict=True):
        free = max(free, float(ready)) + float(work)
        assert end == pytest.approx(free, abs=1e-6)
