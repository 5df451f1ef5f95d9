"""Sessions of calls: what a workload is, and samples of it.

A session has K calls. Call 1's prompt is the shared prefix (system and tools, common to all sessions and
always cached) and the rest of the first prompt. A call writes o tokens, a gap follows (a tool or a person),
and the next prompt is

    prompt' = prompt + kept + observation,      kept <= o, growth = kept + observation

unless the context passes its cap or is reset: then it is compacted, and all but the shared prefix is new.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breakeven.models.catalog import table
from breakeven.models.distributions import Clipped, Distribution, Floats, Scaled, distribution, mixture
from breakeven.models.forks import Forks, forks
from breakeven.models.inputs import InputError, known_fields, number, pick
from breakeven.models.media import FIELDS as MEDIA
from breakeven.models.media import Media, media

MAX_TOKENS, MAX_GAP_S = 1e7, 1e7
METADATA = ("summary", "sources", "as_of", "assumptions", "suggested_slo")


@dataclass(frozen=True)
class CallClass:
    """A kind of session by its first call; cached of it: min(tokens + fraction · prompt, prompt - 1)."""

    weight: float
    prompt_tokens: Distribution
    cached_prefix_tokens: float
    cached_prefix_fraction: float
    output_tokens: Distribution


@dataclass(frozen=True)
class SessionSpec:
    """The distributions of a workload; the fields of a preset in the catalogue's `workloads` table.

    A reset is also a prefix break, so `reset_probability` is part of `prefix_break_probability`; the
    compactions that the context cap forces come on top of both.
    """

    name: str
    calls_per_session: Distribution  # rounded to whole calls
    shared_prefix_tokens: float  # mean over classes
    first_prompt_tokens: Distribution  # whole first prompt, shared prefix included
    growth_tokens: Distribution  # a turn's new prompt tokens
    growth_tokens_early: Distribution  # the same in turns 2 to `early_turns`
    early_turns: int
    growth_session_sigma: float  # deviation of a session's ln growth after the early turns
    growth_includes_output: bool  # growth counts the previous output; else it is the observation alone
    output_tokens: Distribution  # thinking included
    thinking_fraction: Distribution  # share of the output, in the calls that think
    thinking_call_fraction: float
    keep_thinking: bool  # else the next prompt drops it, which breaks the prefix there
    tool_turn_fraction: float  # of the gaps; the others wait for a person
    tool_gap_s: Distribution
    human_gap_s: Distribution
    prefix_break_probability: float  # per call after the first
    prefix_break_tokens: Distribution  # to prefill anew, at most all but the shared prefix
    reset_probability: float  # per call after the first: the break compacts the context
    context_cap_tokens: float
    compact_to_tokens: Distribution
    cache_ttl_s: float  # the service drops the cache of a session that has been idle for longer
    media: Media | None  # images, video or audio: their tokens come on top of every prompt
    forks: Forks | None  # sub-agents
    classes: tuple[CallClass, ...]  # one of them per session

    @property
    def gap_s(self) -> Distribution:
        """Seconds from a call's end to the session's next call."""
        share = self.tool_turn_fraction
        return mixture((share, 1.0 - share), (self.tool_gap_s, self.human_gap_s))


_TOKENS, _GAP, _SHARE = (1.0, MAX_TOKENS), (0.0, MAX_GAP_S), (0.0, 1.0)
_DISTRIBUTIONS: dict[str, tuple[float, float]] = {
    "calls_per_session": (1.0, 1e5),
    "first_prompt_tokens": _TOKENS,
    "growth_tokens": _TOKENS,
    "growth_tokens_early": _TOKENS,
    "output_tokens": _TOKENS,
    "thinking_fraction": _SHARE,
    "tool_gap_s": _GAP,
    "human_gap_s": _GAP,
    "prefix_break_tokens": _TOKENS,
    "compact_to_tokens": _TOKENS,
}
_NUMBERS: dict[str, tuple[float, float]] = {
    "shared_prefix_tokens": (0.0, MAX_TOKENS),
    "early_turns": (0.0, 1e5),
    "growth_session_sigma": (0.0, 3.0),
    "thinking_call_fraction": _SHARE,
    "tool_turn_fraction": _SHARE,
    "prefix_break_probability": _SHARE,
    "reset_probability": _SHARE,
    "context_cap_tokens": _TOKENS,
    "cache_ttl_s": _GAP,
}
_FLAGS = ("growth_includes_output", "keep_thinking")
_DEFAULTS: dict[str, Any] = {
    "calls_per_session": 1,
    "shared_prefix_tokens": 0,
    "growth_tokens": 1,
    "early_turns": 0,
    "growth_session_sigma": 0,
    "growth_includes_output": False,
    "thinking_fraction": 0,
    "thinking_call_fraction": 0,
    "keep_thinking": True,
    "tool_turn_fraction": 1,
    "tool_gap_s": 0,
    "human_gap_s": 0,
    "prefix_break_probability": 0,
    "prefix_break_tokens": 1,
    "reset_probability": 0,
    "context_cap_tokens": MAX_TOKENS,
    "compact_to_tokens": 32768,
    "cache_ttl_s": MAX_GAP_S,
}
_CLASS_FIELDS = tuple(field.name for field in fields(CallClass))
_OF_CLASSES = ("first_prompt_tokens", "output_tokens", "shared_prefix_tokens")
FIELDS = (*_DISTRIBUTIONS, *_NUMBERS, *_FLAGS, *MEDIA, "forks", "classes")
SCALABLE = tuple(name for name in _DISTRIBUTIONS if name not in ("thinking_fraction", "growth_tokens_early"))


def preset_names() -> list[str]:
    """The workloads of the catalogue."""
    return list(table("workloads"))


def session_spec(workload: str | Mapping[str, Any], field: str = "workload") -> SessionSpec:
    """A preset by name, or a table of fields over the preset it names (`preset`) or over nothing.

    `scale` multiplies distributions by factors: `{growth_tokens: 2}` doubles what every turn adds.

    >>> session_spec({"preset": "coding-agent", "tool_gap_s": 5}).tool_gap_s
    Constant(value=5.0)
    """
    given = {"preset": workload} if isinstance(workload, str) else workload
    if not isinstance(given, Mapping):
        raise InputError(field, workload, "a preset's name or a table of fields")
    known_fields(given, ("preset", "scale", *FIELDS, *METADATA), field)
    name, base = "custom", {}
    if "preset" in given:
        where = field if isinstance(workload, str) else f"{field}.preset"
        name = pick(where, given["preset"], preset_names())
        base = table("workloads")[name]
    own = {key: value for key, value in given.items() if key in FIELDS}
    return scaled_spec(_parse(name, own, {**_DEFAULTS, **base, **own}, field), given.get("scale", {}), f"{field}.scale")


def scaled_spec(spec: SessionSpec, factors: object, field: str) -> SessionSpec:
    """The spec with some of its distributions scaled, held inside their ranges; growth early and later alike."""
    if not isinstance(factors, Mapping):
        raise InputError(field, factors, "a table of fields and factors")
    known_fields(factors, SCALABLE, field)
    by = {name: number(f"{field}.{name}", factors[name], 1e-3, 1e3) for name in factors}
    if "growth_tokens" in by:
        by["growth_tokens_early"] = by["growth_tokens"]

    def scaled(name: str, inner: Distribution) -> Distribution:
        return Clipped(Scaled(inner, by[name]), *_DISTRIBUTIONS[name]) if name in by else inner

    classes = tuple(
        dataclasses.replace(
            row,
            prompt_tokens=scaled("first_prompt_tokens", row.prompt_tokens),
            output_tokens=scaled("output_tokens", row.output_tokens),
        )
        for row in spec.classes
    )
    return dataclasses.replace(spec, classes=classes, **{name: scaled(name, getattr(spec, name)) for name in by})


def _parse(name: str, own: Mapping[str, Any], merged: Mapping[str, Any], field: str) -> SessionSpec:
    values = dict(merged)
    classes = _classes(values.get("classes") or (), f"{field}.classes")
    if classes:
        _refuse_beside_classes(own, classes, field)
        values.update(_marginals(classes))
    for missing in (key for key in ("first_prompt_tokens", "output_tokens") if key not in values):
        raise InputError(f"{field}.{missing}", None, "needed where no preset gives it")
    values.setdefault("growth_tokens_early", values["growth_tokens"])
    if "growth_tokens" in own and "growth_tokens_early" not in own:
        values["growth_tokens_early"] = values["growth_tokens"]
    parsed: dict[str, Any] = {}
    for key, (low, high) in _DISTRIBUTIONS.items():
        parsed[key] = distribution(values[key], f"{field}.{key}", low, high)
    for key, (low, high) in _NUMBERS.items():
        parsed[key] = number(f"{field}.{key}", values[key], low, high)
    parsed["early_turns"] = int(number(f"{field}.early_turns", values["early_turns"], 0.0, 1e5, whole=True))
    for key in _FLAGS:
        parsed[key] = _flag(f"{field}.{key}", values[key])
    if parsed["reset_probability"] > parsed["prefix_break_probability"]:
        allowed = f"at most prefix_break_probability ({parsed['prefix_break_probability']:g}): a reset is a break"
        raise InputError(f"{field}.reset_probability", parsed["reset_probability"], allowed)
    if values.get("forks") is not None and media(values, field) is not None:
        raise InputError(f"{field}.forks", values["forks"], "a workload without images, video or audio")
    plain = CallClass(1.0, parsed["first_prompt_tokens"], parsed["shared_prefix_tokens"], 0.0, parsed["output_tokens"])
    return SessionSpec(
        name=name,
        classes=classes or (plain,),
        media=media(values, field),
        forks=forks(values.get("forks"), f"{field}.forks"),
        **parsed,
    )


def _flag(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InputError(field, value, "true or false")
    return value


def _classes(rows: object, field: str) -> tuple[CallClass, ...]:
    if not isinstance(rows, list | tuple) or not all(isinstance(row, Mapping) for row in rows):
        raise InputError(field, rows, "a list of tables")
    parsed = tuple(_class(row, f"{field}[{i}]") for i, row in enumerate(rows))
    if parsed and abs(sum(row.weight for row in parsed) - 1.0) > 0.01:
        raise InputError(field, [row.weight for row in parsed], "weights that sum to 1")
    return parsed


def _class(row: Mapping[str, Any], field: str) -> CallClass:
    known_fields(row, _CLASS_FIELDS, field)
    for missing in (key for key in ("weight", "prompt_tokens", "output_tokens") if key not in row):
        raise InputError(f"{field}.{missing}", None, "needed in a class")
    return CallClass(
        number(f"{field}.weight", row["weight"], 0.0, 1.0),
        distribution(row["prompt_tokens"], f"{field}.prompt_tokens", *_TOKENS),
        number(f"{field}.cached_prefix_tokens", row.get("cached_prefix_tokens", 0), 0.0, MAX_TOKENS),
        number(f"{field}.cached_prefix_fraction", row.get("cached_prefix_fraction", 0), 0.0, 1.0),
        distribution(row["output_tokens"], f"{field}.output_tokens", *_TOKENS),
    )


def _refuse_beside_classes(own: Mapping[str, Any], classes: tuple[CallClass, ...], field: str) -> None:
    for key in (key for key in _OF_CLASSES if key in own):
        allowed = f"this workload has {len(classes)} classes: set it in them, or classes = [] to have none"
        raise InputError(f"{field}.{key}", own[key], allowed)


def _marginals(classes: tuple[CallClass, ...]) -> dict[str, Any]:
    """What the classes are together: mixtures, and the mean cached prefix."""
    weights = [row.weight for row in classes]
    cached = [row.cached_prefix_tokens + row.cached_prefix_fraction * row.prompt_tokens.mean() for row in classes]
    return {
        "first_prompt_tokens": mixture(weights, [row.prompt_tokens for row in classes]),
        "output_tokens": mixture(weights, [row.output_tokens for row in classes]),
        "shared_prefix_tokens": float(np.average(cached, weights=weights)),
    }


@dataclass(frozen=True)
class Sessions:
    """Calls of sampled sessions, session after session: flat arrays with one entry per call."""

    session: NDArray[np.int64]
    index: NDArray[np.int64]  # in the session, from 0
    prompt_tokens: Floats  # context at the call's start
    shared_tokens: Floats  # of it, always cached
    observation_tokens: Floats  # new from a tool or a person; 0 in a first call
    previous_output_kept_tokens: Floats
    stripped: NDArray[np.bool_]  # the previous call's thinking was dropped
    broken: NDArray[np.bool_]  # prefix break, compactions included
    compacted: NDArray[np.bool_]
    break_tokens: Floats  # to prefill anew after the break; 0 without one
    output_tokens: Floats
    thinking_tokens: Floats
    gap_after_s: Floats  # nan after the last
    images: Floats | None = None  # new in the call; None: text alone
    images_held: Floats | None = None  # in its prompt, new ones included

    @property
    def first(self) -> NDArray[np.bool_]:
        return self.index == 0

    @property
    def last(self) -> NDArray[np.bool_]:
        return np.append(self.first[1:], True)

    @property
    def missed_tokens(self) -> Floats:
        """To prefill when the session's cached context is gone: all but the shared prefix."""
        return self.prompt_tokens - self.shared_tokens

    @property
    def recomputed_tokens(self) -> Floats:
        """To prefill where the previous prompt is cached but not the previous output: kept + observation."""
        grown = self.previous_output_kept_tokens + self.observation_tokens
        return np.where(self.first, self.missed_tokens, np.where(self.broken, self.break_tokens, grown))

    @property
    def resident_tokens(self) -> Floats:
        """To prefill where the previous output is cached too; what follows dropped thinking is new again."""
        visible = np.where(self.stripped, self.previous_output_kept_tokens, 0.0)
        plain = self.first | self.broken
        return np.where(plain, self.recomputed_tokens, visible + self.observation_tokens)

    @property
    def images_found(self) -> Floats:
        """Images to encode where the previous prompt is cached: new ones, after a break those in what is new again."""
        assert self.images is not None and self.images_held is not None
        share = np.clip(self.break_tokens / np.maximum(self.missed_tokens, 1.0), 0.0, 1.0)
        return np.where(self.broken, np.maximum(self.images, share * self.images_held), self.images)


@dataclass(frozen=True)
class _Layout:
    """Which call stands where in the flat arrays."""

    calls: NDArray[np.int64]  # of each session
    start: NDArray[np.int64]  # of each session, its first call
    session: NDArray[np.int64]  # of each call
    index: NDArray[np.int64]

    @property
    def first(self) -> NDArray[np.bool_]:
        return self.index == 0

    def turns(self) -> Iterator[NDArray[np.int64]]:
        """Positions of the second calls of all sessions that have one, then of the third ones, and so on."""
        by_length, most = np.argsort(-self.calls, kind="stable"), int(self.calls.max())
        live = np.searchsorted(-self.calls[by_length], -np.arange(1, most + 1), side="right")
        for k in range(1, most):
            yield self.start[by_length[: live[k]]] + k


def sample_sessions(spec: SessionSpec, sessions: int, seed: int, max_context: float) -> Sessions:
    """`sessions` sampled sessions for a model of `max_context` tokens: no prompt and its output exceed it.

    K and the first prompts are stratified. An output is at most half of `max_context`; a prompt at most
    the workload's cap and what the model leaves beside the output.
    """
    rng = np.random.default_rng(seed)
    weights = np.cumsum([row.weight for row in spec.classes])
    kind = np.searchsorted(weights[:-1], _strata(rng, sessions), side="right")
    layout = _layout(spec, sessions, rng)
    session, count = layout.session, len(layout.session)

    output, thinking = _outputs(spec, kind[session], max_context, rng)
    limit = np.minimum(spec.context_cap_tokens, np.floor(max_context) - output)
    images, visual = _images(spec, count, seed)
    first_prompt, shared = _first_prompts(spec, kind, visual[layout.start], limit[layout.start], rng)
    observation, kept, stripped = _growth(spec, layout, output, thinking, rng)
    observation = np.where(layout.first, 0.0, observation + visual)
    growth, own = observation + kept, shared[session]
    broken, reset = _breaks(spec, layout.first, rng)
    compact_to = np.rint(spec.compact_to_tokens.sample(rng, count))
    compact_to = np.maximum(np.minimum(compact_to, np.floor(0.5 * limit)), own + 1.0)
    longest = np.where(reset, np.minimum(compact_to, limit), limit)
    prompt, compacted = _contexts(layout, first_prompt, growth, longest, compact_to)

    broken = broken | compacted
    anew = np.maximum(np.rint(spec.prefix_break_tokens.sample(rng, count)), growth)
    anew = np.where(compacted, prompt - own, np.minimum(anew, prompt - own))
    gap = spec.gap_s.sample(rng, count)
    gap[layout.start + layout.calls - 1] = np.nan
    return Sessions(
        session=session,
        index=layout.index,
        prompt_tokens=prompt,
        shared_tokens=own,
        observation_tokens=observation,
        previous_output_kept_tokens=kept,
        stripped=stripped,
        broken=broken,
        compacted=compacted,
        break_tokens=np.where(broken, anew, 0.0),
        output_tokens=output,
        thinking_tokens=thinking,
        gap_after_s=gap,
        images=images,
        images_held=None if images is None else _images_held(layout, images, prompt, growth, own),
    )


def _strata(rng: np.random.Generator, size: int) -> Floats:
    """One uniform in each of `size` equal parts of [0, 1), in random order."""
    return (rng.permutation(size) + rng.random(size)) / size


def _layout(spec: SessionSpec, sessions: int, rng: np.random.Generator) -> _Layout:
    calls = np.maximum(np.rint(spec.calls_per_session.invert(_strata(rng, sessions))), 1.0).astype(np.int64)
    start, session = np.cumsum(calls) - calls, np.repeat(np.arange(sessions), calls)
    return _Layout(calls, start, session, np.arange(len(session)) - start[session])


def _outputs(
    spec: SessionSpec, kind: NDArray[np.intp], max_context: float, rng: np.random.Generator
) -> tuple[Floats, Floats]:
    """Output and thinking tokens of every call, given its class."""
    output, thinking = np.empty(len(kind)), np.zeros(len(kind))
    for j, row in enumerate(spec.classes):
        calls = np.flatnonzero(kind == j)
        output[calls] = row.output_tokens.sample(rng, len(calls))
    output = np.clip(np.rint(output), 1.0, max(max_context // 2, 1.0))
    thinks = np.flatnonzero(rng.random(len(kind)) < spec.thinking_call_fraction)
    thinking[thinks] = np.rint(output[thinks] * spec.thinking_fraction.sample(rng, len(thinks)))
    return output, thinking


def _images(spec: SessionSpec, calls: int, seed: int) -> tuple[Floats | None, Floats]:
    """(images of every call, tokens they add to its prompt), from a stream of random numbers of their own."""
    if spec.media is None:
        return None, np.zeros(calls)
    images = spec.media.counts(calls, np.random.default_rng([seed, 1]))
    return images, np.rint(images * (spec.media.tokens or 0.0))


def _first_prompts(
    spec: SessionSpec, kind: NDArray[np.intp], visual: Floats, limit: Floats, rng: np.random.Generator
) -> tuple[Floats, Floats]:
    """First prompts with their visual tokens and, of each, the tokens that are always cached."""
    prompt, cached, u = np.empty(len(kind)), np.empty(len(kind)), _strata(rng, len(kind))
    for j, row in enumerate(spec.classes):
        mine = kind == j
        drawn = np.maximum(np.rint(row.prompt_tokens.invert(u[mine])), row.cached_prefix_tokens + 1.0) + visual[mine]
        prompt[mine] = np.minimum(drawn, limit[mine])
        cached[mine] = np.rint(row.cached_prefix_tokens + row.cached_prefix_fraction * prompt[mine])
    if np.any(cached >= limit):
        allowed = f"below {limit.min():g}, the room for a prompt in the longest context"
        raise InputError("workload.shared_prefix_tokens", float(cached.max()), allowed)
    return prompt, np.minimum(cached, prompt - 1.0)


def _growth(
    spec: SessionSpec, layout: _Layout, output: Floats, thinking: Floats, rng: np.random.Generator
) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Observation, kept part of the previous output, whether its thinking was dropped; none in first calls.

    Growth that counts the output was fitted as a whole: min(output, growth - 1) of it is kept output.
    """
    effect = np.exp(spec.growth_session_sigma * rng.standard_normal(len(layout.calls)))
    growth, early = np.empty(len(output)), layout.index < spec.early_turns
    growth[early] = spec.growth_tokens_early.sample(rng, int(early.sum()))
    growth[~early] = spec.growth_tokens.sample(rng, int((~early).sum())) * effect[layout.session[~early]]
    growth = np.maximum(np.rint(growth), 1.0)
    written, thought = np.roll(output, 1), np.roll(thinking, 1)
    kept = np.minimum(written, growth - 1.0) if spec.growth_includes_output else written
    observation = growth - kept if spec.growth_includes_output else growth
    stripped = (thought > 0.0) & (not spec.keep_thinking) & ~layout.first
    kept = np.where(stripped, np.maximum(kept - thought, 0.0), kept)
    return np.where(layout.first, 0.0, observation), np.where(layout.first, 0.0, kept), stripped


def _breaks(
    spec: SessionSpec, first: NDArray[np.bool_], rng: np.random.Generator
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Whether each call's prefix breaks, and whether its context is reset by it."""
    u = np.where(first, 1.0, rng.random(len(first)))
    return u < spec.prefix_break_probability, u < spec.reset_probability


def _contexts(
    layout: _Layout, first_prompt: Floats, growth: Floats, longest: Floats, compact_to: Floats
) -> tuple[Floats, NDArray[np.bool_]]:
    """Prompts, compacted where they would pass `longest`: a step over all live sessions per call index."""
    prompt, compacted = np.empty(len(growth)), np.zeros(len(growth), bool)
    prompt[layout.start] = first_prompt
    for at in layout.turns():
        grown = prompt[at - 1] + growth[at]
        cut = grown > longest[at]
        prompt[at] = np.where(cut, compact_to[at], grown)
        compacted[at] = cut
    return prompt, compacted


def _images_held(layout: _Layout, images: Floats, prompt: Floats, growth: Floats, own: Floats) -> Floats:
    """Images in every prompt: a compaction keeps as large a share of them as of the session's own tokens."""
    held = images.copy()
    for at in layout.turns():
        whole = prompt[at - 1] + growth[at] - own[at]
        share = np.clip((prompt[at] - own[at]) / np.maximum(whole, 1.0), 0.0, 1.0)
        held[at] = (held[at - 1] + images[at]) * share
    return held
