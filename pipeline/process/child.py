"""The processes that stageline starts: each is a `Child`, waited for, signalled and ended in the same way.

Fork          a copy of this process that runs one function and never returns to its caller
Interpreter   a new interpreter that runs a module of stageline

A fork has the objects of this process. It either goes on in the session, with the streams and the descriptors of this
one, or, with a log, becomes a process of its own, which has nothing else that belongs to this one: no signal handler,
no terminal, no pipe and no socket.

Only the thread that forks exists in the child. So a new thread forks: what a library keeps for a thread that has
computed in parallel, as libgomp keeps a pool of threads for torch, is not there, and the child's first parallel loop
starts threads of its own. In a fork by the thread that has the pool, that loop would wait for ever. The new thread has
none of the caller's stack either, whose functions could end twice.

That thread is the child's parent to the system, which tells a child that asks for it (`PR_SET_PDEATHSIG`) of its end as
of a process's. So it is over, to the system too, when `Fork` returns, and a child asks once it is told of that.
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
import traceback
import warnings
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from time import monotonic, sleep
from typing import Any, TextIO

from stageline.pipeline.errors import ExitCode

from .lifeline import NONE, Lifeline, LifelineOwner, kill_with_parent
from .streams import LossyStream, put

_FIRST_LOOK, _LOOK = 0.0005, 0.01  # seconds between two looks at a process, the pauses doubling
_KILLED = 10.0  # seconds for a process that was killed, or for a thread that has returned, to be over
_STACK = 2**24  # bytes of the child's stack: the main thread's usual 8 MiB, twice
_STDERR = 2  # the last of the three descriptors that every process has
_DESCRIPTORS = "/dev/fd"
_IGNORED = frozenset(getattr(signal, name) for name in ("SIGPIPE", "SIGXFSZ") if hasattr(signal, name))  # by Python
_OF_COPIES = {signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_DFL, signal.SIGCHLD: signal.SIG_DFL}


class Child:
    """A process that this one has started. In a fork of this process, its methods do nothing.

    Attributes:
        pid: Process id. 0 as long as the process has not started.
        returncode: Exit status as `subprocess` gives it: negative if a signal ended the process; None while it runs.
            Any code that the process calls can choose it, so it says nothing about a command.
        result: Exit code that a command has returned. None if the process runs, or has ended without returning one: by
            `os._exit` in the user's code, by a signal, in a crash.
    """

    def __init__(self, pid: int = 0) -> None:
        """Take the process `pid`, a child of this process."""
        self.pid = pid
        self.returncode: int | None = None
        self.result: int | None = None
        self._parent = os.getpid()
        self._polling = threading.RLock()  # one thread waits for it at a time; a signal handler may be the same thread

    def poll(self) -> int | None:
        """Return `returncode` as of now. Any thread may call it."""
        if os.getpid() == self._parent:
            with self._polling:
                if self.returncode is None:
                    self.returncode = self._look()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return `returncode` once the process has ended.

        Raises `subprocess.TimeoutExpired` after `timeout` seconds.
        """
        deadline, pause = None if timeout is None else monotonic() + timeout, _FIRST_LOOK
        while (code := self.poll()) is None:
            if deadline is not None and monotonic() >= deadline:
                raise subprocess.TimeoutExpired("stageline", timeout or 0.0)
            sleep(pause)
            pause = min(2 * pause, _LOOK)
        return code

    def send_signal(self, number: int) -> None:
        """Send signal `number`, unless the process has ended."""
        if os.getpid() == self._parent and self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        self.send_signal(signal.SIGKILL)

    def end(self, patience: float = 0.0) -> None:
        """Wait `patience` seconds for the process to end, then kill it."""
        if os.getpid() != self._parent:
            return
        with suppress(subprocess.TimeoutExpired):
            self.wait(patience)
            return
        self.kill()
        with suppress(subprocess.TimeoutExpired):
            self.wait(_KILLED)

    def _look(self) -> int | None:
        """Return the exit status if the process has just ended, None while it runs."""
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:  # it has ended, and this process ignores SIGCHLD, or has waited for all children
            return int(ExitCode.FAILED)
        return os.waitstatus_to_exitcode(status) if pid else None


Spawn = Callable[[Sequence[str], TextIO], Child]
"""Called with the arguments of the command `stageline`, and the file that its output is appended to. The process gets a
session of its own, nothing on stdin, and the hidden option `--lifeline`."""


class Interpreter(Child):
    """A new interpreter that runs a module of stageline."""

    def __init__(self, module: str, arguments: Sequence[str], keep: Sequence[int], **how: Any) -> None:
        """Start the interpreter.

        Args:
            module: Name of a module of stageline.
            arguments: Its command line.
            keep: Descriptors of this process that the new one has open under the same numbers.
            how: Further arguments of `subprocess.Popen`.
        """
        command = [sys.executable, "-P", "-m", module, *arguments]
        self._process = subprocess.Popen(command, pass_fds=keep, stdin=subprocess.DEVNULL, **how)  # noqa: S603  # ours
        super().__init__(self._process.pid)

    def _look(self) -> int | None:
        return self._process.poll()


class Fork(Child):
    """A copy of this process that runs one function, and ends with its exit code, or with FAILED if it raises."""

    def __init__(
        self,
        run: Callable[[], int],
        log: int | None = None,
        keep: Sequence[int] = (),
        *,
        dies_with_parent: bool = False,
    ) -> None:
        """Fork this process.

        Without a `log`, the child stays in this process's session, and Ctrl-C in the terminal is for this process
        alone.

        Args:
            run: Function to call in the child. It returns the exit code.
            log: Descriptor for what the child writes, which makes it a process of its own.
            keep: Pipes and sockets of this process that a process of its own still has.
            dies_with_parent: True to have the system end the child with this process, however that ends.

        Raises:
            OSError: The system cannot fork.
        """
        _flush()
        gc.collect()  # what is garbage now is finalized here, and not in the child once more
        self._lifeline = LifelineOwner() if dies_with_parent else None
        lifeline = self._lifeline.end if self._lifeline else NONE
        try:
            super().__init__(_fork_by_new_thread(partial(_become_child, run, log, keep, lifeline, os.getpid())))
            if self._lifeline is not None:
                self._lifeline.let_begin()
        except BaseException:
            self._close()
            raise

    def _look(self) -> int | None:
        status = super()._look()
        if status is not None:
            self._close()
        return status

    def _close(self) -> None:
        if self._lifeline is not None:
            self._lifeline.close()


def above_stdio(fd: int) -> int:
    """Return `fd`, or a copy that replaces it if its number is one of stdin, stdout or stderr.

    In a process that was started without standard streams, the first files that it opens get these numbers, and a child
    replaces them.
    """
    if fd > _STDERR:
        return fd
    copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _STDERR + 1)
    os.close(fd)
    return copy


def _fork_by_new_thread(child: Callable[[], None]) -> int:
    """Return the pid of a child that runs `child`, which does not return. Raises OSError."""
    made: Future[int] = Future()

    def fork() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # until the child has handlers of its own
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of a fork while there are threads
                pid = os.fork()
        except OSError as error:
            made.set_exception(error)
            return
        if not pid:
            child()
        made.set_result(pid)

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
        with suppress(OSError):
            pid = made.result()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        raise
    return made.result()


def _wait_for_end(thread: threading.Thread) -> None:
    """Wait after `join`, which may return while the system has yet to end the thread: Linux tells children of that."""
    task, deadline = f"/proc/self/task/{thread.native_id}", monotonic() + _KILLED
    while os.path.exists(task) and monotonic() < deadline:
        sleep(_FIRST_LOOK)


def _flush() -> None:
    """Write all buffered output, which the child would write once more."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # it is closed, or there is none
            stream.flush()


def _become_child(run: Callable[[], int], log: int | None, keep: Sequence[int], lifeline: int, parent: int) -> None:
    """Call `run` in the new process; does not return."""
    code = int(ExitCode.FAILED)
    try:
        gc.freeze()  # objects of the parent are not finalized here
        if log is None:
            _stay_in_session()
        else:
            _start_session()
            _own_streams(log)
            _release({*keep, lifeline})
        if lifeline != NONE:
            _die_with(parent, lifeline)
        threading.main_thread().name = "MainThread"
        code = run()
    except BaseException:  # noqa: BLE001 - there is no caller that could be told
        traceback.print_exc()
    finally:
        _flush()
        os._exit(code)


def _die_with(parent: int, lifeline: int) -> None:
    """End with the parent from now on, also if this process is stopped then, where the system knows that.

    The thread that has forked this process must have ended: of its end, too, the system would tell.
    """
    begins = os.read(lifeline, 1)
    if not kill_with_parent():
        Lifeline(lifeline).end_process_when_cut(after=0.0)
    elif not begins or os.getppid() != parent:
        os._exit(ExitCode.FAILED)


def _stay_in_session() -> None:
    """Ignore Ctrl-C, which reaches all processes of a terminal: it is for the parent to end this process."""
    signal.set_wakeup_fd(-1)
    for number, handler in _OF_COPIES.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _start_session() -> None:
    """Begin a session, with the handlers of a process that has just started."""
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
    """Read nothing on stdin, and write to `log`. Streams of the parent stay open: their holders may close them."""
    null = above_stdio(os.open(os.devnull, os.O_RDONLY))
    for fd, file in ((0, null), (1, log), (_STDERR, log)):
        os.dup2(file, fd)
    os.close(null)
    _parents.extend((sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__))
    put("stdin", open(0, encoding="utf-8", errors="backslashreplace", closefd=False))  # noqa: SIM115  # stays open
    put("stdout", LossyStream(1))
    put("stderr", LossyStream(_STDERR))


_parents: list[object] = []


def _release(keep: Collection[int]) -> None:
    """Close the parent's pipes and sockets here: their other ends learn of its end, and its ports become free.

    The descriptors then name nothing, and stay taken: objects of the parent may still close them.
    """
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
