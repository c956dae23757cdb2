"""The producing end of a queue in Redis without its connection: what to ask of the server next, from its own log.

    look        at what the server has: a predecessor's messages, or one's own whose answer was lost
    compare     those with what is put again
    add         the others; back to look when something is not as it was left: the server forgot, or others were here

One transaction of a queue is under way at a time, so that a refused message is never followed by the next one. What
the server has forgotten is put again from the log. A stream with a hole cannot be mended, since its ids only grow:
it is begun again. Wherever a consumer stands meanwhile, it takes messages only in order.
"""

from functools import partial
from typing import Any

from redis.exceptions import ResponseError

from stageline.broker.codec.message import Frame, Header, fingerprint, read_header
from stageline.broker.errors import BadMessage, Disagreement, ForeignMessage
from stageline.broker.network.redis_connection import Command, Unit, sound
from stageline.broker.queues.base import Depth
from stageline.broker.queues.log import Log

from .announcements import Announcer, CreditEntry, RetentionEntry
from .entries import EntryId, Keys, additions, creating, read_entry, read_id
from .exchange import Exchange

BATCH = 4 * 2**20  # bytes of the messages in one transaction; one message at least
HANDFUL = 64  # messages in one transaction

_PASSED = "equal or smaller"  # what the server says of an id that is not beyond its last


class Writer:
    """Decides for one `log`. What it has sent is on the server; `taken` is how far its consumer is."""

    def __init__(self, log: Log, incarnation: int) -> None:
        self.log = log
        self.keys = Keys(log.run, log.key)
        self.voice = Announcer(self.keys.kept, f"{log.key} is filled", incarnation)
        self.taken = 0
        self.said = EntryId(0, 0)  # the newest that the consumer has said
        self.forgotten = 0  # messages that the server had and forgot
        self._credit = 0
        self._sent = 0  # all before it are on the server, or need not be
        self._length: int | None = None  # entries of the stream as it was left; None: look at it first
        self._exists = False
        self._broken = False  # the stream has a hole
        self._newest = -1  # on the server
        self._least = 0  # entries that it must have, if it still has its newest
        self._passed = -1  # a message that the server refused: it had a newer one, or once had
        self._trimmed = 0
        self._told = RetentionEntry(0, 0)

    def lose(self) -> None:
        """The connection broke: it is not known what was carried out, nor what the server still has."""
        self._length = None
        self.voice.wants = True

    def hear(self, said: EntryId, position: CreditEntry) -> None:
        """Takes in what the consumer says."""
        if said <= self.said:
            return
        self.said = said
        self.taken, self._credit = position.taken, position.credit
        if position.missing >= self.log.first:
            self._broken = True

    def task(self, milliseconds: int, *, idle: bool) -> Exchange | None:
        """What to do next; nothing if all is done. `idle`: see whether everything is as it was left.

        Raises `Overwritten` if a message's tensor was written to after it was put.
        """
        self._sent = max(self._sent, self.log.first)
        if self._length is None:
            return self._look()
        if self._broken:
            return self._begin_again()
        if self._trimmed < self.log.first:
            return self._trim(self.log.first)
        standing = RetentionEntry(self.log.first, self._sent)
        if self.voice.wants or standing.first > self._told.first or (idle and standing != self._told):
            self._told = standing
            return Exchange(self.voice.say(standing), self.voice.hear)
        if self._due():
            return self._compare() if self._sent <= self._newest else self._add(milliseconds)
        return Exchange([(b"XLEN", self.keys.entries), self.voice.see()], self._checked) if idle else None

    @property
    def settled(self) -> bool:
        """Whether there is nothing to do."""
        said = self._told.first >= self.log.first and not self.voice.wants
        return self._length is not None and not self._broken and said and not self._due()

    def depth(self, now: float) -> Depth:
        sent, first = max(self._sent, self.log.first), self.log.first
        return Depth(
            ready=max(0, self.log.end - max(sent, self.taken)),
            in_flight=max(0, min(sent, self.log.end) - max(self.taken, first)),
            retained=len(self.log),
            bytes=self.log.bytes,
            oldest=self.log.oldest(now),
        )

    def _due(self) -> bool:
        return max(self._sent, self.log.first) < min(self.log.end, self._credit)

    def _look(self) -> Exchange:
        key = self.keys.entries
        unit = [(b"EXISTS", key), (b"XLEN", key), (b"XREVRANGE", key, b"+", b"-", b"COUNT", b"1"), self.voice.see()]
        return Exchange(unit, self._looked)

    def _looked(self, answers: list[Any]) -> None:
        exists, length, newest, _ = sound(answers)
        self.voice.hear(answers)
        self._exists, self._length = bool(exists), length
        self._newest = read_id(newest[0][0]).number if newest else -1
        if self._newest < self._passed or (self._newest + 1 >= self._sent and length < self._least):
            self._broken = True
        elif self._newest + 1 < self._sent:
            self._put_again(max(self._newest + 1, self.log.first))
        self._least, self._passed, self._trimmed = 0, -1, 0

    def _put_again(self, number: int) -> None:
        """What was sent from `number` on is not on the server any more."""
        self.voice.wants = True
        self.forgotten += max(0, self._sent - number)
        self._sent = min(self._sent, number)

    def _trim(self, floor: int) -> Exchange:
        key = self.keys.entries
        unit: Unit = [(b"XLEN", key), (b"XTRIM", key, b"MINID", b"=", b"%d" % floor)]
        return Exchange(unit, partial(self._did_trim, floor))

    def _did_trim(self, floor: int, answers: list[Any]) -> None:
        length, removed = sound(answers)
        self._trimmed = floor
        self._check_length(length, removed)

    def _add(self, milliseconds: int) -> Exchange:
        key = self.keys.entries
        numbers, batch = self._batch()
        commands = [
            command
            for number, frames in zip(numbers, batch, strict=True)
            for command in additions(key, number, frames, milliseconds)
        ]
        if not self._exists:
            commands[0] = creating(commands[0])
        return Exchange(commands, partial(self._added, numbers))

    def _added(self, numbers: range, ids: list[Any]) -> None:
        if any(id_text is None or (isinstance(id_text, ResponseError) and _PASSED in str(id_text)) for id_text in ids):
            self._length = None  # emptied, or somebody else has added messages: look again
            if ids[0] is not None:
                self._passed = numbers.start
            return
        sound(ids)
        for number in self._kept(numbers):
            self.log.frames(number)  # a tensor written to while it was on its way may have travelled torn
        self._exists, self._length = True, (self._length or 0) + len(ids)
        self._sent = numbers.stop
        self._newest = numbers.stop - 1

    def _compare(self) -> Exchange:
        numbers, _ = self._batch()
        numbers = numbers[: self._newest + 1 - numbers.start]
        unit = [_last_entry(self.keys.entries, number) for number in numbers]
        return Exchange(unit, partial(self._compared, numbers))

    def _compared(self, numbers: range, answers: list[Any]) -> None:
        for number, found in zip(numbers, sound(answers), strict=True):
            header = _header(found)
            if header is None:
                self._broken = True
                return
            if number in self._kept(numbers):
                self._check_same(number, header)
            self._sent = number + 1

    def _check_same(self, number: int, header: Header) -> None:
        if fingerprint(header) != fingerprint(read_header(self.log.frames(number)[0])):
            raise Disagreement(
                f"{self.log.name(number)} lies in Redis with different bits, put there by another incarnation: what "
                "computed it was not deterministic. See that all operations are, and that software, hardware type and "
                "thread count are the same wherever the stage runs"
            )

    def _begin_again(self) -> Exchange:
        self._told = RetentionEntry(self.log.first, self.log.first)
        return Exchange([(b"DEL", self.keys.entries), *self.voice.say(self._told)], self._deleted)

    def _deleted(self, answers: list[Any]) -> None:
        self.voice.hear(answers)
        self._put_again(self._told.first)
        self._broken = self._exists = False
        self._length, self._newest = 0, -1

    def _checked(self, answers: list[Any]) -> None:
        length, _ = sound(answers)
        self.voice.hear(answers)
        self._check_length(length, 0)

    def _check_length(self, length: int, removed: int) -> None:
        """The stream had `length` entries, and has lost `removed` of them by a trim."""
        left = (self._length or 0) - removed
        if length == self._length:
            self._length = left
        else:
            self._least, self._length = left, None

    def _kept(self, numbers: range) -> range:
        """Those that the log still has: it may have been trimmed while the server answered."""
        return range(max(numbers.start, self.log.first), max(numbers.stop, self.log.first))

    def _batch(self) -> tuple[range, list[list[Frame]]]:
        """The messages of the next transaction."""
        numbers = range(self._sent, min(self.log.end, self._credit, self._sent + HANDFUL))
        batch: list[list[Frame]] = []
        size = 0
        for number in numbers:
            frames = self.log.frames(number)
            size += sum(map(len, frames))
            if batch and size > BATCH:
                break
            batch.append(frames)
        return numbers[: len(batch)], batch


def _last_entry(key: bytes, number: int) -> Command:
    return (b"XREVRANGE", key, b"%d" % number, b"%d" % number, b"COUNT", b"1")


def _header(found: list[Any]) -> Header | None:
    """The header in what was found of a message; None if it is not whole."""
    try:
        text = read_entry(found[0]).header if found else None
        return read_header(text) if text else None
    except ForeignMessage:
        raise
    except BadMessage:
        return None
