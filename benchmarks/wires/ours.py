"""The queues of two workers, a queue for each direction, as a wire: over ZeroMQ here, over Redis beside redis-py."""

from time import monotonic
from types import TracebackType
from typing import Self, cast

from torch import Tensor

from benchmarks.measuring.processes import PATIENCE
from stageline.broker.codec.message import Message
from stageline.broker.queues import delivery as looking
from stageline.broker.queues.base import Queues
from stageline.broker.queues.ends import QueueOptions
from stageline.broker.transports.sockets.shm_queues import ShmQueues
from stageline.broker.transports.sockets.zeromq_queues import ZeroMQQueues
from stageline.pipeline.program import Queue
from stageline.workers.disk.memory import keep_freed_memory

ROUND = 8  # messages after which those received are trimmed
WINDOW = 16  # messages that may be on their way
LINGER = 1.0  # seconds that the last message gets before the socket under it is closed
KEYS = tuple(
    Queue(name=name, producer=producer, consumer=1 - producer, count=ROUND, window=WINDOW)
    for name, producer in (("forward-1", 0), ("backward-0", 1))
)
TERMS = QueueOptions(ahead=2 * WINDOW, patience=PATIENCE)


class OurWire:
    """`end`, 0 or 1, of the wire that `queues` make."""

    def __init__(self, queues: Queues, end: int) -> None:
        self._queues = queues
        self._out, self._in = queues.outbound(KEYS[end]), queues.inbound(KEYS[1 - end])
        self._end = end
        self._sent = 0

    def send(self, tensor: Tensor) -> None:
        self._out.put(Message("wire", self._out.queue.name, self._sent, self._end + 1, tensor))
        self._sent += 1
        if self._sent % ROUND == 0:
            depth = self._out.depth()
            self._out.trim((self._sent - depth.ready - depth.in_flight) // ROUND)

    def receive(self) -> Tensor:
        message = self._in.take(PATIENCE)
        assert message is not None, "the other end is gone"
        return cast(Tensor, message.payload)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        until = monotonic() + LINGER
        while self._out.depth().in_flight and (left := until - monotonic()) > 0:
            self._queues.pump(left)
        self._queues.close()


def open_wire(url: str, end: int, nbytes: int) -> OurWire:
    return wire_between(url, end, TERMS)


def wire_between(url: str, end: int, terms: QueueOptions, key: str = "") -> OurWire:
    """Each end listens at an address of its own: at `url`, and right beside it. It keeps memory as a worker does.

    `key`: of the other end, as its address ends."""
    keep_freed_memory()
    places = url, _beside(url)
    kind = ShmQueues if url.startswith("shm://") else ZeroMQQueues
    queues = kind("wire", end + 1, places[end], terms)
    queues.connect({KEYS[1 - end]: places[1 - end] + key})
    return OurWire(queues, end)


def open_sleeping_wire(url: str, end: int, nbytes: int) -> OurWire:
    """The same without looking for messages: each wait sleeps at once. For a process of its own."""
    looking.LOOK = 0.0
    return open_wire(url, end, nbytes)


def _beside(url: str) -> str:
    host, _, port = url.rpartition(":")
    return f"{host}:{int(port) + 1}" if url.startswith("tcp://") else f"{url}-back"
