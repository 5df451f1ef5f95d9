"""What a run prints: the front, the cheapest deployment that meets the target, and whether a split pays."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from breakeven.studies.explain import Explanation, Section
from breakeven.studies.mixed import COMPARED, compared
from breakeven.studies.result import Result, records
from breakeven.studies.simulate import Report
from breakeven.studies.words import seconds as seconds_words
from breakeven.studies.words import share

SHOWN_ROWS = 16
WIDE = 130
NARROW = ("deployment", "topology", "cost_per_hour_usd", "slo_attainment", "ttft_p95_s")

Form = Callable[[Any], str]
_TERM = re.compile(r" \(([a-z]+)\)(?=_s$|$)")  # what dominates a row of a bill


_COLUMNS: tuple[tuple[str, str, Form], ...] = (
    ("deployment", "deployment", str),
    ("topology", "topology", str),
    ("kv", "KV", str),
    ("cost_per_hour_usd", "USD/h", lambda v: f"{v:,.2f}"),
    ("slo_attainment", "attainment", share),
    ("slo_attainment_low", "80 % from", share),
    ("slo_attainment_high", "to", share),
    ("slo_attainment_simulated", "simulated", lambda v: share(v) if np.isfinite(v) else ""),
    ("probability_meets_target", "P(met)", share),
    ("expected_cost_per_hour_usd", "E[USD/h]", lambda v: f"{v:,.2f}"),
    ("ttft_p95_s", "TTFT p95", seconds_words),
    ("tpot_p95_s", "TPOT p95", seconds_words),
    ("utilization_max", "busiest", lambda v: f"{v:.0%}"),
    ("cache_hit", "prefix hit", lambda v: f"{v:.1%}"),
    ("unverified", "", lambda v: "unverified" if v else ""),
)
_EXTRA: dict[str, tuple[str, Form]] = {
    "cost_per_million_tokens_usd": ("USD/M tokens", lambda v: f"{v:,.2f}"),
    "cost_per_session_usd": ("USD/session", lambda v: f"{v:,.3g}"),
    "cost_per_solved_task_usd": ("USD/solved task", lambda v: f"{v:,.3g}"),
    "goodput_per_s": ("goodput/s", lambda v: f"{v:,.3g}"),
    "session_p95_s": ("session p95", seconds_words),
    "energy_per_token_j": ("J/token", lambda v: f"{v:,.3g}"),
    "accelerators": ("accelerators", lambda v: f"{v:,.0f}"),
    "sessions_per_accelerator": ("sessions/accelerator", lambda v: f"{v:,.3g}"),
    "sessions_per_kw": ("sessions/kW", lambda v: f"{v:,.3g}"),
    "solved_tasks_per_hour": ("solved/h", lambda v: f"{v:,.4g}"),
    "sessions_per_second": ("sessions/s", lambda v: f"{v:,.3g}"),
}


def front_columns(frame: pd.DataFrame, also: tuple[str, ...] = ()) -> list[tuple[str, str, Form]]:
    """(column, heading, form) of what a table of deployments shows."""
    shown = {name for name, *_ in _COLUMNS}
    extra = [(name, *_EXTRA[name]) for name in also if name in _EXTRA and name not in shown]
    return [c for c in (*_COLUMNS[:7], *extra, *_COLUMNS[7:]) if c[0] in frame]


def screen() -> Console:
    """Standard output: as wide as the terminal, wide enough for a table elsewhere."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def _table(frame: pd.DataFrame, title: str, also: tuple[str, ...], width: int) -> Table:
    """Deployments, one a row; a narrow screen gets only what decides."""
    columns = front_columns(frame, also)
    if width < WIDE:
        columns = [c for c in columns if c[0] in (*NARROW, *also)]
    out = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    out.add_column("row", justify="right", style="dim")
    for name, heading, _ in columns:
        words = name in ("deployment", "topology", "kv")
        out.add_column(heading, justify="left" if words else "right", no_wrap=name != "deployment")
    for index, row in zip(frame.index, records(frame), strict=True):
        out.add_row(str(index), *[form(row[name]) for name, _, form in columns])
    return out


def thinned(frame: pd.DataFrame, most: int = SHOWN_ROWS) -> pd.DataFrame:
    """At most `most` rows, first and last among them: those that change the odds of missing the SLO most."""
    odds = np.log(np.maximum(1.0 - frame["slo_attainment"].to_numpy(float), 1e-9))
    step = 0.0
    kept = list(range(len(frame)))
    while len(kept) > most:
        step = 1.5 * step + 0.01
        kept = [0]
        for i in range(1, len(frame)):
            if abs(odds[i] - odds[kept[-1]]) > step:
                kept.append(i)
        kept = sorted({*kept, len(frame) - 1})
    return frame.iloc[kept]


def show_result(result: Result, console: Console) -> None:
    """Print a run: front, best of each family, decision, counts."""
    also = tuple(result.found.objectives) + (("sessions_per_second",) if result.study.max_load else ())
    shown = thinned(result.front)
    note = f" ({len(shown)} of {len(result.front)} rows; all in front.csv)" if len(shown) < len(result.front) else ""
    console.print(_table(shown, f"Front: {' and '.join(result.found.objectives)}{note}", also, console.width))
    console.print()
    if len(result.families):
        table = _table(result.families, "Best of each topology that meets the target", also, console.width)
        first = float(result.families[result.rank_by].iloc[0])
        table.add_column("ratio", justify="right")
        table.columns[-1]._cells = [f"{value / first:.2f}" for value in result.families[result.rank_by]]
        console.print(table)
        console.print()
    if result.mixed is not None and result.mixed.best is not None:
        console.print(_mix(compared(result.mixed.best, result.best)))
        console.print()
    for line in result.answer():
        console.print(line, highlight=False, soft_wrap=True)
    found = result.found
    rate = found.evaluated / max(result.seconds, 1e-9)
    console.print(
        f"{found.evaluated:,} candidates evaluated in {result.seconds:.1f} s ({rate:,.0f} per second, "
        f"{result.search}); {found.feasible:,} feasible{_verified(result)}.",
        highlight=False,
        soft_wrap=True,
    )
    if result.mixed is not None:
        mixed = result.mixed
        console.print(
            f"Cells: {mixed.evaluated:,} candidates evaluated in {mixed.seconds:.1f} s; {mixed.simulated} simulated.",
            highlight=False,
        )
    if result.history is not None and result.history.records:
        trials, growth = result.history.records[-1][0], result.history.last_doubling
        known = f"; the second half of them added {growth:.2%} to the hypervolume" if np.isfinite(growth) else ""
        if result.history.certain:
            known = "; all that costs no more than what attains everything was evaluated: the front is complete"
        console.print(f"{trials:,} trials{known}.", highlight=False, soft_wrap=True)


def _mix(lines: list[list[str]]) -> Table:
    title = "The cheapest two cells with unlike accelerators that meet the target"
    out = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading in COMPARED:
        out.add_column(heading, justify="left" if heading in ("", "deployment", "topology") else "right")
    for cells in lines:
        out.add_row(*cells)
    return out


def _verified(result: Result) -> str:
    if result.verification is None:
        return ""
    return f"; {len(result.verification.verdicts)} simulated in {result.verification.spent_s:.1f} s"


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    if name.endswith("_s"):
        return seconds_words(float(value))
    number = float(value)
    return f"{number:,.0f}" if abs(number) >= 1e4 else f"{number:,.4g}"


def show_explanation(found: Explanation, console: Console, against: Explanation | None = None) -> None:
    """Print a deployment's sections; beside another's, with the difference of numbers."""
    for title, section in found.sections.items():
        table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=against is not None)
        table.add_column("", overflow="fold")
        table.add_column(found.title, justify="left", overflow="fold")
        other = against.sections.get(title, {}) if against is not None else {}
        if against is not None:
            table.add_column(against.title, overflow="fold")
            table.add_column("difference", justify="right")
        for row, (name, value, beside) in _aligned(section, other).items():
            cells = [row.removesuffix("_s").replace("_", " ") + name, _shown(row, value)]
            if against is not None:
                cells += [_shown(row, beside), _difference(row, value, beside)]
            table.add_row(*cells)
        console.print(table)
        console.print()


def _aligned(section: Section, other: Section) -> dict[str, tuple[str, Any, Any]]:
    """Rows of either section in order: the words in brackets after their names, and the value in each, None where it
    has none."""
    own, theirs = ({_TERM.sub("", name): (name, value) for name, value in part.items()} for part in (section, other))
    names, at = list(own), 0
    for name in theirs:
        if name in own:
            at = names.index(name) + 1
        else:
            names.insert(at, name)
            at += 1
    rows = {}
    for name in names:
        found = [part.get(name, ("", None)) for part in (own, theirs)]
        terms = dict.fromkeys(match[1] for full, _ in found if (match := _TERM.search(full)))
        rows[name] = (f" ({' / '.join(terms)})" if terms else "", found[0][1], found[1][1])
    return rows


def show_simulation(report: Report, console: Console) -> None:
    """Print what a simulation showed beside the model's prediction, and what is wrong with it."""
    out = Table(title=report.title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    recorded = any(np.isfinite(line.recorded) for line in report.lines)
    for heading in ("", "simulated", "95 % interval", "model", *(["recorded"] if recorded else [])):
        out.add_column(heading, justify="left" if not heading else "right")
    for line in report.lines:
        value, low, high = (_measured(line.name, x) for x in line.simulated)
        known = np.isfinite(line.simulated.low) and np.isfinite(line.simulated.high)
        cells = [value, f"{low} to {high}" if known else "", _measured(line.name, line.model)]
        cells += [_measured(line.name, line.recorded)] if recorded else []
        out.add_row(line.name.removesuffix("_s").replace("_", " "), *cells)
    console.print(out)
    found = report.replications
    events = sum(run.events for run in found.runs)
    parts = f" in {len(found.runs)} parts" if len(found.runs) > 1 else ""
    console.print(f"{found.calls:,} calls measured{parts}, {events:,} events.", highlight=False)
    for words in report.warnings:
        console.print(f"Warning: {words}.", highlight=False, soft_wrap=True)


def _measured(name: str, value: float) -> str:
    if not np.isfinite(value):
        return "never" if value > 0.0 else ""
    if name.endswith("_s"):
        return seconds_words(value)
    return f"{value:,.4g}" if name.endswith("_per_second") else share(value)


def _difference(name: str, value: Any, other: Any) -> str:
    if isinstance(value, bool | str | dict) or isinstance(other, bool | str | dict) or None in (value, other):
        return ""
    change = float(value) - float(other)
    sign = "-" if change < 0 else "+"
    return sign + _shown(name, abs(change))


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Progress on standard error: a bar on a terminal, a plain line for every tenth elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain_progress(what)
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(what, total=None)

    def tell(done: int, total: int) -> None:
        """Shown from the first word of it to the last, so that one bar can follow another."""
        if done < total:
            bar.start()
        bar.update(task, completed=done, total=total)
        if done >= total:
            bar.stop()

    try:
        yield tell
    finally:
        bar.stop()


def _plain_progress(what: str) -> Callable[[int, int], None]:
    told = -1

    def tell(done: int, total: int) -> None:
        nonlocal told
        tenth = 10 * done // max(total, 1)
        if tenth > told:
            told = tenth
            print(f"{what}: {done:,} of {total:,}", file=sys.stderr, flush=True)

    return tell
