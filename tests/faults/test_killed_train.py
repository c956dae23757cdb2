"""SIGKILL of `stageline train` itself, at any moment: its processes end by themselves, and nothing is left of them."""

import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep

import pytest

from support.paths import EXAMPLES

LONGEST = 8.0  # seconds from the start of `train` to its kill: it imports torch, tries the plan, starts its processes
GONE = 30.0  # seconds in which its processes have ended


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files, with a short path: sockets are in it."""
    with tempfile.TemporaryDirectory(prefix="killed-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize("kills", [pytest.param(5, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.sweep)])
@pytest.mark.timeout(600)
def test_however_often_train_is_killed_the_folder_for_temporary_files_is_as_before(
    kills: int, temporary: Path, tmp_path: Path
) -> None:
    _train(temporary, tmp_path, "--set", "run.epochs=1").wait()
    before = sorted(temporary.rglob("*"))  # torch makes a folder there, which it keeps
    chance = random.Random(0)
    for turn in range(kills):
        train = _train(temporary, tmp_path)
        sleep((turn + chance.random()) / kills * LONGEST)
        train.kill()
        train.wait()
        _until_all_have_ended(tmp_path)
    assert sorted(temporary.rglob("*")) == before
    assert _train(temporary, tmp_path, "--set", "run.epochs=1").wait() == 0
    assert sorted(temporary.rglob("*")) == before


def _train(temporary: Path, folder: Path, *words: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "stageline", "train", str(EXAMPLES / "digits"), *words],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _until_all_have_ended(folder: Path) -> None:
    deadline = monotonic() + GONE
    while left := [path.parent.name for path in Path("/proc").glob("[0-9]*/cwd") if _is(path, folder)]:
        assert monotonic() < deadline, f"still running: {left}"
        sleep(0.05)


def _is(link: Path, folder: Path) -> bool:
    try:
        return link.readlink() == folder
    except OSError:  # it has exited, or belongs to another user
        return False
