"""Pairs of cells: what is found from non-dominated parts is the truth over all pairs, of numbers and of deployments."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from breakeven.models.inputs import InputError
from breakeven.models.simulation import Estimate
from breakeven.models.topology import STAGES
from breakeven.optimizer import verify
from breakeven.optimizer.cells import CellEvaluator, Limited, Pair, Pairing, PairVerification, mean_of, other
from breakeven.optimizer.checkpoint import FOLDER
from breakeven.optimizer.evaluator import Columns
from breakeven.optimizer.exhaustive import Task, exhaustive
from breakeven.optimizer.front import non_dominated
from breakeven.optimizer.search import KINDS, Found
from breakeven.optimizer.verify import Verdict
from breakeven.studies.cli import _main
from breakeven.studies.mixed import cell_study, limited, search_mixed, shares_of
from breakeven.studies.result import records
from breakeven.studies.run import run

KINDS_IN_ALL = 3
RATE = "load.sessions_per_second=0.02"
# A narrow space of the shapes that are compiled already.
NARROW = {
    "topologies": ["chunked", "pd"],
    "tensor_parallel": [4, 8],
    "pipeline_parallel": 1,
    "replicas": [1, 2, 4],
    "max_batch": 64,
    "token_budget": 2048,
    "prefill": {"accelerators": ["h100-sxm", "b200-sxm"], "weights": "fp8", "tensor_parallel": 4},
    "decode": {"accelerators": ["h100-sxm", "b200-sxm"], "weights": "fp8", "tensor_parallel": 8, "replicas": 1},
}


def made_up(seed: int, n: int, objectives: tuple[str, ...]) -> Columns:
    """Candidates with random numbers of coarse steps, so that ties happen, and random accelerators of their stages."""
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, KINDS_IN_ALL, (n, len(STAGES)))
    columns: Columns = {name: rng.integers(1, 9, n).astype(float) for name in objectives}
    columns |= {"slo_attainment": rng.integers(0, 9, n) / 8.0, "feasible": rng.random(n) < 0.9}
    few = np.where(rng.random(n) < 0.5, 0, kinds[:, 0])[:, None]
    kinds = np.where(rng.random((n, 1)) < 0.7, few, kinds)
    return columns | {
        "candidate": np.arange(n),
        KINDS: np.ravel_multi_index(tuple(kinds.T), (KINDS_IN_ALL,) * len(STAGES)),
    }


def as_found(columns: Columns, objectives: tuple[str, ...]) -> Found:
    found = Found(objectives)
    ids, costs = found.shown(columns)
    found._add_alike(ids, costs, columns[KINDS][ids])
    return found


def truth(cells: dict[float, Columns], limits: Limited, prices: tuple[float, float], unlike: bool) -> np.ndarray:
    """(cost, attainment) of every pair that no other one beats: all are tried."""
    sums: list[tuple[float, float]] = []
    for share in sorted(s for s in cells if s >= 0.5):
        first, second = cells[share], cells[other(share)]
        shown = [np.flatnonzero(c["feasible"] & (c["slo_attainment"] > 0.0)) for c in (first, second)]
        for i, j in itertools.product(*shown):
            if (first[KINDS][i] != second[KINDS][j]) != unlike:
                continue
            total = [float(first[name][i] + second[name][j]) for name in limits.objectives]
            united = [set(np.unravel_index(c[KINDS][k], (KINDS_IN_ALL,) * len(STAGES)))
                      for c, k in ((first, i), (second, j))]  # fmt: skip
            further = len(united[0] | united[1]) - 1 - sum(len(own) - 1 for own in united)
            total[0] += prices[0] + prices[1] * further
            total[1] = share * first["slo_attainment"][i] + other(share) * second["slo_attainment"][j]
            if all(value <= most for value, most in zip(total, limits.most, strict=True)):
                sums.append((total[0], total[1]))
    costs = np.array(sums).reshape(-1, 2) * (1.0, -1.0)
    return np.sort(costs[non_dominated(costs, np.arange(len(costs)))] * (1.0, -1.0), axis=0)


def shown(pairs: list[Pair]) -> np.ndarray:
    return np.array([(p.cost_per_hour_usd, p.slo_attainment) for p in pairs]).reshape(-1, 2)


LIMITS = (
    Limited(),
    Limited(inventory={"a": 9, "c": 4}),
    Limited(budget_usd_per_hour=12.0, power_kw=8.0, inventory={"b": 7}),
)


@given(st.integers(0, 2**31), st.sampled_from(LIMITS), st.booleans(), st.sampled_from([(0.0, 0.0), (0.5, 3.0)]))
def test_the_front_of_the_parts_is_the_front_of_all_pairs(seed, limits, unlike, prices):
    cells = {share: made_up(seed + k, 25, limits.objectives) for k, share in enumerate((0.3, 0.5, 0.7))}
    found = {share: as_found(columns, limits.objectives) for share, columns in cells.items()}
    pairs = Pairing(found, limits, KINDS_IN_ALL, *prices).front(unlike)
    assert shown(pairs) == pytest.approx(truth(cells, limits, prices, unlike))
    for pair in pairs:
        first, second = cells[pair.share], cells[other(pair.share)]
        assert (first[KINDS][pair.first] != second[KINDS][pair.second]) == unlike
        mean = pair.share * first["slo_attainment"][pair.first]
        assert pair.slo_attainment == pytest.approx(mean + other(pair.share) * second["slo_attainment"][pair.second])


@pytest.fixture(scope="module")
def mixed(make_study):
    return make_study(RATE, "mixed.shares=[0.25, 0.5]", "search.verify=false", **NARROW)


def everything(study) -> dict[float, Columns]:
    """All candidates of a study's space as cells, with what the study limits of two."""
    cells = {}
    for share in shares_of(study):
        evaluator = cell_study(study, share).evaluator()
        columns = evaluator(np.arange(study.space.size))
        kinds, used = study.space.accelerators(columns["candidate"])
        names = study.names.accelerator_ids
        columns[KINDS] = kinds @ len(names) ** np.arange(len(STAGES))
        cells[share] = columns | {f"used_{name}": used[:, k] for k, name in enumerate(names)}
    return cells


def best_pairs(study, cells: dict[float, Columns]) -> np.ndarray:
    """(cost, attainment) of every pair of unlike cells that no other one beats: all are tried."""
    limits, parts = limited(study), [np.empty((0, 2))]
    for share in (s for s in cells if s >= 0.5):
        ok = [np.flatnonzero(c["feasible"] & (c["slo_attainment"] > 0)) for c in (cells[share], cells[other(share)])]
        a, b = ({name: column[rows].astype(float) for name, column in c.items()}
                for c, rows in zip((cells[share], cells[other(share)]), ok, strict=True))  # fmt: skip
        sums = [a[name][:, None] + b[name] for name in limits.objectives]
        sums[1] = share * a["slo_attainment"][:, None] + other(share) * b["slo_attainment"]
        inside = (a[KINDS][:, None] != b[KINDS]) & np.all(
            [s <= most for s, most in zip(sums, limits.most, strict=True)], axis=0
        )
        parts.append(np.stack([sums[0][inside], -sums[1][inside]], 1))
    costs = np.concatenate(parts)
    costs = costs[non_dominated(costs, np.arange(len(costs)))]
    return costs[np.argsort(costs[:, 0])] * (1.0, -1.0)


@pytest.mark.parametrize("inventory", ["", "limits.inventory={h100-sxm: 16, h200-sxm: 8, b200-sxm: 8, mi300x: 8}"])
def test_a_search_of_the_cells_finds_the_best_of_all_pairs(make_study, inventory):
    changes = [RATE, "mixed.shares=[0.25, 0.5]", "search.verify=false", *([inventory] if inventory else [])]
    study = make_study(*changes, **NARROW)
    front = search_mixed(study, None).front
    expected = best_pairs(study, everything(study))
    assert len(front) > 3
    assert front[["cost_per_hour_usd", "slo_attainment"]].to_numpy() == pytest.approx(expected, rel=1e-6)
    for row in records(front):
        used = {name: 0 for name in study.written.limits.inventory or {}}
        cells = [f"{cell}_{slot}" for cell in ("first", "second") for slot in ("prefill", "decode")]
        assert len({row[f"{slot}_accelerator"] for slot in cells}) > 1
        for cell in ("first", "second"):
            slots = ("prefill",) if row[f"{cell}_topology"] == "chunked" else ("prefill", "decode")
            for slot in (f"{cell}_{slot}" for slot in slots):
                if used:
                    used[row[f"{slot}_accelerator"]] += row[f"{slot}_replicas"] * row[f"{slot}_tensor_parallel"]
        assert all(count <= study.written.limits.inventory[name] for name, count in used.items())


def test_accelerators_of_candidates_as_their_rows_say(mixed):
    ids = np.arange(mixed.space.size)
    kinds, used = mixed.space.accelerators(ids)
    frame, names = mixed.space.frame(ids), np.array(mixed.names.accelerator_ids)
    for stage, column in ((1, "prefill"), (2, "prefill"), (3, "decode"), (4, "decode")):
        assert (names[kinds[:, stage]] == frame[f"{column}_accelerator"].to_numpy(str)).all()
    assert (used.sum(1) == mixed.evaluator()(ids)["accelerators"]).all()


def test_two_equal_cells_are_two_half_loads(mixed):
    """Exactly twice the cost of one, with its attainment: and so what the model makes of one deployment of both, whose
    replicas share nothing."""
    whole, half = mixed, cell_study(mixed, 0.5)
    frame = mixed.space.frame(np.arange(mixed.space.size))
    shared = frame.loc[(frame["topology"] == "chunked") & (frame["routing"] == "affinity")]
    key = [c for c in shared if c not in ("candidate", "prefill_replicas", "decode_replicas")]
    found = Found(limited(mixed).objectives)
    columns = everything(mixed)[0.5]
    rows = columns["feasible"] & (columns["slo_attainment"] > 0.0)
    ids, costs = found.shown(columns)
    found._add_alike(ids, costs, columns[KINDS][rows])
    pairs = Pairing({0.5: found}, limited(mixed), 5).front(unlike=False)
    equal = [pair for pair in pairs if pair.first == pair.second]
    assert equal
    for pair in equal:
        assert pair.cost_per_hour_usd == 2.0 * float(columns["cost_per_hour_usd"][pair.first])
        assert pair.slo_attainment == pytest.approx(float(columns["slo_attainment"][pair.first]), rel=1e-12)
    two = shared.loc[shared["prefill_replicas"] == 2].merge(
        shared.loc[shared["prefill_replicas"] == 4], on=key, suffixes=("", "_whole")
    )
    assert len(two) > 20
    parts, all_of_it = (
        half.evaluator()(two["candidate"].to_numpy()),
        whole.evaluator()(two["candidate_whole"].to_numpy()),
    )
    assert (parts["feasible"] == all_of_it["feasible"]).all()
    assert 2.0 * parts["cost_per_hour_usd"] == pytest.approx(all_of_it["cost_per_hour_usd"], rel=1e-6)
    assert parts["slo_attainment"] == pytest.approx(all_of_it["slo_attainment"], abs=1e-3)


def test_a_share_of_the_arrivals(make_study):
    """Poisson arrivals stay Poisson, bursty ones come closer to it the smaller the share; calls and populations too."""
    poisson = make_study(RATE, "mixed={}", **NARROW)
    assert shares_of(poisson) == [0.25, 0.5, 0.75] and shares_of(make_study(**NARROW)) == []
    part = cell_study(poisson, 0.25).workload
    assert part.sessions_per_second == pytest.approx(0.005) and part.arrival_cv2 == 1.0
    bursty = make_study(RATE, "mixed={}", "arrivals={cv: 3.0}", **NARROW)
    spread = [float(cell_study(bursty, share).workload.arrival_cv2) for share in (0.01, 0.25, 0.5, 0.99)]
    assert spread == pytest.approx([1.0 + share * 8.0 for share in (0.01, 0.25, 0.5, 0.99)], rel=1e-5)
    closed = make_study("load={concurrent_sessions: 40}", "mixed={}", **NARROW)
    assert cell_study(closed, 0.25).workload.concurrent_sessions == 10.0


def test_the_interval_of_a_pair():
    """Of independent estimates: half widths add as squares, weighted."""
    parts = [(0.75, Estimate(0.96, 0.92, 1.0)), (0.25, Estimate(0.8, 0.68, 0.92))]
    found = mean_of(parts)
    assert found.value == pytest.approx(0.92) and found.half_width == pytest.approx(math.hypot(0.03, 0.03))


class Cell:
    """A verification that simulates nothing."""

    def __init__(self, attainment: dict[int, float]):
        self.seconds = self.spent_s = 0.0
        self.asked: list[int] = []
        self.verdicts: dict[int, Verdict] = {}
        self._known = attainment

    def run(self, lists, others, progress):
        for candidate in others:
            self.asked.append(candidate)
            if candidate in self._known:
                value = self._known[candidate]
                self.verdicts[candidate] = Verdict(candidate, Estimate(value, value, value), True)


def test_the_cheapest_pair_that_holds():
    """Pairs are tried cheapest first, each cell once; one of which nothing is known ends the walk."""
    cells = {(0, 0.75): Cell({1: 0.8, 2: 1.0}), (1, 0.25): Cell({1: 0.9, 2: 0.7})}
    pairs = [Pair(0.75, 1, 1, 1.0, 0.95), Pair(0.75, 2, 2, 2.0, 0.95), Pair(0.75, 2, 9, 3.0, 0.95)]
    judge = PairVerification(cells, 0.9)  # type: ignore[arg-type]
    assert judge.walk(pairs) == pairs[1]
    assert {pair: estimate.value for pair, estimate in judge.shown.items()} == pytest.approx(
        {pairs[0]: 0.825, pairs[1]: 0.925}
    )
    assert judge.walk(pairs[2:]) == pairs[2] and judge.walk(pairs[:1]) is None
    assert cells[0, 0.75].asked == [1, 2]


def test_optuna_finds_pairs_that_all_pairs_do_not_beat_by_much(make_study):
    """Structures chosen by Optuna: no pair better than the truth, and as cheap at the target."""
    study = make_study(RATE, "mixed.shares=[0.5]", "search.verify=false", **NARROW)
    searched = make_study(RATE, "mixed.shares=[0.5]", "search={method: optuna, trials: 60, verify: false}", **NARROW)
    exact, chosen = search_mixed(study, None), search_mixed(searched, None)
    assert exact.best is not None and chosen.best is not None
    assert 1.0 <= chosen.best["cost_per_hour_usd"] / exact.best["cost_per_hour_usd"] < 1.05


def test_mixing_pays_where_the_better_accelerators_run_out(make_study):
    """Two engines of the cheapest kind in stock carry three quarters of the load, the rest takes another kind, which
    alone costs more. Without a limit a mix beats one deployment, too, but only for lack of a size: it does not pay."""
    fields = [RATE, "mixed.shares=[0.25, 0.5]", "search.verify=false"]
    found = {}
    for name, stock in (("scarce", 8), ("plenty", 64)):
        inventory = f"limits.inventory={{mi300x: {stock}, h100-sxm: 64, h200-sxm: 64, b200-sxm: 64}}"
        result = run(make_study(*fields, inventory, **{**NARROW, "topologies": "chunked"}))
        assert result.mixed is not None and result.best is not None and result.mixed.best is not None
        costs = float(result.mixed.best["cost_per_hour_usd"]), float(result.best["cost_per_hour_usd"])
        assert result.record()["mixed"]["ratio"] == pytest.approx(costs[0] / costs[1])
        found[name] = result.mixed, *costs
    mixed, mix, single = found["scarce"]
    assert mixed.pays and mix < 0.8 * single and "Mixing accelerators pays" in mixed.sentences()[0]
    assert {mixed.best["first_prefill_accelerator"], mixed.best["second_prefill_accelerator"]} > {"mi300x"}
    mixed, mix, single = found["plenty"]
    assert mix < single and mixed.alike_usd_per_hour < mix and not mixed.pays
    assert "does not pay" in mixed.sentences()[0] and "same accelerators" in mixed.sentences()[1]


def test_kept_while_searching(mixed):
    """Ranges merged in any order keep the same fronts, and notes of them hold all."""
    study = cell_study(mixed, 0.5)
    task = Task(CellEvaluator(**study.evaluator().__dict__), limited(mixed).objectives, "cost_per_hour_usd")
    whole = exhaustive(task, Found(task.objectives), lambda *_: None)
    parts = [task.judge_range(start, min(start + 100, study.space.size)) for start in range(0, study.space.size, 100)]
    merged = Found(task.objectives)
    for part in reversed(parts):
        merged.merge(part)
    assert merged.state()["alike"] == whole.state()["alike"] and len(whole.alike) > 3
    assert Found.restored(task.objectives, whole.state()).state() == whole.state()


SCARCE = "limits.inventory={mi300x: 8, h100-sxm: 64, h200-sxm: 64, b200-sxm: 64}"
SHARES = "mixed.shares=[0.25, 0.5]"


def test_the_command_prints_and_writes_it(
    make_study, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Cells beside one deployment, simulated (briefly); each cell as a deployment at its load."""
    monkeypatch.setattr(verify, "CALLS", 1000)
    monkeypatch.setattr(verify, "HALF_WIDTH", 0.03)
    study = make_study(RATE, SHARES, SCARCE, **{**NARROW, "topologies": "chunked"})
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study.data), encoding="utf-8")
    out = tmp_path / "out"
    assert _main(["run", str(tmp_path / "study.yaml"), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "two cells with unlike accelerators" in printed and "Mixing accelerators pays: 0.75 of the" in printed
    front = pd.read_csv(out / "mixed.csv")
    assert (np.diff(front["cost_per_hour_usd"]) > 0.0).all() and (np.diff(front["slo_attainment"]) > 0.0).all()
    record = json.loads((out / "study.json").read_text())
    mixed, best = record["mixed"], record["mixed"]["best"]
    assert mixed["pays"] and mixed["answer"][0] in record["answer"] and mixed["candidates_evaluated"] == 3 * 240
    assert mixed["ratio"] == pytest.approx(best["cost_per_hour_usd"] / record["best"]["cost_per_hour_usd"])
    low, value, high = (best[f"slo_attainment_simulated{end}"] for end in ("_low", "", "_high"))
    assert value >= 0.9 and low <= value <= high < low + 0.2
    for page in ("report.html", "report.md"):
        assert "A mix of accelerators" in (out / page).read_text()
        assert best["first_deployment"] in (out / page).read_text()
    for name, share in (("first", best["share"]), ("second", 1.0 - best["share"])):
        assert _main(["explain", str(out / f"{name}-cell.yaml"), "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["SLO"]["attainment"] == pytest.approx(best[f"{name}_slo_attainment"], abs=2e-5)
        assert shown["money and power"]["cost_per_hour_usd"] == pytest.approx(best[f"{name}_cost_per_hour_usd"])
        cell = yaml.safe_load((out / f"{name}-cell.yaml").read_text())["study"]["load"]
        assert cell["sessions_per_second"] == pytest.approx(0.02 * share)
    # Without a mix nothing of it is left.
    assert _main(["run", str(tmp_path / "study.yaml"), "--out", str(out), "--set", "mixed=null", "--no-verify"]) == 0
    assert not [path for path in out.iterdir() if "cell" in path.name or "mixed" in path.name]


def test_a_mix_may_be_the_only_answer(make_study, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """No kind in stock carries the load alone; and where no mix does, either, it says so."""
    stock = "limits.inventory={mi300x: 8, h200-sxm: 4}"
    study = make_study(RATE, SHARES, stock, "search.verify=false", **{**NARROW, "topologies": "chunked"})
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study.data), encoding="utf-8")
    command = ["run", str(tmp_path / "study.yaml"), "--out", str(tmp_path / "out")]
    assert _main(command) == 0
    assert "no single deployment does" in capsys.readouterr().out
    assert _main([*command, "--set", "slo.target=0.99"]) == 1
    assert "No mix of two cells with unlike accelerators meets the target of 0.99" in capsys.readouterr().out


class Killed(BaseException):
    """What stands for kill -9: nothing catches it."""


@pytest.mark.parametrize("method", ["exhaustive", "optuna"])
def test_a_killed_run_goes_on_with_its_cells(make_study, tmp_path: Path, method: str):
    study = make_study(RATE, SHARES, f"search={{method: {method}, trials: 30, verify: false}}", **NARROW)
    whole = run(study)
    assert whole.mixed is not None
    told: list[int] = []

    def stop(done: int, total: int) -> None:
        told.append(done)
        if 2 * done > total:
            raise Killed

    with pytest.raises(Killed):
        run(study, folder=tmp_path, mixing=stop)
    assert (tmp_path / FOLDER).is_dir()
    told.clear()
    again = run(study, folder=tmp_path, mixing=lambda done, total: told.append(done))
    assert again.mixed is not None
    pd.testing.assert_frame_equal(again.mixed.front, whole.mixed.front)
    assert again.mixed.record()["best"] == whole.mixed.record()["best"]
    if method == "exhaustive":  # what was searched before is not searched again
        assert 2 * told[0] > told[-1]


def test_an_interrupt_leaves_the_single_deployments(make_study):
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    result = run(make_study(RATE, SHARES, "search.verify=false", **NARROW), mixing=stop)
    assert result.interrupted and result.mixed is None and result.best is not None


@pytest.mark.parametrize(
    "change, field",
    [
        ("mixed.shares=[]", "mixed.shares"),
        ("mixed.shares=[0.0]", "mixed.shares.0"),
        ("mixed.shares=[0.5, 1.0]", "mixed.shares.1"),
        ("mixed.shares=half", "mixed.shares"),
        ("mixed.parts=2", "mixed.parts"),
        ("load=max", "load"),
        ("load={concurrent_sessions: 3}", "mixed.shares"),
        ("objectives=[cost_per_hour_usd, session_p95_s]", "objectives"),
        ("uncertain={load: {cv: 0.3}, objective: robust}", "uncertain.objective"),
        ("limits.lost_replicas=1", "limits.lost_replicas"),
        ("load.peaks={decode: 2.0}", "load.peaks"),
        ("slo.ttft_s={bound: 2, fraction: 0.9}", "slo.ttft_s.fraction"),
        ("space.accelerators=[h100-sxm]", "space.accelerators"),
    ],
)
def test_what_cells_do_not_add_up_to_is_refused(make_study, change, field):
    with pytest.raises(InputError) as error:
        make_study("mixed={}", change)
    assert error.value.field == field and "\n" not in str(error.value)


def test_recorded_sessions_are_shared_too(make_study, tmp_path: Path):
    """Each cell gets its share of the rate, and replays what was recorded."""
    calls = [{"session": s, "call": c, "t_s": 30.0 * c + s, "input_tokens": 500 + 300 * c, "output_tokens": 100}
             for s in range(20) for c in range(4)]  # fmt: skip
    pd.DataFrame(calls).to_csv(tmp_path / "calls.csv", index=False)
    study = make_study(RATE, f"workload={{trace: {tmp_path / 'calls.csv'}}}", SHARES, **NARROW)
    for share in shares_of(study):
        cell = cell_study(study, share)
        assert cell.workload.sessions_per_second == pytest.approx(0.02 * share)
        assert cell.workload.mean_prompt == study.workload.mean_prompt
        assert cell.simulator().sample.last.sum() == 20
