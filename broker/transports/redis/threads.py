"""Threads that serve a worker's connections to Redis: their base class, and the receiver, which reads ahead.

A hand-over between threads costs more than all else that a small message needs. So the computing thread, when it puts
or waits for a message, exchanges with the server itself, without ever waiting for an answer. The connection's thread
does the rest: what takes time, what goes wrong, and everything while the other computes.

The receiver reads messages for the readers of a worker, and credit for its writers: a message is ready, whole and
checked, before the compute loop asks for it. While that loop waits for messages again and again, it reads them itself,
and the receiver only looks whether it still does. The loop asks for them right after it has put one, so that what comes
while it computes is here when it waits.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import msgspec

from stageline.broker.errors import BadMessage, BrokerError, ForeignMessage
from stageline.broker.queues.base import Trouble
from stageline.broker.queues.delivery import Retention

from .answers import RedisAway, RedisGarbled, RedisRefusal, RedisUnfit, sound
from .connection import RedisLink
from .entries import EntryId, last_entry, read_credit, read_retention
from .stream_reader import StreamReader, WholeMessage
from .stream_writer import StreamWriter
from .units import Command, Unit, pack

FIRST_RETRY, LONGEST_RETRY = 0.02, 1.0  # seconds before the first retry, and at most

# What a damaged answer can lead to, since the protocol has no checksum: the commands are sent once more, over another
# connection, before the error is believed.
GARBLED = (RedisUnfit, TypeError, ValueError, LookupError)
BLOCK = 0.1  # seconds that the server holds an answer back when there is nothing
BLOCK_BRIEFLY = 0.01  # the same while some queue has no room or pauses, and may be read again at any moment
READ_AHEAD = 16 * 2**20  # bytes read at once, about
MOST_ENTRIES = 256  # read at once, of all streams: an entry has 2 MiB at most, and an answer less than MOST_BYTES
PARKED = 0.005  # seconds without a wait of the computing thread, after which this one reads ahead
OVERDUE = 1.0  # seconds for an answer, after which the thread waits for it: the connection may be lost


@dataclass(slots=True, eq=False)
class SharedEnds:
    """State that the computing thread and the two threads of a worker share.

    `lock` guards the state, and `changed`, which says that it has changed, is made of it. `over`: both threads are to
    end. `failure` is the error that ended one of them.
    """

    lock: "threading.RLock" = field(default_factory=threading.RLock)
    changed: threading.Condition = field(init=False)
    writers: list[StreamWriter] = field(default_factory=list)
    readers: list[StreamReader] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    failure: Exception | None = None

    def __post_init__(self) -> None:
        """Make the condition `changed`, whose lock is `lock`."""
        self.changed = threading.Condition(self.lock)

    def close(self, failure: Exception | None = None) -> None:
        """Let both threads end, because of `failure` if that is given."""
        with self.changed:
            self.over.set()
            self.failure = failure or self.failure
            self.changed.notify_all()


class RedisThread(threading.Thread, ABC):
    """Thread that takes turns over `link` until `ends` are over.

    `lead` is held by the thread that uses `link`. `trouble`: why nothing can be exchanged now, None if it can.
    """

    def __init__(self, name: str, link: RedisLink, ends: SharedEnds, wake: Callable[[], None], patience: float) -> None:
        """Make the thread, which is not started.

        Args:
            name: Name that tells this thread apart from the other.
            link: Connection of the thread.
            ends: State that is shared with the computing thread and the other thread.
            wake: Called after an error that trying again cannot mend.
            patience: Seconds in which a server may answer what cannot be.
        """
        super().__init__(name=f"redis {name}", daemon=True)
        self.link = link
        self.lead = threading.Lock()
        self.trouble: Trouble | None = None  # why nothing can be exchanged now
        self._patience = patience
        self._garbled_since = 0.0  # since when all answers are garbled; 0: they are not
        self._ends = ends
        self._wake = wake
        self._error: Exception | None = None  # of a turn that another thread took
        self._pause = FIRST_RETRY
        self._was_garbled = False

    def can_lead(self) -> bool:
        """Take the lead for the calling thread, and return True, unless this thread has it, or something to mend."""
        if not self.lead.acquire(blocking=False):
            return False
        if self._error is None and self.link.is_fit:
            return True
        self.lead.release()
        return False

    def act(self, step: Callable[[], bool]) -> bool:
        """Do `step`, a part of a turn, for the calling thread, which has the lead.

        Returns True if the caller still has the lead. If `step` returns False or raises, the lead is given back, this
        thread must go on, and handles the error.
        """
        try:
            if step():
                return True
        except Exception as error:  # noqa: BLE001 - this thread raises it
            self._error = error
        self.lead.release()
        return False

    def run(self) -> None:
        """Take turns until the ends are over, then close the link. An error that remains ends both threads."""
        try:
            while self._take_lead():
                try:
                    self._try_turn()
                finally:
                    self.lead.release()
        except Exception as error:  # noqa: BLE001 - it is raised where the queues are used
            self._ends.close(error)
            self._wake()
        finally:
            with self.lead:  # the computing thread may still wait for this connection
                self.link.close()

    @abstractmethod
    def _take_lead(self) -> bool:
        """Take the lead once this thread is needed. Returns False if the queues are closed."""

    @abstractmethod
    def _turn(self) -> None:
        """Exchange with the server, waiting for it."""

    def _try_turn(self) -> None:
        try:
            if self._error is not None:
                raise self._error
            self._turn()
            self._pause, self._was_garbled = FIRST_RETRY, False
        except (RedisAway, RedisRefusal) as error:
            self._back_off(error)
        except GARBLED as error:
            if self._was_garbled and isinstance(error, BrokerError):
                raise
            if self._was_garbled:
                raise RedisGarbled(f"Redis at {self.link.address} answered wrongly twice: {error!r:.200}") from error
            self._was_garbled = True
            self.link.close()
            self._back_off(error)
        self._error = None

    def _back_off(self, error: Exception) -> None:
        """Wait a little, longer each time. Raises `error` if all answers have been garbled for too long."""
        self._note(error)
        if self._garbled_since and monotonic() - self._garbled_since >= self._patience:
            raise error
        self._wait(self._pause)
        self._pause = min(2 * self._pause, LONGEST_RETRY)

    def _note(self, error: Exception) -> Trouble:
        self.trouble = Trouble(str(error), self.trouble.since if self.trouble else monotonic())
        self._garbled_since = self._garbled_since or monotonic() if isinstance(error, RedisGarbled) else 0.0
        return self.trouble

    def _mended(self) -> None:
        """Note that an exchange has gone well."""
        self.trouble, self._garbled_since = None, 0.0

    def _wait(self, seconds: float) -> None:
        self._ends.over.wait(seconds)


class Request(msgspec.Struct, frozen=True):
    """Questions that were asked at time `since`: the announcements of the `doubtful`, and entries from `places` on."""

    since: float
    units: list[Unit]
    doubtful: list[StreamReader]
    places: dict[StreamReader, tuple[int, EntryId]]


class ReceiverThread(RedisThread):
    """Thread that reads for the writers and readers of `ends`."""

    def __init__(
        self,
        link: RedisLink,
        ends: SharedEnds,
        wake: Callable[[], None],
        kick: Callable[[], None],
        patience: float,
    ) -> None:
        """Make the thread, which is not started.

        Args:
            link: Connection of the thread.
            ends: State that is shared with the computing thread and the other thread.
            wake: Called when a message is ready or will not come, and when a writer has credit.
            kick: Called when a writer or reader has something to send to the server.
            patience: Seconds in which a server may answer what cannot be.
        """
        super().__init__("receiver", link, ends, wake, patience)
        self._kick = kick
        self._request: Request | None = None  # what was asked for, and is not here yet
        self._rests = False  # there was nothing to ask for: the thread leaves the lead for a moment
        self._uses = self._seen = 0  # how often the computing thread has led or tried to, and as this thread knows it

    def ask(self, *, leads: bool) -> bool:
        """Ask for messages, for the computing thread, which is about to wait.

        Args:
            leads: True if the computing thread has the lead.

        Returns:
            True if the computing thread has the lead now: then it waits for `link`, calls `receive` when more is here,
            and releases `lead` in the end.
        """
        if leads:
            return self.act(self._ask_now)
        leads = self.can_lead() and self.act(self._ask_now)
        if not leads:  # what this thread has asked for may not say what was taken since
            self._report()
        if leads or self.lead.locked():  # else this thread is needed, however often the other one waits
            self._uses += 1
        return leads

    def ask_ahead(self) -> None:
        """Ask for messages before the computing thread, which calls this, waits for them.

        What comes while that thread computes is then sent to it.
        """
        if self._request is None and self.can_lead() and self.act(self._ask_now):
            self.lead.release()

    def receive(self) -> bool:
        """Process what is here, for the computing thread. Returns True if that still has the lead."""
        return self.act(self._receive_now)

    def _take_lead(self) -> bool:
        if self._rests:
            self._wait(BLOCK_BRIEFLY)
        while not self._ends.over.is_set():
            if self._uses == self._seen and self.lead.acquire(blocking=False):
                return True
            self._seen = self._uses
            self._wait(PARKED)
        return False

    def _turn(self) -> None:
        if self._request is None or not self.link.is_fit:
            self._request = self._ask()
        self._rests = self._request is None
        if self._request is not None:
            self._receive(self._request, self.link.receive(self._request.units))

    def _ask_now(self) -> bool:
        self._request = self._request or self._ask()
        return self._request is not None and monotonic() - self._request.since < OVERDUE

    def _receive_now(self) -> bool:
        outcomes = self.link.receive_now(self._request.units) if self._request else None
        if self._request is not None and outcomes is not None:
            self._receive(self._request, outcomes)
        return True

    def _report(self) -> None:
        with self._ends.lock:
            if any(reader.receiver.must_report for reader in self._ends.readers):
                self._kick()

    def _ask(self) -> Request | None:
        now = monotonic()
        with self._ends.lock:
            readers = self._ends.readers
            places = {reader: place for reader in readers if (place := reader.position(now))}
            doubtful = [reader for reader in readers if reader.has_doubts]
            after = {writer.keys.taken: b"%d-%d" % writer.sender.newest for writer in self._ends.writers}
            after |= {reader.keys.entries: b"%d-%d" % place for reader, (_, place) in places.items()}
            self._report()
            block = BLOCK_BRIEFLY if any(reader.is_started and reader not in places for reader in readers) else BLOCK
        if not after:
            return None
        asks = [last_entry(reader.keys.kept) for reader in doubtful]
        units: list[Unit] = [[ask] for ask in [*asks, _read(after, _count(places), block)]]
        self.link.send(pack(units))
        return Request(now, units, doubtful, places)

    def _receive(self, request: Request, outcomes: list[list[Any]]) -> None:
        self._request = None
        *retentions, streams = [sound(outcome)[0] for outcome in outcomes]
        found: dict[bytes, Any] = dict(streams or ())
        places = request.places
        for reader, newest_entry in zip(request.doubtful, retentions, strict=True):
            self._receive_retention(reader, newest_entry, nothing=reader in places and reader.keys.entries not in found)
        self._receive_credit(found)
        for reader, (turn, _) in places.items():
            self._receive_entries(reader, turn, found.get(reader.keys.entries, ()))
        self._mended()

    def _receive_retention(self, reader: StreamReader, found: list[Any], *, nothing: bool) -> None:
        try:
            entry_id, retention = (
                read_retention(found[0], reader.form.kept) if found else (EntryId(0, 0), Retention(0, 0))
            )
        except BadMessage:  # its producer will notice, and announce it again
            return
        with self._ends.lock:
            reader.update(entry_id, retention, nothing=nothing)
        if reader.gap:
            self._wake()

    def _receive_credit(self, found: dict[bytes, Any]) -> None:
        for writer in self._ends.writers:
            for raw in found.get(writer.keys.taken, ()):
                try:
                    credit = read_credit(raw, writer.form.taken)
                except BadMessage:  # its consumer will notice, and announce it again
                    self._wait(BLOCK)
                    continue
                with self._ends.lock:
                    writer.update(credit)
                    self._kick()
                self._wake()

    def _receive_entries(self, reader: StreamReader, turn: int, entries: Sequence[Any]) -> None:
        with self._ends.lock:
            whole = reader.read(turn, entries, monotonic())
        for message in whole:
            self._receive_message(reader, message)

    def _receive_message(self, reader: StreamReader, whole: WholeMessage) -> None:
        try:
            message, bits = reader.decode(whole)  # without the lock: it takes time
        except ForeignMessage:
            raise
        except BadMessage as error:
            with self._ends.lock:
                reader.count_damage(whole, str(error), monotonic())
            return
        with self._ends.lock:
            reader.accept(whole, message, bits, monotonic())
        self._wake()


def _count(readers: Collection[StreamReader]) -> int:
    """Return the number of entries of each stream to read at once."""
    rooms = [min(reader.receiver.room, READ_AHEAD // reader.largest) for reader in readers]
    return max(1, min(*rooms, MOST_ENTRIES // len(rooms))) if rooms else 1


def _read(after: dict[bytes, bytes], count: int, block: float) -> Command:
    wait = b"%d" % round(1000 * block)
    return (b"XREAD", b"COUNT", b"%d" % count, b"BLOCK", wait, b"STREAMS", *after, *after.values())
