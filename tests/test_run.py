"""Running a study: what an interrupt keeps, the Python door, limits, prices and accelerators of one's own."""

import copy
from pathlib import Path
from typing import Any

import optuna
import pytest

import breakeven
from breakeven.studies.run import run
from breakeven.studies.study import Study

DATA: dict[str, Any] = {
    "name": "t",
    "llm": "llama-3.1-8b",
    "workload": "tool-agent",
    "load": {"calls_per_second": 6},
    "slo": {"ttft_s": 1, "tpot_s": 0.03, "target": 0.9},
    "space": {
        "accelerators": ["h100-sxm", "l40s"],
        "tensor_parallel": [1, 2, 4],
        "replicas": [1, 2, 3],
        "max_batch": [32, 64],
        "token_budget": [2048, 8192],
    },
    "search": {"verify": False},
}


def study(**changes: Any) -> Study:
    return Study.parse({**copy.deepcopy(DATA), **changes}, "test")


def test_an_interrupt_keeps_the_finished_blocks() -> None:
    """At most the block in flight is lost."""
    whole = study()

    def stop(done: int, total: int) -> None:
        assert done < total
        raise KeyboardInterrupt

    result = run(whole, stop)
    assert result.interrupted and result.found.evaluated == whole.evaluator().block
    assert len(result.front) and result.record()["interrupted"]


def test_the_python_door() -> None:
    result = breakeven.run(breakeven.Study.parse(copy.deepcopy(DATA), "test"))
    assert isinstance(result, breakeven.Result)
    assert result.best is not None and result.best["slo_attainment"] >= 0.9


def test_an_accelerator_of_ones_own_pays_from_some_speed_on() -> None:
    """Twice the compute and bandwidth at the same price is never dearer than its model; at thrice the price it is not
    chosen for less."""

    def cheapest(chip: dict[str, Any]) -> float:
        space = {**DATA["space"], "accelerators": [{"name": "chip", "like": "h100-sxm", **chip}]}
        best = run(study(space=space)).best
        assert best is not None
        return float(best["cost_per_hour_usd"])

    same = cheapest({})
    assert cheapest({"compute": 2.0, "memory_bandwidth": 2.0}) <= same
    assert cheapest({"price": 3.0}) == pytest.approx(3.0 * same, rel=1e-5)


def test_limits_hold_for_every_feasible_candidate() -> None:
    limits: dict[str, Any] = {"budget_usd_per_hour": 12.0, "max_power_kw": 6.0, "inventory": {"h100-sxm": 3, "l40s": 2}}
    result = run(study(limits=limits))
    kept = result.found.rows()
    ok = kept["feasible"]
    assert 0 < ok.sum() < len(ok)
    assert kept["cost_per_hour_usd"][ok].max() <= 12.0 and kept["power_kw"][ok].max() <= 6.0
    frame = result.study.space.frame(kept["candidate"][ok])
    used = frame["prefill_replicas"] * frame["prefill_tensor_parallel"]
    for name, most in limits["inventory"].items():
        joint = ((frame["link"] == "") & (frame["prefill_accelerator"] == name)).to_numpy()
        assert 0 < used.to_numpy()[joint].max(initial=0) <= most


def test_own_prices_and_whole_instances() -> None:
    """Eight H100 to an instance at $2 each: any use of up to eight costs $16."""
    space = {**DATA["space"], "accelerators": "h100-sxm", "topologies": "chunked", "tensor_parallel": 2, "replicas": 3}
    prices = {"own": {"h100-sxm": 2.0}, "whole_instances": True}
    assert set(run(study(space=space, prices=prices)).front["cost_per_hour_usd"]) == {16.0}
    prices["whole_instances"] = False
    assert set(run(study(space=space, prices=prices)).front["cost_per_hour_usd"]) == {12.0}


def test_a_skypilot_catalogue_prices_a_study(tmp_path: Path) -> None:
    rows = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region\n"
    rows += "p5,H100,8,192,2048,,40.0,,us-east-1\np5,H100,8,192,2048,,48.0,,us-west-2\n"
    (tmp_path / "vms.csv").write_text(rows)
    space = {**DATA["space"], "accelerators": "h100-sxm"}
    data = {**copy.deepcopy(DATA), "space": space, "prices": {"skypilot": "vms.csv"}}
    priced = Study.parse(data, str(tmp_path / "study.yaml"))
    assert priced.prices_usd_per_hour == (5.5,)


def test_an_optuna_study_is_stored_and_repeats(tmp_path: Path) -> None:
    """Same seed, same front; trials stand in the storage that was named."""
    search = {"method": "optuna", "trials": 100, "seed": 3, "verify": False}
    fronts = [run(study(search=search)).front["candidate"].tolist() for _ in range(2)]
    assert fronts[0] == fronts[1]
    url = f"sqlite:///{tmp_path / 'trials.db'}"
    run(study(search=search), storage=url)
    stored = optuna.load_study(study_name="t", storage=url)
    assert len(stored.trials) == 100 and all(t.params for t in stored.trials)
    single = run(study(search=search | {"trial": "candidate"}))
    assert 0 < single.found.evaluated <= 100


def test_a_closed_population_has_its_sessions_in_progress() -> None:
    result = run(study(load={"concurrent_sessions": 40}))
    assert result.best is not None
    assert result.best["sessions_in_progress"] == pytest.approx(40, rel=0.02)


def test_the_most_load_within_a_budget() -> None:
    """`load: max` finds what an open load of that rate confirms, and a little more load no longer meets the SLO."""
    limits: dict[str, Any] = {"budget_usd_per_hour": 10.0}
    best = run(study(load="max", limits=limits)).best
    assert best is not None and best["cost_per_hour_usd"] <= 10.0

    def meets(factor: float) -> bool:
        rate = {"sessions_per_second": float(best["sessions_per_second"]) * factor}
        at_rate = run(study(load=rate, limits=limits))
        kept = at_rate.found.rows()
        return bool(kept["meets_slo"][kept["candidate"] == best["candidate"]][0])

    assert meets(0.99) and not meets(1.02)
