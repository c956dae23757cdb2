"""Faults of the system that may pass, and the time for which what they stop is tried again.

attempt   fault   0.1 s   attempt   fault   0.2 s   attempt   ...   2 s   attempt   ...   60 s: it is given up

descriptors   EMFILE ENFILE             files and connections of this process, or of others, are closed again
space         ENOSPC EDQUOT EFBIG       old snapshots are deleted, people make room, or raise a quota or a limit
memory        ENOMEM EAGAIN ENOBUFS     the system takes it back from others
devices       EIO ESTALE ETIMEDOUT      a disk, or more often a file server, answers again

Not among them: what stays as it is until the plan or the folder changes (a missing folder, no permission, a read-only
disk), which ends the run at once.
"""

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from .errors import cause_of, own_text, raised_by_user_code

BOUND = 60.0  # seconds for which it is tried again
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0  # seconds between two attempts, doubling

_NAMES = (
    *("EMFILE", "ENFILE"),
    *("ENOSPC", "EDQUOT", "EFBIG"),
    *("ENOMEM", "EAGAIN", "ENOBUFS"),
    *("EIO", "ESTALE", "ETIMEDOUT"),
)
_STRERROR = OSError.__dict__["strerror"]  # Python's own attribute: a user's class may have one that raises
PASSING = frozenset(getattr(errno, name) for name in _NAMES if hasattr(errno, name))
TRIED = "; tried for "  # what follows in a fault that is told changes every second
_NO_MEMORY = ("can't allocate memory", "out of memory")  # in a RuntimeError of torch

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class ResourceFault:
    """Action that a process cannot do for now, with the reason.

    Attributes:
        what: The action; continues "cannot".
        reason: The fault in the system's words.
        since: Time of the first fault, in seconds on the monotonic clock.
        until: Time at which the action is given up, on the same clock.
        blocks: True if the compute loop waits for the action.
    """

    what: str
    reason: str
    since: float
    until: float
    blocks: bool = False

    def told(self, now: float) -> str:
        """Return the fault at time `now` in words that continue a sentence about the process."""
        tried, left = max(0.0, now - self.since), max(0.0, self.until - now)
        return f"cannot {self.what}: {self.reason}{TRIED}{tried:.0f} s, gives up in {left:.0f} s"


Note = Callable[[ResourceFault | None], object]  # takes what cannot be done now, None once it was done


def passing_fault(error: BaseException) -> BaseException | None:
    """Return the fault that led to `error` and may pass; None if there is none."""
    return next(filter(_may_pass, causes(error)), None)


def lacks_memory(error: BaseException) -> bool:
    """Return True if `error` came from a lack of memory, of the machine or a device."""
    return any(map(_is_of_memory, causes(error)))


class Retry:
    """Attempts on one thing, which `what` names: "write its snapshot of step 4 to ...".

    Times are in seconds on the monotonic clock. `fault` is the newest fault, None if no attempt has failed.
    """

    def __init__(self, what: str, bound: float | None = None, *, blocks: bool = False) -> None:
        """Begin without a failed attempt.

        Args:
            what: Action that is attempted; continues "cannot".
            bound: Seconds from the first fault after which no attempt is made; None: `BOUND`.
            blocks: True if the compute loop waits for the action.
        """
        self.fault: ResourceFault | None = None
        self._what = what
        self._bound = BOUND if bound is None else bound
        self._blocks = blocks
        self._pause = FIRST_PAUSE

    def failed(self, error: BaseException, now: float) -> float | None:
        """Return for how long to wait before the next attempt after `error`; None if there should be none."""
        cause = passing_fault(error)
        since = now if self.fault is None else self.fault.since
        if cause is None or now - since >= self._bound:
            return None
        self.fault = ResourceFault(self._what, reason_of(cause), since, since + self._bound, self._blocks)
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        return min(pause, since + self._bound - now)


def persist(
    attempt: Callable[[], _Result],
    what: str,
    note: Note,
    *,
    now: Callable[[], float],
    wait: Callable[[float], object],
    bound: float | None = None,
) -> _Result:
    """Return the result of `attempt`, which is made again after a fault that may pass.

    Doing `attempt` twice must have the effect of doing it once. Raises what the last attempt raised, and what `wait`
    raises.

    Args:
        attempt: Action to attempt.
        what: Name of the action; continues "cannot".
        note: Called with the fault before each wait, and with None at the end if there was one.
        now: Returns the time, in seconds on the monotonic clock.
        wait: Waits for the seconds it is given.
        bound: Seconds from the first fault after which no attempt is made; None: `BOUND`.
    """
    retry = Retry(what, bound, blocks=True)
    try:
        while True:
            try:
                return attempt()
            except Exception as error:
                if (pause := retry.failed(error, now())) is None:
                    raise
                note(retry.fault)
            wait(pause)
    finally:
        if retry.fault is not None:
            note(None)


def reason_of(error: BaseException) -> str:
    """Return the fault in the system's words."""
    words = _STRERROR.__get__(error) if issubclass(type(error), OSError) else None
    return words if type(words) is str and words else own_text(error) or "no memory"


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and what it was raised from, each once: `raise error from error` makes a circle."""
    found: list[BaseException] = []
    while error is not None and not any(error is each for each in found):
        found.append(error)
        yield error
        error = cause_of(error)


def _may_pass(error: BaseException) -> bool:
    return _is_of_memory(error) or _number(error) in PASSING  # ZeroMQ's error is no `OSError`


def _is_of_memory(error: BaseException) -> bool:
    kind = type(error)  # `isinstance` may ask the exception, whose class may be the user's, and raise
    if issubclass(kind, RuntimeError):  # torch has an error of its own for devices only
        return any(words in own_text(error) for words in _NO_MEMORY)
    return issubclass(kind, MemoryError) or (issubclass(kind, OSError) and _number(error) == errno.ENOMEM)


def _number(error: BaseException) -> int | None:
    """Return the system's number of a fault; None if the exception has none, or its class does not give it."""
    try:
        number = getattr(error, "errno", None)
    except BaseException as other:  # user code may raise anything
        if not raised_by_user_code(other):
            raise
        return None
    return number if type(number) is int else None
