"""Validation and calibration against measured points: the commands on small files, the fit on known problems, and
the accuracy reached on the shared measurements (skipped where they are absent)."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from test_measured import DUMP, ROW, points

from breakeven.studies import cli
from breakeven.studies.benchmark import inputs, predict_jitted
from breakeven.studies.calibrate import Parameter, Problem, fit, left_out, parameters, resampled, with_values
from breakeven.studies.calibrated import Calibration, fitted_file, summary
from breakeven.studies.measured_files import read_points
from breakeven.studies.validate import counted, coverage, errors, predictions, report, spearman

SHARED = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "measured"
MEASURED, LABELS = SHARED / "serving_points.csv", SHARED / "inferencex_dsr1.csv"
needs_measurements = pytest.mark.skipif(not MEASURED.exists(), reason=f"the shared measurements are not at {SHARED}")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Four rows: two points, a copy of the first, and one of an unknown model."""
    path = tmp_path_factory.mktemp("measured") / "small.csv"
    rows = [{}, {"id": "dump", "silicon_data_source": DUMP}, {"id": "b", "silicon_ttft_ms": 150.0}]
    pd.DataFrame([ROW | row for row in [*rows, {"id": "x", "model_path": "acme/none"}]]).to_csv(path, index=False)
    return path


def test_validate_writes_a_prediction_beside_every_row(small, tmp_path, capsys):
    out = tmp_path / "deep" / "pred.csv"
    with pytest.raises(SystemExit) as end:
        cli.main(["validate", str(small), "--out", str(out)])
    assert end.value.code == 0
    table = pd.read_csv(out, keep_default_na=False)
    assert list(table.columns[:4]) == ["id", "ttft_ms", "tpot_ms", "measured_ttft_ms"]
    assert list(table["id"]) == [ROW["id"], "dump", "b", "x"]
    assert list(table["excluded"]) == ["", "", "", "model acme/none is not in the catalogue"]
    assert table["ttft_ms"].iloc[0] == table["ttft_ms"].iloc[1] and table["ttft_ms"].iloc[3] == ""
    text = capsys.readouterr().out.replace("\n", " ")
    assert "3 of 4 rows predicted (75%; 75.0% of the 4 that carry the needed fields): 2 of 3" in text
    assert "llama-3.1-70b" in text


@pytest.mark.parametrize(
    ("content", "words"), [("a,b\n1,2\n", "id"), (None, "MEASURED.csv"), ("row", "row 2.silicon_tpot_ms")]
)
def test_bad_input_is_one_line_and_status_2(content, words, tmp_path, capsys):
    path = tmp_path / "bad.csv"
    if content is not None:
        broken = pd.DataFrame([ROW | {"silicon_tpot_ms": -1.0}]).to_csv(index=False)
        path.write_text(broken if content == "row" else content)
    for command in ("validate", "calibrate"):
        with pytest.raises(SystemExit) as end:
            cli.main([command, str(path)])
        assert end.value.code == 2
        message = capsys.readouterr().err
        assert message.count("\n") == 1 and words in message


def test_calibrate_needs_points_of_two_combinations(small, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["calibrate", str(small)])
    assert end.value.code == 2 and "at least" in capsys.readouterr().err


def test_errors_of_known_ratios():
    table = pd.DataFrame({"measured_ttft_ms": [100.0, 200.0, 400.0], "measured_tpot_ms": [10.0, 20.0, 40.0]})
    table["ttft_ms"], table["tpot_ms"] = [110.0, 180.0, 800.0], [10.0, 20.0, 10.0]
    for name in ("ttft", "tpot"):
        table[f"{name}_ratio"] = table[f"{name}_ms"] / table[f"measured_{name}_ms"]
    found = errors(table)
    assert found["ttft_mape"] == pytest.approx(0.4) and found["ttft_median"] == pytest.approx(0.1)
    assert found["ttft_bias"] == pytest.approx(0.1) and found["ttft_rank"] == pytest.approx(1.0)
    assert found["tpot_mape"] == pytest.approx(0.25) and found["tpot_median"] == pytest.approx(0.0, abs=1e-12)
    assert np.isnan(spearman(table["ttft_ms"][:2], table["tpot_ms"][:2]))


def test_fitting_values_into_the_inputs_touches_their_owners_alone():
    two = points({"id": "a"}, {"id": "b", "backend": "sglang"})
    given = inputs(two)
    slow = Parameter("engine", "layer_s", ("vllm",), 1e-3, 1.0)
    before, after = predict_jitted(given), predict_jitted(with_values(given, [slow], [1e-3]))
    change = np.asarray(after.tpot_s - before.tpot_s)
    assert change[0] > 0.05 and change[1] == 0.0


def linear(moved: tuple[Parameter, ...], matrix: np.ndarray, truth: np.ndarray) -> Problem:
    """Log errors that vanish at x = truth."""
    return Problem(moved, lambda x: matrix @ (x - truth), lambda _: matrix)


def test_fit_finds_the_truth_that_data_tell_and_stays_at_the_prior_where_they_do_not():
    moved = tuple(Parameter("engine", f"f{k}", ("vllm",), 1.0, 0.3) for k in range(3))
    matrix = np.random.default_rng(0).normal(size=(2000, 2, 3)) * np.array([1.0, 1.0, 0.0])
    truth = np.array([0.3, -0.2, 0.5])
    x = fit(linear(moved, matrix, truth), np.ones((2000, 2)))
    assert x == pytest.approx([0.3, -0.2, 0.0], abs=0.02)
    shaken = matrix.copy()
    outliers = Problem(
        moved, lambda x: shaken @ (x - truth) + (np.arange(2000) % 20 == 0)[:, None] * 3.0, lambda _: matrix
    )
    assert fit(outliers, np.ones((2000, 2)))[:2] == pytest.approx([0.3, -0.2], abs=0.05)


def test_combinations_are_judged_by_fits_that_never_saw_them_and_resampled_as_a_whole():
    """One combination says x = 0.4, the other x = 0: each is predicted by the other's truth; drawn twice of two, a fit
    sees one of them alone in half of the draws."""
    two = points({"id": "a"}, {"id": "b", "system": "b200_sxm"}) * 400
    truth = np.where([p.accelerator == "h200-sxm" for p in two], 0.4, 0.0)
    one_parameter = (Parameter("engine", "f", ("vllm",), 1.0, 1.0),)
    task = Problem(
        one_parameter,
        lambda x: np.repeat((x[0] - truth)[:, None], 2, axis=1),
        lambda _: np.ones((len(two), 2, 1)),
    )
    given = task, two, np.ones((len(two), 2)), np.zeros(1), task.jacobian(np.zeros(1))
    drawn = np.round(resampled(*given, draws=40)[:, 0], 1)
    assert set(drawn) == {0.0, 0.2, 0.4} and 10 <= np.sum(drawn == 0.2) <= 30
    found = left_out(*given)
    assert found[:, 0] == pytest.approx(np.where(truth > 0.0, -0.4, 0.4), abs=0.05)


def test_fitted_files_keep_everything_but_the_values(tmp_path):
    moved = parameters("engine", "memory")
    values = np.array([p.prior for p in moved]) * 1.25
    two = tuple(points({"id": "a"}, {"id": "b", "backend": "sglang"}))
    zero = np.zeros((2, 2))
    found = Calibration(two, moved, values, np.zeros(2), zero, zero + 0.1, np.full((3, 2), 1.1))
    engines = fitted_file(found)
    assert "layer_s = 1e-05" in engines and 'scheduler = "chunked"' in engines and "on 1 published" in engines
    found.save(tmp_path)
    written = {"engines.toml", "errors.csv", "parameters.csv", "residuals.toml", "calibration_draws.csv"}
    assert {p.name for p in tmp_path.iterdir()} == written
    assert summary(zero + jnp.log(1.1), np.array([True, False]))["tpot_mape"] == pytest.approx(0.1, rel=1e-5)


@pytest.fixture(scope="module")
def measured() -> pd.DataFrame:
    return predictions(read_points(MEASURED, LABELS))


@needs_measurements
def test_coverage_of_the_shared_measurements(measured):
    """75 % of the rows and 99 % of those that carry the needed fields; every other row says why not."""
    assert coverage(measured)["share"] >= 0.73 and coverage(measured)["able_share"] >= 0.98
    assert (measured["excluded"].ne("") | measured["ttft_ms"].notna()).all()


@needs_measurements
def test_accuracy_on_the_shared_measurements(measured):
    """Single engines. Gates lie a tenth above what docs/accuracy.md states."""
    used = counted(measured)
    found = errors(used.loc[used["mode"] == "agg"])
    assert found["tpot_mape"] < GATES["tpot_mape"] and found["tpot_median"] < GATES["tpot_median"]
    assert found["ttft_mape"] < GATES["ttft_mape"] and found["ttft_median"] < GATES["ttft_median"]
    assert found["tpot_rank"] > 0.9 and abs(found["tpot_bias"]) < 0.06


GATES = {"tpot_mape": 0.147, "tpot_median": 0.102, "ttft_mape": 0.33, "ttft_median": 0.222}


@needs_measurements
def test_groups_add_up(measured):
    rows = {group: 0.0 for group, *_ in report(measured)}
    for group, value, found in report(measured):
        rows[group] += found["rows"] * (group != "all" or not value)
    assert len(set(rows.values())) == 1
