"""Two connections as one: what comes at one goes out at the other, and nothing is looked at.

Each direction has one buffer, and takes more only once that is sent: a peer that reads slowly holds back the other.
"""

import asyncio
import socket as sockets
from contextlib import suppress

BUFFER = 2**18  # bytes
LINGER = 3.0  # seconds in which the second direction ends after the first

_OPTIONS = {
    "TCP_NODELAY": 1,
    "TCP_KEEPIDLE": 10,  # seconds; also what keeps a router's entry for the connection
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 4,
    "TCP_USER_TIMEOUT": 120_000,  # ms that bytes may stay unconfirmed, or wait for a peer that reads nothing
}


def tune(connection: sockets.socket) -> None:
    """Send small pieces at once, and notice a dead peer, where the system has such options."""
    connection.setblocking(False)
    connection.setsockopt(sockets.SOL_SOCKET, sockets.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
        if hasattr(sockets, name):
            connection.setsockopt(sockets.IPPROTO_TCP, getattr(sockets, name), value)


async def exactly(connection: sockets.socket, count: int) -> bytes:
    """Return the next `count` bytes, and take no more. Raises `ConnectionError` if the connection ends before."""
    loop, found = asyncio.get_running_loop(), b""
    while len(found) < count:
        if not (more := await loop.sock_recv(connection, count - len(found))):
            raise ConnectionError("the connection has ended")
        found += more
    return found


async def splice(one: sockets.socket, other: sockets.socket) -> None:
    """Carry bytes both ways until the connections end. The caller closes them."""
    directions = [asyncio.create_task(_pour(one, other)), asyncio.create_task(_pour(other, one))]
    try:
        done, rest = await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        if all(each.exception() is None for each in done):
            await asyncio.wait(rest or done, timeout=LINGER)
    finally:
        for each in directions:
            each.cancel()
        await asyncio.gather(*directions, return_exceptions=True)


async def _pour(source: sockets.socket, sink: sockets.socket) -> None:
    loop, buffer = asyncio.get_running_loop(), memoryview(bytearray(BUFFER))
    while size := await loop.sock_recv_into(source, buffer):
        await loop.sock_sendall(sink, buffer[:size])
        await asyncio.sleep(0)  # others have their turn: both calls return at once while there are bytes and room
    with suppress(OSError):
        sink.shutdown(sockets.SHUT_WR)
