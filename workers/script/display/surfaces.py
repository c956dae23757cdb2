"""Where the progress of a script's run is shown: a terminal, plain lines, or nowhere, what has happened alone."""

import sys
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.console import Console

INTERVAL = 5.0  # seconds between two lines where there is no terminal


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
