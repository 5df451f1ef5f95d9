"""An output folder belongs to one process, and what a killed run has found is found again."""

from pathlib import Path

import numpy as np
import pytest

from breakeven.models.inputs import InputError
from breakeven.models.simulation import Estimate
from breakeven.optimizer.checkpoint import FOLDER, STATE, VERDICTS, Checkpoint, fingerprint, locked
from breakeven.optimizer.exhaustive import Task, exhaustive
from breakeven.optimizer.search import Found
from breakeven.optimizer.verify import Verdict
from breakeven.studies.run import finish

OBJECTIVES = ("cost_per_hour_usd", "slo_attainment")


class Killed(BaseException):
    """What stands for kill -9: nothing catches it."""


@pytest.fixture(scope="module")
def task(make_study):
    small = make_study(
        topologies=["colocated", "pd"],
        accelerators=["h100-sxm", "b200-sxm"],
        replicas=[2, 4],
        kv="fp8",
        routing="affinity",
        links="ib-ndr-400",
    )
    return Task(small.evaluator(), OBJECTIVES, OBJECTIVES[0])


def go_on(task: Task, folder: Path, kill_after: int | None = None, while_saving: bool = False) -> Found:
    """Search in `folder` from its notes on, and die after so many ranges, before or after they are noted."""
    notes = Checkpoint.inside(folder, fingerprint(task.evaluator))
    found, start = notes.load(OBJECTIVES)
    ranges = 0

    def save(found: Found, position: int) -> None:
        nonlocal ranges
        ranges += 1
        if while_saving and ranges == kill_after:
            np.savez(folder / FOLDER / f"rows-{notes.written}.npz", half=np.zeros(3))
            raise Killed
        notes.save(found, position)

    def progress(done: int, total: int) -> None:
        if ranges == kill_after:
            raise Killed

    return exhaustive(task, found, progress, start=start, save=save)


def test_a_killed_search_finds_what_an_uninterrupted_one_finds(task, tmp_path):
    """Front, best of each topology, counts, reasons and kept rows, after deaths at several moments."""
    whole = exhaustive(task, Found(OBJECTIVES), lambda *_: None)
    for kill_after, while_saving in ((1, False), (3, True), (2, False)):
        with pytest.raises(Killed):
            go_on(task, tmp_path, kill_after, while_saving)
    resumed = go_on(task, tmp_path)
    assert resumed.state() == whole.state()
    rows, all_rows = resumed.rows(), whole.rows()
    assert len(rows["candidate"]) == task.evaluator.space.size
    for name, column in all_rows.items():
        assert np.array_equal(rows[name], column, equal_nan=column.dtype.kind == "f")
    finish(tmp_path)
    assert not (tmp_path / FOLDER).exists()


def test_notes_of_another_search_are_not_taken_up(task, tmp_path):
    with pytest.raises(Killed):
        go_on(task, tmp_path, 2)
    assert Checkpoint.inside(tmp_path, fingerprint(task.evaluator)).load(OBJECTIVES)[1] > 0
    other = Checkpoint.inside(tmp_path, "another")
    found, start = other.load(OBJECTIVES)
    assert start == 0 and found.evaluated == 0 and not (tmp_path / FOLDER / STATE).exists()


def test_what_decides_a_search_decides_its_fingerprint(make_study):
    usual = fingerprint(make_study().evaluator(), OBJECTIVES)
    assert fingerprint(make_study().evaluator(), OBJECTIVES) == usual
    changes = ("slo.target=0.8", "load.sessions_per_second=0.02", "space.replicas=[1, 2]", "prices.own={h100-sxm: 1.0}")
    others = {fingerprint(make_study(change).evaluator(), OBJECTIVES) for change in changes}
    assert len(others | {usual, fingerprint(make_study().evaluator(), OBJECTIVES[:1])}) == len(changes) + 2


def test_verdicts_are_remembered_up_to_a_line_cut_off(tmp_path):
    notes = Checkpoint.inside(tmp_path, "one")
    verdict = Verdict(7, Estimate(0.95, 0.94, 0.96), True)
    notes.note(verdict)
    Checkpoint.inside(tmp_path, "two").note(Verdict(8, Estimate(0.5, 0.4, 0.6), False))
    with (tmp_path / FOLDER / VERDICTS).open("a") as file:
        file.write('["one", 9, 0.9')
    assert notes.verdicts() == {7: verdict}


def test_a_folder_belongs_to_one_process(tmp_path):
    with locked(tmp_path), pytest.raises(InputError, match="in use by another breakeven run"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass
