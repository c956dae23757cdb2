"""The socket of all queues that begin at a worker: a ROUTER, which sends what its senders have due.

A ROUTER gives every connection an identity of its own, which is how a sender notices that its consumer uses a new one.
It never blocks: what cannot be sent now stays due.
"""

import errno
from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq

from stageline.broker.codec.message import Frame
from stageline.broker.errors import EndpointTaken
from stageline.broker.queues.outbound_link import OutboundLink, RouteGone
from stageline.broker.transports.sockets.zeromq_connection import REQUEST_BYTES, Context, open_socket

from .bind import bind
from .connection_guard import guarded

# Bytes of a frame from which on its memory is handed over and not copied. To give memory back, pyzmq wakes a thread of
# its own, which costs as much as copying half a megabyte (measured over ipc and tcp, 16 KB to 16 MB).
ZERO_COPY = 2**19
REQUESTS = 256  # taken in one turn at most, so that the compute loop goes on; the others wait for the next

_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class Router(OutboundLink):
    """Serves the senders given to `add` at `url`; `endpoint` is where to connect to.

    `hwm` is how many messages may wait for one connection. `key` is the run's, which requests are sealed with.
    """

    def __init__(self, context: Context, url: str, run: str, hwm: int, key: bytes = b"") -> None:
        super().__init__(run, key)
        self.socket = open_socket(context, zmq.ROUTER, hwm)
        self.socket.copy_threshold = 0  # what is copied is decided here, by ZERO_COPY
        self._send_frame: Callable[..., object] = super(zmq.Socket, self.socket).send  # the bare one, for every frame
        self._guard = guarded(context, self.socket, url, hwm * REQUEST_BYTES)
        try:
            self.endpoint = bind(self.socket, url)
        except EndpointTaken:
            self._guard.close()
            raise

    def serve(self) -> None:
        """Receives what requests have arrived, and sends everything that is due."""
        for _ in range(REQUESTS):
            if not int(self.socket.get(zmq.EVENTS)) & zmq.POLLIN:
                self._guard.drained()
                break
            self._receive_request()
        self.flush_all()

    def close(self) -> None:
        self._guard.close()
        self.socket.close()

    def _send_message(self, route: bytes, frames: Sequence[Frame]) -> bool:
        try:
            self._send_frames(route, frames)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            raise RouteGone from error
        return True

    def _send_reply(self, route: bytes, frame: bytes) -> None:
        with suppress(zmq.ZMQError):
            self._send_frames(route, [b"", frame])

    def _send_frames(self, route: bytes, frames: Sequence[Frame]) -> None:
        send = self._send_frame
        send(route, _NOBLOCK_MORE)  # fails if the rest could not be sent
        for frame in frames[:-1]:
            send(frame, _NOBLOCK_MORE, copy=len(frame) < ZERO_COPY)
        send(frames[-1], _NOBLOCK, copy=len(frames[-1]) < ZERO_COPY)

    def _receive_request(self) -> None:
        """Takes in one request. What has more frames than one is none, and is dropped without being joined."""
        route = self.socket.recv(_NOBLOCK)
        frame = self.socket.recv(_NOBLOCK, copy=False)
        source, several = frame.get(zmq.SRCFD), frame.more
        self._guard.note(source, len(frame))
        if not several and self.take_in(route, frame.bytes):
            self._guard.trust(source)
        while frame.more:
            frame = self.socket.recv(_NOBLOCK, copy=False)
            self._guard.note(source, len(frame))
