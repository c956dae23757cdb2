"""Logs for people, on stderr: `01:02:03 assigned: worker 0, incarnation 1`; errors as `stageline: ...`."""

import sys
from collections.abc import MutableMapping
from datetime import datetime
from typing import Any

import structlog

Event = MutableMapping[str, Any]


def log_to_stderr() -> None:
    """From now on, in this process."""
    structlog.configure(
        processors=[structlog.processors.add_log_level, structlog.processors.format_exc_info, render],
        logger_factory=lambda *_: _Stderr(),
        cache_logger_on_first_use=True,
    )


def render(_: object, __: str, event: Event) -> str:
    """One event as text. A traceback stands before its sentence: the last line of a log is what went wrong."""
    level, text, traceback = event.pop("level", "info"), event.pop("event"), event.pop("exception", "")
    reason = event.pop("reason", "")
    details = ", ".join(f"{name} {value}" for name, value in event.items())
    sentence = ": ".join(part for part in (str(text), str(reason), details) if part)
    return "\n".join(part for part in (traceback, f"{_opening(level)} {sentence}") if part)


class _Stderr:
    """A logger that writes to whatever stderr is at the moment."""

    def msg(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    debug = info = warning = error = critical = msg


def _opening(level: str) -> str:
    match level:
        case "error" | "critical":
            return "stageline:"
        case "warning":
            return "stageline: warning:"
        case _:
            return f"{datetime.now():%H:%M:%S}"
