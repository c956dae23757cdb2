"""A pipe by whose end a process learns that its starter is gone, however that one was ended.

train  ──holds the only writing end; nothing is ever written──>  broker, workers, trials: `Lifeline`
"""

import ctypes
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable

from stageline.pipeline.errors import ExitCode

NONE = -1  # no pipe: the process was started by hand
LEFT_TO_EXIT = 10.0  # seconds for a process to exit by itself, unless it hangs
_PR_SET_PDEATHSIG = 1  # of prctl(2)


class Lifeline:
    """The reading end of the pipe, in a process that is to exit once the other end is closed.

    Attributes:
        supervised: True if there is a pipe, so that another process has started this one.
        ends_run: True if the run is over without the process that holds the other end.
    """

    def __init__(self, fd: int = NONE, *, ends_run: bool = True) -> None:
        """Take the reading end.

        Args:
            fd: Descriptor of the reading end. With `NONE`, the lifeline is never cut.
            ends_run: True if the process with the other end is `train`, without which the run is over. False for a
                worker that another worker has started: the run goes on without both, until they are replaced.

        Raises:
            OSError: The descriptor is not open.
        """
        self.supervised = fd != NONE
        self.ends_run = ends_run
        self._fd = fd
        if self.supervised:
            os.set_inheritable(fd, False)  # raises OSError if it is not open
        self._poll = self._new_poll()

    @property
    def cut(self) -> bool:
        """True once the process that holds the other end is gone."""
        return self.supervised and bool(self._poll.poll(0))

    @property
    def reason(self) -> str:
        """Description of the event, for when the lifeline is cut."""
        return "the process that started this worker is gone"

    def end_process_when_cut(self, after: float = LEFT_TO_EXIT, first: Callable[[], object] = lambda: None) -> None:
        """Have the process end `after` seconds after the lifeline is cut, even if the user's code hangs.

        At once, another thread calls `first`.
        """
        if self.supervised:
            threading.Thread(target=self._end_process, args=(after, first), name="lifeline", daemon=True).start()

    def _new_poll(self) -> select.poll:
        """Return a poll of the pipe, for one thread."""
        poll = select.poll()
        if self.supervised:
            poll.register(self._fd, select.POLLHUP)
        return poll

    def _end_process(self, after: float, first: Callable[[], object]) -> None:
        self._new_poll().poll()
        first()
        time.sleep(after)
        os._exit(ExitCode.FAILED)


def kill_with_parent() -> bool:
    """Have the system kill this process once its parent ends, also if this one is stopped or hangs then.

    The system counts the thread that has started this process as its parent. Of a parent that has ended already, it
    does not tell: look for that afterwards. Returns False if the system cannot do it.
    """
    if not sys.platform.startswith("linux"):
        return False
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return True


class LifelineOwner:
    """The writing end of the pipe, held by this process alone: a fork closes its copy.

    Other processes inherit `end`, the reading end.
    """

    def __init__(self) -> None:
        """Open a pipe."""
        self.end, self._mine = os.pipe()
        _owned.add(self)

    def let_begin(self) -> None:
        """Write the one byte for which a process that was just forked waits."""
        os.write(self._mine, b".")

    def close(self) -> None:
        """Close both ends, which cuts the lifeline."""
        for fd in (self.end, self._mine):
            if fd != NONE:
                os.close(fd)
        self.end = self._mine = NONE

    def leave_to_parent(self) -> None:
        """Close a forked process's copy of the writing end."""
        if self._mine != NONE:
            os.close(self._mine)
        self._mine = NONE


_owned: "weakref.WeakSet[LifelineOwner]" = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for owner in list(_owned):
        owner.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)
