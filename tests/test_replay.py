"""A trace replayed on a deployment: every call once, when it was recorded or when the one before it has ended."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from breakeven.studies.cli import _main
from breakeven.studies.deployment_file import read_deployment
from breakeven.studies.replay import replay_trace, trace_fields

DEPLOYMENT = {
    "deployment": {
        "topology": "chunked",
        "pool": {"accelerator": "h100-sxm", "tensor_parallel": 1, "replicas": 1, "max_batch": 64},
    },
    "study": {
        "llm": "llama-3.1-8b",
        "workload": "chat",
        "load": {"sessions_per_second": 2.0},
        "slo": {"ttft_s": 1.0, "tpot_s": 0.05},
    },
}
MAP = "start=at,first_token=first,end=end,input_tokens=in,output_tokens=out"
ROWS = "at,first,end,in,out\n10,10.5,11.5,800,101\n10.25,10.75,12,1600,51\n14,14.25,15,400,11\n"
SESSIONS = """session,call,input_tokens,output_tokens,think_time_s,api_time_s
a,0,1000,100,,2
a,1,1500,60,5,3
b,0,700,20,,1
"""


@pytest.fixture
def deployment(tmp_path: Path) -> str:
    path = tmp_path / "deployment.yaml"
    path.write_text(yaml.safe_dump(DEPLOYMENT))
    return str(path)


def test_calls_come_when_they_were_recorded(
    deployment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = tmp_path / "calls.csv", tmp_path / "out"
    trace.write_text(ROWS)
    assert _main(["simulate", deployment, "--trace", str(trace), "--column-map", MAP, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "3 sessions, 3 calls" in shown and "sessions start as recorded, over 4 s" in shown
    assert "recorded" in shown and "1.42 s" in shown  # the mean of 1.5, 1.75 and 1 s
    calls = pd.read_parquet(out / "calls.parquet").sort_values("arrival_s")
    np.testing.assert_allclose(calls["arrival_s"], [0.0, 0.25, 4.0], atol=1e-9)
    assert calls["prompt"].tolist() == [800, 1600, 400] and calls["output"].tolist() == [101, 51, 11]


def test_a_sessions_next_call_waits_for_the_last_one(deployment: str, tmp_path: Path) -> None:
    trace = tmp_path / "sessions.csv"
    trace.write_text(SESSIONS)
    given = trace_fields(trace, None, False, None, (), None)
    assert given is not None
    for rate in (None, 0.1):
        report, notes = replay_trace(read_deployment(deployment), given, rate)
        (run,) = report.replications.runs
        assert run.finished.all() and run.measured.all() and report.replications.calls == 3
        second = np.flatnonzero(run.calls["prompt"] == 1500)[0]
        assert run.calls["arrival_s"][second] == pytest.approx(run.calls["end_s"][second - 1] + 5.0)
        assert f"{rate or 2.0:.4g} per second" in notes[-1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rate", "2"], "--trace"),
        (["--trace", "nowhere.csv"], "no such file"),
        (["--trace", "FILE", "--column-map", "start"], "--column-map"),
        (["--trace", "FILE", "--column-map", "start=at,input_tokens=in,output_tokens=nothing"], "output_tokens"),
    ],
)
def test_refuses_bad_options(
    deployment: str, tmp_path: Path, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "calls.csv"
    trace.write_text(ROWS)
    assert _main(["simulate", deployment, *[str(trace) if x == "FILE" else x for x in options]]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
