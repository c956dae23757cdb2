"""What the queues of one worker among several processes share, whichever transport carries the messages."""

import os
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import TypeVar

from stageline.broker.codec.message import TO_SCRIPT, Message
from stageline.broker.control.messages import StepDigest

from .base import Inbound, Outbound, QueueKey
from .delivery import Looking
from .log import SPILL, UNLIMITED, Log, RetentionBudget
from .memory import MemoryQueue, MemoryQueues

Found = TypeVar("Found")

REPLIES = 8  # the part of `retain_bytes` that a worker's replies may take in memory besides
DIGESTS = 100_000  # of steps that are kept while the broker is away
ROOM_WAIT = 0.25  # seconds between two calls of `waiting` while a `put` waits for room


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """What a worker's queues are opened with.

    `microbatches`: of a step. `windows`: for each inbound queue, how many messages may be sent ahead of what is taken.
    `local`: the queues that begin and end at this worker. `retain_bytes`: what may be retained in memory; beyond it,
    `spill_bytes` (None: four times as much) on the disk, in `spill_folder` (None: the system's); beyond that a `put`
    waits up to `patience` seconds, calling `waiting` with the reason meanwhile, which may call `trim`. Replies to a
    script, as large as it asks for, have an eighth of `retain_bytes` for themselves, and the disk as far as it goes: a
    script that goes on from a checkpoint wants them again. `key` seals what workers request of each other over ZeroMQ.
    `wakes_at_once`: a `ring` ends a wait at once; else, over ZeroMQ, it may go on for 20 ms, which costs less.
    """

    microbatches: int
    windows: Mapping[QueueKey, int]
    local: Collection[QueueKey] = ()
    retain_bytes: int = UNLIMITED
    spill_bytes: int | None = None
    spill_folder: str | None = None
    waiting: Callable[[str], None] = lambda reason: None
    patience: float = 60.0
    key: bytes = field(default=b"", repr=False)
    wakes_at_once: bool = False


class QueueEnds(ABC):
    """Makes each end when it is first asked for; both ends of a queue that stays at this worker are in memory."""

    def __init__(self, run: str, incarnation: int, options: QueueOptions) -> None:
        self.run = run
        self.incarnation = incarnation
        self.options = options
        spill_bytes = SPILL * options.retain_bytes if options.spill_bytes is None else options.spill_bytes
        self._budget = RetentionBudget(options.retain_bytes, spill_bytes, options.spill_folder, self._wait_for_room)
        self._replies = RetentionBudget(
            options.retain_bytes // REPLIES, UNLIMITED, options.spill_folder, self._wait_for_room
        )
        self._local = MemoryQueues(run, options.microbatches, self._budget)
        self.digests: deque[StepDigest] = deque(maxlen=DIGESTS)
        self._looking = Looking(processors())
        self._outbounds: dict[QueueKey, Outbound] = {}
        self._inbounds: dict[QueueKey, Inbound] = {}

    @abstractmethod
    def wait_for(self, look: Callable[[], Found | None], timeout: float) -> Found | None:
        """What `look` finds; None after `timeout` seconds or a `ring`. Serves the other queues meanwhile."""

    @abstractmethod
    def _serve(self, seconds: float) -> None:
        """Serves the other queues for so long: a `put` waits for room."""

    @abstractmethod
    def _new_outbound(self, log: Log) -> Outbound:
        """The producer's end of the queue of `log`."""

    @abstractmethod
    def _new_inbound(self, key: QueueKey, window: int) -> Inbound:
        """The consumer's end, for a producer that may be `window` messages ahead of what is taken."""

    def outbound(self, key: QueueKey) -> Outbound:
        if key not in self._outbounds:
            if key in self.options.local:
                self._outbounds[key] = self._local.outbound(key)
            else:
                budget = self._replies if key.flow in TO_SCRIPT else self._budget
                self._outbounds[key] = self._new_outbound(Log(self.run, key, self.options.microbatches, budget))
        return self._outbounds[key]

    def inbound(self, key: QueueKey) -> Inbound:
        """Raises `ValueError` if there is no window for the queue."""
        windows = self.options.windows
        if key not in self._inbounds:
            if key in self.options.local:
                self._inbounds[key] = LocalInbound(self._local.inbound(key), self.wait_for)
            elif key in windows:
                self._inbounds[key] = self._new_inbound(key, windows[key])
            else:
                raise ValueError(f"no window is given for {key}; there is one for {', '.join(map(str, windows))}")
        return self._inbounds[key]

    def close(self) -> None:
        self._local.close()
        self._budget.spill.close()
        self._replies.spill.close()

    def _wait_for_room(self, reason: str, since: float) -> bool:
        """Serves the queues for a while. False if a `put` that began at `since` has waited long enough."""
        self.options.waiting(reason)
        if monotonic() - since >= self.options.patience:
            return False
        self._serve(ROOM_WAIT)
        return True


def look_until(until: float, find: Callable[[], Found | None]) -> Found | None:
    """What `find` finds before the time `until`, called again and again; other threads and processes go first."""
    while monotonic() < until:
        if (found := find()) is not None:
            return found
        os.sched_yield()
    return None


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class LocalInbound:
    """The consumer's end of a queue that begins at the same worker: it serves the other queues while it waits."""

    def __init__(
        self, queue: MemoryQueue, wait_for: Callable[[Callable[[], Message | None], float], Message | None]
    ) -> None:
        self.key = queue.key
        self.rewind = queue.rewind
        self._queue = queue
        self._wait_for = wait_for

    def take(self, timeout: float) -> Message | None:
        message = self._queue.take(0)
        if message is None and timeout > 0:
            return self._wait_for(lambda: self._queue.take(0), timeout)
        return message


class Wakeup:
    """Wakes the one thread that waits for queues: the descriptor `fd` is readable from `ring` until `silence`."""

    def __init__(self) -> None:
        self._receiving, self._sending = socket.socketpair()
        self._receiving.setblocking(False)
        self._sending.setblocking(False)
        self.fd = self._receiving.fileno()

    def ring(self) -> None:
        """For any thread, and for signal handlers. Never blocks, never fails; after `close` it does nothing."""
        with suppress(OSError):
            self._sending.send(b"!")

    def silence(self) -> None:
        with suppress(BlockingIOError):
            while self._receiving.recv(4096):
                pass

    def close(self) -> None:
        self._sending.close()
        self._receiving.close()
