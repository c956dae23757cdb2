"""The thread that reads ahead from Redis: messages for the readers of a worker, and credit for its writers. A message
is ready, whole and checked, before the compute loop asks for it.
"""

from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any

from stageline.broker.errors import BadMessage, ForeignMessage
from stageline.broker.network.redis_connection import Command, RedisLink, sound
from stageline.broker.queues.delivery import Retention

from .entries import EntryId, last_entry, read_credit, read_retention
from .sender_thread import RedisThread, SharedEnds
from .stream_reader import StreamReader, WholeMessage

BLOCK = 0.1  # seconds that the server holds an answer back when there is nothing
BLOCK_BRIEFLY = 0.01  # the same while some queue has no room or pauses, and may be read again at any moment
READ_AHEAD = 16 * 2**20  # bytes read at once, about


class ReceiverThread(RedisThread):
    """Reads for the writers and readers of `ends`. Calls `kick` when one has something to send to the server, and
    `wake` when a message is ready or will not come, and when a writer has credit."""

    def __init__(self, link: RedisLink, ends: SharedEnds, wake: Callable[[], None], kick: Callable[[], None]) -> None:
        super().__init__("receiver", link, ends, wake)
        self._kick = kick

    def _turn(self) -> None:
        with self._ends.changed:
            now = monotonic()
            places = {reader: place for reader in self._ends.readers if (place := reader.position(now))}
            doubtful = [reader for reader in self._ends.readers if reader.has_doubts]
            after = {writer.keys.taken: EntryId(*writer.sender.newest) for writer in self._ends.writers}
            after |= {reader.keys.entries: place for reader, (_, place) in places.items()}
            block = (
                BLOCK if all(reader in places for reader in self._ends.readers if reader.is_started) else BLOCK_BRIEFLY
            )
        if not after:
            self._wait(block)
            return
        asks = [last_entry(reader.keys.kept) for reader in doubtful]
        outcomes = self.link.exchange([[ask] for ask in [*asks, _read(after, _count(places), block)]])
        *retentions, streams = [sound(outcome)[0] for outcome in outcomes]
        found: dict[bytes, Any] = dict(streams or ())
        for reader, newest_entry in zip(doubtful, retentions, strict=True):
            self._receive_retention(reader, newest_entry, nothing=reader in places and reader.keys.entries not in found)
        self._receive_credit(found)
        for reader, (turn, _) in places.items():
            self._receive_entries(reader, turn, found.get(reader.keys.entries, ()))

    def _receive_retention(self, reader: StreamReader, found: list[Any], *, nothing: bool) -> None:
        try:
            entry_id, retention = read_retention(found[0]) if found else (EntryId(0, 0), Retention(0, 0))
        except BadMessage:  # its producer will notice, and announce it again
            return
        with self._ends.changed:
            reader.update(entry_id, retention, nothing=nothing)
            self._kick_for(reader)
        if reader.gap:
            self._wake()

    def _receive_credit(self, found: dict[bytes, Any]) -> None:
        for writer in self._ends.writers:
            for raw in found.get(writer.keys.taken, ()):
                try:
                    credit = read_credit(raw)
                except BadMessage:  # its consumer will notice, and announce it again
                    self._wait(BLOCK)
                    continue
                with self._ends.changed:
                    writer.update(credit)
                    self._kick()
                self._wake()

    def _receive_entries(self, reader: StreamReader, turn: int, entries: Sequence[Any]) -> None:
        with self._ends.changed:
            whole = reader.read(turn, entries, monotonic())
            self._kick_for(reader)
        for message in whole:
            self._receive_message(reader, message)

    def _receive_message(self, reader: StreamReader, whole: WholeMessage) -> None:
        try:
            message, bits = reader.decode(whole)  # without the lock: it takes time
        except ForeignMessage:
            raise
        except BadMessage as error:
            with self._ends.changed:
                reader.count_damage(whole, str(error), monotonic())
                self._kick_for(reader)
            return
        with self._ends.changed:
            reader.accept(whole, message, bits)
            self._kick_for(reader)
        self._wake()

    def _kick_for(self, reader: StreamReader) -> None:
        if reader.receiver.must_report:
            self._kick()


def _count(readers: Iterable[StreamReader]) -> int:
    """How many entries of each stream to read at once."""
    return max(1, min([min(reader.receiver.room, READ_AHEAD // reader.largest) for reader in readers], default=1))


def _read(after: dict[bytes, EntryId], count: int, block: float) -> Command:
    wait = b"%d" % round(1000 * block)
    return (b"XREAD", b"COUNT", b"%d" % count, b"BLOCK", wait, b"STREAMS", *after, *map(bytes, after.values()))
