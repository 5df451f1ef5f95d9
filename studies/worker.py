"""A worker of a distributed study: everything it needs stands in the study itself."""

import optuna

from breakeven.models.inputs import InputError
from breakeven.optimizer.bilevel import Search, Settings, join, work
from breakeven.optimizer.checkpoint import fingerprint
from breakeven.optimizer.exhaustive import Task
from breakeven.optimizer.search import Found, Progress
from breakeven.optimizer.storage import database
from breakeven.studies.result import rank_by
from breakeven.studies.study import Study


def task_of(study: Study) -> Task:
    """What judges a study's candidates."""
    return Task(study.evaluator(), tuple(study.written.objectives), rank_by(study))


def identity(task: Task) -> str:
    """The fingerprint of a study's search, whatever chooses its candidates."""
    return fingerprint(task.evaluator, task.objectives, task.rank_by)


def help_out(storage: str, name: str, progress: Progress) -> int:
    """Do trials of the study `name` until all are complete; returns how many were done here."""
    try:
        shared = optuna.load_study(study_name=name, storage=database(storage))
    except KeyError:
        known = ", ".join(optuna.get_all_study_names(database(storage))) or "none"
        raise InputError("--study", name, f"no such study in this storage; there: {known}") from None
    attrs = shared.user_attrs
    if not attrs.get("about"):
        raise InputError("--study", name, "no study that `breakeven run --storage` began")
    about = attrs["about"]
    task = task_of(Study.parse(about["study"], about["file"]))
    if identity(task) != attrs["identity"]:
        raise InputError("--study", name, "begun by another version of breakeven, or its files differ here")
    settings = Settings(attrs["trials"], attrs["sampler"], attrs["seed"], identity=attrs["identity"], name=name)
    return work(join(Search.of(task, settings, shared, Found(task.objectives))), progress)
