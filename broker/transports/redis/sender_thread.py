"""Thread that sends the commands of a worker's stream writers and readers to Redis, so that computing never waits.

All that is due at one moment is sent together; the next is sent when that is answered. A small message is sent by the
thread that puts it, and its answer is read while that thread waits for a message, or puts the next one, or by this
thread within a second. While the server is away, or refuses, sending is tried again, more and more seldom; nothing is
forgotten in that time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic, time
from typing import Any

import structlog

from stageline.broker.errors import BrokerError, QueueFull

from .answers import RedisKeyTaken, RedisRefusal, RedisUnfit, sound
from .connection import INQUIRY, RedisLink
from .threads import RedisThread, SharedEnds
from .units import Chunk, Exchange, Unit, pack_exchanges

IDLE = 1.0  # seconds between two checks whether the server still has everything
FITNESS = 5.0  # seconds between two checks of the server's settings
SMALL = 2**17  # bytes that the computing thread copies into a socket; of more it leaves the copying to the thread

log = structlog.get_logger()


@dataclass(slots=True)
class Batch:
    """Exchanges that are sent together.

    `packed`: bytes still to be sent, None before they are made; `begun`: some have been sent.
    """

    exchanges: list[Exchange]
    packed: Sequence[Chunk] | None = None
    begun: bool = False

    @property
    def units(self) -> list[Unit]:
        """Commands of the exchanges."""
        return [exchange.unit for exchange in self.exchanges]

    @property
    def is_sent(self) -> bool:
        """True if everything is on its way."""
        return self.packed is not None and not self.packed

    def send_now(self, link: RedisLink) -> None:
        """Send the bytes that the system takes without waiting, if they are few; the others stay."""
        if sum(exchange.size for exchange in self.exchanges) > SMALL:
            return
        packed = self._pack()
        if sum(map(len, packed)) <= SMALL:
            self.packed, self.begun = link.send_now(packed), True

    def send(self, link: RedisLink) -> None:
        """Send all, or the rest of it."""
        (link.send_rest if self.begun else link.send)(self._pack())
        self.packed, self.begun = (), True

    def _pack(self) -> Sequence[Chunk]:
        if self.packed is None:
            self.exchanges = [exchange.made() for exchange in self.exchanges]
            self.packed = pack_exchanges(self.exchanges)
        return self.packed


class SenderThread(RedisThread):
    """Thread that sends what the writers and readers of `ends` have for the server."""

    def __init__(
        self,
        link: RedisLink,
        ends: SharedEnds,
        wake: Callable[[], None],
        layout: tuple[bytes, bytes],
        patience: float,
    ) -> None:
        """Make the thread, which is not started.

        Args:
            link: Connection that this thread alone uses, but for the thread that has its `lead`.
            ends: State that is shared with the computing thread and the other thread.
            wake: Wakes the computing thread.
            layout: Key and value that say how the run lies on the server.
            patience: Seconds that the server may refuse, or, before it was met for the first time, be away, or answer
                what cannot be.
        """
        super().__init__("sender", link, ends, wake, patience)
        self._layout = layout
        self._batch: Batch | None = None  # what is on its way, or to be sent
        self._is_called = False  # the thread has something to do
        self._is_awaited = False  # the computing thread waits until all answers are here
        self._checked_at = float("-inf")
        self._fitness_at = monotonic()
        self._refused_since = 0.0  # since when the server has refused; 0: it does not
        self._connected_once = False

    def kick(self) -> None:
        """Send what there may be to send. `changed` is held.

        If it is small, and all before it is answered, the calling thread sends it at once, without waiting; else this
        thread does it.
        """
        if self.can_lead() and self.act(self._send_now):
            self.lead.release()
        else:
            self._call()

    @property
    def awaits_answer(self) -> bool:
        """True if `settle` has an answer to read, or will have."""
        batch = self._batch
        return batch is not None and batch.is_sent and self.link.is_fit and not self.lead.locked()

    def settle(self) -> bool:
        """Read the answer to what was sent, as far as it is here, for the computing thread.

        The next `kick` need not read it then. Returns False if this thread must do it.
        """
        if not self.can_lead():
            return False
        if self.act(self._settle_now):
            self.lead.release()
            return True
        with self._ends.lock:
            self._call()
        return False

    def flush(self, timeout: float) -> bool:
        """Wait until the server has all that may be sent to it now. Returns False if `timeout` seconds were too few."""
        ends = self._ends
        with ends.changed:
            self._is_awaited = True
            self._call()
            ends.changed.wait_for(lambda: self._is_settled or ends.failure is not None, timeout)
            self._is_awaited = False
            return self._is_settled or ends.failure is not None

    def _call(self) -> None:
        """Let the thread send what is due and wait for the answers. `changed` is held."""
        self._is_called = True
        self._ends.changed.notify_all()

    @property
    def _is_settled(self) -> bool:
        """True if all that may be sent has arrived."""
        return (
            self._batch is None
            and not self._is_called
            and all(writer.is_settled for writer in self._ends.writers)
            and not any(reader.receiver.must_report for reader in self._ends.readers)
        )

    def _take_lead(self) -> bool:
        with self._ends.changed:
            self._ends.changed.wait_for(lambda: self._is_called or self._ends.over.is_set(), IDLE)
            self._is_called = False
        return not self._ends.over.is_set() and self.lead.acquire()

    def _turn(self) -> None:
        self._batch = self._batch or self._next_batch()
        while self._batch is not None:
            self._batch.send(self.link)
            self._receive(self._batch, self.link.receive(self._batch.units))
            self._batch = self._next_batch()
        with self._ends.changed:
            self._ends.changed.notify_all()

    def _send_now(self) -> bool:
        """Do as much of a turn as needs no waiting. Returns False if the thread must do the rest."""
        if self._batch is not None:
            outcomes = self.link.receive_now(self._batch.units) if self._batch.is_sent else None
            if outcomes is None:
                return False
            self._receive(self._batch, outcomes)
        self._batch = batch = self._next_batch()
        if batch is None:
            return True
        batch.send_now(self.link)
        return batch.is_sent and not (self._is_awaited or any(exchange.has_more for exchange in batch.exchanges))

    def _settle_now(self) -> bool:
        batch = self._batch
        if batch is not None and batch.is_sent:
            outcomes = self.link.receive_now(batch.units)
            if outcomes is not None:
                self._receive(batch, outcomes)
        return True

    def _receive(self, batch: Batch, outcomes: Sequence[list[Any]]) -> None:
        self._batch = None
        refusals = []
        with self._ends.lock:
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
        self._refused_since = 0.0
        self._mended()

    def _next_batch(self) -> Batch | None:
        with self._ends.lock:
            exchanges = list(self._exchanges())
        return Batch(exchanges) if exchanges else None

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
        for writer in self._ends.writers:  # messages go first: a consumer that waits gets one, and not only credit
            yield from writer.next_exchanges(round(1000 * time()), idle=idle)
        for reader in self._ends.readers:
            if exchange := reader.next_exchange(idle=idle):
                yield exchange

    def _back_off(self, error: Exception) -> None:
        """Wait as both threads do.

        Raises `QueueFull` or `RedisUnfit` if the server has refused for too long, `error` if it never came.
        """
        if self.trouble is None:
            log.warning("queues wait", reason=str(error))
        trouble = self._note(error)
        if not self._connected_once and monotonic() - trouble.since >= self._patience:
            raise error
        self._refused_since = self._refused_since or monotonic() if isinstance(error, RedisRefusal) else 0.0
        if self._refused_since and monotonic() - self._refused_since > self._patience:
            raise self._given_up(error) from error
        with self._ends.lock:
            self._batch = None
            self._is_called = True  # to try again after the pause, and not only when there is more to send
            self._checked_at = float("-inf")
            for writer in self._ends.writers:
                writer.lose_connection()
            for reader in self._ends.readers:
                reader.receiver.report()
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
