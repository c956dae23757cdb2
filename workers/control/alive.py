"""Sign of life of a worker: a file that is touched as long as the worker progresses, for what would restart it.

A worker progresses while one of these lasts:

    loading     model, data, queues and snapshots, for `recovery.loading` at most
    standing by it asks the broker for a place
    computing   one action, for `recovery.action` at most: the rule by which the broker declares a worker lost
    waiting     for messages, credit, room, calls or the end of a pause: its loop comes round within a lease
    writing     it waits for the disk, which has a bound of its own (`LONGEST_WRITE`)

The control thread touches the file. So it also stops if that thread is stopped, or does not get the interpreter's lock.
"""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stageline.broker.ledger.losses import Leases
from stageline.pipeline.process.steady_clock import STEADY
from stageline.workers.runtime.progress import Progress

TOUCH = 1.0  # seconds between two signs


@dataclass(frozen=True, slots=True)
class Signs:
    """Signs of progress of a compute loop: each of them changes when it goes on.

    Attributes:
        actions: Number of completed actions.
        turn: Time at which the loop last came round in a wait, or between two actions; 0.0 before it has begun.
        doing: Present work of the loop, for people.
    """

    actions: int
    turn: float
    doing: str

    @classmethod
    def of(cls, progress: Progress) -> "Signs":
        """Return the signs of now."""
        return cls(progress.actions, progress.counts.at, progress.activity().said)


class Liveness:
    """Judge of a compute loop by its signs."""

    def __init__(self, leases: Leases) -> None:
        """Begin without a sign; `leases` are the bounds of the plan."""
        self._leases = leases
        self._signs: Signs | None = None
        self._since = 0.0

    def holds(self, signs: Signs, now: float, *, waits: bool = False, writes: bool = False) -> bool:
        """Return True if the loop progresses.

        Args:
            signs: Signs of the loop.
            now: Seconds of a clock that is never set back.
            waits: True while the loop has nothing to compute.
            writes: True while the loop waits for the disk.
        """
        if signs != self._signs:
            self._signs, self._since = signs, now
        return writes or now - self._since < self._bound(signs, waits=waits)

    def _bound(self, signs: Signs, *, waits: bool) -> float:
        if not signs.turn:
            return self._leases.loading
        return self._leases.silence if waits else self._leases.action


class Pulse:
    """The alive file of one worker. Without a path it does nothing."""

    def __init__(self, path: Path | None, leases: Leases, now: Callable[[], float] = STEADY.monotonic) -> None:
        """Give the first sign.

        Args:
            path: Path of the file, which is made if it is not there.
            leases: The bounds of the plan.
            now: Returns the seconds of a clock that is never set back.
        """
        self._path, self._leases, self._now = path, leases, now
        self._liveness = Liveness(leases)
        self._touched = float("-inf")
        self._loaded = threading.Event()
        self._touch()

    def load(self) -> None:
        """Give signs from a thread until the next `beat`, for as long as loading may take."""
        if self._path is not None:
            self._loaded.set()
            self._loaded = loaded = threading.Event()
            threading.Thread(target=self._loads, args=(loaded,), name="alive", daemon=True).start()

    def stand_by(self) -> None:
        """Give a sign of a process that asks for a place."""
        self._touch()

    def beat(self, progress: Progress) -> None:
        """Give a sign if the loop progresses. Call it more often than every TOUCH seconds."""
        self._loaded.set()
        fault = progress.fault
        waits, writes = progress.waits, bool(progress.writes) or (fault is not None and fault.blocks)
        if self._path is not None and self._liveness.holds(Signs.of(progress), self._now(), waits=waits, writes=writes):
            self._touch()

    def _loads(self, loaded: threading.Event) -> None:
        until = self._now() + self._leases.loading
        while self._now() < until and not loaded.wait(TOUCH):
            self._touch()

    def _touch(self) -> None:
        now = self._now()
        if self._path is None or now - self._touched < TOUCH:
            return
        self._touched = now
        with suppress(OSError):  # a full disk, say: what watches the file finds it old
            os.close(os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
            os.utime(self._path)


NO_PULSE = Pulse(None, Leases(0.0, 0.0, 0.0))  # of a process that nothing watches
