"""The search that a study asks for: every candidate, or Optuna's choice of them."""

from dataclasses import dataclass, field
from pathlib import Path

from breakeven.models.inputs import InputError
from breakeven.optimizer.checkpoint import Checkpoint
from breakeven.optimizer.cluster import Cluster
from breakeven.optimizer.evaluator import Evaluator
from breakeven.optimizer.exhaustive import Task, exhaustive
from breakeven.optimizer.quality import History
from breakeven.optimizer.search import KEPT_ROWS, Found, Progress
from breakeven.studies.deployment_file import anchored
from breakeven.studies.earlier import earlier_structures
from breakeven.studies.study import Study
from breakeven.studies.task import identity

EXHAUSTIVE_LIMIT = 10_000_000


def silent(done: int, total: int) -> None:
    """Progress that shows nothing."""
    del done, total


@dataclass
class Searching:
    """A search of a study's space and what it has found: an interrupt (Ctrl-C) leaves what was found until then.

    In `notes` it writes how far it came, and goes on from there the next time; Optuna's journal stands in `folder`.
    `storage` is a database that workers share, `cluster` the address of a Dask scheduler whose workers judge an
    exhaustive search.
    """

    study: Study
    task: Task
    progress: Progress = silent
    storage: str | None = None
    cluster: str | None = None
    notes: Checkpoint | None = None
    folder: Path | None = None
    keep_rows: bool = True  # for evaluations.parquet
    history: History | None = None  # of an Optuna search
    found: Found = field(init=False)

    def __post_init__(self) -> None:
        self.found = self._keeping(Found(self.task.objectives))
        if self.cluster and self.method != "exhaustive":
            words = "takes an exhaustive search; an Optuna search is shared by --storage"
            raise InputError("--cluster", self.cluster, words)

    def _keeping(self, found: Found) -> Found:
        if not self.keep_rows:
            found.kept_rows = KEPT_ROWS
        return found

    @property
    def method(self) -> str:
        """Exhaustive up to ten million candidates unless the study says otherwise, Optuna beyond."""
        named = self.study.written.search.method
        if named != "auto":
            return named
        small = self.study.space.size <= EXHAUSTIVE_LIMIT and self.storage is None
        return "exhaustive" if small else "optuna"

    @property
    def evaluator(self) -> Evaluator:
        """What tabulates its front: in blocks that the search has compiled already."""
        if self.method == "exhaustive" or self.study.written.search.trial == "candidate":
            return self.task.evaluator
        from breakeven.optimizer.bilevel import BLOCK

        return self.task.evaluator.in_blocks_of(BLOCK)

    def run(self) -> None:
        """Search to the end."""
        if self.method == "exhaustive":
            self._exhaustive()
        elif self.study.written.search.trial == "candidate":
            self._candidates()
        else:
            self._structures()

    def _exhaustive(self) -> None:
        start, save = 0, _nowhere
        if self.notes is not None:
            (found, start), save = self.notes.load(self.found.objectives), self.notes.save
            self.found = self._keeping(found)
        pool = Cluster(self.cluster) if self.cluster else None
        exhaustive(self.task, self.found, self.progress, pool, start, save)

    def _candidates(self) -> None:
        from breakeven.optimizer.optuna_search import optuna_search

        fields = self.study.written.search
        options = fields.trials, fields.sampler, fields.seed, self.task.rank_by, self.progress
        optuna_search(self.task.evaluator, self.found, *options, self.storage, self.study.written.name)

    def _structures(self) -> None:
        from breakeven.optimizer.bilevel import Settings, search_alone, search_together

        study, fields = self.study, self.study.written.search
        settings = Settings(
            trials=fields.trials,
            sampler=fields.sampler,
            seed=fields.seed,
            seconds=fields.seconds or float("inf"),
            early_stop=fields.early_stop,
            refine=fields.refine,
            identity=identity(self.task),
            name=study.written.name,
            about={"study": anchored(study.data, study.file), "file": study.file},
            seeds=earlier_structures(study) if fields.warm_start else (),
        )
        if self.storage is None:
            self.history = search_alone(self.task, settings, self.found, self.progress, self.folder).history
        else:
            self.history = search_together(self.task, settings, self.found, self.progress, self.storage).history


def _nowhere(found: Found, position: int) -> None:
    del found, position
