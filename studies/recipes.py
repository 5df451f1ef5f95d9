"""Batch limits of published split deployments that a table of measurements leaves out, from their recipes' names.

Where the concurrency exceeds what the decode engines hold together, calls wait for others to end: of 36 requests on
four engines of eight, four wait at a time, for 36 / 32 - 1 of a call's decode on average.
"""

import math
import re

from breakeven.models.catalog import table
from breakeven.studies.measured_layout import Layout

NAME = re.compile(r"ctx(\d+)_gen(\d+)_(dep|dp|tep|tp)(\d+)_batch(\d+)_mtp(\d)")
LENGTHS: dict[tuple[float, float], str] = {(1024, 1024): "1k1k", (1024, 8192): "1k8k", (8192, 1024): "8k1k"}  # nominal


def recipe(
    system: tuple[str, str, str, str],
    lengths: tuple[float, float],
    layouts: tuple[Layout, ...],
    concurrency: float,
    drafts: bool,
) -> tuple[float, int | None]:
    """(sequences that each decode engine holds, tokens drafted) by its published recipe; (nan, None) without one.

    `system` is (model, engine, accelerator, precision); `lengths` are the nominal prompt and output tokens.
    """
    recipes, (model, engine, accelerator, precision) = table("recipes"), system
    if len(layouts) != 2 or (model, engine) != (recipes["model"], recipes["engine"]):
        return math.nan, None
    named = recipes.get(accelerator, {}).get(precision, {}).get(LENGTHS.get(lengths, ""), {})
    prefill, decode = layouts
    wanted = (prefill.workers, decode.workers, decode.data_parallel > 1, decode.accelerators, drafts)
    for name, concurrencies in named.items():
        match = NAME.fullmatch(name)
        assert match, name
        ctx, gen, size, batch, drafted = (int(match.group(i)) for i in (1, 2, 4, 5, 6))
        ranked = match.group(3) in ("dep", "dp")
        if (ctx, gen, ranked, size, drafted > 0) == wanted and concurrency in concurrencies:
            return float(batch * (size if ranked else 1)), drafted
    return math.nan, None
