"""The process that `launch/children.py` keeps ready: it loads what a worker needs, then waits for its command."""

import os
import sys

import click
import msgspec

from stageline.workers.launch.children import PreparedCommand
from stageline.workers.process.worker_process import warm_up_device

from .app import run, stageline


def main() -> int:
    """Runs the command that arrives on standard input; returns its exit code, 0 if none arrives."""
    stageline.get_command(click.Context(stageline), "worker")  # imports it
    warm_up_device("cpu")
    line = sys.stdin.buffer.read()
    if not line:
        return 0
    command = msgspec.json.decode(line, type=PreparedCommand)
    with open(command.log, "ab") as log, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    return run(command.arguments)


if __name__ == "__main__":
    sys.exit(main())
