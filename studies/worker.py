"""A worker of a distributed study: everything it needs stands in the study itself."""

from typing import Any

import optuna

from breakeven.models.inputs import InputError
from breakeven.optimizer.bilevel import ONE_TRIAL, Search, Settings, join, work
from breakeven.optimizer.search import Found, Progress
from breakeven.optimizer.storage import database
from breakeven.studies.study import Study
from breakeven.studies.task import identity, task_of


def help_out(storage: str, name: str, progress: Progress) -> int:
    """Do trials of the study `name` until all are complete; returns how many were done here."""
    with database(storage) as opened:
        known = optuna.get_all_study_names(opened)
        if name not in known:
            raise InputError("--study", name, f"no such study in this storage; there: {', '.join(known) or 'none'}")
        shared = optuna.load_study(study_name=name, storage=opened)
        about = shared.user_attrs.get("about")
        if not about:
            raise InputError("--study", name, "no study that `breakeven run --storage` began")
        return work(join(_search(shared, about["study"], about["file"])), progress)


def _search(shared: optuna.Study, data: dict[str, Any], file: str) -> Search:
    attrs = shared.user_attrs
    task = task_of(Study.parse(data, file))
    if identity(task) != attrs["identity"]:
        raise InputError(
            "--study", shared.study_name, "begun by another version of breakeven, or its files differ here"
        )
    settings = Settings(attrs["trials"], attrs["sampler"], attrs["seed"], identity=attrs["identity"])
    return Search.of(task, settings, shared, Found(task.objectives), ONE_TRIAL)
