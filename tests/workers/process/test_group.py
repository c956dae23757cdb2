"""What is told apart in a group of processes: whether another process is behind an error."""

from datetime import timedelta
from pathlib import Path

import pytest
from torch import distributed

from stageline.workers.process.group import _is_of_group


def test_a_process_that_does_not_come_to_the_meeting_is_behind_its_timeout(tmp_path: Path) -> None:
    store = distributed.FileStore(str(tmp_path / "store"), 2)
    with pytest.raises(RuntimeError) as waited:
        store.wait(["another process"], timedelta(milliseconds=10))
    assert _is_of_group(waited.value)


def test_an_error_of_user_code_is_not_of_the_group() -> None:
    assert not _is_of_group(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
