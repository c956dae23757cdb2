"""The thread that reads ahead from Redis: messages for the readers of a worker, and for its writers how far their
consumers are. A message lies ready, whole and checked, before the compute loop asks for it.
"""

import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from stageline.broker.errors import BadMessage, ForeignMessage
from stageline.broker.network.redis_connection import Command, RedisAway, RedisLink, RedisRefusal, sound

from .announcements import CreditEntry, RetentionEntry, newest, read_announcement
from .entries import EntryId
from .reader import Reader, WholeMessage
from .sender_thread import LATE, NONSENSE, SOON
from .writer import Writer

BLOCK = 0.1  # seconds that the server holds an answer back when there is nothing
GLANCE = 0.01  # the same while some queue waits for room or rests, and may be wanted again at any moment
AHEAD = 16 * 2**20  # bytes read at once, about


class ReceiverThread:
    """Serves `writers` and `readers`, which `changed` guards. It calls `kick` when one has something to say to the
    server, and `arrived` when a message is ready or will not come."""

    def __init__(
        self, link: RedisLink, changed: threading.Condition, kick: Callable[[], None], arrived: Callable[[], None]
    ) -> None:
        self.writers: list[Writer] = []
        self.readers: list[Reader] = []
        self.closing = False
        self._link = link
        self._changed = changed
        self._kick = kick
        self._arrived = arrived
        self._pause = SOON
        self._doubted = False

    def run(self) -> None:
        """Reads until `closing`. Raises what cannot get better by trying again."""
        while not self.closing:
            try:
                self._turn()
                self._pause, self._doubted = SOON, False
            except (RedisAway, RedisRefusal):  # the sender tells; it stumbles over the same
                self._rest()
            except NONSENSE:
                if self._doubted:
                    raise
                self._doubted = True
                self._link.close()
                self._rest()

    def _rest(self) -> None:
        self._wait(self._pause)
        self._pause = min(2 * self._pause, LATE)

    def _turn(self) -> None:
        with self._changed:
            now = monotonic()
            places = {reader: place for reader in self.readers if (place := reader.place(now))}
            doubtful = [reader for reader in self.readers if reader.doubts]
            after = {writer.keys.taken: writer.said for writer in self.writers}
            after |= {reader.keys.entries: place for reader, (_, place) in places.items()}
            block = BLOCK if all(reader in places for reader in self.readers if reader.begun) else GLANCE
        if not after:
            self._wait(block)
            return
        asks = [newest(reader.keys.kept) for reader in doubtful]
        outcomes = self._link.exchange([[ask] for ask in [*asks, _read(after, _count(places), block)]])
        *standings, streams = [sound(outcome)[0] for outcome in outcomes]
        found: dict[bytes, Any] = dict(streams or ())
        for reader, said in zip(doubtful, standings, strict=True):
            self._hear_standing(reader, said, nothing=reader in places and reader.keys.entries not in found)
        self._hear_positions(found)
        for reader, (turn, _) in places.items():
            self._hear_entries(reader, turn, found.get(reader.keys.entries, ()))

    def _hear_standing(self, reader: Reader, said: list[Any], *, nothing: bool) -> None:
        try:
            word_id, standing = (
                read_announcement(said[0], RetentionEntry) if said else (EntryId(0, 0), RetentionEntry(0, 0))
            )
        except BadMessage:  # its producer will see it and say it again
            return
        with self._changed:
            reader.hear_standing(word_id, standing, nothing=nothing)
            self._tell(reader)
        if reader.gap:
            self._arrived()

    def _hear_positions(self, found: dict[bytes, Any]) -> None:
        for writer in self.writers:
            for raw in found.get(writer.keys.taken, ()):
                try:
                    said, position = read_announcement(raw, CreditEntry)
                except BadMessage:  # its consumer will see it and say it again
                    self._wait(BLOCK)
                    continue
                with self._changed:
                    writer.hear(said, position)
                    self._kick()

    def _hear_entries(self, reader: Reader, turn: int, entries: Sequence[Any]) -> None:
        with self._changed:
            if not entries:
                reader.quiet()
            whole = reader.hear(turn, entries, monotonic())
            self._tell(reader)
        for message in whole:
            self._open(reader, message)

    def _open(self, reader: Reader, whole: WholeMessage) -> None:
        try:
            message, marks = reader.open_message(whole)
        except ForeignMessage:
            raise
        except BadMessage as error:
            with self._changed:
                reader.damaged(whole, str(error), monotonic())
                self._tell(reader)
            return
        with self._changed:
            reader.accept(whole, message, marks)
            self._tell(reader)
        self._arrived()

    def _tell(self, reader: Reader) -> None:
        if reader.wants:
            self._kick()

    def _wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.closing, seconds)


def _count(places: dict[Reader, tuple[int, EntryId]]) -> int:
    """How many entries of each stream to read at once."""
    if not places:
        return 1
    return max(1, min(min(reader.room for reader in places), AHEAD // max(1, *[reader.largest for reader in places])))


def _read(after: dict[bytes, EntryId], count: int, block: float) -> Command:
    wait = b"%d" % round(1000 * block)
    return (b"XREAD", b"COUNT", b"%d" % count, b"BLOCK", wait, b"STREAMS", *after, *map(bytes, after.values()))
