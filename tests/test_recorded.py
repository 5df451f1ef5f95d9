"""A trace as a study's workload: what its calls need, moments by hand, the command line, errors of one line."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from breakeven.models.inputs import InputError
from breakeven.models.sessions import Sessions, sample_sessions, session_spec
from breakeven.models.traces import Options, fit_window, inferences, read_trace, trace_sessions
from breakeven.models.workload import recorded_workload, workload
from breakeven.studies.cli import _main
from breakeven.studies.deployment_file import anchored
from breakeven.studies.study import Study

DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "traces"
real = pytest.mark.skipif(not DATA.exists(), reason="the recorded traces are not on this machine")

HEADER = (
    "session,call,input_tokens,output_tokens,thinking_tokens,cached_prefix_tokens,think_time_s,api_time_s,turn_kind"
)
CALLS = f"""{HEADER}
a,0,1000,100,,0,,2,user
a,1,1500,60,20,1000,5,3,tool
a,2,1540,10,,1500,7,1,tool
a,3,900,30,,128,40,1,user
b,0,2000,0,,0,,1,user
b,1,2400,50,,2000,10,2,user
"""


@pytest.fixture
def trace(tmp_path: Path):
    path = tmp_path / "calls.csv"
    path.write_text(CALLS)
    return read_trace(path)


def test_what_a_prompt_is_made_of(trace):
    """Call 2 of a grew by 40 of the 60 tokens that call 1 wrote: its 20 of thinking are gone, 39 are kept at most."""
    s = trace_sessions(trace)
    assert s.observation_tokens.tolist() == [0, 400, 1, 1, 0, 399]
    assert s.previous_output_kept_tokens.tolist() == [0, 100, 39, 0, 0, 1]
    assert s.stripped.tolist() == [False, False, True, False, False, False]
    assert s.broken.tolist() == [False, False, False, True, False, False] == s.compacted.tolist()
    assert s.break_tokens.tolist() == [0, 0, 0, 772, 0, 0]
    assert s.output_tokens.tolist() == [100, 60, 10, 30, 1, 50]
    np.testing.assert_array_equal(s.gap_after_s, [5, 7, 40, np.nan, 10, np.nan])
    assert s.recomputed_tokens.tolist() == [1000, 500, 40, 772, 2000, 400]
    assert s.resident_tokens.tolist() == [1000, 400, 40, 772, 2000, 399]
    assert np.all(s.shared_tokens == 0.0) and "1 prefix breaks, from cached prefixes" in inferences(trace)


def test_a_shared_prefix_is_what_others_cached_first_or_as_given(trace):
    given = trace_sessions(trace, 500.0)
    assert np.all(given.shared_tokens == 500.0) and given.missed_tokens[0] == 500.0
    assert given.break_tokens[3] == 400.0  # the shared 500 outlive a break that leaves the session 128
    warm = replace(trace, cached_tokens=np.where(trace.first, 300.0, trace.cached_tokens))
    assert np.all(trace_sessions(warm).shared_tokens == 300.0)
    known = replace(trace, shared_tokens=np.full(6, 64.0))
    assert np.all(trace_sessions(known).shared_tokens == 64.0)


def test_a_services_count_does_not_tell_a_break_from_an_expired_cache(trace):
    cold = replace(trace, unlimited_cache=False, cached_tokens=np.zeros(6))
    s = trace_sessions(cold)
    assert s.broken.tolist() == [False, False, False, True, False, False]  # where the prompt shrank
    assert s.break_tokens[3] == 900.0


def test_unknown_gaps_are_the_median(trace):
    s = trace_sessions(replace(trace, gap_s=np.array([np.nan, 5, np.nan, 40, np.nan, 10])))
    np.testing.assert_array_equal(s.gap_after_s, [5, 10, 40, np.nan, 10, np.nan])
    none = trace_sessions(replace(trace, gap_s=np.full(6, np.nan)))
    assert none.gap_after_s[0] == 0.0


def test_a_window_compacts_what_passes_it(trace):
    """1,500 + 60 pass 1,280: the prompt is compacted to half of what is left, 610, and grows by 40 from there."""
    s, cut = fit_window(trace_sessions(trace), 1280)
    assert s.prompt_tokens.tolist() == [1000, 610, 650, 900, 1279, 615]
    assert cut == 3 and s.compacted.tolist() == [False, True, False, True, False, True]
    assert s.break_tokens.tolist() == [0, 610, 0, 772, 0, 615]
    assert np.all(s.prompt_tokens + s.output_tokens <= 1280) and np.all(s.recomputed_tokens <= s.missed_tokens)
    whole = trace_sessions(trace)
    assert fit_window(whole, 10_000)[0] is whole
    with pytest.raises(InputError, match="shared_prefix_tokens"):
        fit_window(trace_sessions(trace, 990.0), 1000)


def test_moments_of_a_small_trace_by_hand(trace):
    w, s = recorded_workload(trace_sessions(trace), 2.0), trace_sessions(trace)
    assert float(w.calls_per_session) == 3.0 and float(w.arrival_cv2) == 4.0
    assert float(w.mean_prompt) == pytest.approx(s.prompt_tokens.mean())
    assert float(w.mean_output) == pytest.approx(251 / 6)
    assert float(w.resident.mean_tokens) == pytest.approx(np.mean([1000, 400, 40, 772, 2000, 399]))
    assert float(w.recomputed.mean_tokens) == pytest.approx(np.mean([1000, 500, 40, 772, 2000, 400]))
    assert float(w.gap_mean_s) == pytest.approx(15.5) and float(w.gap_var_s) == pytest.approx(203.25, rel=1e-3)
    assert float(w.idle_tokens) == pytest.approx(np.mean([1100, 1560, 1550, 2001]))
    assert np.sum(w.session_weight * w.session_calls) == pytest.approx(3.0, rel=1e-3)
    at = np.log(2.0 * 1552.75 * np.mean([5, 7, 8, 8]) + 1690.0 * 8.0)  # T = 8 s: the gaps of 10 and 40 s miss
    assert np.interp(at, w.cache_work, w.cache_miss) == pytest.approx(0.5, abs=0.01)


def test_sampled_sessions_give_the_same_workload_either_way():
    spec = session_spec("coding-agent")
    sampled, recorded = workload(spec, 131_072, sessions=2000), sample_sessions(spec, 2000, 0, 131_072)
    other = recorded_workload(recorded)
    for field in fields(sampled):
        one, two = getattr(sampled, field.name), getattr(other, field.name)
        if one is None or field.name.startswith(("gap", "cache")):  # of the law there, of the sample here
            continue
        if field.name in ("resident", "recomputed", "missed"):
            one, two = one.moments, two.moments
        np.testing.assert_allclose(one, two, rtol=1e-5)
    assert float(other.gap_mean_s) == pytest.approx(float(sampled.gap_mean_s), rel=0.05)


@real
def test_moments_of_the_recorded_sessions():
    """New prefill with the prefix cached is the trace's own count, but for blocks and shared prefixes: 3,205 a turn."""
    trace = read_trace(DATA / "weka_claude_code_sessions.csv.gz")
    s = trace_sessions(trace)
    w, later = recorded_workload(s), ~s.first
    measured = (trace.prompt_tokens - trace.cached_tokens)[later].mean()
    assert measured == pytest.approx(3_205, abs=1)
    assert s.recomputed_tokens[later].mean() == pytest.approx(measured, rel=0.03)
    assert float(w.calls_per_session) == pytest.approx(48_658 / 710)
    assert float(w.mean_prompt) == pytest.approx(trace.prompt_tokens.mean(), rel=1e-5)
    assert float(w.gap_mean_s) == pytest.approx(np.nanmean(s.gap_after_s), rel=1e-4)
    assert np.mean(s.broken[later]) == pytest.approx(0.018, abs=0.001)
    assert np.sum(s.break_tokens) / np.sum(s.recomputed_tokens[later]) == pytest.approx(0.48, abs=0.01)  # published


@real
def test_every_format_makes_a_workload():
    for name in ("mooncake_toolagent_slice.jsonl", "AzureLLMInferenceTrace_code.csv", "weka_original_samples"):
        sessions = trace_sessions(read_trace(DATA / name))
        columns = [column for f in fields(Sessions) if (column := getattr(sessions, f.name)) is not None]
        assert all(len(column) == len(sessions.session) for column in columns)
        assert np.isfinite(float(recorded_workload(fit_window(sessions, 131_072)[0]).mean_need2))


STUDY: dict[str, Any] = {
    "name": "recorded",
    "llm": "llama-3.1-8b",
    "workload": {"trace": "calls.csv", "format": "calls"},
    "load": {"calls_per_second": 1},
    "slo": {"ttft_s": 1, "tpot_s": 0.05, "target": 0.9},
    "space": {"topologies": "colocated", "accelerators": "h100-sxm", "replicas": [1, 2], "max_batch": 64},
}


def study(folder: Path, workload: Any, *changes: str) -> Study:
    return Study.parse({**STUDY, "workload": workload}, str(folder / "study.yaml"), changes)


def test_a_study_of_a_trace(trace, tmp_path):
    made = study(tmp_path, STUDY["workload"], "workload.shared_prefix_tokens=100")
    assert made.workload_name == "calls.csv"
    assert float(made.workload.sessions_per_second or 0.0) == pytest.approx(1 / 3)
    assert float(made.workload.shared_prefix_tokens) == 100.0
    assert anchored(made.data, made.file)["workload"]["trace"] == str(tmp_path / "calls.csv")


@pytest.mark.parametrize(
    ("workload", "match"),
    [
        ({"trace": "none.csv"}, r"study.yaml: workload.trace = 'none.csv': no such file"),
        ({"trace": 3}, "workload.trace = 3: a trace file"),
        ({"trace": "calls.csv", "fromat": "calls"}, "workload.fromat .* did you mean format"),
        ({"trace": "calls.csv", "format": "cals"}, "workload.format = 'cals': unknown; did you mean calls"),
        ({"trace": "calls.csv", "format": 5}, "workload.format = 5: a format's name"),
        ({"trace": "calls.csv", "format": "azure"}, "6 malformed of 6"),
        ({"trace": "calls.csv", "skip_bad_rows": 1}, "workload.skip_bad_rows = 1: true or false"),
        ({"trace": "calls.csv", "columns": {"tokens": "x"}}, "workload.columns = 'tokens': unknown"),
        ({"trace": "calls.csv", "columns": [1]}, r"workload.columns = \[1\]: a mapping"),
        ({"trace": "calls.csv", "block_tokens": 0}, "workload.block_tokens = 0: a whole number"),
        ({"trace": "calls.csv", "shared_prefix_tokens": -1}, "workload.shared_prefix_tokens = -1: a number"),
        ({"trace": "calls.csv", "preset": "chat"}, "workload.preset = 'chat': unknown field"),
        ("fit.yaml", "fit.yaml: cannot be read|fit.yaml'?: cannot be read"),
    ],
)
def test_bad_traces_in_a_study_are_one_line(trace, tmp_path, capfd, workload, match):
    (tmp_path / "study.yaml").write_text(yaml.safe_dump({**STUDY, "workload": workload}))
    with pytest.raises(InputError, match=match):
        Study.load(tmp_path / "study.yaml")
    assert _main(["run", str(tmp_path / "study.yaml"), "--out", str(tmp_path / "out")]) == 2
    said = capfd.readouterr()
    assert said.err.startswith("breakeven: ") and said.err.count("\n") == 1 and not said.out


def test_fit_from_the_command_line_and_a_study_of_it(trace, tmp_path, capfd):
    out = tmp_path / "fit.yaml"
    arguments = ["catalog", "workloads", "--fit", str(tmp_path / "calls.csv"), "--format", "calls", "--out", str(out)]
    assert _main(arguments) == 0
    said = capfd.readouterr().out
    assert "2 sessions, 6 calls" in said and "calls_per_session" in said and "mean prompt tokens" in said
    assert (tmp_path / "fit.png").stat().st_size > 10_000
    written = yaml.safe_load(out.read_text())
    assert written["prefix_break_probability"] == 0.25 and written["human_gap_s"]["quantiles"]["x"][-1] == 40.0
    made = study(tmp_path, "fit.yaml", "workload.tool_gap_s=3")
    assert made.workload_name == "fit" and made.session_spec.tool_gap_s.mean() == 3.0
    assert float(made.workload.calls_per_session) == pytest.approx(3.0, rel=0.2)
    assert anchored(made.data, made.file)["workload"]["preset"] == str(out)


def test_a_run_of_a_trace_says_what_was_inferred(trace, tmp_path, capfd):
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(STUDY))
    assert _main(["run", str(tmp_path / "study.yaml"), "--out", str(tmp_path / "out")]) in (0, 1)
    resolved = json.loads((tmp_path / "out" / "study.json").read_text())["resolved"]["workload"]
    assert resolved["name"] == "calls.csv" and "1 prefix breaks, from cached prefixes" in resolved["recorded"]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["workloads", "--fit", "none"], "no such file"),
        (["workloads", "--fit", "calls.csv", "--option", "time_unit=h"], "time_unit"),
        (["workloads", "--fit", "calls.csv", "--option", "x"], "PATH=VALUE"),
        (["workloads", "--fit", "calls.csv", "--out", "/proc/nothing/fit.yaml"], "cannot be written"),
        (["llms", "--fit", "calls.csv"], "catalog workloads --fit TRACE"),
        (["workloads", "--out", "x"], "catalog workloads --fit TRACE"),
    ],
)
def test_bad_fit_arguments(trace, tmp_path, monkeypatch, capfd, arguments, match):
    monkeypatch.chdir(tmp_path)
    assert _main(["catalog", *arguments]) == 2
    said = capfd.readouterr().err
    assert match in said and said.count("\n") == 1


def test_unusual_options(tmp_path):
    with pytest.raises(InputError, match="block_tokens"):
        path = tmp_path / "x"
        path.write_text(CALLS)
        read_trace(path, None, Options(block_tokens=0))
