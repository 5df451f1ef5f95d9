"""What a search has found, written to its output folder as it goes: killed at any moment, it goes on from there.

`search.json` is replaced in one step after every part of the search; rows kept for evaluations.parquet are appended
as files of their own before that, so those beyond the last part that counts are left over from a kill.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from breakeven.models.inputs import InputError
from breakeven.models.simulation import Estimate
from breakeven.optimizer.evaluator import Columns, Evaluator
from breakeven.optimizer.search import Found
from breakeven.optimizer.uncertainty import RobustEvaluator
from breakeven.optimizer.verify import Verdict

try:
    import fcntl
except ImportError:  # no POSIX system
    fcntl = None

FOLDER = "unfinished"
STATE = "search.json"
VERDICTS = "verdicts.jsonl"
LOCK = ".lock"


def fingerprint(evaluator: Evaluator, *also: Any) -> str:
    """A digest of all that decides what a search finds: space, workload, SLO, catalogue, and what else is named."""
    digest = hashlib.sha256(repr(also).encode())
    space = evaluator.space
    for family in space.families:
        digest.update(repr((family.topology, family.radices)).encode())
        for table in family.tables:
            for name, column in table.items():
                digest.update(name.encode() + column.tobytes())
    digest.update(repr((space.names, evaluator.session_p95, evaluator.max_load)).encode())
    robust = (evaluator.draws, evaluator.quantile) if isinstance(evaluator, RobustEvaluator) else None
    for leaf in jax.tree.leaves((evaluator.workload, evaluator.slo, evaluator.catalog, robust)):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()[:32]


def replace_file(path: Path, data: bytes) -> None:
    """Write a file in one step: whoever reads it sees the old or the new one, never a part."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_bytes(data)
    os.replace(fresh, path)


@dataclass
class Checkpoint:
    """The state of one search in a folder; another search's state there is dropped."""

    folder: Path
    identity: str
    written: int = 0  # parts of kept rows

    @classmethod
    def inside(cls, out: Path, identity: str) -> "Checkpoint":
        """The checkpoint of the search `identity` in an output folder."""
        return cls(out / FOLDER, identity)

    def load(self, objectives: tuple[str, ...]) -> tuple[Found, int]:
        """(what was found, position to go on from); nothing and 0 where there is no state of this search."""
        try:
            state = json.loads((self.folder / STATE).read_bytes())
            if state["identity"] != self.identity:
                raise ValueError
            found = Found.restored(objectives, state["found"])
            for i in range(state["parts"]):
                found.keep(_read(self.folder / f"rows-{i}.npz"))
        except (OSError, ValueError, KeyError, TypeError):
            self.clear()
            return Found(objectives), 0
        self.written = state["parts"]
        return found, state["position"]

    def save(self, found: Found, position: int) -> None:
        """Write the rows kept since the last call, then the state that counts them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for part in found.kept[self.written :]:
            np.savez(self.folder / f"rows-{self.written}.npz", **part)  # pyright: ignore[reportArgumentType]
            self.written += 1
        state = {"identity": self.identity, "position": position, "parts": self.written, "found": found.state()}
        replace_file(self.folder / STATE, json.dumps(state).encode())

    def note(self, verdict: Verdict) -> None:
        """Append what a simulation showed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        line = json.dumps([self.identity, verdict.candidate, *verdict.attainment, verdict.meets])
        with (self.folder / VERDICTS).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def verdicts(self) -> dict[int, Verdict]:
        """What simulations of this search have shown; a line that a kill cut off does not count."""
        found = {}
        path = self.folder / VERDICTS
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                identity, candidate, value, low, high, meets = json.loads(line)
            except ValueError:
                continue
            if identity == self.identity:
                found[candidate] = Verdict(candidate, Estimate(value, low, high), meets)
        return found

    def clear(self) -> None:
        """Remove it: the search is over, or it was another one's."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _read(path: Path) -> Columns:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold an output folder for this process alone; a lock ends with its process, however that ends."""
    with (out / LOCK).open("a+") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                owner = file.read().strip() or "unknown"
                raise InputError("--out", str(out), f"in use by another breakeven run (process {owner})") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
