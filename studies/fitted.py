"""A workload fitted to a trace: the table of fits, the file a study can name, and the picture of each field."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
import yaml
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from rich.console import Console
from rich.table import Table

from breakeven.models.inputs import InputError
from breakeven.models.sessions import MAX_TOKENS, Sessions, sample_sessions, session_spec
from breakeven.models.traces import Trace, trace_sessions
from breakeven.models.traces.fitting import Fit
from breakeven.models.traces.preset import Fitted, curves, fit_trace
from breakeven.studies.figures import plt, save
from breakeven.studies.recorded import read_recorded
from breakeven.studies.schema import set_path

PICTURE = "fit.png"
_SAMPLED = 2000  # sessions drawn from the fit to set beside the trace's


def fit_file(
    file: Path, format: str | None, out: Path | None, skip_bad_rows: bool, changes: Sequence[str], screen: Console
) -> int:
    """Fit a workload to the trace in `file`, show it, and write it to `out`; `changes` are fields, NAME=VALUE."""
    given: dict[str, Any] = {"skip_bad_rows": skip_bad_rows}
    for change in changes:
        set_path(given, change)
    found = read_recorded(given if format is None else {**given, "format": format}, file)
    fitted = fit_trace(found.trace, found.shared_prefix_tokens)
    show_fit(found.trace, fitted, screen)
    if out is not None:
        write_fit(found.trace, fitted, out)
        screen.print(f"Written: {out} and {out.parent / PICTURE}", highlight=False, markup=False, soft_wrap=True)
    return 0


def show_fit(trace: Trace, fitted: Fitted, screen: Console) -> None:
    """Print what was read, every field's fit, and sessions drawn from the fits beside the recorded ones."""
    for line in (trace.summary(), *trace.reading.lines(), *fitted.notes):
        screen.print(line, highlight=False, markup=False, soft_wrap=True)
    out = Table(box=None, pad_edge=False, caption=_CAPTION, caption_justify="left", caption_style="dim")
    for heading in ("field", "values", "fit", "KS", "worst quantile"):
        out.add_column(heading, justify="left" if heading in ("field", "fit") else "right", overflow="fold")
    for one in fitted.fits:
        out.add_row(one.field, f"{one.n:,}", describe(one), f"{one.ks:.3f}", f"{one.worst:.0%}")
    screen.print(out)
    for line in comparison(trace, fitted):
        screen.print(line, highlight=False, markup=False, soft_wrap=True)


_CAPTION = (
    "KS: largest distance of the distribution functions; worst quantile: of those from 5 to 99 %, fitted/measured"
)


def describe(one: Fit) -> str:
    """A fit in a few words: LN(mu, sigma), a sum of two, or the median of its quantiles."""
    if one.kind.startswith("constant"):
        return f"{float(np.median(one.values)) if len(one.values) else 0.0:g}"
    if one.kind.startswith("quantiles"):
        return f"quantiles, median {float(np.median(one.values)):,.4g}"
    parts = one.table.get("mixture", [{"weight": 1.0, **one.table}])
    words = [f"{p['weight']:.3g} {_part(p)}" if len(parts) > 1 else _part(p) for p in parts]
    return " + ".join(words)


def _part(part: Mapping[str, Any]) -> str:
    if "lognormal" in part:
        return "LN({:.3f}, {:.3f})".format(*part["lognormal"])
    inner = part.get("mixture")
    return "(" + " + ".join(f"{p['weight']:.3g} {_part(p)}" for p in inner) + ")" if inner else f"{part['constant']:g}"


def comparison(trace: Trace, fitted: Fitted) -> list[str]:
    """Means over calls of the recorded sessions, and of sessions drawn from the fits."""
    drawn = sample_sessions(session_spec(fitted.fields), _SAMPLED, 0, 2 * MAX_TOKENS)
    pairs = zip(_means(trace_sessions(trace, fitted.shared_prefix_tokens)).items(), _means(drawn).values(), strict=True)
    lines = [f"mean {name}: {ours:,.4g} in the trace, {theirs:,.4g} from the fits" for (name, ours), theirs in pairs]
    if np.isfinite(fitted.arrival_cv):
        lines.append(
            f"session starts: {fitted.sessions_per_second:.4g} per second, intervals with a CV of "
            f"{fitted.arrival_cv:.3g} (arrivals: {{cv: {min(fitted.arrival_cv, 20.0):.3g}}})"
        )
    else:
        lines.append("session starts: not recorded, so the load and arrivals are for the study to say")
    return lines


def _means(sessions: Sessions) -> dict[str, float]:
    gaps = sessions.gap_after_s[~sessions.last]
    return {
        "calls per session": len(sessions.session) / (int(sessions.session[-1]) + 1),
        "prompt tokens": float(sessions.prompt_tokens.mean()),
        "output tokens": float(sessions.output_tokens.mean()),
        "new prefill tokens": float(sessions.resident_tokens.mean()),
        "gap, s": float(gaps.mean()) if len(gaps) else 0.0,
    }


def write_fit(trace: Trace, fitted: Fitted, path: Path) -> None:
    """Write the workload to `path` and the picture beside it."""
    about = {
        "summary": f"fitted to {Path(trace.reading.file).name}: {trace.summary()}",
        "sources": [Path(trace.reading.file).name],
    }
    notes = [*trace.reading.lines(), *fitted.notes, *comparison(trace, fitted)]
    notes += [f"{one.field}: n {one.n}, KS {one.ks:.3f}, worst quantile {one.worst:.0%}" for one in fitted.fits]
    text = "".join(f"# {' '.join(note.split())}\n" for note in ("A study says `workload: THIS FILE`.", *notes))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + _yaml({**about, **fitted.fields}), encoding="utf-8")
        draw_fit(trace, fitted, path.parent / PICTURE)
    except OSError as error:
        raise InputError("--out", str(path), f"cannot be written: {error.strerror}") from None


def _yaml(fields: Mapping[str, Any]) -> str:
    """A field a line, its distribution beside it."""
    lines = []
    for name, value in fields.items():
        text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True, sort_keys=False)
        lines.append(f"{name}: {text.removesuffix('...' + chr(10)).strip()}\n")
    return "".join(lines)


def draw_fit(trace: Trace, fitted: Fitted, path: Path) -> None:
    """Draw measured and fitted distribution functions, a panel a field."""
    drawn = [one for one in fitted.fits if len(one.values) and one.values[0] < one.values[-1]]
    columns = min(3, max(len(drawn), 1))
    rows = -(-max(len(drawn), 1) // columns)
    measured, fit_colour = sns.color_palette("colorblind", 2)
    with sns.axes_style("whitegrid"), sns.plotting_context("notebook"):
        figure, grid = plt.subplots(
            rows, columns, figsize=(4.6 * columns, 3.2 * rows + 0.8), layout="constrained", squeeze=False
        )
        for axes in grid.flat[len(drawn) :]:
            axes.set_axis_off()
        for axes, one in zip(grid.flat, drawn, strict=False):
            at, counted, curve = curves(one)
            frame = pd.DataFrame({"value": at, "measured": counted, "fitted": curve})
            sns.lineplot(frame, x="value", y="measured", ax=axes, color=measured, linewidth=4, alpha=0.6)
            sns.lineplot(frame, x="value", y="fitted", ax=axes, color=fit_colour, linewidth=1.6)
            axes.set(xscale="log", xlabel=_unit(one.field), ylabel="", ylim=(-0.02, 1.02))
            narrow = at[-1] < 50.0 * at[0]
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if narrow else (1.0,)))
            axes.xaxis.set_major_formatter(FuncFormatter(_short))
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.0f} %"))
            axes.set_title(f"{one.field}\n{one.kind}, KS {one.ks:.3f}, n {one.n:,}", loc="left", fontsize="medium")
        figure.suptitle(f"{Path(trace.reading.file).name}: share of values up to x", x=0.01, ha="left", weight="bold")
        handles = [Line2D([], [], color=measured, linewidth=4, alpha=0.6), Line2D([], [], color=fit_colour)]
        figure.legend(handles, ["measured", "fitted"], loc="upper right", ncols=2, frameon=False)
        save(figure, path)


def _short(value: float, _: object = None) -> str:
    """A tick's number: 20k, 1M."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:.3g}"


def _unit(field: str) -> str:
    words = {"s": "s", "tokens": "tokens", "early": "tokens", "session": "calls", "fraction": "share of the output"}
    return words[field.rsplit("_", 1)[1]]
