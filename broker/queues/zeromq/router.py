"""The sending side of a worker over ZeroMQ: one bound ROUTER, over which all its producers hear and speak.

A ROUTER gives every connection an identity of its own, which is how a producer notices that its consumer speaks over
a new one. It never blocks: what cannot be sent now stays due.
"""

import errno
from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq

from stageline.broker.codec.message import Flow, Frame
from stageline.broker.errors import BadMessage, ForeignMessage
from stageline.broker.network.bind import bind
from stageline.broker.queues.base import QueueKey

from . import socket_options as options
from .producer import Producer
from .requests import Credit, Retention, pack, unpack_credit

# Bytes of a frame from which on its memory is handed over and not copied. To give memory back, pyzmq wakes a thread of
# its own, which costs as much as copying half a megabyte (measured over ipc and tcp, 16 KB to 16 MB).
ZERO_COPY = 2**19
_AT_ONCE = int(zmq.NOBLOCK)  # plain: pyzmq's own flags are enums, and slow
_AND_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
HANDFUL = 64  # requests of queues not yet here that are kept for them


class Router:
    """Serves the producers given to `add` at `url`; `endpoint` is where to connect to.

    `hwm` is how many messages may wait for one connection.
    """

    def __init__(self, context: options.Context, url: str, run: str, hwm: int) -> None:
        self._run = run
        self._producers: dict[QueueKey, Producer] = {}
        self._early: dict[QueueKey, tuple[bytes, Credit]] = {}
        self.socket = context.socket(zmq.ROUTER)
        options.for_router(self.socket, hwm)
        self.socket.copy_threshold = 0  # what is copied is decided here, by ZERO_COPY
        self._send_frame: Callable[..., object] = super(zmq.Socket, self.socket).send  # the bare one, for every frame
        self.endpoint = bind(self.socket, url)

    def add(self, producer: Producer) -> None:
        key = producer.log.key
        self._producers[key] = producer
        if key in self._early:
            self._answer(producer, *self._early.pop(key))

    def serve(self) -> None:
        """Hears every request that is here, and sends whatever is due."""
        while int(self.socket.get(zmq.EVENTS)) & zmq.POLLIN:
            peer, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            self._hear(peer, b"".join(frames))
        for producer in self._producers.values():
            self.flush(producer)

    @property
    def owes(self) -> bool:
        """Whether there are messages that have not been sent."""
        return any(producer.behind for producer in self._producers.values())

    def flush(self, producer: Producer) -> None:
        """Sends what is due, as far as the connection takes it."""
        number = producer.due()
        while number is not None and self.send(producer, producer.frames(number)):
            number = producer.did_send(number)

    def send(self, producer: Producer, frames: Sequence[Frame]) -> bool:
        """Sends one message to the producer's consumer; False if the connection takes nothing now or is gone."""
        if producer.peer is None:
            return False
        try:
            self._send(producer.peer, frames)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            producer.lose_peer()
            return False
        return True

    def close(self) -> None:
        self.socket.close()

    def _send(self, peer: bytes, frames: Sequence[Frame]) -> None:
        send = self._send_frame
        send(peer, _AND_MORE)  # this tells whether the rest can be sent
        for frame in frames[:-1]:
            send(frame, _AND_MORE, copy=len(frame) < ZERO_COPY)
        send(frames[-1], _AT_ONCE, copy=len(frames[-1]) < ZERO_COPY)

    def _hear(self, peer: bytes, frame: bytes) -> None:
        try:
            take = unpack_credit(frame)
        except ForeignMessage:
            self._introduce(peer)
            return
        except BadMessage:  # not a request any more; its sender will ask again
            return
        if take.run != self._run:
            self._introduce(peer)
        elif take.key in self._producers:
            self._answer(self._producers[take.key], peer, take)
        elif len(self._early) < HANDFUL:
            self._early[take.key] = peer, take

    def _answer(self, producer: Producer, peer: bytes, take: Credit) -> None:
        producer.hear(peer, take)
        self.flush(producer)
        if take.ask:
            self._say(peer, producer.standing(take))

    def _introduce(self, peer: bytes) -> None:
        """Lets a consumer of another run or version know by whose producer it has been heard."""
        self._say(peer, Retention(self._run, Flow.FORWARD, 0, 0, 0, 0, 0))

    def _say(self, peer: bytes, standing: Retention) -> None:
        with suppress(zmq.ZMQError):  # a peer that is gone or full will ask again
            self._send(peer, [b"", pack(standing)])
