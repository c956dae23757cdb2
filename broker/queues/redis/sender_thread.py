"""The thread that sends the commands of a worker's stream writers and readers to Redis, so that computing never waits.

All that is due at one moment is sent together; of each queue one transaction is under way at a time. While the server
is away, or refuses, sending is tried again, more and more seldom; nothing is forgotten meanwhile.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic, time
from typing import Any

import structlog

from stageline.broker.errors import BrokerError, QueueFull
from stageline.broker.network.redis_connection import (
    INQUIRY,
    Exchange,
    RedisAway,
    RedisKeyTaken,
    RedisLink,
    RedisRefusal,
    RedisUnfit,
    pack,
    sound,
)
from stageline.broker.queues.base import Trouble

from .stream_reader import StreamReader
from .stream_writer import StreamWriter

IDLE = 1.0  # seconds between two checks whether the server still has everything
FITNESS = 5.0  # seconds between two checks of the server's settings
SMALL = 2**16  # bytes that a socket accepts at once when nothing else is under way
FIRST_RETRY, LONGEST_RETRY = 0.02, 1.0  # seconds before the first retry, and at most

# What a damaged answer can lead to, since the protocol has no checksum: the commands are sent once more, over another
# connection, before the error is believed.
GARBLED = (RedisUnfit, TypeError, ValueError, LookupError)

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class SharedEnds:
    """What the computing thread and the two threads of a worker share; `changed` guards it.

    `failure` is the error that ended one of the threads.
    """

    changed: threading.Condition = field(default_factory=threading.Condition)
    writers: list[StreamWriter] = field(default_factory=list)
    readers: list[StreamReader] = field(default_factory=list)
    closing: bool = False
    failure: Exception | None = None

    def close(self, failure: Exception | None = None) -> None:
        """Lets both threads end."""
        with self.changed:
            self.closing = True
            self.failure = failure or self.failure
            self.changed.notify_all()


class RedisThread(threading.Thread, ABC):
    """Takes turns until `ends` are closing, over `link`. Calls `wake` after an error that trying again cannot mend."""

    def __init__(self, name: str, link: RedisLink, ends: SharedEnds, wake: Callable[[], None]) -> None:
        super().__init__(name=f"redis {name}", daemon=True)
        self.link = link
        self._ends = ends
        self._wake = wake
        self._pause = FIRST_RETRY
        self._was_garbled = False

    @abstractmethod
    def _turn(self) -> None:
        """Exchanges once with the server."""

    def run(self) -> None:
        try:
            while not self._ends.closing:
                self._try_turn()
        except Exception as error:  # noqa: BLE001 - it is raised where the queues are used
            self._ends.close(error)
            self._wake()
        finally:
            self.link.close()

    def _try_turn(self) -> None:
        try:
            self._turn()
            self._pause, self._was_garbled = FIRST_RETRY, False
        except (RedisAway, RedisRefusal) as error:
            self._back_off(error)
        except GARBLED as error:
            if self._was_garbled:
                raise
            self._was_garbled = True
            self.link.close()
            self._back_off(error)

    def _back_off(self, error: Exception) -> None:
        """Waits a little, longer each time."""
        self._wait(self._pause)
        self._pause = min(2 * self._pause, LONGEST_RETRY)

    def _wait(self, seconds: float) -> None:
        with self._ends.changed:
            self._ends.changed.wait_for(lambda: self._ends.closing, seconds)


@dataclass(slots=True)
class Batch:
    """What is sent together."""

    exchanges: list[Exchange]
    packed: list[bytes | memoryview]
    sent: bool = False

    @property
    def small(self) -> bool:
        """Whether it can be sent without waiting: the system takes it in whole, whatever the server does."""
        return len(self.packed) == 1 and 0 < len(self.packed[0]) <= SMALL


class SenderThread(RedisThread):
    """Sends what the writers and readers of `ends` have for the server.

    `layout`: the key and the value that say how the run lies there. `patience`: seconds that the server may refuse, or,
    before it was met for the first time, be away.
    """

    def __init__(
        self,
        link: RedisLink,
        ends: SharedEnds,
        wake: Callable[[], None],
        layout: tuple[bytes, bytes],
        patience: float,
    ) -> None:
        super().__init__("sender", link, ends, wake)
        self.trouble: Trouble | None = None  # why nothing can be sent now
        self._layout = layout
        self._patience = patience
        self._is_waiting = False  # the thread waits for something to send
        self._batch = Batch([], [])
        self._checked_at = float("-inf")
        self._fitness_at = monotonic()
        self._refused_since = 0.0  # since when the server has refused; 0: it does not
        self._connected_once = False

    def kick(self) -> None:
        """Call when there may be something to send. A small batch is sent at once, by this thread, without waiting.

        `changed` is held.
        """
        if self._is_waiting:
            self._batch = self._prepare()
            self._is_waiting = not self._batch.exchanges
            if self._batch.small and self.link.is_fit:
                self._batch.sent = True
                with suppress(RedisAway):  # the thread will notice
                    self.link.send(self._batch.packed)
        self._ends.changed.notify_all()

    @property
    def is_settled(self) -> bool:
        """Whether all that may be sent has arrived."""
        return (
            self._is_waiting
            and all(writer.is_settled for writer in self._ends.writers)
            and not any(reader.receiver.must_report for reader in self._ends.readers)
        )

    def _turn(self) -> None:
        batch = self._next_batch()
        if not batch.sent:
            self.link.send(batch.packed)
        outcomes = self.link.receive([exchange.unit for exchange in batch.exchanges])
        refusals = []
        with self._ends.changed:
            for exchange, answers in zip(batch.exchanges, outcomes, strict=True):
                try:
                    exchange.receive(answers)
                except RedisRefusal as error:  # the other answers are still received
                    refusals.append(error)
        if not self._connected_once:
            self._connected_once = True
            for warning in self.link.warnings:
                log.warning("queues", reason=warning)
        if refusals:
            raise refusals[0]
        self._refused_since, self.trouble = 0.0, None

    def _next_batch(self) -> Batch:
        """Waits for something to send."""
        with self._ends.changed:
            self._batch = self._prepare()
            while not self._batch.exchanges and not self._ends.closing:
                self._is_waiting = True
                self._ends.changed.notify_all()
                self._ends.changed.wait(IDLE)
                if not self._batch.exchanges:  # `kick` has not prepared, and maybe sent, the next one
                    self._batch = self._prepare()
            self._is_waiting = False
            return self._batch

    def _prepare(self) -> Batch:
        exchanges = list(self._exchanges())
        return Batch(exchanges, pack([exchange.unit for exchange in exchanges]))

    def _exchanges(self) -> Iterator[Exchange]:
        now = monotonic()
        idle = now - self._checked_at >= IDLE
        if idle:
            self._checked_at = now
            key, value = self._layout
            yield Exchange([(b"SET", key, value, b"NX"), (b"GET", key)], self._receive_layout)
        if now - self._fitness_at >= FITNESS:
            self._fitness_at = now
            yield Exchange(INQUIRY, self.link.check)
        for reader in self._ends.readers:
            if exchange := reader.next_exchange(idle=idle):
                yield exchange
        for writer in self._ends.writers:
            if exchange := writer.next_exchange(round(1000 * time()), idle=idle):
                yield exchange

    def _back_off(self, error: Exception) -> None:
        """Waits as both threads do. Raises `QueueFull` or `RedisUnfit` if the server has refused for too long, `error`
        if it never came."""
        if self.trouble is None:
            log.warning("queues wait", reason=str(error))
        self.trouble = Trouble(str(error), self.trouble.since if self.trouble else monotonic())
        if not self._connected_once and monotonic() - self.trouble.since >= self._patience:
            raise error
        self._refused_since = self._refused_since or monotonic() if isinstance(error, RedisRefusal) else 0.0
        if self._refused_since and monotonic() - self._refused_since > self._patience:
            raise self._given_up(error) from error
        with self._ends.changed:
            self._checked_at = float("-inf")
            for writer in self._ends.writers:
                writer.lose_connection()
            for reader in self._ends.readers:
                reader.receiver.must_report = True
            super()._back_off(error)

    def _given_up(self, error: Exception) -> BrokerError:
        if isinstance(error, RedisKeyTaken):
            return RedisUnfit(
                f"the keys of this run cannot be kept at {self.link.address}: {error}. It was waited for "
                f"{self._patience:g} s; resume the run"
            )
        return QueueFull(
            f"{error}, for {self._patience:g} s now. Give it more memory (maxmemory) or disk, or let the run keep "
            "less: a smaller recovery.snapshot_every"
        )

    def _receive_layout(self, answers: list[Any]) -> None:
        _, found = sound(answers)
        if found != self._layout[1]:
            raise RedisUnfit(
                f"this run is kept at {self.link.address} in layout {found!r}, this worker uses {self._layout[1]!r}: "
                "start all workers from the same plan and the same version of stageline"
            )
