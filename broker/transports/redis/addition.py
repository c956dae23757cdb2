"""The command that adds a message to its stream, as it is sent: what is the same for all messages is packed once."""

from collections.abc import Sequence

from stageline.broker.codec.message import Frame
from stageline.broker.transports.redis.units import Command

UNCOPIED = 2**13  # bytes of a frame from which on it is sent without a copy


class Addition:
    """Packs messages of one entry for the stream `key`: what `additions` says of them, in Redis' own protocol.

    `name`: the command without its content.
    """

    def __init__(self, key: bytes) -> None:
        self.name: Command = (b"XADD", key)
        self._create = b"$4\r\nXADD\r\n$%d\r\n%b\r\n" % (len(key), key)
        self._existing = self._create + b"$10\r\nNOMKSTREAM\r\n"

    def pack(
        self, number: int, frames: Sequence[Frame], milliseconds: int, *, create: bool = False
    ) -> Sequence[bytes | memoryview]:
        """The command that adds message `number`; to a stream that does not exist only if it may `create` it."""
        header, *tensors = frames
        pieces = [frame for frame in tensors if len(frame)]
        entry_id, time = b"%d-1" % number, b"%d" % milliseconds
        begin = self._create if create else self._existing
        count = 8 - create + 2 * len(pieces)
        text = b"*%d\r\n%b$%d\r\n%b\r\n$1\r\nt\r\n$%d\r\n%b\r\n" % (
            *(count, begin),
            *(len(entry_id), entry_id),
            *(len(time), time),
        )
        chunks: list[bytes | memoryview] = []
        small: list[bytes | memoryview] = [text]
        for piece in pieces:
            small.append(b"$1\r\nd\r\n$%d\r\n" % len(piece))
            if len(piece) > UNCOPIED:
                chunks += (b"".join(small), piece)
                small = [b"\r\n"]
            else:
                small += (piece, b"\r\n")
        small += (b"$1\r\nh\r\n$%d\r\n" % len(header), header, b"\r\n")
        chunks.append(b"".join(small))
        return chunks
