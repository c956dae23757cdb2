"""Processes that this one starts: what they have of it, what they have not, and how they end. Real ones."""

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from stageline.pipeline.process.child import Fork, above_stdio
from support.paths import importing_tests

FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND
LATE = 200_000  # microseconds that a thread is not over yet when Python says that it is
LINUX = sys.platform.startswith("linux")


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Runs a function in a fork; returns the fork's status and what it has written."""

    def run(function: Callable[[], int | None], *keep: int) -> tuple[int, str]:
        log = os.open(tmp_path / "log", FLAGS)
        try:
            status = Fork(lambda: function() or 0, log, keep).wait(60)
        finally:
            os.close(log)
        return status, (tmp_path / "log").read_text()

    return run


def test_a_fork_runs_a_closure_and_ends_with_its_result(run):
    made = [3]
    assert run(lambda: made.append(4) or len(made)) == (2, "")
    assert made == [3]


def test_what_a_fork_raises_is_in_its_log(run):
    def fail() -> int:
        raise LookupError("no such thing")

    status, log = run(fail)
    assert status == 1
    assert "LookupError: no such thing" in log


def test_a_fork_is_one_thread_in_a_session_of_its_own_with_handlers_of_its_own(run, monkeypatch):
    """One of Python's: a library that has computed in parallel may start its own again in a fork."""
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    waiting = threading.Event()
    other = threading.Thread(target=waiting.wait)
    other.start()

    def look() -> None:
        own = os.getsid(0) == os.getpid() and threading.current_thread() is threading.main_thread()
        handlers = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGINT), signal.pthread_sigmask(0, ())
        expected = signal.SIG_DFL, signal.default_int_handler, set()
        print(own, threading.active_count(), handlers == expected, sys.stdin.read())

    try:
        assert run(look) == (0, "True 1 True \n")
    finally:
        waiting.set()
        other.join()
        signal.signal(signal.SIGUSR1, before)


def test_a_fork_has_the_pipes_that_it_is_to_keep_and_no_other(run):
    """The port of a killed script stayed taken, and readers of its pipes waited, for as long as the fork was there."""
    (kept, keeps), (left, leaves) = os.pipe(), os.pipe()
    listening = socket.create_server(("127.0.0.1", 0))

    def use() -> None:
        os.write(keeps, b"here")
        os.write(leaves, b"nowhere")
        listening.close()  # an object of the parent: it may be closed, and closes nothing that is the fork's
        print(os.readlink(f"/proc/self/fd/{leaves}"))

    assert run(use, keeps) == (0, "/dev/null\n")
    os.close(leaves)
    assert (os.read(kept, 9), os.read(left, 9)) == (b"here", b"")
    for fd in (kept, keeps, left):
        os.close(fd)
    listening.close()


def test_what_is_yet_to_be_written_is_not_written_twice(tmp_path):
    script = """
import os
from stageline.pipeline.process.child import Fork

print("once", end="")
log = os.open("log", os.O_WRONLY | os.O_CREAT)
raise SystemExit(Fork(lambda: print("again") or 0, log).wait(60))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=importing_tests(), capture_output=True, text=True, check=True
    )
    assert (done.stdout, (tmp_path / "log").read_text()) == ("once", "again\n")


def test_a_fork_computes_in_parallel_after_its_parent_has(run):
    """Forked by the thread that had computed, it waited for ever for threads that it had not."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    x = torch.randn(2**20)

    def compute() -> None:
        torch.set_num_threads(2)
        threads = len(os.listdir("/proc/self/task"))
        print(torch.equal(x.exp(), expected), len(os.listdir("/proc/self/task")) - threads)

    try:
        expected = x.exp()
        assert run(compute) == (0, "True 1\n")
    finally:
        torch.set_num_threads(before)


def test_a_fork_that_was_waited_for_by_another_counts_as_failed(tmp_path):
    with (tmp_path / "log").open("w") as log:
        fork = Fork(lambda: 0, log.fileno())
        os.waitpid(fork.pid, 0)
        assert fork.poll() == 1
        fork.kill()


def test_a_fork_belongs_to_the_process_that_made_it(tmp_path):
    """A process that a user's code forked ended the run when it left the same context."""
    with (tmp_path / "log").open("w") as log:
        reading, writing = os.pipe()
        fork = Fork(lambda: len(os.read(reading, 1)), log.fileno(), [reading])
        other = Fork(lambda: fork.kill() or int(fork.poll() is not None), log.fileno())
        assert other.wait(60) == 0
        os.write(writing, b"!")
        assert fork.wait(60) == 1
        os.close(reading)
        os.close(writing)


def test_the_descriptors_of_stdin_stdout_and_stderr_are_not_used(tmp_path):
    script = """
import os
from stageline.pipeline.process.child import Fork, above_stdio

for fd in (0, 1, 2):
    os.close(fd)
log = above_stdio(os.open("log", os.O_WRONLY | os.O_CREAT))
reading, writing = map(above_stdio, os.pipe())
fork = Fork(lambda: print(os.write(writing, b"here")) or 0, log, [writing])
os._exit(fork.wait(60) or len(os.read(reading, 9)))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=importing_tests(), check=False)
    assert (done.returncode, (tmp_path / "log").read_text()) == (4, "4\n")


def test_a_descriptor_above_them_stays_what_it_is(tmp_path):
    with (tmp_path / "log").open("w") as log:
        assert above_stdio(log.fileno()) == log.fileno()


def test_a_fork_that_is_interrupted_before_its_caller_knows_of_it_is_ended(tmp_path, monkeypatch):
    """Ctrl-C while it waited for the end of the thread that had forked left a child that nothing ended."""
    reading, writing = os.pipe()
    children = psutil.Process().children()

    def interrupt(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("stageline.pipeline.process.child._wait_for_end", interrupt)
    with (tmp_path / "log").open("w") as log, pytest.raises(KeyboardInterrupt):
        Fork(lambda: len(os.read(reading, 1)), log.fileno(), [reading, writing])
    os.close(writing)
    os.close(reading)
    assert psutil.Process().children() == children


def test_a_fork_without_a_log_stays_in_the_session_and_has_all_pipes_and_leaves_ctrl_c_to_its_parent() -> None:
    reading, writing = os.pipe()

    def tell() -> int:
        own = os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()
        os.write(writing, repr([*own, signal.getsignal(signal.SIGINT) is signal.SIG_IGN]).encode())
        return 3

    assert Fork(tell).wait(60) == 3
    assert os.read(reading, 99) == b"[False, False, True]"
    os.close(reading)
    os.close(writing)


@pytest.mark.skipif(not LINUX, reason="no other system tells a child of its parent's end")
def test_a_fork_is_not_ended_by_the_end_of_the_thread_that_forked_it(monkeypatch, tmp_path):
    """On a busy machine that thread was still ending when a group's member asked to die with its parent: one member in
    ten was killed. Each time the leader waited 8 s for it, or 40 s, and used one of the run's restarts."""
    libc, key, fork = ctypes.CDLL(None), ctypes.c_uint(), os.fork
    assert not libc.pthread_key_create(ctypes.byref(key), libc.usleep)  # what a thread does with its value at its end

    def fork_in_a_thread_that_ends_late() -> int:
        libc.pthread_setspecific(key, ctypes.c_void_p(LATE))
        return fork()

    monkeypatch.setattr(os, "fork", fork_in_a_thread_that_ends_late)
    ours, theirs = socket.socketpair()

    def serve() -> int:
        ours.sendall(b"r")
        return 7 + len(ours.recv(1))

    threads = len(os.listdir("/proc/self/task"))
    with (tmp_path / "log").open("w") as log:
        child = Fork(serve, log.fileno(), [ours.fileno()], dies_with_parent=True)
        assert theirs.recv(1) == b"r"
        while len(os.listdir("/proc/self/task")) > threads:
            pass
        theirs.close()
        assert child.wait(60) == 7, (tmp_path / "log").read_text()
    ours.close()


DIES = """
import os, signal, sys
from stageline.pipeline.process.child import Fork

log = os.open("log", os.O_WRONLY | os.O_CREAT) if sys.argv[2] == "a session of its own" else None
writing = int(sys.argv[1])

def stop():
    os.write(writing, b"!")
    os.kill(os.getpid(), signal.SIGSTOP)

child = Fork(stop, log, [writing], dies_with_parent=True)
signal.pause()
"""


@pytest.mark.skipif(not LINUX, reason="no other system ends a stopped process with its parent")
@pytest.mark.parametrize("where", ["a session of its own", "the same"])
def test_a_fork_that_is_to_die_with_its_parent_does_even_if_it_is_stopped(where: str, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    command = [sys.executable, "-c", DIES, str(writing), where]
    with subprocess.Popen(command, cwd=tmp_path, env=importing_tests(), pass_fds=[writing]) as parent:
        os.close(writing)
        assert os.read(reading, 1) == b"!"
        parent.kill()
    assert select.select([reading], [], [], 20)[0]
    assert os.read(reading, 1) == b""  # no process has the other end any more
    os.close(reading)


def test_a_process_that_does_not_end_by_itself_is_killed(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        child = Fork(lambda: signal.pause() or 0, log.fileno())
        child.end(0.05)
        assert child.returncode == -signal.SIGKILL
