"""Formats log events as lines on stderr: `01:02:03 assigned: worker 0, incarnation 1`; errors as `stageline: ...`."""

import sys
from collections.abc import MutableMapping
from datetime import datetime
from typing import Any

import structlog

from stageline.pipeline.printable import printable
from stageline.pipeline.process.streams import lose_output

Event = MutableMapping[str, Any]

_PREFIXES = {"critical": "stageline:", "error": "stageline:", "warning": "stageline: warning:"}  # others: the time


def log_to_stderr() -> None:
    """Configure structlog for this process, which a closed or full stdout does not end from now on."""
    lose_output()
    structlog.configure(
        processors=[structlog.processors.add_log_level, structlog.processors.format_exc_info, render],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def render(_: object, __: str, event: Event) -> str:
    """One event as text. A traceback comes first: the last line of a log states what went wrong."""
    level, text, traceback = event.pop("level", "info"), event.pop("event"), event.pop("exception", "")
    reason = event.pop("reason", "")
    details = ", ".join(f"{name} {value}" for name, value in event.items())
    message = printable(": ".join(part for part in (str(text), str(reason), details) if part))
    prefix = _PREFIXES.get(level) or f"{datetime.now():%H:%M:%S}"
    line = f"{prefix} {message}".replace("\n", "\n    ")  # no text can begin a line that looks like another event
    return "\n".join(part for part in (printable(traceback), line) if part)
