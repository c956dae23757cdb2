"""A folder for sockets is removed with its last owner, or at the next start; nothing else ever is."""

import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from stageline.workers.disk.owned_folder import OwnedFolder, remove_abandoned

OWNER = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from stageline.workers.disk.owned_folder import OwnedFolder
with OwnedFolder() as owned:
    print(owned.path, flush=True)
    sys.stdin.read()
"""

FORKS = """
import os, sys, tempfile
tempfile.tempdir = sys.argv[1]
from stageline.workers.disk.owned_folder import OwnedFolder, remove_when_left
owned = OwnedFolder()
print(owned.path, flush=True)
if not os.fork():
    sys.stdin.read()
    assert owned.path.exists()
    os._exit(0)
remove_when_left(owned.path, owned.lock)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short path: it holds sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def owner(temporary: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that owns a folder, the name of which it prints."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", OWNER, str(temporary)], text=True, **pipes) as process:
        yield process
        process.kill()


def made_by(owner: "subprocess.Popen[str]") -> Path:
    assert owner.stdout is not None
    return Path(owner.stdout.readline().strip())


def put_socket(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    with closing(socket.socket(socket.AF_UNIX)) as bound:
        bound.bind(str(folder / "queues"))


def test_it_is_removed_with_its_sockets_on_leaving(temporary: Path) -> None:
    with OwnedFolder() as owned:
        put_socket(owned.path)
        put_socket(owned.path / "worker")
    assert list(temporary.iterdir()) == []


def test_the_next_start_removes_the_folder_of_a_killed_process_and_no_other(
    temporary: Path, owner: "subprocess.Popen[str]"
) -> None:
    folder = made_by(owner)
    put_socket(folder)
    with OwnedFolder() as mine:
        assert folder.exists()
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        with OwnedFolder():
            assert not folder.exists()
            assert mine.path.exists()


def test_a_folder_that_holds_more_than_sockets_is_anothers_and_stays(temporary: Path) -> None:
    kept = temporary / "stageline.12345678" / "notes.txt"
    kept.parent.mkdir()
    kept.write_text("not ours")
    (temporary / "stageline.toml").write_text("neither")
    put_socket(temporary / "stageline-another")
    remove_abandoned()
    assert kept.read_text() == "not ours"
    assert (temporary / "stageline.toml").exists()
    assert (temporary / "stageline-another" / "queues").exists()


def test_the_process_that_stays_removes_it_once_all_that_were_forked_have_ended(temporary: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", FORKS, str(temporary)], text=True, **pipes) as process:
        folder = made_by(process)
        assert folder.exists()
        process.communicate()  # the process that was forked ends only now
        assert process.returncode == 0
    assert list(temporary.iterdir()) == []
