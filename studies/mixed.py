"""Two cells with unlike accelerators that share the sessions: searched, simulated, and put beside one deployment."""

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from breakeven.models.simulation import Estimate
from breakeven.optimizer.cells import CellEvaluator, Limited, Pair, Pairing, PairVerification, other
from breakeven.optimizer.checkpoint import FOLDER, Checkpoint
from breakeven.optimizer.exhaustive import Task
from breakeven.optimizer.search import Found, Progress
from breakeven.optimizer.verify import MOST_RUNS, Verification
from breakeven.studies.decision import simulated_words
from breakeven.studies.deployment_file import deployment_yaml
from breakeven.studies.result import MIXED_FILES, SIMULATED, Row, records, table
from breakeven.studies.searching import Searching, silent
from breakeven.studies.study import Study
from breakeven.studies.task import identity
from breakeven.studies.words import share as percent

CELLS = ("first", "second")
_OF_A_CELL = (
    "cost_per_hour_usd",
    "slo_attainment",
    "accelerators",
    "power_kw",
    "ttft_p95_s",
    "tpot_p95_s",
    "utilization_max",
    "unverified",
)
TIE = 5e-4  # of the cost


def cell_study(study: Study, share: float) -> Study:
    """The study of a cell that gets this share of the sessions, each of them at random.

    Of arrivals whose intervals have the squared coefficient of variation :math:`c^2`, such a share :math:`p` has
    :math:`p c^2 + 1 - p` (Whitt 1983, The Queueing Network Analyzer, eq. 36): Poisson arrivals stay Poisson.
    """
    data = copy.deepcopy(study.data)
    del data["mixed"]
    data["load"] = {name: share * value for name, value in data["load"].items()}
    arrivals = study.written.arrivals
    if not isinstance(arrivals, str):
        data["arrivals"] = {"cv": math.sqrt(share * arrivals.cv**2 + 1.0 - share)}
    return Study.parse(data, study.file)


def limited(study: Study) -> Limited:
    """What the study limits of two cells together."""
    limits = study.written.limits
    return Limited(limits.budget_usd_per_hour or math.inf, limits.max_power_kw or math.inf, limits.inventory or {})


def shares_of(study: Study) -> list[float]:
    """Every share that a cell of the study may get, in order; none where it asks for no mix."""
    mixed = study.written.mixed
    named = [] if mixed is None else [round(share, 9) for share in mixed.shares]
    return sorted({*named, *map(other, named)})


@dataclass
class Mixed:
    """What a search of two cells found."""

    study: Study
    front: pd.DataFrame  # pairs of unlike cells that no other one beats in cost and attainment, cheapest first
    best: Row | None  # the cheapest of them that meets the target, simulated where there was time
    alike_usd_per_hour: float | None  # of the cheapest two cells with the same accelerators that meet it
    uniform: Row | None  # the cheapest single deployment that meets it
    cells: tuple[tuple[Study, Row], ...] = ()  # of `best`: each at its load
    evaluated: int = 0
    seconds: float = 0.0
    simulated: int = 0

    @property
    def ratio(self) -> float | None:
        """Cost of the best mix over that of the cheapest single deployment."""
        if self.best is None or self.uniform is None:
            return None
        return float(self.best["cost_per_hour_usd"]) / float(self.uniform["cost_per_hour_usd"])

    @property
    def pays(self) -> bool:
        """Whether the best mix is cheaper than one deployment, and than two cells with the same accelerators."""
        if self.best is None:
            return False
        others = [self.alike_usd_per_hour, None if self.uniform is None else self.uniform["cost_per_hour_usd"]]
        cost = float(self.best["cost_per_hour_usd"])
        return all(cost < (1.0 - TIE) * float(usd) for usd in others if usd is not None)

    def sentences(self) -> list[str]:
        """The answer in words."""
        target, best = self.study.written.slo.target, self.best
        if best is None:
            most = float(self.front["slo_attainment"].to_numpy().max()) if len(self.front) else 0.0
            reach = "some do by the model, but not when simulated" if most >= target else f"they reach {percent(most)}"
            return [f"No mix of two cells with unlike accelerators meets the target of {target:g}: {reach}."]
        cost, ratio = float(best["cost_per_hour_usd"]), self.ratio
        line = "Mixing accelerators pays" if self.pays else "Mixing accelerators does not pay here"
        line += (
            f": {best['deployment']} is the cheapest mix that meets the target, {cost:,.2f} USD per hour, attainment "
            f"{percent(best['slo_attainment'])}{simulated_words(best)}"
        )
        line += (
            "; no single deployment does" if ratio is None else f", {ratio:.3f} times the cheapest deployment's cost"
        )
        line += f". Unverified: {best['unverified']}." if best["unverified"] else "."
        return [line, *self._alike(cost)]

    def _alike(self, cost: float) -> list[str]:
        """What two cells with the same accelerators make of it, where they beat one deployment."""
        alike, uniform = self.alike_usd_per_hour, self.uniform
        if alike is None or (uniform is not None and alike > (1.0 - TIE) * float(uniform["cost_per_hour_usd"])):
            return []
        beside = "less than" if alike < (1.0 - TIE) * cost else "no less than"
        return [
            f"Two cells with the same accelerators cost {alike:,.2f} USD per hour, {beside} the mix: what they save on "
            "one deployment comes from sizes and schedules that it lacks."
        ]

    def record(self) -> dict[str, Any]:
        """What study.json holds of it."""
        return {
            "shares": shares_of(self.study),
            "candidates_evaluated": self.evaluated,
            "evaluation_seconds": self.seconds,
            "candidates_simulated": self.simulated,
            "pairs_on_front": len(self.front),
            "best": None if self.best is None else {k: _plain(v) for k, v in self.best.items()},
            "single_cost_per_hour_usd": None if self.uniform is None else float(self.uniform["cost_per_hour_usd"]),
            "alike_cost_per_hour_usd": self.alike_usd_per_hour,
            "ratio": self.ratio,
            "pays": self.pays,
            "answer": self.sentences(),
        }

    def save(self, folder: Path) -> None:
        """Write mixed.csv, and a deployment file of each cell of the cheapest that meets the target."""
        pairs, *files = MIXED_FILES
        self.front.to_csv(folder / pairs, index=False)
        for name, (cell, row) in zip(files, self.cells, strict=False):
            (folder / name).write_text(deployment_yaml(cell, row), encoding="utf-8")


COMPARED = ("", "sessions", "deployment", "topology", "accelerators", "USD/h", "attainment", "simulated", "ratio")


def compared(mix: Row, single: Row | None) -> list[list[str]]:
    """Cells of a table under COMPARED: the cheapest single deployment, the cells of a mix and what they come to."""
    usd = None if single is None else float(single["cost_per_hour_usd"])

    def line(name: str, share: float, row: Row, ratio: bool = False) -> list[str]:
        simulated = float(row.get(SIMULATED[0]) or math.nan)
        return [
            name,
            f"{share:.3g}",
            str(row.get("deployment", "")),
            str(row.get("topology", "")),
            f"{float(row['accelerators']):,.0f}",
            f"{float(row['cost_per_hour_usd']):,.2f}",
            percent(float(row["slo_attainment"])),
            percent(simulated) if math.isfinite(simulated) else "",
            f"{float(row['cost_per_hour_usd']) / usd:.3f}" if ratio and usd else "",
        ]

    lines = [] if single is None else [line("one deployment", 1.0, single, ratio=True)]
    for cell, share in zip(CELLS, (mix["share"], other(mix["share"])), strict=True):
        own = {key.removeprefix(f"{cell}_"): value for key, value in mix.items() if key.startswith(f"{cell}_")}
        lines.append(line(f"{cell} cell", share, own))
    return [*lines, line("both cells", 1.0, {**mix, "deployment": ""}, ratio=True)]


def search_mixed(
    study: Study,
    uniform: Row | None,
    progress: Progress = silent,
    folder: Path | None = None,
    cluster: str | None = None,
) -> Mixed:
    """Search the cells at each share of the load, pair them, and simulate the cheapest pairs that meet the target.

    `uniform` is the cheapest single deployment that meets it. In `folder` stand the notes of a run that goes on.
    """
    clock = time.perf_counter()
    searches = _searched(study, progress, folder, cluster)
    pairing = _pairing(study, {share: search.found for share, search in searches.items()})
    unlike, alike = pairing.front(unlike=True), pairing.front(unlike=False)
    seconds = time.perf_counter() - clock
    judge = PairVerification({}, study.written.slo.target)
    if study.written.search.verify:
        places = [(0, share) for share in searches if share >= 0.5] + [(1, share) for share in searches if share <= 0.5]
        judge.cells = {(place, share): _verification(searches[share], place) for place, share in places}
    ends: list[Pair | None] = []
    for pairs in (unlike, alike):
        meeting = [pair for pair in pairs if pair.slo_attainment >= judge.target]
        ends.append(judge.walk(meeting) if judge.cells else next(iter(meeting), None))
    best, same = ends
    tables = _tables(searches, unlike)
    front = _frame(unlike, tables, judge.shown)
    return Mixed(
        study=study,
        front=front,
        best=None if best is None else records(front.iloc[[unlike.index(best)]])[0],
        alike_usd_per_hour=None if same is None else same.cost_per_hour_usd,
        uniform=uniform,
        cells=() if best is None else tuple((searches[cell[0]].study, tables[cell]) for cell in best.cells),
        evaluated=sum(search.found.evaluated for search in searches.values()),
        seconds=seconds,
        simulated=sum(len(verification.verdicts) for verification in judge.cells.values()),
    )


def _searched(study: Study, progress: Progress, folder: Path | None, cluster: str | None) -> dict[float, Searching]:
    """The search that the study asks for, of a cell at each share of the load."""
    searches: dict[float, Searching] = {}
    shares = shares_of(study)
    for k, share in enumerate(shares):

        def tell(done: int, total: int, k: int = k) -> None:
            progress(k * total + done, len(shares) * total)

        cell = cell_study(study, share)
        task = Task(CellEvaluator(**cell.evaluator().__dict__), limited(study).objectives, "cost_per_hour_usd")
        notes = None if folder is None else Checkpoint(folder / FOLDER / f"share-{share:g}", identity(task))
        if notes is not None:
            notes.folder.mkdir(parents=True, exist_ok=True)
        own = None if notes is None else notes.folder
        searches[share] = Searching(cell, task, tell, None, cluster, notes, own, keep_rows=False)
        searches[share].run()
    return searches


def _pairing(study: Study, found: Mapping[float, Found]) -> Pairing:
    economy = study.catalog.economy
    money = float(economy.pool_usd_per_hour), float(economy.second_kind_usd_per_hour)
    return Pairing(found, limited(study), len(study.accelerators), *money)


def _verification(search: Searching, place: int) -> Verification:
    """Of the first or second cells of pairs at one share, with random numbers of their own."""
    cell, notes = search.study, search.notes
    seed = cell.written.search.seed + place * MOST_RUNS
    verification = Verification(cell.simulator(search.evaluator), cell.slo, seed)
    if notes is not None:
        notes = replace(notes, identity=f"{notes.identity}-{place}")
        verification.verdicts, verification.note = notes.verdicts(), notes.note
    return verification


def _tables(searches: Mapping[float, Searching], pairs: Sequence[Pair]) -> dict[tuple[float, int], Row]:
    """Choices and what they come to of each cell, by its share and its candidate."""
    rows: dict[tuple[float, int], Row] = {}
    for share, search in searches.items():
        ids = sorted({candidate for pair in pairs for each, candidate in pair.cells if each == share})
        if ids:
            found = table(search.evaluator, np.array(ids, np.int64))
            shown = ["deployment", *search.study.space.frame(np.array(ids[:1])).columns, *_OF_A_CELL]
            rows |= {(share, row["candidate"]): row for row in records(found.loc[:, shown])}
    return rows


def _frame(pairs: Sequence[Pair], tables: Mapping[tuple[float, int], Row], shown: Mapping[Pair, Estimate]) -> Any:
    """mixed.csv: the pair, then each cell with its choices."""
    return pd.DataFrame([_row(pair, [tables[cell] for cell in pair.cells], shown.get(pair)) for pair in pairs])


def _row(pair: Pair, cells: Sequence[Row], simulated: Estimate | None) -> Row:
    a, b = (f"on {row['deployment']} ({row['topology']})" for row in cells)
    out: Row = {
        "share": pair.share,
        "deployment": f"{pair.share:.3g} of the sessions {a}, {other(pair.share):.3g} {b}",
        "cost_per_hour_usd": pair.cost_per_hour_usd,
        "slo_attainment": pair.slo_attainment,
        **dict(zip(SIMULATED, simulated or (math.nan,) * 3, strict=True)),
        "accelerators": sum(row["accelerators"] for row in cells),
        "power_kw": sum(row["power_kw"] for row in cells),
        "unverified": "" if simulated else "; ".join(dict.fromkeys(filter(None, (row["unverified"] for row in cells)))),
    }
    for name, row in zip(CELLS, cells, strict=True):
        out |= {f"{name}_{key}": value for key, value in row.items()}
    return out


def _plain(value: Any) -> Any:
    """As JSON has it; what is not known is null."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
