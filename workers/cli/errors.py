"""How a command fails: with a message for the user on stderr, and an exit code that tells what can help."""

import difflib
import errno
from collections.abc import Iterable

from stageline.pipeline.errors import StagelineError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class CommandFailed(StagelineError):
    """Ends the command with a message for the user, and `exit_code`."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def message_of(error: Exception) -> str:
    """What the user reads about an expected error; an `OSError` names the file or the disk that caused it."""
    if not isinstance(error, OSError) or isinstance(error, StagelineError):
        return str(error)
    reason = error.strerror or str(error)
    if error.filename is not None:
        return f"cannot use {error.filename}: {reason}"
    if error.errno in _FULL:  # the system does not say of which file
        return f"cannot write to stdout, or to the run's folder: {reason}"
    return reason


def suggestion(word: str, known: Iterable[str]) -> str:
    """Continues a message about an unknown word: the nearest known one, or all of them."""
    words = list(known)
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(words)}"
