"""Queues between processes over ZeroMQ: `ipc://` on one machine, `tcp://` across machines.

    worker 0                                 worker 1
    Outbound -- Producer -- ROUTER           DEALER -- Consumer -- Inbound
                            (bound)  <- Take
                                  messages ->

ZeroMQ itself promises nothing: what a broken connection held is gone without an error. So the producer retains every
message until it is trimmed, and the consumer says which one it wants next, again and again until it comes.
"""

from collections.abc import Callable, Collection, Mapping
from time import monotonic

from ..errors import QueueClosed
from ..message import LIMITS, Limits, Message
from ..queue import Depth, Inbound, Outbound, QueueKey, Trouble
from .consumer import Consumer
from .dealer import Dealer
from .hub import Hub
from .log import SPILL, UNLIMITED, Log, Shelf
from .memory import MemoryQueue
from .producer import Producer

TURN = 0.25  # seconds after which somebody who waits for room is called again


class ZeroMQQueues:
    """All queue ends of one worker; other workers reach its producers at `endpoint`.

    `bind_url`: `ipc:///path` or `tcp://host:port`, port 0 for any that is free. `microbatches`: of a step.
    `windows`: for each inbound queue, how many messages its producer may send ahead of what is taken.
    `local`: the queues that begin and end here. `retain_bytes`: what may be retained in memory; beyond it,
    `spill_bytes` (None: four times as much) on the disk, in `spill_folder` (None: the system's); beyond that a `put`
    waits up to `patience` seconds, calling `waiting` with the reason meanwhile: it may `trim`.

    Only the thread that made it may use it, but for `ring`. Raises `EndpointTaken` if `bind_url` cannot be had.
    """

    def __init__(
        self,
        run: str,
        incarnation: int,
        bind_url: str,
        *,
        microbatches: int,
        windows: Mapping[QueueKey, int],
        local: Collection[QueueKey] = (),
        retain_bytes: int = UNLIMITED,
        spill_bytes: int | None = None,
        spill_folder: str | None = None,
        waiting: Callable[[str], None] = lambda reason: None,
        patience: float = 60.0,
        limits: Limits = LIMITS,
    ) -> None:
        self._run = run
        self._incarnation = incarnation
        self._microbatches = microbatches
        self._windows = dict(windows)
        self._local = frozenset(local)
        self._waiting = waiting
        self._patience = patience
        self._limits = limits
        spill_bytes = SPILL * retain_bytes if spill_bytes is None else spill_bytes
        self._shelf = Shelf(retain_bytes, spill_bytes, spill_folder, self._wait_for_room)
        self._outbounds: dict[QueueKey, ZeroMQOutbound | MemoryQueue] = {}
        self._inbounds: dict[QueueKey, ZeroMQInbound | LocalInbound] = {}
        self._loops: dict[QueueKey, MemoryQueue] = {}
        self.closed = False
        self.trouble: Trouble | None = None  # no server stands between workers
        hwm = 2 * sum(self._windows.values()) + 16  # a resend may double what is under way
        self.hub = Hub(run, bind_url, microbatches=microbatches, hwm=hwm, limits=limits)
        self.endpoint = self.hub.router.endpoint

    def outbound(self, key: QueueKey) -> Outbound:
        if key not in self._outbounds:
            self._outbounds[key] = self._new_outbound(key)
        return self._outbounds[key]

    def inbound(self, key: QueueKey) -> Inbound:
        if key not in self._inbounds:
            self._inbounds[key] = self._new_inbound(key)
        return self._inbounds[key]

    def connect(self, peers: Mapping[QueueKey, str]) -> None:
        """Says at which endpoint the producer of each inbound queue is; again when one has been replaced."""
        ends = {key: end for key in peers if isinstance(end := self.inbound(key), ZeroMQInbound)}
        dealers = self.hub.connect({end.consumer: peers[key] for key, end in ends.items()})
        for end in ends.values():
            end.dealer = dealers[end.consumer]

    def ring(self) -> None:
        """Lets whoever waits in `take` or `pump` return early. For any thread, and for signal handlers."""
        self.hub.ring()

    def pump(self, timeout: float) -> None:
        if self.closed:
            raise self.no_more()
        if timeout > 0:
            self.hub.turn(monotonic() + timeout)
        else:
            self.hub.router.serve()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            for queue in self._loops.values():
                queue.close()
            self.hub.close()
            self._shelf.spill.close()

    def no_more(self) -> QueueClosed:
        """What to raise when somebody uses them after `close`."""
        return QueueClosed(f"the queues of incarnation {self._incarnation} in run {self._run!r} are closed")

    def _wait_for_room(self, reason: str, since: float) -> bool:
        """Serves the others for a while. False when a `put` that began at `since` has waited long enough."""
        self._waiting(reason)
        self.hub.turn(monotonic() + TURN)
        return monotonic() - since < self._patience

    def _new_outbound(self, key: QueueKey) -> "ZeroMQOutbound | MemoryQueue":
        if key in self._local:
            return self._loop(key)
        producer = Producer(self._log(key))
        self.hub.router.add(producer)
        return ZeroMQOutbound(self, producer)

    def _new_inbound(self, key: QueueKey) -> "ZeroMQInbound | LocalInbound":
        if key in self._local:
            return LocalInbound(self, self._loop(key))
        if key not in self._windows:
            raise ValueError(f"no window is given for {key}; there is one for {', '.join(map(str, self._windows))}")
        consumer = Consumer(self._run, key, self._incarnation, self._windows[key])
        return ZeroMQInbound(self, consumer, self._microbatches)

    def _loop(self, key: QueueKey) -> MemoryQueue:
        if key not in self._loops:
            self._loops[key] = MemoryQueue(self._log(key), self._microbatches)
        return self._loops[key]

    def _log(self, key: QueueKey) -> Log:
        return Log(self._run, key, self._microbatches, self._shelf, self._limits)


class ZeroMQOutbound:
    """The producer's end: it sends at once what the consumer has granted, and the rest when that asks."""

    def __init__(self, queues: ZeroMQQueues, producer: Producer) -> None:
        self.key = producer.log.key
        self._queues = queues
        self._producer = producer
        self._router = queues.hub.router

    def put(self, message: Message) -> None:
        if self._queues.closed:
            raise self._queues.no_more()
        self._producer.log.put(message, monotonic())
        self._router.flush(self._producer)
        if self._producer.behind:
            self._router.serve()

    def trim(self, step: int) -> None:
        self._producer.log.trim(step)

    def depth(self) -> Depth:
        return self._producer.depth(monotonic())

    def peek(self, limit: int) -> list[Message]:
        return self._producer.log.peek(limit)


class ZeroMQInbound:
    """The consumer's end, over `dealer` once it is known where the producer is."""

    def __init__(self, queues: ZeroMQQueues, consumer: Consumer, microbatches: int) -> None:
        self.key = consumer.key
        self.consumer = consumer
        self.dealer: Dealer | None = None
        self._queues = queues
        self._microbatches = microbatches

    def take(self, timeout: float) -> Message | None:
        if self._queues.closed:
            raise self._queues.no_more()
        if self.dealer is None:
            return self._queues.hub.wait_for(lambda: None, timeout) if timeout > 0 else None
        if timeout > 0 and not self.consumer.ready:
            return self._queues.hub.wait_at(self.dealer, self.consumer, timeout)
        return self.dealer.next_of(self.consumer)

    def rewind(self, step: int) -> None:
        self.consumer.rewind(step * self._microbatches)


class LocalInbound:
    """The consumer's end of a queue that begins at the same worker: it serves the other queues while it waits."""

    def __init__(self, queues: ZeroMQQueues, queue: MemoryQueue) -> None:
        self.key = queue.key
        self.rewind = queue.rewind
        self._queues = queues
        self._queue = queue

    def take(self, timeout: float) -> Message | None:
        message = self._queue.take(0)
        if message is None and timeout > 0:
            return self._queues.hub.wait_for(lambda: self._queue.take(0), timeout)
        return message
