"""The consuming end: a connection to one other worker, which is made again when it is lost."""

import os
import socket as sockets
from contextlib import suppress

from stageline.broker.codec.message import Frame
from stageline.broker.errors import BadMessage
from stageline.broker.queues.inbound_link import InboundLink

from .memory import SharedMemory
from .packets import COPIED, LARGEST, MEMORY, MESSAGE, NUMBER, PLACE, RANGE, REPLY, REQUEST, split

FIRST_PAUSE = 0.02  # seconds until another attempt to connect; doubles up to LONGEST_PAUSE
LONGEST_PAUSE = 1.0

_DESCRIPTOR = sockets.CMSG_SPACE(4)  # bytes of ancillary data that one descriptor takes
_REQUEST = bytes([REQUEST])


class Dialer(InboundLink):
    """Serves the requesters given to `add` from the producers at `endpoint`, `shm://` and the path of a socket.

    Times are monotonic, in seconds.
    """

    def __init__(self, endpoint: str, run: str, *, microbatches: int, key: bytes = b"") -> None:
        super().__init__(endpoint, run, microbatches, key)
        self._path = endpoint.removeprefix("shm://")
        self._socket: sockets.socket | None = None
        self._next_attempt = 0.0
        self._pause = FIRST_PAUSE
        self._buffer = memoryview(bytearray(LARGEST))
        self._memory: SharedMemory | None = None
        self._copied = 0  # messages out of shared memory, over this connection
        self._reported = 0  # of which the producer has been told

    def receive(self, now: float, *, wait: bool = False) -> bool:
        if self._socket is None:
            return False
        try:
            size, extra, *_ = self._socket.recvmsg_into([self._buffer], _DESCRIPTOR)
        except BlockingIOError:
            return False
        except ConnectionResetError:  # the producer is gone; what it sent before can still be received
            return self.receive(now)
        if not size:
            self._disconnect(now)
            return False
        descriptors = [int.from_bytes(data[:4], "little") for _, _, data in extra]
        self._take_in_packet(self._buffer[:size], descriptors, now)
        return True

    def send_requests(self, now: float) -> None:
        if self._socket is None and not self._connect(now):
            return
        for requester in self.requesters.values():
            request = requester.request(now)
            if request is not None and self._transmit(_REQUEST + self._pack(request)):
                requester.mark_sent(request, now)
        self._report_copied()

    @property
    def descriptor(self) -> int | None:
        """The descriptor that is readable when it is time to `receive`; None without a connection."""
        return None if self._socket is None else self._socket.fileno()

    @property
    def due(self) -> float:
        """When to call `send_requests` again though nothing has happened."""
        if self._socket is None:
            return self._next_attempt
        return min((requester.due for requester in self.requesters.values()), default=float("inf"))

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _take_in_packet(self, packet: memoryview, descriptors: list[int], now: float) -> None:
        try:
            frames = self._frames(packet, descriptors)
        except BadMessage as error:
            self._count_damage(str(error))
        else:
            if frames:
                self._take_in(frames, now)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if packet[0] == PLACE:
            self._copied += 1
            self._report_copied()

    def _frames(self, packet: memoryview, descriptors: list[int]) -> list[Frame]:
        """The frames of a message or of a reply. Raises `BadMessage`."""
        kind = packet[0]
        if kind == MESSAGE:
            return split(packet[1:])
        if kind == PLACE and len(packet) == RANGE.size and self._memory is not None:
            _, place, size = RANGE.unpack(packet)
            return split(self._memory.read(place, size))
        if kind == REPLY:
            return [b"", packet[1:]]
        if kind == MEMORY and len(packet) == NUMBER.size and len(descriptors) == 1:
            self._map(descriptors[0], NUMBER.unpack(packet)[1])
            return []
        raise BadMessage(f"a packet of {len(packet)} bytes that is no message")

    def _map(self, descriptor: int, size: int) -> None:
        former, self._memory = self._memory, SharedMemory.received(descriptor, size)
        if former is not None:
            former.close()

    def _report_copied(self) -> None:
        if self._copied > self._reported and self._transmit(NUMBER.pack(COPIED, self._copied)):
            self._reported = self._copied

    def _transmit(self, packet: bytes) -> bool:
        """False if there is no room for it now, or the connection is gone, which `receive` finds."""
        with suppress(OSError):
            return self._socket is not None and bool(self._socket.send(packet))
        return False

    def _connect(self, now: float) -> bool:
        if now < self._next_attempt:
            return False
        socket = sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
        socket.setblocking(False)
        try:
            socket.connect(self._path)
        except OSError:  # nothing listens there, or the one that does has not accepted others yet
            socket.close()
            self._delay(now)
            return False
        self._socket, self._pause = socket, FIRST_PAUSE
        self._copied = self._reported = 0
        for requester in self.requesters.values():
            requester.introduce()
        return True

    def _disconnect(self, now: float) -> None:
        self.close()
        self._delay(now)

    def _delay(self, now: float) -> None:
        self._next_attempt = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
