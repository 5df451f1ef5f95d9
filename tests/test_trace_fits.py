"""Fits recover known parameters, choose the simplest good kind, and find the published ones in the recorded files."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakeven.models.distributions import Empirical, Lognormal
from breakeven.models.sessions import sample_sessions, session_spec
from breakeven.models.traces import read_trace
from breakeven.models.traces.fitting import (
    distance,
    fit,
    lognormal_mixture,
    session_effects,
    spread,
    worst_quantile,
)
from breakeven.models.traces.preset import Fitted, fit_trace

DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "traces"
real = pytest.mark.skipif(not DATA.exists(), reason="the recorded traces are not on this machine")
RNG = np.random.default_rng(0)


def values(*parts: tuple[float, float, int]) -> np.ndarray:
    return np.exp(np.concatenate([RNG.normal(mu, sigma, n) for mu, sigma, n in parts]))


def test_a_lognormal_is_found():
    found = fit("growth_tokens", values((5.0, 0.8, 5000)), 0.01, 1e7)
    assert found is not None and found.kind == "lognormal" and found.ks < 0.03
    assert found.table["lognormal"] == pytest.approx([5.0, 0.8], abs=0.04)


def test_a_mixture_is_found():
    table = lognormal_mixture(np.sort(values((2.0, 0.5, 7000), (5.0, 1.0, 3000))))
    (low, high) = table["mixture"]
    assert (low["weight"], high["weight"]) == pytest.approx((0.7, 0.3), abs=0.02)
    assert low["lognormal"] == pytest.approx([2.0, 0.5], abs=0.05)
    assert high["lognormal"] == pytest.approx([5.0, 1.0], abs=0.12)


def test_what_no_lognormals_fit_is_kept_as_quantiles():
    found = fit("output_tokens", np.repeat([1.0, 10.0, 100.0, 1000.0], 100), 1.0, 1e7)
    assert found is not None and found.kind == "quantiles" and found.fitted.mean() == pytest.approx(277.75, rel=0.3)


def test_zeros_constants_and_nothing():
    some = fit("tool_gap_s", np.append(np.zeros(250), values((1.0, 0.5, 750))), 0.0, 1e7)
    assert some is not None and some.n == 1000 and some.table["mixture"][0] == {"weight": 0.25, "constant": 0.0}
    same = fit("tool_gap_s", np.full(9, 3.0), 0.0, 1e7)
    assert same is not None and (same.kind, same.table, same.ks) == ("constant", 3.0, 0.0)
    none = fit("tool_gap_s", np.zeros(5), 0.0, 1e7)
    assert none is not None and none.table == 0.0
    assert fit("tool_gap_s", np.array([np.nan]), 0.0, 1e7) is None


def test_distances():
    """Against a lognormal from its own quantiles, half a step; a median doubled is 100 % off."""
    rising = Lognormal(1.0, 1.0).invert((np.arange(1000) + 0.5) / 1000)
    assert distance(rising, Lognormal(1.0, 1.0)) == pytest.approx(0.0005, abs=1e-6)
    assert worst_quantile(rising, Lognormal(1.0, 1.0)) < 0.03
    assert worst_quantile(rising, Lognormal(1.0 + math.log(2.0), 1.0)) == pytest.approx(1.0, abs=0.05)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=50))
def test_rounded_values_are_spread_over_their_unit(whole):
    rising = spread(np.array(whole, float))
    assert np.all(np.diff(rising) > 0.0) and np.array_equal(np.rint(rising), np.sort(whole))


def test_session_effects():
    session = np.repeat(np.arange(400), 50)
    effect = RNG.normal(0.0, 0.4, 400)
    sigma, found = session_effects(effect[session] + RNG.normal(6.0, 1.0, len(session)), session)
    assert sigma == pytest.approx(0.4, abs=0.05) and np.corrcoef(found, effect[session])[0, 1] > 0.9
    assert session_effects(RNG.normal(size=10), np.arange(10))[0] == 0.0


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=30), st.floats(0.0, 2e6))
def test_values_as_they_are(numbers, t):
    x, some = np.array(numbers), Empirical.of(numbers)
    assert some.cdf(t) == pytest.approx(np.mean(x <= t))
    assert some.mean_min(t) == pytest.approx(np.mean(np.minimum(x, t)), rel=1e-9, abs=1e-9)
    assert some.mean() == pytest.approx(x.mean(), rel=1e-9, abs=1e-9)
    assert set(some.invert(np.linspace(0.0, 1.0, 7))) <= set(numbers)


@pytest.fixture(scope="module")
def claude_code() -> Fitted:
    return fit_trace(read_trace(DATA / "weka_claude_code_sessions.csv.gz"))


def of(fitted: Fitted, field: str):
    return next(one for one in fitted.fits if one.field == field)


@real
def test_claude_code_gaps_are_the_published_mixtures(claude_code):
    """The fits to the same file by others: KS .025 and .040."""
    for field, n, published in (
        ("tool_gap_s", 41_427, ((0.692, 1.965, 0.530), (0.308, 3.810, 1.519))),
        ("human_gap_s", 2_247, ((0.124, 1.433, 0.470), (0.876, 5.628, 1.598))),
    ):
        found = of(claude_code, field)
        assert (found.n, found.kind) == (n, "mixture") and found.ks < 0.045
        for part, (weight, mu, sigma) in zip(found.table["mixture"], published, strict=True):
            assert part["weight"] == pytest.approx(weight, abs=0.01)
            assert part["lognormal"] == pytest.approx([mu, sigma], abs=0.02)


@real
def test_claude_code_tokens_and_counts(claude_code):
    """Published: growth 655 at the median (here less early turns and session effects), output 216, deviation .437."""
    growth, output = of(claude_code, "growth_tokens"), of(claude_code, "output_tokens")
    assert np.median(growth.values) == pytest.approx(655, rel=0.05) and growth.ks < 0.02
    assert np.median(output.values) == pytest.approx(216, abs=1)
    (low, high) = output.table["mixture"]
    assert (low["weight"], *low["lognormal"]) == pytest.approx((0.465, 5.048, 0.381), abs=0.02)
    assert high["lognormal"] == pytest.approx([6.012, 0.970], abs=0.03)
    fields = claude_code.fields
    assert fields["growth_session_sigma"] == pytest.approx(0.437, abs=0.002)
    assert fields["prefix_break_probability"] == pytest.approx(0.018, abs=0.001)
    assert fields["reset_probability"] == pytest.approx(0.0045, abs=0.0005)
    assert fields["tool_turn_fraction"] == pytest.approx(0.949, abs=0.001)
    assert fields["shared_prefix_tokens"] == pytest.approx(14_950, rel=0.03)  # the median of tools and system prompt
    assert math.isnan(claude_code.arrival_cv)


@real
def test_sessions_drawn_from_the_fit_resemble_the_trace(claude_code):
    drawn = sample_sessions(session_spec(claude_code.fields), 2000, 0, 2e7)
    assert len(drawn.session) / 2000 == pytest.approx(68.5, rel=0.05)
    assert drawn.prompt_tokens.mean() == pytest.approx(123_450, rel=0.05)
    assert drawn.output_tokens.mean() == pytest.approx(439, rel=0.03)
    assert drawn.recomputed_tokens[~drawn.first].mean() == pytest.approx(3_205, rel=0.1)


@real
def test_conversations_and_their_arrivals():
    """Published: gaps LN(4.871, .981); intervals of the Azure conversations have a CV of 1.094, of the code 13.15."""
    gap = of(fit_trace(read_trace(DATA / "mooncake_conversation_trace.jsonl.gz")), "tool_gap_s")
    assert np.log(gap.values).mean() == pytest.approx(4.871, abs=0.03)
    assert np.log(gap.values).std() == pytest.approx(0.981, abs=0.03)
    for name, cv, rate in (("conv", 1.094, 5.530), ("code", 13.151, 2.567)):
        found = fit_trace(read_trace(DATA / f"AzureLLMInferenceTrace_{name}.csv"))
        assert (found.arrival_cv, found.sessions_per_second) == pytest.approx((cv, rate), rel=1e-3)
