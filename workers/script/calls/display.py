"""The progress of a script's run: a line that changes on a terminal, elsewhere a line every few seconds, or news alone.

A thread draws from what the script has seen; the loop does not wait for it.
"""

import atexit
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from time import monotonic
from typing import TYPE_CHECKING, Protocol, TextIO

from .page import Seen

if TYPE_CHECKING:
    from rich.console import Console

INTERVAL = 5.0  # seconds between two lines where there is no terminal
PERIOD = 0.25  # seconds between two looks
WINDOW = 3.0  # seconds over which the rate is measured


class Surface(Protocol):
    """Where progress is shown."""

    def show(self, text: str, waits: str) -> None:
        """Called at every look. `waits`: what the run waits for, "" for nothing."""

    def say(self, line: str) -> None:
        """Writes what has happened, once."""

    def close(self, text: str) -> None:
        """Shows `text` for the last time."""


class OnTerminal:
    """Draws one line again and again, and below it what the run waits for; what the script prints goes above it. The
    cursor stays visible: a script that is killed leaves a terminal that works."""

    def __init__(self, console: "Console") -> None:
        from rich.live import Live

        of_stdout = _is_terminal(sys.stdout)  # what goes to a file or pipe stays there
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=of_stdout)
        self._live.start()
        console.show_cursor(True)

    def show(self, text: str, waits: str) -> None:
        from rich.text import Text

        with suppress(OSError):  # the terminal may be gone
            self._live.update(Text(f"{text}\n  waits: {waits}" if waits else text), refresh=True)

    def say(self, line: str) -> None:
        with suppress(OSError):
            self._live.console.print(f"stageline: {line}", markup=False, highlight=False, soft_wrap=True)

    def close(self, text: str) -> None:
        self.show(text, "")
        with suppress(OSError):
            self._live.stop()


class NewsAlone:
    """Writes what has happened, and no progress."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, text: str, waits: str) -> None:
        """Nothing."""

    def say(self, line: str) -> None:
        with suppress(OSError, ValueError):  # it may be closed
            print(f"stageline: {line}", file=self._stream, flush=True)

    def close(self, text: str) -> None:
        """Nothing."""


class InLines(NewsAlone):
    """Writes a line of progress every few seconds, too, without any control characters."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._written = monotonic()

    def show(self, text: str, waits: str) -> None:
        if monotonic() - self._written >= INTERVAL:
            self._written = monotonic()
            self.say(f"{text}; waits: {waits}" if waits else text)

    def close(self, text: str) -> None:
        self.say(text)


def surface_for_progress() -> Surface:
    """The terminal that stderr is, if no other bar is on it; else plain lines there."""
    if is_free_terminal():
        from rich.console import Console

        console = Console(stderr=True, force_jupyter=False)
        if console.is_terminal and not console.is_dumb_terminal:
            return OnTerminal(console)
    return InLines(sys.stderr)


def is_free_terminal() -> bool:
    """Whether stderr is one, and no other bar of rich's is on it."""
    rich = sys.modules.get("rich.file_proxy")
    return _is_terminal(sys.stderr) and not (rich is not None and isinstance(sys.stderr, rich.FileProxy))


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()


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
