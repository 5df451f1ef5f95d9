"""Bilevel search: an Optuna trial chooses a structure, the model sweeps the numbers inside it.

A search starts from a coarse grid over a sample of the structures; the best of them are its first trials. Whatever a
trial finds stands in its attributes, so a study can be continued, shared by many workers, and read without evaluating
anything again. At the end the neighbourhood of the front is searched.
"""

import os
import socket
import time
import warnings
import zlib
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from breakeven.models.inputs import InputError
from breakeven.optimizer import storage as storages
from breakeven.optimizer.complete import complete
from breakeven.optimizer.encoding import Encoding
from breakeven.optimizer.exhaustive import Task
from breakeven.optimizer.front import MAXIMISED, non_dominated
from breakeven.optimizer.polish import Seen, polish
from breakeven.optimizer.quality import History
from breakeven.optimizer.refine import refine
from breakeven.optimizer.search import Found, Progress
from breakeven.optimizer.storage import BATCH_KEY, JOURNAL, POPULATION, Journal, database, journal, sampler
from breakeven.optimizer.sweeps import Scale, Sweeper, Swept
from breakeven.spaces.structures import Structures

COARSE_STRUCTURES = 20_000  # sampled at most
COARSE_POINTS = 18  # of numbers in each
COARSE_SHARE = 0.01  # of the space at most
BLOCK = 2048  # candidates per call of the model: a batch of trials asks for few
ONE_TRIAL = 512  # and a single trial of a shared study for fewer still
GENERATIONS = 300  # of a space's structures make a batch of trials
GP_BATCH = 10
POLL_S = 2.0
COUNT_EVERY = 10  # trials of a shared study: counting reads all that are under way
LIMITS = "limits"  # Optuna's constraint: how far the best numbers of a structure are from breaking none
LEFT = "left"  # marks a failed trial that nobody takes up again
PATIENCE_S = 120.0  # for the process that began a shared study to finish its coarse grid


@dataclass(frozen=True)
class Settings:
    """How a bilevel search goes on."""

    trials: int = 2000
    sampler: str = "nsga2"
    seed: int = 0
    seconds: float = np.inf  # it stops asking after so long
    early_stop: bool = True  # when the front no longer moves
    refine: bool = False  # by gradients, before the neighbourhood of the front is searched
    identity: str = ""  # fingerprint of space, workload, SLO and catalogue
    name: str = "breakeven"
    about: dict[str, Any] | None = None  # what a worker needs to build the same search
    seeds: tuple[int, ...] = ()  # structures to try first, from an earlier study


@dataclass
class Search:
    """A bilevel search in progress."""

    task: Task
    settings: Settings
    structures: Structures
    study: optuna.Study
    found: Found
    history: History = field(default_factory=History)
    scale: Scale | None = None
    started: float = 0.0
    seen: Seen = field(default_factory=Seen)

    @classmethod
    def of(cls, task: Task, settings: Settings, study: optuna.Study, found: Found, block: int = BLOCK) -> "Search":
        """A search of a task's space."""
        small = replace(task, evaluator=task.evaluator.in_blocks_of(block))
        return cls(small, settings, Structures(task.evaluator.space), study, found)

    def __post_init__(self) -> None:
        self.encoding = Encoding(self.structures)
        self.sweeper = Sweeper(self.task, self.structures)
        self.started = time.perf_counter()

    @property
    def batch(self) -> int:
        """Trials asked for at once, a generation of evolutionary samplers; GP thinks long about each."""
        most = GP_BATCH if self.settings.sampler == "gp" else POPULATION
        return int(np.clip(self.structures.size // GENERATIONS, GP_BATCH, most))

    def sampler(self, seed: int) -> optuna.samplers.BaseSampler:
        """The sampler of the settings."""
        return sampler(self.settings.sampler, seed % 2**31, self.batch)

    def prepare(self) -> None:
        """Take up what the study holds; a new one gets the coarse grid and its first trials."""
        if "coarse" not in self.study.user_attrs:
            self._warm_start()
        attrs = self.study.user_attrs
        self.found.merge(Found.restored(self.task.objectives, attrs["coarse"]))
        if attrs["scale"] is not None:
            self.scale = Scale(*(np.array(corner) for corner in attrs["scale"]))
            self.history.reference = self.scale.worst

    def _warm_start(self) -> None:
        rng = np.random.default_rng(self.settings.seed)
        room = int(COARSE_SHARE * self.task.evaluator.space.size) // COARSE_POINTS
        sample = _sample(self.structures, min(max(room, self.batch), COARSE_STRUCTURES), rng)
        ids = self.structures.coarse(sample, COARSE_POINTS)
        coarse = self.task.judge(ids, keep=True)
        for part in coarse.kept:
            self.found.keep(part)
        rows = coarse.rows()
        scale = None
        seeds = list(self.settings.seeds)
        if rows and coarse.feasible:
            shown, costs = coarse.shown(rows)
            if len(shown):
                scale = _corners(coarse.archive.costs, costs)
                seeds += self._best_structures(shown, costs)
        for structure in list(dict.fromkeys(seeds))[: 2 * self.batch]:
            self.study.enqueue_trial(self.encoding.parameters(structure), skip_if_exists=True)
        self.study.set_user_attr("scale", scale)
        self.study.set_user_attr("coarse", coarse.state())

    def _best_structures(self, ids: np.ndarray, costs: np.ndarray) -> list[int]:
        """Structures of the coarse grid, front after front."""
        chosen: list[int] = []
        left = np.arange(len(ids))
        while len(left) and len(chosen) < 2 * self.batch:
            first = left[non_dominated(costs[left], ids[left])]
            order = first[np.argsort(costs[first, 0], kind="stable")]
            chosen += [int(s) for s in self.structures.of(ids[order]) if int(s) not in chosen]
            left = np.setdiff1d(left, left[np.isin(self.structures.of(ids[left]), chosen)])
        return chosen

    def take_up(self, alone: bool) -> int:
        """Merge what the study's complete trials found, and record it batch by batch; returns how many there are. Where
        it searches `alone`, the neighbourhood is searched between batches, as it was before an interruption."""
        trials = self._finished()
        if alone:
            self.polish()
        self.record(0)
        for number, trial in enumerate(trials, start=1):
            if "found" in trial.user_attrs:
                structure = self.encoding.named(trial.params)
                found = Found.restored(self.task.objectives, trial.user_attrs["found"])
                self.sweeper.known[structure] = Swept(structure, found, trial.constraints[LIMITS])
                self.found.merge(found)
            if number % self.batch == 0:
                if alone:
                    self.polish()
                self.record(number)
        return len(trials)

    def polish(self) -> None:
        """Search the neighbourhood of the front; the structures that this brings onto it are the next trials."""
        polish(self.task, self.structures, self.found, self.seen)
        for structure in dict.fromkeys(self.structures.of(self.found.archive.ids).tolist()):
            if structure not in self.sweeper.known:
                self.study.enqueue_trial(self.encoding.parameters(structure), skip_if_exists=True)

    def tell(self, trial: optuna.Trial, swept: Swept, first: bool) -> list[float]:
        """Write what a structure came to into its trial, in few transactions; returns the values to tell."""
        trial.set_constraint(LIMITS, min(swept.excess, 0.0) if swept.found.feasible else swept.excess)
        representative = swept.representative(self.scale)
        if first:
            trial.set_user_attr("found", swept.found.state())
        if representative is None:
            return [0.0 if name in MAXIMISED else 1e12 for name in self.task.objectives]
        candidate, costs = representative
        trial.set_user_attr("candidate", candidate)
        return [-c if name in MAXIMISED else c for c, name in zip(costs.tolist(), self.task.objectives, strict=True)]

    @property
    def over(self) -> bool:
        late = time.perf_counter() - self.started > self.settings.seconds
        return late or (self.settings.early_stop and self.history.still(self.task.evaluator.space.size))

    def record(self, trials: int) -> None:
        """Note how far the front has come."""
        seconds = time.perf_counter() - self.started
        self.history.add(trials, self.found.evaluated, seconds, self.found.archive.costs)

    def finish(self) -> None:
        """Refine the front by gradients where asked to, then search its neighbourhood."""
        if self.settings.refine:
            polish(self.task, self.structures, self.found, self.seen)
            refine(self.task, self.structures, self.found, self.settings.seed)
        polish(self.task, self.structures, self.found, self.seen)
        self.record(len(self._finished()))

    def _finished(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def _corners(front: np.ndarray, costs: np.ndarray) -> list[list[float]]:
    """Best and worst of a front, or of all candidates where it has no width."""
    box = front if (front.max(0) > front.min(0)).all() else costs
    return [box.min(0).tolist(), box.max(0).tolist()]


def _sample(structures: Structures, most: int, rng: np.random.Generator) -> np.ndarray:
    """All structures, or as many of each topology, spread evenly over their numbers and jittered."""
    if structures.size <= most:
        return np.arange(structures.size)
    parts = []
    share = most // (len(structures.offsets) - 1)
    for start, stop in zip(structures.offsets[:-1].tolist(), structures.offsets[1:].tolist(), strict=True):
        count = min(share, stop - start)
        if count:
            parts.append(
                start + np.unique(((np.arange(count) + rng.random(count)) / count * (stop - start)).astype(int))
            )
    return np.concatenate(parts)


def directions(objectives: tuple[str, ...]) -> list[StudyDirection]:
    """Optuna's directions of objectives."""
    return [StudyDirection.MAXIMIZE if name in MAXIMISED else StudyDirection.MINIMIZE for name in objectives]


def open_study(storage: optuna.storages.BaseStorage, task: Task, settings: Settings) -> optuna.Study:
    """The study by its name, new or as it stands; another search's study of that name is refused."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        storage=storage,
        study_name=settings.name,
        directions=directions(task.objectives),
        load_if_exists=True,
    )
    known = study.user_attrs.get("identity")
    if known is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names(list(task.objectives))
        study.set_user_attr("began", _process())
        study.set_user_attr("identity", settings.identity)
        study.set_user_attr("about", settings.about)
        study.set_user_attr("trials", settings.trials)
        study.set_user_attr("sampler", settings.sampler)
        study.set_user_attr("seed", settings.seed)
    elif known != settings.identity:
        raise InputError("--storage", settings.name, "holds a study of another search by this name: change `name`")
    return study


def search_alone(
    task: Task, settings: Settings, found: Found, progress: Progress, folder: Path | None = None
) -> Search:
    """Search in this process, batch by batch; in `folder` the study is kept, and continued by the next call."""
    storage, file = _own_storage(folder, settings)
    search = Search.of(task, settings, open_study(storage, task, settings), found)
    search.prepare()
    study, finished = search.study, search.take_up(alone=True)
    done = study.user_attrs.get(BATCH_KEY, 0)
    while finished < settings.trials and not search.over:
        # A sampler of its own for each batch: a study that is continued goes on as it would have.
        study.sampler = search.sampler(settings.seed + 7919 * done)
        asked = [study.ask() for _ in range(min(search.batch, settings.trials - finished))]
        _judge_batch(search, asked)
        done, finished = done + 1, finished + len(asked)
        study.set_user_attr(BATCH_KEY, done)
        search.polish()
        if file is not None:
            file.flush()
        search.record(finished)
        progress(finished, settings.trials)
        search.history.certain = complete(search.task, search.found)
        if search.history.certain:
            break
    search.finish()
    progress(settings.trials, settings.trials)
    return search


def _own_storage(folder: Path | None, settings: Settings) -> tuple[optuna.storages.BaseStorage, Journal | None]:
    """The storage in `folder`; a journal of another search there is put aside."""
    storage, file = journal(folder)
    for study in storage.get_all_studies():
        identity = study.user_attrs.get("identity")
        if folder is not None and identity != settings.identity:
            (folder / JOURNAL).rename(folder / f"trials-{str(identity)[:8]}.journal")
            return journal(folder)
    return storage, file


def _judge_batch(search: Search, asked: list[optuna.Trial]) -> None:
    chosen = [search.encoding.suggest(trial) for trial in asked]
    known = set(search.sweeper.known)
    for trial, swept in zip(asked, search.sweeper(chosen, search.found), strict=True):
        first = swept.structure not in known
        known.add(swept.structure)
        values = search.tell(trial, swept, first)
        search.study.tell(trial, values)
        if first:
            search.found.merge(swept.found)


class Surplus(Exception):
    """A trial asked for when as many as wanted were under way already."""


def search_together(task: Task, settings: Settings, found: Found, progress: Progress, url: str) -> Search:
    """Search with any number of workers that share a database: `breakeven worker` does the same elsewhere."""
    with database(url) as storage:
        search = join(Search.of(task, settings, open_study(storage, task, settings), found, ONE_TRIAL))
        work(search, progress)
        search.take_up(alone=False)
        search.finish()
    return search


def join(search: Search) -> Search:
    """Prepare for a shared study; if another process began it, let that finish the coarse grid, for a while."""
    study, until = search.study, time.monotonic() + PATIENCE_S
    while "coarse" not in study.user_attrs and study.user_attrs["began"] != _process() and time.monotonic() < until:
        time.sleep(POLL_S)
    search.prepare()
    return search


def _process() -> str:
    return f"{socket.gethostname()} {os.getpid()}"


def work(search: Search, progress: Progress) -> int:
    """Do trials of a shared study until all are complete, those of dead workers included; returns how many."""
    study, wanted = search.study, search.study.user_attrs["trials"]
    own = zlib.crc32(_process().encode())
    study.sampler = search.sampler(search.settings.seed + own)
    done = 0

    def judge(trial: optuna.Trial) -> list[float]:
        nonlocal done
        if trial.number >= wanted and _before(study, trial.number) >= wanted:
            trial.set_user_attr(LEFT, True)
            raise Surplus
        try:
            structure = search.encoding.suggest(trial)
            first = structure not in search.sweeper.known
            [swept] = search.sweeper([structure])
            values = search.tell(trial, swept, first)
        except BaseException:
            trial.set_user_attr(LEFT, True)
            raise
        done += 1
        return values

    def stop_when_asked(study: optuna.Study, trial: FrozenTrial) -> None:
        if trial.number + 1 < wanted and trial.number % COUNT_EVERY:
            return
        complete, waiting, under_way = _counts(study)
        progress(min(complete, wanted), wanted)
        if under_way >= wanted and not waiting:
            study.stop()

    while True:
        complete, waiting, under_way = _counts(study)
        if complete >= wanted:
            progress(wanted, wanted)
            return done
        if under_way < wanted or waiting:
            study.optimize(judge, callbacks=[stop_when_asked], catch=(Surplus,))
        else:
            time.sleep(POLL_S)  # others are at it, or have died: then their trials come back
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                optuna.storages.fail_stale_trials(study)


def _counts(study: optuna.Study) -> tuple[int, int, int]:
    """Trials that are complete, that wait, and all that are under way or done."""
    trials = _alive(study)
    states = [t.state for t in trials]
    return states.count(TrialState.COMPLETE), states.count(TrialState.WAITING), len(trials)


def _before(study: optuna.Study, number: int) -> int:
    """Trials under way or done that were first asked for before this one; one taken up again keeps its place."""
    trials = _alive(study)
    place = {t.number: t.system_attrs.get("failed_trial", t.number) for t in trials}
    return sum(first < place.get(number, number) for first in place.values())


def _alive(study: optuna.Study) -> list[FrozenTrial]:
    """All trials but failed ones; one just declared dead counts until the one that takes it up is there."""
    trials = study.get_trials(deepcopy=False)
    again = {old for t in trials for old in t.system_attrs.get("retry_history", ())}
    recent = datetime.now() - timedelta(seconds=storages.GRACE_S)

    def coming(t: FrozenTrial) -> bool:
        dead = t.number not in again and LEFT not in t.user_attrs
        return dead and t.datetime_complete is not None and t.datetime_complete > recent

    return [t for t in trials if t.state != TrialState.FAIL or coming(t)]
