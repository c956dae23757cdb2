"""Commands for a Redis server as bytes, in units that are carried out as a whole, and the socket that takes them.

A socket with a timeout makes two system calls: it first waits until it may be used. Its descriptor never blocks, so
`UnwaitingSocket` uses the descriptor itself, with one call. Through TLS that cannot be done.
"""

import os
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import hiredis
import msgspec

Chunk: TypeAlias = bytes | memoryview
Command: TypeAlias = tuple[Chunk, ...]
Unit: TypeAlias = Sequence[Command]  # commands that are carried out together, or none of them

UNCOPIED = 2**16  # bytes of a chunk from which on it is sent without a copy

_BEGIN, _END = (b"MULTI",), (b"EXEC",)
_PACKED_BEGIN, _PACKED_END = b"*1\r\n$5\r\nMULTI\r\n", b"*1\r\n$4\r\nEXEC\r\n"


class Exchange(msgspec.Struct, frozen=True):
    """Commands that are carried out together, and the function that takes their answers.

    `has_more`: what is asked next depends on the answers, so they must not be left unread. `packed`: the unit as it is
    sent, if that was made at once; then its commands are only named in `unit`, with their keys. `later`: makes the
    exchange, which takes time: about `size` bytes are packed.
    """

    unit: Unit
    receive: Callable[[list[Any]], None]
    has_more: bool = False
    packed: Sequence[Chunk] | None = None
    later: "Callable[[], Exchange] | None" = None
    size: int = 0

    def made(self) -> "Exchange":
        """Return the exchange to send: this one, or the one that `later` makes."""
        return self if self.later is None else self.later()


def pack_exchanges(exchanges: Sequence[Exchange]) -> Sequence[Chunk]:
    """Return the units of all the exchanges, as `pack` returns them."""
    if len(exchanges) == 1 and (packed := exchanges[0].packed) is not None:
        return packed
    chunks: list[Chunk] = []
    for exchange in exchanges:
        chunks += pack([exchange.unit]) if exchange.packed is None else exchange.packed
    return _merged(chunks)


def pack_together(commands: Sequence[Sequence[Chunk]]) -> Sequence[Chunk]:
    """Return the unit of commands that are packed already."""
    if len(commands) == 1:
        return commands[0]
    return _merged([_PACKED_BEGIN, *[chunk for command in commands for chunk in command], _PACKED_END])


def pack(units: Sequence[Unit]) -> list[Chunk]:
    """Return the units in Redis' own protocol, in one piece."""
    commands = (each for unit in units for each in (unit if len(unit) == 1 else (_BEGIN, *unit, _END)))
    return [b"".join(map(hiredis.pack_command, commands))]  # type: ignore[arg-type]  # typed for one argument


def _merged(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the same bytes in few pieces: a system call for each would take longer than a copy of what is small."""
    merged: list[Chunk] = []
    small: list[Chunk] = []
    for chunk in chunks:
        if len(chunk) > UNCOPIED:
            merged += (b"".join(small), chunk)
            small = []
        else:
            small.append(chunk)
    return [*merged, b"".join(small)]


SMALL = 2**16  # bytes that a socket accepts at once when nothing else is under way

MOST_CHUNKS = 64  # in one system call: the system takes no more than 1024


class UnwaitingSocket:
    """Reader and writer over `end`, the socket of a connection, which has a timeout, without waiting.

    `descriptor` is that of the socket.
    """

    def __init__(self, end: Any) -> None:
        """Use `end`, a connected socket, through TLS if it is a `SSLSocket`."""
        self._socket = end
        self.descriptor: int = end.fileno()
        self._is_encrypted = isinstance(end, ssl.SSLSocket)

    def read(self, buffer: bytearray) -> int | None:
        """Return the number of bytes read into the buffer; 0 at the end of the stream, None if nothing is here."""
        try:
            return self._read_decrypted(buffer) if self._is_encrypted else os.readv(self.descriptor, (buffer,))
        except (BlockingIOError, ssl.SSLWantReadError):
            return None

    def write(self, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        """Write what the system takes now, and return the rest."""
        if self._is_encrypted:
            return self._write_encrypted(chunks)
        try:
            count = os.writev(self.descriptor, chunks[:MOST_CHUNKS])
        except BlockingIOError:
            return chunks
        return _after(count, chunks)

    def interrupt(self) -> None:
        """End the connection: from now on only the end of the stream is read, and writing is an error.

        Safe to call from any thread: the state of TLS, which another thread uses, stays as it is.
        """
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

    def _write_encrypted(self, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        if sum(map(len, chunks)) > SMALL:
            return chunks
        self._socket.sendall(b"".join(chunks))
        return ()


def _after(count: int, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
    """Return the chunks after the first `count` bytes."""
    for place, chunk in enumerate(chunks):
        if count < len(chunk):
            return [memoryview(chunk)[count:], *chunks[place + 1 :]]
        count -= len(chunk)
    return ()
