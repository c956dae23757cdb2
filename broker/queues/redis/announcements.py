"""What the ends of a queue in Redis announce of themselves, and how the announcements of a replaced end are refused.

Each end has a stream with one entry, its newest announcement, whose id is INCARNATION-SERIAL. The server refuses an id
that is not beyond the newest: a worker that has been replaced gets an error, and sees the incarnation that replaced it.
"""

from collections.abc import Sequence
from typing import Any

from stageline.broker.codec.checksum import crc32
from stageline.broker.errors import BadMessage
from stageline.broker.network.redis_connection import Command, sound
from stageline.broker.queues.credit import Credit, Retention, check_current

from .entries import EntryId, read_id

_NOTHING = -1  # the entry's number for "no message is missing"


class Announcer:
    """Announces for one end, in the stream `key`. `duty` is what only one incarnation does: "forward-1 is taken".

    `must_announce`: what was announced last is not in the stream, or may not be.
    """

    def __init__(self, key: bytes, duty: str, incarnation: int) -> None:
        self.key = key
        self.must_announce = True
        self._duty = duty
        self._incarnation = incarnation
        self._serial = 0
        self._is_garbled = False

    def announce(self, *numbers: int) -> list[Command]:
        """The commands that replace the announcement in the stream. `check` gets their answers."""
        self._serial += 1
        self.must_announce = False
        entry_id = EntryId(self._incarnation, self._serial)
        text = b" ".join(b"%d" % number for number in numbers)
        fields = (b"says", text, b"check", _checksum(entry_id, text))
        clear: list[Command] = [(b"DEL", self.key)] if self._is_garbled else []
        return [*clear, (b"XADD", self.key, b"MINID", b"=", bytes(entry_id), bytes(entry_id), *fields), self.look()]

    def look(self) -> Command:
        """The command that shows whether the announcement is still in the stream. `check` gets its answer."""
        return newest(self.key)

    def check(self, answers: Sequence[Any]) -> None:
        """The last of `answers` is what is in the stream. Raises `Fenced` if that is a newer incarnation's."""
        (found,) = sound(list(answers[-1:]))
        try:
            there = _read(found[0])[0] if found else EntryId(0, 0)
            self._is_garbled = False
        except BadMessage:
            self.must_announce = self._is_garbled = True
            return
        check_current(self._duty, there.number, self._incarnation)
        if there != (self._incarnation, self._serial):
            self._serial = max(self._serial, there.place if there.number == self._incarnation else 0)
            self.must_announce = True


def newest(key: bytes) -> Command:
    """The command that asks for the newest announcement in a stream."""
    return (b"XREVRANGE", key, b"+", b"-", b"COUNT", b"1")


def credit_numbers(received: int, limit: int, missing: int | None) -> tuple[int, int, int]:
    """What a consumer announces."""
    return received, limit, _NOTHING if missing is None else missing


def read_credit(raw: Any) -> Credit:
    """A consumer's announcement. Raises `BadMessage` if it is malformed or damaged."""
    entry_id, numbers = _read(raw)
    try:
        received, limit, missing = numbers
    except ValueError as error:
        raise BadMessage(f"an entry of a stream is not a consumer's announcement: {error}") from error
    return Credit(*entry_id, received, limit, None if missing == _NOTHING else missing)


def read_retention(raw: Any) -> tuple[EntryId, Retention]:
    """A producer's announcement and its id. Raises `BadMessage` if it is malformed or damaged."""
    entry_id, numbers = _read(raw)
    try:
        first, sent = numbers
    except ValueError as error:
        raise BadMessage(f"an entry of a stream is not a producer's announcement: {error}") from error
    return entry_id, Retention(first, sent)


def _read(raw: Any) -> tuple[EntryId, list[int]]:
    try:
        id_text, [_, text, _, check] = raw
        entry_id, numbers = read_id(id_text), [int(number) for number in text.split()]
        sane = check == _checksum(entry_id, text)
    except (TypeError, ValueError, AttributeError) as error:
        raise BadMessage(f"an entry of a stream is not an announcement: {error}") from error
    if not sane:
        raise BadMessage("an announcement is damaged: its CRC-32 does not match")
    return entry_id, numbers


def _checksum(entry_id: EntryId, text: bytes) -> bytes:
    return b"%d" % crc32(bytes(entry_id) + b" " + text)
