"""The queue ends of one worker among several processes, whichever transport carries the messages between them."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from stageline.broker.codec.message import LIMITS, Limits, Message

from .base import Inbound, Outbound, QueueKey
from .log import SPILL, UNLIMITED, Log, RetentionBudget
from .memory import MemoryQueue

Look = Callable[[], Message | None]
WaitFor = Callable[[Look, float], Message | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """What a worker's queues are opened with.

    `microbatches`: of a step. `windows`: for each inbound queue, how many messages may be sent ahead of what is taken.
    `local`: the queues that begin and end at this worker. `retain_bytes`: what may be retained in memory; beyond it,
    `spill_bytes` (None: four times as much) on the disk, in `spill_folder` (None: the system's); beyond that a `put`
    waits up to `patience` seconds, calling `waiting` with the reason meanwhile, which may call `trim`.
    """

    microbatches: int
    windows: Mapping[QueueKey, int]
    local: Collection[QueueKey] = ()
    retain_bytes: int = UNLIMITED
    spill_bytes: int | None = None
    spill_folder: str | None = None
    waiting: Callable[[str], None] = lambda reason: None
    patience: float = 60.0
    limits: Limits = LIMITS


class QueueEnds:
    """Makes each end when it is first asked for; both ends of a queue that stays at this worker are in memory.

    `wait` is called when a `put` finds no room, with the reason and the time at which it began; it returns whether to
    try again. `wait_for` serves the other queues until the function that it is given finds something, or for a number
    of seconds.
    """

    def __init__(self, run: str, options: QueueOptions, wait: Callable[[str, float], bool], wait_for: WaitFor) -> None:
        self._run = run
        self._options = options
        self._wait_for = wait_for
        spill_bytes = SPILL * options.retain_bytes if options.spill_bytes is None else options.spill_bytes
        self._budget = RetentionBudget(options.retain_bytes, spill_bytes, options.spill_folder, wait)
        self._outbounds: dict[QueueKey, Outbound] = {}
        self._inbounds: dict[QueueKey, Inbound] = {}
        self._locals: dict[QueueKey, MemoryQueue] = {}

    def outbound(self, key: QueueKey, make: Callable[[Log], Outbound]) -> Outbound:
        if key not in self._outbounds:
            self._outbounds[key] = self._local(key) if key in self._options.local else make(self._log(key))
        return self._outbounds[key]

    def inbound(self, key: QueueKey, make: Callable[[QueueKey, int], Inbound]) -> Inbound:
        """`make` is given the queue and its window. Raises `ValueError` if there is none."""
        if key not in self._inbounds:
            self._inbounds[key] = self._new_inbound(key, make)
        return self._inbounds[key]

    def close(self) -> None:
        for queue in self._locals.values():
            queue.close()
        self._budget.spill.close()

    def _new_inbound(self, key: QueueKey, make: Callable[[QueueKey, int], Inbound]) -> Inbound:
        if key in self._options.local:
            return LocalInbound(self._local(key), self._wait_for)
        windows = self._options.windows
        if key not in windows:
            raise ValueError(f"no window is given for {key}; there is one for {', '.join(map(str, windows))}")
        return make(key, windows[key])

    def _local(self, key: QueueKey) -> MemoryQueue:
        if key not in self._locals:
            self._locals[key] = MemoryQueue(self._log(key), self._options.microbatches)
        return self._locals[key]

    def _log(self, key: QueueKey) -> Log:
        return Log(self._run, key, self._options.microbatches, self._budget, self._options.limits)


class LocalInbound:
    """The consumer's end of a queue that begins at the same worker: it serves the other queues while it waits."""

    def __init__(self, queue: MemoryQueue, wait_for: WaitFor) -> None:
        self.key = queue.key
        self.rewind = queue.rewind
        self._queue = queue
        self._wait_for = wait_for

    def take(self, timeout: float) -> Message | None:
        message = self._queue.take(0)
        if message is None and timeout > 0:
            return self._wait_for(lambda: self._queue.take(0), timeout)
        return message
