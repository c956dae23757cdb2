"""The base of all errors that stageline expects, and the errors of a stage's computation."""

import traceback
from pathlib import Path

from .exit_code import ExitCode


class StagelineError(Exception):
    """An expected error. Its text is a sentence for the user; a command that it ends exits with `exit_code`."""

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
