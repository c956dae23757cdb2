"""Looks at the queues of a run in Redis from outside, without disturbing the workers."""

from time import time
from typing import Any

from stageline.broker.codec.message import LIMITS, Flow, Limits, Message, allocate, assemble, read_header
from stageline.broker.errors import BadMessage
from stageline.broker.network.redis_connection import RedisLink
from stageline.broker.queues.base import Depth, QueueKey

from .announcements import newest, read_credit
from .entries import Keys, StreamEntry, pour, prefix, read_entry

_MANY = b"1000"  # keys looked at in one go


class QueueInspector:
    """The queues of `run` on the server at `url`. Its methods raise `RedisAway`, `RedisRefusal` and `RedisUnfit`."""

    def __init__(self, url: str, run: str) -> None:
        self._run = run
        self._link = RedisLink(url)

    def keys(self) -> list[QueueKey]:
        """The queues that have ever had a message."""
        start = prefix(self._run)
        names = (key.decode().removeprefix(start) for key in self._all_keys())
        return sorted(key for name in names if (key := _queue_key(name)) is not None)

    def depth(self, key: QueueKey) -> Depth:
        """What the server has of the queue; nothing is in flight there. What is taken, the consumer announces now and
        then.

        `bytes` is what the queue occupies at the server.
        """
        keys = Keys(self._run, key)
        oldest, newest = self._end(b"XRANGE", keys), self._end(b"XREVRANGE", keys)
        if oldest is None or newest is None:
            return Depth(0, 0, 0, 0, 0.0)
        taken = max(self._taken(keys), oldest.id.number)
        end = newest.id.number + 1
        return Depth(
            ready=max(0, end - taken),
            in_flight=0,
            retained=end - oldest.id.number,
            bytes=self._link.ask(b"MEMORY", b"USAGE", keys.entries) or 0,
            oldest=max(0.0, time() - oldest.milliseconds / 1000),
        )

    def peek(self, key: QueueKey, limit: int, limits: Limits = LIMITS) -> list[Message]:
        """The first `limit` messages that the server has. Raises `BadMessage` for one that is damaged."""
        keys = Keys(self._run, key)
        oldest = self._end(b"XRANGE", keys)
        first = oldest.id.number if oldest else 0
        found = (self._message(keys, number, limits) for number in range(first, first + max(0, limit)))
        return [message for message in found if message is not None]

    def forget(self) -> None:
        """Removes the run's queues from the server. The broker's records stay, if they are there too."""
        records = f"{prefix(self._run)}store:".encode()
        for key in self._all_keys():
            if not key.startswith(records):
                self._link.ask(b"UNLINK", key)

    def close(self) -> None:
        self._link.close()

    def _end(self, command: bytes, keys: Keys) -> StreamEntry | None:
        ends = (b"-", b"+") if command == b"XRANGE" else (b"+", b"-")
        found = self._link.ask(command, keys.entries, *ends, b"COUNT", b"1")
        return read_entry(found[0]) if found else None

    def _taken(self, keys: Keys) -> int:
        found = self._link.ask(*newest(keys.taken))
        return read_credit(found[0]).received if found else 0

    def _message(self, keys: Keys, number: int, limits: Limits) -> Message | None:
        entries = [read_entry(raw) for raw in self._link.ask(b"XRANGE", keys.entries, *2 * [b"%d" % number])]
        if not entries:
            return None
        if entries[-1].header is None:
            raise BadMessage(f"message {number} of {keys.entries.decode()} lies there without its header")
        header = read_header(entries[-1].header, limits=limits)
        buffers = allocate(header)
        pour([piece for entry in entries for piece in entry.data], buffers)
        return assemble(header, buffers)

    def _all_keys(self) -> set[bytes]:
        pattern = _literally(prefix(self._run)) + b"*"
        found: set[bytes] = set()
        cursor: Any = b"0"
        while True:
            cursor, keys = self._link.ask(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", _MANY)
            found |= set(keys)
            if cursor == b"0":
                return found


def _queue_key(name: str) -> QueueKey | None:
    flow, _, stage = name.partition("-")
    return QueueKey(Flow(flow), int(stage)) if flow in list(Flow) and stage.isdecimal() else None


def _literally(text: str) -> bytes:
    """A pattern that matches only the text itself."""
    return "".join(f"\\{sign}" if sign in "*?[]^\\" else sign for sign in text).encode()
