"""What all pictures share: a style, a line that says what made them, and PNG and SVG of each."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from matplotlib.figure import Figure

from breakeven.models.topology import TOPOLOGIES

DPI = 150
mpl.rcParams["svg.fonttype"] = "none"  # text stays text
mpl.rcParams["svg.hashsalt"] = "breakeven"  # the same picture is the same file


@contextmanager
def style() -> Iterator[None]:
    """The look of every picture."""
    with sns.axes_style("whitegrid"), sns.plotting_context("notebook"):
        yield


def topology_colours() -> dict[str, Any]:
    """A colour per topology, the same in every picture, distinguishable by the colour-blind; one for all without a
    name."""
    palette = sns.color_palette("colorblind", len(TOPOLOGIES) + 1)
    return defaultdict(lambda: palette[-1], zip(TOPOLOGIES, palette[:-1], strict=True))


def save(figure: Figure, path: Path, note: str = "") -> None:
    """Write `path` (PNG) and the SVG beside it, with a small line below that says what made the picture."""
    if note:
        strip = 0.3 / figure.get_figheight()
        layout = figure.get_layout_engine()
        if layout is not None:
            layout.set(rect=(0.0, strip, 1.0, 1.0 - strip))  # type: ignore[call-arg]
        figure.text(0.995, 0.25 * strip, note, ha="right", va="bottom", fontsize="small", color="0.4")
    figure.savefig(path.with_suffix(".png"), dpi=DPI)
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    plt.close(figure)


def legend_below(figure: Figure, handles: list[Any], columns: int) -> None:
    """A legend under the axes, above the line that says what made the picture."""
    columns = min(columns, len(handles))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, borderaxespad=1.7)


def made_by(record: dict[str, Any], what: str = "") -> str:
    """`study coding-agent · seed 0`, after what was counted."""
    name = record["study"] if isinstance(record["study"], str) else record["study"]["name"]
    return " · ".join(part for part in (what, f"study {name}", f"seed {record['seed']}") if part)


def short(value: float) -> str:
    """A number on an axis: at most three digits that matter.

    >>> short(0.0707107), short(12345.0), short(2.0)
    ('0.0707', '12,300', '2')
    """
    if value == 0.0 or not np.isfinite(value):
        return f"{value:g}"
    digits = 2 - int(np.floor(np.log10(abs(value))))
    text = f"{round(value, digits):,.{max(digits, 0)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
