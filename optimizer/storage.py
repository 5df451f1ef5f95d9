"""Where Optuna's trials live, and which of its samplers chooses them.

One process writes a journal of Optuna's own format into its output folder, a batch of trials at a time: a kill loses
the batch in flight alone, and every batch starts from what the file holds. Many processes share a database by URL,
where Optuna's heartbeats find dead workers and their trials are taken up again.
"""

import json
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.storages.journal import BaseJournalBackend

from breakeven.models.inputs import InputError

JOURNAL = "trials.journal"
SAMPLERS = ("nsga2", "nsga3", "tpe", "gp", "qmc", "random")
POPULATION = 50
HEARTBEAT_S, GRACE_S = 10, 30
RETRIES = 5
BATCH_KEY = "batches"


class Journal(BaseJournalBackend):
    """Optuna's journal file, of one process: read once, written a batch at a time (`flush`).

    Lines after the last whole batch, cut off by a kill, are dropped when it is opened.
    """

    def __init__(self, path: Path):
        self.path = path
        self._logs: list[dict[str, Any]] = []
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        whole = 0
        for number, line in enumerate(lines, start=1):
            try:
                log = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                log = None
            if log is None:
                break
            self._logs.append(log)
            if BATCH_KEY in (log.get("user_attr") or {}) and "trial_id" not in log:
                whole = number
        if whole < len(lines):
            self._logs = self._logs[:whole]
            os.truncate(path, sum(len(line) for line in lines[:whole]))
        self._written = whole

    def read_logs(self, log_number_from: int) -> Iterable[dict[str, Any]]:
        return self._logs[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        self._logs += [json.loads(json.dumps(log)) for log in logs]

    def flush(self) -> None:
        """Append to the file what came since the last call."""
        lines = [json.dumps(log, separators=(",", ":")) + "\n" for log in self._logs[self._written :]]
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))
        self._written = len(self._logs)


def journal(folder: Path | None) -> tuple[BaseStorage, Journal | None]:
    """(storage, its file) in an output folder; in memory, and no file, without one."""
    if folder is None:
        return optuna.storages.InMemoryStorage(), None
    file = Journal(folder / JOURNAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return JournalStorage(file), file


@contextmanager
def database(url: str) -> Iterator[RDBStorage]:
    """A database that any number of workers share; trials of those that stop beating are tried again."""
    storage = _connected(url)
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


def _connected(url: str) -> RDBStorage:
    if url.startswith("postgresql://"):
        url = url.replace("postgresql://", "postgresql+psycopg://", 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return RDBStorage(
                url,
                heartbeat_interval=HEARTBEAT_S,
                grace_period=GRACE_S,
                heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(max_retry=RETRIES),
                engine_kwargs={"connect_args": {"timeout": 60}} if url.startswith("sqlite") else None,
            )
    except ImportError as error:
        missing = (error.name or str(error)).partition(".")[0]
        raise InputError("--storage", url, f"needs {missing}: pip install 'breakeven[postgres]'") from None
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        raise InputError("--storage", _hidden(url), f"cannot be used: {reason}") from None


def _hidden(url: str) -> str:
    """A URL without its password."""
    head, at, tail = url.rpartition("@")
    scheme, _, user = head.rpartition("/")
    return f"{scheme}/{user.partition(':')[0]}:***@{tail}" if at and ":" in user else url


def sampler(name: str, seed: int, population: int = POPULATION) -> optuna.samplers.BaseSampler:
    """An Optuna sampler by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        match name:
            case "tpe":
                return optuna.samplers.TPESampler(seed=seed)
            case "random":
                return optuna.samplers.RandomSampler(seed=seed)
            case "nsga3":
                return optuna.samplers.NSGAIIISampler(seed=seed, population_size=population)
            case "qmc":
                independent = optuna.samplers.RandomSampler(seed=seed)
                return optuna.samplers.QMCSampler(
                    seed=0, scramble=True, independent_sampler=independent, warn_independent_sampling=False
                )
            case "gp":
                return _gp(seed)
    return optuna.samplers.NSGAIISampler(seed=seed, population_size=population)


def _gp(seed: int) -> optuna.samplers.BaseSampler:
    try:
        import torch  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise InputError("search.sampler", "gp", "needs scipy and torch: pip install 'breakeven[gp]'") from None
    return optuna.samplers.GPSampler(seed=seed)
