"""What travels over a connection, one packet at a time (SOCK_SEQPACKET): a byte that says its kind, and its content.

    producer -> consumer   MESSAGE   lengths and bytes of a message's frames
                           MEMORY    the size of shared memory, whose descriptor comes with the packet
                           PLACE     where in that memory lengths and bytes of a message's frames are
                           REPLY     a `RetentionReply`, packed
    consumer -> producer   REQUEST   a `CreditRequest`, packed
                           COPIED    how many messages have been copied out of shared memory, since the connection began

Both ends are processes of one user on one machine: numbers are in its own byte order.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache

from stageline.broker.codec.message import Frame
from stageline.broker.errors import BadMessage

MESSAGE, MEMORY, PLACE, REPLY, REQUEST, COPIED = range(1, 7)

NUMBER = struct.Struct("=BQ")  # of MEMORY and COPIED: the kind, and a number
RANGE = struct.Struct("=BQQ")  # of PLACE: the kind, the offset of the first byte, and how many there are
LARGEST = 2**15  # bytes of a packet; longer messages go through shared memory

_COUNT = struct.Struct("=H")
_TWO = struct.Struct("=H2Q")


def preamble(frames: Sequence[Frame]) -> bytes:
    """What comes before the frames of a message: their number, u16, and the length of each, u64."""
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
