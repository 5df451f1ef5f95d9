"""Sub-agents: what is sampled of them, the time of their sessions, and the model against the simulation."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from breakeven.models.forks import largest_normal, sample_forks
from breakeven.models.inputs import InputError
from breakeven.models.sessions import sample_sessions, session_spec
from breakeven.models.workload import workload
from breakeven.studies.study import Study

FORKS: dict[str, Any] = {"probability": 0.2, "width": 3, "calls": 4}
AGENTS = {"preset": "tool-agent", "forks": FORKS}


def test_sub_agents_go_on_from_their_parents_prompt() -> None:
    spec = session_spec(AGENTS)
    sample = sample_sessions(spec, 1000, 0, 131_072)
    agents = sample_forks(spec, sample, 0, 131_072)
    assert agents is not None and agents.prompt_tokens.shape[1:] == (3, 4)
    assert not sample.last[agents.parent].any()
    assert len(agents.parent) == pytest.approx(0.2 * np.sum(~sample.last), rel=0.05)
    held = (sample.prompt_tokens + sample.output_tokens)[agents.parent][:, None]
    np.testing.assert_array_equal(agents.prompt_tokens[..., 0], held + agents.observation_tokens[..., 0])
    assert (agents.prompt_tokens + agents.output_tokens <= 131_072).all()
    assert (agents.recomputed_tokens <= agents.missed_tokens).all()
    assert sample_forks(session_spec("tool-agent"), sample, 0, 131_072) is None


def test_a_session_waits_for_the_longest_of_its_sub_agents() -> None:
    """Calls of 5 s each: 4 of them and 3 tool gaps, the longest of three such sums; normal ones by sampling."""
    built, plain = (workload(session_spec(w), 131_072, sessions=2000) for w in (AGENTS, "tool-agent"))
    thinks = float(plain.calls_per_session) - 1.0
    assert float(built.calls_per_session) == pytest.approx(1.0 + thinks * (1.0 + 0.2 * 12.0), rel=0.02)
    added = float(built.session_s(jnp.float32(5.0), jnp.float32(4.0)) - plain.session_s(jnp.float32(5.0))) / thinks
    assert built.forks is not None
    gap, spread = float(built.forks.tool_gap_s), float(built.forks.tool_gap_var_s)
    sums = np.random.default_rng(0).normal(20.0 + 3.0 * gap, (16.0 + 3.0 * spread) ** 0.5, (200_000, 3))
    assert added == pytest.approx(0.2 * sums.max(1).mean(), rel=0.01)
    assert largest_normal(1) == pytest.approx((0.0, 1.0), abs=1e-3)


def test_the_model_agrees_with_the_simulation() -> None:
    """Session time, calls per second and prefix hits of sessions that fork."""
    data = {
        "name": "forks",
        "llm": "llama-3.3-70b",
        "workload": AGENTS,
        "load": {"sessions_per_second": 0.5},
        "slo": {"ttft_s": 2.0, "tpot_s": 0.05, "target": 0.9},
        "space": {"topologies": "chunked", "replicas": 4, "max_batch": 256}
        | {"accelerators": "h100-sxm", "tensor_parallel": 4, "weights": "fp8", "kv": "fp8"},
    }
    ready = Study.parse(data, "test").simulator().ready(np.array([0]))[0]
    found = ready.replicate(4, 6000, 1, whole_sessions=True)
    session = found.mean("session_s")
    assert session.value == pytest.approx(ready["session_mean_s"], rel=0.05 + session.half_width / session.value)
    calls = found.throughput
    assert calls.value == pytest.approx(ready.calls_per_s, rel=0.03 + calls.half_width / calls.value)
    assert found.cache_hit.value == pytest.approx(ready["cache_hit"], abs=0.02 + found.cache_hit.half_width)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (3, "workload.forks = 3: a table"),
        ({"probability": 2}, "workload.forks.probability = 2"),
        ({"width": 2}, "workload.forks.probability"),
        (FORKS | {"depth": 2}, "depth"),
    ],
)
def test_bad_forks_are_one_line(value: Any, match: str) -> None:
    with pytest.raises(InputError, match=match):
        session_spec({"preset": "tool-agent", "forks": value})
