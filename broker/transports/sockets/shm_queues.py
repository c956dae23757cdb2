"""Queues between processes of one machine: `shm://`. Unix sockets carry messages; large ones lie in shared memory.

    worker 0                                    worker 1
    Outbound -- Sender -- Listener --packets--> Dialer -- Receiver -- Inbound
                                    <-requests--

No thread but the worker's own has to run for a message to arrive: the system wakes the process that waits for it.
"""

import array
import math
import os
import select
import socket as sockets
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import structlog

from stageline.broker.codec.message import Frame
from stageline.broker.errors import BadMessage, EndpointTaken
from stageline.broker.queues.base import Trouble
from stageline.broker.queues.ends import LinkedQueues, QueueOptions
from stageline.broker.queues.links import InboundLink
from stageline.broker.queues.secrets import NO_KEYS, Keys

from .bind import is_trusted, user_of
from .shm_memory import SharedMemory
from .shm_producer import (
    COPIED,
    COUNT,
    LARGEST,
    MEMORY,
    MESSAGE,
    NUMBER,
    PLACE,
    RANGE,
    REPLY,
    REQUEST,
    TWO,
    Listener,
    lengths,
)

FIRST_PAUSE = 0.02  # seconds until another attempt to connect; doubles up to LONGEST_PAUSE
LONGEST_PAUSE = 1.0

_DESCRIPTOR = sockets.CMSG_SPACE(4)  # bytes of ancillary data that one descriptor takes
# Nothing listens there, or the one that does has not accepted others yet.
_NOT_YET = (FileNotFoundError, ConnectionRefusedError, BlockingIOError)
_POLLIN_POLLOUT = select.POLLIN | select.POLLOUT
_PROGRESS = (MESSAGE, PLACE)  # a reply comes over each new connection, also if nothing else does
_REQUEST = bytes([REQUEST])

log = structlog.get_logger()


class Dialer(InboundLink):
    """Client of the producers at `endpoint`, `shm://` and the path of a socket, for the requesters given to `add`.

    Times are in seconds on the monotonic clock.
    """

    def __init__(self, endpoint: str, run: str, keys: Keys = NO_KEYS) -> None:
        """Make a link that connects on its first `send_requests`.

        Args:
            endpoint: `shm://` and the path of the producers' socket.
            run: Id of the run, which messages must name.
            keys: Keys of the worker's queues, which requests and replies are sealed with.
        """
        super().__init__(endpoint, run, keys)
        self._path = endpoint.removeprefix("shm://")
        self._socket: sockets.socket | None = None
        self._arrivals = select.poll()  # of the socket
        self._next_attempt = 0.0
        self._pause = FIRST_PAUSE
        self._blocked = False  # there was something to send, and the system had no room for another packet
        self._buffer = memoryview(bytearray(LARGEST))
        self._memory: SharedMemory | None = None
        self._copied = 0  # messages out of shared memory, over this connection
        self._reported = 0  # of which the producer has been told

    def has_arrived(self) -> bool:
        """Return True if the socket is readable."""
        return bool(self._arrivals.poll(0))

    def receive(self, now: float, *, wait: bool = False) -> bool:
        """Process one packet, as `InboundLink.receive`. Never waits; returns False without a connection."""
        if self._socket is None:
            return False
        try:
            size, extra, *_ = self._socket.recvmsg_into([self._buffer], _DESCRIPTOR, sockets.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        except ConnectionResetError:  # once: the producer is gone; what it sent before can still be received
            return True
        descriptors = _descriptors(extra) if extra else ()
        try:
            if size:
                self._take_in_packet(self._buffer[:size], descriptors, now)
            else:
                self._disconnect(now)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return size > 0

    def send_requests(self, now: float) -> None:
        """Connect if it is time to, and send the requests that are due."""
        self._blocked = False
        if self._socket is None and not self._connect(now):
            return
        for requester in self.requesters.values():
            request = requester.request(now)
            if request is not None and not self._blocked and self._transmit(_REQUEST + self._pack(request)):
                requester.mark_sent(request, now)
        self._report_copied()

    @property
    def handle(self) -> int | None:
        """Descriptor that is readable when it is time to `receive`; None without a connection."""
        return None if self._socket is None else self._socket.fileno()

    @property
    def events(self) -> int:
        """Events to poll `handle` for."""
        return _POLLIN_POLLOUT if self._blocked else select.POLLIN

    @property
    def due(self) -> float:
        """Time at which to call `send_requests` again, to connect or to send a request.

        Infinite while a packet waits for room, which `events` report.
        """
        if self._socket is None:
            return self._next_attempt
        if self._blocked:  # until there is room, which `events` include
            return float("inf")
        return min((requester.due for requester in self.requesters.values()), default=float("inf"))

    def close(self) -> None:
        """Close the connection and the shared memory; a later `send_requests` may connect again."""
        if self._socket is not None:
            self._arrivals.unregister(self._socket)
            self._socket.close()
            self._socket = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _take_in_packet(self, packet: memoryview, descriptors: Sequence[int], now: float) -> None:
        kind = packet[0]
        try:
            frames = self._frames(kind, packet, descriptors)
        except BadMessage as error:
            self._drop(kind, str(error), now)
        else:
            if frames:
                self._take_in(frames, now)
            if kind in _PROGRESS:
                self._pause = FIRST_PAUSE
        if kind == PLACE:
            self._copied += 1
            self._report_copied()

    def _frames(self, kind: int, packet: memoryview, descriptors: Sequence[int]) -> list[Frame]:
        """Return the frames of a message or of a reply; none for shared memory. Raises `BadMessage`."""
        if kind == MESSAGE:
            return split(packet[1:])
        if kind == PLACE and len(packet) == RANGE.size and self._memory is not None:
            _, place, size = RANGE.unpack(packet)
            return split(self._memory.read(place, size))
        if kind == REPLY:
            return [b"", packet[1:]]
        if kind == MEMORY:
            self._map(packet, descriptors)
            return []
        raise BadMessage(f"a packet of {len(packet)} bytes that is no message")

    def _map(self, packet: memoryview, descriptors: Sequence[int]) -> None:
        """Map the producer's shared memory, which a packet has brought, in place of the former.

        Raises `BadMessage` if the packet does not have exactly one descriptor.
        """
        if len(packet) != NUMBER.size or len(descriptors) != 1:
            raise BadMessage(f"shared memory with {len(descriptors)} descriptors; is the limit of open files reached?")
        former, self._memory = self._memory, SharedMemory.received(descriptors[0], NUMBER.unpack(packet)[1])
        if former is not None:
            former.close()

    def _drop(self, kind: int, reason: str, now: float) -> None:
        """Drop a packet that is of no use.

        Shared memory comes only once over a connection, so that needs a new connection.
        """
        if kind == MEMORY:
            self._disconnect(now)
            log.warning("disconnected", reason=reason, endpoint=self.endpoint)
        self._count_damage(reason)

    def _report_copied(self) -> None:
        if self._copied > self._reported and self._transmit(NUMBER.pack(COPIED, self._copied)):
            self._reported = self._copied

    def _transmit(self, packet: bytes) -> bool:
        """Send a packet. Returns False if it finds no room now, or the connection is gone, which `receive` notices."""
        try:
            return self._socket is not None and bool(self._socket.send(packet))
        except BlockingIOError:
            self._blocked = True
        except OSError:
            return False
        return False

    def _connect(self, now: float) -> bool:
        if now < self._next_attempt:
            return False
        try:
            self._socket = _connected(self._path)
        except OSError as error:
            self._delay(now)
            if not isinstance(error, _NOT_YET):  # no descriptor is left, or it is another user's
                log.warning("cannot connect", reason=str(error), endpoint=self.endpoint)
            return False
        self._arrivals.register(self._socket, select.POLLIN)
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


def _connected(path: str) -> sockets.socket:
    """Return a socket connected to the one that listens at `path`. Raises `OSError`."""
    socket = sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
    try:
        socket.setblocking(False)
        socket.connect(path)
        if not is_trusted(user := user_of(socket)):
            raise PermissionError(f"a process of user {user} listens there, and this one is of user {os.geteuid()}")
    except BaseException:
        socket.close()
        raise
    return socket


def _descriptors(extra: Iterable[tuple[int, int, bytes]]) -> Sequence[int]:
    """Return the descriptors that came with a packet. There may be several: the system rounds the room for one up."""
    found = array.array("i")
    for _, _, data in extra:
        found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return found


def split(content: memoryview) -> list[Frame]:
    """Return the frames of a message. Raises `BadMessage` unless their lengths are those of `content`."""
    size = len(content)
    if size >= TWO.size:
        count, header, tensor = TWO.unpack_from(content)
        if count == 2 and TWO.size + header + tensor == size:
            end = TWO.size + header
            return [content[TWO.size : end], content[end:]]
    if size < COUNT.size:
        raise BadMessage(f"a message of {len(content)} bytes, which is too short for one")
    layout = lengths(COUNT.unpack_from(content)[0])
    if layout.size > len(content) or layout.size == COUNT.size:
        raise BadMessage(f"a message of {len(content)} bytes cannot have the frames that it announces")
    frames: list[Frame] = []
    end = layout.size
    for length in layout.unpack_from(content)[1:]:
        begin, end = end, end + length
        frames.append(content[begin:end])
    if end != len(content):
        raise BadMessage(f"a message of {len(content)} bytes announces frames of {end - layout.size}")
    return frames


class ShmQueues(LinkedQueues):
    """All queue ends of one worker, over Unix sockets and shared memory."""

    schemes = ("shm://",)

    def __init__(self, run: str, incarnation: int, url: str, options: QueueOptions) -> None:
        """Open the queues, with a socket that listens at `url`.

        Args:
            run: Id of the run.
            incarnation: Incarnation of the worker.
            url: `shm://` and the path of a socket.
            options: Windows, limits and secrets.

        Raises:
            EndpointTaken: Another process listens at the path, or the path cannot be used.
        """
        super().__init__(run, incarnation, options)
        self.endpoint = url
        self.trouble: Trouble | None = None  # why messages do not reach a consumer
        try:
            self.outbound_link = self._listener = Listener(url, run, options.secrets.requests, self._note_trouble)
        except EndpointTaken:
            self._wakeup.close()
            raise

    def _note_trouble(self) -> None:
        self.trouble = self._listener.trouble

    def _ready(self, watched: dict[Any, int], seconds: float) -> Collection[Any]:
        poll = select.poll()
        for descriptor, events in watched.items():
            poll.register(descriptor, events)
        return [descriptor for descriptor, _ in poll.poll(max(0, math.ceil(seconds * 1000)))]

    def _open_link(self, endpoint: str) -> Dialer:
        return Dialer(endpoint, self.run, self.options.secrets.requests)
