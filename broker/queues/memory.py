"""Queues within one process: the reference for what a queue does. A message is encoded when it is put and decoded when
it is taken, so that producer and consumer share no memory and every transport carries the same bits.
"""

import threading
from collections.abc import Mapping
from time import monotonic

from stageline.broker.codec.message import Message, decode
from stageline.broker.errors import QueueClosed

from .base import Depth, QueueKey
from .delivery import Retention
from .log import UNLIMITED, LockedLog, Log, RetentionBudget


class MemoryQueues:
    """All queues of a run whose workers share this process and this object; `budget` is for all of them together.
    `windows`: how many messages beyond what is taken the consumer of a queue grants; without one, all."""

    def __init__(
        self,
        run: str,
        microbatches: int,
        budget: RetentionBudget | None = None,
        windows: Mapping[QueueKey, int] | None = None,
    ) -> None:
        self._run = run
        self._microbatches = microbatches
        self._budget = budget or RetentionBudget()
        self._windows = windows or {}
        self._queues: dict[QueueKey, MemoryQueue] = {}

    def outbound(self, key: QueueKey) -> "MemoryQueue":
        if key not in self._queues:
            log = Log(self._run, key, self._microbatches, self._budget)
            self._queues[key] = MemoryQueue(log, self._microbatches, self._windows.get(key, UNLIMITED))
        return self._queues[key]

    inbound = outbound

    def pump(self, timeout: float) -> None:
        """Do nothing: a message that was put can be taken."""

    def close(self) -> None:
        for queue in self._queues.values():
            queue.close()


class MemoryQueue(LockedLog):
    """Both ends of one queue."""

    def __init__(self, log: Log, microbatches: int, window: int) -> None:
        self._changed = threading.Condition()
        super().__init__(log, self._changed)
        self._window = window
        self._per_step = log.key.per_step(microbatches)
        self._next = 0
        self._closed = False

    def put(self, message: Message) -> None:
        with self._changed:
            self._check_open()
            self._log.put(message, monotonic())
            self._changed.notify_all()

    def has_credit(self, number: int, timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._closed or number < self._next + self._window, timeout)

    def depth(self) -> Depth:
        with self._changed:
            ready = max(0, self._log.end - max(self._next, self._log.first))
            return Depth(ready, 0, len(self._log), self._log.bytes, self._log.oldest(monotonic()))

    def take(self, timeout: float) -> Message | None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or self._log.end > self._next, timeout):
                return None
            self._check_open()
            Retention(self._log.first, self._log.end).check_holds(self.key, self._next)
            message = decode(self._log.frames(self._next))
            self._next += 1
            self._changed.notify_all()
            return message

    def rewind(self, step: int) -> None:
        with self._changed:
            self._next = step * self._per_step
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._log.close()
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise QueueClosed(f"{self.key} is closed")
