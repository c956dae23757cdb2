"""Forks this process into a child that runs one function, in a session of its own, and never returns to its caller.

The child has the objects of this process, and nothing else that belongs to it: no signal handler, no terminal, no pipe
and no socket, no stack with a user's functions that could end them twice.

Only the thread that forks exists in the child. So a new thread forks: what a library keeps for a thread that has
computed in parallel, as libgomp keeps a pool of threads for torch, is not there, and the child's first parallel loop
starts threads of its own. In a fork by the thread that has the pool, that loop would wait for ever.

That thread is the child's parent to the system, which tells a child that asks for it (`PR_SET_PDEATHSIG`) of its end as
of a process's. So it is over, to the system too, when `Fork` returns.
"""

import faulthandler
import fcntl
import gc
import os
import signal
import stat
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic, sleep
from typing import Protocol, TextIO

from stageline.pipeline.errors import ExitCode

from .streams import LossyStream

_THREAD_LOOK = 0.0005  # seconds between two looks at the thread that has forked
_THREAD_END = 10.0  # seconds for that thread to end: libraries may do something then
_STACK = 2**24  # bytes of the child's stack: the main thread's usual 8 MiB, twice
_STDERR = 2  # the last of the three descriptors that every process has
_DESCRIPTORS = "/dev/fd"
_IGNORED = frozenset(getattr(signal, name) for name in ("SIGPIPE", "SIGXFSZ") if hasattr(signal, name))  # by Python


class Fork:
    """A child of this process. It calls `run` and ends with the exit code that this returns, FAILED if it raises.

    What it writes goes to the descriptor `log`; of this process's pipes and sockets it keeps `keep`. Of use in the
    process that forked it alone: elsewhere, nothing is known of it, and nothing is done to it. Raises OSError.
    """

    def __init__(self, run: Callable[[], int], log: int, keep: Sequence[int] = ()) -> None:
        self.returncode: int | None = None  # as `subprocess` gives it
        self._parent = os.getpid()
        self._polling = threading.RLock()  # one thread waits for it at a time; a signal handler may be the same thread
        _flush()
        gc.collect()  # what is garbage now is finalized here, and not in the child once more
        self.pid = _fork_by_new_thread(partial(_become_child, run, log, keep))

    def poll(self) -> int | None:
        """`returncode` as of now. For any thread."""
        if os.getpid() != self._parent:
            return self.returncode
        with self._polling:
            if self.returncode is None:
                self.returncode = self._look()
            return self.returncode

    def _look(self) -> int | None:
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:  # it has ended, and this process ignores SIGCHLD, or has waited for all children
            return int(ExitCode.FAILED)
        return os.waitstatus_to_exitcode(status) if pid else None

    def wait(self, timeout: float | None = None) -> int:
        """Raises `subprocess.TimeoutExpired`; `timeout` in seconds."""
        return wait_for_end(self.poll, timeout)

    def send_signal(self, number: int) -> None:
        """Does nothing once it has ended."""
        if os.getpid() == self._parent and self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def above_stdio(fd: int) -> int:
    """`fd`, or a copy in its place if its number is one that a process has for stdin, stdout or stderr: in a process
    that was started without them, the first files that it opens get these numbers, and a child replaces them."""
    if fd > _STDERR:
        return fd
    copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _STDERR + 1)
    os.close(fd)
    return copy


def _fork_by_new_thread(child: Callable[[], None]) -> int:
    """The pid of a child that runs `child`, which does not return. Raises OSError."""
    made: list[int | OSError] = []

    def fork() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # until the child has handlers of its own
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of a fork while there are threads
                pid = os.fork()
        except OSError as error:
            made.append(error)
            return
        if not pid:
            child()
        made.append(pid)

    before = threading.stack_size(_STACK)
    thread = threading.Thread(target=fork, name="fork", daemon=False)
    try:
        thread.start()
    finally:
        threading.stack_size(before)
    try:
        thread.join()
        _wait_for_end(thread)
    except BaseException:  # Ctrl-C: the caller will not know of the child
        thread.join()
        _discard(made)
        raise
    return _pid_in(made)


def _wait_for_end(thread: threading.Thread) -> None:
    """After `join`: that may return while the system has yet to end the thread. Linux alone tells children of it."""
    task, deadline = f"/proc/self/task/{thread.native_id}", time.monotonic() + _THREAD_END
    while os.path.exists(task) and time.monotonic() < deadline:
        time.sleep(_THREAD_LOOK)


def _pid_in(made: Sequence[int | OSError]) -> int:
    found = made[0]
    if isinstance(found, OSError):
        raise found
    return found


def _discard(made: Sequence[int | OSError]) -> None:
    with suppress(OSError):
        pid = _pid_in(made)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _flush() -> None:
    """Else the child would write once more what this process has yet to write."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # it is closed, or there is none
            stream.flush()


def _become_child(run: Callable[[], int], log: int, keep: Sequence[int]) -> None:
    """Does not return."""
    code = int(ExitCode.FAILED)
    try:
        gc.freeze()  # objects of the parent are not finalized here
        _start_session()
        _own_streams(log)
        _release(keep)
        threading.main_thread().name = "MainThread"
        code = run()
    except BaseException:  # noqa: BLE001 - there is no caller that could be told
        traceback.print_exc()
    finally:
        _flush()
        os._exit(code)


def _start_session() -> None:
    """In a session of its own, with the handlers of a process that has just started."""
    faulthandler.disable()
    sys.settrace(None)
    sys.setprofile(None)
    signal.set_wakeup_fd(-1)
    _handle_all(signal.SIG_IGN)  # also drops what has come to the parent's terminal since the fork
    os.setsid()
    _handle_all(signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _handle_all(how: signal.Handlers) -> None:
    for number in signal.valid_signals():
        with suppress(OSError, ValueError):  # SIGKILL and SIGSTOP
            signal.signal(number, how)


def _own_streams(log: int) -> None:
    """Nothing on stdin; what is written goes to `log`. Streams of the parent stay open: they may be closed later, by
    what holds them."""
    null = above_stdio(os.open(os.devnull, os.O_RDONLY))
    for fd, file in ((0, null), (1, log), (_STDERR, log)):
        os.dup2(file, fd)
    os.close(null)
    _parents.extend((sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__))
    stdin = open(0, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115  # stays open
    sys.stdin = sys.__stdin__ = stdin  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = LossyStream(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = LossyStream(_STDERR)  # type: ignore[misc]


_parents: list[object] = []


def _release(keep: Sequence[int]) -> None:
    """Closes the parent's pipes and sockets here: their other ends learn of its end, and its ports become free. The
    descriptors then name nothing, and stay taken: objects of the parent may still close them."""
    with open(os.devnull, "r+b", buffering=0) as nothing:
        for fd in map(int, os.listdir(_DESCRIPTORS)):
            if fd > _STDERR and fd not in keep and _connects(fd):
                os.dup2(nothing.fileno(), fd, inheritable=False)


def _connects(fd: int) -> bool:
    try:
        mode = os.fstat(fd).st_mode
    except OSError:  # the folder that was listed
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


_LOOK = 0.01  # seconds between two calls of `poll`


class SpawnedProcess(Protocol):
    """A process that runs a stageline command. It knows of its end only by `poll` or `wait`."""

    @property
    def pid(self) -> int:
        """0 as long as it has not started."""

    @property
    def returncode(self) -> int | None:
        """As `subprocess` gives it: negative if a signal ended it; None while it runs. Anything that the process calls
        can choose it, so it says nothing about the command."""

    @property
    def result(self) -> int | None:
        """The exit code that the command returned; None if the process runs, or has ended without returning one: by
        `os._exit` in the user's code, by a signal, in a crash."""

    def poll(self) -> int | None:
        """`returncode` as of now."""

    def wait(self, timeout: float | None = None) -> int:
        """`returncode` once it has ended; raises `subprocess.TimeoutExpired` after `timeout` seconds."""

    def send_signal(self, sig: int) -> None:
        """Does nothing to a process that has ended."""

    def kill(self) -> None:
        """With SIGKILL."""


Spawn = Callable[[Sequence[str], TextIO], SpawnedProcess]
"""Called with the arguments of the command `stageline`, and the file that its output is appended to. The process gets a
session of its own, nothing on stdin, and the hidden option `--lifeline`."""


def wait_for_end(poll: Callable[[], int | None], timeout: float | None) -> int:
    """What `poll` returns once it is not None. Raises `subprocess.TimeoutExpired` after `timeout` seconds, if given."""
    deadline = None if timeout is None else monotonic() + timeout
    while (code := poll()) is None:
        if deadline is not None and monotonic() > deadline:
            raise subprocess.TimeoutExpired("stageline", timeout or 0.0)
        sleep(_LOOK)
    return code
