"""Curves of operators: limits of their form, a fit that finds the curve it was given, and the measured kernels."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from breakeven.models import operators
from breakeven.models.catalog import table
from breakeven.models.inputs import InputError
from breakeven.models.kernel_curves import NUMBERS, OPERATORS, curves, extrapolated, parents, provenance, sources, split
from breakeven.studies.kernel_fit import errors_by_kind, fit_kernels, kernels_file, shipped
from breakeven.studies.kernels import is_kernel_table, read_kernels

KERNELS = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "calibration" / "kernels"
needs_kernels = pytest.mark.skipif(not KERNELS.exists(), reason="the measured kernels are not in this checkout")


def test_a_roofline_reaches_its_shares_and_its_latency():
    curve = {"share": 0.5, "read": 0.8, "latency_s": 2e-6}
    small = operators.kernel_s(2e-6, operators.read_s(curve, 0.0, 1e12), operators.compute_s(curve, 0.0, 1e15))
    large = operators.kernel_s(2e-6, operators.read_s(curve, 8e11, 1e12), operators.compute_s(curve, 1e12, 1e15))
    assert float(small) == pytest.approx(2e-6)
    assert float(large) == pytest.approx(1.0, rel=1e-3)


def test_half_of_the_link_is_left_at_half_bytes():
    """b = half: (b + sqrt(b half)) = 2 b. A ring of 8 sends 2 x 7/8 of the message, of 2 ranks just the message."""
    curve = {"share": 1.0, "half_bytes": 1e6, "ring_power": 1.0, "latency_s": 1e-6, "per_rank": 0.1}
    assert float(sum(operators.exchange_s(curve, 1e6, 1e9))) == pytest.approx(2e-3)
    assert float(operators.allreduce_bytes(curve, 1.0, 8.0)) == pytest.approx(1.75)
    assert float(operators.allreduce_bytes(curve, 1.0, 2.0)) == 1.0
    assert float(operators.collective_latency_s(curve, 8.0)) == pytest.approx(1.6e-6)


def test_a_token_reaches_the_ranks_that_hold_its_experts():
    """All others where it has very many experts, k of very many ranks, (r - 1) / r of one for one expert."""
    assert float(operators.hit_ranks(8.0, 1e4)) == pytest.approx(7.0)
    assert float(operators.hit_ranks(1e6, 8.0)) == pytest.approx(8.0, rel=0.1)
    assert float(operators.hit_ranks(4.0, 1.0)) == pytest.approx(0.75)
    assert float(operators.hit_ranks(1.0, 8.0)) == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize("generation", ["hopper", "blackwell", "blackwell-ultra", "ampere", "cdna3", "unheard-of"])
def test_every_generation_has_every_number(generation):
    found = curves(generation)
    assert set(found) == set(OPERATORS)
    for operator, numbers in found.items():
        assert set(numbers) == set(NUMBERS[split(operator)[0]]) and all(v > 0.0 for v in numbers.values())


def test_what_is_not_measured_is_taken_over_and_said():
    assert parents("blackwell-ultra") == ["blackwell-ultra", "blackwell", "hopper"]
    assert provenance("cdna3", "gemm_fp8")[0] == "hopper"
    assert provenance("hopper", "gemm_fp4")[1] == "gemm_fp8"  # the next wider arithmetic of its own
    words = sources("blackwell-ultra")
    assert "allreduce" in words["kernels of blackwell-ultra"]
    assert "gemm_bf16" in words["kernels of blackwell-ultra, taken over from blackwell"]
    assert extrapolated("hopper", "prefill_attention_bf16", {"isl": 1e6})
    assert not extrapolated("hopper", "prefill_attention_bf16", {"isl": 4096.0})


def test_catalogue_states_errors_and_ranges_of_every_curve():
    for generation, rows in table("kernels").items():
        for row in rows.values() if generation != "inherits" else ():
            assert {"rows", "beyond_caches", "median", "worst_decile"} == set(row["errors"])
            assert row["kernel"] and row["fitted"]


def gemm_rows(share, read, latency_s):
    """Products on H100 that follow a curve exactly."""
    rng = np.random.default_rng(0)
    m, n, k = (2 ** rng.integers(low, high, 200) for low, high in ((0, 14), (11, 16), (11, 16)))
    curve = {"share": share, "read": read, "latency_s": latency_s}
    moved = 2.0 * (n * k + m * k + m * n)
    seconds = operators.kernel_s(
        latency_s, operators.read_s(curve, moved, 3.35e12), operators.compute_s(curve, 2.0 * m * n * k, 989e12)
    )
    rows = {"system": "h100_sxm", "backend": "trtllm", "dtype": "bfloat16", "m": m, "n": n, "k": k}
    return pd.DataFrame(rows | {"latency_ms": 1e3 * np.asarray(seconds)})


def test_a_fit_finds_the_curve_that_made_the_rows(tmp_path):
    gemm_rows(0.7, 0.85, 5e-6).to_csv(tmp_path / "gemm.csv", index=False)
    samples, left = read_kernels([tmp_path / "gemm.csv"])
    (found,) = fit_kernels(samples)
    assert left == {} and found.samples.name == "gemm_bf16"
    assert found.numbers["share"] == pytest.approx(0.7, rel=0.01)
    assert found.numbers["read"] == pytest.approx(0.85, rel=0.01)
    assert found.numbers["latency_s"] == pytest.approx(5e-6, rel=0.1)
    assert found.summary()["worst_decile"] < 0.01
    assert "[hopper.gemm_bf16]\nshare = 0.7" in kernels_file([found])


def test_one_table_times_two_collectives(tmp_path):
    """All-reduce and all-gather of 8 ranks that follow a curve: of a gather the others' part crosses the link."""
    size = 2.0 ** np.arange(10, 30)
    curve = {"share": 0.7, "latency_s": 1e-5, "half_bytes": 1e6, "per_rank": 0.1}
    link = 450e9
    seconds = operators.collective_latency_s(curve, 8.0) + sum(operators.exchange_s(curve, size * 7.0 / 8.0, link))
    rows = {"system": "h100_sxm", "nccl_version": "2", "nccl_dtype": "half", "num_gpus": 8, "message_size": size / 2.0}
    tables = [
        pd.DataFrame(rows | {"op_name": name, "latency_ms": 1e3 * seconds}) for name in ("all_gather", "all_reduce")
    ]
    pd.concat(tables).to_csv(tmp_path / "nccl.csv", index=False)
    samples, _ = read_kernels([tmp_path / "nccl.csv"])
    assert sorted(s.name for s in samples) == ["allreduce", "gather"]
    (found,) = fit_kernels([s for s in samples if s.name == "gather"])
    assert found.summary()["median"] < 0.01


def test_bad_kernel_tables_are_one_line(tmp_path):
    path = tmp_path / "gemm.csv"
    gemm_rows(0.7, 0.8, 1e-6).assign(latency_ms=-1.0).to_csv(path, index=False)
    with pytest.raises(InputError, match=r"row 2.latency_ms = -1.0: a positive number"):
        read_kernels([path])
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="tables or logs of measured kernels"):
        read_kernels([tmp_path / "other.csv"])
    assert is_kernel_table(path) and not is_kernel_table(tmp_path / "other.csv")


@needs_kernels
def test_curves_explain_the_measured_products_and_attention():
    """Median error of at most 10 % beyond the caches, over every library's kernel (all operators: docs/accuracy.md)."""
    names = ("gemm", "context_attention", "generation_attention")
    samples, _ = read_kernels([KERNELS / f"{name}.csv" for name in names])
    found = fit_kernels(samples)
    for errors in errors_by_kind(found).values():
        assert errors["median"] <= 0.10
    for (generation, operator), curve in shipped(found).items():
        row = table("kernels")[generation][operator]
        assert float(row["share"]) == pytest.approx(curve.numbers["share"], rel=0.1), (generation, operator)
