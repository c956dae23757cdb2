"""The consuming end of a queue in Redis without its connection: which entries are accepted, and how far it is.

Entries are read in the order of their ids, from any place again. Only the next message is accepted; one that is
passed over or damaged is read again, and if that is of no use its producer is told that it is missing.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from stageline.broker.codec.message import (
    LIMITS,
    Limits,
    Message,
    allocate,
    assemble,
    check_run,
    fingerprint,
    read_header,
)
from stageline.broker.errors import BadMessage, ForeignMessage, QueueGap
from stageline.broker.queues.base import QueueKey
from stageline.broker.queues.duplicates import Duplicates
from stageline.broker.queues.zeromq.consumer import TOO_OFTEN
from stageline.pipeline.numbering import message_number

from .announcements import Announcer, CreditEntry, RetentionEntry
from .entries import EntryId, Keys, StreamEntry, pour, read_entry
from .exchange import Exchange

AGAIN = 0.1  # seconds before what was passed over or damaged is read again
HOPELESS = 3  # times that the same message was read in vain, after which its producer is told


@dataclass(frozen=True, slots=True)
class WholeMessage:
    """All entries of a message, not yet looked into. `place` says since which rewind it was wanted."""

    number: int
    place: int
    header: bytes
    data: tuple[bytes, ...]


class Reader:
    """Decides for queue `key`. `ready` holds accepted messages that nobody has taken yet, `window` at most.

    `wants` says that there is something to say to the producer. What one of the incarnation `since` or an older one has
    said counts for nothing: the run may have gone further back than that one was.
    """

    def __init__(
        self,
        run: str,
        key: QueueKey,
        incarnation: int,
        window: int,
        microbatches: int,
        limits: Limits = LIMITS,
        since: int = 0,
    ) -> None:
        self.key = key
        self.keys = Keys(run, key)
        self.voice = Announcer(self.keys.taken, f"{key} is taken", incarnation)
        self.next = 0
        self.begun = False  # somebody wants messages
        self.wants = True
        self.doubts = False  # whether to ask what the producer says of itself
        self.gap: QueueGap | None = None  # why the next message cannot
        self.ready: deque[Message] = deque()
        self.largest = 1  # bytes of the largest entry lately
        self._run = run
        self._window = window
        self._microbatches = microbatches
        self._limits = limits
        self._since = since
        self._known = Duplicates(key)
        self._told = 0
        self._credit = 0
        self._turn = 0  # counts rewinds and rereadings: what was asked for before them is dropped
        self._after = EntryId(0, 0)
        self._parts: list[StreamEntry] = []
        self._vain = 0
        self._missing = -1
        self._rest = 0.0  # until when not to read

    def rewind(self, number: int) -> None:
        """Begins again at `number`."""
        self.begun = self.wants = True
        self.ready.clear()
        self.next = number
        self.gap = None
        self._vain, self._missing, self._rest = 0, -1, 0.0
        self._reread()

    def pop(self) -> Message | None:
        """The first of `ready`, now taken. Raises `QueueGap` if the next message cannot be had any more."""
        self.begun = True
        if not self.ready:
            if self.gap is not None:
                raise self.gap
            return None
        message = self.ready.popleft()
        if 2 * (self._credit - self.taken) <= self._window:
            self.wants = True
        return message

    @property
    def taken(self) -> int:
        """All messages before it have been taken."""
        return self.next - len(self.ready)

    @property
    def room(self) -> int:
        """How many messages may still be read ahead."""
        return self._window - len(self.ready) if self.begun else 0

    def place(self, now: float) -> tuple[int, EntryId] | None:
        """After which entry to go on reading, and a mark to give to `hear` with what comes; None: not now."""
        readable = self.room > 0 and now >= self._rest and self.gap is None
        return (self._turn, self._after) if readable else None

    def hear(self, turn: int, raw: Sequence[Any], now: float) -> list[WholeMessage]:
        """Takes in what was read. The whole messages in it, to be opened by `open_message`."""
        whole: list[WholeMessage] = []
        if turn != self._turn:
            return whole
        for entry in map(_entry, raw):
            expected = self.next + len(whole), len(self._parts) + 1
            if entry is None or entry.id != expected:
                if not whole:  # else first take in what came before it
                    self._passed(entry, now)
                break
            self._after = entry.id
            self._parts.append(entry)
            self.largest = max(self.largest // 2, sum(map(len, entry.data)))
            if entry.header is not None:
                data = tuple([piece for part in self._parts for piece in part.data])
                whole.append(WholeMessage(entry.id.number, turn, entry.header, data))
                self._parts.clear()
        return whole

    def open_message(self, whole: WholeMessage) -> tuple[Message, Hashable]:
        """The message and its fingerprint. Raises `BadMessage` if it is damaged, `ForeignMessage` if not of this run.

        Needs no lock.
        """
        header = read_header(whole.header, limits=self._limits)
        check_run(header, self._run)
        number = header.number(self._microbatches)
        if (header.flow, header.stage, number) != (self.key.flow, self.key.stage, whole.number):
            raise ForeignMessage(
                f"{header.identity} lies in Redis as message {whole.number} of {self.key}: two plans share a run's name"
            )
        buffers = allocate(header)
        pour(whole.data, buffers)
        return assemble(header, buffers), fingerprint(header)

    def accept(self, whole: WholeMessage, message: Message, marks: Hashable) -> None:
        """`message` is whole and undamaged. Raises `Disagreement` if it has come before with other bits."""
        if whole.place != self._turn or whole.number != self.next:
            return
        self._known.compare(whole.number, marks)
        self.ready.append(message)
        self.next += 1
        if self._missing >= 0:
            self._missing, self.wants = -1, True
        self._vain, self.doubts, self.gap = 0, False, None

    def damaged(self, whole: WholeMessage, reason: str, now: float) -> None:
        """A message cannot be opened. Raises `BadMessage` when that has happened too often."""
        if whole.place != self._turn or whole.number != self.next:
            return
        self._read_in_vain(now)
        if self._vain > TOO_OFTEN:
            raise BadMessage(
                f"message {self.next} of {self.key} came damaged {self._vain} times in a row: {reason}. "
                "Look at the network and the memory of the machines on the way"
            )

    def quiet(self) -> None:
        """Nothing came for a while."""
        self.doubts = self.begun and not self.ready

    def hear_standing(self, said: EntryId, standing: RetentionEntry, *, nothing: bool) -> None:
        """What the producer `said` of itself. `nothing` was read after that: so whatever it had sent is not there.

        Sets `gap` if the next message cannot be had any more.
        """
        self.doubts = False
        if said.number <= self._since:
            return
        if standing.first > self.next:
            self.gap = QueueGap(
                f"message {self.next} of {self.key} cannot be had any more: its producer keeps messages from "
                f"{standing.first} on. The stage was resumed from before the newest complete checkpoint"
            )
        elif nothing and standing.sent > self.next:
            self._miss()

    def task(self, *, idle: bool) -> Exchange | None:
        """What to say to the producer, if anything. `idle`: see whether it is still there as it was said."""
        stale = self.taken != self._told or self._missing >= 0
        if self.wants or self.voice.wants or (idle and stale):
            return Exchange(self.voice.say(self._position()), self.voice.hear)
        return Exchange([self.voice.see()], self.voice.hear) if idle else None

    def _position(self) -> CreditEntry:
        self._told = self.taken
        self._credit = self.taken + self._window
        self.wants = False
        return CreditEntry(self.taken, self._credit, self._missing)

    def _passed(self, found: StreamEntry | None, now: float) -> None:
        """Something else is where the next entry should be."""
        if found is not None and found.id.number > self.next:
            self._vain = HOPELESS - 1  # reading again will not help
        self._read_in_vain(now)

    def _read_in_vain(self, now: float) -> None:
        self.doubts = True
        self._vain += 1
        self._rest = now + AGAIN
        if self._vain >= HOPELESS:
            self._miss()
        self._reread()

    def _miss(self) -> None:
        if self._missing != self.next:
            self._missing, self.wants = self.next, True

    def _reread(self) -> None:
        self._turn += 1
        self._after = EntryId(self.next, 0)
        self._parts.clear()


def _entry(raw: Any) -> StreamEntry | None:
    """None: not one of ours, or not any more."""
    try:
        return read_entry(raw)
    except BadMessage:
        return None
