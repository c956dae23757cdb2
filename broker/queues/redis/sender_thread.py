"""The thread that sends what the writers and readers of a worker have to say to Redis, so that computing never waits.

All that is to be said at one moment goes out together; of each queue one transaction is under way at a time. While
the server is away, or refuses, it is tried again, more and more seldom; nothing is forgotten meanwhile.
"""

import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, time
from typing import Any

import structlog

from stageline.broker.errors import QueueFull
from stageline.broker.network.redis_connection import RedisAway, RedisLink, RedisRefusal, pack, sound
from stageline.broker.network.redis_requirements import INQUIRY, RedisUnfit
from stageline.broker.queues.base import Trouble

from .entries import layout_key, layout_value
from .exchange import Exchange
from .reader import Reader
from .writer import Writer

IDLE = 1.0  # seconds without anything to say after which it is seen whether the server still has everything
FITNESS = 5.0  # seconds between two looks at the server's settings
SMALL = 2**16  # bytes that a socket takes in at once when nothing else is under way
SOON, LATE = 0.02, 1.0  # seconds before it is tried again: the first time, and at most

# What an answer leads to that was damaged on its way, which the protocol does not notice: it is asked once more, over
# another connection, before it is believed.
NONSENSE = (RedisUnfit, TypeError, ValueError, LookupError)

log = structlog.get_logger()


@dataclass(slots=True)
class Batch:
    """What goes out together."""

    tasks: list[Exchange]
    packed: list[bytes | memoryview]
    sent: bool = False

    @property
    def small(self) -> bool:
        """Whether it can be sent without waiting: the system takes it in whole, whatever the server does."""
        return len(self.packed) == 1 and 0 < len(self.packed[0]) <= SMALL


class SenderThread:
    """Serves `writers` and `readers`, which `changed` guards.

    `patience`: seconds that the server may refuse, or, before it was met for the first time, be away.
    """

    def __init__(
        self,
        link: RedisLink,
        changed: threading.Condition,
        run: str,
        microbatches: int,
        patience: float,
    ) -> None:
        self.writers: list[Writer] = []
        self.readers: list[Reader] = []
        self.trouble: Trouble | None = None  # why nothing can be sent now
        self.closing = False
        self._link = link
        self._changed = changed
        self._layout = layout_key(run), layout_value(microbatches)
        self._patience = patience
        self._parked = False  # the thread waits for something to do
        self._batch = Batch([], [])
        self._looked = float("-inf")
        self._fitness = monotonic()
        self._refused = 0.0  # since when the server has refused; 0: it does not
        self._pause = SOON
        self._doubted = False
        self._met = False

    def run(self) -> None:
        """Sends until `closing`. Raises what cannot get better by trying again."""
        while not self.closing:
            batch = self._next_batch()
            try:
                self._carry_out(batch)
            except (RedisAway, RedisRefusal) as error:
                self._stumble(error)
            except NONSENSE as error:
                if self._doubted:
                    raise
                self._doubted = True
                self._link.close()
                self._stumble(error)

    def kick(self) -> None:
        """There may be something to say. What is small goes out at once, from this thread, without waiting.

        `changed` is held.
        """
        if self._parked:
            self._batch = self._prepare()
            self._parked = not self._batch.tasks
            if self._batch.small and self._link.ready:
                self._send_now(self._batch)
        self._changed.notify_all()

    @property
    def settled(self) -> bool:
        """Whether all that may be sent has arrived."""
        return self._parked and all(w.settled for w in self.writers) and not any(r.wants for r in self.readers)

    def _next_batch(self) -> Batch:
        """Waits for something to do."""
        with self._changed:
            self._batch = self._prepare()
            while not self._batch.tasks and not self.closing:
                self._parked = True
                self._changed.notify_all()
                self._changed.wait(IDLE)
                if not self._batch.tasks:  # nobody else has prepared, and maybe sent, the next one
                    self._batch = self._prepare()
            self._parked = False
            return self._batch

    def _prepare(self) -> Batch:
        tasks = list(self._tasks())
        return Batch(tasks, pack([task.unit for task in tasks]))

    def _send_now(self, batch: Batch) -> None:
        batch.sent = True
        with suppress(RedisAway):  # the thread will find out
            self._link.send(batch.packed)

    def _tasks(self) -> Iterator[Exchange]:
        now = monotonic()
        idle = now - self._looked >= IDLE
        if idle:
            self._looked = now
            yield self._check_layout()
        if now - self._fitness >= FITNESS:
            self._fitness = now
            yield Exchange(INQUIRY, self._link.check)
        for reader in self.readers:
            if task := reader.task(idle=idle):
                yield task
        for writer in self.writers:
            if task := writer.task(round(1000 * time()), idle=idle):
                yield task

    def _carry_out(self, batch: Batch) -> None:
        if not batch.sent:
            self._link.send(batch.packed)
        outcomes = self._link.receive([task.unit for task in batch.tasks])
        refusals = []
        with self._changed:
            for task, answers in zip(batch.tasks, outcomes, strict=True):
                try:
                    task.hear(answers)
                except RedisRefusal as error:  # the others are heard all the same
                    refusals.append(error)
        if not self._met:
            self._met = True
            for warning in self._link.warnings:
                log.warning("queues", reason=warning)
        if refusals:
            raise refusals[0]
        self._refused, self._pause, self.trouble, self._doubted = 0.0, SOON, None, False

    def _stumble(self, error: Exception) -> None:
        """Waits a little, longer each time. Raises `QueueFull` if the server has refused for too long, `error` if it
        never came."""
        if self.trouble is None:
            log.warning("queues wait", reason=str(error))
        self.trouble = Trouble(str(error), self.trouble.since if self.trouble else monotonic())
        if not self._met and monotonic() - self.trouble.since >= self._patience:
            raise error
        self._refused = self._refused or monotonic() if isinstance(error, RedisRefusal) else 0.0
        if self._refused and monotonic() - self._refused > self._patience:
            raise QueueFull(
                f"{error}, for {self._patience:g} s now. Give it more memory (maxmemory) or disk, or let the run keep "
                "less: a smaller recovery.snapshot_every"
            ) from error
        with self._changed:
            self._forget_state()
            self._changed.wait_for(lambda: self.closing, self._pause)
        self._pause = min(2 * self._pause, LATE)

    def _forget_state(self) -> None:
        self._looked = float("-inf")
        for writer in self.writers:
            writer.lose()
        for reader in self.readers:
            reader.wants = True

    def _check_layout(self) -> Exchange:
        key, value = self._layout
        return Exchange([(b"SET", key, value, b"NX"), (b"GET", key)], self._hear_layout)

    def _hear_layout(self, answers: list[Any]) -> None:
        _, found = sound(answers)
        if found != self._layout[1]:
            raise RedisUnfit(
                f"this run is kept at {self._link.address} in layout {found!r}, this worker uses {self._layout[1]!r}: "
                "start all workers from the same plan and the same version of stageline"
            )
