"""The root of all errors that stageline expects, and what can go wrong when a stage computes."""

from typing import ClassVar

from .exit_code import ExitCode


class StagelineError(Exception):
    """Something that is expected to go wrong: its text is a sentence for the user, and a command that it ends exits
    with `exit_code`."""

    exit_code: ClassVar[ExitCode] = ExitCode.FAILED


class StageError(StagelineError):
    """A stage was asked for something it cannot do."""


class GradientMismatch(StageError):
    """The gradient handed to `backward` is not one with respect to what the stage sent."""


class LossNotScalar(StageError):
    """The loss function returned something other than one number."""


class ForeignState(StageError):
    """The state handed to `restore` is not one of this stage."""
