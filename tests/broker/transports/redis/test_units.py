"""Reading and writing over a connection without waiting."""

import os
import socket
from collections.abc import Iterator

import pytest

from stageline.broker.transports.redis.units import MOST_CHUNKS, UnwaitingSocket


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        one.settimeout(10.0)
        other.settimeout(10.0)
        yield one, other


def test_what_the_system_does_not_take_is_left(ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = ends
    chunks = [bytes([number]) * 100_000 for number in range(30)]
    rest = UnwaitingSocket(one).write(chunks)
    assert rest
    left = b"".join(rest)
    taken = b"".join(chunks).removesuffix(left)
    assert len(taken) + len(left) == 3_000_000
    assert b"".join(UnwaitingSocket(one).write([left])) == left
    assert b"".join(iter_received(other, len(taken))) == taken


def test_more_chunks_than_one_system_call_takes_are_not_lost(ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = ends
    chunks = [b"%d " % number for number in range(3 * MOST_CHUNKS)]
    rest = UnwaitingSocket(one).write(chunks)
    assert rest == chunks[MOST_CHUNKS:]
    assert not UnwaitingSocket(one).write([b"".join(rest)])
    assert b"".join(iter_received(other, len(b"".join(chunks)))) == b"".join(chunks)


def test_an_interruption_ends_reading_and_writing_and_leaves_the_descriptor(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    one, _ = ends
    reader = UnwaitingSocket(one)
    reader.interrupt()
    assert reader.read(bytearray(10)) == 0
    with pytest.raises(BrokenPipeError):
        reader.write([b"abc"])
    os.fstat(reader.descriptor)


def test_nothing_is_told_from_the_end(ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = ends
    reader, buffer = UnwaitingSocket(one), bytearray(10)
    assert reader.read(buffer) is None
    other.send(b"abc")
    assert (reader.read(buffer), buffer[:3]) == (3, b"abc")
    other.close()
    assert reader.read(buffer) == 0


def iter_received(end: socket.socket, count: int) -> Iterator[bytes]:
    while count:
        received = end.recv(count)
        count -= len(received)
        yield received
