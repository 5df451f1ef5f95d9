"""A search as it ends, beside ten times as many trials: `python benchmarks/longer.py [STUDY] [--seeds N] [--times N]`.

For a space that nobody can go through. Each search stops where it finds its front still; then the first seed searches
again, for so many times as many trials. Hypervolumes are counted up to the worst corner of all the fronts, as shares of
the longest search's. Wall and processor seconds include compilation where nothing is cached.
"""

import argparse
from pathlib import Path

import numpy as np
from search import Clock, corner, silent

from breakeven.optimizer.bilevel import Settings, search_alone
from breakeven.optimizer.exhaustive import Task
from breakeven.optimizer.front import hypervolume
from breakeven.optimizer.search import Found
from breakeven.studies.run import remember_compiled
from breakeven.studies.study import Study
from breakeven.studies.task import task_of


def searched(task: Task, settings: Settings) -> tuple[str, int, np.ndarray]:
    """(what it took, trials, costs of the front) of one search."""
    clock, found = Clock(), Found(task.objectives)
    search = search_alone(task, settings, found, silent)
    wall, cpu = clock()
    trials = search.history.records[-1][0]
    said = (
        f"seed {settings.seed}: {trials:,} trials, {found.evaluated:,} candidates, {wall:.0f} s wall, {cpu:.0f} s CPU"
    )
    print(said, flush=True)
    return said, trials, found.archive.costs


def main() -> None:
    """Print each search and its share of the longest one's hypervolume."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", nargs="?", default="everything")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--times", type=int, default=10)
    given = parser.parse_args()
    remember_compiled()
    study = Study.load(Path(__file__).parents[1] / "studies" / f"{given.study}.yaml")
    task = task_of(study)
    print(f"{given.study}: {study.space.size:,} candidates", flush=True)
    found = [searched(task, Settings(seed=seed)) for seed in range(given.seeds)]
    trials = given.times * found[0][1]
    found.append(searched(task, Settings(trials=trials, early_stop=False)))
    reference = corner(np.concatenate([costs for *_, costs in found]))
    most = hypervolume(found[-1][-1], reference)
    for said, _, costs in found:
        print(f"{hypervolume(costs, reference) / most:.2%} of the hypervolume: {said}")


if __name__ == "__main__":
    main()
