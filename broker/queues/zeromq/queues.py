"""Queues between processes over ZeroMQ: `ipc://` on one machine, `tcp://` across machines.

    worker 0                                 worker 1
    Outbound -- Producer -- ROUTER           DEALER -- Consumer -- Inbound
                            (bound)  <- Take
                                  messages ->

ZeroMQ itself promises nothing: what a broken connection held is gone without an error. So the producer retains every
message until it is trimmed, and the consumer says which one it wants next, again and again until it comes.
"""

from collections.abc import Mapping
from time import monotonic

from stageline.broker.codec.message import Message
from stageline.broker.errors import QueueClosed
from stageline.broker.queues.base import Depth, Inbound, Outbound, QueueKey, Trouble
from stageline.broker.queues.endpoints import Endpoints, QueueOptions
from stageline.broker.queues.log import Log

from .consumer import Consumer
from .dealer import Dealer
from .hub import Hub
from .producer import Producer

TURN = 0.25  # seconds after which somebody who waits for room is called again


class ZeroMQQueues:
    """All queue ends of one worker; other workers reach its producers at `endpoint`.

    `bind_url`: `ipc:///path` or `tcp://host:port`, port 0 for any that is free.

    Only the thread that made it may use it, but for `ring`. Raises `EndpointTaken` if `bind_url` cannot be had.
    """

    def __init__(self, run: str, incarnation: int, bind_url: str, terms: QueueOptions) -> None:
        self._run = run
        self._incarnation = incarnation
        self._terms = terms
        self.closed = False
        self.trouble: Trouble | None = None  # no server stands between workers
        hwm = 2 * sum(terms.windows.values()) + 16  # a resend may double what is under way
        self.hub = Hub(run, bind_url, microbatches=terms.microbatches, hwm=hwm, limits=terms.limits)
        self.endpoint = self.hub.router.endpoint
        self._ends = Endpoints(run, terms, self._wait_for_room, self.hub.wait_for)

    def outbound(self, key: QueueKey) -> Outbound:
        return self._ends.outbound(key, self._new_outbound)

    def inbound(self, key: QueueKey) -> Inbound:
        return self._ends.inbound(key, self._new_inbound)

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
            self.hub.close()
            self._ends.close()

    def no_more(self) -> QueueClosed:
        """What to raise when somebody uses them after `close`."""
        return QueueClosed(f"the queues of incarnation {self._incarnation} in run {self._run!r} are closed")

    def _wait_for_room(self, reason: str, since: float) -> bool:
        """Serves the others for a while. False when a `put` that began at `since` has waited long enough."""
        self._terms.waiting(reason)
        self.hub.turn(monotonic() + TURN)
        return monotonic() - since < self._terms.patience

    def _new_outbound(self, log: Log) -> "ZeroMQOutbound":
        producer = Producer(log)
        self.hub.router.add(producer)
        return ZeroMQOutbound(self, producer)

    def _new_inbound(self, key: QueueKey, window: int) -> "ZeroMQInbound":
        return ZeroMQInbound(self, Consumer(self._run, key, self._incarnation, window), self._terms.microbatches)


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
