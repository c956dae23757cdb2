"""What the answers of a Redis server announce, checked before a parser makes room for it.

    *3 $5 forward $2 17 *-1        an array of three elements: a string of 5 bytes, ...

hiredis makes a list as long as an array is said to be, before its first element is here: 16 bytes can ask for 34 GB.
"""

import re
from collections.abc import Callable
from typing import Any

from redis.connection import DefaultParser
from redis.exceptions import InvalidResponse

MOST_BYTES = 2**30  # of all answers to what was sent together; the largest of this program's own have about half
MOST_ELEMENTS = 2**25  # of all arrays in them: the losses of 16 million steps, which the broker's store reads at once
LONGEST_LINE = 2**14  # bytes of a line: a length, a number, or the text of an error

_ARRAY, _STRING, _LINES = b"*"[0], b"$"[0], b"+-:"
_SHORT = b"|".join(b"%d\r\n.{%d}" % (size, size) for size in range(40))
# What is small and whole is passed over in one step: one by one, its parts take 3 us more for each message.
_small = re.compile(rb"(?:\*\d{1,5}\r\n|\$(?:" + _SHORT + rb")\r\n|[+:][^\r\n]{0,60}\r\n)*", re.DOTALL).match


class SizeRefused(InvalidResponse):
    """An answer is, or announces, what cannot be the answer to a command of this program."""


class AnnouncedSizes:
    """Follows the bytes of a connection in the protocol RESP 2. Only lengths are looked at; the content of strings is
    passed over."""

    def __init__(self) -> None:
        self._ahead = 0  # bytes that still come of a string
        self._line = b""  # the beginning of a line whose end has not come
        self.begin()

    def begin(self) -> None:
        """All answers to what was sent together are here."""
        self._bytes = self._elements = 0

    def check(self, chunk: bytes | bytearray, count: int) -> None:
        """The first `count` bytes of `chunk` have come. Raises `SizeRefused`."""
        self._add(count)
        if self._line:
            chunk = self._line + chunk[:count]
            count, self._line = len(chunk), b""
        place = self._ahead
        while place < count:
            place = _small(chunk, place, count).end()  # type: ignore[union-attr]  # it matches nothing, too
            end = chunk.find(b"\r\n", place, count)
            if end < 0:
                self._line = self._begun(bytes(chunk[place:count]))
                place = count
            else:
                place = end + 2 + self._announced(chunk[place], chunk[place + 1 : end])
        self._ahead = place - count

    def _announced(self, kind: int, text: bytes | bytearray) -> int:
        """How many bytes come after a line before the next one."""
        if kind == _STRING:
            size = _length(text)
            if size > MOST_BYTES:
                raise SizeRefused(f"it announces a string of {size} bytes; {MOST_BYTES} may come in an answer")
            return size + 2 if size >= 0 else 0
        if kind == _ARRAY:
            self._add_elements(_length(text))
        elif kind not in _LINES:
            raise SizeRefused(f"{bytes([kind]) + text[:32]!r} begins no answer in RESP 2")
        return 0

    def _add(self, count: int) -> None:
        self._bytes += count
        if self._bytes > MOST_BYTES:
            raise SizeRefused(f"more than {MOST_BYTES} bytes come in an answer")

    def _add_elements(self, length: int) -> None:
        self._elements += max(0, length)
        if self._elements > MOST_ELEMENTS:
            raise SizeRefused(f"it announces an array of {length} elements; {MOST_ELEMENTS} may come in an answer")

    def _begun(self, line: bytes) -> bytes:
        if len(line) > LONGEST_LINE:
            raise SizeRefused(f"a line of more than {LONGEST_LINE} bytes comes, {line[:32]!r}...")
        return line


class SizedReader:
    """`reader`, of hiredis, which is only fed what is not too large. `feed` raises `SizeRefused`."""

    def __init__(self, reader: Any) -> None:
        self.gets: Callable[..., Any] = reader.gets
        self.has_data: Callable[[], bool] = reader.has_data
        self._feed: Callable[..., object] = reader.feed
        self._sizes = AnnouncedSizes()
        self.begin = self._sizes.begin

    def feed(self, buffer: bytearray, start: int, count: int) -> None:
        """Takes in the first `count` bytes of the buffer; `start` is 0."""
        self._sizes.check(buffer, count)
        self._feed(buffer, start, count)


class SizedParser(DefaultParser):  # type: ignore[misc, valid-type]  # redis-py chooses its class when it is imported
    """redis-py's own parser for the answers while a connection is made."""

    _reader: Any

    def on_connect(self, connection: Any, **options: Any) -> None:
        super().on_connect(connection, **options)
        self._reader = SizedReader(self._reader)


def _length(text: bytes | bytearray) -> int:
    try:
        return int(text)
    except ValueError:
        raise SizeRefused(f"it announces the length {bytes(text[:32])!r}") from None
