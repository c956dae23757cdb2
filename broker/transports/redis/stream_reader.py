"""Consuming end of a queue in Redis without its connection: which entries to read, and what to announce.

Entries are read in the order of their ids, from any place again. An entry that is passed over or damaged is read again;
if that does not help, the message is announced as missing.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

import msgspec

from stageline.broker.codec.message import Message, check_run, fingerprint
from stageline.broker.control.messages import StepDigest
from stageline.broker.errors import ForeignMessage, QueueGap
from stageline.broker.queues.delivery import Receiver, Retention

from .entries import Announcer, EntryId, Keys, StepDigests, StreamEntry, read_entry
from .forms import PLAIN, EntryForm
from .units import Exchange

AGAIN = 0.1  # seconds before what was passed over or damaged is read again
IN_VAIN = 3  # times that the same message was read without success, after which it is announced as missing


class WholeMessage(msgspec.Struct, frozen=True):
    """Entries of a whole message, not yet decoded. `turn` says since which rewind it was wanted."""

    number: int
    turn: int
    header: bytes
    data: tuple[bytes, ...]


class StreamReader:
    """Decisions of what to read for `receiver`, of a queue of `run`.

    Messages and announcements of producers of the incarnation `since` or an older one are ignored: the run was resumed
    as a whole, perhaps at an older checkpoint than those that trimmed the queue, and every producer puts its messages
    again.
    """

    def __init__(
        self,
        run: str,
        receiver: Receiver,
        incarnation: int,
        digests: deque[StepDigest],
        since: int = 0,
        form: EntryForm = PLAIN,
    ) -> None:
        """Begin before the first message.

        Args:
            run: Id of the run.
            receiver: Consumer's end of the queue.
            incarnation: Incarnation of this worker.
            digests: Deque to which the digests of steps are added, of the messages that this reader accepts.
            since: Newest incarnation of an ended life of the run.
            form: Form of what lies on the server.
        """
        self.form = form
        self.receiver = receiver
        self.keys = Keys(run, receiver.name)
        self.is_started = False  # messages have been asked for
        self.has_doubts = False  # whether to ask for the producer's announcement
        self.gap: QueueGap | None = None  # why the next message will not come
        self.largest = 1  # bytes of the largest entry lately
        self._announcer = Announcer(self.keys.taken, f"{receiver.name} is taken", incarnation, form.taken)
        self._run = run
        self._since = since
        self._digests = StepDigests(receiver.queue, digests, lambda: self.form)
        self._announced = 0  # all messages before it were announced as taken
        self._turn = 0  # counts rewinds and rereadings: what was read before them is dropped
        self._after = EntryId(0, 0)
        self._parts: list[StreamEntry] = []  # of a message whose other entries have not come
        self._bytes = 0  # of tensors in them
        self._resume_at = 0.0  # when to read again, monotonic, in seconds

    def seal_with(self, form: EntryForm) -> None:
        """Use another form from now on, and read again what was not taken in."""
        self.form = form
        self._announcer.seal_with(form.taken)
        self._reread()

    def rewind(self, step: int) -> None:
        """Begin again at the first message of `step`."""
        self.is_started = True
        self.receiver.rewind(self.receiver.queue.first(step))
        self.gap = None
        self._resume_at = 0.0
        self._reread()

    def pop(self) -> Message | None:
        """Return the next message, which counts as taken; None if it is not here. Raises `QueueGap` if it is gone."""
        self.is_started = True
        if self.receiver.ready:
            return self.receiver.pop()
        if self.gap is not None:
            raise self.gap
        return None

    def position(self, now: float) -> tuple[int, EntryId] | None:
        """Return a mark for `read`, and the entry after which to go on reading; None if nothing is to be read now."""
        readable = self.is_started and self.receiver.room > 0 and now >= self._resume_at and self.gap is None
        return (self._turn, self._after) if readable else None

    def read(self, turn: int, raw: Sequence[Any], now: float) -> list[WholeMessage]:
        """Collect entries that were read, and return the whole messages among them, for `decode`.

        Args:
            turn: Mark that `position` gave. What was read before a rewind is dropped.
            raw: Entries as the server answered.
            now: Time of the call, in seconds on the monotonic clock.
        """
        whole: list[WholeMessage] = []
        if not raw:
            self.has_doubts = self.is_started and not self.receiver.ready
        if turn != self._turn:
            return whole
        for entry in map(read_entry, raw):
            expected = self.receiver.next + len(whole), len(self._parts) + 1
            size = sum(map(len, entry.data)) if entry is not None else 0
            if entry is None or entry.id != expected or self._bytes + size > self.form.longest:
                if not whole:  # else first take in what came before it
                    self._pass_over(entry, now)
                break
            self._after = entry.id
            self._parts.append(entry)
            self._bytes += size
            self.largest = max(1, self.largest // 2, size)
            if entry.header is not None:
                data = tuple([piece for part in self._parts for piece in part.data])
                whole.append(WholeMessage(entry.id.number, turn, entry.header, data))
                self._clear()
        return whole

    def decode(self, whole: WholeMessage) -> tuple[Message, Hashable]:
        """Return the message and its fingerprint. Needs no lock.

        Raises `BadMessage` if the message is damaged, `ForeignMessage` if it is not of this run or queue.
        """
        content = self.form.open(whole.number, whole.header)
        header = content.header
        check_run(header, self._run)
        if (header.queue, header.number) != (self.receiver.name, whole.number):
            raise ForeignMessage(
                f"{header.identity} lies in Redis as message {whole.number} of {self.receiver.name}: two plans share a "
                "run's name"
            )
        return content.message(whole.data), fingerprint(header)

    def accept(self, whole: WholeMessage, message: Message, bits: Hashable, now: float) -> None:
        """Hand `message`, which is whole and undamaged, to the receiver.

        A message that an ended life of the run has left is not accepted: its script may have called for other things.

        Args:
            whole: Entries that `message` was decoded from.
            message: Decoded message.
            bits: Fingerprint of `message`.
            now: Time of the call, in seconds on the monotonic clock.

        Raises:
            Disagreement: The message has come before with other bits.
        """
        if not self._is_next(whole):
            return
        if message.incarnation <= self._since:
            self._read_again(now)  # until its producer has removed it
            return
        if not self.receiver.accepts(whole.number, bits):
            return
        if self.receiver.missing is not None:  # its producer need not look after it any more
            self.receiver.report()
        self._digests.add(whole.number, bits)
        self.receiver.accept(message, bits)
        self.has_doubts, self.gap = False, None

    def count_damage(self, whole: WholeMessage, reason: str, now: float) -> None:
        """Count a message that cannot be decoded. Raises `BadMessage` if that has happened too often.

        Args:
            whole: Entries of the message.
            reason: Words of the error for what is wrong.
            now: Time of the call, in seconds on the monotonic clock.
        """
        if self._is_next(whole):
            self.receiver.count_damage(reason)
            self._read_again(now)

    def update(self, entry_id: EntryId, retention: Retention, *, nothing: bool) -> None:
        """Process the producer's announcement. Sets `gap` if the next message is no longer available.

        Args:
            entry_id: Id of the announcement.
            retention: Messages that the producer holds and has sent.
            nothing: True if nothing was read after the announcement, so what the producer has sent is not there.
        """
        self.has_doubts = False
        if entry_id.number <= self._since:
            return
        try:
            if self.receiver.was_sent(retention) and nothing:
                self.receiver.miss()
        except QueueGap as gap:
            self.gap = gap

    def next_exchange(self, *, idle: bool) -> Exchange | None:
        """Return what to announce, if anything. `idle`: check whether the announcement is still there."""
        receiver = self.receiver
        stale = receiver.taken != self._announced or receiver.missing is not None
        if receiver.must_report or self._announcer.must_announce or (idle and stale):
            self._announced = receiver.taken
            receiver.mark_reported(receiver.limit)
            commands = self._announcer.announce(receiver.taken, receiver.limit, receiver.missing)
            return Exchange(commands, self._announcer.check)
        return Exchange([self._announcer.look], self._announcer.check) if idle else None

    def _is_next(self, whole: WholeMessage) -> bool:
        return whole.turn == self._turn and whole.number == self.receiver.next

    def _pass_over(self, found: StreamEntry | None, now: float) -> None:
        """Note that something else is where the next entry should be."""
        beyond = found is not None and found.id.number > self.receiver.next
        self.receiver.count_absence(IN_VAIN if beyond else None)  # beyond it, reading again will not help
        self._read_again(now)

    def _read_again(self, now: float) -> None:
        self.has_doubts = True
        self._resume_at = now + AGAIN
        if self.receiver.failures >= IN_VAIN:
            self.receiver.miss()
        self._reread()

    def _reread(self) -> None:
        self._turn += 1
        self._after = EntryId(self.receiver.next, 0)
        self._clear()

    def _clear(self) -> None:
        self._parts.clear()
        self._bytes = 0
