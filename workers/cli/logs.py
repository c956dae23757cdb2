"""Formats log events as lines on stderr: `01:02:03 assigned: worker 0, incarnation 1`; errors as `stageline: ...`."""

import sys
from collections.abc import Callable, MutableMapping
from datetime import datetime
from typing import Any, TextIO, cast

import structlog

from stageline.pipeline.printable import printable
from stageline.pipeline.retry import passing_fault

Event = MutableMapping[str, Any]

_PREFIXES = {"critical": "stageline:", "error": "stageline:", "warning": "stageline: warning:"}  # others: the time


def log_to_stderr() -> None:
    """Configures structlog for this process."""
    structlog.configure(
        processors=[structlog.processors.add_log_level, structlog.processors.format_exc_info, render],
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _Lossy(sys.stderr))),
    )


class _Lossy:
    """A stream to write lines to. One for which there is no room now stays in the stream's buffer, or is lost: a full
    disk under a log must not end a process."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        self._unless_full(lambda: self._stream.write(text))

    def flush(self) -> None:
        self._unless_full(self._stream.flush)

    def _unless_full(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            if not passing_fault(error):
                raise


def render(_: object, __: str, event: Event) -> str:
    """One event as text. A traceback comes first: the last line of a log states what went wrong."""
    level, text, traceback = event.pop("level", "info"), event.pop("event"), event.pop("exception", "")
    reason = event.pop("reason", "")
    details = ", ".join(f"{name} {value}" for name, value in event.items())
    message = printable(": ".join(part for part in (str(text), str(reason), details) if part))
    prefix = _PREFIXES.get(level) or f"{datetime.now():%H:%M:%S}"
    line = f"{prefix} {message}".replace("\n", "\n    ")  # no text can begin a line that looks like another event
    return "\n".join(part for part in (printable(traceback), line) if part)
