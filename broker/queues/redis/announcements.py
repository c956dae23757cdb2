"""What the ends of a queue in Redis say of themselves, and how a replaced one is kept from being heard.

Each end has a stream with one entry, its newest word, whose id is INCARNATION-SERIAL: the server itself refuses what an
older incarnation says, and who is refused sees by whom it was replaced.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, TypeVar

from stageline.broker.codec.checksum import crc32
from stageline.broker.errors import BadMessage, Fenced
from stageline.broker.network.redis_connection import Command, sound

from .entries import EntryId, read_id


@dataclass(frozen=True, slots=True)
class CreditEntry:
    """A consumer's word: it has taken all messages before `taken`, those before `credit` may be added, and `missing`
    is not where it should be (-1: nothing is missing)."""

    taken: int
    credit: int
    missing: int


@dataclass(frozen=True, slots=True)
class RetentionEntry:
    """A producer's word: it still has the messages from `first` on, and has added those before `sent`."""

    first: int
    sent: int


Announcement = TypeVar("Announcement", CreditEntry, RetentionEntry)


class Announcer:
    """One end's voice in the stream `key`. `role` is what only one incarnation does: "forward-1 is taken".

    `wants` says that it must speak again: what it said is not there, or may not be.
    """

    def __init__(self, key: bytes, role: str, incarnation: int) -> None:
        self.key = key
        self.wants = True
        self._role = role
        self._incarnation = incarnation
        self._serial = 0
        self._garbled = False

    def say(self, word: CreditEntry | RetentionEntry) -> list[Command]:
        """The commands that say it, in place of what was said before. `hear` gets their answers."""
        self._serial += 1
        self.wants = False
        word_id = EntryId(self._incarnation, self._serial)
        text = b" ".join(b"%d" % number for number in astuple(word))
        fields = (b"says", text, b"check", _check(word_id, text))
        clear: list[Command] = [(b"DEL", self.key)] if self._garbled else []
        return [*clear, (b"XADD", self.key, b"MINID", b"=", bytes(word_id), bytes(word_id), *fields), self.see()]

    def see(self) -> Command:
        """The command that tells whether it still stands. `hear` gets its answer."""
        return newest(self.key)

    def hear(self, answers: Sequence[Any]) -> None:
        """The last of `answers` is what is said there. Raises `Fenced` if that is a newer incarnation's."""
        (found,) = sound(list(answers[-1:]))
        try:
            said = _read(found[0])[0] if found else EntryId(0, 0)
            self._garbled = False
        except BadMessage:
            self.wants = self._garbled = True
            return
        if said.number > self._incarnation:
            raise Fenced(
                f"{self._role} by incarnation {said.number} now; this worker is incarnation {self._incarnation} and "
                "must stop"
            )
        if said != (self._incarnation, self._serial):
            self._serial = max(self._serial, said.place if said.number == self._incarnation else 0)
            self.wants = True


def newest(key: bytes) -> Command:
    """The command that asks for the newest word in a stream."""
    return (b"XREVRANGE", key, b"+", b"-", b"COUNT", b"1")


def read_announcement(raw: Any, kind: type[Announcement]) -> tuple[EntryId, Announcement]:
    """A word and its id. Raises `BadMessage` for an entry that is none, or not any more."""
    word_id, numbers = _read(raw)
    try:
        return word_id, kind(*numbers)
    except TypeError as error:
        raise BadMessage(f"an entry of a stream is no {kind.__name__}: {error}") from error


def _read(raw: Any) -> tuple[EntryId, list[int]]:
    try:
        id_text, [_, text, _, check] = raw
        word_id, numbers = read_id(id_text), [int(number) for number in text.split()]
        sane = check == _check(word_id, text)
    except (TypeError, ValueError, AttributeError) as error:
        raise BadMessage(f"an entry of a stream is not an end's word: {error}") from error
    if not sane:
        raise BadMessage("an end's word is damaged: its CRC-32 does not match")
    return word_id, numbers


def _check(word_id: EntryId, text: bytes) -> bytes:
    return b"%d" % crc32(bytes(word_id) + b" " + text)
