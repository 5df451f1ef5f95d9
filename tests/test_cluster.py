"""Ranges judged by a Dask cluster come to what one process finds."""

import numpy as np
import pytest

from breakeven.models.inputs import InputError
from breakeven.optimizer.cluster import Cluster
from breakeven.optimizer.exhaustive import Task, exhaustive
from breakeven.optimizer.search import Found

distributed = pytest.importorskip("distributed", reason="Dask is not installed")

OBJECTIVES = ("cost_per_hour_usd", "slo_attainment")
# A worker pauses at 80 % of its memory limit, and here it is the test process, whatever that holds.
LOCAL = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": None, "memory_limit": None}
pytestmark = pytest.mark.filterwarnings("ignore")


def silent(done: int, total: int) -> None:
    del done, total


def test_a_cluster_finds_what_one_process_finds(make_study):
    small = make_study(
        topologies=["colocated", "pd"],
        accelerators=["h100-sxm", "b200-sxm"],
        replicas=[2, 4],
        kv="fp8",
        routing="affinity",
    )
    task = Task(small.evaluator(), OBJECTIVES, OBJECTIVES[0])
    alone = exhaustive(task, Found(OBJECTIVES), silent)
    with distributed.LocalCluster(**LOCAL) as local:
        shared = exhaustive(task, Found(OBJECTIVES), silent, pool=Cluster(local.scheduler_address))
    assert shared.state() == alone.state()
    assert np.array_equal(shared.rows()["candidate"], alone.rows()["candidate"])


def test_a_missing_scheduler_is_one_line():
    with pytest.raises(InputError, match="no Dask scheduler"):
        Cluster("tcp://127.0.0.1:1", timeout_s=0.5)
