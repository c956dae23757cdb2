"""Queues within one process: the reference for the behaviour of a queue.

A message is encoded when it is put and decoded when it is taken, so that producer and consumer share no memory and
every transport carries the same bits.
"""

import threading
from time import monotonic

from stageline.broker.codec.message import Message, decode
from stageline.broker.control.queue_counts import Depth, Intake
from stageline.broker.errors import QueueClosed
from stageline.pipeline.program import Queue

from .delivery import Retention
from .log import UNLIMITED, LockedLog, Log, RetentionBudget


class MemoryQueues:
    """All queues of a run whose workers share this process and this object.

    The consumer of a queue grants its window beyond the messages taken. A queue without a window, and a queue from a
    worker to itself, grants every message.
    """

    def __init__(self, run: str, budget: RetentionBudget | None = None) -> None:
        """Make the queues of a run, none of which exists yet.

        Args:
            run: Id of the run.
            budget: Limits of what all queues together may retain; None: no limits.
        """
        self._run = run
        self._budget = budget or RetentionBudget()
        self._queues: dict[str, MemoryQueue] = {}

    def outbound(self, queue: Queue) -> "MemoryQueue":
        """Return the object that is both ends of `queue`; the first call makes it. `inbound` is the same method."""
        if queue.name not in self._queues:
            self._queues[queue.name] = MemoryQueue(Log(self._run, queue, self._budget))
        return self._queues[queue.name]

    inbound = outbound

    def pump(self, timeout: float) -> None:
        """Do nothing: a message that was put can be taken."""

    def close(self) -> None:
        """Close all queues, which raise `QueueClosed` afterwards."""
        for queue in self._queues.values():
            queue.close()


class MemoryQueue(LockedLog):
    """Both ends of one queue, for any thread."""

    def __init__(self, log: Log) -> None:
        """Make the two ends over `log`, an empty log that nothing else uses."""
        self._changed = threading.Condition()
        super().__init__(log, self._changed)
        self._window = UNLIMITED if self.queue.is_local else self.queue.window or UNLIMITED
        self._next = 0
        self._closed = False

    def put(self, message: Message) -> None:
        """Retain `message` for the consumer, as `Outbound.put`. Raises `QueueClosed` after `close`."""
        with self._changed:
            self._check_open()
            self._log.put(message, monotonic())
            self._changed.notify_all()

    def has_credit(self, number: int, timeout: float) -> bool:
        """Return True if message `number` is granted, or the queue is closed; wait up to `timeout` seconds for that."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed or number < self._next + self._window, timeout)

    def depth(self) -> Depth:
        """Return the queue's content and positions; no message is ever in flight."""
        with self._changed:
            log, taken = self._log, self._next
            content = max(0, log.end - max(taken, log.first)), 0, len(log), log.bytes, log.oldest(monotonic())
            return Depth(*content, log.end, taken, taken, self._granted, log.put_bytes)

    def intake(self) -> Intake:
        """Return the positions of the consumer's end: what arrives is taken."""
        with self._changed:
            return Intake(self._next, self._next, self._granted)

    @property
    def _granted(self) -> int | None:
        return None if self._window == UNLIMITED else self._next + self._window

    def take(self, timeout: float) -> Message | None:
        """Return the next message, decoded into memory of its own; None after `timeout` seconds.

        Raises `QueueGap` if the message was trimmed, `QueueClosed` after `close`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or self._log.end > self._next, timeout):
                return None
            self._check_open()
            Retention(self._log.first, self._log.end).check_holds(self.queue.name, self._next)
            message = decode(self._log.frames(self._next))
            self._next += 1
            self._changed.notify_all()
            return message

    def rewind(self, step: int) -> None:
        """Deliver again from the first message of `step` on."""
        with self._changed:
            self._next = self.queue.first(step)
            self._changed.notify_all()

    def close(self) -> None:
        """Forget all messages and wake every waiting thread; `put` and `take` raise `QueueClosed` afterwards."""
        with self._changed:
            self._closed = True
            self._log.close()
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise QueueClosed(f"{self.queue.name} is closed")
