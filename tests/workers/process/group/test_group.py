"""What is told apart in a group of processes: whether another process is behind an error, and who has ended."""

import ctypes
import os
import re
import signal
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from stageline.pipeline.errors import GroupLost
from stageline.pipeline.plan import read_plan
from stageline.pipeline.process.fork import Fork
from stageline.workers.process.group.group import StageGroups, _die_with_parent, _is_of_group
from stageline.workers.runtime.job import Job, prepare
from support import reference

GROUPED = Path(reference.__file__).parent / "grouped" / "stageline.toml"

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


def test_a_member_that_ends_before_they_have_met_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The leader waited in gloo, which dialled the member for 40 s; here it would wait for a day."""
    meet = distributed.init_process_group

    def end_or_meet(*arguments: Any, rank: int, **options: Any) -> None:
        if rank:
            os.kill(os.getpid(), signal.SIGKILL)
        meet(*arguments, rank=rank, **options)

    monkeypatch.setattr(distributed, "init_process_group", end_or_meet)
    job = prepare(read_plan(GROUPED, sets=["stage.1.shard=2", "recovery.action=86400"], environment={}))
    with (tmp_path / "log").open("w") as log:
        leader = Fork(lambda: _lead(job), log.fileno())
        try:
            assert leader.wait(60) == 7
        finally:
            leader.kill()
    assert re.search(
        r"stage 1 is lost: its process 1 \(pid \d+\) was killed by SIGKILL", (tmp_path / "log").read_text()
    )


def _lead(job: Job) -> int:
    with StageGroups(job) as groups:
        try:
            groups.make(1)
        except GroupLost as error:
            print(error)
            return 7
    return 0


def _serve(connection: int) -> int:
    """What a member does, and says that it has done it; then waits for the end."""
    os.read(connection, 1)
    _die_with_parent()
    os.write(connection, b"r")
    return 7 + len(os.read(connection, 1))
