"""Tracks of a Perfetto trace, as the few protobuf fields of its TrackEvent that they need.

    trace        (packet)*                                    the file: packets may come in any order of time
    packet       time, sequence, track event                  a sequence is one track here: within it, times rise
    track event  begin or end of a slice, an instant, or a count

Protobuf's wire format is a number for each field, and then a varint, eight bytes, or a length and so many bytes. A name
is sent once in a sequence, and is a number from then on. Fields are numbered in Perfetto's protos/perfetto/trace.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

Note = int | str
BEGIN, END, INSTANT, COUNT = 1, 2, 3, 4  # types of track events
_CLEARED, _CONTINUES = 1, 2  # of a sequence's names: the first packet, and all others


def varint(value: int) -> bytes:
    """Return a number from 0 on in groups of seven bits, the lowest first."""
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def number(place: int, value: int) -> bytes:
    """Return the field `place` with a number from 0 on."""
    return varint(place << 3) + varint(value)


def fixed(place: int, value: int) -> bytes:
    """Return the field `place` with a number of eight bytes."""
    return varint(place << 3 | 1) + struct.pack("<Q", value)


def double(place: int, value: float) -> bytes:
    """Return the field `place` with a floating point number."""
    return varint(place << 3 | 1) + struct.pack("<d", value)


def nested(place: int, content: bytes | str) -> bytes:
    """Return the field `place` with a message or a text."""
    content = content.encode() if isinstance(content, str) else content
    return varint(place << 3 | 2) + varint(len(content)) + content


def packet(*fields: bytes) -> bytes:
    """Return a packet of the trace."""
    return nested(1, b"".join(fields))


def wall_clock(at: int) -> bytes:
    """Return the packet by which times of a trace are those of the wall clock: `at` in nanoseconds since the epoch."""
    boot, real = (nested(1, number(1, clock) + number(2, at)) for clock in (6, 1))
    return packet(nested(6, boot + real), number(10, 1))


def process(uuid: int, name: str) -> bytes:
    """Return the packet that describes a process: a group of tracks, in the order of these numbers."""
    described = number(1, uuid) + nested(6, name)
    return packet(nested(60, number(1, uuid) + nested(3, described)), number(10, uuid))


def thread(uuid: int, of: int, name: str) -> bytes:
    """Return the packet that describes a track of slices of the process `of`."""
    described = number(1, of) + number(2, uuid) + nested(5, name)
    return packet(nested(60, number(1, uuid) + number(5, of) + nested(4, described)), number(10, uuid))


def counter(uuid: int, of: int, name: str) -> bytes:
    """Return the packet that describes a track of counts in the process `of`."""
    return packet(nested(60, number(1, uuid) + number(5, of) + nested(2, name) + nested(8, b"")), number(10, uuid))


@dataclass(frozen=True, slots=True)
class TrackSlice:
    """A slice of a track, or an instant, if it has no end. Times are in nanoseconds since the epoch.

    Attributes:
        start: Its start.
        end: Its end; None of an instant.
        name: Its name.
        notes: Values that belong to it.
        flow: The flow of which it is a part; 0 if it is of none.
        last: True if the flow ends with it.
    """

    start: int
    end: int | None
    name: str
    notes: Mapping[str, Note] = field(default_factory=dict)
    flow: int = 0
    last: bool = False


class SliceTrack:
    """A track of slices that do not overlap, and of instants; it is written in the order of their starts."""

    def __init__(self, uuid: int) -> None:
        """Start an empty track; its number is that of its packet sequence, too."""
        self._uuid = uuid
        self._waiting: list[tuple[int, int, TrackSlice]] = []
        self._count = count()
        self._names: dict[tuple[int, str], int] = {}  # by field of the interned data, and name
        self._at = 0

    def add(self, each: TrackSlice) -> None:
        """Add a slice. Slices come in any order, but none after one was written that begins later."""
        heappush(self._waiting, (each.start, next(self._count), each))

    def written(self, before: int | None = None) -> Iterator[bytes]:
        """Yield the packets of the slices that begin before a time, or of all; they do not wait any longer.

        Clocks of machines are known to about a millisecond: a slice begins at the end of the one before, if not later.
        """
        while self._waiting and (before is None or self._waiting[0][0] < before):
            _, _, each = heappop(self._waiting)
            self._at = max(self._at, each.start)
            if each.end is None:
                yield self._event(INSTANT, each)
            else:
                yield self._event(BEGIN, each)
                self._at = max(self._at + 1, each.end)
                yield self._event(END)

    def _event(self, kind: int, of: TrackSlice | None = None) -> bytes:
        first, new = not self._names, list[bytes]()
        event = number(9, kind) + number(11, self._uuid)
        if of is not None:
            event += number(10, self._named(2, of.name, new))
            for name, value in of.notes.items():
                event += nested(4, number(1, self._named(3, name, new)) + _value(value))
            if of.flow:
                event += fixed(48 if of.last else 47, of.flow)
        return packet(
            number(8, self._at),
            number(10, self._uuid),
            number(13, _CLEARED | _CONTINUES if first else _CONTINUES),
            nested(12, b"".join(new)) if new else b"",
            nested(11, event),
        )

    def _named(self, place: int, name: str, new: list[bytes]) -> int:
        """Return the number of a name; the field that tells it is added to `new` if it was not told yet."""
        known = self._names.get((place, name))
        if known is None:
            known = self._names[place, name] = len(self._names) + 1
            new.append(nested(place, number(1, known) + nested(2, name)))
        return known


class CountTrack:
    """A track of counts, which are set or changed; it is written in the order of time."""

    def __init__(self, uuid: int) -> None:
        """Start at 0; the number of the track is that of its packet sequence, too."""
        self._uuid = uuid
        self._waiting: list[tuple[int, int, float, bool]] = []
        self._count = count()
        self._value = 0.0
        self._at = 0

    def set(self, at: int, value: float) -> None:
        """Set the count at a time."""
        heappush(self._waiting, (at, next(self._count), value, False))

    def change(self, at: int, by: float) -> None:
        """Change the count at a time."""
        heappush(self._waiting, (at, next(self._count), by, True))

    def written(self, before: int | None = None) -> Iterator[bytes]:
        """Yield the packets of the counts before a time, or of all."""
        while self._waiting and (before is None or self._waiting[0][0] < before):
            at, _, value, changes = heappop(self._waiting)
            self._at, self._value = max(self._at, at), self._value + value if changes else value
            event = number(9, COUNT) + number(11, self._uuid) + double(44, self._value)
            yield packet(number(8, self._at), number(10, self._uuid), nested(11, event))


def _value(value: Note) -> bytes:
    return nested(6, value) if isinstance(value, str) else number(4, value)
