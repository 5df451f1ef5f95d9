"""Local calibration: corrections flow through the one model, known ones are found again, files are checked."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import yaml
from test_measured import ROW, points

from breakeven.models.inputs import InputError
from breakeven.models.local import Correction
from breakeven.models.pools import coefficients
from breakeven.models.serving import evaluate
from breakeven.models.simulation.machine import machines
from breakeven.models.tables import resolve
from breakeven.studies import cli
from breakeven.studies.benchmark import inputs
from breakeven.studies.deployment_file import read_deployment
from breakeven.studies.local_calibration import NOISE, deployments, fit_local, spread_choice, times_of
from breakeven.studies.local_file import Corrected, applicable, as_arrays, local_yaml, read_local

POOL = {"accelerator": "h200-sxm", "tensor_parallel": 4, "data_parallel": 1, "expert_parallel": False}
POOL |= {"pipeline_parallel": 1, "weights": "fp8"}
DEPLOYMENT = {
    "deployment": {
        "topology": "chunked",
        "pool": {**POOL, "replicas": 1, "max_batch": 256, "token_budget": 8192},
        "kv": "fp8",
        "routing": "balanced",
    },
    "study": {
        "llm": "llama-3.1-70b",
        "workload": "coding-agent",
        "load": {"sessions_per_second": 0.0005},
        "slo": {"ttft_s": 5, "tpot_s": 0.05},
    },
}


def corrected(**changes) -> Corrected:
    neutral = Corrected("llama-3.1-70b", "vllm", POOL, None, 1.0, 1.0, 0.0, 2, {"ttft": 0.3, "tpot": 0.1}, "my.csv")
    return dataclasses.replace(neutral, **changes)


def outcome(study, ids, *corrections):
    local = as_arrays(corrections, study.names) if corrections else None
    catalog = dataclasses.replace(study.catalog, local=local)
    return evaluate(study.space.deployment(ids), study.workload, study.slo, catalog), catalog


def test_a_neutral_correction_changes_nothing(study, candidates):
    plain, _ = outcome(study, candidates)
    same, _ = outcome(study, candidates, corrected())
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(same), strict=True):
        np.testing.assert_allclose(np.asarray(b, float), np.asarray(a, float), rtol=2e-5, atol=1e-7)


def test_a_candidate_takes_the_correction_of_its_layout_else_of_its_accelerator_else_none(study, candidates):
    frame = study.space.frame(candidates)
    other = {**POOL, "tensor_parallel": 2}
    local = as_arrays([corrected(decode_factor=2.0), corrected(prefill=other, decode_factor=0.5)], study.names)
    resolved = resolve(study.space.deployment(candidates), dataclasses.replace(study.catalog, local=local))
    assert resolved.correction is not None
    factor = np.asarray(resolved.correction.decode_factor)
    measured = frame["decode_accelerator"] == "h200-sxm"
    joint, fp8 = frame["link"] == "", frame["decode_weights"] == "fp8"
    plain = (frame["decode_pipeline_parallel"] == 1) & fp8 & measured
    assert factor[~measured] == pytest.approx(1.0)
    assert factor[plain & (frame["decode_tensor_parallel"] == 4) & joint] == pytest.approx(2.0)
    assert factor[plain & (frame["decode_tensor_parallel"] == 2)] == pytest.approx(0.5)
    assert factor[measured & ~fp8] == pytest.approx(1.0)  # the geometric mean of both


def test_factors_scale_steps_alike_in_the_model_and_the_simulation(study, candidates):
    catalog = outcome(study, candidates, corrected(decode_factor=2.0, prefill_factor=3.0, first_token_s=0.5))[1]
    resolved = resolve(study.space.deployment(candidates), catalog)
    plain = resolve(study.space.deployment(candidates), study.catalog)
    applied = resolved.correction
    assert applied is not None
    of = np.flatnonzero((np.asarray(applied.decode_factor) > 1.9) & (np.asarray(applied.prefill_factor) > 2.9))[0]
    for phase, factor in ((0, 3.0), (1, 2.0)):
        for a, b in zip(coefficients(plain, catalog)[phase], coefficients(resolved, catalog)[phase], strict=True):
            assert float(b.step_s[of]) == pytest.approx(factor * float(a.step_s[of]), rel=1e-5)
    played = machines(resolved, study.workload, catalog)
    assert float(played.decode[0].step_s[of]) == pytest.approx(float(coefficients(resolved, catalog)[1][0].step_s[of]))
    own = float(catalog.engine.request_s + catalog.engine.request_token_s * study.workload.mean_prompt)
    assert float(played.request_s[of]) == pytest.approx(own + 0.5, rel=1e-4)


def test_known_corrections_are_found_again():
    """Points that the model itself makes with other steps: the rest of the deployment is predicted within 3 %."""
    source = "internal benchmark csv (upstream)"
    loads = [(n, isl) for n in (4, 16, 48, 96) for isl in (1000, 4000)]
    used = points(*[{"id": f"{n} {s}", "silicon_data_source": source, "batch_size": n, "isl": s} for n, s in loads])
    times = times_of(inputs(used))
    one = jnp.ones((len(used), 1))
    truth = times(Correction(1.2 * one, 1.35 * one, 0.02 * one))
    number = deployments(used)
    chosen = spread_choice(used, number, 2)
    assert chosen.sum() == 2 and len(set(number)) == 1
    found = fit_local(times, 1e3 * truth, number, chosen)
    before = np.abs(times(Correction(one, one, 0.0 * one))[:, 1] / truth[:, 1] - 1.0)
    off = np.abs(np.exp(found.residuals) - 1.0)
    assert off[~chosen, 1].max() < 0.03 < before.min() and off[~chosen, 0].mean() < 0.12
    assert (found.spread > NOISE).all() and found.spread[0, 1] < 2.0 * NOISE[1]
    found = fit_local(times, 1e3 * truth, number, np.zeros(len(used), bool))
    assert found.decode_factor == pytest.approx(1.0) and found.first_token_s == pytest.approx(0.0)


def test_the_file_says_what_was_written(tmp_path: Path, study):
    split = corrected(decode={**POOL, "tensor_parallel": 8}, decode_factor=1.25)
    path = tmp_path / "local.yaml"
    path.write_text(local_yaml([corrected(first_token_s=-0.01), split]))
    assert list(read_local(path)) == [corrected(first_token_s=-0.01), split]
    assert len(applicable(read_local(path), "llama-3.1-70b", "vllm", study.names)) == 2
    with pytest.raises(InputError, match="measured for none of these"):
        applicable(read_local(path), "llama-3.1-8b", "vllm", study.names)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("local")
    (path / "dep.yaml").write_text(yaml.safe_dump(DEPLOYMENT))
    head = "concurrency,input_tokens,output_tokens,requests,ttft_ms,tpot_ms\n"
    (path / "my.csv").write_text(head + "8,1000,1000,80,150,14.5\n64,1000,1000,640,420,24\n")
    pd.DataFrame([ROW, ROW | {"id": "b", "batch_size": 64, "silicon_tpot_ms": 40.0}]).to_csv(path / "points.csv")
    return path


def test_two_points_correct_a_deployment_that_explain_then_shows(folder: Path, capsys):
    out = folder / "mine.yaml"
    assert cli._main(["calibrate", "--local", str(folder / "my.csv"), str(folder / "dep.yaml"), "--out", str(out)]) == 0
    assert "in 8 of 10 cases" in capsys.readouterr().out
    one = read_local(out)[0]
    assert one.points == 2 and one.decode_factor > 1.1 and one.prefill == POOL
    assert cli._main(["explain", str(folder / "dep.yaml"), "--local", str(out), "--json"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["local calibration"]["decode steps, times"] == pytest.approx(one.decode_factor, rel=1e-3)
    data = {**DEPLOYMENT, "study": {**DEPLOYMENT["study"], "local": "mine.yaml"}}
    (folder / "named.yaml").write_text(yaml.safe_dump(data))
    assert read_deployment(str(folder / "named.yaml")).study.local == (one,)


def test_a_table_of_serving_points_names_its_own_deployment(folder: Path, capsys):
    out = folder / "table.yaml"
    assert cli._main(["calibrate", "--local", str(folder / "points.csv"), "--out", str(out)]) == 0
    assert len(read_local(out)) == 1 and capsys.readouterr().out
    assert cli._main(["validate", str(folder / "points.csv"), "--local-points", "1"]) == 0
    assert "its deployment was corrected by it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("concurrency,ttft_ms\n8,-1\n", "row 2.ttft_ms"),
        ("concurrency,ttft_ms,tpot\n8,1,2\n", "did you mean tpot_ms"),
        ("concurrency,requests_per_second,ttft_ms\n8,2,100\n", "exactly one of it and requests_per_second"),
        ("concurrency,input_tokens,ttft_ms\n8,100,100\n", "output_tokens beside it"),
        ("concurrency,tokens\n", "at least one row"),
        (None, "a readable CSV file"),
    ],
)
def test_bad_points_are_one_line_and_status_2(content, words, folder, tmp_path, capsys):
    path = tmp_path / "bad.csv"
    if content is not None:
        path.write_text(content)
    assert cli._main(["calibrate", "--local", str(path), str(folder / "dep.yaml")]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and words in message


def test_bad_local_files_are_one_line_and_status_2(folder, tmp_path, capsys):
    good = yaml.safe_load(local_yaml([corrected()]))
    for change, words in (
        ({"decode_factor": 0.0}, "corrections.0.decode_factor"),
        ({"prefill": {"accelerator": 3}}, "corrections.0.prefill.accelerator"),
        ({"llm": "llama-3.1-8b"}, "measured for none of these"),
        ({"speed": 1}, "corrections.0.speed"),
    ):
        path = tmp_path / "bad.yaml"
        path.write_text(yaml.safe_dump({"corrections": [good["corrections"][0] | change]}))
        assert cli._main(["explain", str(folder / "dep.yaml"), "--local", str(path)]) == 2
        message = capsys.readouterr().err
        assert message.count("\n") == 1 and words in message and "bad.yaml" in message
    assert cli._main(["calibrate", "--local", str(folder / "my.csv")]) == 2
    assert "DEPLOYMENT.yaml" in capsys.readouterr().err
