"""Peaks of prefill and of decode: each is the same deployment under another mix, and the target holds in both."""

import numpy as np
import pytest

from breakeven.models.inputs import InputError
from breakeven.optimizer.evaluator import REASONS, reasons
from breakeven.studies.deployment_file import Deployed
from breakeven.studies.explain import explain

SPACE = {
    "topologies": ["colocated", "pd"], "accelerators": "h100-sxm", "tensor_parallel": 8, "pipeline_parallel": 1,
    "max_batch": 64, "token_budget": 8192, "weights": "fp8", "kv": "fp8", "links": "ib-ndr-400", "routing": "affinity",
    "replicas": [1, 2, 3, 4, 5, 6],
}  # fmt: skip
RATE = "load.sessions_per_second=0.03"
PEAKS = {"prefill": 1.6, "decode": 1.4}


@pytest.fixture(scope="module")
def found(make_study):
    study = make_study(RATE, f"load.peaks={PEAKS}", **SPACE)
    return study.evaluator()(np.arange(study.space.size))


def at(make_study, **scale):
    study = make_study(RATE, f"workload.scale={scale}", **SPACE)
    return study.evaluator()(np.arange(study.space.size))


def test_a_peak_is_the_same_deployment_under_more_prefill_or_more_decode(make_study, found):
    usual = at(make_study)
    prefill = at(make_study, first_prompt_tokens=1.6, growth_tokens=1.6)
    decode = at(make_study, output_tokens=1.4)
    for name in ("cost_per_hour_usd", "slo_attainment", "ttft_mean_s"):
        assert found[name] == pytest.approx(usual[name], rel=1e-5, abs=1e-6), name
    worst = np.minimum(prefill["slo_attainment"], decode["slo_attainment"])
    assert found["peak_attainment"] == pytest.approx(worst, abs=1e-4)
    assert (found["feasible"] == (usual["feasible"] & (worst >= 0.9))).all()
    fails = np.flatnonzero(usual["feasible"] & ~found["feasible"])[:1]
    assert reasons({k: v[fails] for k, v in found.items()}).tolist() == [REASONS["peak"]]


def test_pools_apart_are_sized_for_peaks_of_their_own(make_study):
    """More prefill engines than a peak of decode asks for do not help it: only decode engines do."""
    study = make_study(RATE, "load.peaks={decode: 1.8}", **{**SPACE, "topologies": "pd"})
    attained = study.evaluator()(np.arange(study.space.size))["peak_attainment"].reshape(6, 6)  # by prefill, by decode
    assert np.ptp(attained[3:, 5]) < 0.03 and np.ptp(attained[5, :]) > 0.2


def test_without_peaks_nothing_changes(make_study):
    plain, even = make_study(RATE, **SPACE), make_study(RATE, "load.peaks={prefill: 1}", **SPACE)
    assert plain.workload.peaks is None and even.workload.peaks is None


def test_explained_and_refused(make_study):
    study = make_study(RATE, f"load.peaks={PEAKS}", **{**SPACE, "topologies": "pd", "replicas": [4]})
    section = explain(Deployed(study, "one")).sections["SLO attainment at peaks"]
    assert list(section) == ["1.6 times the tokens of prefill", "1.4 times the tokens of decode"]
    with pytest.raises(InputError, match=r"load\.peaks\.prefill = 0\.5"):
        make_study(RATE, "load.peaks={prefill: 0.5}", **SPACE)
