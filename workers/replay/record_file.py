"""One file of recorded messages: those that a stage took in full, those that it gave as headers only.

    entry: "SLRE" | direction, u8 | number of frames, u24 | CRC-32 | bytes of each frame, u64 ... | CRC-32 | the frames
                                                                                       (little-endian)
The frames are a message's as they travel: its header has a checksum of its own and one for each tensor, so a header
alone tells whether another message has the same bits. A killed writer leaves a last entry that is cut off.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO

from stageline.broker.codec.checksum import crc32
from stageline.broker.codec.message import Frame, Header, Message, decode, read_header
from stageline.broker.errors import BadMessage, ForeignMessage
from stageline.pipeline.errors import StagelineError

MAGIC = b"SLRE"

_START = struct.Struct("<4sB3s")
_SIZE = struct.Struct("<Q")
_CRC = struct.Struct("<I")


class RecordDamaged(StagelineError):
    """A file of recorded messages is not what was written; the text names the file, the place and what is wrong."""


class Direction(IntEnum):
    """Whether the stage took the message or gave it."""

    TAKEN = 0  # an input: the message in full
    GIVEN = 1  # a result: the header alone


@dataclass(frozen=True, slots=True)
class RecordedMessage:
    """One message in `file`: its frames begin at byte `offset` and have these `sizes`."""

    direction: Direction
    header: Header
    file: Path
    offset: int
    sizes: tuple[int, ...]

    def load(self) -> Message:
        """The message, with its tensors. Raises `RecordDamaged`."""
        try:
            with self.file.open("rb") as file:
                file.seek(self.offset)
                return decode([file.read(size) for size in self.sizes])
        except (OSError, BadMessage, ForeignMessage) as error:
            raise RecordDamaged(f"{self.file}, byte {self.offset}: {error}") from error


def write_entry(file: BinaryIO, direction: Direction, frames: Sequence[Frame]) -> None:
    """Appends a message and flushes it to the system, so that it survives the process. Raises `OSError`."""
    start = _START.pack(MAGIC, direction, len(frames).to_bytes(3, "little"))
    sizes = b"".join(_SIZE.pack(memoryview(frame).nbytes) for frame in frames)
    file.write(start + _crc(start) + sizes + _crc(sizes))
    file.writelines(frames)
    file.flush()


def read_entries(path: Path) -> Iterator[RecordedMessage]:
    """All entries of a file in the order in which they were written, without their tensors; one that is cut off ends
    the list. Raises `RecordDamaged`."""
    try:
        with path.open("rb") as file:
            length = os.fstat(file.fileno()).st_size
            while (entry := _entry(file, path, length)) is not None:
                yield entry
    except (OSError, BadMessage, ForeignMessage) as error:
        raise RecordDamaged(f"{path}: {error}") from error


def _entry(file: BinaryIO, path: Path, length: int) -> RecordedMessage | None:
    """The entry that begins here, None if it is not there as a whole."""
    place = file.tell()
    start = _checked(file, path, _START.size)
    if start is None:
        return None
    magic, direction, count = _START.unpack(start)
    sizes = _checked(file, path, _SIZE.size * int.from_bytes(count, "little"))
    if sizes is None:
        return None
    if magic != MAGIC or direction not in list(Direction) or not sizes:
        raise RecordDamaged(f"{path}, byte {place}: this is no entry of ours")
    each = tuple(size for (size,) in _SIZE.iter_unpack(sizes))
    offset = file.tell()
    if offset + sum(each) > length:
        return None
    header = read_header(file.read(each[0]))
    file.seek(offset + sum(each))
    return RecordedMessage(Direction(direction), header, path, offset, each)


def _checked(file: BinaryIO, path: Path, size: int) -> bytes | None:
    """The next `size` bytes, which their checksum follows; None if the file ends before."""
    place, found = file.tell(), file.read(size + _CRC.size)
    if len(found) < size + _CRC.size:
        return None
    if _crc(found[:size]) != found[size:]:
        raise RecordDamaged(f"{path}, byte {place}: the file is damaged, a CRC-32 does not match")
    return found[:size]


def _crc(data: bytes) -> bytes:
    return _CRC.pack(crc32(data))
