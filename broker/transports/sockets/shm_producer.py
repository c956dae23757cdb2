"""The producing end: a Unix socket that consumers connect to, and one connection to each of them.

Nothing blocks: what a connection does not take now stays due.
"""

import select
import socket as sockets
from collections.abc import Sequence
from time import monotonic

import structlog

from stageline.broker.codec.message import Frame
from stageline.broker.queues.base import Trouble
from stageline.broker.queues.outbound_link import OutboundLink, RouteGone
from stageline.broker.transports.sockets.shm_connection import ConsumerConnection
from stageline.broker.transports.sockets.shm_packets import COPIED, NUMBER, REPLY, REQUEST

from .bind import bind_path
from .shm_packets import is_trusted, user_of

REQUESTS = 256  # taken from a connection in one turn at most, so that the compute loop goes on
BACKLOG = 64  # connections that wait to be accepted
PAUSE = 0.5  # seconds until another attempt, after a connection could not be accepted

_POLLIN_POLLOUT = select.POLLIN | select.POLLOUT
_REPLY = bytes([REPLY])

log = structlog.get_logger()


class Listener(OutboundLink):
    """Serves the senders given to `add` at `url`, `shm://` and a path. `key` is the run's, which requests are sealed
    with. Raises `EndpointTaken` if another process listens there, or the path cannot be used.
    """

    def __init__(self, url: str, run: str, key: bytes = b"") -> None:
        super().__init__(run, key)
        self._socket = sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
        try:
            bind_path(self._socket, url)
            self._socket.listen(BACKLOG)
            self._socket.setblocking(False)
        except BaseException:
            self._socket.close()
            raise
        self._url = url
        self._connections: dict[bytes, ConsumerConnection] = {}
        self._accepted = 0
        self._next_attempt = 0.0  # at which to accept a connection again, after that failed

    @property
    def trouble(self) -> Trouble | None:
        """What keeps messages from a consumer. For any thread."""
        return next((each.trouble for each in tuple(self._connections.values()) if each.trouble), None)

    def serve(self) -> None:
        """Takes in what consumers have sent, and sends everything that is due."""
        self._accept()
        for route, connection in list(self._connections.items()):
            connection.blocked = False  # until something is to be sent again, and cannot be
            try:
                self._receive(route, connection)
            except RouteGone:
                self._connections.pop(route).close()
        self.flush_all()

    def watched(self, now: float) -> dict[int, int]:
        """The descriptors to poll, and for what, until it is time to `serve`."""
        found = {self._socket.fileno(): select.POLLIN} if now >= self._next_attempt else {}
        for connection in self._connections.values():
            found[connection.socket.fileno()] = _POLLIN_POLLOUT if connection.blocked else select.POLLIN
        return found

    def due(self, now: float) -> float:
        """When to look at `watched` again though nothing has happened."""
        return self._next_attempt if now < self._next_attempt else float("inf")

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._socket.close()

    def _send_message(self, route: bytes, frames: Sequence[Frame]) -> bool:
        connection = self._connections.get(route)
        if connection is None:
            raise RouteGone
        return connection.send(frames)

    def _send_reply(self, route: bytes, frame: bytes) -> None:
        if route in self._connections:
            try:
                self._connections[route].transmit([_REPLY, frame])
            except RouteGone:  # what serves the connection finds that too
                return

    def _receive(self, route: bytes, connection: ConsumerConnection) -> None:
        for _ in range(REQUESTS):
            packet = connection.receive()
            if packet is None:
                return
            if packet[0] == REQUEST:
                self.take_in(route, packet[1:])
            elif packet[0] == COPIED and len(packet) == NUMBER.size:
                connection.note_copied(NUMBER.unpack(packet)[1])
            else:
                self._log_refusal(f"a packet of {len(packet)} bytes that is no request")
                raise RouteGone

    def _accept(self) -> None:
        if monotonic() < self._next_attempt:
            return
        try:
            for _ in range(BACKLOG):
                self._admit(self._socket.accept()[0])
        except BlockingIOError:
            return
        except OSError as error:  # no descriptor is left
            self._next_attempt = monotonic() + PAUSE
            log.warning("cannot accept a connection", reason=str(error), again_in=PAUSE)

    def _admit(self, socket: sockets.socket) -> None:
        """Only processes of this user: the socket's file has the mode 0600, its folder may be another's."""
        user = user_of(socket)
        if not is_trusted(user):
            self._log_refusal(f"a process of user {user} connected to {self._url}")
            socket.close()
            return
        self._accepted += 1
        self._connections[self._accepted.to_bytes(8, "little")] = ConsumerConnection(socket)
