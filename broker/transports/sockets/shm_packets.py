"""The content of a connection, one packet at a time (SOCK_SEQPACKET): a byte that says its kind, and its content.

    producer -> consumer   MESSAGE   lengths and bytes of a message's frames
                           MEMORY    the size of shared memory, whose descriptor comes with the packet
                           PLACE     where in that memory lengths and bytes of a message's frames are
                           REPLY     a `RetentionReply`, packed
    consumer -> producer   REQUEST   a `CreditRequest`, packed
                           COPIED    how many messages have been copied out of shared memory, since the connection began

Both ends are processes of one user on one machine: numbers are in its own byte order.

The memory that the two ends of a connection share has no name: it is gone when both are. The producer places messages
in it one after the other, and begins again at the front when there is room:

    0 ── free ── oldest │ ... │ newest ── free ── size          newest │ ── free ── oldest │ ... │ ── free
"""

import fcntl
import mmap
import os
import socket as sockets
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache

from stageline.broker.codec.message import Frame
from stageline.broker.errors import BadMessage

MESSAGE, MEMORY, PLACE, REPLY, REQUEST, COPIED = range(1, 7)

NUMBER = struct.Struct("=BQ")  # of MEMORY and COPIED: the kind, and a number
RANGE = struct.Struct("=BQQ")  # of PLACE: the kind, the offset of the first byte, and how many there are
LARGEST = 2**15  # bytes of a packet; longer messages go through shared memory

_COUNT = struct.Struct("=H")
_TWO = struct.Struct("=H2Q")
LEAST = 2**20  # bytes
MESSAGES = 4  # of the largest so far that there is room for
_CREDENTIALS = struct.Struct("3i")  # pid, user, group


def preamble(frames: Sequence[Frame]) -> bytes:
    """Return the beginning of a message, before its frames: their number, u16, and the length of each, u64."""
    if len(frames) == 2:  # those of one tensor: nearly all
        return _TWO.pack(2, len(frames[0]), len(frames[1]))
    return _lengths(len(frames)).pack(len(frames), *map(len, frames))


def split(content: memoryview) -> list[Frame]:
    """The frames of a message. Raises `BadMessage` unless their lengths are those of `content`."""
    size = len(content)
    if size >= _TWO.size:
        count, header, tensor = _TWO.unpack_from(content)
        if count == 2 and _TWO.size + header + tensor == size:
            end = _TWO.size + header
            return [content[_TWO.size : end], content[end:]]
    if size < _COUNT.size:
        raise BadMessage(f"a message of {len(content)} bytes, which is too short for one")
    layout = _lengths(_COUNT.unpack_from(content)[0])
    if layout.size > len(content) or layout.size == _COUNT.size:
        raise BadMessage(f"a message of {len(content)} bytes cannot have the frames that it announces")
    frames: list[Frame] = []
    end = layout.size
    for length in layout.unpack_from(content)[1:]:
        begin, end = end, end + length
        frames.append(content[begin:end])
    if end != len(content):
        raise BadMessage(f"a message of {len(content)} bytes announces frames of {end - layout.size}")
    return frames


@lru_cache(maxsize=64)
def _lengths(frames: int) -> struct.Struct:
    return struct.Struct(f"=H{frames}Q")


class Places:
    """Decides where in `size` bytes a message lies. They are freed in the order in which they were taken."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._taken: deque[tuple[int, int]] = deque()  # from and to which byte, the oldest first

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, size: int) -> int | None:
        """Return the place of a message of `size` bytes; None if there is no room now."""
        place = self._find(size)
        if place is not None:
            self._taken.append((place, place + size))
        return place

    def take_back(self) -> None:
        """The newest was not needed."""
        self._taken.pop()

    def free(self, count: int) -> None:
        """The oldest `count` are free again."""
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
    """`size` bytes that other processes map too. Needs Linux (memfd_create)."""

    def __init__(self, descriptor: int, size: int) -> None:
        """Raises `OSError` if it cannot be mapped. The descriptor may be closed afterwards."""
        self.size = size
        self._map = mmap.mmap(descriptor, size)
        _prefer_large_pages(self._map)
        self._bytes = memoryview(self._map)

    @classmethod
    def received(cls, descriptor: int, size: int) -> "SharedMemory":
        """Map what a producer shares. Raises `BadMessage` if it cannot be mapped, or is or could become smaller than
        announced: to read what is not there would end the process."""
        try:
            there, seals = os.fstat(descriptor).st_size, fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if not 0 < size <= there or not seals & fcntl.F_SEAL_SHRINK:
                raise BadMessage(f"shared memory of {there} bytes and seals {seals} that was announced with {size}")
            return cls(descriptor, size)
        except OSError as error:
            raise BadMessage(f"shared memory of {size} bytes that cannot be mapped: {error.strerror}") from error

    def write(self, place: int, parts: Iterable[Frame]) -> None:
        for part in parts:
            self._bytes[place : place + len(part)] = part
            place += len(part)

    def read(self, place: int, size: int) -> memoryview:
        """A view, of use until `close`. Raises `BadMessage` if there are no such bytes."""
        if place + size > self.size:
            raise BadMessage(f"bytes {place} to {place + size} of shared memory that has {self.size}")
        return self._bytes[place : place + size]

    def close(self) -> None:
        """Unmap the memory, at once or when the last view is gone."""
        self._bytes.release()
        with suppress(BufferError):
            self._map.close()


def _prefer_large_pages(memory: mmap.mmap) -> None:
    """Large messages are copied faster through pages of 2 MB, where the system has them (its shmem_enabled)."""
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)


def new_descriptor(size: int) -> int:
    """Return the descriptor of `size` bytes of memory without a name, which are taken when they are first written to.
    It can never become smaller, so that the other end may trust its size. Raises `OSError`."""
    descriptor = os.memfd_create("stageline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def user_of(socket: sockets.socket) -> int:
    """The user of the process that has connected; of one that listens, at the time at which it began to (unix(7))."""
    _, user, _ = _CREDENTIALS.unpack(socket.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


def is_trusted(user: int) -> bool:
    """Return True if messages are exchanged with processes of `user`: this process's own, and root."""
    return user in (os.geteuid(), 0)
