"""How a command fails: a sentence for the user on stderr, and an exit code that says whose turn it is."""

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from stageline.pipeline.errors import StagelineError
from stageline.pipeline.exit_code import ExitCode


class CommandFailed(Exception):
    """Ends the command with a sentence for the user, and `code`."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@contextmanager
def explained() -> Iterator[None]:
    """Turns what is expected to go wrong into a `CommandFailed`; bugs pass."""
    try:
        yield
    except Exception as error:
        if isinstance(error, StagelineError):
            raise CommandFailed(str(error), error.exit_code) from error
        if "zmq" in sys.modules and isinstance(error, sys.modules["zmq"].ZMQError):  # else it cannot be one
            raise CommandFailed(str(error), ExitCode.FAILED) from error
        if isinstance(error, OSError):
            raise CommandFailed(_of_the_system(error), ExitCode.FAILED) from error
        raise


def _of_the_system(error: OSError) -> str:
    reason = error.strerror or str(error)
    if error.filename is not None:
        return f"cannot use {error.filename}: {reason}"
    if error.errno in _FULL:  # the system does not say of which file
        return f"cannot write to stdout, or to the run's folder: {reason}"
    return reason
