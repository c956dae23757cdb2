"""Errors of a script whose run has few records or none."""

from pathlib import Path

from stageline.workers.runs.folder import IN_FOLDER, STORE
from stageline.workers.script.calls.news import early_end


def test_records_that_cannot_be_read_leave_the_place_alone(tmp_path: Path) -> None:
    (tmp_path / STORE).write_bytes(b"no database")
    assert early_end(tmp_path, IN_FOLDER) == f"the run is in {tmp_path}"
