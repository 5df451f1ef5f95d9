"""Ranges of a space judged by a Dask cluster: an optional dependency, named by the scheduler's address."""

from typing import Any

from breakeven.models.inputs import InputError
from breakeven.optimizer.exhaustive import Task
from breakeven.optimizer.search import Found


class Cluster:
    """Judges ranges on the workers of a Dask scheduler; breakeven must be installed there, too.

    What a lost worker had in hand Dask gives to another one.
    """

    def __init__(self, address: str, timeout_s: float = 30.0):
        try:
            from distributed import Client
        except ImportError:
            raise InputError("--cluster", address, "needs Dask: pip install 'breakeven[dask]'") from None
        try:
            self._client = Client(address, timeout=timeout_s)
        except (OSError, ValueError, TimeoutError) as error:
            raise InputError("--cluster", address, f"no Dask scheduler answers there: {error}") from None
        threads: Any = self._client.nthreads()
        self.width = max(sum(threads.values()), 1)
        self._task: tuple[Task, Any] | None = None

    def submit(self, task: Task, start: int, stop: int, keep: bool) -> Any:
        """A future of what the range comes to; the task itself is sent once."""
        if self._task is None or self._task[0] is not task:
            self._task = task, self._client.scatter(task, broadcast=True)
        return self._client.submit(_judge, self._task[1], start, stop, keep, pure=False)

    def close(self) -> None:
        """Leave the cluster; ranges that nobody waits for any more are dropped there."""
        self._client.close()


def _judge(task: Task, start: int, stop: int, keep: bool) -> Found:
    return task.judge_range(start, stop, keep)
