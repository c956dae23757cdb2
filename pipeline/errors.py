"""The base of all errors that stageline expects, the exit codes they lead to, and the errors of a stage's computation.

By its exit code the supervisor of a process decides whether starting it again can help.
"""

import traceback
from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """Codes of `sysexits.h` where one fits; 130 is the shells' code for Ctrl-C."""

    OK = 0
    FAILED = 1  # the run, or the command itself
    USAGE = 2  # wrong flags
    NO_BROKER = 3  # no broker can be reached
    NO_WORKER = 69  # no worker is there for some of the stages
    SAVED = 75  # stopped with its work saved: starting it again resumes it
    REFUSED = 78  # the plan cannot work: starting it again does not help
    INTERRUPTED = 130  # stopped with nothing saved


class StagelineError(Exception):
    """An expected error. Its text is written for the user; a command that it ends exits with `exit_code`."""

    exit_code: int = ExitCode.FAILED


class StageError(StagelineError):
    """A stage was asked for something it cannot do."""


class GradientMismatch(StageError):
    """The gradient given to `backward` does not match what the stage sent."""


class LossNotScalar(StageError):
    """The loss function returned something other than one number."""


class ForeignState(StageError):
    """The state given to `restore` is of another stage."""


def describe_error(error: BaseException) -> str:
    """`ValueError: no such file (data.py, line 12)`: an exception of the user's code, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
