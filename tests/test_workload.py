"""The analytic model's workload against the samples it is made of; its cache table against sums by hand."""

import math

import jax
import numpy as np
import pytest

from breakeven.models.distributions import Constant, Exponential
from breakeven.models.inputs import InputError
from breakeven.models.sessions import preset_names, sample_sessions, session_spec
from breakeven.models.workload import bin_edges, cache_table, prefill_nodes, prefill_size, workload

CONTEXT = 131_072
COUNT = 2000
# K = 2: 1000 + 50 tokens stay in the gap, 1150 + 50 after the last call.
PAIR = {"calls_per_session": 2, "first_prompt_tokens": 1000, "growth_tokens": 100, "output_tokens": 50}


@pytest.fixture(scope="module", params=preset_names())
def built(request):
    spec = session_spec(request.param)
    return workload(spec, CONTEXT, sessions=COUNT), sample_sessions(spec, COUNT, 0, CONTEXT)


def test_leaves_are_finite_32_bit_arrays(built):
    leaves = jax.tree.leaves(built[0])
    assert all(leaf.dtype == np.float32 and np.all(np.isfinite(leaf)) for leaf in leaves)
    assert max(float(np.max(leaf)) for leaf in leaves) < 1e12


def test_weights_sum_to_one(built):
    w, _ = built
    nodes = (w.session_weight, w.output_weight, w.resident.weight, w.recomputed.weight, w.missed.weight)
    for weight, size in zip(nodes, (16, 8, 16, 16, 16), strict=True):
        assert weight.shape == (size,) and np.sum(weight) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("name", ["resident", "recomputed", "missed"])
def test_nodes_keep_the_means_and_nearly_the_second_moments(built, name):
    w, sample = built
    nodes, tokens = getattr(w, name), getattr(sample, f"{name}_tokens")
    pairs = tokens * (sample.prompt_tokens - 0.5 * tokens)
    assert float(nodes.mean_tokens) == pytest.approx(tokens.mean(), rel=1e-5)
    assert np.sum(nodes.weight * nodes.tokens) == pytest.approx(tokens.mean(), rel=1e-4)
    assert np.sum(nodes.weight * nodes.pairs) == pytest.approx(pairs.mean(), rel=1e-4)
    assert np.sum(nodes.weight * nodes.context) == pytest.approx(sample.prompt_tokens.mean(), rel=1e-4)
    size = nodes.tokens + nodes.pairs / 30_000.0 + nodes.context / 100.0
    assert np.all(np.diff(size) >= -1e-4 * size[1:])
    second = np.mean(np.square(prefill_size(tokens, sample.prompt_tokens) / 8.0))
    assert np.sum(nodes.weight * np.square(size)) == pytest.approx(second, rel=0.12)  # without spread inside the bins


def test_moments_are_those_of_the_samples(built):
    w, sample = built
    u = sample.resident_tokens
    q = u * (sample.prompt_tokens - 0.5 * u)
    m = w.resident.moments
    assert m[0, 0] == 1.0 and m[1, 0] == pytest.approx(1.0, rel=1e-5) and m[0, 1] == pytest.approx(1.0, rel=1e-5)
    assert m[1, 2] == pytest.approx(np.mean(u * q**2) / (u.mean() * q.mean() ** 2), rel=1e-4)
    assert m[3, 0] == pytest.approx(np.mean(u**3) / u.mean() ** 3, rel=1e-4)
    assert np.all(m[np.add.outer(range(4), range(4)) > 3] == 0.0) and np.max(m) < 1e6


def test_outputs_and_contexts_are_those_of_the_samples(built):
    w, sample = built
    steps, need = sample.output_tokens - 1.0, sample.prompt_tokens + sample.output_tokens
    middle = sample.prompt_tokens + 0.5 * sample.output_tokens
    assert np.sum(w.output_weight * w.output_steps) == pytest.approx(steps.mean(), rel=1e-4)
    assert float(w.mean_steps2) == pytest.approx(np.mean(steps**2), rel=1e-4)
    assert float(w.decode_context) == pytest.approx(np.sum(steps * middle) / steps.sum(), rel=1e-4)
    assert float(w.decode_context_var) == pytest.approx(np.cov(middle, aweights=steps, ddof=0), rel=1e-3)
    spread = np.sum(w.output_weight * (w.output_context_var + np.square(w.output_context - middle.mean())))
    assert spread == pytest.approx(middle.var(), rel=1e-3)
    assert float(w.decode_need) == pytest.approx(np.sum(steps * need) / steps.sum(), rel=1e-4)
    assert float(w.mean_need2) == pytest.approx(np.mean(need**2), rel=1e-4)
    assert float(w.max_tokens) == need.max() <= CONTEXT


def test_sessions_and_gaps(built):
    w, sample = built
    calls = np.bincount(sample.session)
    assert np.sum(w.session_weight * w.session_calls) == pytest.approx(calls.mean(), rel=1e-4)
    assert float(w.thinks_per_session) == pytest.approx(calls.mean() - 1.0, abs=1e-4)
    if calls.max() > 1:
        gaps = sample.gap_after_s[~sample.last]
        error = 5.0 * gaps.std() / math.sqrt(len(gaps)) + 1e-6
        assert float(w.gap_mean_s) == pytest.approx(gaps.mean(), abs=error)
        assert float(w.gap_var_s) == pytest.approx(gaps.var(), rel=0.2)


def test_cache_table_is_monotone_and_spans_hit_and_miss(built):
    w, sample = built
    assert np.ptp(np.diff(w.cache_work)) < 1e-4 and np.all(np.diff(w.cache_miss) <= 0.0)
    if sample.index.max() == 0:
        assert np.all(w.cache_miss == 0.0)
    else:
        assert w.cache_miss[0] > 0.99 and w.cache_miss[-1] < 2e-4


def test_cache_work_is_the_occupancy_of_the_samples():
    """Token seconds a sampled session holds in the cache at T = 60 s, against the table."""
    spec = session_spec("coding-agent")
    sample = sample_sessions(spec, COUNT, 0, CONTEXT)
    w = workload(spec, CONTEXT, sessions=COUNT)
    left = sample.prompt_tokens + sample.output_tokens - sample.shared_tokens
    held = np.sum(left * np.where(sample.last, 60.0, np.minimum(sample.gap_after_s, 60.0))) / COUNT
    miss = np.mean(sample.gap_after_s[~sample.last] > 60.0)
    assert np.interp(math.log(held), w.cache_work, w.cache_miss) == pytest.approx(miss, abs=0.01)


def test_cache_table_of_exponential_gaps_by_hand():
    """H(T) = 1050 · 10 (1 - e^(-T/10)) + 1200 T: 18,637 token s at T = 10 s, where 1/e of the calls miss."""
    w = workload(session_spec({**PAIR, "tool_gap_s": {"exponential": 10}}), CONTEXT, sessions=1000)
    assert (float(w.idle_tokens), float(w.last_tokens)) == (1050.0, 1200.0)
    for t in (1.0, 10.0, 30.0):
        held = 10_500.0 * (1.0 - math.exp(-t / 10.0)) + 1200.0 * t
        miss = np.interp(math.log(held), w.cache_work, w.cache_miss)
        assert miss == pytest.approx(math.exp(-t / 10.0), abs=3e-3)


def test_cache_table_of_constant_gaps_by_hand():
    """All miss below H(10) = 10,500 + 12,000 token s, none above."""
    ln_x, miss = cache_table(Constant(10.0), 2.0, 1050.0, 1200.0)
    assert np.all(miss[ln_x < math.log(22_400.0)] == 1.0) and np.all(miss[ln_x > math.log(22_600.0)] == 0.0)
    assert ln_x[0] < math.log(22_500.0) < ln_x[-1]


def test_single_calls_never_miss():
    assert np.all(cache_table(Exponential(10.0), 1.0, 0.0, 100.0)[1] == 0.0)


def test_bin_edges_are_even_below_and_geometric_above():
    edges = bin_edges(16)
    np.testing.assert_allclose(np.diff(edges)[:8], 0.1)
    np.testing.assert_allclose(np.diff(edges)[9:] / np.diff(edges)[8:-1], 0.6)
    assert edges[-1] == pytest.approx(1.0)


def test_losing_the_cache_and_stripping_thinking_raise_prefill():
    kept = workload(session_spec("coding-agent"), CONTEXT, sessions=COUNT)
    given = {"preset": "coding-agent", "keep_thinking": False}
    stripped = workload(session_spec(given), CONTEXT, sessions=COUNT)
    assert kept.resident.mean_tokens < kept.recomputed.mean_tokens < kept.missed.mean_tokens
    assert stripped.resident.mean_tokens > kept.resident.mean_tokens
    assert stripped.mean_prompt < kept.mean_prompt


def test_a_shorter_model_has_shorter_prompts():
    spec = session_spec("coding-agent")
    long, short = workload(spec, 1e6, sessions=COUNT), workload(spec, 65_536, sessions=COUNT)
    assert short.max_tokens <= 65_536 < long.max_tokens and short.mean_prompt < long.mean_prompt


def test_workload_is_an_argument_of_traced_code():
    traces = []

    @jax.jit
    def mean(w):
        traces.append(1)
        return w.resident.weight @ w.resident.tokens + w.arrival_cv2

    one = workload(session_spec("chat"), CONTEXT, sessions=COUNT)
    two = workload(session_spec("tool-agent"), CONTEXT, 2.2, sessions=COUNT)
    assert float(mean(two)) == pytest.approx(float(two.resident.mean_tokens) + 2.2**2, rel=1e-4)
    assert float(mean(one)) == pytest.approx(float(one.resident.mean_tokens) + 1.0, rel=1e-4)
    assert len(traces) == 1
    assert workload(session_spec("chat"), CONTEXT, sessions=COUNT) is one


def test_bad_arguments():
    with pytest.raises(InputError, match=r"workload\.arrival_cv"):
        workload(session_spec("chat"), CONTEXT, arrival_cv=-1.0)
    with pytest.raises(InputError, match=r"workload\.max_context"):
        workload(session_spec("chat"), 4.0)


@pytest.mark.parametrize("token", [0.01, 1 / 30, 0.1])
def test_prefill_nodes_tell_contexts_apart(token):
    """Screenshots with some text over unlike contexts, of whose tokens each costs a share `token` of a new one's: nodes
    and what varies within them hold the variance of the cost, though contexts matter as much as new tokens."""
    rng = np.random.default_rng(6)
    new, cached = 1_354.0 + np.rint(rng.lognormal(4.6, 0.8, 40_000)), np.rint(rng.uniform(3_000, 17_000, 40_000))
    nodes = prefill_nodes(new, cached + new)
    weight, tokens, context, sd, slope = (
        np.asarray(getattr(nodes, name), float)
        for name in ("weight", "tokens", "context", "cached_sd", "tokens_per_cached")
    )
    cost, total = tokens + token * (context - tokens), np.var(new + token * cached)
    between = np.sum(weight * cost**2) - np.sum(weight * cost) ** 2
    within = np.sum(weight * (sd * (slope + token)) ** 2)
    assert 0.88 * total < between + within < 1.02 * total
    assert between > 0.6 * total
