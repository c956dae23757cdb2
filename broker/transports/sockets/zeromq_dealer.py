"""The socket of the queues that a worker takes from one other: a DEALER, connected to that worker's ROUTER.

The connection is replaced when requests stay unanswered for long, and soon if the other end does not speak ZeroMQ.
"""

from contextlib import ExitStack

import zmq

from stageline.broker.queues.inbound_link import InboundLink
from stageline.broker.queues.requests import CreditRequest, Requester
from stageline.broker.transports.sockets.zeromq_connection import Context, Handshake, open_socket

UNANSWERED = 30.0  # seconds without any answer after which a connection is replaced; doubles up to LONGEST_UNANSWERED
LONGEST_UNANSWERED = 600.0
NO_HANDSHAKE = 3.0  # seconds without ZeroMQ's handshake after which a connection is replaced
CHECK = 0.5  # seconds between two checks of a connection that brings no answer

_NOBLOCK = int(zmq.NOBLOCK)  # plain: pyzmq's own flags are enums, and slow
_POLLIN_POLLOUT = int(zmq.POLLIN | zmq.POLLOUT)


class Dealer(InboundLink):
    """Serves the requesters given to `add` from the producers at `endpoint`. Times are monotonic, in seconds."""

    def __init__(
        self, context: Context, endpoint: str, run: str, *, microbatches: int, hwm: int, key: bytes = b""
    ) -> None:
        super().__init__(endpoint, run, microbatches, key)
        self._blocked = False  # there is a request to send, and no connection yet
        self._context = context
        self._hwm = hwm
        self._unanswered = 0.0  # since when a request has had, or could have, no answer; 0: all are answered
        self._patience = UNANSWERED
        self._next_check = 0.0
        self._connect()

    def has_arrived(self) -> bool:
        return bool(int(self.socket.get(zmq.EVENTS)) & _POLLIN)

    def receive(self, now: float, *, wait: bool = False) -> bool:
        try:
            frame = self.socket.recv(0 if wait else _NOBLOCK, copy=False)
        except zmq.Again:
            return False
        frames = [frame.buffer]
        while frame.more:  # they have all arrived: ZeroMQ delivers a message whole
            frame = self.socket.recv(copy=False)
            frames.append(frame.buffer)
        self._unanswered, self._patience = 0.0, UNANSWERED
        self._take_in(frames, now)
        return True

    def send_requests(self, now: float) -> None:
        self._blocked = False
        for requester in self.requesters.values():
            request = requester.request(now)
            if request is not None and not self._blocked:
                self._send(requester, request, now)
        if self._unanswered and now >= self._next_check:
            self._next_check = now + CHECK
            self._check_connection(now)

    @property
    def events(self) -> int:
        """What to poll `socket` for."""
        return _POLLIN_POLLOUT if self._blocked else _POLLIN

    @property
    def due(self) -> float:
        """When to call `send_requests` again though nothing has happened."""
        check = self._next_check if self._unanswered else float("inf")
        if self._blocked:  # until there is a connection, which `events` include
            return check
        return min([check, *[requester.due for requester in self.requesters.values()]])

    def close(self) -> None:
        if not self.socket.closed:  # else it could not be replaced
            self._handshake.close()
            self.socket.close()

    def _send(self, requester: Requester, request: CreditRequest, now: float) -> None:
        try:
            self.socket.send(self._pack(request), _NOBLOCK)
        except zmq.Again:
            self._blocked = True
        else:
            requester.mark_sent(request, now)
        if request.ask or self._blocked:
            self._unanswered = self._unanswered or now

    def _connect(self) -> None:
        """Leaves no socket open if that fails: its context could never be closed."""
        with ExitStack() as opened:
            self.socket = open_socket(self._context, zmq.DEALER, self._hwm)
            opened.callback(self.socket.close)
            self._handshake = Handshake(self._context, self.socket)
            opened.callback(self._handshake.close)
            self.socket.connect(self.endpoint)
            opened.pop_all()

    def _check_connection(self, now: float) -> None:
        """Replaces the connection if it seems to be of no use any more."""
        if not self._handshake.fails(now, NO_HANDSHAKE):
            if now - self._unanswered <= self._patience:
                return
            self._patience = min(2 * self._patience, LONGEST_UNANSWERED)
        self.close()
        self._connect()
        self._unanswered = 0.0
        for requester in self.requesters.values():
            requester.introduce()
