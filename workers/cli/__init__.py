"""The `stageline` command: parsing and printing. Functions elsewhere in `workers` do the work."""

import sys

from stageline.pipeline.process import streams
from stageline.pipeline.process.signals import Signals, exit_at_once


def main() -> None:
    """Run the command in `sys.argv` and exit with its code.

    Nothing that takes time is imported before signals are handled: until a command has something to clean up, SIGINT
    and SIGTERM end the process at once and quietly, also in the middle of the seconds that importing torch takes.
    SIGUSR1, at which workers tell where they are, ends no command either.
    """
    streams.keep_open()
    Signals(on_first=exit_at_once)
    from stageline.pipeline.process import last_line

    last_line.install()
    from .app import run

    sys.exit(run(sys.argv[1:]))
