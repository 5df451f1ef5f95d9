"""Workload distributions against numeric integrals; sampled sessions against the traces they stand for."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from breakeven.models.catalog import table
from breakeven.models.distributions import Constant, distribution
from breakeven.models.inputs import InputError
from breakeven.models.sessions import FIELDS, METADATA, Sessions, preset_names, sample_sessions, session_spec

TRACES = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "traces"
WINDOW = 1e6  # longer than any sampled context

LAWS = {
    "constant": {"constant": 7.0},
    "uniform": {"uniform": [2.0, 9.0]},
    "normal": {"normal": [25.0, 12.0], "min": 5.0, "max": 60.0},
    "lognormal": {"lognormal": [1.965, 0.530]},
    "exponential": {"exponential": 10.0},
    "quantiles": {"quantiles": {"p": [0.0, 0.2, 0.5, 0.9, 1.0], "x": [1.0, 1.0, 4.0, 30.0, 100.0]}},
    "mixture": {
        "mixture": [{"weight": 0.69, "lognormal": [1.965, 0.530]}, {"weight": 0.31, "lognormal": [3.8, 1.0]}],
        "max": 60.0,
    },
    "nested": {"mixture": [{"weight": 0.3, "constant": 4.0}, {"weight": 0.7, "uniform": [0, 5], "min": 2.0}]},
}


@pytest.fixture(params=LAWS)
def law(request):
    return distribution(LAWS[request.param], "x", 0.0, 1e4)


@pytest.mark.parametrize("t", [0.5, 4.0, 20.0, 1000.0])
def test_mean_min_is_the_integral_of_the_survival(law, t):
    grid = np.linspace(0.0, t, 400_001)
    middle = 0.5 * (grid[1:] + grid[:-1])
    assert float(law.mean_min(t)) == pytest.approx(np.mean(1.0 - law.cdf(middle)) * t, rel=1e-4)


def test_samples_follow_the_distribution_function(law):
    n = 40_000
    for drawn in (law.sample(np.random.default_rng(1), n), law.invert((np.arange(n) + 0.5) / n)):
        values, counts = np.unique(drawn, return_counts=True)
        assert np.max(np.abs(np.cumsum(counts) / n - law.cdf(values))) < 1.95 / np.sqrt(n)


def test_mean_is_the_limit_of_mean_min_and_of_the_samples(law):
    assert law.mean() == pytest.approx(float(law.mean_min(1e9)), rel=1e-9)
    assert law.mean() == pytest.approx(np.mean(law.invert((np.arange(2**16) + 0.5) / 2**16)), rel=2e-3)


def test_a_number_is_a_constant_and_limits_clip():
    assert distribution(5, "x", 0.0, 10.0) == Constant(5.0)
    capped = distribution({"lognormal": [3.0, 1.0], "min": 2, "max": 50}, "x", 0.0, 1e4)
    assert np.all(capped.sample(np.random.default_rng(0), 1000) >= 2.0) and float(capped.cdf(50.0)) == 1.0


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (-1, "x = -1: a number from 0"),
        ({"lognorm": [1, 2]}, "did you mean lognormal"),
        ({"lognormal": [1, 2], "uniform": [1, 2]}, "exactly one of"),
        ({"lognormal": [1]}, "a list of 2 numbers"),
        ({"lognormal": [1, -2]}, r"x.lognormal\[1\] = -2"),
        ({"uniform": [5, 2]}, "low below high"),
        ({"quantiles": {"p": [0, 0.5], "x": [1, 2]}}, "from 0 to 1"),
        ({"quantiles": {"p": [0, 1], "x": [3, 2]}}, "none below the one before"),
        ({"mixture": [{"weight": 0.5, "constant": 1}, {"weight": 0.2, "constant": 2}]}, "sum to 1"),
        ({"mixture": [{"constant": 1}]}, r"mixture\[0\].weight = None"),
        ({"constant": 4, "min": 9, "max": 3}, "x.max = 3"),
    ],
)
def test_a_bad_distribution_says_what_is_allowed(value, says):
    with pytest.raises(InputError, match=says):
        distribution(value, "x", 0.0, 1e4)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("coding-agnet", "workload = 'coding-agnet': unknown; did you mean coding-agent"),
        ({"preset": "chatt"}, "workload.preset = 'chatt'"),
        ({"preset": "chat", "tool_gaps": 3}, "did you mean tool_gap_s"),
        ({"preset": "chat", "tool_turn_fraction": 1.5}, "from 0 to 1"),
        ({"preset": "chat", "keep_thinking": 1}, "true or false"),
        ({"preset": "chat", "reset_probability": 0.1}, "a reset is a break"),
        ({"preset": "rag-docqa", "output_tokens": 5}, "3 classes"),
        ({"first_prompt_tokens": 100}, "workload.output_tokens = None"),
        ({"classes": [{"weight": 1, "prompt_tokens": 5}]}, r"classes\[0\].output_tokens"),
        ({"classes": [{"weight": 0.5, "prompt_tokens": 5, "output_tokens": 1}]}, "sum to 1"),
        (3, "a preset's name or a table"),
    ],
)
def test_a_bad_workload_says_what_is_allowed(value, says):
    with pytest.raises(InputError, match=says):
        session_spec(value)


@pytest.mark.parametrize("name", preset_names())
def test_presets_say_where_they_come_from(name):
    row = table("workloads")[name]
    assert set(row) <= {*FIELDS, *METADATA} and row["sources"] and row["summary"] and row["as_of"]
    assert {part.split(":")[0].split(".")[0] for part in row["assumptions"]} <= set(FIELDS)
    assert row["suggested_slo"]["source"]
    assert all(set(bound) == {"metric", "bound", "fraction"} for bound in row["suggested_slo"]["bounds"])


@pytest.fixture(scope="module")
def coding() -> Sessions:
    return sample_sessions(session_spec("coding-agent"), 20_000, 0, WINDOW)


@pytest.fixture(scope="module", params=preset_names())
def sample(request) -> Sessions:
    return sample_sessions(session_spec(request.param), 2000, 3, 131_072)


def test_a_prompt_is_the_one_before_and_its_growth(sample):
    grown = ~sample.first & ~sample.compacted
    before = np.roll(sample.prompt_tokens, 1)
    growth = sample.observation_tokens + sample.previous_output_kept_tokens
    np.testing.assert_array_equal(sample.prompt_tokens[grown], (before + growth)[grown])
    assert np.all(sample.previous_output_kept_tokens <= np.where(sample.first, 0.0, np.roll(sample.output_tokens, 1)))


def test_contexts_fit_the_model(sample):
    assert np.max(sample.prompt_tokens + sample.output_tokens) <= 131_072
    small = sample_sessions(session_spec("coding-agent"), 200, 0, 40_000)
    assert np.max(small.prompt_tokens + small.output_tokens) <= 40_000 and small.compacted.mean() > 0.02
    with pytest.raises(InputError, match="shared_prefix_tokens = 15000"):
        sample_sessions(session_spec("coding-agent"), 10, 0, 16_384)


def test_prefills_are_ordered(sample):
    assert np.all(sample.resident_tokens >= 1.0)
    assert np.all(sample.resident_tokens <= sample.recomputed_tokens)
    assert np.all(sample.recomputed_tokens <= sample.missed_tokens)
    assert np.all(sample.thinking_tokens <= sample.output_tokens)
    np.testing.assert_array_equal(np.isnan(sample.gap_after_s), sample.last)


def test_same_seed_same_sessions():
    spec = session_spec("chat")
    one, two, other = (sample_sessions(spec, 50, seed, WINDOW) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.prompt_tokens, two.prompt_tokens)
    assert not np.array_equal(one.prompt_tokens[:20], other.prompt_tokens[:20])


def test_strata_keep_the_mean_number_of_calls():
    spec = session_spec("coding-agent")
    means = [sample_sessions(spec, 500, seed, WINDOW).session.size / 500 for seed in range(5)]
    assert max(abs(mean / spec.calls_per_session.mean() - 1.0) for mean in means) < 0.01  # 4 % without strata


def test_overrides_reach_the_samples():
    given = {"preset": "coding-agent", "calls_per_session": 3, "growth_tokens": 100, "output_tokens": 50}
    sample = sample_sessions(session_spec(given), 100, 0, WINDOW)
    plain = ~sample.first & ~sample.broken
    assert len(sample.session) == 300 and np.all(sample.output_tokens == 50.0)
    assert np.all(sample.previous_output_kept_tokens[plain] == 50.0)
    assert np.median(sample.observation_tokens[plain]) == pytest.approx(50.0, abs=5.0)


def test_images_join_the_observation():
    sample = sample_sessions(session_spec("gui-agent"), 100, 0, WINDOW)
    assert np.all(sample.observation_tokens[~sample.first] == 1334.0 + 20.0)


def test_stripping_thinking_shrinks_contexts_and_raises_prefill():
    think = {"first_prompt_tokens": 1000, "growth_tokens": 100, "output_tokens": 80, "calls_per_session": 4}
    think |= {"thinking_call_fraction": 1.0, "thinking_fraction": 0.75}
    kept = sample_sessions(session_spec(think), 10, 0, WINDOW)
    stripped = sample_sessions(session_spec({**think, "keep_thinking": False}), 10, 0, WINDOW)
    later = ~kept.first
    assert np.all(kept.resident_tokens[later] == 100.0) and np.all(stripped.resident_tokens[later] == 120.0)
    assert np.all(kept.recomputed_tokens[later] == 180.0) and np.all(stripped.recomputed_tokens[later] == 120.0)
    assert stripped.prompt_tokens.max() == 1000.0 + 3 * 120.0


def token_hit(sample: Sessions, ttl_s: float) -> float:
    """Share of the prompt tokens found cached when idle KV lives `ttl_s`; first calls are cold."""
    gone = sample.first | (np.roll(sample.gap_after_s, 1) > ttl_s)
    return 1.0 - np.where(gone, sample.prompt_tokens, sample.recomputed_tokens).sum() / sample.prompt_tokens.sum()


def test_coding_agent_is_like_its_trace(coding):
    """Sampled / kv-cache-tester trace, its sessions that start fresh (all sessions).

    Calls a session 89 / 86.6 (68.5); prompt p50 84.9k / 87.0k (104.6k), mean 92k / 91k (123k); output mean
    427 / 417 (439), p50 211 / - (216); break turns' share of the new prefill 40 % / 39 % (48 %: resumed
    sessions break at up to 900k tokens); breaks 2.3 % of the turns / 1.8 %; new prefill a turn 2.9k / 2.8k.
    """
    later = ~coding.first
    new = coding.recomputed_tokens
    assert np.mean(np.bincount(coding.session)) == pytest.approx(86.6, rel=0.05)
    assert np.median(coding.prompt_tokens) == pytest.approx(87.0e3, rel=0.05)
    assert coding.prompt_tokens.mean() == pytest.approx(91.1e3, rel=0.05)
    assert coding.output_tokens.mean() == pytest.approx(439.0, rel=0.05)
    assert np.median(coding.output_tokens) == pytest.approx(216.0, rel=0.05)
    assert new[later].mean() == pytest.approx(2778.0, rel=0.1)
    assert new[coding.broken].sum() / new[later].sum() == pytest.approx(0.386, abs=0.03)
    assert coding.broken[later].mean() == pytest.approx(0.018, abs=0.006)


def test_coding_agent_contexts_grow_as_in_the_trace(coding):
    """Median prompt at turn 0/10/50/100: 18.5/45/97/118k; the trace, fresh: 19.0/50.7/94.2/117.5k."""
    for index, median in ((0, 18_990.0), (10, 50_676.0), (50, 94_217.0), (100, 117_501.0)):
        assert np.median(coding.prompt_tokens[coding.index == index]) == pytest.approx(median, rel=0.15)


def test_coding_agent_token_hit_with_an_infinite_cache(coding):
    """0.967; kv-cache-tester trace 0.964 (0.967 in its sessions that start fresh)."""
    assert token_hit(coding, np.inf) == pytest.approx(0.964, abs=0.005)


@pytest.mark.parametrize(("ttl_s", "hit"), [(30, 0.744), (60, 0.817), (120, 0.870), (300, 0.918), (600, 0.937)])
def test_coding_agent_token_hit_by_time_to_live(coding, ttl_s, hit):
    """Independent gaps give 0.753, 0.810, 0.863, 0.916, 0.954 (the last as a person's gap ends at 600 s)."""
    assert token_hit(coding, ttl_s) == pytest.approx(hit, abs=0.02)


@pytest.mark.parametrize(("name", "hit"), [("agent-api", 0.59), ("rag-docqa", 0.651), ("chat", 0.374)])
def test_token_hit_of_the_mooncake_presets(name, hit):
    sample = sample_sessions(session_spec(name), 20_000, 0, WINDOW)
    assert 1.0 - sample.recomputed_tokens.sum() / sample.prompt_tokens.sum() == pytest.approx(hit, abs=0.03)


def test_tool_agent_token_hit_is_that_of_tau_bench():
    sample = sample_sessions(session_spec("tool-agent"), 5000, 0, WINDOW)
    assert token_hit(sample, np.inf) == pytest.approx(0.916, abs=0.02)


def test_classes_keep_their_weights_and_prefixes():
    sample = sample_sessions(session_spec("agent-api"), 20_000, 0, WINDOW)
    assert np.mean(sample.shared_tokens == 6144.0) == pytest.approx(0.376, abs=0.003)
    assert np.mean(sample.shared_tokens == 2560.0) == pytest.approx(0.140, abs=0.003)
    assert np.all(sample.shared_tokens < sample.prompt_tokens)
    rising = session_spec("agent-api").first_prompt_tokens.cdf(np.geomspace(500, 40_000, 50))
    assert all(b >= a for a, b in pairwise(rising))


def test_against_the_trace_itself(coding):
    """Quantiles of prompts, outputs and growth of the trace's sessions that start fresh."""
    file = TRACES / "weka_claude_code_sessions.csv.gz"
    if not file.exists():
        pytest.skip("the kv-cache-tester trace is not at hand")
    pandas = pytest.importorskip("pandas")
    calls = pandas.read_csv(file)
    firsts = calls[calls.call == 0]
    fresh = calls[calls.session.isin(firsts.session[firsts.input_tokens < 40_000])]
    for at in (0.25, 0.5, 0.75):
        assert np.quantile(coding.output_tokens, at) == pytest.approx(calls.output_tokens.quantile(at), rel=0.06)
        assert np.quantile(coding.prompt_tokens, at) == pytest.approx(fresh.input_tokens.quantile(at), rel=0.16)
    growth = fresh.input_tokens.diff()[fresh.call > 0]
    modelled = (coding.observation_tokens + coding.previous_output_kept_tokens)[~coding.first]
    assert np.median(modelled) == pytest.approx(growth[growth > 0].median(), rel=0.15)
