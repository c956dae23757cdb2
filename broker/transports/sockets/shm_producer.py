"""Producing end of `shm://`: a Unix socket that consumers connect to, and one connection to each of them.

A connection carries packets (SOCK_SEQPACKET): a byte that says the kind, and the content in the machine's byte order.
Nothing blocks: what a connection does not take now stays due.

    producer -> consumer   MESSAGE   lengths and bytes of a message's frames
                           MEMORY    the size of shared memory, whose descriptor comes with the packet
                           PLACE     where in that memory lengths and bytes of a message's frames are
                           REPLY     a `RetentionReply`, packed
    consumer -> producer   REQUEST   a `CreditRequest`, packed
                           COPIED    how many messages have been copied out of shared memory over this connection

Long messages lie in memory that is shared with one consumer: `shm_memory.py`.
"""

import os
import select
import socket as sockets
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from time import monotonic

import structlog

from stageline.broker.codec.message import Frame
from stageline.broker.queues.base import Trouble
from stageline.broker.queues.links import OutboundLink, RouteGone
from stageline.broker.queues.secrets import NO_KEYS, Keys

from .bind import bind_path, is_trusted, user_of
from .shm_memory import Places, SharedMemory, new_descriptor

MESSAGE, MEMORY, PLACE, REPLY, REQUEST, COPIED = range(1, 7)
NUMBER = struct.Struct("=BQ")  # of MEMORY and COPIED: the kind, and a number
RANGE = struct.Struct("=BQQ")  # of PLACE: the kind, the offset of the first byte, and how many there are
LARGEST = 2**15  # bytes of a packet; longer messages go through shared memory
COUNT = struct.Struct("=H")
TWO = struct.Struct("=H2Q")
LEAST = 2**20  # bytes
MESSAGES = 4  # of the largest so far that there is room for
REQUEST_BYTES = 2**12  # the most that a packet of a consumer may have
_MESSAGE = bytes([MESSAGE])
_OVERHEAD = 64  # bytes of a socket's buffer that the system takes of each packet, and a byte that says its kind
REQUESTS = 256  # taken from a connection in one turn at most, so that the compute loop goes on
BACKLOG = 64  # connections that wait to be accepted
PAUSE = 0.5  # seconds until another attempt, after a connection could not be accepted
_POLLIN_POLLOUT = select.POLLIN | select.POLLOUT
_REPLY = bytes([REPLY])

log = structlog.get_logger()


def preamble(frames: Sequence[Frame]) -> bytes:
    """Return the beginning of a message, before its frames: their number, u16, and the length of each, u64."""
    if len(frames) == 2:  # those of one tensor: nearly all
        return TWO.pack(2, len(frames[0]), len(frames[1]))
    return lengths(len(frames)).pack(len(frames), *map(len, frames))


@lru_cache(maxsize=64)
def lengths(frames: int) -> struct.Struct:
    """Return the layout of a message's preamble."""
    return struct.Struct(f"=H{frames}Q")


class ConsumerConnection:
    """Connection to one consumer. `trouble`: why long messages cannot be sent, None if they can.

    `blocked`: there was something to send, and the system had no room for another packet.
    """

    def __init__(self, socket: sockets.socket) -> None:
        """Use `socket`, which is connected, without ever waiting for it."""
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

    def packets(self, most: int) -> Iterator[bytes]:
        """Yield the packets of the consumer that have come, up to `most`. Raises `RouteGone`."""
        self.blocked = False  # until something is to be sent again, and cannot be
        for _ in range(most):
            if (packet := self.receive()) is None:
                return
            yield packet

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
        """Free what the consumer has copied: `count` messages in all. Raises `RouteGone` for an impossible count."""
        if not 0 <= count - self._copied <= len(self._places):
            raise RouteGone
        self._places.free(count - self._copied)
        self._copied = count

    def close(self) -> None:
        """Close the socket and the shared memory."""
        self.socket.close()
        if self._memory is not None:
            self._memory.close()

    def _has_room_for(self, size: int) -> bool:
        """Return True if shared memory holds `size` bytes; share more for larger messages once all is copied."""
        memory = self._memory
        if memory is None or (not self._places and memory.size < MESSAGES * size):
            try:
                memory = self._share(max(LEAST, MESSAGES * size))
            except OSError as error:
                if memory is None or size > memory.size:  # else the old memory will do
                    self._note_no_memory(error)
        return memory is not None and size <= memory.size

    def _share(self, size: int) -> SharedMemory | None:
        """Return new memory; None if the packet finds no room now. Raises `RouteGone`, `OSError` without memory."""
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
    """Server of the senders given to `add` at `url`, which is `shm://` and a path; `keys` seal requests."""

    def __init__(self, url: str, run: str, keys: Keys = NO_KEYS, note: Callable[[], object] = lambda: None) -> None:
        """Listen at `url`, and call `note` whenever `trouble` may have changed.

        Raises `EndpointTaken` if another process listens there, or the path cannot be used.
        """
        super().__init__(run, keys)
        self._socket = sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
        try:
            bind_path(self._socket, url)
            self._socket.listen(BACKLOG)
            self._socket.setblocking(False)
        except BaseException:
            self._socket.close()
            raise
        self._url = url
        self._note = note
        self._connections: dict[bytes, ConsumerConnection] = {}
        self._accepted = 0
        self._next_attempt = 0.0  # at which to accept a connection again, after that failed

    @property
    def trouble(self) -> Trouble | None:
        """Reason for which messages do not reach a consumer."""
        return next((each.trouble for each in self._connections.values() if each.trouble), None)

    def serve(self) -> None:
        """Process what consumers have sent and send everything that is due."""
        self._accept()
        for route, connection in list(self._connections.items()):
            try:
                self._receive(route, connection)
            except RouteGone:
                self._connections.pop(route).close()
                self._note()
        self.flush_all()

    def watched(self, now: float) -> dict[int, int]:
        """Return the descriptors to poll, each with its events."""
        found = {self._socket.fileno(): select.POLLIN} if now >= self._next_attempt else {}
        for connection in self._connections.values():
            found[connection.socket.fileno()] = _POLLIN_POLLOUT if connection.blocked else select.POLLIN
        return found

    def due(self, now: float) -> float:
        """Return the time of the next attempt to accept a connection, infinite if none has failed."""
        return self._next_attempt if now < self._next_attempt else float("inf")

    def close(self) -> None:
        """Close all connections and stop listening."""
        for connection in self._connections.values():
            connection.close()
        self._socket.close()

    def _send_message(self, route: bytes, frames: Sequence[Frame]) -> bool:
        connection = self._connections.get(route)
        if connection is None:
            raise RouteGone
        before, sent = connection.trouble, connection.send(frames)
        if connection.trouble is not before:
            self._note()
        return sent

    def _send_reply(self, route: bytes, frame: bytes) -> None:
        if route in self._connections:
            try:
                self._connections[route].transmit([_REPLY, frame])
            except RouteGone:  # what serves the connection finds that too
                return

    def _receive(self, route: bytes, connection: ConsumerConnection) -> None:
        for packet in connection.packets(REQUESTS):
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
