"""What is told apart in a group of processes: whether another process is behind an error, and who has ended."""

import ctypes
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from torch import distributed

from stageline.workers.process.fork import Fork
from stageline.workers.process.group import _die_with_parent, _is_of_group

LATE = 200_000  # microseconds that a thread is not over yet when Python says that it is


def test_a_process_that_does_not_come_to_the_meeting_is_behind_its_timeout(tmp_path: Path) -> None:
    store = distributed.FileStore(str(tmp_path / "store"), 2)
    with pytest.raises(RuntimeError) as waited:
        store.wait(["another process"], timedelta(milliseconds=10))
    assert _is_of_group(waited.value)


def test_an_error_of_user_code_is_not_of_the_group() -> None:
    assert not _is_of_group(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no other system tells a child of its parent's end")
def test_a_member_is_not_ended_by_the_end_of_the_thread_that_forked_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a busy machine that thread was still ending when the member asked to die with its parent: one member in ten
    was killed. Each time the leader waited 8 s for it, or 40 s, and used one of the run's restarts."""
    libc, key, fork = ctypes.CDLL(None), ctypes.c_uint(), os.fork
    assert not libc.pthread_key_create(ctypes.byref(key), libc.usleep)  # what a thread does with its value at its end

    def fork_in_a_thread_that_ends_late() -> int:
        libc.pthread_setspecific(key, ctypes.c_void_p(LATE))
        return fork()

    monkeypatch.setattr(os, "fork", fork_in_a_thread_that_ends_late)
    ours, theirs = socket.socketpair()
    threads = len(os.listdir("/proc/self/task"))
    with (tmp_path / "log").open("w") as log:
        member = Fork(lambda: _serve(ours.fileno()), log.fileno(), [ours.fileno()])
        theirs.sendall(b"f")  # as to a member
        assert theirs.recv(1) == b"r"
        while len(os.listdir("/proc/self/task")) > threads:
            pass
        theirs.close()
        assert member.wait(60) == 7, (tmp_path / "log").read_text()
    ours.close()


def _serve(connection: int) -> int:
    """What a member does, and says that it has done it; then waits for the end."""
    os.read(connection, 1)
    _die_with_parent()
    os.write(connection, b"r")
    return 7 + len(os.read(connection, 1))
