"""Folders of runs that are only wanted while a command lasts do not stay, however that ends."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from stageline.workers.extras.forward.forward_run import PREFIX, temporary_run_folder


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_folder_is_removed_at_the_end_with_all_that_is_in_it(tmp_path: Path) -> None:
    with temporary_run_folder() as folder:
        (folder.path / "run").mkdir()
        (folder.path / "run" / "broker.log").touch()
        with temporary_run_folder():
            assert (folder.path / "run" / "broker.log").exists()  # it is in use
    assert not list(tmp_path.iterdir())


def test_what_a_killed_command_has_left_is_removed_by_the_next_one_and_nothing_else(tmp_path: Path) -> None:
    code = (
        "import os, signal\n"
        "from stageline.workers.extras.forward.forward_run import temporary_run_folder\n"
        "with temporary_run_folder() as folder:\n"
        "    (folder.path / 'broker.log').touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {"TMPDIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == -9
    (left,) = tmp_path.glob(f"{PREFIX}*")
    (tmp_path / "other").mkdir()
    (tmp_path / f"{PREFIX}file").touch()
    with temporary_run_folder() as folder:
        assert not left.exists()
        assert {path.name for path in tmp_path.iterdir()} == {folder.path.name, "other", f"{PREFIX}file"}
