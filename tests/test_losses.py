"""Replicas that a pool may lose: nothing changes where none may, and what is left is the same deployment with fewer."""

import dataclasses

import numpy as np
import pytest

from breakeven.models.serving import attained_under_stress, evaluate
from breakeven.optimizer.evaluator import REASONS, reasons
from breakeven.studies.deployment_file import Deployed
from breakeven.studies.explain import explain

SPACE = {
    "topologies": ["colocated", "pd"], "accelerators": "h100-sxm", "tensor_parallel": 8, "pipeline_parallel": 1,
    "max_batch": 64, "token_budget": 8192, "weights": "fp8", "kv": "fp8", "links": "ib-ndr-400", "routing": "affinity",
    "replicas": [1, 2, 3, 4, 5, 6],
}  # fmt: skip
RATE = "load.sessions_per_second=0.03"


@pytest.fixture(scope="module")
def study(make_study):
    return make_study(RATE, "limits.lost_replicas=1", **SPACE)


def test_a_loss_is_the_same_deployment_with_a_replica_less(study, make_study):
    plain = make_study(RATE, **SPACE)
    assert plain.slo.losses is None and study.slo.losses is not None
    ids = np.arange(study.space.size)
    usual, found = plain.evaluator()(ids), study.evaluator()(ids)
    for name in ("cost_per_hour_usd", "slo_attainment", "ttft_mean_s", "utilization_decode"):
        assert found[name] == pytest.approx(usual[name], rel=1e-5, abs=1e-6), name
    assert "lost_attainment" not in usual and (usual["excess_loss"] == -1.0).all()
    joint = usual["slo_attainment"][:6]  # of 1 to 6 replicas of one pool
    assert found["lost_attainment"][:6] == pytest.approx(np.append(0.0, joint[:-1]), abs=1e-5)
    split = usual["slo_attainment"][6:].reshape(6, 6)  # by replicas of prefill, of decode
    fewer = np.pad(split, ((1, 0), (1, 0)))
    expected = np.minimum(fewer[:-1, 1:], fewer[1:, :-1])
    assert found["lost_attainment"][6:].reshape(6, 6) == pytest.approx(expected, abs=1e-4)
    # A spare costs: the cheapest that survives has more than the cheapest that need not.
    cheapest = [c["cost_per_hour_usd"][c["meets_slo"]].min() for c in (usual, found)]
    assert cheapest[1] > cheapest[0] and not (found["feasible"] & ~usual["feasible"]).any()
    assert (found["feasible"] == (usual["feasible"] & (found["lost_attainment"] >= 0.9))).all()
    one = np.flatnonzero(usual["feasible"] & ~found["feasible"])[:1]
    assert reasons({k: v[one] for k, v in found.items()}).tolist() == [REASONS["loss"]]


def test_more_losses_are_never_better(study):
    deployment = study.evaluator().deployment(np.arange(study.space.size), study.evaluator().block)
    left = []
    for lost in (1.0, 2.0):
        losses = dataclasses.replace(study.slo.losses, replicas=np.float32(lost))
        slo = dataclasses.replace(study.slo, losses=losses)
        left.append(np.asarray(attained_under_stress(deployment, study.workload, slo, study.catalog)[0]))
    usual = np.asarray(evaluate(deployment, study.workload, study.slo, study.catalog).slo_attainment)
    assert left[0].shape == (2, len(usual))
    assert (left[1] <= left[0] + 1e-3).all() and (left[0] <= usual + 1e-3).all()


def test_explained_by_pool(make_study):
    study = make_study(RATE, "limits.lost_replicas=1", **{**SPACE, "topologies": "pd", "replicas": [4]})
    section = explain(Deployed(study, "one")).sections["SLO attainment with 1 of a pool's replicas lost"]
    assert list(section) == ["prefill", "decode"] and all(0.0 <= value <= 1.0 for value in section.values())
