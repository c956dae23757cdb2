"""The `stageline` command: parsing and printing. What a command does is a function elsewhere in `workers`."""

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130  # Exit.INTERRUPTED, without an import


def main() -> None:
    """Runs the command in `sys.argv` and exits with its code.

    Nothing is imported before signals are taken care of: until a command has something to clean up, SIGINT and SIGTERM
    end the process at once and quietly, also in the middle of the seconds that importing torch takes.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    from .app import run

    sys.exit(run(sys.argv[1:]))


def _leave(number: int, frame: FrameType | None) -> None:
    # Not an exception: it could be swallowed where it happens to come up, in an import or in a model's own code.
    os._exit(INTERRUPTED)
