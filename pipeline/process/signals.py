"""Signal handlers of stageline's processes: the effects of SIGINT and SIGTERM.

                              first                          second
    command, before its work  exits at once                  -
    doctor                    removes its folder and exits   -
    train, over memory://     ends the run                   what it did before the run
    train, with processes     stops the run                  kills its processes
    predict, eval             ends its processes and exits   kills them
    broker                    stops the run                  exits without waiting for workers
    worker                    exits between two actions      exits at once
    worker, with notice       leaves after a step (SIGTERM)  exits at once
    worker --keep             passes it on, and waits        passes it on

A SIGINT that the parent ignores, as a shell does for what it starts with `&`, is handled all the same: it stops a run
with its work saved. A script's own process is left as Python has it.

No other file installs handlers, except `workers/launch/keeper.py`, which passes SIGHUP on as well.

This module imports nothing that takes time: the handlers of "before its work" are installed before torch is loaded.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

from stageline.pipeline.errors import ExitCode


def exit_at_once(number: int) -> None:
    """End this process without an exception, which an import or a model's own code could swallow."""
    os._exit(ExitCode.INTERRUPTED)


def leave_at_once(number: int) -> None:
    """End a worker that has no place yet: at SIGTERM, a worker with notice has left by that."""
    os._exit(ExitCode.LEFT if number == signal.SIGTERM else ExitCode.INTERRUPTED)


@contextmanager
def as_interrupts() -> Iterator[None]:
    """Return a context in which SIGINT and SIGTERM raise `KeyboardInterrupt` in the main thread, as in a script."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Signals(AbstractContextManager["Signals"]):
    """Counter of SIGINT and SIGTERM in the main thread. As a context, it restores the handlers at its end."""

    def __init__(
        self,
        on_first: Callable[[int], None] = lambda number: None,
        on_second: Callable[[int], None] = lambda number: None,
        *,
        once: bool = False,
    ) -> None:
        """Install the handlers.

        Args:
            on_first: Called within the handler of the first signal, with its number.
            on_second: Called within the handler of each further signal, with its number.
            once: True to restore the previous handlers at the first signal, so that they get the second.
        """
        self.count = 0
        self._on_first = on_first
        self._on_second = on_second
        self._once = once
        self._before = {number: signal.signal(number, self._record) for number in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *_: object) -> None:
        """Restore the previous handlers."""
        self._restore()

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            self._on_second(number)
            return
        if self._once:
            self._restore()
        self._on_first(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
