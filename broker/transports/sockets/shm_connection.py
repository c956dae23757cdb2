"""The producer's side of a connection to one consumer: packets, and memory shared with it for long messages."""

import os
import socket as sockets
from collections.abc import Sequence
from time import monotonic

import structlog

from stageline.broker.codec.message import Frame
from stageline.broker.queues.base import Trouble
from stageline.broker.queues.outbound_link import RouteGone
from stageline.broker.transports.sockets.shm_packets import LARGEST, MEMORY, MESSAGE, NUMBER, PLACE, RANGE, preamble

from .shm_packets import LEAST, MESSAGES, Places, SharedMemory, new_descriptor

REQUEST_BYTES = 2**12  # the most that a packet of a consumer may have

_MESSAGE = bytes([MESSAGE])
_OVERHEAD = 64  # bytes of a socket's buffer that the system takes of each packet, and a byte that says its kind



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
        """False if there is no room for it now. Raises `RouteGone`."""
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
        """Sends one packet. False if there is no room for it now. Raises `RouteGone`."""
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
        """One packet of the consumer; None if there is none. Raises `RouteGone`."""
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
        """Whether shared memory can hold so many bytes. New memory is shared when messages have become larger, once
        the consumer has copied all out of the old."""
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
