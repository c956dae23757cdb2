"""Base of all errors that stageline expects, the exit codes they lead to, and the errors of a stage's computation.

By its exit code the starter of a process decides whether starting it again can help: see `exit_codes.py`.
"""

import re
import signal
import traceback
from enum import IntEnum

from .code_lines import raised_at
from .printable import bounded

LONGEST_TEXT = 4000  # characters of an exception's text: escaped, they leave room for its place in what is shown

_CODE = re.compile(r" \[SL\d{3}\]")  # the code of an error, as messages show it

# Python's own attributes: a user's class may have attributes of the same names, which raise.
_TRACEBACK, _CAUSE = BaseException.__dict__["__traceback__"], BaseException.__dict__["__cause__"]
_NAME = type.__dict__["__name__"]


class ExitCode(IntEnum):
    """Exit code of a process: one of `sysexits.h` where it fits; 130 is the shells' code for Ctrl-C."""

    OK = 0
    FAILED = 1  # the run, or the command itself
    USAGE = 2  # wrong flags
    NO_BROKER = 3  # no broker can be reached
    NO_WORKER = 69  # no worker is there for some of the stages
    SAVED = 75  # stopped with its work saved: starting it again resumes it
    LEFT = 76  # a worker that has left on notice: the run goes on without it
    NOT_ADMITTED = 77  # the broker does not take this machine's key, or the line that it was given
    REFUSED = 78  # the plan cannot work: starting it again does not help
    INTERRUPTED = 130  # stopped with nothing saved


def documented(code: int) -> ExitCode:
    """Return the exit code for `code`, which was received: the same, or `FAILED` if `ExitCode` lacks it."""
    return ExitCode(code) if code in list(ExitCode) else ExitCode.FAILED


def failure_code(code: int) -> ExitCode:
    """Return the exit code of a process that has failed, from the `code` received: never 0."""
    return documented(code) if code else ExitCode.FAILED


class StagelineError(Exception):
    """Error that stageline expects. Its text is written for the user; a command that it ends exits with `exit_code`.

    `str` of the error ends with its `error_code`, as in `[SL101]`. A text that quotes another error's keeps that code,
    which is nearer to the cause, and gets no second one: so a code travels with the text, also to other processes. The
    docstrings of the classes that have a code are the reference of errors.
    """

    error_code: str = ""
    exit_code: int = ExitCode.FAILED

    def __str__(self) -> str:
        """Return the text with the code at its end."""
        return self.coded(super().__str__())

    @classmethod
    def coded(cls, text: str) -> str:
        """Return `text` with the class's code at its end, unchanged if there is none or `text` has one."""
        return f"{text} [{cls.error_code}]" if cls.error_code and not _CODE.search(text) else text

    def __reduce__(self) -> tuple[object, ...]:
        """Return what pickles the error unchanged, whatever its constructor takes.

        A user's pool of processes may hand the error on.
        """
        return _error, (type(self), self.args), self.__dict__


def _error(kind: type[StagelineError], args: tuple[object, ...]) -> StagelineError:
    return kind.__new__(kind, *args)


class ModelRefused(StagelineError):
    """Error that the model, data, loss, optimizer or cut of a plan cannot be used.

    The text may be given in `parts`: settings of the plan among them are told to a script's user in words of a script.

    Mend: Change what the message names. docs/guides/models.md says which models can be cut; `stageline plan` tries it
    without a run.

    Example: model.cut = [5]: 5 is out of range. The model has 5 layers, so a cut is before layer 1 to 4.
    """

    error_code = "SL201"
    exit_code = ExitCode.REFUSED

    def __init__(self, *parts: object) -> None:
        """Join `parts` to the text, each as `str` gives it."""
        super().__init__("".join(map(str, parts)))
        self.parts = parts


class Bug(StagelineError):
    """Error that stageline itself did not expect: a bug in stageline.

    Mend: Report it with the traceback and the logs in the run's folder. The run can be resumed.

    Example: a bug in stageline: KeyError: 3
    """

    error_code = "SL900"

    def __init__(self, error: BaseException) -> None:
        """Describe the unexpected `error`."""
        super().__init__(f"a bug in stageline: {type(error).__name__}: {error}")


class DataError(StagelineError, ValueError):
    """Error that the data source returned something that cannot be cut into microbatches.

    Mend: Let every batch have the rows, shapes and dtypes that the message expects; docs/guides/data.md has the form.

    Example: the data source's batch(12): no rows
    """

    error_code = "SL202"
    exit_code = ExitCode.REFUSED


class StageError(StagelineError):
    """Error that a stage was asked for something it cannot do.

    Mend: Do what the message says. A script that uses `Stage` itself calls `forward`, `backward` and `update` in the
    order of a step.

    Example: stage 1 keeps no averages of its weights: set ema_decay
    """

    error_code = "SL207"


class GradientMismatch(StageError):
    """Error that a gradient which arrived does not match what the stage sent.

    Mend: In a script that uses `Stage` itself, give `backward` the gradient of that output. Report it if a run shows
    it.

    Example: stage 1 got float32 [2] to clip by; expected one number
    """

    error_code = "SL903"


class LossNotScalar(StageError):
    """Error that the loss function returned something other than one number.

    Mend: Return the mean over rows: use `reduction="mean"`, or take `mean()` of the result.

    Example: the loss must be one number (a 0-dimensional tensor, the mean over rows); it returned float32 [8].
    """

    error_code = "SL206"


class ForeignState(StageError):
    """Error that a stage cannot go on from a state that was saved for another.

    Mend: Resume with the model, the optimizer and the cut that the state was saved with.

    Example: stage 1 cannot go on from this state: it has other parameters
    """

    error_code = "SL414"


class GroupLost(StageError):
    """Error that a process of a group that computes a stage ended, or takes no part in a computation.

    Mend: See in the log of the worker why that process ended, often for lack of memory. With `recovery.restarts` the
    whole group is started again by itself.

    Example: the group of stage 1 is lost: its process 1 (pid 4711) was killed by SIGKILL
    """

    error_code = "SL209"


def without_code(text: str) -> str:
    """Return a text without the code of an error, for an error that quotes it and helps more by its own code."""
    return _CODE.sub("", text)


def raised_by_user_code(error: BaseException) -> bool:
    """Return True if an exception that came out of a user's code is an error of that code, whatever its class.

    Only a `KeyboardInterrupt` may be Ctrl-C instead, in a process where Python raises it for that: the processes of
    stageline have handlers of their own.
    """
    python_raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return not (issubclass(type(error), KeyboardInterrupt) and python_raises)


def describe_error(error: BaseException) -> str:
    """Return an exception's class and text with the user's line that it is from, even if a library has raised it there.

    Example: `ValueError: no such file (/home/anna/net/data.py, line 12, in batches)`.
    """
    line = raised_at(_TRACEBACK.__get__(error))
    place = f" ({line.place}, in {line.function})" if line else ""
    return f"{error_text(error)}{place}"


def error_text(error: BaseException) -> str:
    """Return an exception's class and text, `ValueError: no such file`; only the class if the text is empty.

    A text that the user's class fails to give is replaced by the reason. A long text is cut, and control characters are
    escaped.
    """
    text = bounded(own_text(error), LONGEST_TEXT)
    shown = "".join(sign if sign.isprintable() or sign in "\n\t" else repr(sign)[1:-1] for sign in text)
    return f"{class_name(error)}: {shown}" if shown else class_name(error)


def class_name(error: BaseException) -> str:
    """Return the name of an exception's class, even if a metaclass of the user's hides it."""
    name: str = _NAME.__get__(type(error))
    return name


def traceback_text(error: BaseException) -> str:
    """Return Python's traceback of an exception, or its stack and text if the user's class prevents that."""
    stack = _TRACEBACK.__get__(error)
    try:
        lines = traceback.format_exception(type(error), error, stack)
    except BaseException as other:  # user code may raise anything
        if not raised_by_user_code(other):
            raise
        lines = [*traceback.format_tb(stack), error_text(error)]
    return "".join(lines).rstrip()


def cause_of(error: BaseException) -> BaseException | None:
    """Return the exception that `error` was raised from, even if its class hides it; None if there is none."""
    cause: BaseException | None = _CAUSE.__get__(error)
    return cause


def own_text(error: BaseException) -> str:
    """Return the exception's text as a plain `str`, or why there is none.

    The exception's class may be the user's, and do anything.
    """
    try:
        text = _text_of_syntax_error(error) if isinstance(error, SyntaxError) else str(error)
        return str.__str__(text)  # not an instance of a subclass, whose methods may raise as well
    except BaseException as other:
        if not raised_by_user_code(other):
            raise
        return f"(its text cannot be made: {class_name(other)})"


def _text_of_syntax_error(error: SyntaxError) -> str:
    """Return the text with the whole path of the file: Python's own text has the file without its folder."""
    return f"{error.msg} ({error.filename}, line {error.lineno})" if error.filename and error.lineno else str(error)
