"""The progress of a script's run on stderr: a line that changes on a terminal, elsewhere a line every few seconds; and
what has happened to its workers, as plain lines.

A thread draws from what the script has seen; the loop does not wait for it.
"""

import atexit
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from time import monotonic

from stageline.workers.script.calls.seen import Seen

from .surfaces import NewsAlone, Surface, is_free_terminal, surface_for_progress

PERIOD = 0.25  # seconds between two looks
WINDOW = 3.0  # seconds over which the rate is measured


class Display(AbstractContextManager["Display"]):
    """Shows what was `seen` of the run `name` until it is closed; `waits_for` says what it waits for, "" for nothing,
    and may take its time; `news` gives what has happened since it was called."""

    def __init__(
        self, name: str, seen: Seen, waits_for: Callable[[], str], surface: Surface, news: Callable[[], list[str]]
    ) -> None:
        self._name = name
        self._seen = seen
        self._waits_for = waits_for
        self._surface = surface
        self._news = news
        self._history = deque([(monotonic(), seen.steps)])
        self._began = monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="progress", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # of a line that is never closed

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the drawing, and leaves the last of it."""
        if not self._over.is_set():
            self._over.set()
            atexit.unregister(self.close)
            self._thread.join(PERIOD)  # it may wait for the broker; then it draws no more
            self._tell()
            self._surface.close(self._text(self._seen.steps - self._seen.start, monotonic() - self._began))

    def _draw(self) -> None:
        while not self._over.wait(PERIOD):
            self._tell()
            waits = self._waits_for()
            self._history.append((monotonic(), self._seen.steps))
            while self._history[-1][0] - self._history[1][0] > WINDOW:
                self._history.popleft()
            (earlier, before), (later, after) = self._history[0], self._history[-1]
            text = self._text(after - before, later - earlier)
            if not self._over.is_set():
                self._surface.show(text, waits)

    def _tell(self) -> None:
        for line in self._news():
            self._surface.say(line)

    def _text(self, steps: int, seconds: float) -> str:
        """`line: 120 steps, loss 0.1234, 45.6 steps/s`; the rate is that of `steps` in `seconds`."""
        loss = "" if self._seen.loss is None else f", loss {self._seen.loss:.4g}"
        rate = f", {steps / seconds:.3g} steps/s" if steps and seconds else ""
        return f"{self._name}: {self._seen.steps} steps{loss}{rate}"


def display_of(
    name: str,
    seen: Seen,
    waits_for: Callable[[], str],
    progress: bool | None,
    news: Callable[[], list[str]] | None = None,
) -> Display | None:
    """With `progress` None, progress is shown on a terminal alone, elsewhere the `news` alone, if there can be any;
    with True all is shown in any case, with False nothing. A terminal on which another bar is drawn, of another line or
    the script's own, is left to that."""
    if progress is False or sys.stderr is None:
        return None
    if progress or is_free_terminal():
        return Display(name, seen, waits_for, surface_for_progress(), news or list)
    return None if news is None else Display(name, seen, lambda: "", NewsAlone(sys.stderr), news)
