"""Speculative decoding: what a step verifies, what it yields, and what its drafts cost.

A step of q = k + 1 tokens a sequence verifies k drafted ones. With a_i the share of steps whose draft is accepted up to
position i it yields E = 1 + a_1 + ... + a_k tokens on average, so a token takes 1 / E of a step, its drafts included
(Leviathan et al., arXiv:2211.17192, with acceptance by position in place of one rate).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from breakeven.models.architecture import Architecture
from breakeven.models.catalog import table
from breakeven.models.inputs import InputError, known_fields, number, pick
from breakeven.models.llm import llm

NONE = "none"
KINDS = ("mtp", "eagle", "ngram", "draft")
_FIELDS = ("like", "name", "kind", "draft", "tokens", "acceptance", "source")


@dataclass(frozen=True)
class Speculation:
    """A way to speculate; shares are those of one drafted token in a plain decode step of the model."""

    id: str
    acceptance: tuple[float, ...] = ()
    layers_share: float = 0.0  # of its launches
    weights_share: float = 0.0  # of everything else
    parameters: float = 0.0  # stored beside the model's


def speculation(spec: Any, model: Architecture, field: str = "speculation") -> Speculation:
    """`none`, a row of the catalogue (`mtp`, `eagle`), or a mapping: `{like: mtp, tokens: 1}`,
    `{draft: llama-3.2-1b, tokens: 3, acceptance: [0.8, 0.6, 0.4]}`. Raises InputError."""
    if spec == NONE:
        return Speculation(NONE)
    rows = table("speculation")
    given = {"like": spec} if isinstance(spec, str) else spec
    if not isinstance(given, Mapping):
        raise InputError(field, spec, "none, a name or a mapping of fields")
    known_fields(given, _FIELDS, field)
    like = given.get("like")
    where = field if isinstance(spec, str) else f"{field}.like"
    base = {} if like is None else rows[pick(where, like, [NONE, *rows])]
    row = {**base, **given} | ({"kind": "draft"} if "draft" in given else {})
    kind = pick(f"{field}.kind", row.get("kind"), KINDS)
    accepted = _acceptance(row.get("acceptance"), f"{field}.acceptance")
    tokens = int(number(f"{field}.tokens", row.get("tokens", len(accepted)), 0, 16, whole=True))
    if tokens > len(accepted):
        raise InputError(f"{field}.tokens", tokens, f"at most the {len(accepted)} positions of acceptance")
    return Speculation(way_id(spec), accepted[:tokens], *_costs(kind, row, model, field))


def way_id(spec: Any) -> str:
    """What a way to speculate is called: its name, or what it is like and its tokens."""
    if not isinstance(spec, Mapping):
        return str(spec)
    base = table("speculation").get(str(spec.get("like")), {})
    row = {**base, **spec}
    tokens = row.get("tokens", len(row.get("acceptance") or ()))
    return str(spec.get("name", f"{spec.get('draft') or spec.get('like') or spec.get('kind')}-{tokens}"))


def _acceptance(values: Any, field: str) -> tuple[float, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise InputError(field, values, "a share for each drafted position")
    shares = tuple(number(f"{field}.{i}", value, 0.0, 1.0) for i, value in enumerate(values))
    if any(b > a for a, b in pairwise(shares)):
        raise InputError(field, list(values), "shares that do not rise: a position counts only with those before it")
    return shares


def _costs(kind: str, row: Mapping[str, Any], model: Architecture, field: str) -> tuple[float, float, float]:
    """(share of launches, share of the rest, parameters) of one drafted token."""
    if kind == "ngram":
        return 0.0, 0.0, 0.0
    active = model.active_parameters
    if kind == "draft":
        draft = llm(row.get("draft"), f"{field}.draft")
        return draft.layers / model.layers, draft.active_parameters / active, float(draft.total_parameters)
    head = model.head_parameters
    if kind == "mtp":
        layer = (active - head) / model.layers
        stored = (model.attention_parameters + model.dense_parameters + model.expert_parameters) / model.layers
    else:
        layer = stored = model.attention_parameters / model.layers + 12 * model.hidden**2
    return 1.0 / model.layers, (layer + head) / active, stored


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Speculations:
    """The ways of a study as arrays, shape (rows,); (n,) once gathered."""

    drafts: Array  # k tokens of a step beside the one that is certain
    yielded: Array  # E tokens of a step, mean
    variance: Array  # of them
    layers_share: Array
    weights_share: Array
    parameters: Array

    @property
    def verified(self) -> Array:
        """Tokens that a sequence has in a step."""
        return 1.0 + self.drafts


def speculations(ways: Sequence[Speculation]) -> Speculations | None:
    """The rows of a study; None where it knows none but `none`."""
    if all(not way.acceptance for way in ways):
        return None
    rows = []
    for way in ways:
        mean = 1.0 + sum(way.acceptance)
        # E[N^2] of N = 1 + positions accepted: sum over i of P(N > i) (2 i + 1).
        second = 1.0 + sum((2 * i + 1) * share for i, share in enumerate(way.acceptance, start=1))
        costs = way.layers_share, way.weights_share, way.parameters
        rows.append((len(way.acceptance), mean, second - mean**2, *costs))
    return Speculations(*(jnp.asarray(column, jnp.float32) for column in zip(*rows, strict=True)))
