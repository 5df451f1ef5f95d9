"""Importers: each format by a sample written here, with exact expectations; malformed files; real files if present."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from breakeven.models.inputs import InputError
from breakeven.models.traces import FORMATS, Options, Trace, read_trace, trace_sessions

DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "traces"
real = pytest.mark.skipif(not DATA.exists(), reason="the recorded traces are not on this machine")


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


MOONCAKE = lines(
    {"timestamp": 0, "input_length": 1300, "output_length": 10, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 1100, "output_length": 20, "hash_ids": [0, 3, 4]},
    {"timestamp": 9000, "input_length": 1500, "output_length": 30, "hash_ids": [0, 1, 5]},
    {"timestamp": 12000, "input_length": 1400, "output_length": 5, "hash_ids": [0, 1, 6]},
)
WEKA: dict[str, Any] = {
    "id": "one",
    "block_size": 64,
    "tool_tokens": 100,
    "system_tokens": 28,
    "requests": [
        {"t": 0.0, "in": 200, "out": 10, "hash_ids": [1, 2, 3, 4], "api_time": 2.5, "input_types": ["text"]},
        {
            "t": 4.0,
            "type": "subagent",
            "tool_tokens": 64,
            "requests": [{"t": 0.0, "in": 150, "out": 4, "hash_ids": [7, 8, 9], "api_time": 1.0}],
        },
        {
            "t": 9.0,
            "in": 300,
            "out": 20,
            "hash_ids": [1, 2, 3, 5, 6],
            "api_time": 3.0,
            "think_time": 6.0,
            "input_types": ["tool_result"],
        },
    ],
}
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
)
BURSTGPT = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,a,2,ChatGPT,100,20,120,Conversation log\n9,b,1,ChatGPT,50,0,50,Conversation log\n"
    "30,a,4,GPT-4,180,30,210,Conversation log\n"
)


def span(name: str, start: float, end: float, **attributes: Any) -> dict[str, Any]:
    return {
        "trace_id": "t1",
        "startTimeUnixNano": str(int(1.7e18 + start * 1e9)),
        "endTimeUnixNano": str(int(1.7e18 + end * 1e9)),
        "attributes": {"gen_ai.operation.name": name, **{f"gen_ai.{k}": v for k, v in attributes.items()}},
    }


SPANS = [
    span("invoke_agent", 0, 20),
    span("chat", 0, 2, **{"usage.input_tokens": 100, "usage.output_tokens": 30, "usage.reasoning.output_tokens": 12}),
    span("execute_tool", 2, 5),
    span("execute_tool", 3, 6),
    span(
        "chat", 7, 8, **{"usage.prompt_tokens": 150, "usage.completion_tokens": 5, "usage.cache_read_input_tokens": 96}
    ),
]
OTEL = lines(*SPANS)
TRACELAB = lines(
    *(
        {
            "session_id": "s",
            "round_index": k,
            "input_tokens_total": 1000 + 200 * k,
            "prefix_tokens": 900 * k,
            "output_tokens": 50,
            "reasoning_output_tokens": None,
            "first_input_event_type": "tool_result" if k else "user_message",
            "timing_events": [
                {
                    "event_type": "tool_result" if k else "user_message",
                    "timestamp": f"2026-06-01T05:40:{20 * k:02}.500Z",
                },
                {"event_type": "text", "timestamp": f"2026-06-01T05:40:{20 * k + 10:02}.000Z"},
            ],
            "tools": [{"emitted_at": "2026-06-01T05:40:10.000Z", "tool_wall_latency_ms": 4000}] if k == 0 else [],
        }
        for k in (1, 0)
    )
)
CALLS = (
    "session,call,t_s,input_tokens,output_tokens,cached_prefix_tokens,think_time_s,api_time_s,turn_kind\n"
    "a,1,7.0,1500,20,1000,5.0,3.0,tool\na,0,0.0,1000,40,0,0.0,2.0,user\nb,0,0.0,400,9,0,,1.0,user\n"
)
LITELLM = lines(
    {
        "request_id": "r1",
        "startTime": "2026-01-01T00:00:00Z",
        "endTime": "2026-01-01T00:00:04Z",
        "prompt_tokens": 500,
        "completion_tokens": 20,
        "metadata": {"session_id": "x", "usage_object": {"prompt_tokens_details": {"cached_tokens": 128}}},
    },
    {"startTime": "2026-01-01T00:00:10Z", "prompt_tokens": 600, "completion_tokens": 0, "end_user": "x"},
    {"startTime": "2026-01-01T00:00:10Z", "prompt_tokens": 600, "completion_tokens": 3, "end_user": "x"},
)
LANGFUSE = lines(
    {
        "id": "o1",
        "traceId": "t",
        "sessionId": "s",
        "type": "GENERATION",
        "startTime": "2026-01-01T00:00:00Z",
        "endTime": "2026-01-01T00:00:02Z",
        "usageDetails": {"input": 10, "output": 5, "cache_read_input_tokens": 80, "output_reasoning_tokens": 2},
    },
    {"type": "SPAN", "startTime": "2026-01-01T00:00:02Z"},
    {"sessionId": "s", "type": "TOOL", "startTime": "2026-01-01T00:00:02Z", "endTime": "2026-01-01T00:00:05Z"},
    {
        "sessionId": "s",
        "type": "GENERATION",
        "startTime": "2026-01-01T00:00:06Z",
        "endTime": "2026-01-01T00:00:07Z",
        "usageDetails": {"input": 20, "output": 6},
    },
)
SAMPLES = {
    "mooncake": MOONCAKE,
    "weka": json.dumps(WEKA),
    "azure": AZURE,
    "burstgpt": BURSTGPT,
    "otel": OTEL,
    "tracelab": TRACELAB,
    "calls": CALLS,
    "litellm": LITELLM,
    "langfuse": LANGFUSE,
}


def read(folder: Path, text: str | bytes, format: str | None = None, **options: Any) -> Trace:
    path = folder / "trace"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_trace(path, format, Options(**options))


def same(found: Any, *expected: float) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-6)  # a time since the epoch is good to 1 us


@pytest.mark.parametrize("name", SAMPLES)
def test_the_format_is_told_from_the_file(tmp_path, name):
    trace = read(tmp_path, SAMPLES[name])
    assert (trace.reading.format, trace.reading.guessed) == (name, True)
    assert "guessed" in trace.reading.lines()[0]
    assert not read(tmp_path, SAMPLES[name], name).reading.guessed


def test_mooncake(tmp_path):
    """Call 3 extends both complete blocks of call 1; call 4 does as well, but call 1 is continued already."""
    trace = read(tmp_path, MOONCAKE)
    same(trace.session, 0, 0, 1, 2)
    same(trace.prompt_tokens, 1300, 1500, 1100, 1400)
    same(trace.cached_tokens, 0, 1024, 512, 1024)
    same(trace.gap_s, np.nan, 9, np.nan, np.nan)
    same(trace.start_s, 0, 9, 3, 12)
    assert trace.hit_ratio == pytest.approx(2560 / 5300)


def test_mooncake_options(tmp_path):
    row = {"timestamp": 2, "input_length": 40, "output_length": 1, "hash_ids": [5, 6, 7]}
    trace = read(tmp_path, lines(row, {**row, "timestamp": 4, "session_id": "n"}), block_tokens=16, time_unit="s")
    same(trace.start_s, 2, 4)
    same(trace.cached_tokens, 0, 40)  # a block of 16, but no more than the prompt
    with pytest.raises(InputError, match=r"3 hash_ids for 40 tokens, not 1: is a block 512 tokens\?"):
        read(tmp_path, lines(row))
    with pytest.raises(InputError, match="time_unit = 'h'"):
        read(tmp_path, lines(row), time_unit="h")


def test_weka(tmp_path):
    trace = read(tmp_path, json.dumps(WEKA))
    same(trace.session, 0, 0, 1)
    same(trace.prompt_tokens, 200, 300, 150)
    same(trace.cached_tokens, 0, 192, 0)
    same(trace.shared_tokens, 128, 128, 64)
    same(trace.gap_s, np.nan, 6, np.nan)
    same(trace.person, 1, 0, np.nan)
    assert "1 sub-agents as sessions of their own" in trace.reading.inferred
    alone = read(tmp_path, json.dumps(WEKA, indent=1), subagents=False)
    assert alone.sessions == 1 and "subagents: false" in alone.reading.left_out[0]


def test_weka_folder(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.json").write_text(json.dumps(WEKA))
    assert read_trace(tmp_path).sessions == 4
    (tmp_path / "c.json").write_text('{"requests": [')
    with pytest.raises(InputError, match=r"1 malformed of 7.*c\.json: no JSON"):
        read_trace(tmp_path)
    assert read_trace(tmp_path, None, Options(skip_bad_rows=True)).sessions == 4
    for file in tmp_path.glob("*.json"):
        file.unlink()
    with pytest.raises(InputError, match=r"a folder with \*\.json files"):
        read_trace(tmp_path)


def test_azure(tmp_path):
    trace = read(tmp_path, AZURE)
    same(trace.session, 0, 1)
    same(trace.prompt_tokens, 4808, 3180)
    same(trace.start_s - trace.start_s[0], 0, 0.052)
    assert any("every call is one of its own" in text for text in trace.reading.inferred)


def test_burstgpt(tmp_path):
    trace = read(tmp_path, BURSTGPT)
    same(trace.session, 0, 0)
    same(trace.gap_s, np.nan, 23)  # 30 - (5 + 2)
    assert trace.reading.left_out == ("1 failed calls, without output",)
    single = read(tmp_path, "Timestamp,Model,Request tokens,Response tokens\n1,m,5,6\n2,m,7,8\n")
    same(single.session, 0, 1)


@pytest.mark.parametrize("text", [OTEL, lines({"trace_id": "t1", "spans": SPANS})], ids=["span a line", "trace a line"])
def test_otel(tmp_path, text):
    """Tools ran from 2 to 6 s: 4 s before the second call, though two ran at once."""
    trace = read(tmp_path, text)
    same(trace.session, 0, 0)
    same(trace.prompt_tokens, 100, 150)
    same(trace.thinking_tokens, 12, np.nan)
    same(trace.cached_tokens, np.nan, 96)
    np.testing.assert_allclose(trace.gap_s, [np.nan, 5], atol=1e-5)
    np.testing.assert_allclose(trace.tool_time_s, [np.nan, 4], atol=1e-5)
    same(trace.person, 1, 0)
    assert any(text.startswith("turns:") for text in trace.reading.inferred)


def test_otel_export(tmp_path):
    """OTLP's own nesting and attribute list; the conversation names the session."""
    usage = {"gen_ai.usage.input_tokens": {"intValue": "8"}, "gen_ai.usage.output_tokens": {"intValue": "2"}}
    attributes = [{"key": k, "value": v} for k, v in usage.items()]
    attributes.append({"key": "gen_ai.conversation.id", "value": {"stringValue": "c"}})
    inner = [{"startTimeUnixNano": str(i), "endTimeUnixNano": str(i), "attributes": attributes} for i in (1, 2)]
    trace = read(tmp_path, lines({"resourceSpans": [{"scopeSpans": [{"spans": inner}]}]}))
    same(trace.session, 0, 0)
    same(trace.prompt_tokens, 8, 8)
    assert "sessions" in trace.reading.read


def test_tracelab(tmp_path):
    trace = read(tmp_path, TRACELAB)
    same(trace.prompt_tokens, 1000, 1200)
    same(trace.cached_tokens, 0, 900)
    same(trace.duration_s, 9.5, 9.5)
    same(trace.gap_s, np.nan, 10.5)
    same(trace.tool_time_s, np.nan, 4)
    same(trace.person, 1, 0)


def test_calls(tmp_path):
    """Rows may stand in any order."""
    trace = read(tmp_path, gzip.compress(CALLS.encode()))
    same(trace.session, 0, 0, 1)
    same(trace.prompt_tokens, 1000, 1500, 400)
    same(trace.gap_s, np.nan, 5, np.nan)
    same(trace.person, 1, 0, 1)


def test_litellm(tmp_path):
    trace = read(tmp_path, LITELLM)
    same(trace.prompt_tokens, 500, 600)
    same(trace.cached_tokens, 128, np.nan)
    same(trace.gap_s, np.nan, 6)
    packed = "startTime,endTime,prompt_tokens,completion_tokens,metadata\n"
    packed += '2026-01-01 00:00:00,2026-01-01 00:00:01,7,8,"{""session_id"": ""q""}"\n'
    assert read(tmp_path, packed).reading.read == ("session", "start", "end", "input tokens", "output tokens")


def test_langfuse(tmp_path):
    """Its counts do not overlap: 10 + 80 cached, 5 + 2 thought."""
    trace = read(tmp_path, LANGFUSE)
    same(trace.prompt_tokens, 90, 20)
    same(trace.output_tokens, 7, 6)
    same(trace.thinking_tokens, 2, np.nan)
    same(trace.tool_time_s, np.nan, 3)
    same(trace.gap_s, np.nan, 4)


def test_a_table_of_ones_own(tmp_path):
    text = "chat,at,in,out\nx,1000,5,6\nx,4000,9,2\n"
    columns = {"session": "chat", "start": "at", "input_tokens": "in", "output_tokens": "out"}
    trace = read(tmp_path, text, columns=tuple(columns.items()), time_unit="ms")
    same(trace.prompt_tokens, 5, 9)
    same(trace.gap_s, np.nan, 3)
    with pytest.raises(InputError, match="did you mean input_tokens"):
        read(tmp_path, text, columns=(("input_token", "in"),))
    with pytest.raises(InputError, match="a map from input_tokens"):
        read(tmp_path, text, "table")


def test_overlapping_calls_have_no_gap(tmp_path):
    trace = read(tmp_path, BURSTGPT.replace("5,a,2,", "5,a,60,"))
    same(trace.gap_s, np.nan, 0)
    assert any("1 calls start before" in text for text in trace.reading.inferred)


BAD = {
    "mooncake": (MOONCAKE + '{"timestamp": 1, "input_\n' + lines([1]), "line 5: no JSON.*line 6: no object"),
    "calls": (
        CALLS + "c,0,0,many,3,,,,\nc,0,0,5,-3,,,,\n",
        r"line 5: input_tokens = 'many'.*line 6: output_tokens = '-3'",
    ),
    "otel": (
        OTEL + lines(span("chat", 1, 0, **{"usage.input_tokens": 1, "usage.output_tokens": 1})),
        "line 6: ends bef",
    ),
    "tracelab": (TRACELAB + lines({"session_id": 4}), "line 3: session_id is missing"),
    "azure": (AZURE + "yesterday,1,1\n", "line 4: start = 'yesterday', not a time"),
    "burstgpt": (BURSTGPT + "1,2,3,4,5,6,7,8,9,10\n", "line 5: 10 cells under 8 headings"),
}


@pytest.mark.parametrize("name", BAD)
def test_malformed_rows_are_named_and_can_be_skipped(tmp_path, name):
    text, match = BAD[name]
    with pytest.raises(InputError, match=match) as caught:
        read(tmp_path, text, name)
    assert "\n" not in str(caught.value) and "skip_bad_rows" in str(caught.value)
    good, skipped = read(tmp_path, SAMPLES[name], name), read(tmp_path, text, name, skip_bad_rows=True)
    same(skipped.prompt_tokens, *good.prompt_tokens)
    assert "malformed rows" in skipped.reading.left_out[0]


def test_only_the_first_bad_rows_are_quoted(tmp_path):
    with pytest.raises(InputError, match=r"'50 malformed of 54': line 5: .*line 7: [^;]*; …; mend"):
        read(tmp_path, MOONCAKE + "x\n" * 50)
    with pytest.raises(InputError, match="no row is usable"):
        read(tmp_path, '{"input_length": 0}\n', skip_bad_rows=True)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"", "cannot be told from the file"),
        (b"hello\nworld\n", "cannot be told from the file"),
        (b"\xff\xfe{", "not UTF-8"),
        (gzip.compress(MOONCAKE.encode() * 50)[:-12], "cut short or damaged"),
        (AZURE.splitlines()[0].encode(), "no call with token counts"),
    ],
)
def test_files_of_no_use(tmp_path, text, match):
    with pytest.raises(InputError, match=match):
        read(tmp_path, text)


def test_missing_files_and_unknown_formats(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_trace(tmp_path / "none")
    with pytest.raises(InputError, match="did you mean mooncake"):
        read(tmp_path, MOONCAKE, "moncake")
    with pytest.raises(InputError, match="cannot be read"):
        read_trace(tmp_path, "mooncake")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300), st.sampled_from([None, *sorted(FORMATS)]), st.booleans())
def test_any_bytes_are_a_trace_or_an_input_error(tmp_path, data, name, skip):
    try:
        trace_sessions(read(tmp_path, data, name, skip_bad_rows=skip))
    except InputError as error:
        assert "\n" not in str(error)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(sorted(SAMPLES)),
    st.integers(0, 1500),
    st.sampled_from(["", "0", "-1", "null", '"', "{", "[", "}", ",", "1e999", "NaN", "9" * 5000, "\x00", "é", "\n"]),
    st.integers(0, 6),
    st.booleans(),
    st.booleans(),
)
def test_any_damage_is_a_trace_or_an_input_error(tmp_path, name, at, put, cut, end, skip):
    text = SAMPLES[name]
    at %= len(text)
    damaged = text[:at] + put + ("" if end else text[at + cut :])
    try:
        sessions = trace_sessions(read(tmp_path, damaged, name, skip_bad_rows=skip))
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert np.all(sessions.recomputed_tokens <= sessions.missed_tokens)


@real
@pytest.mark.parametrize(
    ("file", "name", "sessions", "calls", "hit"),
    [
        ("weka_claude_code_sessions.csv.gz", "calls", 710, 48_658, 0.964),
        ("mooncake_conversation_trace.jsonl.gz", "mooncake", 8_197, 12_031, 0.374),
        ("mooncake_synthetic_trace.jsonl", "mooncake", 3_331, 3_993, 0.651),
        ("AzureLLMInferenceTrace_code.csv", "azure", 8_819, 8_819, None),
        ("AzureLLMInferenceTrace_conv.csv", "azure", 19_366, 19_366, None),
        ("tracelab_samples/round_trace.jsonl", "tracelab", 2, 19, 0.921),
    ],
)
def test_recorded_files(file, name, sessions, calls, hit):
    trace = read_trace(DATA / file)
    assert (trace.reading.format, trace.sessions, len(trace.session)) == (name, sessions, calls)
    assert np.isnan(trace.hit_ratio) if hit is None else trace.hit_ratio == pytest.approx(hit, abs=5e-4)


@real
def test_original_sessions_agree_with_the_compact_copy():
    """The hash chains give the cached prefixes that the compact file states, call by call."""
    compact = read_trace(DATA / "weka_claude_code_sessions.csv.gz")
    order = pd.read_csv(DATA / "weka_claude_code_sessions.csv.gz")["session"].unique().tolist()
    for file in sorted((DATA / "weka_original_samples").glob("*.json")):
        original = read_trace(file, "weka", Options(subagents=False))
        mine = compact.session == order.index(file.stem)
        for field in ("prompt_tokens", "output_tokens", "cached_tokens", "person"):
            np.testing.assert_array_equal(getattr(original, field), getattr(compact, field)[mine])
    assert read_trace(DATA / "weka_original_samples").sessions == 11 + 2
