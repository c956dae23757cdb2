"""Rules by which connections of a bound socket are closed.

One peer must not take the memory, the descriptors or the turns of the others.

    accepted ──> untrusted ──(brought a genuine message)──> trusted
                     v                                         v
                  few bytes, few messages, a few seconds    the largest message and some slack under way

A connection that replaces a trusted one begins untrusted.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

UNTRUSTED_BYTES = 2**16  # that may come before a connection is trusted
UNTRUSTED_FRAMES = 128  # likewise; each may be answered
UNTRUSTED_SECONDS = 5.0  # in which a connection must become trusted
UNTRUSTED_CONNECTIONS = 256  # at a time; or a quarter of the descriptors, if that is less
CONNECTIONS = 4096  # in all; or half of the descriptors: the others are for the process's own files and sockets
MESSAGE_SECONDS = 300.0  # in which a message must be whole once its first bytes came
SLACK = 2**24  # bytes under way beside the largest message: what the system's own buffers may hold


@dataclass(slots=True)
class PeerConnection:
    """Record of what is known about one connection. Times are in seconds on the monotonic clock.

    Attributes:
        peer: Host and port.
        opened: Time at which the connection was accepted.
        trusted: True if a genuine message came.
        received: Bytes that came, those of the handshake included; None: the system does not tell.
        delivered: Bytes that were handed on.
        frames: Number of frames that were handed on.
        overhead: Fewest bytes seen beyond those delivered, those of the handshake; None before the first frame.
        unfinished: Time since when a message has been on its way; None: no message is.
    """

    peer: str
    opened: float
    trusted: bool = False
    received: int | None = 0
    delivered: int = 0
    frames: int = 0
    overhead: int | None = None  # the fewest bytes seen beyond those delivered: those of the handshake
    unfinished: float | None = None  # since when a message has been on its way; None: none is

    @property
    def host(self) -> str:
        """Host of the peer."""
        return self.peer.rpartition(":")[0]

    def trust(self) -> None:
        """Record that a genuine message came."""
        self.trusted = True

    def note(self, received: int | None, delivered: int, frames: int, now: float) -> None:
        """Record new counts.

        Args:
            received: Bytes that came; None: the system does not tell.
            delivered: Bytes that were handed on.
            frames: Number of frames that were handed on.
            now: Time of the call.
        """
        if frames > self.frames:
            self.unfinished = None
        self.received, self.frames = received, frames
        self.delivered = delivered if received is None else min(delivered, received)
        if frames:
            self.overhead = min(self.pending, self.pending if self.overhead is None else self.overhead)
        if self.pending <= (self.overhead or 0):
            self.unfinished = None
        elif self.unfinished is None:
            self.unfinished = now

    @property
    def pending(self) -> int:
        """Number of bytes that came and were not handed on."""
        return 0 if self.received is None else self.received - self.delivered


def refusals(
    connections: Sequence[PeerConnection], now: float, drained: float, *, largest: int, descriptors: int
) -> list[tuple[PeerConnection, str]]:
    """Return the connections to close, each with the reason.

    Args:
        connections: All connections of the socket.
        now: Time of the call.
        drained: Time at which all that had arrived was last taken from the socket. No connection is too slow for a
            process that has not looked.
        largest: Bytes of the largest message.
        descriptors: Number of descriptors that the process may have.
    """
    found = {id(each): (each, _reason(each, min(now, drained), largest)) for each in connections}
    refused = [(each, reason) for each, reason in found.values() if reason]
    refused += _too_much([each for each, reason in found.values() if not reason], 4 * largest + SLACK)
    gone = {id(each) for each, _ in refused}
    return [*refused, *_too_many([each for each in connections if id(each) not in gone], descriptors)]


def _reason(connection: PeerConnection, now: float, largest: int) -> str:
    if connection.trusted:
        return _trusted_reason(connection, now, largest)
    age = now - connection.opened
    if (connection.received or 0) > UNTRUSTED_BYTES:
        return f"{connection.received} bytes came, {UNTRUSTED_BYTES} may come before a genuine message"
    if connection.frames > UNTRUSTED_FRAMES:
        return f"{connection.frames} messages came, {UNTRUSTED_FRAMES} may come before a genuine one"
    if age >= UNTRUSTED_SECONDS:
        return f"no genuine message came in {UNTRUSTED_SECONDS:g} s"
    return ""


def _trusted_reason(connection: PeerConnection, now: float, largest: int) -> str:
    if connection.pending > largest + SLACK:
        return f"{connection.pending} bytes are under way, {largest + SLACK} may be"
    if connection.unfinished is not None and now - connection.unfinished >= MESSAGE_SECONDS:
        return f"a message was not whole {MESSAGE_SECONDS:g} s after its first bytes came"
    return ""


def _too_much(connections: Sequence[PeerConnection], most: int) -> Iterator[tuple[PeerConnection, str]]:
    """Yield the connections with the most bytes under way, until the others together have at most `most` bytes."""
    under_way = sum(connection.pending for connection in connections)
    for connection in sorted(connections, key=lambda each: each.pending, reverse=True):
        if under_way <= most:
            return
        yield connection, f"{under_way} bytes are under way on all connections, {most} may be"
        under_way -= connection.pending


def untrusted_connections(descriptors: int) -> int:
    """Return how many untrusted connections there may be at a time in a process that may have so many descriptors."""
    return min(UNTRUSTED_CONNECTIONS, descriptors // 4)


def _too_many(connections: Sequence[PeerConnection], descriptors: int) -> Iterator[tuple[PeerConnection, str]]:
    untrusted = [connection for connection in connections if not connection.trusted]
    most = untrusted_connections(descriptors)
    all_most = min(CONNECTIONS, descriptors // 2)
    excess = max(len(untrusted) - most, min(len(connections) - all_most, len(untrusted)))
    for connection in _oldest(untrusted, excess):
        yield connection, f"{len(untrusted)} connections have brought no genuine message, {most} may at a time"
    trusted = [connection for connection in connections if connection.trusted]
    for connection in _oldest(trusted, len(trusted) - all_most):
        yield connection, f"there are {len(connections)} connections, {all_most} may be"


def _oldest(connections: Iterable[PeerConnection], count: int) -> Iterator[PeerConnection]:
    """Yield `count` of the connections, the oldest first, but always of a host that has the most.

    So one host does not crowd out others.
    """
    queues: dict[str, list[PeerConnection]] = {}
    for connection in sorted(connections, key=lambda each: each.opened, reverse=True):
        queues.setdefault(connection.host, []).append(connection)
    sizes = Counter({host: len(queue) for host, queue in queues.items()})
    for _ in range(count):
        host = max(sizes, key=sizes.__getitem__)
        sizes[host] -= 1
        yield queues[host].pop()
