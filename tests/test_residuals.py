"""Intervals around predictions: what residuals give, what they hold on pairs left out, where they widen."""

import tomllib

import numpy as np
import pytest

from breakeven.models.catalog import table
from breakeven.models.residuals import EVERY, ROOMY, fill_class, inside, interval, residual_classes, residuals_toml


def lognormal(n: int, spread: float, seed: int) -> np.ndarray:
    return np.exp(spread * np.random.default_rng(seed).standard_normal((n, 2)))


def test_intervals_of_a_known_spread_hold_eight_tenths():
    ratio = lognormal(4000, 0.3, 0)
    pairs = [f"pair {k % 8}" for k in range(len(ratio))]
    data = tomllib.loads(
        residuals_toml(["vllm"] * len(ratio), [False] * len(ratio), np.zeros(len(ratio)), ratio, pairs, "drawn")
    )
    found = interval("vllm", [False], [0.1], data["class"])
    assert np.log(found.ttft_high[0]) == pytest.approx(1.2816 * 0.3, rel=0.2)
    assert data["coverage"]["ttft"] == pytest.approx(0.8, abs=0.04)
    fresh = lognormal(4000, 0.3, 1)
    assert inside(interval("vllm", np.zeros(4000), np.zeros(4000), data["class"]), fresh)[1] == pytest.approx(
        0.8, abs=0.05
    )


def test_pairs_that_differ_as_wholes_widen_the_interval():
    """Within a pair all residuals are alike: the tail moves out until the pairs left out are held, as far as it can."""
    shift = np.exp(np.repeat(0.4 * np.random.default_rng(2).standard_normal((40, 2)), 50, axis=0))
    pairs = np.repeat(np.arange(40), 50).astype(str).tolist()
    data = tomllib.loads(residuals_toml(["vllm"] * 2000, [False] * 2000, np.zeros(2000), shift, pairs, "drawn"))
    assert data["coverage"]["tpot"] >= 0.75


def test_a_class_of_few_residuals_takes_those_of_every_engine():
    ratio = lognormal(200, 0.3, 3)
    rows = residual_classes(["vllm"] * 195 + ["sglang"] * 5, [False] * 200, np.zeros(200), ratio, (0.1, 0.1))
    assert [(r["engine"], r["pools"], r["kv_cache"]) for r in rows] == [
        ("vllm", "joint", ROOMY),
        (EVERY, "joint", ROOMY),
    ]
    assert interval("sglang", [True], [0.2], rows).tpot_low[0] == rows[1]["tpot"][0]


def test_the_cache_about_full_is_a_band_wider_than_with_room():
    assert fill_class([0.2, 0.6, 1.0, 2.0, np.nan]) == [ROOMY, "0.5 to 0.7", "0.7 to 1.4", "above 1.4", ROOMY]
    found = interval("vllm", [False, False], [0.2, 1.0])
    width = found.ttft_high / found.ttft_low
    assert width[1] > 2.0 * width[0] and found.band.tolist() == [False, True]


def test_shipped_classes_state_rows_and_hold_pairs_left_out():
    data = table("residuals")
    assert all(row["rows"] >= 5 and row["ttft"] == sorted(row["ttft"]) for row in data["class"])
    assert min(data["coverage"].values()) > 0.75
