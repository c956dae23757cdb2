"""Memory that a producer shares with one consumer. It has no name: it is gone when both ends are.

The producer places messages in it one after the other, and begins again at the front when there is room:

    0 ── free ── oldest │ ... │ newest ── free ── size          newest │ ── free ── oldest │ ... │ ── free
"""

import fcntl
import mmap
import os
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

from stageline.broker.codec.message import Frame
from stageline.broker.errors import BadMessage


class Places:
    """Places of messages in `size` bytes of memory, which are freed in the order in which they were taken."""

    def __init__(self, size: int) -> None:
        """Begin with `size` free bytes."""
        self.size = size
        self._taken: deque[tuple[int, int]] = deque()  # from and to which byte, the oldest first

    def __len__(self) -> int:
        """Return the number of places that are taken."""
        return len(self._taken)

    def take(self, size: int) -> int | None:
        """Return the place of a message of `size` bytes; None if there is no room now."""
        place = self._find(size)
        if place is not None:
            self._taken.append((place, place + size))
        return place

    def take_back(self) -> None:
        """Free the newest place again, which was not needed."""
        self._taken.pop()

    def free(self, count: int) -> None:
        """Free the oldest `count` places."""
        for _ in range(count):
            self._taken.popleft()

    def _find(self, size: int) -> int | None:
        if not self._taken:
            return 0 if size <= self.size else None  # at the front again: that memory is still in the caches
        (oldest, _), (newest, end) = self._taken[0], self._taken[-1]
        if newest < oldest:
            return end if end + size <= oldest else None
        if end + size <= self.size:
            return end
        return 0 if size <= oldest else None


class SharedMemory:
    """Memory of `size` bytes that other processes map too. Needs Linux (memfd_create)."""

    def __init__(self, descriptor: int, size: int) -> None:
        """Map the memory of `descriptor`, which may be closed afterwards. Raises `OSError` if that fails."""
        self.size = size
        self._map = mmap.mmap(descriptor, size)
        _prefer_large_pages(self._map)
        self._bytes = memoryview(self._map)

    @classmethod
    def received(cls, descriptor: int, size: int) -> "SharedMemory":
        """Map memory that a producer shares.

        Raises `BadMessage` if it cannot be mapped, or is or could become smaller than announced: to read what is not
        there would end the process.
        """
        try:
            there, seals = os.fstat(descriptor).st_size, fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if not 0 < size <= there or not seals & fcntl.F_SEAL_SHRINK:
                raise BadMessage(f"shared memory of {there} bytes and seals {seals} that was announced with {size}")
            return cls(descriptor, size)
        except OSError as error:
            raise BadMessage(f"shared memory of {size} bytes that cannot be mapped: {error.strerror}") from error

    def write(self, place: int, parts: Iterable[Frame]) -> None:
        """Write `parts` one after another from byte `place` on."""
        for part in parts:
            self._bytes[place : place + len(part)] = part
            place += len(part)

    def read(self, place: int, size: int) -> memoryview:
        """Return a view that is valid until `close`. Raises `BadMessage` if there are no such bytes."""
        if place + size > self.size:
            raise BadMessage(f"bytes {place} to {place + size} of shared memory that has {self.size}")
        return self._bytes[place : place + size]

    def close(self) -> None:
        """Unmap the memory, at once or when the last view is gone."""
        self._bytes.release()
        with suppress(BufferError):
            self._map.close()


def _prefer_large_pages(memory: mmap.mmap) -> None:
    """Ask for pages of 2 MB, where the system has them (its shmem_enabled): large messages are copied faster."""
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)


def new_descriptor(size: int) -> int:
    """Return the descriptor of `size` bytes of memory without a name, which are taken when they are first written to.

    The memory can never become smaller, so that the other end may trust its size. Raises `OSError`.
    """
    descriptor = os.memfd_create("stageline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
