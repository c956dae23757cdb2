"""A file of rows of one size, in the memory of this process: the system puts on the disk what is written to a row.

Space for all rows is taken when the file is opened: a disk that is full says so then, and not by ending the process in
the middle of a write.
"""

import mmap
import os
from pathlib import Path

import torch


class RowFile:
    """`rows` is uint8 [count, size]; a new file has zeros. Raises `OSError`."""

    def __init__(self, path: Path, count: int, size: int) -> None:
        wanted = max(1, count * size)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            _take_space(self._file, wanted)
            self._memory = mmap.mmap(self._file, wanted)
        except OSError:
            os.close(self._file)
            raise
        self.size = size
        self.rows = torch.frombuffer(self._memory, dtype=torch.uint8)[: count * size].view(count, size)
        self._bytes = memoryview(self._memory)

    def row(self, number: int) -> memoryview:
        """The bytes of a row."""
        return self._bytes[number * self.size : (number + 1) * self.size]

    def sync(self) -> None:
        """When this returns, what was written before survives a power failure. For any thread. Raises `OSError`."""
        os.fsync(self._file)

    def close(self) -> None:
        """The memory stays until no tensor uses it."""
        os.close(self._file)


def _take_space(file: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    if os.fstat(file).st_size != size:
        os.truncate(file, size)
