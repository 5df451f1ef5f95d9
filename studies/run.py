"""Run a study: choose the search, evaluate, keep the front, and say what was found."""

import contextlib
import os
import time
from pathlib import Path

import jax
import numpy as np
import pandas as pd

from breakeven.optimizer.checkpoint import Checkpoint
from breakeven.optimizer.search import Found, Progress
from breakeven.optimizer.verify import Verification
from breakeven.studies.mixed import search_mixed
from breakeven.studies.result import Result, rank_by, table, with_risk, with_verdicts
from breakeven.studies.searching import Searching, silent
from breakeven.studies.study import Study
from breakeven.studies.task import identity, task_of


def run(
    study: Study,
    progress: Progress = silent,
    storage: str | None = None,
    verifying: Progress = silent,
    folder: Path | None = None,
    cluster: str | None = None,
    mixing: Progress = silent,
) -> Result:
    """Search the study's space, simulate the candidates that matter, and tabulate what was found.

    Exhaustive up to ten million candidates unless the study says otherwise, Optuna beyond. An interrupt (Ctrl-C)
    ends the search; what was found until then is kept. In `folder` the search notes how far it came, and goes on from
    there the next time; `finish` removes the notes. `storage` is a database that workers share, `cluster` the address
    of a Dask scheduler whose workers judge an exhaustive search.
    """
    task = task_of(study)
    notes = None if folder is None else Checkpoint.inside(folder, identity(task))
    search = Searching(study, task, progress, storage, cluster, notes, folder)
    order = rank_by(study)
    interrupted = False
    clock = time.perf_counter()
    try:
        search.run()
    except KeyboardInterrupt:
        interrupted = True
    found, evaluator = search.found, search.evaluator
    seconds = time.perf_counter() - clock
    front = table(evaluator, found.archive.ids) if len(found.archive.ids) else _nothing(study)
    objectives = list(found.objectives)
    front = front.sort_values([*objectives, "candidate"], ignore_index=True)
    best_ids = [candidate for *_, candidate in found.best.values()]
    verification = None
    if study.written.search.verify and not interrupted and len(front):
        verification, best_ids = _verify(study, found, front, best_ids, verifying, notes)
    families = table(evaluator, np.array(sorted(best_ids), np.int64)) if len(best_ids) else _nothing(study)
    if verification is not None:
        front, families = with_verdicts(front, verification), with_verdicts(families, verification)
    front, families = with_risk(study, front), with_risk(study, families)
    ascending = order != "goodput_per_s"
    families = families.sort_values(
        [order, "slo_attainment", "candidate"], ascending=[ascending, False, True], ignore_index=True
    ).drop_duplicates("topology", ignore_index=True)
    result = Result(study, front, families, found, seconds, search.method, interrupted, history=search.history)
    result.verification = verification
    if study.written.mixed is not None and not interrupted:
        try:
            result.mixed = search_mixed(study, result.best, mixing, folder, cluster)
        except KeyboardInterrupt:
            result.interrupted = True
    return result


def finish(folder: Path) -> None:
    """Remove the notes of a search whose result is written."""
    Checkpoint.inside(folder, "").clear()


def _verify(
    study: Study,
    found: Found,
    front: pd.DataFrame,
    best: list[int],
    progress: Progress,
    notes: Checkpoint | None,
) -> tuple[Verification, list[int]]:
    """Simulate the best of each topology and the front; the best of each that holds there, or was not tried.

    At the largest load that meets the SLO a deployment stands on the target's edge: there the choice stays.
    """
    verification = Verification(study.simulator(), study.slo, study.written.search.seed)
    if notes is not None:
        verification.verdicts, verification.note = notes.verdicts(), notes.note
    lists = [] if study.max_load else found.shortlists()
    target = study.written.slo.target
    near = front.assign(away=(front["slo_attainment"] - target).abs()).sort_values("away", kind="stable")
    others = [*best, *(int(c) for c in near["candidate"])]
    try:
        ends = verification.run(lists, dict.fromkeys(others), progress)
    except KeyboardInterrupt:
        return verification, best
    return verification, best if study.max_load else [end for end in ends.values() if end is not None]


def _nothing(study: Study) -> pd.DataFrame:
    return table(study.evaluator(), np.array([0], np.int64)).iloc[:0]


def remember_compiled() -> None:
    """Keep compiled programs in the user's cache folder, so that a second run starts at once."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    with contextlib.suppress(OSError):
        folder = Path(base) / "breakeven" / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
