"""The producing side of a worker over ZeroMQ: one bound ROUTER, which serves all its senders.

A ROUTER gives every connection an identity of its own, which is how a sender notices that its consumer uses a new one.
It never blocks: what cannot be sent now stays due.
"""

import errno
from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq

from stageline.broker.codec.message import Flow, Frame
from stageline.broker.errors import BadMessage, ForeignMessage
from stageline.broker.network.bind import bind
from stageline.broker.queues.base import QueueKey
from stageline.broker.queues.sender import Sender

from . import socket_options as options
from .requests import CreditRequest, RetentionReply, pack, reply_to, unpack_request

# Bytes of a frame from which on its memory is handed over and not copied. To give memory back, pyzmq wakes a thread of
# its own, which costs as much as copying half a megabyte (measured over ipc and tcp, 16 KB to 16 MB).
ZERO_COPY = 2**19
_NOBLOCK = int(zmq.NOBLOCK)  # plain: pyzmq's own flags are enums, and slow
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
EARLY = 64  # requests for queues that have no sender yet which are kept for it


class Router:
    """Serves the senders given to `add` at `url`; `endpoint` is where to connect to.

    `hwm` is how many messages may wait for one connection.
    """

    def __init__(self, context: options.Context, url: str, run: str, hwm: int) -> None:
        self._run = run
        self._senders: dict[QueueKey, Sender] = {}
        self._early: dict[QueueKey, tuple[bytes, CreditRequest]] = {}
        self.socket = context.socket(zmq.ROUTER)
        options.for_router(self.socket, hwm)
        self.socket.copy_threshold = 0  # what is copied is decided here, by ZERO_COPY
        self._send_frame: Callable[..., object] = super(zmq.Socket, self.socket).send  # the bare one, for every frame
        self.endpoint = bind(self.socket, url)

    def add(self, sender: Sender) -> None:
        key = sender.log.key
        self._senders[key] = sender
        if key in self._early:
            self._answer(sender, *self._early.pop(key))

    def serve(self) -> None:
        """Receives every request that has arrived, and sends everything that is due."""
        while int(self.socket.get(zmq.EVENTS)) & zmq.POLLIN:
            route, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            self._receive(route, b"".join(frames))
        for sender in self._senders.values():
            self.flush(sender)

    @property
    def is_behind(self) -> bool:
        """Whether there are messages that have not been sent."""
        return any(sender.is_behind for sender in self._senders.values())

    def flush(self, sender: Sender) -> None:
        """Sends what is due, as far as the connection takes it."""
        number = sender.due()
        while number is not None and self._send_message(sender, number):
            number = sender.mark_sent(number)

    def close(self) -> None:
        self.socket.close()

    def _send_message(self, sender: Sender, number: int) -> bool:
        """False if the connection takes nothing now or is gone."""
        frames = sender.frames(number)
        try:
            self._send(sender.route, frames)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            sender.lose_route()
            return False
        return True

    def _send(self, route: bytes | None, frames: Sequence[Frame]) -> None:
        send = self._send_frame
        send(route, _NOBLOCK_MORE)  # fails if the rest could not be sent
        for frame in frames[:-1]:
            send(frame, _NOBLOCK_MORE, copy=len(frame) < ZERO_COPY)
        send(frames[-1], _NOBLOCK, copy=len(frames[-1]) < ZERO_COPY)

    def _receive(self, route: bytes, frame: bytes) -> None:
        try:
            request = unpack_request(frame)
        except ForeignMessage:
            self._introduce(route)
            return
        except BadMessage:  # damaged; the consumer will repeat it
            return
        if request.run != self._run:
            self._introduce(route)
        elif request.key in self._senders:
            self._answer(self._senders[request.key], route, request)
        elif len(self._early) < EARLY:
            self._early[request.key] = route, request

    def _answer(self, sender: Sender, route: bytes, request: CreditRequest) -> None:
        sender.update(request.to_credit(), route)
        self.flush(sender)
        if request.ask:
            self._reply(route, reply_to(request, sender))

    def _introduce(self, route: bytes) -> None:
        """Lets a consumer of another run or version find out which run and version this is."""
        self._reply(route, RetentionReply(self._run, Flow.FORWARD, 0, 0, 0, 0, 0))

    def _reply(self, route: bytes, reply: RetentionReply) -> None:
        with suppress(zmq.ZMQError):  # if the connection is gone or full, the consumer repeats its request
            self._send(route, [b"", pack(reply)])
