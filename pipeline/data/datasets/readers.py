"""Processes that draw batches ahead of their use, in the order of the steps.

              step to draw                  batch
    Readers ──── 7, 9, ... ───> reader 0 ──────────> 7, 9, ...
            ──── 8, 10, ... ──> reader 1 ──────────> 8, 10, ...

Readers are forks of this process, since these have the dataset as it is, also one that was defined in a notebook, and
are at work in milliseconds. This process may have threads: like torch's own readers, readers need none of them.

They are forked with the first batch and serve all epochs. Another step than the next one costs what was drawn ahead. If
a reader dies, others draw again what it had, with the same bits.
"""

import ctypes
import errno
import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

import torch

from stageline.pipeline.data.batch import Batch
from stageline.pipeline.errors import DataError, describe_error
from stageline.pipeline.retry import passing_fault
from stageline.pipeline.tree import Tree

from . import frames

_STEP = 8  # bytes of a request
_PR_SET_PDEATHSIG = 1  # of prctl(2)
_EXIT_TIMEOUT = 1.0  # seconds for a process that has closed its connection to be over

_HANDLERS = {signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_DFL, signal.SIGCHLD: signal.SIG_DFL}
_WAYS_OUT = {
    signal.SIGKILL: "That is how a system without memory ends processes: use fewer num_workers, or smaller batches",
    signal.SIGTERM: "Find what ends it, or use num_workers = 0",
}
_CRASHED = "A library that the dataset calls has crashed: num_workers = 0 draws in this process, and shows where"
_EXITED = "Its code has ended the process: num_workers = 0 draws in this process, and shows where"
AHEAD = 2  # steps that each reader has been asked for


class ReaderDied(Exception):
    """A reader process ended by itself. `way_out`: what to do about it."""

    def __init__(self, pid: int, status: int) -> None:
        killed = status < 0
        how = f"was killed by {signal.Signals(-status).name}" if killed else f"ended with status {status}"
        super().__init__(f"reader process {pid} of the loader {how}")
        self.way_out = _WAYS_OUT.get(signal.Signals(-status), _CRASHED) if killed else _EXITED


class Reader:
    """A reader process, as seen by the one that reads from it. Any other exception than `DataError` ends its use."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.connection = connection
        self._asked = 0  # batches that have not come yet
        self._stale = 0  # of them, the first ones, which are not wanted any more
        self._over = False

    def ask_for(self, step: int) -> None:
        """The batch of `step` comes after those asked for before. Raises `ReaderDied`."""
        self._asked += 1
        with self._expected_to_live():
            self.connection.sendall(step.to_bytes(_STEP, "little"))

    def forget(self) -> None:
        """What was asked for is not wanted any more."""
        self._stale = self._asked

    def batch(self) -> Batch:
        """The next batch that is wanted. Raises `DataError` if it could not be drawn, and `ReaderDied`."""
        while self._stale:
            self._receive()
            self._stale -= 1
        match self._receive():
            case (str(fault), int(number)):
                raise DataError(fault) from (OSError(number, os.strerror(number)) if number else None)
            case (None, (inputs, targets)):
                return inputs, targets
            case other:
                raise TypeError(f"a reader process sent {type(other).__name__}")

    def kill(self) -> None:
        self.connection.close()
        if not self._over:
            self._over = True
            _kill(self.pid)
            _wait(self.pid, 0)

    def _receive(self) -> Tree:
        with self._expected_to_live():
            content = frames.receive(self.connection)
        self._asked -= 1
        return content

    @contextmanager
    def _expected_to_live(self) -> Iterator[None]:
        try:
            yield
        except (OSError, frames.Ended):
            raise ReaderDied(self.pid, self._status()) from None

    def _status(self) -> int:
        """How the process ended, which has closed its connection."""
        deadline = time.monotonic() + _EXIT_TIMEOUT
        while (status := _wait(self.pid, os.WNOHANG)) is None:
            if time.monotonic() > deadline:
                _kill(self.pid)
            time.sleep(0.005)
        self._over = True
        return status


def start_reader(draw: Callable[[int], Batch]) -> Reader:
    """Forks a process that draws what it is asked for. Raises OSError if there can be none."""
    with suppress(OSError, ValueError):  # what is in a buffer now would be written twice
        sys.stdout.flush()
        sys.stderr.flush()
    ours, theirs = socket.socketpair()
    parent, of_main_thread = os.getpid(), threading.current_thread() is threading.main_thread()
    with theirs:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork while there are threads, since Python 3.12
            pid = os.fork()
        if pid == 0:
            ours.close()
            _serve(draw, theirs, parent if of_main_thread else None)
    return Reader(pid, ours)


def _serve(draw: Callable[[int], Batch], requests: socket.socket, parent: int | None) -> NoReturn:
    """Draws what is asked for until the other end of `requests` is closed."""
    status = 1
    os.register_at_fork(after_in_child=requests.close)  # a fork by the user's code neither sends nor holds it open
    try:
        _become_reader(parent)
        while request := requests.recv(_STEP, socket.MSG_WAITALL):
            frames.send(requests, _drawn(draw, int.from_bytes(request, "little")))
            sys.stdout.flush()
        status = 0
    except OSError:  # the other end is gone, or this is such a fork
        status = 0
    except BaseException:  # noqa: BLE001  # must not return into the code that this process was forked from
        traceback.print_exc()
    finally:
        os._exit(status)


def _drawn(draw: Callable[[int], Batch], step: int) -> frames.Frames:
    """Of `(None, batch)`, or of why there is none and the number of the system's fault behind it, 0 if that stays."""
    try:
        return frames.encode((None, draw(step)))
    except DataError as error:
        return frames.encode((str(error), _passing(error)))
    except BaseException as error:  # noqa: BLE001  # what no frame can hold, or no memory
        text = f"the batch of step {step} cannot be handed over: {describe_error(error)}"
        return frames.encode((text, _passing(error)))


def _passing(error: BaseException) -> int:
    fault = passing_fault(error)
    return 0 if fault is None else getattr(fault, "errno", None) or errno.ENOMEM


def _become_reader(parent: int | None) -> None:
    """Ctrl-C in a terminal reaches all its processes: it is for the parent to end this one."""
    gc.freeze()  # what is garbage of the parent is finalized there
    torch.set_num_threads(1)
    signal.set_wakeup_fd(-1)
    for number, handler in _HANDLERS.items():
        signal.signal(number, handler)
    if parent is not None and sys.platform.startswith("linux"):  # of a thread, the end would count as the parent's
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(0)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _wait(pid: int, options: int) -> int | None:
    """The exit status of a child, negative for a signal; None if it runs. 0 if another has asked for it before."""
    try:
        ended, status = os.waitpid(pid, options)
    except ChildProcessError:
        return 0
    return os.waitstatus_to_exitcode(status) if ended else None


class Readers:
    """`count` processes that call `draw`, which gives the batch of a step or raises `DataError`."""

    def __init__(self, draw: Callable[[int], Batch], count: int) -> None:
        self._draw = draw
        self._count = count
        self._next = 0  # the step whose batch comes next
        self._readers: list[Reader] = []
        _all.add(self)

    def batch(self, step: int) -> Batch:
        """The batch of `step`. Raises `DataError` as `draw` does, or if readers die one after the other."""
        try:
            return self._read(step)
        except ReaderDied as died:
            warnings.warn(f"{died}. What it had is drawn again.", RuntimeWarning, stacklevel=3)
        try:
            return self._read(step)
        except ReaderDied as died:
            raise DataError(f"{died}; so did the one before it. {died.way_out}.") from None

    def close(self) -> None:
        """Ends the processes; the next batch starts others."""
        readers, self._readers = self._readers, []
        for reader in readers:
            reader.kill()

    def __del__(self) -> None:
        self.close()

    def leave_to_parent(self) -> None:
        """In a forked process: the readers are its parent's, and this process has none."""
        readers, self._readers = self._readers, []
        for reader in readers:
            reader.connection.close()

    def _read(self, step: int) -> Batch:
        try:
            if not self._readers or step != self._next:
                self._begin_at(step)
            self._next = step + 1
            reader = self._readers[step % self._count]
            reader.ask_for(step + AHEAD * self._count)
            return reader.batch()
        except DataError:
            raise
        except BaseException:  # Ctrl-C too: half a batch may be left in the connection
            self.close()
            raise

    def _begin_at(self, step: int) -> None:
        while len(self._readers) < self._count:
            self._readers.append(start_reader(self._draw))
        for reader in self._readers:
            reader.forget()
        for ahead in range(step, step + AHEAD * self._count):
            self._readers[ahead % self._count].ask_for(ahead)


_all: "weakref.WeakSet[Readers]" = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for readers in list(_all):
        readers.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)
