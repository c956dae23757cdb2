"""Places where progress and news of a script's run are shown: a terminal, a notebook, or plain lines on stderr."""

import sys
from contextlib import suppress
from html import escape
from time import monotonic
from typing import TYPE_CHECKING, Any, TextIO

from .fit_progress import Shown

if TYPE_CHECKING:
    from rich.console import Console

INTERVAL = 5.0  # seconds between two lines where there is no terminal


class NewsAlone:
    """Surface on which news is written to `stream`, and no progress is shown; other surfaces show it, too."""

    def __init__(self, stream: TextIO) -> None:
        """Write to `stream`."""
        self._stream = stream

    def show(self, shown: Shown, waits: str) -> None:
        """Show progress; called at every look. `waits` is what the run waits for, "" for nothing."""

    def say(self, line: str) -> None:
        """Write a line of news."""
        with suppress(OSError, ValueError):  # it may be closed
            print(f"stageline: {line}", file=self._stream, flush=True)

    def close(self, shown: Shown) -> None:
        """Show progress for the last time."""


class OnTerminal(NewsAlone):
    """Progress on a terminal: a line that changes, with a bar in a fit, and below it what the run waits for.

    Output of the script appears above it. The cursor stays visible: a script that is killed leaves a terminal that
    works.
    """

    def __init__(self, console: "Console") -> None:
        """Start to draw on `console`. Output that the script sends to a file or pipe is not redirected."""
        from rich.live import Live

        super().__init__(sys.stderr)
        of_stdout = _is_terminal(sys.stdout)  # what goes to a file or pipe stays there
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=of_stdout)
        self._live.start()
        console.show_cursor(True)

    def show(self, shown: Shown, waits: str) -> None:
        """Draw progress, and what the run waits for. The terminal may be gone: errors are ignored."""
        from rich.text import Text

        with suppress(OSError):  # the terminal may be gone
            options = self._live.console.options
            text = shown.drawn(options.max_width, ascii_only=options.ascii_only)
            self._live.update(Text(f"{text}\n  waits: {waits}" if waits else text), refresh=True)

    def say(self, line: str) -> None:
        """Write a line above the progress."""
        with suppress(OSError):
            self._live.console.print(f"stageline: {line}", markup=False, highlight=False, soft_wrap=True)

    def close(self, shown: Shown) -> None:
        """Draw progress for the last time and leave it."""
        self.show(shown, "")
        with suppress(OSError):
            self._live.stop()


class InLines(NewsAlone):
    """Progress as plain lines, one every `INTERVAL` seconds, without control characters."""

    def __init__(self, stream: TextIO) -> None:
        """Write to `stream`."""
        super().__init__(stream)
        self._written = monotonic()

    def show(self, shown: Shown, waits: str) -> None:
        """Write progress if the last line is older than `INTERVAL`."""
        if monotonic() - self._written >= INTERVAL:
            self._written = monotonic()
            self.say(f"{shown}; waits: {waits}" if waits else str(shown))

    def close(self, shown: Shown) -> None:
        """Write progress for the last time."""
        self.say(str(shown))


class InNotebook(NewsAlone):
    """Progress in a notebook, in one place of the cell that has made the surface."""

    def __init__(self) -> None:
        """Take a place in the cell; IPython must be there."""
        from IPython.display import HTML, display

        super().__init__(sys.stderr)
        self._html = HTML
        self._place: Any = display(HTML(""), display_id=True)

    def show(self, shown: Shown, waits: str) -> None:
        """Draw progress, and what the run waits for."""
        self._place.update(self._html(f"{shown.html}<br>waits: {escape(waits)}" if waits else shown.html))

    def close(self, shown: Shown) -> None:
        """Draw progress for the last time and leave it."""
        self.show(shown, "")


def has_surface() -> bool:
    """Return True if progress has a place of its own: a terminal without another bar, or a notebook."""
    return is_free_terminal() or _is_notebook()


def _is_notebook() -> bool:
    """Return True if this is a notebook's kernel, which shows HTML."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


def surface_for_progress() -> NewsAlone:
    """Return a surface on the terminal or in the notebook, if there is one; else plain lines on stderr."""
    if _is_notebook():
        return InNotebook()
    if is_free_terminal():
        from rich.console import Console

        console = Console(stderr=True, force_jupyter=False)
        if console.is_terminal and not console.is_dumb_terminal:
            return OnTerminal(console)
    return InLines(sys.stderr)


def is_free_terminal() -> bool:
    """Return True if stderr is a terminal, and no other bar of rich is on it."""
    rich = sys.modules.get("rich.file_proxy")
    return _is_terminal(sys.stderr) and not (rich is not None and isinstance(sys.stderr, rich.FileProxy))


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()
