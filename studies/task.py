"""What judges a study's candidates, and what tells one search from another."""

from breakeven.optimizer.checkpoint import fingerprint
from breakeven.optimizer.exhaustive import Task
from breakeven.studies.result import rank_by
from breakeven.studies.study import Study


def task_of(study: Study) -> Task:
    """What judges a study's candidates."""
    return Task(study.searched(), tuple(study.written.objectives), rank_by(study))


def identity(task: Task) -> str:
    """The fingerprint of a study's search, whatever chooses its candidates."""
    return fingerprint(task.evaluator, task.objectives, task.rank_by)
