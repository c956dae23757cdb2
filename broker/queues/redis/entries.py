"""One queue as it lies in Redis: its keys, and the ids and fields of its entries.

    stageline:{RUN}:layout            string   "1 M": the version of all this, and how many microbatches a step has
    stageline:{RUN}:forward-1         stream   the messages to stage 1 that may still be needed
        id     NUMBER-PLACE                    message NUMBER (`pipeline.numbering`), its entries counted from 1
        t      milliseconds since 1970         when it was added
        d      bytes                           of the message's tensors, one after another, as often as there are pieces
        h      header                          in the last entry of a message, and only there
    stageline:{RUN}:forward-1:kept    stream   one entry: the newest announcement of its producer
        id     INCARNATION-SERIAL              the server refuses that of a replaced worker
        says   FIRST SENT                      the oldest message it still has; all before SENT are in the stream
        check  CRC-32                          of the id and what it says
    stageline:{RUN}:forward-1:taken   stream   one entry: the newest announcement of its consumer, likewise
        says   TAKEN CREDIT MISSING            all before TAKEN are taken, those before CREDIT may be added, and
                                               MISSING is not where it should be (-1: nothing is)

Ids come from the place in the run, so that a message that is added twice is one message. The entries of a message are
added together or not at all. Nothing is trimmed by length, only by number. `{RUN}` keeps the keys of a run on one node.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from stageline.broker.codec.message import Frame
from stageline.broker.errors import BadMessage
from stageline.broker.network.redis_connection import Command
from stageline.broker.queues.base import QueueKey

LAYOUT = 1
PIECE = 2**20  # bytes of tensors in an entry; larger and smaller ones are slower (measured, 64 KiB to 16 MiB)


class EntryId(NamedTuple):
    """`number-place`: of a message's entry, or incarnation and serial of an announcement."""

    number: int
    place: int

    def __bytes__(self) -> bytes:
        return b"%d-%d" % self


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """Part of a message; the last part has its header."""

    id: EntryId
    milliseconds: int
    data: tuple[bytes, ...]
    header: bytes | None


class Keys:
    """The keys of queue `key` of `run`."""

    __slots__ = ("entries", "kept", "taken")

    def __init__(self, run: str, key: QueueKey) -> None:
        name = f"{prefix(run)}{key}"
        self.entries = name.encode()
        self.kept = f"{name}:kept".encode()
        self.taken = f"{name}:taken".encode()


def prefix(run: str) -> str:
    """All keys of a run begin with it."""
    return f"stageline:{{{run}}}:"


def layout_key(run: str) -> bytes:
    return f"{prefix(run)}layout".encode()


def layout_value(microbatches: int) -> bytes:
    return b"%d %d" % (LAYOUT, microbatches)


def additions(key: bytes, number: int, frames: Sequence[Frame], milliseconds: int) -> list[Command]:
    """The commands that add message `number` to a stream that exists; to one that does not, they add nothing."""
    commands = []
    parts = _parts(frames[1:])
    for place, pieces in enumerate(parts, start=1):
        fields: list[bytes | memoryview] = [b"t", b"%d" % milliseconds]
        for piece in pieces:
            fields += [b"d", piece]
        if place == len(parts):
            fields += [b"h", frames[0]]
        commands.append((b"XADD", key, b"NOMKSTREAM", bytes(EntryId(number, place)), *fields))
    return commands


def creating(command: Command) -> Command:
    """The same addition, which creates the stream if it does not exist."""
    return command[:2] + command[3:]


def read_entry(raw: Any) -> StreamEntry:
    """Raises `BadMessage` for an entry that is malformed."""
    try:
        id_text, [_, time, *fields] = raw
        header = fields[-1] if fields[-2:-1] == [b"h"] else None
        data = tuple(fields[1 : None if header is None else -2 : 2])
        return StreamEntry(read_id(id_text), int(time), data, header)
    except (TypeError, ValueError) as error:
        raise BadMessage(f"an entry of a stream is not part of a message: {error}") from error


def read_id(text: bytes) -> EntryId:
    number, _, place = text.partition(b"-")
    return EntryId(int(number), int(place))


def pour(data: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
    """Fills the buffers, one after another, with the data. Raises `BadMessage` if it is too much or too little."""
    if sum(map(len, data)) != sum(buffer.nbytes for buffer in buffers):
        raise BadMessage(f"{sum(map(len, data))} bytes came for tensors of {sum(b.nbytes for b in buffers)} bytes")
    rest = [buffer for buffer in reversed(buffers) if buffer.nbytes]
    for piece in data:
        content = memoryview(piece)
        while content:
            buffer = rest.pop()
            count = min(len(content), len(buffer))
            buffer[:count] = content[:count]
            content = content[count:]
            if count < len(buffer):
                rest.append(buffer[count:])


def _parts(frames: Sequence[Frame]) -> list[list[memoryview]]:
    """The frames' bytes in pieces, those of one entry together."""
    parts: list[list[memoryview]] = [[]]
    room = PIECE
    for frame in frames:
        content = memoryview(frame)
        while content:
            if not room:
                parts.append([])
                room = PIECE
            piece, content = content[:room], content[room:]
            parts[-1].append(piece)
            room -= len(piece)
    return parts
