"""Waits of a call at an operating point."""

import numpy as np

from breakeven.models.waits import _link


def test_a_cache_that_is_sent_faster_than_the_next_is_computed_is_not_waited_for(make_study):
    """Prompts leave an engine one by one: only over a link as busy as it, or nearly, do their caches queue."""
    slow = {"like": "ib-ndr-400", "name": "slow", "gbs": 0.7}
    study = make_study(
        "workload=chat", "load.sessions_per_second=1", topologies="pd", accelerators="h200-sxm", tensor_parallel=8,
        pipeline_parallel=1, replicas=4, max_batch=256, token_budget=8192, weights="fp8", kv="fp8",
        links=["nvlink4", slow], routing="affinity",
    )  # fmt: skip
    evaluator = study.evaluator()
    busy, probability = [], []
    for candidate in range(2):
        found = evaluator.performance(candidate, 1.0)[2]
        (behind, _), use, _ = _link(found.point, found.pools)
        busy.append(float(np.asarray(use)[0]))
        probability.append(float(np.asarray(behind.probability)[0]))
    assert busy[0] < 0.01 and probability[0] < 1e-3 * busy[0]
    assert busy[1] > 0.1 and 0.2 * busy[1] < probability[1] < 1.2 * busy[1]
