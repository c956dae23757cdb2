"""Exit codes of a process: the meaning of each, and what a parent, such as `worker --keep`, does after it.

`EXIT_CODES` is the one table; docs/reference/exit-codes.md shows it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from .errors import ExitCode, documented


class Afterwards(StrEnum):
    """Act of a parent after the end of a worker."""

    FINAL = "not started again"
    ELSEWHERE = "not started again here; another machine may take the place"
    PATIENT = "started again: what is missing may come"
    AGAIN = "started again"


@dataclass(frozen=True, slots=True)
class ExitMeaning:
    """Meaning of an exit code for people, and what a parent does after a worker that has ended with it."""

    meaning: str
    afterwards: Afterwards


EXIT_CODES: Mapping[ExitCode, ExitMeaning] = {
    ExitCode.OK: ExitMeaning("done", Afterwards.FINAL),
    ExitCode.FAILED: ExitMeaning("failed; the message says why", Afterwards.AGAIN),
    ExitCode.USAGE: ExitMeaning("an option, an argument or a command is wrong", Afterwards.FINAL),
    ExitCode.NO_BROKER: ExitMeaning("no broker answers", Afterwards.PATIENT),
    ExitCode.NO_WORKER: ExitMeaning("the other workers did not join", Afterwards.PATIENT),
    ExitCode.SAVED: ExitMeaning("interrupted, and saved: train --resume continues", Afterwards.FINAL),
    ExitCode.LEFT: ExitMeaning("this worker has left on notice; the run goes on without it", Afterwards.ELSEWHERE),
    ExitCode.NOT_ADMITTED: ExitMeaning(
        "the broker does not take this machine's key, or the line is wrong", Afterwards.FINAL
    ),
    ExitCode.REFUSED: ExitMeaning(
        "the plan, model or data cannot work; starting again does not help", Afterwards.FINAL
    ),
    ExitCode.INTERRUPTED: ExitMeaning("interrupted, and nothing saved", Afterwards.AGAIN),
}


def afterwards(result: int | None, *, over: bool = False) -> Afterwards:
    """Return what a parent does after the end of a worker.

    Args:
        result: Exit code that the worker's command has returned; None if it ended without returning one: by a signal,
            or by an exit in the user's code, whose status says nothing.
        over: True if the broker has said that the run is over: then every end is final.
    """
    if over:
        return Afterwards.FINAL
    return Afterwards.AGAIN if result is None else EXIT_CODES[documented(result)].afterwards
