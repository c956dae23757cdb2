"""Producing end of a queue in Redis without its connection: what to ask of the server next.

    look        at what the server has: a predecessor's messages, or own ones whose answer was lost
    compare     those with what is put again
    add         the others; back to look when the stream is not as it was left: the server forgot, or others added

Messages of a queue are added by one transaction at a time, so that a refused message is never followed by the next one.
What the server has forgotten is added again from the log. A stream with a hole cannot be mended, since its ids only
grow: it is deleted and filled again. So is one that an ended life of the run has left: no worker has taken anything of
it that still counts, and a script that is resumed may call for other things. Consumers take messages only in order,
whatever happens to the stream in between.
"""

from functools import partial
from typing import Any

import structlog
from redis.exceptions import ResponseError

from stageline.broker.codec.message import Frame, Header
from stageline.broker.control.queue_counts import ResendReason
from stageline.broker.errors import BadMessage, ForeignMessage
from stageline.broker.queues.delivery import Credit, Retention, Sender

from .answers import sound
from .entries import Addition, Announcer, Keys, last_entry, read_entry, read_id
from .forms import PLAIN, EntryForm
from .units import Command, Exchange, pack_together

BATCH_BYTES = 4 * 2**20  # of the messages in one transaction; at least one message
BATCH_MESSAGES = 64  # in one transaction

_FOREIGN_BITS = "lies in Redis with different bits, put there by another incarnation"
_STILL_WRITES = (
    "a process of an ended life of this run still writes into {} in Redis: end it. What it writes is deleted once a "
    "second"
)
_PASSED = "equal or smaller"  # what the server answers to an id that is not beyond its last

log = structlog.get_logger()


class StreamWriter:
    """Decisions of what to ask of the server for `sender`: what that has sent is on the server.

    Messages of the incarnation `since` or an older one are of an ended life of the run.
    """

    def __init__(self, sender: Sender, incarnation: int, since: int = 0, form: EntryForm = PLAIN) -> None:
        """Begin without knowing what the server has.

        Args:
            sender: Producer's end of the queue.
            incarnation: Incarnation of this worker.
            since: Newest incarnation of an ended life of the run.
            form: Form of what lies on the server.
        """
        self.form = form
        self.sender = sender
        self.log = sender.log
        self.keys = Keys(self.log.run, self.log.queue.name)
        self._addition = Addition(self.keys.entries)
        self._since = since
        self.forgotten = 0  # messages that the server had and forgot
        self._announcer = Announcer(self.keys.kept, f"{self.log.queue.name} is filled", incarnation, form.kept)
        self._length: int | None = None  # entries of the stream as it was left; None: look at it first
        self._exists = False
        self._has_hole = False
        self._was_deleted = False  # the stream, once: a former message in it was added since
        self._is_contested = False  # then it is started over only once a second
        self._newest = -1  # message on the server
        self._least = 0  # entries that it must have, if it still has its newest
        self._passed = -1  # a message that the server refused: it had a newer one, or once had
        self._trimmed = 0
        self._announced = Retention(0, 0)

    def lose_connection(self) -> None:
        """Look at the stream again: it is not known what was carried out, nor what the server still has."""
        self._length = None
        self._announcer.repeat()

    def seal_with(self, form: EntryForm) -> None:
        """Use another form from now on: the stream is deleted, and filled again from the log."""
        self.form = form
        self._announcer.seal_with(form.kept)
        self._has_hole = True

    def update(self, credit: Credit) -> None:
        """Record what the consumer announces. A message that it misses is a hole in the stream, to be filled again."""
        is_newer = self.sender.update(credit._replace(missing=None))
        if is_newer and credit.missing is not None and credit.missing >= self.log.first:
            self._has_hole = True

    def next_exchanges(self, milliseconds: int, *, idle: bool) -> list[Exchange]:
        """Return what to ask next, in this order; nothing if everything is done.

        Args:
            milliseconds: Time since 1970.
            idle: True to check whether everything is as it was left.

        Raises:
            Overwritten: A message's tensor was written to after it was put.
        """
        due = self.sender.due()  # also skips what was trimmed
        if self._length is None:
            return [self._look()]
        if self._has_hole:
            return [self._begin_again()] if idle or not self._is_contested else []
        exchanges = []
        if self._trimmed < self.log.first:
            exchanges.append(self._trim(self.log.first))
        if due is not None:
            exchanges.append(self._compare() if self.sender.sent <= self._newest else self._add(milliseconds))
        retention = self.sender.retention
        advanced = retention.first > self._announced.first
        if self._announcer.must_announce or advanced or (idle and retention != self._announced):
            self._announced = retention
            exchanges.append(Exchange(self._announcer.announce(*retention), self._announcer.check))
        if idle and not exchanges:
            exchanges.append(Exchange([(b"XLEN", self.keys.entries), self._announcer.look], self._check))
        return exchanges

    @property
    def is_settled(self) -> bool:
        """True if there is nothing to do."""
        announced = self._announced.first >= self.log.first and not self._announcer.must_announce
        return self._length is not None and not self._has_hole and announced and self.sender.due() is None

    def _look(self) -> Exchange:
        key = self.keys.entries
        return Exchange([(b"EXISTS", key), (b"XLEN", key), last_entry(key), self._announcer.look], self._looked, True)

    def _looked(self, answers: list[Any]) -> None:
        exists, length, newest, _ = sound(answers)
        self._announcer.check(answers)
        sent = self.sender.sent
        self._exists, self._length = bool(exists), length
        self._newest = read_id(newest[0][0]).number if newest else -1
        lacks = self._newest < self._passed or (self._newest + 1 >= sent and length < self._least)
        if lacks or self._is_former(self._header(newest)):
            self._has_hole = True
        elif self._newest + 1 < sent:
            self._send_again(self._newest + 1, ResendReason.FORGOTTEN)
        self._least, self._passed, self._trimmed = 0, -1, 0

    def _send_again(self, number: int, reason: ResendReason) -> None:
        """Send messages from `number` on again: the server does not have them any more."""
        self._announcer.repeat()
        before = self.sender.sent
        self.sender.resend(number, reason)
        self.forgotten += max(0, before - self.sender.sent)

    def _trim(self, floor: int) -> Exchange:
        key = self.keys.entries
        unit: list[Command] = [(b"XLEN", key), (b"XTRIM", key, b"MINID", b"=", b"%d" % floor)]
        return Exchange(unit, partial(self._did_trim, floor))

    def _did_trim(self, floor: int, answers: list[Any]) -> None:
        length, removed = sound(answers)
        self._trimmed = floor
        self._check_length(length, removed)

    def _add(self, milliseconds: int) -> Exchange:
        batch = self._batch(self._addable)
        numbers = range(self.sender.sent, self.sender.sent + len(batch))
        size = sum(len(frame) for frames in batch for frame in frames)
        has_more, create = numbers.stop < self._addable, not self._exists

        def make() -> Exchange:
            packed = [
                command
                for number, frames in zip(numbers, batch, strict=True)
                for command in self._addition.pack(number, self.form.close(number, frames), milliseconds, create=create)
            ]
            names, added = [self._addition.name] * len(packed), partial(self._added, numbers)
            return Exchange(names, added, has_more, pack_together(packed))

        return Exchange((), partial(self._added, numbers), has_more, later=make, size=size)

    def _added(self, numbers: range, ids: list[Any]) -> None:
        if any(id_text is None or (isinstance(id_text, ResponseError) and _PASSED in str(id_text)) for id_text in ids):
            self._length = None  # emptied, or another worker has added messages: look again
            if ids[0] is not None:
                self._passed = numbers.start
            return
        sound(ids)
        for number in self._retained(numbers):
            self.log.frames(number)  # a tensor written to while it was on its way may have been sent torn
        self._exists = True
        if self._length is not None:
            self._length += len(ids)
        self.sender.mark_sent(numbers.stop - 1)
        self._newest = numbers.stop - 1

    def _compare(self) -> Exchange:
        batch = self._batch(min(self._addable, self._newest + 1))
        numbers = range(self.sender.sent, self.sender.sent + len(batch))
        unit = [last_entry(self.keys.entries, number) for number in numbers]
        return Exchange(unit, partial(self._compared, numbers), True)

    def _compared(self, numbers: range, answers: list[Any]) -> None:
        for number, found in zip(numbers, sound(answers), strict=True):
            header = self._header(found)
            if header is None or self._is_former(header):
                self._has_hole = True
                return
            if number in self._retained(numbers):
                self.log.check_same(number, header, _FOREIGN_BITS)
            self.sender.mark_sent(number)

    def _is_former(self, header: Header | None) -> bool:
        """Return True if the message with this header is of an ended life of the run."""
        is_former = header is not None and header.incarnation <= self._since
        if is_former and self._was_deleted and not self._is_contested:
            self._is_contested = True
            log.warning("queues", reason=_STILL_WRITES.format(self.log.queue.name))
        return is_former

    def _begin_again(self) -> Exchange:
        self._announced = Retention(self.log.first, self.log.first)
        unit = [(b"DEL", self.keys.entries), *self._announcer.announce(*self._announced)]
        return Exchange(unit, self._deleted, True)

    def _deleted(self, answers: list[Any]) -> None:
        self._announcer.check(answers)
        self._send_again(self._announced.first, ResendReason.REFILLED)
        self._has_hole = self._exists = False
        self._was_deleted = True
        self._length, self._newest = 0, -1

    def _check(self, answers: list[Any]) -> None:
        length, _ = sound(answers)
        self._announcer.check(answers)
        self._check_length(length, 0)

    def _check_length(self, length: int, removed: int) -> None:
        """Look at the stream again unless it had `length` entries, of which a trim has removed `removed`."""
        left = (self._length or 0) - removed
        if length == self._length:
            self._length = left
        else:
            self._least, self._length = left, None

    def _retained(self, numbers: range) -> range:
        """Return the numbers that the log still has: it may have been trimmed while the server answered."""
        return range(max(numbers.start, self.log.first), max(numbers.stop, self.log.first))

    @property
    def _addable(self) -> int:
        """Number of the first message that may not be added now."""
        return min(self.log.end, self.sender.limit)

    def _batch(self, end: int) -> list[list[Frame]]:
        """Return the messages of the next transaction, which are before `end`."""
        sent, size = self.sender.sent, 0
        batch: list[list[Frame]] = []
        for number in range(sent, min(end, sent + BATCH_MESSAGES)):
            frames = self.log.frames(number)
            size += sum(map(len, frames))
            if batch and size > BATCH_BYTES:
                break
            batch.append(frames)
        return batch

    def _header(self, found: list[Any]) -> Header | None:
        """Return the header in what was found of a message; None if the message is not whole."""
        entry = read_entry(found[0]) if found else None
        try:
            return self.form.open(entry.id.number, entry.header).header if entry and entry.header else None
        except ForeignMessage:
            raise
        except BadMessage:
            return None
