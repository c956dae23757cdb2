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
from typing import Any

import zmq

from stageline.broker.codec.message import Message, messages_per_step
from stageline.broker.errors import EndpointTaken, QueueClosed
from stageline.broker.queues.base import Depth, QueueKey, Trouble
from stageline.broker.queues.delivery import Receiver, Sender
from stageline.broker.queues.ends import Found, QueueEnds, QueueOptions, Wakeup
from stageline.broker.queues.log import Log

from .connection import Context
from .dealer import Dealer
from .requests import Requester
from .router import Router

_POLLIN = int(zmq.POLLIN)  # plain: pyzmq's own flags are enums, and slow


class ZeroMQQueues(QueueEnds):
    """All queue ends of one worker; other workers connect to its producers at `endpoint`.

    `bind_url`: `ipc:///path` or `tcp://host:port`, port 0 for any that is free.

    Only the thread that made it may use it, except for `ring`. Raises `EndpointTaken` if `bind_url` cannot be bound.
    """

    def __init__(self, run: str, incarnation: int, bind_url: str, options: QueueOptions) -> None:
        super().__init__(run, incarnation, options)
        self.trouble: Trouble | None = None  # always: no server stands between workers
        self._closed = False
        self._hwm = 2 * sum(options.windows.values()) + 16  # a resend may double what is on its way
        self._dealers: dict[str, Dealer] = {}
        self._wakeup = Wakeup()
        self.ring = self._wakeup.ring  # ends the wait of `take` or `pump`
        self._context: Context = zmq.Context()
        try:
            self.router = Router(self._context, bind_url, run, self._hwm, options.key)
        except EndpointTaken:
            self._context.destroy(0)
            self._wakeup.close()
            raise
        self.endpoint = self.router.endpoint

    def connect(self, peers: Mapping[QueueKey, str]) -> None:
        """Takes each of these queues from the producer at its endpoint, from now on."""
        for key, endpoint in peers.items():
            end = self.inbound(key)
            if isinstance(end, ZeroMQInbound):
                for other in self._dealers.values():
                    other.requesters.pop(key, None)
                end.dealer = self._dealer(endpoint)
                end.dealer.add(end.requester)
        for endpoint in [endpoint for endpoint, dealer in self._dealers.items() if not dealer.requesters]:
            self._dealers.pop(endpoint).close()
        self._send_requests()

    def pump(self, timeout: float) -> None:
        self.check_open()
        if timeout > 0:
            self._poll(monotonic() + timeout)
        else:
            self.router.serve()

    def close(self) -> None:
        """Waits a second at most for what is on its way out."""
        if self._closed:
            return
        self._closed = True
        for dealer in self._dealers.values():
            dealer.close()
        self.router.close()
        self._context.term()
        self._wakeup.close()
        super().close()

    def check_open(self) -> None:
        """Raises `QueueClosed` after `close`."""
        if self._closed:
            raise QueueClosed(f"the queues of incarnation {self.incarnation} in run {self.run!r} are closed")

    def wait_for(self, look: Callable[[], Found | None], timeout: float) -> Found | None:
        until = monotonic() + timeout
        while True:
            rung = self._poll(until)
            found = look()
            if found is not None or rung or monotonic() >= until:
                return found

    def _poll(self, until: float) -> bool:
        """Waits until something arrives, a request is to be repeated, or the time `until`, and takes in what has
        arrived. True if `ring` was called."""
        self._send_requests()
        dealers = self._dealers.values()
        watched: list[tuple[Any, int]] = [(self.router.socket, _POLLIN), (self._wakeup.fd, _POLLIN)]
        watched += [(dealer.socket, dealer.events) for dealer in dealers]
        due = min([until, *[dealer.due for dealer in dealers]])
        ready: dict[Any, int] = dict(zmq.zmq_poll(watched, max(0, math.ceil((due - monotonic()) * 1000))))
        if self.router.socket in ready:
            self.router.serve()
        now = monotonic()
        for dealer in dealers:
            if ready.get(dealer.socket, 0) & _POLLIN:
                dealer.receive(now)  # only one, so that it can be taken at once; the next turn receives the rest
        if self._wakeup.fd not in ready:
            return False
        self._wakeup.silence()
        return True

    def _dealer(self, endpoint: str) -> Dealer:
        if endpoint not in self._dealers:
            microbatches = self.options.microbatches
            self._dealers[endpoint] = Dealer(
                self._context, endpoint, self.run, microbatches=microbatches, hwm=self._hwm, key=self.options.key
            )
        return self._dealers[endpoint]

    def _send_requests(self) -> None:
        now = monotonic()
        for dealer in self._dealers.values():
            dealer.send_requests(now)

    def _serve(self, seconds: float) -> None:
        self._poll(monotonic() + seconds)

    def _new_outbound(self, log: Log) -> "ZeroMQOutbound":
        sender = Sender(log)
        self.router.add(sender)
        return ZeroMQOutbound(self, sender)

    def _new_inbound(self, key: QueueKey, window: int) -> "ZeroMQInbound":
        return ZeroMQInbound(self, Requester(self.run, self.incarnation, Receiver(key, window)))


class ZeroMQOutbound:
    """The producer's end: it sends at once what the consumer has granted, and the rest when that grants more."""

    def __init__(self, queues: ZeroMQQueues, sender: Sender) -> None:
        self.key = sender.log.key
        self.trim = sender.log.trim
        self.empty = sender.log.empty
        self.checksums = sender.log.checksums
        self.peek = sender.log.peek
        self._queues = queues
        self._router = queues.router
        self._sender = sender

    def put(self, message: Message) -> None:
        self._queues.check_open()
        self._sender.log.put(message, monotonic())
        self._router.flush(self._sender)
        if self._sender.is_behind:
            self._router.serve()

    def has_credit(self, number: int, timeout: float) -> bool:
        self._queues.check_open()
        if number < self._sender.limit:
            return True
        granted = self._queues.wait_for(lambda: number < self._sender.limit or None, timeout)
        return bool(granted)

    def depth(self) -> Depth:
        return self._sender.depth(monotonic())


class ZeroMQInbound:
    """The consumer's end, over `dealer` once the endpoint of the producer is known."""

    def __init__(self, queues: ZeroMQQueues, requester: Requester) -> None:
        self.key = requester.receiver.key
        self.requester = requester
        self.dealer: Dealer | None = None
        self._queues = queues

    def take(self, timeout: float) -> Message | None:
        dealer, receiver = self.dealer, self.requester.receiver
        self._queues.check_open()
        if dealer is None:
            return self._queues.wait_for(lambda: None, timeout) if timeout > 0 else None
        if timeout <= 0 or receiver.ready:
            return dealer.take(receiver)
        queues = self._queues
        # Then it is enough to wait at one socket: one system call, not several.
        if not queues.options.wakes_at_once and not queues.router.is_behind:
            message = dealer.take(receiver, wait=True)
            if message is not None:
                return message
        return queues.wait_for(lambda: dealer.pop(receiver), timeout)

    def rewind(self, step: int) -> None:
        self.requester.rewind(step * messages_per_step(self.key.flow, self._queues.options.microbatches))
