"""The checkpoint of the best evaluation, under one name."""

import shutil
from pathlib import Path

import pytest

from stageline.workers.checkpoint.saved import SAVED, NotSaved, SavedRun
from stageline.workers.disk.atomic_file import write_json
from stageline.workers.script.fitting import BestCheckpoint


class Saver:
    """Saves a checkpoint of `step`, or fails."""

    step = 0
    fails = False

    def save(self, folder: Path) -> None:
        if self.fails:
            raise NotSaved("the disk is full")
        write_json(folder / SAVED, SavedRun("line-1", self.step, 2))

    def keep(self, best: BestCheckpoint, step: int) -> None:
        self.step = step
        best.keep(step)


def test_the_newest_is_there_and_the_one_before_is_gone(tmp_path: Path):
    saver = Saver()
    best = BestCheckpoint(tmp_path / "best", saver.save)
    assert best.step is None
    for step in (4, 8):
        saver.keep(best, step)
        assert best.step == step
        assert len(list(tmp_path.iterdir())) == 2  # the link and the folder


def test_the_one_before_stays_until_the_newest_is_whole(tmp_path: Path):
    saver = Saver()
    best = BestCheckpoint(tmp_path / "best", saver.save)
    saver.keep(best, 4)
    saver.fails = True
    with pytest.raises(NotSaved):
        saver.keep(best, 8)
    assert best.step == 4


def test_what_a_killed_script_has_left_is_removed_with_the_next(tmp_path: Path):
    saver = Saver()
    saver.keep(BestCheckpoint(tmp_path / "best", saver.save), 4)
    saver.save(tmp_path / ".best-step-6-0a1b2c3d")  # whole, but killed before it had the name
    best = BestCheckpoint(tmp_path / "best", saver.save)
    assert best.step == 4
    saver.keep(best, 8)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_link_whose_folder_was_deleted_is_replaced(tmp_path: Path):
    saver = Saver()
    best = BestCheckpoint(tmp_path / "best", saver.save)
    saver.keep(best, 4)
    shutil.rmtree((tmp_path / "best").resolve())
    assert BestCheckpoint(tmp_path / "best", saver.save).step is None
    saver.keep(best, 8)
    assert best.step == 8


def test_a_folder_that_no_fit_has_made_is_left_alone(tmp_path: Path):
    (tmp_path / "best").mkdir()
    with pytest.raises(ValueError, match="something is there that no fit has made"):
        BestCheckpoint(tmp_path / "best", Saver().save)


def test_a_name_with_signs_of_patterns_leaves_one_folder(tmp_path: Path):
    """The folders before used to stay: the name was taken for a pattern."""
    saver = Saver()
    best = BestCheckpoint(tmp_path / "best[1]", saver.save)
    for step in (4, 8):
        saver.keep(best, step)
    assert len(list(tmp_path.iterdir())) == 2


def test_another_best_whose_name_begins_alike_stays(tmp_path: Path):
    saver = Saver()
    other = BestCheckpoint(tmp_path / "best-step-2", saver.save)
    saver.keep(other, 4)
    saver.keep(BestCheckpoint(tmp_path / "best", saver.save), 8)
    assert other.step == 4
