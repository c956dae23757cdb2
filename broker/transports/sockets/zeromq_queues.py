"""Queues between processes over ZeroMQ: `ipc://` on one machine, `tcp://` across machines.

worker 0                              worker 1
Outbound -- Sender -- ROUTER          DEALER -- Receiver -- Inbound
                      (bound)  <- CreditRequest
                            messages ->
"""

import math
from time import monotonic
from typing import Any

import zmq

from stageline.broker.codec.message import Message
from stageline.broker.errors import EndpointTaken
from stageline.broker.queues.base import Trouble
from stageline.broker.queues.delivery import Receiver
from stageline.broker.queues.ends import QueueOptions
from stageline.broker.queues.inbound_link import InboundLink
from stageline.broker.queues.linked import LinkedQueues
from stageline.broker.transports.sockets.zeromq_connection import Context
from stageline.broker.transports.sockets.zeromq_dealer import Dealer
from stageline.broker.transports.sockets.zeromq_router import Router

_POLLIN = int(zmq.POLLIN)  # plain: pyzmq's own flags are enums, and slow


class ZeroMQQueues(LinkedQueues):
    """All queue ends of one worker.

    `bind_url`: `ipc:///path` or `tcp://host:port`, port 0 for any that is free. Raises `EndpointTaken` if it cannot be
    bound.
    """

    schemes = ("ipc://", "tcp://")
    _links: dict[str, Dealer]  # type: ignore[assignment]  # no other kind is opened here

    def __init__(self, run: str, incarnation: int, bind_url: str, options: QueueOptions) -> None:
        super().__init__(run, incarnation, options)
        self.trouble: Trouble | None = None  # always: no server stands between workers
        self._hwm = 2 * sum(options.windows.values()) + 16  # a resend may double what is on its way
        self._context: Context = zmq.Context()
        try:
            self.router = self.outbound_link = Router(self._context, bind_url, run, self._hwm, options.key)
        except EndpointTaken:
            self._context.destroy(0)
            self._wakeup.close()
            raise
        self.endpoint = self.router.endpoint

    def _sleep(self, link: InboundLink, receiver: Receiver, timeout: float) -> Message | None:
        """It is enough to wait at one socket if nothing waits to be sent: one system call, not several."""
        if not self.options.wakes_at_once and not self.router.is_behind:
            message = link.take(receiver, wait=True)
            if message is not None:
                return message
        return super()._sleep(link, receiver, timeout)

    def _close_links(self) -> None:
        for dealer in self._links.values():
            dealer.close()
        self.router.close()
        self._context.term()

    def _poll(self, until: float) -> bool:
        self._send_requests()
        dealers = self._links.values()
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

    def _open_link(self, endpoint: str) -> Dealer:
        return Dealer(
            self._context,
            endpoint,
            self.run,
            microbatches=self.options.microbatches,
            hwm=self._hwm,
            key=self.options.key,
        )
