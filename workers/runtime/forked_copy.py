"""End of a copy of this process that the user's code has forked, when it returns from that code into stageline.

A copy has this process's sockets, to the same workers. If it went on, each of both would miss the messages that the
other has read, and the run would stand still.
"""

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import NoReturn, ParamSpec, TypeVar

from stageline.pipeline.code_lines import CodeLine, innermost, stack_of
from stageline.pipeline.errors import ExitCode, cause_of

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_forked_in: dict[int, CodeLine] = {}  # the user's line that has forked this process, by the pid that it was run in


def without_copies(call: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return `call`, which runs the user's code, so that a process that is forked in it ends instead of returning."""

    @wraps(call)
    def called(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
        process = os.getpid()
        try:
            result = call(*args, **options)
        except BaseException as error:
            if os.getpid() != process:
                end_copy(process, error)
            raise
        if os.getpid() != process:
            end_copy(process)
        return result

    return called


def end_copy(parent: int, error: BaseException | None = None) -> NoReturn:
    """End this process, a copy, and say which line has forked it, or which exception it has raised.

    Args:
        parent: Pid of the process that goes on with the run.
        error: The exception of the user's code in the copy, or one with that as its cause; None if the code returned.
    """
    cause = None if error is None else cause_of(error)
    match error if cause is None else cause:
        case None:
            where = f" in {_forked_in[parent]}" if parent in _forked_in else ""
            _say(
                f"stageline: pid {os.getpid()}, which was forked from pid {parent}{where}, has come back from the "
                f"user's code and was ended: pid {parent} alone goes on with the run. End it with os._exit there"
            )
            os._exit(ExitCode.OK)
        case SystemExit(code=None):
            os._exit(ExitCode.OK)
        case SystemExit(code=int(status)):
            os._exit(status & 0xFF)
        case raised:
            _say("".join(traceback.format_exception(raised)))
            os._exit(ExitCode.FAILED)


def _say(text: str) -> None:
    with suppress(OSError, ValueError):  # there is no stderr
        print(text, file=sys.stderr, flush=True)


def _note_place() -> None:
    line = innermost(stack_of(sys._getframe(1)))
    _forked_in.clear()  # of the process that has forked this one
    if line is not None:
        _forked_in[os.getppid()] = line


os.register_at_fork(after_in_child=_note_place)
