"""The socket of a connection to Redis for a thread that must not wait: one system call for each thing it does.

A socket with a timeout makes two calls: first it waits until it may be used. Its descriptor never blocks, so here it is
used by itself. Through TLS that cannot be done.
"""

import os
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

Bytes = bytes | memoryview

SMALL = 2**16  # bytes that a socket accepts at once when nothing else is under way

MOST_CHUNKS = 64  # in one system call: the system takes no more than 1024


class UnwaitingSocket:
    """Reads and writes over `end`, the socket of a connection, which has a timeout, without waiting. `descriptor` is
    that of the socket."""

    def __init__(self, end: Any) -> None:
        self._socket = end
        self.descriptor: int = end.fileno()
        self._is_encrypted = isinstance(end, ssl.SSLSocket)

    def read(self, buffer: bytearray) -> int | None:
        """How many bytes were read into the buffer; 0 at the end of the stream, None if nothing is here."""
        try:
            return self._read_decrypted(buffer) if self._is_encrypted else os.readv(self.descriptor, (buffer,))
        except (BlockingIOError, ssl.SSLWantReadError):
            return None

    def write(self, chunks: Sequence[Bytes]) -> Sequence[Bytes]:
        """Writes what the system takes now. What is left."""
        if self._is_encrypted:
            return self._write_encrypted(chunks)
        try:
            count = os.writev(self.descriptor, chunks[:MOST_CHUNKS])
        except BlockingIOError:
            return chunks
        return _after(count, chunks)

    def interrupt(self) -> None:
        """From now on nothing is read but the end of the stream, and writing is an error. For any thread: the state of
        TLS, which another thread uses, stays as it is."""
        with suppress(OSError):  # the other side has ended it
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _read_decrypted(self, buffer: bytearray) -> int:
        silence = self._socket.gettimeout()
        self._socket.settimeout(0.0)
        try:
            count: int = self._socket.recv_into(buffer)
            return count
        finally:
            self._socket.settimeout(silence)

    def _write_encrypted(self, chunks: Sequence[Bytes]) -> Sequence[Bytes]:
        if sum(map(len, chunks)) > SMALL:
            return chunks
        self._socket.sendall(b"".join(chunks))
        return ()


def _after(count: int, chunks: Sequence[Bytes]) -> Sequence[Bytes]:
    """What comes after the first `count` bytes."""
    for place, chunk in enumerate(chunks):
        if count < len(chunk):
            return [memoryview(chunk)[count:], *chunks[place + 1 :]]
        count -= len(chunk)
    return ()
