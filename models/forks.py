"""Sub-agents: a call forks several, each makes some calls one after another, and the session goes on after the last.

A sub-agent's first prompt is its parent's prompt and output and a task; what it is told and what it writes is
distributed as in the session's own calls.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import Array
from numpy.typing import NDArray

from breakeven.models.distributions import Floats
from breakeven.models.inputs import InputError, known_fields, number

if TYPE_CHECKING:
    from breakeven.models.sessions import Sessions, SessionSpec


@dataclass(frozen=True)
class Forks:
    """After a call that another one follows, with `probability`: `width` sub-agents of `calls` calls each."""

    probability: float
    width: int
    calls: int


def forks(value: Any, field: str) -> Forks | None:
    """The forks that a workload's table states; None where it states none. Raises InputError."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InputError(field, value, "a table of probability, width and calls")
    known_fields(value, ("probability", "width", "calls"), field)
    share = number(f"{field}.probability", value.get("probability"), 0.0, 1.0)
    width = int(number(f"{field}.width", value.get("width", 2), 1, 64, whole=True))
    calls = int(number(f"{field}.calls", value.get("calls", 1), 1, 1000, whole=True))
    return Forks(share, width, calls) if share > 0.0 else None


@dataclass(frozen=True)
class SubAgents:
    """The sub-agents of sampled sessions: arrays (forks, width, calls), but `parent` (forks,)."""

    parent: NDArray[np.int64]  # call of the sample that forks them, rising
    prompt_tokens: Floats
    shared_tokens: Floats
    output_tokens: Floats
    observation_tokens: Floats  # new to prefill where the prefix and the output before it are cached
    recomputed_tokens: Floats  # where that output is not
    gap_after_s: Floats  # nan after the last call

    @property
    def missed_tokens(self) -> Floats:
        """To prefill where the prefix is gone: all but what all sessions share."""
        return self.prompt_tokens - self.shared_tokens


def sample_forks(spec: "SessionSpec", sample: "Sessions", seed: int, max_context: float) -> SubAgents | None:
    """Sub-agents of the sampled sessions, on a model of `max_context` tokens; None without forks."""
    if spec.forks is None:
        return None
    rng = np.random.default_rng([seed, 7])
    parent = np.flatnonzero(~sample.last & (rng.random(len(sample.session)) < spec.forks.probability))
    shape = len(parent), spec.forks.width, spec.forks.calls
    continued = np.flatnonzero(~sample.first)
    if not len(parent):
        return None
    output = rng.choice(sample.output_tokens, shape)
    told = np.maximum(rng.choice(sample.observation_tokens[continued], shape), 1.0)
    written = np.broadcast_to(sample.output_tokens[parent][:, None, None], (*shape[:2], 1))
    before = np.concatenate([written, output[..., :-1]], -1)
    longest = np.minimum(spec.context_cap_tokens, np.floor(max_context)) - output
    prompt = np.minimum(sample.prompt_tokens[parent][:, None, None] + np.cumsum(before + told, -1), longest)
    shared = np.broadcast_to(sample.shared_tokens[parent][:, None, None], shape)
    gap = spec.tool_gap_s.sample(rng, int(np.prod(shape))).reshape(shape)
    gap[..., -1] = np.nan
    told = np.minimum(told, prompt - shared)
    return SubAgents(parent, prompt, shared, output, told, np.minimum(told + before, prompt - shared), gap)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ForkTime:
    """What forks add to a session's gaps, scalars."""

    main_calls: Array  # of a session, its sub-agents' left out; mean
    per_gap: Array  # share of gaps with a fork
    calls: Array  # that a sub-agent makes one after another
    tool_gap_s: Array
    tool_gap_var_s: Array
    longest: Array  # mean of the largest of as many standard normals as there are sub-agents, and its variance
    longest_var: Array

    def added(self, call_mean_s: Array, call_variance: Array) -> tuple[Array, Array]:
        """Mean and variance of the seconds by which a gap is longer: with some probability, the longest of several
        normal sums of calls and tool gaps."""
        mean = self.calls * call_mean_s + (self.calls - 1.0) * self.tool_gap_s
        variance = self.calls * call_variance + (self.calls - 1.0) * self.tool_gap_var_s
        most = mean + self.longest * variance**0.5
        second = self.per_gap * (self.longest_var * variance + most**2)
        return self.per_gap * most, second - (self.per_gap * most) ** 2


def largest_normal(count: int) -> tuple[float, float]:
    """Mean and variance of the largest of `count` independent standard normals.

    >>> [round(x, 3) for x in largest_normal(2)]
    [0.564, 0.682]
    """
    from scipy.special import ndtr

    x = np.linspace(-9.0, 9.0, 20001)
    weight = np.diff(ndtr(x) ** count)
    middle = 0.5 * (x[1:] + x[:-1])
    mean = float(np.sum(weight * middle))
    return mean, float(np.sum(weight * np.square(middle - mean)))
