"""Queues between processes over ZeroMQ: `ipc://` on one machine, `tcp://` across machines.

    worker 0                              worker 1
    Outbound -- Sender -- ROUTER          DEALER -- Receiver -- Inbound
                          (bound)  <- CreditRequest
                                messages ->

ZeroMQ itself promises nothing: what a broken connection held is lost without an error. So the producer retains every
message until it is trimmed, and the consumer requests the next one again and again until it arrives.

A worker that waits for one message serves all its queues meanwhile: it may be waiting for one of their consumers.
"""

import math
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any, TypeVar

import zmq

from stageline.broker.codec.message import Message
from stageline.broker.errors import EndpointTaken, QueueClosed
from stageline.broker.queues.base import Depth, Inbound, Outbound, QueueKey, Trouble
from stageline.broker.queues.ends import QueueEnds, QueueOptions
from stageline.broker.queues.log import Log
from stageline.broker.queues.receiver import Receiver
from stageline.broker.queues.sender import Sender
from stageline.broker.queues.wakeup import Wakeup

from .dealer import Dealer
from .requests import Requester
from .router import Router
from .socket_options import Context

ROOM_WAIT = 0.25  # seconds between two calls of `waiting` while a `put` waits for room

_Found = TypeVar("_Found")


class ZeroMQQueues:
    """All queue ends of one worker; other workers connect to its producers at `endpoint`.

    `bind_url`: `ipc:///path` or `tcp://host:port`, port 0 for any that is free.

    Only the thread that made it may use it, except for `ring`. Raises `EndpointTaken` if `bind_url` cannot be bound.
    """

    def __init__(self, run: str, incarnation: int, bind_url: str, options: QueueOptions) -> None:
        self._run = run
        self._incarnation = incarnation
        self._options = options
        self._closed = False
        self.trouble: Trouble | None = None  # always: no server stands between workers
        self._hwm = 2 * sum(options.windows.values()) + 16  # a resend may double what is on its way
        self._dealers: dict[str, Dealer] = {}
        self._wakeup = Wakeup()
        self._wakeup_socket = self._wakeup.fileno()
        self._context: Context = zmq.Context()
        self._router = self._bind(bind_url)
        self.endpoint = self._router.endpoint
        self._ends = QueueEnds(run, options, self._wait_for_room, self.wait_for)

    def outbound(self, key: QueueKey) -> Outbound:
        return self._ends.outbound(key, self._new_outbound)

    def inbound(self, key: QueueKey) -> Inbound:
        return self._ends.inbound(key, self._new_inbound)

    def connect(self, peers: Mapping[QueueKey, str]) -> None:
        """Takes each of these queues from the producer at its endpoint, from now on."""
        for key, endpoint in peers.items():
            end = self.inbound(key)
            if isinstance(end, ZeroMQInbound):
                for other in self._dealers.values():
                    other.remove(end.requester)
                end.dealer = self._dealer(endpoint)
                end.dealer.add(end.requester)
        for endpoint in [endpoint for endpoint, dealer in self._dealers.items() if not dealer.requesters]:
            self._dealers.pop(endpoint).close()
        self._send_requests()

    def ring(self) -> None:
        """Ends the wait of `take` or `pump`. For any thread, and for signal handlers."""
        self._wakeup.ring()

    def pump(self, timeout: float) -> None:
        self.check_open()
        if timeout > 0:
            self.poll(monotonic() + timeout)
        else:
            self._router.serve()

    def close(self) -> None:
        """Waits a second at most for what is on its way out."""
        if self._closed:
            return
        self._closed = True
        for dealer in self._dealers.values():
            dealer.close()
        self._router.close()
        self._context.term()
        self._wakeup.close()
        self._ends.close()

    def check_open(self) -> None:
        """Raises `QueueClosed` after `close`."""
        if self._closed:
            raise QueueClosed(f"the queues of incarnation {self._incarnation} in run {self._run!r} are closed")

    def wait_for(self, look: Callable[[], _Found | None], timeout: float) -> _Found | None:
        """What `look` finds; None after `timeout` seconds or a `ring`."""
        until = monotonic() + timeout
        while True:
            rung = self.poll(until)
            found = look()
            if found is not None or rung or monotonic() >= until:
                return found

    def wait_at(self, dealer: Dealer, receiver: Receiver, timeout: float) -> Message | None:
        """The next message of `receiver`; None after `timeout` seconds or a `ring`.

        While no message is waiting to be sent, it is enough to wait at one socket: one system call, not several.
        """
        if not self._router.is_behind:
            message = dealer.take(receiver, wait=True)
            if message is not None:
                return message
        return self.wait_for(lambda: dealer.take(receiver), timeout)

    def poll(self, until: float) -> bool:
        """Waits until something arrives, or until the time `until`, and takes it in. True if `ring` was called."""
        self._send_requests()
        ready: dict[Any, int] = dict(zmq.zmq_poll(self._watched(), self._milliseconds(until)))
        if self._router.socket in ready:
            self._router.serve()
        now = monotonic()
        for dealer in self._dealers.values():
            if ready.get(dealer.socket, 0) & zmq.POLLIN:
                dealer.receive(now)  # only one, so that it can be taken at once; the next turn receives the rest
        if self._wakeup_socket not in ready:
            return False
        self._wakeup.silence()
        return True

    def _bind(self, url: str) -> Router:
        try:
            return Router(self._context, url, self._run, self._hwm)
        except EndpointTaken:
            self._context.destroy(0)
            self._wakeup.close()
            raise

    def _dealer(self, endpoint: str) -> Dealer:
        if endpoint not in self._dealers:
            self._dealers[endpoint] = Dealer(
                self._context,
                endpoint,
                self._run,
                microbatches=self._options.microbatches,
                hwm=self._hwm,
                limits=self._options.limits,
            )
        return self._dealers[endpoint]

    def _send_requests(self) -> None:
        now = monotonic()
        for dealer in self._dealers.values():
            dealer.send_requests(now)

    def _watched(self) -> list[tuple[Any, int]]:
        dealers = [(dealer.socket, dealer.events) for dealer in self._dealers.values()]
        return [(self._router.socket, zmq.POLLIN), (self._wakeup_socket, zmq.POLLIN), *dealers]

    def _milliseconds(self, until: float) -> int:
        """Until the time `until`, or until a dealer has a request to repeat."""
        due = min([until, *[dealer.due for dealer in self._dealers.values()]])
        return max(0, math.ceil((due - monotonic()) * 1000))

    def _wait_for_room(self, reason: str, since: float) -> bool:
        """Serves the other queues for a while. False if a `put` that began at `since` has waited long enough."""
        self._options.waiting(reason)
        self.poll(monotonic() + ROOM_WAIT)
        return monotonic() - since < self._options.patience

    def _new_outbound(self, log: Log) -> "ZeroMQOutbound":
        sender = Sender(log)
        self._router.add(sender)
        return ZeroMQOutbound(self, self._router, sender)

    def _new_inbound(self, key: QueueKey, window: int) -> "ZeroMQInbound":
        requester = Requester(self._run, self._incarnation, Receiver(key, window))
        return ZeroMQInbound(self, requester, self._options.microbatches)


class ZeroMQOutbound:
    """The producer's end: it sends at once what the consumer has granted, and the rest when that grants more."""

    def __init__(self, queues: ZeroMQQueues, router: Router, sender: Sender) -> None:
        self.key = sender.log.key
        self._queues = queues
        self._sender = sender
        self._router = router

    def put(self, message: Message) -> None:
        self._queues.check_open()
        self._sender.log.put(message, monotonic())
        self._router.flush(self._sender)
        if self._sender.is_behind:
            self._router.serve()

    def trim(self, step: int) -> None:
        self._sender.log.trim(step)

    def depth(self) -> Depth:
        return self._sender.depth(monotonic())

    def peek(self, limit: int) -> list[Message]:
        return self._sender.log.peek(limit)


class ZeroMQInbound:
    """The consumer's end, over `dealer` once the endpoint of the producer is known."""

    def __init__(self, queues: ZeroMQQueues, requester: Requester, microbatches: int) -> None:
        self.key = requester.receiver.key
        self.requester = requester
        self.dealer: Dealer | None = None
        self._receiver = requester.receiver
        self._queues = queues
        self._microbatches = microbatches

    def take(self, timeout: float) -> Message | None:
        self._queues.check_open()
        if self.dealer is None:
            return self._queues.wait_for(lambda: None, timeout) if timeout > 0 else None
        if timeout > 0 and not self._receiver.ready:
            return self._queues.wait_at(self.dealer, self._receiver, timeout)
        return self.dealer.take(self._receiver)

    def rewind(self, step: int) -> None:
        self.requester.rewind(step * self._microbatches)
