"""Workers on one database: `python benchmarks/workers.py --storage URL [--workers 1 2 4] [--trials N] [STUDY]`.

Begins a study for each number of workers, starts them, and reports trials per second over the second half of the
trials, when all of them are at work, and whether every trial is there once.
"""

import argparse
import subprocess
import sys
import uuid
from pathlib import Path

import optuna
from optuna.trial import TrialState

from breakeven.optimizer.bilevel import ONE_TRIAL, Search, Settings, join, open_study
from breakeven.optimizer.search import Found
from breakeven.optimizer.storage import database
from breakeven.studies.deployment_file import anchored
from breakeven.studies.run import remember_compiled
from breakeven.studies.study import Study
from breakeven.studies.task import identity, task_of


def measure(study: Study, url: str, workers: int, trials: int, sampler: str) -> tuple[float, int]:
    """(trials per second, trials that are complete) of so many workers."""
    task = task_of(study)
    name = f"{study.written.name}-{uuid.uuid4().hex[:8]}"
    about = {"study": anchored(study.data, study.file), "file": study.file}
    settings = Settings(trials, sampler, identity=identity(task), name=name, about=about)
    with database(url) as storage:
        join(Search.of(task, settings, open_study(storage, task, settings), Found(task.objectives), ONE_TRIAL))
        command = [sys.executable, "-m", "breakeven", "worker", "--storage", url, "--study", name]
        running = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for _ in range(workers)]
        if any(worker.wait() for worker in running):
            sys.exit("a worker failed")
        done = optuna.load_study(study_name=name, storage=storage).get_trials(states=(TrialState.COMPLETE,))
    ends = sorted(t.datetime_complete.timestamp() for t in done if t.datetime_complete)
    half = len(ends) // 2
    return (len(ends) - 1 - half) / (ends[-1] - ends[half]), len(done)


def main() -> None:
    """Print a line for each number of workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", nargs="?", default="coding-agent")
    parser.add_argument("--storage", required=True)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--trials", type=int, default=400)
    parser.add_argument("--sampler", default="random")
    given = parser.parse_args()
    remember_compiled()
    study = Study.load(Path(__file__).parents[1] / "studies" / f"{given.study}.yaml")
    first = None
    for workers in given.workers:
        rate, done = measure(study, given.storage, workers, given.trials, given.sampler)
        first = first or rate
        print(
            f"{workers} workers: {rate:.1f} trials/s, {rate / first:.2f} times one; {done} of {given.trials}",
            flush=True,
        )


if __name__ == "__main__":
    main()
