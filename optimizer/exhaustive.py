"""Every candidate of a space: ranges of numbers, sifted by the limits they certainly break, the rest evaluated.

A range is judged alone, so ranges may be judged by any number of threads, devices or machines; what they find is
merged in order, and the whole space is never in memory.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import jax
import numpy as np

from breakeven.optimizer.evaluator import Evaluator
from breakeven.optimizer.search import KEPT_ROWS, Found, Progress

RANGES = 64  # at least, so that progress shows and cores share the work
BLOCKS = 32  # of evaluation in a range at most


@dataclass(frozen=True)
class Task:
    """What the judge of any range needs to know."""

    evaluator: Evaluator
    objectives: tuple[str, ...]
    rank_by: str

    def judge(self, ids: np.ndarray, keep: bool = False) -> Found:
        """What candidates come to; their rows are kept where `keep` says so."""
        found = Found(self.objectives)
        left, ruled_out = self.evaluator.sift(ids)
        found.add_screened(ruled_out)
        for columns in self.evaluator.parts(left):
            found.add(columns, self.evaluator.space.family(columns["candidate"]), self.rank_by)
        if not keep:
            found.kept = []
        return found

    def judge_range(self, start: int, stop: int, keep: bool = False) -> Found:
        """What candidates `start` to `stop` come to."""
        return self.judge(np.arange(start, stop, dtype=np.int64), keep)


class Pool(Protocol):
    """What judges ranges at the same time: threads here, or a cluster."""

    width: int

    def submit(self, task: Task, start: int, stop: int, keep: bool) -> Any:
        """A future of what the range comes to."""
        ...

    def close(self) -> None:
        """Let go of what still waits."""
        ...


class Threads:
    """Ranges judged by threads of this process, in turn on every device that JAX sees."""

    def __init__(self, workers: int | None = None):
        self._devices = jax.devices()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.width = workers or max(min(cores, 8), len(self._devices))
        self._pool = ThreadPoolExecutor(self.width)
        self._next = count()

    def submit(self, task: Task, start: int, stop: int, keep: bool) -> Future[Found]:
        several = len(self._devices) > 1
        device = self._devices[next(self._next) % len(self._devices)] if several else None  # named, it recompiles

        def judge() -> Found:
            with jax.default_device(device):
                return task.judge_range(start, stop, keep)

        return self._pool.submit(judge)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def ranges(size: int, block: int, start: int = 0) -> Iterator[tuple[int, int, bool]]:
    """(first, end, whether its rows are kept) of the ranges from `start` to `size`.

    Where they are cut changes nothing that is found. Of a large space every so many-th range keeps its rows.
    """
    step = min(max(-(-size // RANGES // block), 1), BLOCKS) * block
    stride = -(-size // KEPT_ROWS)
    while start < size:
        stop = min(start + step, size)
        yield start, stop, start // step % stride == 0
        start = stop


def exhaustive(
    task: Task,
    found: Found,
    progress: Progress,
    pool: Pool | None = None,
    start: int = 0,
    save: Callable[[Found, int], None] = lambda found, position: None,
) -> Found:
    """Judge every candidate from `start` on and merge it into `found`; `save(found, position)` follows each range.

    An interrupt loses the ranges in flight alone.
    """
    total = task.evaluator.space.size
    pool = pool or Threads()
    waiting: deque[tuple[int, Any]] = deque()
    coming = ranges(total, task.evaluator.block, start)
    try:
        while True:
            while len(waiting) < 2 * pool.width and (cut := next(coming, None)):
                waiting.append((cut[1], pool.submit(task, *cut)))
            if not waiting:
                return found
            stop, future = waiting.popleft()
            found.merge(future.result())
            save(found, stop)
            progress(found.evaluated, total)
    finally:
        pool.close()
