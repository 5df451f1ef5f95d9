"""Run a study: choose the search, evaluate, keep the front, and say what was found."""

import contextlib
import os
import time
from pathlib import Path

import jax
import numpy as np
import pandas as pd

from breakeven.optimizer.search import Found, Progress, exhaustive
from breakeven.studies.result import Result, rank_by, table
from breakeven.studies.study import Study

EXHAUSTIVE_LIMIT = 10_000_000


def silent(done: int, total: int) -> None:
    """Progress that shows nothing."""
    del done, total


def run(study: Study, progress: Progress = silent, storage: str | None = None) -> Result:
    """Search the study's space and tabulate what was found.

    Exhaustive up to ten million candidates unless the study says otherwise, Optuna beyond. An interrupt (Ctrl-C)
    ends the search; what was found until then is kept.
    """
    started = time.perf_counter()
    fields = study.written.search
    evaluator = study.evaluator()
    method = fields.method
    if method == "auto":
        method = "exhaustive" if study.space.size <= EXHAUSTIVE_LIMIT and storage is None else "optuna"
    found = Found(tuple(study.written.objectives))
    interrupted = False
    order = rank_by(study)
    clock = time.perf_counter()
    try:
        if method == "exhaustive":
            exhaustive(evaluator, found, order, progress)
        else:
            from breakeven.optimizer.optuna_search import optuna_search

            optuna_search(
                evaluator,
                found,
                fields.trials,
                fields.sampler,
                fields.seed,
                order,
                progress,
                storage,
                study.written.name,
            )
    except KeyboardInterrupt:
        interrupted = True
    seconds = time.perf_counter() - clock
    front = table(evaluator, found.archive.ids) if len(found.archive.ids) else _nothing(study)
    objectives = list(found.objectives)
    front = front.sort_values([*objectives, "candidate"], ignore_index=True)
    best_ids = np.array(sorted(candidate for *_, candidate in found.best.values()), np.int64)
    families = table(evaluator, best_ids) if len(best_ids) else _nothing(study)
    ascending = order != "goodput_per_s"
    families = families.sort_values(
        [order, "slo_attainment", "candidate"], ascending=[ascending, False, True], ignore_index=True
    )
    result = Result(study, front, families, found, seconds, method, interrupted)
    result.total_seconds = time.perf_counter() - started
    return result


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
