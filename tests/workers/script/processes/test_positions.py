"""Positions of checkpoints that the script keeps."""

from pathlib import Path

import pytest

from stageline.workers.checkpoint.snapshot import SnapshotDamaged
from stageline.workers.runtime.calls import Position
from stageline.workers.script.processes.remote_run import NAME, PositionFile


def test_a_later_script_finds_the_position_of_every_recent_checkpoint(tmp_path: Path) -> None:
    kept = PositionFile(tmp_path, every=5)
    for step in range(1, 103):
        kept.note(Position(step, 2 * step, step // 3))
    found = PositionFile(tmp_path, every=5)
    assert found.read(0) == Position()
    assert [found.read(step) for step in (65, 100)] == [Position(65, 130, 21), Position(100, 200, 33)]
    with pytest.raises(SnapshotDamaged, match="before step 101"):
        found.read(101)
    kept.keep()  # as when the run is stopped
    assert PositionFile(tmp_path, every=5).read(101) == Position(101, 202, 33)


def test_what_was_called_before_the_run_went_back_counts_no_more(tmp_path: Path) -> None:
    kept = PositionFile(tmp_path, every=5)
    for step in (5, 6, 7, 8, 9, 10):
        kept.note(Position(step, step, 0))
    resumed = PositionFile(tmp_path, every=5)
    resumed.note(Position(6, 16, 0))
    resumed.keep()
    with pytest.raises(SnapshotDamaged):
        PositionFile(tmp_path, every=5).read(10)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("{")
    with pytest.raises(SnapshotDamaged, match=NAME):
        PositionFile(tmp_path, every=5)


def test_a_disk_that_cannot_be_written_to_does_not_keep_a_run_from_ending(tmp_path: Path) -> None:
    kept = PositionFile(tmp_path / "gone", every=5)
    kept.note(Position(1, 1, 0))
    (tmp_path / "gone").write_text("a file in place of the folder")
    kept.keep()
    (tmp_path / "gone").unlink()
    kept.keep()  # what could not be written is written now
    assert PositionFile(tmp_path / "gone", every=5).read(1) == Position(1, 1, 0)
