"""Disk space for retained messages that memory has no room for: files without a name, which end with the process.

Messages are written one after another into files, each of a small part of what may lie on the disk; a file is closed,
and its disk space freed, once none of its messages is needed any more. Since queues forget their oldest messages
first, files empty in turn. Forgotten messages in a file that is still open take disk space, but do not count against
the limit: a worker that waited for that room could wait for ever.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import BinaryIO, NamedTuple

from stageline.broker.codec.message import Frame
from stageline.broker.errors import QueueFull

FILES = 64  # of about equal size, when the disk holds all it may
LARGEST = 2**30  # bytes of one that is written on


@dataclass(slots=True)
class _Segment:
    file: BinaryIO
    size: int = 0
    needed: int = 0  # messages

    def append(self, frames: Sequence[Frame], sizes: tuple[int, ...]) -> "Slot":
        """Write a message behind the last one. Raises `OSError`, and then counts nothing."""
        slot = Slot(self, self.size, sizes)
        _write_all(self.file, self.size, frames)
        self.size += sum(sizes)
        self.needed += 1
        return slot

    def forget(self) -> None:
        """Count one needed message less."""
        self.needed -= 1


@dataclass(frozen=True, slots=True)
class Slot:
    """Place of one message on the disk: from byte `start` of `segment` on, with frames of `sizes` bytes each."""

    segment: _Segment
    start: int
    sizes: tuple[int, ...]


class LoggedFrames(NamedTuple):
    """Frames of a retained message: the first alone of one on the disk that is too large; `sizes` are those of all.

    `piece` reads the bytes between two places of a message on the disk, None of one in memory. It raises `OSError` or
    `ValueError` if the message was forgotten.
    """

    frames: list[Frame]
    on_disk: bool
    sizes: tuple[int, ...]
    piece: Callable[[int, int], bytearray] | None = None


class Spill:
    """Store on the disk for at most `limit` bytes of needed messages; `bytes` is how many it holds now."""

    def __init__(self, limit: int, folder: str | None = None) -> None:
        """Make an empty store, which opens no file before the first message.

        Args:
            limit: Bytes of needed messages that the store takes.
            folder: Folder of the files; None: the system's for temporary files.
        """
        self.bytes = 0
        self._capacity = limit
        self._folder = folder
        self._segments: list[_Segment] = []

    def write(self, frames: Sequence[Frame]) -> Slot:
        """Write the frames of one message and return their place.

        Raises `QueueFull` if the limit is reached or the disk is full.
        """
        sizes = tuple(len(frame) for frame in frames)
        if self.bytes + sum(sizes) > self._capacity:
            raise QueueFull(f"{self.bytes} of {self._capacity} bytes on the disk are used")
        try:
            slot = self._open_segment().append(frames, sizes)
        except OSError as error:
            self._cut_off()
            self._close_unneeded()
            folder = self._folder or tempfile.gettempdir()
            raise QueueFull(f"the disk takes no more in {folder}: {error.strerror}") from error
        self.bytes += sum(sizes)
        return slot

    def read(self, slot: Slot, count: int | None = None) -> list[Frame]:
        """Return the frames that were written at `slot`, or only the first `count` of them."""
        sizes = slot.sizes[:count]
        content = memoryview(_read_all(slot.segment.file, slot.start, sum(sizes)))
        return [content[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]

    def piece(self, slot: Slot, start: int, end: int) -> bytearray:
        """Return the bytes from `start` up to before `end` of the frames at `slot`, one after another.

        Raises `OSError` or `ValueError` if they are not there any more.
        """
        stop = min(end, sum(slot.sizes))
        return _read_all(slot.segment.file, slot.start + start, max(0, stop - start))

    def forget(self, slot: Slot) -> None:
        """Free the place of a message that is not needed any more.

        Its file is closed once none of its messages is needed.
        """
        slot.segment.forget()
        self.bytes -= sum(slot.sizes)
        self._close_unneeded()

    def close(self) -> None:
        """Close all files and forget every message."""
        for segment in self._segments:
            segment.file.close()
        self._segments.clear()
        self.bytes = 0

    def _open_segment(self) -> _Segment:
        if not self._segments or self._segments[-1].size >= min(self._capacity // FILES, LARGEST):
            file = tempfile.TemporaryFile(  # noqa: SIM115  # stays open while a message in it is needed
                prefix="stageline-", dir=self._folder, buffering=0
            )
            self._segments.append(_Segment(file))
        return self._segments[-1]

    def _cut_off(self) -> None:
        """Give back the room of a message that was written in part."""
        for segment in self._segments[-1:]:
            with suppress(OSError):
                os.ftruncate(segment.file.fileno(), segment.size)

    def _close_unneeded(self) -> None:
        for segment in [segment for segment in self._segments if not segment.needed]:
            segment.file.close()
            self._segments.remove(segment)


def _write_all(file: BinaryIO, start: int, frames: Sequence[Frame]) -> None:
    for frame in frames:
        rest = memoryview(frame)
        while rest:
            written = os.pwrite(file.fileno(), rest, start)
            start, rest = start + written, rest[written:]


def _read_all(file: BinaryIO, start: int, size: int) -> bytearray:
    content = bytearray(size)
    rest = memoryview(content)
    while rest:
        count = os.preadv(file.fileno(), [rest], start)
        if not count:
            raise OSError(f"a spilled message ends at byte {start}")
        start, rest = start + count, rest[count:]
    return content
