"""Pay-off maps, sweeps and break-even points: the same optimum as a full search, and crossings that are crossings."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from breakeven.models.economics import pool_accelerators
from breakeven.models.inputs import InputError
from breakeven.models.tables import resolve
from breakeven.models.topology import TOPOLOGIES, topology
from breakeven.optimizer import optima as optima_module
from breakeven.optimizer.optima import Optimizer, probe, shortlist, structures
from breakeven.studies.axes import Axis, Variations, read_axis
from breakeven.studies.cli import _main
from breakeven.studies.figures import plt
from breakeven.studies.optima import Optima, cheapest, is_split, scenario
from breakeven.studies.payoff import PayoffMap, contour_cells, payoff, sign, spread_order
from breakeven.studies.solve import solve
from breakeven.studies.study import Study
from breakeven.studies.sweep_plot import _pools

# A prefill accelerator three times as fast: whether the split that uses it pays is a matter of its price.
FAST: dict[str, Any] = {
    "name": "fast prefill",
    "llm": "llama-3.1-8b",
    "workload": "rag-docqa",
    "load": {"calls_per_second": 20},
    "slo": {"ttft_s": 2.0, "tpot_s": 0.1, "target": 0.9},
    "space": {
        "topologies": ["colocated", "chunked", "pd"],
        "accelerators": ["h100-sxm"],
        "tensor_parallel": [1, 2],
        "weights": "fp8",
        "replicas": {"from": 1, "to": 16},
        "max_batch": 128,
        "token_budget": [2048, 8192],
        "links": ["ib-ndr-400"],
        "prefill": {"accelerators": [{"name": "fast", "like": "h100-sxm", "compute": 3.0}], "token_budget": 8192},
    },
}


@pytest.fixture(scope="module")
def study() -> Study:
    return Study.parse(copy.deepcopy(FAST), "fast.yaml")


@pytest.fixture(scope="module")
def price(study: Study) -> Axis:
    return read_axis("accelerators.fast.price=0.1:8:7:log", study, "--x")


@pytest.fixture(scope="module")
def found(study: Study, price: Axis) -> PayoffMap:
    """A map over the price of the fast accelerator and the load."""
    return payoff(study, price, read_axis("load=x0.5,x1", study, "--y"), verify_seconds=0.0)


def test_axes_read_numbers_multiples_and_names(study: Study) -> None:
    def values(text: str) -> tuple[Any, ...]:
        return read_axis(text, study, "--over").values

    assert values("slo.ttft_s=1:3:3") == (1.0, 2.0, 3.0)
    assert values("slo.ttft_s=x1,x2") == (2.0, 4.0)
    assert values("load=x0.5:x2:3:log") == pytest.approx((10.0, 20.0, 40.0))
    assert values("llm=llama-3.1-8b,llama-3.1-70b") == ("llama-3.1-8b", "llama-3.1-70b")
    assert values("space.tensor_parallel=[1, 2],[4]") == ([1, 2], [4])
    assert read_axis("links.ib-ndr-400.gbs=x1,x2", study, "--x").values == (50.0, 100.0)
    assert read_axis("accelerators.fast.compute=x1,x2", study, "--x").label.endswith("the catalogue's")


@pytest.mark.parametrize(
    "text",
    ["slo.ttft_s", "slo.ttft_s=1:2", "slo.ttft_s=2:1:4", "slo.ttft_s=1:2:1", "slo.ttft_s=a:b:3", "slo.ttft_s=1,1"],
)  # fmt: skip
def test_bad_axes_are_refused(study: Study, text: str) -> None:
    with pytest.raises(InputError):
        Variations(study).at({"llm": read_axis(text, study, "--x").values[0]})


def test_catalogue_rows_change_by_path(study: Study) -> None:
    """A study's own view of a row keeps its name, and touches nothing else."""
    made = Variations(study).at({"links.ib-ndr-400.bandwidth": 0.5, "accelerators.fast.price": 2.0})
    assert made.names.links[0].id == "ib-ndr-400"
    assert made.names.links[0].bytes_per_s == 0.5 * study.names.links[0].bytes_per_s
    prices = dict(zip(made.names.accelerator_ids, made.prices_usd_per_hour, strict=True))
    assert prices["fast"] == pytest.approx(2.0 * prices["h100-sxm"])
    for path in ("links.ib-ndr-40.gbs", "accelerators.fast.speed", "accelerators.slow.price"):
        with pytest.raises(InputError, match=path.split(".")[0]):
            Variations(study).at({path: 2.0})


def test_a_scaled_distribution_scales_its_mean(study: Study) -> None:
    made = Variations(study).at({"workload.scale.output_tokens": 2.0})
    ratio = float(made.workload.mean_output) / float(study.workload.mean_output)
    assert ratio == pytest.approx(2.0, rel=0.02)


def test_the_optimum_is_that_of_the_whole_space(study: Study) -> None:
    """In order of cost and with early stops, or through a shortlist of structures: the same cheapest of each family."""
    given = scenario(study)
    whole = probe(study.space, given)
    best = whole.best(study.space)
    assert len(best) == 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optima_module, "EXACT", 10)
        patch.setattr(optima_module, "STRUCTURES", 2)
        few = shortlist(study.space, [whole])
    assert len(few) <= study.space.size / 2
    for ids in (np.arange(study.space.size), few):
        found = Optimizer(study.space, ids).best(given)
        assert {f: (o.cost_per_hour_usd, o.candidate) for f, o in found.items()} == best


def test_structures_differ_in_more_than_replicas(study: Study) -> None:
    ids = np.arange(study.space.size)
    columns = study.space.columns(ids)
    rest = np.stack([v for k, v in columns.items() if not k.endswith("replicas")], 1)
    expected = np.unique(rest, axis=0, return_inverse=True)[1].ravel()
    ours = np.unique(structures(study.space, ids), return_inverse=True)[1]
    pairs = np.unique(np.stack([ours, expected], 1), axis=0)
    assert len(pairs) == len(np.unique(expected)) == len(np.unique(ours))


def test_the_map_has_a_contour_and_costs_rise_with_the_price(found: PayoffMap) -> None:
    signs = found.signs
    assert signs.shape == (2, 7) and (signs[:, 0] == -1).all() and (signs[:, -1] == 1).all()
    assert int(found.table["contour"].to_numpy(bool).sum()) >= 4
    for _, row in found.table.groupby("load.calls_per_second"):
        assert (np.diff(row["ratio"].to_numpy()) >= -1e-6).all()


def test_the_break_even_lies_in_the_contour_cell_and_the_winner_differs(found: PayoffMap, price: Axis) -> None:
    """The point found by bisection lies between the two neighbouring cells of the map where the winner changes."""
    study = found.study
    solved = solve(study, price, shifts=False)
    (point,) = solved.crossings
    row = found.signs[list(found.y.numbers).index(20.0)]
    edge = int(np.flatnonzero(row[1:] * row[:-1] < 0)[0])
    assert price.numbers[edge] <= point.low < point.high <= price.numbers[edge + 1]
    assert point.high / point.low < 1.01 and not point.pays_above
    optima = Optima(study, (price,))
    for value, split_wins in ((point.low, True), (point.high, False)):
        optimum = optima.at({price.path: value})[1]
        winner = cheapest(optimum, optimum)
        assert winner is not None and is_split(winner[0]) == split_wins


def test_contour_cells_are_neighbours_with_different_winners() -> None:
    signs = np.array([[1, 1, 1], [1, -1, 0], [1, 1, 1]])
    assert contour_cells(signs).tolist() == [[False, True, False], [True, True, False], [False, True, False]]
    assert sorted(spread_order(23)) == list(range(23)) and spread_order(0) == []
    assert [sign(v) for v in (0.0, 0.5, 1.0, 2.0, np.inf, np.nan)] == [-1, -1, 1, 1, 1, 0]


def test_commands_write_tables_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "fast.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump(FAST))
    axes = ["--x", "accelerators.fast.price=1,8", "--y", "slo.ttft_s=x1,x2"]
    assert _main(["payoff", str(path), *axes, "--out", str(out)]) == 0
    table = pd.read_csv(out / "payoff.csv")
    assert len(table) == 4 and table["ratio_simulated"].notna().to_numpy().any()
    assert json.loads((out / "payoff.json").read_text())["seed"] == 0
    assert _main(["payoff", str(path), "--solve", "accelerators.fast.price=0.5:8", "--out", str(out)]) == 0
    assert "pays up to" in capsys.readouterr().out
    assert _main(["sweep", str(path), "--over", "load=x1,x2", "--out", str(out)]) == 0
    assert "beside the first" in capsys.readouterr().out
    rows = pd.read_csv(out / "sweep.csv")
    best = rows.loc[rows["chosen"].to_numpy(bool), "slo_attainment_simulated"].to_numpy(float)
    assert len(best) == 2 and best.min() >= 0.9
    for name in ("payoff", "sweep"):
        assert (out / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert "seed 0" in (out / f"{name}.svg").read_text()


def test_the_picture_of_a_sweep_shows_every_pool(study: Study) -> None:
    """Whatever pools a topology has, its bars sum to its accelerators."""
    data = copy.deepcopy(FAST)
    data["space"] |= {"topologies": list(TOPOLOGIES), "replicas": [1, 3, 4]}
    space = Study.parse(data, "fast.yaml").space
    rng = np.random.default_rng(0)
    ids = np.array([o + rng.integers(f.size) for f, o in zip(space.families, space.offsets[:-1], strict=True)])
    frame = space.frame(ids).assign(chosen=True, at=np.arange(len(ids)))
    figure, axes = plt.subplots()
    _pools(axes, frame)
    heights = [bar.get_height() for bar in axes.patches]  # type: ignore[attr-defined]
    assert len(heights) == sum(len(topology(name).pools) for name in frame["topology"])
    sizes = [np.asarray(size) for size in pool_accelerators(resolve(space.deployment(ids), study.catalog))]
    assert sum(heights) == pytest.approx(float(np.sum(sizes)))
    plt.close(figure)


@pytest.mark.parametrize(
    "arguments",
    [
        ["payoff", "coding-agent", "--x", "slo.ttft_s=1:2"],
        ["payoff", "coding-agent", "--x", "llm=a,b"],
        ["payoff", "coding-agent", "--baseline", "none"],
        ["payoff", "coding-agent", "--set", "load=max"],
        ["payoff", "coding-agent", "--solve", "llm"],
        ["sweep", "coding-agent"],
        ["sweep", "coding-agent", "--over", "load=x1", "--over", "load=x2"],
    ],
    ids=" ".join,
)
def test_bad_questions_are_one_line_with_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert _main([*arguments, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Traceback" not in error
