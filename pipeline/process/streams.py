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
    """Comes before another file or a socket gets the number of a standard stream that this process lacks."""
    for fd in range(_STDERR + 1):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number, which is `fd`
    if sys.stdout is None:
        sys.stdout = sys.__stdout__ = LossyStream(_STDOUT)  # type: ignore[misc]
    if sys.stderr is sys.__stderr__:
        sys.stderr = sys.__stderr__ = _lossy(_STDERR, sys.stderr)  # type: ignore[misc]


def lose_output() -> None:
    """From now on, what stdout does not take is lost. A stream that something else has put in its place stays."""
    if sys.stdout is sys.__stdout__:
        sys.stdout = sys.__stdout__ = _lossy(_STDOUT, sys.stdout)  # type: ignore[misc]


def lost_output() -> OSError | None:
    """Returns None if nothing was lost, or if `lose_output` was not called."""
    return sys.stdout.lost if isinstance(sys.stdout, LossyStream) else None


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
        """Returns True."""
        return True

    def fileno(self) -> int:
        """Returns the descriptor."""
        return self._fd

    def isatty(self) -> bool:
        """Returns True for a terminal."""
        return os.isatty(self._fd)

    def write(self, data: Any) -> int:
        """Writes some of `data`, or loses all of it; returns how many bytes."""
        try:
            return os.write(self._fd, data)
        except BlockingIOError:  # another process has made the file non-blocking
            select.select([], [self._fd], [])
            return self.write(data)
        except OSError as error:
            self.lost = self.lost or error
            return memoryview(data).nbytes
