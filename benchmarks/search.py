"""Samplers against the exhaustive truth: `python benchmarks/search.py [--rows ROW …] [--seconds S] [STUDY …]`.

For each study: its whole space first, then bilevel search and, one candidate a trial, random, NSGA-II and TPE, each
from so many seeds. Shares of the true hypervolume (median and worst), of the candidates and of the exhaustive search's
time. Reported, never asserted: machines differ and are shared, so read seconds as ratios. In pieces: some studies, some
rows, and no further seed of a row after so many seconds; the table says how many seeds there were.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from breakeven.optimizer.bilevel import BLOCK, Settings, search_alone
from breakeven.optimizer.exhaustive import Task, exhaustive
from breakeven.optimizer.front import hypervolume
from breakeven.optimizer.optuna_search import optuna_search
from breakeven.optimizer.search import Found
from breakeven.studies.run import remember_compiled
from breakeven.studies.study import Study
from breakeven.studies.task import task_of

STUDIES = ("shared-lab", "coding-agent", "agent-platform")
ONE_AT_A_TIME = {"random": 1000, "nsga2": 1000, "tpe": 200}  # candidates
ROWS = ("bilevel", *ONE_AT_A_TIME)


def silent(done: int, total: int) -> None:
    del done, total


class Clock:
    """Wall and processor seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter(), time.process_time()

    def __call__(self) -> tuple[float, float]:
        return time.perf_counter() - self._start[0], time.process_time() - self._start[1]


def corner(costs: np.ndarray) -> np.ndarray:
    """The worst corner of fronts, a thousandth beyond."""
    worst = costs.max(0)
    return worst + 1e-3 * np.abs(worst)


def compile_everything(task: Task) -> None:
    """So that no search pays for it."""
    task.judge(np.arange(min(task.evaluator.space.size, 2 * task.evaluator.block)))
    for evaluator in (task.evaluator, task.evaluator.in_blocks_of(BLOCK)):
        evaluator.sift(np.arange(4))
        evaluator(np.arange(4))


def compare(name: str, rows: list[str], seeds: int, most_s: float) -> None:
    """Print the table of one study; no row begins another seed after `most_s` seconds."""
    study = Study.load(Path(__file__).parents[1] / "studies" / f"{name}.yaml")
    task = task_of(study)
    size = study.space.size
    compile_everything(task)
    clock = Clock()
    truth = exhaustive(task, Found(task.objectives), silent)
    wall, cpu = clock()
    reference = corner(truth.archive.costs)
    whole = hypervolume(truth.archive.costs, reference)
    print(f"\n{name}: {size:,} candidates, {truth.screened:,} ruled out beforehand, {truth.feasible:,} feasible")
    heads = f"{'':<26}{'seeds':>6}{'hypervolume median':>20}{'worst':>9}{'candidates':>12}"
    print(f"{heads}{'evaluated':>11}{'wall':>8}{'CPU':>8}")
    truly = f"{'exhaustive':<26}{'':>6}{'100.00 %':>20}{'':>9}{size:>12,}{size - truth.screened:>11,}"
    print(f"{truly}{wall:>7.1f}s{cpu:>7.1f}s")

    def row(label: str, search: Callable[[int], Found]) -> None:
        shares, counts, evaluated, walls, cpus = [], [], [], [], []
        whole_row = Clock()
        for seed in range(seeds):
            if seed and whole_row()[0] > most_s:
                break
            clock = Clock()
            found = search(seed)
            seconds = clock()
            shares.append(hypervolume(found.archive.costs, reference) / whole if len(found.archive.ids) else 0.0)
            counts.append(found.evaluated / size)
            evaluated.append((found.evaluated - found.screened) / size)
            walls.append(seconds[0] / wall)
            cpus.append(seconds[1] / cpu)
        middle = statistics.median
        print(
            f"{label:<26}{len(shares):>6}{middle(shares):>20.2%}{min(shares):>9.2%}{middle(counts):>12.2%}{middle(evaluated):>11.2%}"
            f"{middle(walls):>8.0%}{middle(cpus):>8.0%}",
            flush=True,
        )

    def bilevel(seed: int) -> Found:
        found = Found(task.objectives)
        search_alone(task, Settings(seed=seed), found, silent)
        return found

    def one_at_a_time(sampler: str, trials: int) -> Callable[[int], Found]:
        def search(seed: int) -> Found:
            found = Found(task.objectives)
            return optuna_search(task.evaluator, found, trials, sampler, seed, task.rank_by, silent)

        return search

    for kind in rows:
        if kind == "bilevel":
            row(kind, bilevel)
        else:
            trials = ONE_AT_A_TIME[kind]
            row(f"{kind}, {trials:,} trials of one", one_at_a_time(kind, trials))


def main() -> None:
    """Print a table per study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", default=STUDIES)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which a row begins no other seed")
    given = parser.parse_args()
    remember_compiled()
    for name in given.studies:
        compare(name, given.rows, given.seeds, given.seconds)


if __name__ == "__main__":
    main()
