"""Lines of logs: as a worker keeps its newest ones for the broker, and as `stageline logs --json` prints each.

Times are in seconds since the epoch.
"""

from typing import Annotated, Literal

import msgspec

from .answers import AnswerFacts

LONGEST_LINE = 1000  # characters of a line that a worker keeps
MOST_LINES = 200  # of a worker in one answer
_Level = Annotated[str, msgspec.Meta(max_length=20)]


class KeptLine(AnswerFacts, frozen=True, kw_only=True):
    """A line that a worker has logged, with its time by the worker's clock."""

    time: float
    level: _Level
    text: Annotated[str, msgspec.Meta(max_length=LONGEST_LINE)]


class KeptLines(AnswerFacts, frozen=True, kw_only=True):
    """Lines in a row that a worker has logged.

    Attributes:
        first: Number of the first of them, counted from the start of the process.
        lines: The lines; empty if there is none after the one that was asked from.
    """

    first: int
    lines: Annotated[list[KeptLine], msgspec.Meta(max_length=MOST_LINES)]


class WorkerLog(AnswerFacts, frozen=True, kw_only=True):
    """The lines of one worker, as the broker passes them on; `name` is that of its process."""

    run: str
    worker: int
    name: str
    kept: KeptLines


class LogLine(AnswerFacts, frozen=True, kw_only=True):
    """A line of a log.

    Attributes:
        log: Name of the process that logged it, such as "worker-0" or "broker".
        worker: Place of the worker; None for another process.
        host: Machine that it was logged on; "" if that is not known.
        time: When it was logged, by the broker's clock as far as offsets are known.
        exact: False if the line has no time: `time` is that of the line before, or of the last change of the file.
        level: "warning", "error" or "critical"; "" for any other line.
        text: The line, without its time.
        source: "folder" for a line of a file in the run's folder, "worker" for one that the worker told.
    """

    run: str
    log: str
    worker: int | None
    host: str
    time: float
    exact: bool
    level: str
    text: str
    source: Literal["folder", "worker"]
