"""How a command fails: with a message for the user on stderr, and an exit code that tells what can help."""

import difflib
import errno
import re
from collections.abc import Iterable

from stageline.pipeline.errors import StagelineError
from stageline.pipeline.plan.errors import PlanError, PlanRefused

_LINE = re.compile(r"(?!--|STAGELINE_)(.+?)(?::(\d+))?", re.DOTALL)  # the place of a fault in a file
_NO_FOLDER = "No usable temporary directory"  # as the module tempfile says it
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class CommandFailed(StagelineError):
    """Ends the command with a message for the user, and `exit_code`. `answered`: its result has been printed."""

    def __init__(self, message: str, exit_code: int, *, answered: bool = False) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.answered = answered


def message_of(error: Exception) -> str:
    """Return what the user reads about an expected error; an `OSError` names the file or the disk that caused it."""
    if not isinstance(error, OSError) or isinstance(error, StagelineError):
        return str(error)
    reason = error.strerror or str(error)
    if error.filename is not None:
        return f"cannot use {error.filename}: {reason}"
    if error.errno in _FULL:  # the system does not say of which file
        return f"cannot write to stdout, or to the run's folder: {reason}"
    if reason.startswith(_NO_FOLDER):
        return f"{reason}. Sockets and files of a process need one: make /tmp writable, or name a folder in TMPDIR"
    return reason


def as_facts(error: Exception, message: str, exit_code: int) -> dict[str, object]:
    """The error as schema error/1, which `--json` prints in place of a result.

    `errors` has everything that is wrong with a plan, each with its place; it is empty for any other error.
    """
    errors = [_plan_fault(each) for each in error.errors] if isinstance(error, PlanRefused) else []
    return {"schema": "error/1", "exit_code": int(exit_code), "message": message, "errors": errors}


def _plan_fault(fault: PlanError) -> dict[str, object]:
    """`file` and `line` are None for what no file says: `where` is then "--set", or a variable of the environment."""
    file, line = _LINE.fullmatch(fault.where), None
    if file is not None:
        line = int(file[2]) if file[2] else None
    return {
        "where": fault.where,
        "file": None if file is None else file[1],
        "line": line,
        "key": fault.key,
        "value": fault.value,
        "message": fault.reason,
    }


def suggestion(word: str, known: Iterable[str]) -> str:
    """Continue a message about an unknown word: the nearest known one, or all of them."""
    words = list(known)
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(words)}"
