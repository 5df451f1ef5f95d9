"""The break-even point on one axis: where the best split starts, or stops, to cost less than the best baseline.

Costs are those of whole accelerators, so the ratio moves in steps: the point is bracketed by bisection, and the winner
differs on its two sides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from breakeven.models.inputs import InputError
from breakeven.optimizer.search import Progress
from breakeven.studies.axes import Axis, Value, current, full_path, read_axis, unit
from breakeven.studies.optima import SHARED, Changes, Found, Optima, cheapest
from breakeven.studies.payoff import ratio, sides, sign
from breakeven.studies.study import Study

TABLE = "solve.csv"
SCAN = 25  # values along the axis between which crossings are sought
WIDTH = 1e-3  # relative, of the final bracket
REACH = 2.0  # a shifted break-even is sought within this factor
NUDGE = 1.1  # factor by which other inputs are moved


@dataclass(frozen=True)
class BreakEven:
    """A crossing: the split pays below or above `value`."""

    path: str
    low: float  # bracket; `value` is its middle
    high: float
    ratio_low: float
    ratio_high: float
    winner_low: str
    winner_high: str

    @property
    def value(self) -> float:
        return _middle(self.low, self.high)

    @property
    def pays_above(self) -> bool:
        return sign(self.ratio_high) < 0


@dataclass(frozen=True)
class Shift:
    """What 10 % more of another input does to the break-even."""

    path: str
    elasticity: float  # d ln(break-even) / d ln(input); nan where it leaves the range sought
    unit: str


@dataclass(frozen=True)
class Solved:
    """Crossings along an axis, that nearest to the study first; the ratio at values scanned; what moves the first."""

    axis: Axis
    ratios: np.ndarray
    crossings: tuple[BreakEven, ...]
    slope: float  # d ln(ratio) / d ln(value) across the first crossing, over a factor of 1.25 either side
    shifts: tuple[Shift, ...]

    def save(self, folder: Path) -> None:
        """Write solve.csv: the ratio at the scanned values and either side of each crossing."""
        rows = [{self.axis.path: v, "ratio": r} for v, r in zip(self.axis.values, self.ratios, strict=True)]
        for point in self.crossings:
            rows.append({self.axis.path: point.low, "ratio": point.ratio_low, "crossing": True})
            rows.append({self.axis.path: point.high, "ratio": point.ratio_high, "crossing": True})
        table = pd.DataFrame(rows).sort_values(self.axis.path, kind="stable")
        table.to_csv(folder / TABLE, index=False, float_format="%.7g")


def _middle(low: float, high: float) -> float:
    return float(np.sqrt(low * high)) if low > 0.0 else 0.5 * (low + high)


def solve_axis(text: str, study: Study) -> Axis:
    """The axis that `--solve PATH` or `--solve PATH=a:b` names; without a range 1/16 to 16 times what stands there."""
    path, equals, values = text.partition("=")
    path = full_path(path, study)
    if not equals:
        now = current(study, path)
        if not now or now < 0.0:
            raise InputError("--solve", text, "PATH=a:b: the study states no positive number there")
        values = f"{now / 16.0}:{now * 16.0}"
    ends = values.split(":")
    if len(ends) != 2:
        raise InputError("--solve", text, "PATH or PATH=a:b")
    try:
        log = ":log" if float(ends[0].lstrip("x")) > 0.0 else ""
    except ValueError:
        raise InputError("--solve", text, "PATH or PATH=a:b, two numbers") from None
    return read_axis(f"{path}={ends[0]}:{ends[1]}:{SCAN}{log}", study, "--solve")


@dataclass
class _Line:
    """The ratio along one path, with other fields held changed."""

    optima: Optima
    path: str
    splits: Sequence[str]
    base: Sequence[str]
    whole: bool  # the axis takes whole numbers

    def at(self, value: float, held: Changes) -> tuple[float, Found]:
        given: Value = round(value) if self.whole else value
        found = self.optima.at({**held, self.path: given})[1]
        return ratio(found, self.splits, self.base), found

    def bisect(self, low: float, high: float, held: Changes) -> tuple[float, float]:
        """The bracket of a sign change between `low` and `high`, narrowed."""
        sign_low = sign(self.at(low, held)[0])
        while high - low > (1.0 if self.whole else WIDTH * abs(high)):
            middle = _middle(low, high)
            if self.whole:
                middle = float(min(max(round(middle), low + 1), high - 1))
            if sign(self.at(middle, held)[0]) == sign_low:
                low = middle
            else:
                high = middle
        return low, high


def solve(
    study: Study,
    axis: Axis,
    baseline: str = SHARED,
    optima: Optima | None = None,
    progress: Progress | None = None,
    moving: Progress | None = None,
    shifts: bool = True,
) -> Solved:
    """Every break-even along an axis, the nearest to the study's own value first, and what moves that one: the local
    sensitivity to the study's other inputs."""
    if not axis.numeric:
        raise InputError("--solve", list(axis.values), "numbers")
    splits, base = sides(study, baseline)
    optima = optima or Optima(study, (axis,))
    found = [each for each in optima.all([{axis.path: v} for v in axis.values], progress) if each is not None]
    ratios = np.array([ratio(each[1], splits, base) for each in found])
    line = _Line(optima, axis.path, splits, base, all(isinstance(v, int) for v in axis.values))
    values, signs = axis.numbers, [sign(r) for r in ratios]
    crossings = [
        _crossing(line, values[i], values[i + 1]) for i in range(len(values) - 1) if signs[i] * signs[i + 1] < 0
    ]
    if not crossings:
        return Solved(axis, ratios, (), np.nan, ())
    first = nearest(crossings, axis.current)
    ordered = (first, *[c for c in crossings if c is not first])
    moved = _shifts(line, first, study, moving) if shifts else ()
    return Solved(axis, ratios, ordered, _slope(line, first.value), moved)


def nearest(crossings: Sequence[BreakEven], now: float | None) -> BreakEven:
    """The crossing nearest to where the study stands."""
    if not now or now <= 0.0:
        return crossings[0]
    return min(crossings, key=lambda c: abs(np.log(max(c.value, 1e-30) / now)))


def _crossing(line: _Line, low: float, high: float) -> BreakEven:
    low, high = line.bisect(low, high, {})
    (before, left), (after, right) = line.at(low, {}), line.at(high, {})
    winners = [cheapest(found, found) for found in (left, right)]
    return BreakEven(line.path, low, high, before, after, *["" if w is None else w[0] for w in winners])


def _slope(line: _Line, value: float) -> float:
    """Change of ln(ratio) over that of ln(value), a factor of 1.25 below to above; nan where one side fails."""
    low, high = (line.at(value * factor, {})[0] for factor in (0.8, 1.25))
    if not (np.isfinite(low) and np.isfinite(high) and low > 0.0 and high > 0.0):
        return float("nan")
    return float(np.log(high / low) / np.log(1.25 / 0.8))


def _shifts(line: _Line, point: BreakEven, study: Study, progress: Progress | None) -> tuple[Shift, ...]:
    """Elasticity of the break-even by each of the study's main inputs, from moving it by 10 % either way."""
    paths = [path for path in main_inputs(study) if path != line.path]
    out = []
    for done, path in enumerate(paths):
        now = current(study, path)
        assert now is not None
        moved = [_near(line, point, {path: now * factor}) for factor in (1.0 / NUDGE, NUDGE)]
        elasticity = float(np.log(moved[1] / moved[0]) / (2.0 * np.log(NUDGE)))
        out.append(Shift(path, elasticity, unit(path)))
        if progress:
            progress(done + 1, len(paths))
    return tuple(sorted(out, key=lambda s: -abs(np.nan_to_num(s.elasticity, nan=0.0))))


def _near(line: _Line, point: BreakEven, held: Changes) -> float:
    """The break-even nearest to `point` with other inputs changed; nan where it is out of reach."""
    steps = np.geomspace(1.0 / REACH, REACH, 13)
    values = point.value * steps
    signs = [sign(line.at(value, held)[0]) for value in values]
    wanted = sign(point.ratio_low)
    brackets = [i for i in range(len(values) - 1) if signs[i] == wanted and signs[i + 1] == -wanted]
    if not brackets:
        return float("nan")
    i = min(brackets, key=lambda i: abs(i - 5.5))
    return _middle(*line.bisect(float(values[i]), float(values[i + 1]), held))


def main_inputs(study: Study) -> list[str]:
    """The inputs that a break-even is asked about: load, bounds, workload, hardware, prices; where a number stands."""
    written = study.written
    paths = ["load"] if written.load != "max" else []
    paths += [f"slo.{name}" for name in ("ttft_s", "tpot_s", "call_s", "session_s") if getattr(written.slo, name)]
    if not study.recorded:
        names = ["output_tokens", "first_prompt_tokens"]
        if study.session_spec.calls_per_session.mean() > 1.0:
            names += ["growth_tokens", "tool_gap_s"]
        paths += [f"workload.scale.{name}" for name in names]
    for accelerator in study.accelerators:
        paths += [f"accelerators.{accelerator.id}.{name}" for name in ("price", "compute", "memory_bandwidth")]
    paths += [f"links.{link.id}.bandwidth" for link in study.names.links]
    return [full_path(path, study) for path in paths]
