"""The standard streams of a process that goes on, whatever becomes of what it prints.

keep_open()      opens those of descriptors 0 to 2 that were closed at the start (`>&-`) on the null device; from then
                 on, what stderr does not take is lost, and raises nothing
lose_output()    the same for stdout, in commands that do more than print
lost_output()    the first error by which something was lost that stdout was to show
"""

import io
import os
import select
import sys
from typing import Any, TextIO

_STDOUT, _STDERR = 1, 2


def keep_open() -> None:
    """Open the standard streams that this process lacks, before a file or a socket gets the number of one."""
    for fd in range(_STDERR + 1):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number, which is `fd`
    if sys.stdout is None:
        put("stdout", LossyStream(_STDOUT))
    if sys.stderr is sys.__stderr__:
        put("stderr", _lossy(_STDERR, sys.stderr))


def lose_output() -> None:
    """Lose what stdout does not take from now on. A stream that something else has put in its place stays."""
    if sys.stdout is sys.__stdout__:
        put("stdout", _lossy(_STDOUT, sys.stdout))


def lost_output() -> OSError | None:
    """Return the first error; None if nothing was lost, or if `lose_output` was not called."""
    return sys.stdout.lost if isinstance(sys.stdout, LossyStream) else None


def put(name: str, stream: TextIO) -> None:
    """Make `stream` the one that Python has for "stdin", "stdout" or "stderr"."""
    for each in (name, f"__{name}__"):
        setattr(sys, each, stream)


def _lossy(fd: int, stream: TextIO | None) -> "LossyStream":
    if isinstance(stream, LossyStream):
        return stream
    return LossyStream(fd) if stream is None else LossyStream(fd, stream.encoding, stream.errors)


class LossyStream(io.TextIOWrapper):
    """Text for descriptor `fd`, which it does not close, written line by line. What cannot be written is lost."""

    def __init__(self, fd: int, encoding: str = "utf-8", errors: str | None = "backslashreplace") -> None:
        self._file = _LossyFile(fd)
        super().__init__(io.BufferedWriter(self._file), encoding, errors, line_buffering=True)

    @property
    def lost(self) -> OSError | None:
        """The first error by which text was lost."""
        return self._file.lost


class _LossyFile(io.RawIOBase):
    """Bytes for descriptor `fd`."""

    def __init__(self, fd: int) -> None:
        self.lost: OSError | None = None
        self._fd = fd

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd

    def isatty(self) -> bool:
        """Return True for a terminal."""
        return os.isatty(self._fd)

    def write(self, data: Any) -> int:
        """Write some of `data`, or lose all of it; return how many bytes."""
        try:
            return os.write(self._fd, data)
        except BlockingIOError:  # another process has made the file non-blocking
            select.select([], [self._fd], [])
            return self.write(data)
        except OSError as error:
            self.lost = self.lost or error
            return memoryview(data).nbytes
