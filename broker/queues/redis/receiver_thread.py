"""The thread that reads ahead from Redis: messages for the readers of a worker, and credit for its writers. A message
is ready, whole and checked, before the compute loop asks for it.
"""

import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from stageline.broker.errors import BadMessage, ForeignMessage
from stageline.broker.network.redis_connection import Command, RedisAway, RedisLink, RedisRefusal, sound
from stageline.broker.queues.credit import Retention

from .announcements import newest, read_credit, read_retention
from .entries import EntryId
from .sender_thread import FIRST_RETRY, GARBLED, LONGEST_RETRY
from .stream_reader import StreamReader, WholeMessage
from .stream_writer import StreamWriter

BLOCK = 0.1  # seconds that the server holds an answer back when there is nothing
BLOCK_BRIEFLY = 0.01  # the same while some queue has no room or pauses, and may be read again at any moment
READ_AHEAD = 16 * 2**20  # bytes read at once, about


class ReceiverThread:
    """Serves `writers` and `readers`, which `changed` guards. It calls `kick` when one has something to send to
    the server, and `arrived` when a message is ready or will not come."""

    def __init__(
        self, link: RedisLink, changed: threading.Condition, kick: Callable[[], None], arrived: Callable[[], None]
    ) -> None:
        self.writers: list[StreamWriter] = []
        self.readers: list[StreamReader] = []
        self.closing = False
        self._link = link
        self._changed = changed
        self._kick = kick
        self._arrived = arrived
        self._pause = FIRST_RETRY
        self._was_garbled = False

    def run(self) -> None:
        """Reads until `closing`. Raises an error that trying again cannot mend."""
        while not self.closing:
            try:
                self._turn()
                self._pause, self._was_garbled = FIRST_RETRY, False
            except (RedisAway, RedisRefusal):  # the sender thread meets the same error, and reports it
                self._back_off()
            except GARBLED:
                if self._was_garbled:
                    raise
                self._was_garbled = True
                self._link.close()
                self._back_off()

    def _back_off(self) -> None:
        self._wait(self._pause)
        self._pause = min(2 * self._pause, LONGEST_RETRY)

    def _turn(self) -> None:
        with self._changed:
            now = monotonic()
            places = {reader: place for reader in self.readers if (place := reader.position(now))}
            doubtful = [reader for reader in self.readers if reader.has_doubts]
            after = {writer.keys.taken: EntryId(*writer.sender.newest) for writer in self.writers}
            after |= {reader.keys.entries: place for reader, (_, place) in places.items()}
            block = BLOCK if all(reader in places for reader in self.readers if reader.is_started) else BLOCK_BRIEFLY
        if not after:
            self._wait(block)
            return
        asks = [newest(reader.keys.kept) for reader in doubtful]
        outcomes = self._link.exchange([[ask] for ask in [*asks, _read(after, _count(places), block)]])
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
        with self._changed:
            reader.update(entry_id, retention, nothing=nothing)
            self._kick_for(reader)
        if reader.gap:
            self._arrived()

    def _receive_credit(self, found: dict[bytes, Any]) -> None:
        for writer in self.writers:
            for raw in found.get(writer.keys.taken, ()):
                try:
                    credit = read_credit(raw)
                except BadMessage:  # its consumer will notice, and announce it again
                    self._wait(BLOCK)
                    continue
                with self._changed:
                    writer.update(credit)
                    self._kick()

    def _receive_entries(self, reader: StreamReader, turn: int, entries: Sequence[Any]) -> None:
        with self._changed:
            if not entries:
                reader.note_silence()
            whole = reader.read(turn, entries, monotonic())
            self._kick_for(reader)
        for message in whole:
            self._decode(reader, message)

    def _decode(self, reader: StreamReader, whole: WholeMessage) -> None:
        try:
            message, bits = reader.decode(whole)
        except ForeignMessage:
            raise
        except BadMessage as error:
            with self._changed:
                reader.count_damage(whole, str(error), monotonic())
                self._kick_for(reader)
            return
        with self._changed:
            reader.accept(whole, message, bits)
            self._kick_for(reader)
        self._arrived()

    def _kick_for(self, reader: StreamReader) -> None:
        if reader.must_announce:
            self._kick()

    def _wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.closing, seconds)


def _count(places: dict[StreamReader, tuple[int, EntryId]]) -> int:
    """How many entries of each stream to read at once."""
    if not places:
        return 1
    return max(
        1, min(min(reader.room for reader in places), READ_AHEAD // max(1, *[reader.largest for reader in places]))
    )


def _read(after: dict[bytes, EntryId], count: int, block: float) -> Command:
    wait = b"%d" % round(1000 * block)
    return (b"XREAD", b"COUNT", b"%d" % count, b"BLOCK", wait, b"STREAMS", *after, *map(bytes, after.values()))
