"""Keeps a process ready that has loaded torch, so that a restarted worker is at work sooner.

train  ──starts──>  python -m stageline.workers.cli.prepared      once the run is running, and again after each use
   └── the worker's arguments, as a line of JSON ──> its standard input; closed without a line: it is not needed
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Self, TextIO

import msgspec

from . import children

Popen = subprocess.Popen[bytes]


class Prefork:
    """A `Spawn` that uses the prepared process for the next worker, if `fill` was called before."""

    def __init__(self) -> None:
        self._ready: Popen | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        ready, self._ready = self._ready, None
        if ready is not None:
            ready.kill()  # it holds nothing
            ready.communicate()

    def __call__(self, arguments: Sequence[str], log: TextIO) -> children.Process:
        ready = self._take() if arguments[0] == "worker" else None
        return children.spawn(arguments, log) if ready is None else _use(ready, arguments, log)

    def fill(self) -> None:
        """Starts a process that will be ready in some seconds, unless there is one."""
        if self._ready is None:
            self._ready = subprocess.Popen(
                [sys.executable, "-P", "-m", "stageline.workers.cli.prepared"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def _take(self) -> Popen | None:
        """The process, even one that is still loading: it is ahead of one that has yet to start."""
        ready, self._ready = self._ready, None
        if ready is None or ready.poll() is None:
            return ready
        ready.communicate()  # it has ended; this closes the pipe to it
        return None


def _use(ready: Popen, arguments: Sequence[str], log: TextIO) -> children.Process:
    order = msgspec.json.encode(PreparedCommand(os.path.abspath(log.name), list(arguments)))
    try:
        with ready.stdin or open(os.devnull, "wb") as line:
            line.write(order)
    except BrokenPipeError:  # it has ended this very moment
        ready.wait()
        return children.spawn(arguments, log)
    return ready


class PreparedCommand(msgspec.Struct, frozen=True):
    """What the process is to run: a command's arguments, and the file that its output is appended to."""

    log: str
    arguments: list[str]
