"""Curves of operators fitted to measured kernels, and the catalogue file that holds them.

Each group of samples gets its own curve: its numbers, bounded, minimise a robust loss of ln(predicted / measured) by
gradient descent (Adam) through the cost model's own operator functions. Rows whose operands fit into the cache count
little: timed in a loop, they never leave it. Groups of one operator are fitted side by side.
"""

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
from jax import Array

from breakeven.models.catalog import text
from breakeven.models.kernel_curves import NUMBERS
from breakeven.studies.kernels import SETTINGS, Operator, Samples

STEPS, RATE = 1500, 0.1  # of Adam, its rate falling to nothing as a cosine
SIGNIFICANT = 3  # digits of a fitted number


@dataclass(frozen=True)
class FittedCurve:
    """A group of samples, the numbers of its curve, and the errors |predicted / measured - 1|."""

    samples: Samples
    numbers: dict[str, float]
    errors: np.ndarray

    def summary(self, beyond: bool = True) -> dict[str, float]:
        """Rows, median and ninth decile of the errors, of operands beyond the cache or of all."""
        off = self.errors[self.samples.beyond] if beyond else self.errors
        if not len(off):
            return {"rows": 0, "median": float("nan"), "worst_decile": float("nan")}
        return {"rows": len(off), "median": float(np.median(off)), "worst_decile": float(np.quantile(off, 0.9))}


def fit_kernels(samples: Sequence[Samples]) -> list[FittedCurve]:
    """A curve for each group of samples, in their order."""
    found: dict[int, FittedCurve] = {}
    for operator in {s.operator.kind: s.operator for s in samples}.values():
        mine = [i for i, s in enumerate(samples) if s.operator.kind == operator.kind]
        for i, curve in zip(mine, _fit_operator(operator, [samples[i] for i in mine]), strict=True):
            found[i] = curve
    return [found[i] for i in range(len(samples))]


def _padded(groups: Sequence[Samples]) -> tuple[dict[str, Array], Array, Array]:
    """Sizes, log seconds and weights as (groups, rows): short groups repeat their first row at weight zero."""
    most = max(len(g.seconds) for g in groups)

    def wide(values: np.ndarray) -> np.ndarray:
        return np.concatenate([values, np.full(most - len(values), values[0])])

    names = set.intersection(*(set(g.sizes) for g in groups))
    sizes = {name: jnp.asarray(np.stack([wide(g.sizes[name]) for g in groups])) for name in sorted(names)}
    seconds = jnp.log(jnp.asarray(np.stack([wide(g.seconds) for g in groups])))
    weights = [np.where(g.beyond, 1.0, SETTINGS["cached_weight"]) for g in groups]
    weight = np.stack([np.concatenate([w / w.sum(), np.zeros(most - len(w))]) for w in weights])
    return sizes, seconds, jnp.asarray(weight)


def _bounded(operator: Operator, x: Array) -> dict[str, Array]:
    """Numbers of a curve from free variables: log-uniform between their bounds."""
    return {
        name: jnp.exp(np.log(low) + (np.log(high) - np.log(low)) * jax.nn.sigmoid(x[i]))
        for i, (name, (low, high)) in enumerate(operator.bounds.items())
    }


def _fit_operator(operator: Operator, groups: Sequence[Samples]) -> list[FittedCurve]:
    sizes, target, weight = _padded(groups)

    def loss(x: Array, size: dict[str, Array], log_s: Array, w: Array) -> Array:
        off = jnp.log(operator.seconds(_bounded(operator, x), size)) - log_s
        return jnp.sum(w * (jnp.sqrt(1.0 + (off / SETTINGS["scale"]) ** 2) - 1.0))

    def minimise(*given: Any) -> Array:
        solver = optax.adam(optax.cosine_decay_schedule(RATE, STEPS))

        def step(carry: tuple[Array, Any], _: None) -> tuple[tuple[Array, Any], None]:
            x, state = carry
            update, state = solver.update(jax.grad(loss)(x, *given), state, x)
            return (jnp.asarray(optax.apply_updates(x, update)), state), None

        start = jnp.zeros(len(operator.bounds))
        (x, _), _ = jax.lax.scan(step, (start, solver.init(start)), None, length=STEPS)
        return x

    found = jax.jit(jax.vmap(minimise))(sizes, target, weight)
    numbers = jax.jit(jax.vmap(lambda x: _bounded(operator, x)))(found)
    seconds = jax.jit(jax.vmap(operator.seconds))(numbers, sizes)
    curves = []
    for i, group in enumerate(groups):
        predicted = np.asarray(seconds[i], float)[: len(group.seconds)]
        own = {name: float(values[i]) for name, values in numbers.items()}
        curves.append(FittedCurve(group, own, np.abs(predicted / group.seconds - 1.0)))
    return curves


def shipped(found: Sequence[FittedCurve]) -> dict[tuple[str, str], FittedCurve]:
    """The curve that the catalogue takes, by (generation, operator): the first kernel preferred that was measured.

    None where even the best explains its rows badly: the operator is then taken over from another generation.
    """
    chosen: dict[tuple[str, str], FittedCurve] = {}
    for curve in found:
        s = curve.samples
        wanted = [tuple(one) for one in SETTINGS["shipped"][s.operator.kind].get(s.precision or "any", [])]
        key, rank = (s.generation, s.name), (s.library, s.variant)
        if rank not in wanted or s.generation not in SETTINGS["generations"]:
            continue
        if curve.summary()["median"] > SETTINGS["worst_median"]:
            continue
        other = chosen.get(key)
        if other is None or wanted.index(rank) < wanted.index((other.samples.library, other.samples.variant)):
            chosen[key] = curve
    return chosen


def curve_table(found: Sequence[FittedCurve]) -> pd.DataFrame:
    """One row per curve: what it was fitted to, its errors beyond the cache and over all rows, its numbers."""
    taken = {id(curve) for curve in shipped(found).values()}
    rows: list[dict[str, Any]] = []
    for curve in found:
        s, beyond, every = curve.samples, curve.summary(), curve.summary(beyond=False)
        row = {"operator": s.name, "generation": s.generation, "library": s.library, "variant": s.variant}
        row |= {"shipped": id(curve) in taken, "rows": every["rows"], "beyond_caches": beyond["rows"]}
        row |= {"median": beyond["median"], "worst_decile": beyond["worst_decile"]}
        row |= {"median_all": every["median"], "worst_decile_all": every["worst_decile"]}
        rows.append(row | curve.numbers)
    return pd.DataFrame(rows)


def errors_by_kind(found: Sequence[FittedCurve], only_shipped: bool = False) -> dict[str, dict[str, float]]:
    """Median and worst decile of the errors beyond the caches, all curves of a kind of operator together."""
    taken = {id(curve) for curve in shipped(found).values()}
    by_kind: dict[str, list[np.ndarray]] = {}
    for curve in found:
        if not only_shipped or id(curve) in taken:
            by_kind.setdefault(curve.samples.operator.kind, []).append(curve.errors[curve.samples.beyond])
    merged = {kind: np.concatenate(parts) for kind, parts in by_kind.items()}
    return {
        kind: {"rows": len(e), "median": float(np.median(e)), "worst_decile": float(np.quantile(e, 0.9))}
        for kind, e in merged.items()
    }


def kernels_file(found: Sequence[FittedCurve]) -> str:
    """kernels.toml with these curves in place; what they do not hold is kept."""
    head, curves = text("kernels.toml").split("\n# --- curves", 1)
    sections = {tuple(part[1 : part.index("]")].split(".")): part for part in re.split(r"(?m)^(?=\[)", curves)[1:]}
    sections |= {key: "\n".join(_section(*key, curve)) + "\n" for key, curve in shipped(found).items()}
    order = SETTINGS["generations"].index
    body = "".join(sections[key] for key in sorted(sections, key=lambda key: (order(key[0]), key[1])))
    return f"{head}\n# --- curves, last fitted {datetime.date.today():%Y-%m-%d} ---\n\n{body}"


def save_kernels(found: Sequence[FittedCurve], folder: Path) -> None:
    """Write kernels.toml with the curves that the catalogue takes, and curves.csv with all of them."""
    (folder / "kernels.toml").write_text(kernels_file(found), encoding="utf-8")
    curve_table(found).to_csv(folder / "curves.csv", index=False, float_format="%.4g")


def _section(generation: str, name: str, curve: FittedCurve) -> list[str]:
    s, beyond = curve.samples, curve.summary()
    kind = s.operator.kind
    numbers = {key: f"{curve.numbers[key]:.{SIGNIFICANT}g}" for key in NUMBERS[kind]}
    spans = ", ".join(f"{key} = [{s.sizes[key].min():.0f}, {s.sizes[key].max():.0f}]" for key in s.operator.spans)
    kernel = " ".join(word for word in (s.library, s.variant) if word)
    return [
        f"[{generation}.{name}]",
        *[f"{key} = {value}" for key, value in numbers.items()],
        f'kernel = "{kernel} on {", ".join(s.systems)}"',
        f"errors = {{ rows = {len(s.seconds)}, beyond_caches = {beyond['rows']}, median = {beyond['median']:.3f}, "
        f"worst_decile = {beyond['worst_decile']:.3f} }}",
        f"fitted = {{ {spans} }}",
        "",
    ]
