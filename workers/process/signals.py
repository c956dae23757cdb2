"""Why a worker process leaves before its program is over: a signal, a parent that is gone, a word of the broker."""

import os
import signal
from collections.abc import Callable
from time import monotonic
from types import FrameType

from stageline.pipeline.exit_code import ExitCode

ORPHANED = 0.25  # seconds after which a worker notices that its supervisor is gone


class Stopped(Exception):
    """The worker leaves before its program is over; `code` is the exit code to leave with. `told`: by the broker."""

    def __init__(self, reason: str, code: int, *, told: bool = False) -> None:
        super().__init__(reason)
        self.code = code
        self.told = told


def demand_parent(parent: int) -> None:
    """Raises `Stopped` if `parent` (0: none) is not the parent any more."""
    if parent and os.getppid() != parent:
        raise Stopped(f"the supervisor (pid {parent}) is gone", ExitCode.FAILED)


class ExitWatch:
    """Notices that the process should go: a signal came, or its parent is gone."""

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._look = 0.0  # when to look for it again
        self._signal = 0
        self.on_signal: Callable[[], None] = lambda: None
        signal.signal(signal.SIGINT, self._note)
        signal.signal(signal.SIGTERM, self._note)

    def check(self) -> None:
        """Raises `Stopped` if it should."""
        if self._signal:
            raise Stopped(f"interrupted by {signal.Signals(self._signal).name}", ExitCode.INTERRUPTED)
        if monotonic() >= self._look:
            self._look = monotonic() + ORPHANED
            demand_parent(self._parent)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self._signal:  # the second: at once, whatever the compute loop is in
            os._exit(ExitCode.INTERRUPTED)
        self._signal = number
        self.on_signal()
