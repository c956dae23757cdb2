"""The standard streams of a process that goes on even if its output cannot be written.

keep_open()      opens descriptors 0 to 2 that were closed at the start (`>&-`) on the null device; from then on, output
                 that stderr does not take is lost, and raises nothing
lose_output()    does the same for stdout, in commands that do more than print
lost_output()    returns the first error by which output of stdout was lost
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
    """Make stdout lose output that it cannot write, from now on. A stream that replaces Python's own stays."""
    if sys.stdout is sys.__stdout__:
        put("stdout", _lossy(_STDOUT, sys.stdout))


def lost_output() -> OSError | None:
    """Return the first error by which output of stdout was lost.

    Returns None if nothing was lost, or if `lose_output` was not called.
    """
    return sys.stdout.lost if isinstance(sys.stdout, LossyStream) else None


def put(name: str, stream: TextIO) -> None:
    """Make `stream` Python's stream `name`: "stdin", "stdout" or "stderr"."""
    for each in (name, f"__{name}__"):
        setattr(sys, each, stream)


def _lossy(fd: int, stream: TextIO | None) -> "LossyStream":
    if isinstance(stream, LossyStream):
        return stream
    return LossyStream(fd) if stream is None else LossyStream(fd, stream.encoding, stream.errors)


class LossyStream(io.TextIOWrapper):
    """Text stream for a descriptor, written line by line. Output that cannot be written is lost.

    The stream does not close the descriptor.
    """

    def __init__(self, fd: int, encoding: str = "utf-8", errors: str | None = "backslashreplace") -> None:
        """Open the stream.

        Args:
            fd: Descriptor to write to.
            encoding: Text encoding.
            errors: Handling of characters that cannot be encoded, as in `io.TextIOWrapper`.
        """
        self._file = _LossyFile(fd)
        super().__init__(io.BufferedWriter(self._file), encoding, errors, line_buffering=True)

    @property
    def lost(self) -> OSError | None:
        """First error by which text was lost, None if there is none."""
        return self._file.lost


class _LossyFile(io.RawIOBase):
    """Byte stream for descriptor `fd`."""

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
        """Write some of `data`, or lose all of it; return the number of bytes."""
        try:
            return os.write(self._fd, data)
        except BlockingIOError:  # another process has made the file non-blocking
            select.select([], [self._fd], [])
            return self.write(data)
        except OSError as error:
            self.lost = self.lost or error
            return memoryview(data).nbytes
