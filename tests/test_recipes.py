"""Batch limits read off the names of published recipes."""

import math

import pytest

from breakeven.models.catalog import table
from breakeven.models.hardware import accelerators
from breakeven.studies.measured_layout import Layout
from breakeven.studies.recipes import LENGTHS, NAME, recipe

GB200 = ("deepseek-r1", "tensorrt-llm", "gb200-nvl72")
PREFILL = Layout(1, 8, 8, 1, 1.0)


@pytest.mark.parametrize(
    ("precision", "lengths", "layouts", "concurrency", "drafts", "batch"),
    [
        ("fp8", (1024, 8192), (PREFILL, Layout(8, 1, 8, 1, 4.0)), 36.0, False, 8.0),
        ("fp8", (1024, 8192), (PREFILL, Layout(1, 32, 32, 1, 1.0)), 564.0, False, 16.0 * 32),  # 16 on each rank
        ("fp8", (8192, 1024), (PREFILL, Layout(8, 1, 8, 1, 3.0)), 6.0, False, 1.0),
        ("fp8", (8192, 1024), (PREFILL, Layout(8, 1, 8, 1, 3.0)), 6.0, True, 2.0),  # another recipe with drafts
        ("fp8", (8192, 1024), (PREFILL, Layout(8, 1, 8, 1, 3.0)), 7.0, False, math.nan),
        ("fp8", (2048, 2048), (PREFILL, Layout(8, 1, 8, 1, 3.0)), 6.0, False, math.nan),
        ("bf16", (8192, 1024), (PREFILL, Layout(8, 1, 8, 1, 3.0)), 6.0, False, math.nan),
        ("fp8", (8192, 1024), (Layout(8, 1, 8),), 6.0, False, math.nan),
    ],
)
def test_a_recipe_tells_what_its_engines_hold(precision, lengths, layouts, concurrency, drafts, batch):
    found, drafted = recipe((*GB200, precision), lengths, layouts, concurrency, drafts)
    assert found == pytest.approx(batch, nan_ok=True) and drafted == (None if math.isnan(batch) else 3 * drafts)
    other = ("deepseek-r1", "sglang", "gb200-nvl72", precision)
    assert recipe(other, lengths, layouts, concurrency, drafts)[1] is None


def test_every_name_is_read_and_no_recipe_runs_far_beyond_what_fits():
    rows = {name: row for name, row in table("recipes").items() if isinstance(row, dict)}
    assert set(rows) <= set(accelerators()) and len(rows) == 6
    for precisions in rows.values():
        for lengths in precisions.values():
            assert set(lengths) <= set(LENGTHS.values())
            for name, concurrencies in [pair for named in lengths.values() for pair in named.items()]:
                match = NAME.fullmatch(name)
                assert match
                ranks = int(match.group(4)) if match.group(3) in ("dep", "dp") else 1
                assert max(concurrencies) <= 3.0 * int(match.group(2)) * ranks * int(match.group(5))
