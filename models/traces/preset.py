"""The fields of a workload preset, fitted to a trace."""

from dataclasses import dataclass, replace
from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breakeven.models.distributions import Empirical
from breakeven.models.sessions import MAX_GAP_S, MAX_TOKENS, sample_sessions, session_spec
from breakeven.models.traces.fitting import Fit, fit, scaled, session_effects
from breakeven.models.traces.replay import Turns, inferences, turns
from breakeven.models.traces.trace import Floats, Trace

EARLY_TURNS, LEAST_EARLY = 5, 200
DRAWN, CLOSE = 500, 1.15  # sessions drawn to check the mean prompt, and how far above the trace's it may be


@dataclass(frozen=True)
class Fitted:
    """A workload fitted to a trace: its fields, how good each fit is, and what was counted."""

    fields: dict[str, Any]  # a workload, as a study has it
    fits: tuple[Fit, ...]
    notes: tuple[str, ...]
    arrival_cv: float  # of the intervals between session starts; nan where those are not recorded
    sessions_per_second: float
    shared_prefix_tokens: float | None = None  # as given


def fit_trace(trace: Trace, shared_prefix_tokens: float | None = None) -> Fitted:
    """Fits of every field that the trace has values for."""
    found = turns(trace, shared_prefix_tokens)
    growing = ~trace.first & ~found.broken & (trace.prompt_tokens > found.previous_prompt)
    sigma, fits = _growth(trace, found, growing)
    tokens = (1.0, MAX_TOKENS)
    fits = [
        fit("calls_per_session", np.bincount(trace.session).astype(float), 1.0, 1e5),
        fit("first_prompt_tokens", trace.prompt_tokens[trace.first], *tokens),
        *fits,
        fit("output_tokens", np.maximum(trace.output_tokens, 1.0), *tokens),
        *_thinking(trace),
        *_gaps(trace),
        *_breaks(trace, found),
    ]
    kept = tuple(one for one in fits if one is not None)
    numbers = _numbers(trace, found, sigma)
    cv, rate = arrivals(trace)
    fields = {**numbers, **{one.field: one.table for one in kept}}
    notes = [f"inferred: {text}" for text in inferences(trace, shared_prefix_tokens)]
    if _dubious(trace).any():
        notes.append(f"not fitted: {int(_dubious(trace).sum()):,} gaps after calls whose end is not recorded")
    if not np.isfinite(trace.person).any() and not trace.first.all():
        notes.append("every gap counts as a tool's: the trace does not tell a person's turns")
    if any(one.field == "prefix_break_tokens" for one in kept):
        notes.append("prefix_break_tokens is wider than measured, as sessions clip it to the prompt: the mean is kept")
    cap = _cap(fields, float(trace.prompt_tokens.mean()))
    if cap is not None:
        longest, fields["context_cap_tokens"] = fields["context_cap_tokens"], cap
        notes.append(
            f"context_cap_tokens {cap:,.0f}: there, sessions drawn from the fits have the trace's mean prompt "
            f"(its longest has {longest:,.0f} tokens)"
        )
    return Fitted(fields, kept, tuple(notes), cv, rate, shared_prefix_tokens)


def _growth(trace: Trace, found: Turns, growing: NDArray[np.bool_]) -> tuple[float, list[Fit | None]]:
    """Deviation of the sessions' growth, and growth with it taken out; early turns apart where there are enough."""
    early = growing & (trace.index < EARLY_TURNS)
    late = growing & ~early
    if min(early.sum(), late.sum()) < LEAST_EARLY:
        early, late = np.zeros_like(early), growing
    sigma, effect = session_effects(np.log(found.growth[late]), trace.session[late])
    sigma = sigma if early.any() else 0.0
    later = found.growth[late] * np.exp(-effect) if sigma else found.growth[late]
    first = fit("growth_tokens_early", found.growth[early], 1.0, MAX_TOKENS)
    return sigma, [first, fit("growth_tokens", later, 1.0, MAX_TOKENS)]


def _thinking(trace: Trace) -> list[Fit | None]:
    thinks = (trace.thinking_tokens > 0.0) & (trace.output_tokens > 0.0)
    return [fit("thinking_fraction", trace.thinking_tokens[thinks] / trace.output_tokens[thinks], 0.0, 1.0)]


def _dubious(trace: Trace) -> NDArray[np.bool_]:
    """Gaps after a call of unknown length, in a trace that has lengths."""
    known = np.isfinite(trace.duration_s)
    after = np.append(True, known[:-1])
    return np.isfinite(trace.gap_s) & ~after & bool(known.any())


def _gaps(trace: Trace) -> list[Fit | None]:
    """Gaps before tool results and before a person's turns; where turns are not told apart, all are the former."""
    certain = np.isfinite(trace.gap_s) & ~_dubious(trace)
    person = trace.person == 1.0
    return [
        fit("tool_gap_s", trace.gap_s[certain & ~person], 0.0, MAX_GAP_S),
        fit("human_gap_s", trace.gap_s[certain & person], 0.0, MAX_GAP_S),
    ]


def _breaks(trace: Trace, found: Turns) -> list[Fit | None]:
    """Tokens that breaks prefill, and contexts that resets leave."""
    cached = np.nan_to_num(trace.cached_tokens) if trace.unlimited_cache else np.zeros(len(found.growth))
    anew = trace.prompt_tokens - np.maximum(cached, found.shared)
    reset = _resets(trace, found)
    breaks = fit("prefix_break_tokens", np.maximum(anew, 1.0)[found.broken & ~reset], 1.0, MAX_TOKENS)
    if breaks is not None:
        room = (trace.prompt_tokens - found.shared)[~trace.first]
        breaks = replace(breaks, table=scaled(breaks.table, widening(breaks.values, room), MAX_TOKENS))
    return [breaks, fit("compact_to_tokens", trace.prompt_tokens[reset], 1.0, MAX_TOKENS)]


def widening(values: Floats, room: Floats) -> float:
    """The factor that keeps the mean of `values` when each is clipped to the room of a prompt it does not belong to.

    Long prompts lose much when their prefix breaks. A sampled session draws the two apart and clips.
    """
    clipped, low, high = Empirical.of(room), 1.0, 1e4
    for _ in range(40):
        middle = (low * high) ** 0.5
        short = float(np.mean(clipped.mean_min(middle * values))) < values.mean()
        low, high = (middle, high) if short else (low, middle)
    return low if low < 0.9e4 else 1.0


def _resets(trace: Trace, found: Turns) -> NDArray[np.bool_]:
    """Breaks that leave less than half of the prompt."""
    return found.broken & (trace.prompt_tokens < 0.5 * found.previous_prompt)


def _numbers(trace: Trace, found: Turns, sigma: float) -> dict[str, Any]:
    """Fields that are counts or flags."""
    later, known = ~trace.first, np.isfinite(trace.person)
    certain = later & known & np.isfinite(trace.gap_s) & ~_dubious(trace)
    tool = float(np.mean(trace.person[certain] == 0.0)) if certain.any() else 1.0
    told = np.isfinite(trace.thinking_tokens)
    values: dict[str, Any] = {
        "shared_prefix_tokens": round(float(np.median(found.shared[trace.first]))),
        "tool_turn_fraction": _digits(tool),
        "context_cap_tokens": float(trace.prompt_tokens.max()),
    }
    if later.any():
        values["growth_includes_output"] = True
        values["prefix_break_probability"] = _digits(float(found.broken[later].mean()))
        values["reset_probability"] = _digits(float(_resets(trace, found)[later].mean()))
    if sigma:
        values |= {"early_turns": EARLY_TURNS, "growth_session_sigma": _digits(min(sigma, 3.0))}
    if told.any():
        values["thinking_call_fraction"] = _digits(float(np.mean(trace.thinking_tokens[told] > 0.0)))
    if np.nansum(trace.images) > 0.0:
        values["images_per_call"] = _digits(float(np.nanmean(trace.images)))
        values["tokens_per_image"] = 0  # the prompts count them
    return values


def _cap(fields: dict[str, Any], mean: float) -> float | None:
    """The context cap at which drawn sessions have this mean prompt; None where they are within 15 % without."""

    def drawn(cap: float) -> float:
        spec = session_spec({**fields, "context_cap_tokens": cap})
        return float(sample_sessions(spec, DRAWN, 0, 2 * MAX_TOKENS).prompt_tokens.mean())

    high = fields["context_cap_tokens"]
    low = min(max(2.0 * fields["shared_prefix_tokens"] + 2.0, mean), high)
    if drawn(high) <= CLOSE * mean or drawn(low) >= mean:
        return None
    for _ in range(10):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if drawn(middle) < mean else (low, middle)
    return float(f"{high:.3g}")


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def arrivals(trace: Trace) -> tuple[float, float]:
    """Coefficient of variation of the intervals between session starts, and sessions per second."""
    starts = trace.start_s[trace.first]
    starts = np.sort(starts[np.isfinite(starts)])
    if not trace.absolute or len(starts) < 3 or starts[-1] <= starts[0]:
        return nan, nan
    steps = np.diff(starts)
    return float(steps.std() / steps.mean()), float(1.0 / steps.mean())


def curves(one: Fit) -> tuple[Floats, Floats, Floats]:
    """Measured and fitted distribution functions of a field over the same values, the outer 0.2 % left off."""
    at = np.unique(np.quantile(one.values, np.linspace(0.001, 0.999, 400)))
    return at, np.searchsorted(one.values, at, side="right") / len(one.values), one.fitted.cdf(at)
