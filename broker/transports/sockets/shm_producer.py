"""The producing end of `shm://`: a Unix socket that consumers connect to, and one connection to each of them.

Long messages lie in memory that is shared with one consumer. Nothing blocks: what a connection does not take now stays
due.
"""

import os
import select
import socket as sockets
from collections.abc import Sequence
from time import monotonic

import structlog

from stageline.broker.codec.message import Frame
from stageline.broker.queues.base import Trouble
from stageline.broker.queues.links import OutboundLink, RouteGone

from .bind import bind_path
from .shm_packets import (
    COPIED,
    LARGEST,
    LEAST,
    MEMORY,
    MESSAGE,
    MESSAGES,
    NUMBER,
    PLACE,
    RANGE,
    REPLY,
    REQUEST,
    Places,
    SharedMemory,
    is_trusted,
    new_descriptor,
    preamble,
    user_of,
)

REQUEST_BYTES = 2**12  # the most that a packet of a consumer may have

_MESSAGE = bytes([MESSAGE])
_OVERHEAD = 64  # bytes of a socket's buffer that the system takes of each packet, and a byte that says its kind
REQUESTS = 256  # taken from a connection in one turn at most, so that the compute loop goes on
BACKLOG = 64  # connections that wait to be accepted
PAUSE = 0.5  # seconds until another attempt, after a connection could not be accepted

_POLLIN_POLLOUT = select.POLLIN | select.POLLOUT
_REPLY = bytes([REPLY])

log = structlog.get_logger()


class ConsumerConnection:
    """To one consumer. `blocked`: there was something to send, and the system had no room for another packet.
    `trouble`: why long messages cannot be sent, if they cannot."""

    def __init__(self, socket: sockets.socket) -> None:
        socket.setblocking(False)
        self.socket = socket
        buffer = socket.getsockopt(sockets.SOL_SOCKET, sockets.SO_SNDBUF)
        self._largest = min(LARGEST, buffer - _OVERHEAD)
        self.blocked = False
        self.trouble: Trouble | None = None
        self._memory: SharedMemory | None = None
        self._places = Places(0)
        self._copied = 0  # messages that the consumer has copied out of shared memory

    def send(self, frames: Sequence[Frame]) -> bool:
        """Send a message. Returns False if there is no room for it now. Raises `RouteGone`."""
        packet = [_MESSAGE, preamble(frames), *frames]
        size = sum(map(len, packet)) - 1
        if size < self._largest:
            return self.transmit(packet)
        place = self._places.take(size) if self._has_room_for(size) else None
        if place is None or self._memory is None:
            return False
        self._memory.write(place, packet[1:])
        if self.transmit([RANGE.pack(PLACE, place, size)]):
            return True
        self._places.take_back()
        return False

    def transmit(self, parts: Sequence[Frame]) -> bool:
        """Send one packet. Returns False if there is no room for it now. Raises `RouteGone`."""
        try:
            self.socket.send(b"".join(parts))  # short: to join them is faster than to have the system do it
        except BlockingIOError:
            self.blocked = True
            return False
        except OSError as error:
            raise RouteGone from error
        self.blocked = False
        return True

    def receive(self) -> bytes | None:
        """Return a packet of the consumer; None if there is none. Raises `RouteGone`."""
        try:
            packet = self.socket.recv(REQUEST_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            raise RouteGone from error
        if not packet:
            raise RouteGone
        return packet

    def note_copied(self, count: int) -> None:
        """The consumer has copied `count` messages out of shared memory in all. Raises `RouteGone` if there were not so
        many: what it says of this connection cannot be relied on."""
        if not 0 <= count - self._copied <= len(self._places):
            raise RouteGone
        self._places.free(count - self._copied)
        self._copied = count

    def close(self) -> None:
        self.socket.close()
        if self._memory is not None:
            self._memory.close()

    def _has_room_for(self, size: int) -> bool:
        """Return True if shared memory can hold so many bytes. New memory is shared when messages have become larger,
        once the consumer has copied all out of the old."""
        memory = self._memory
        if memory is None or (not self._places and memory.size < MESSAGES * size):
            try:
                memory = self._share(max(LEAST, MESSAGES * size))
            except OSError as error:
                if memory is None or size > memory.size:  # else the old memory will do
                    self._note_no_memory(error)
        return memory is not None and size <= memory.size

    def _share(self, size: int) -> SharedMemory | None:
        """New memory; None if the connection has no room for the packet now. Raises `RouteGone`, and `OSError` if the
        system gives none."""
        descriptor = new_descriptor(size)
        try:
            memory = SharedMemory(descriptor, size)
            if not self._send_descriptor(descriptor, size):
                memory.close()
                return None
        finally:
            os.close(descriptor)
        if self._memory is not None:
            self._memory.close()
        self._memory, self._places, self.trouble = memory, Places(size), None
        return memory

    def _send_descriptor(self, descriptor: int, size: int) -> bool:
        try:
            sockets.send_fds(self.socket, [NUMBER.pack(MEMORY, size)], [descriptor])
        except BlockingIOError:
            self.blocked = True
            return False
        except OSError as error:
            raise RouteGone from error
        return True

    def _note_no_memory(self, error: OSError) -> None:
        if self.trouble is None:
            reason = f"the system gives no shared memory for messages: {error.strerror}"
            self.trouble = Trouble(reason, monotonic())
            log.warning(reason)


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
        """Reason for which messages do not reach a consumer. For any thread."""
        return next((each.trouble for each in tuple(self._connections.values()) if each.trouble), None)

    def serve(self) -> None:
        """Take in what consumers have sent and send everything that is due."""
        self._accept()
        for route, connection in list(self._connections.items()):
            connection.blocked = False  # until something is to be sent again, and cannot be
            try:
                self._receive(route, connection)
            except RouteGone:
                self._connections.pop(route).close()
        self.flush_all()

    def watched(self, now: float) -> dict[int, int]:
        found = {self._socket.fileno(): select.POLLIN} if now >= self._next_attempt else {}
        for connection in self._connections.values():
            found[connection.socket.fileno()] = _POLLIN_POLLOUT if connection.blocked else select.POLLIN
        return found

    def due(self, now: float) -> float:
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
        """Admit only processes of this user: the socket's file has the mode 0600, its folder may be another's."""
        user = user_of(socket)
        if not is_trusted(user):
            self._log_refusal(f"a process of user {user} connected to {self._url}")
            socket.close()
            return
        self._accepted += 1
        self._connections[self._accepted.to_bytes(8, "little")] = ConsumerConnection(socket)
