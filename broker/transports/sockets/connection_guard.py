"""Guard of the connections of a bound ZeroMQ socket: a thread closes those that `connection_rules` refuses.

ZeroMQ's limits are per frame, and it holds a message that is not whole where its owner can neither see nor count it.
The system counts the bytes of each TCP connection, and a message tells the descriptor of its own:

    ACCEPTED(descriptor) ──> PeerConnection <── TCP_INFO: bytes received      pending = received - delivered
    message(descriptor) ───> delivered                                    refused: shut down, ZeroMQ drops what it held

Where the system does not count (macOS), the limits of time and of number hold. The thread sleeps while no connection
is untrusted, but for four looks in a second at the trusted ones. The owner of the socket only adds two numbers for a
message.
"""

import math
import os
import socket as sockets
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

import structlog
import zmq

from stageline.broker.rate_limit import RateLimit

from .connection_rules import PeerConnection, refusals, untrusted_connections
from .descriptors import descriptor_limit
from .monitors import open_monitor, received_event

WATCHFUL = 20  # ms between two looks while a connection is untrusted
CALM = 250  # ms between two looks while all are trusted
EVENTS = 32  # taken between two looks, at most
LOGGED = 5  # refusals logged in a second; the others are counted

_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
_LONG, _SHORT_HEAD, _LONG_HEAD = 256, 2, 9  # bytes: from which on a frame is long, and what ZeroMQ sends before it
_BYTES_RECEIVED = 128  # where Linux has tcpi_bytes_received, u64, in its tcp_info

_ENDED = "it ended, or was not of the protocol, and has brought no message"
_RESET = struct.pack("ii", 1, 0)

log = structlog.get_logger()


@dataclass(slots=True)
class _Watched:
    """Connection with the number of its socket in the system, and what was delivered at its descriptor before it.

    Bytes and frames of a former connection that were still to be delivered are not counted in.
    """

    connection: PeerConnection
    inode: int
    bytes_before: int
    frames_before: int


class ConnectionGuard:
    """Guard of `socket`, with a thread of its own.

    `note`, `drained`, `trust` and `close_all` are for the thread that owns the socket. A `source` is a message's
    descriptor (`zmq.SRCFD`). Close the guard before the socket.
    """

    def __init__(self, context: "zmq.Context[Any]", socket: "zmq.Socket[Any]", largest: int, surplus: int = 0) -> None:
        """Begin to watch `socket`.

        Args:
            context: Context of `socket`.
            socket: Socket that is not bound yet.
            largest: Bytes of the largest message from a trusted peer.
            surplus: Bytes that each frame is longer on its way, because it is encrypted.
        """
        self._largest = largest
        self._keyed = surplus > 0
        self._long = _LONG - surplus
        self._short_head, self._long_head = _SHORT_HEAD + surplus, _LONG_HEAD + surplus
        self._socket = socket
        self._bytes: dict[int, int] = {}
        self._frames: dict[int, int] = {}
        self._trusted: set[int] = set()
        self._drains = self._drains_seen = 0
        self._closings = self._closings_seen = 0
        self._drained = monotonic()
        self._watched: dict[int, _Watched] = {}
        # Bytes and frames at each descriptor when its last connection ended.
        self._before: dict[int, tuple[int, int]] = {}
        self._log_limits = {True: RateLimit(LOGGED), False: RateLimit(LOGGED)}  # those that ended by themselves apart
        self._blank, self._probe = sockets.socket(), sockets.socket()
        self._events = open_monitor(context, socket, int(_EVENTS))
        self._thread = threading.Thread(target=self._watch, name="guard", daemon=True)
        self._thread.start()

    def note(self, source: int, size: int) -> None:
        """Count a frame of `size` bytes that was taken from the socket."""
        head = self._short_head if size < self._long else self._long_head
        self._bytes[source] = self._bytes.get(source, 0) + size + head
        self._frames[source] = self._frames.get(source, 0) + 1

    def drained(self) -> None:
        """Note that all that had arrived was taken from the socket."""
        self._drains += 1

    def trust(self, source: int) -> None:
        """Trust the connection `source`, over which a genuine message came."""
        self._trusted.add(source)

    def trusts(self, source: int) -> bool:
        """Return True if a genuine message has come over the connection `source`."""
        return source in self._trusted

    def close_all(self) -> None:
        """Close all connections that there are, within a quarter of a second; peers dial again."""
        self._closings += 1

    def close(self) -> None:
        """Stop watching and end the thread. Closing twice has the effect of closing once."""
        if not self._thread.is_alive():
            return
        self._socket.disable_monitor()  # which ends the thread
        self._thread.join()
        self._blank.close()
        self._probe.close()

    def _watch(self) -> None:
        looked = monotonic()
        with self._events as events:
            while True:
                events.poll(self._pause(looked))
                try:
                    if not self._take_events():
                        return
                    if self._closings != self._closings_seen and not self._events.poll(0):  # all are watched that are
                        self._refuse_all()
                    if self._pause(looked) == 0 or self._is_crowded():
                        looked = monotonic()
                        self._look(looked)
                except Exception:  # unread events stop the socket, so that the thread must go on
                    log.exception("a bug in stageline: the limits of connections were not checked")

    def _pause(self, looked: float) -> int | None:
        """Return the time until the next look, in ms; None: until something happens."""
        if not self._watched:
            return None
        calm = all(each.connection.trusted for each in self._watched.values())
        return max(0, math.ceil((looked - monotonic()) * 1000 + (CALM if calm else WATCHFUL)))

    def _take_events(self) -> bool:
        """Process events. Returns False once the socket is watched no more."""
        for _ in range(EVENTS):
            if not self._events.poll(0):
                break
            event, value = received_event(self._events)
            match event:
                case zmq.EVENT_MONITOR_STOPPED:
                    return False
                case zmq.EVENT_ACCEPTED:
                    self._begin(value)
                case zmq.EVENT_DISCONNECTED:
                    self._note_end(value)
                    self._forget(value)
        return True

    def _is_crowded(self) -> bool:
        """Return True if so many connect that the next look cannot wait."""
        untrusted = sum(not each.connection.trusted for each in self._watched.values())
        return untrusted > untrusted_connections(descriptor_limit())

    def _begin(self, source: int) -> None:
        before = self._before.get(source, (0, 0))
        try:
            with self._probing(source) as probe:
                host, port, *_ = probe.getpeername()
                connection = PeerConnection(f"{host}:{port}", monotonic())
                self._watched[source] = _Watched(connection, os.fstat(probe.fileno()).st_ino, *before)
        except OSError:
            self._log("unknown", _ENDED)

    def _forget(self, source: int) -> None:
        """Forget the connection that had the descriptor; another one there begins untrusted.

        A connection that was trusted in this very moment is trusted again with its next message.
        """
        self._before[source] = self._bytes.get(source, 0), self._frames.get(source, 0)
        self._watched.pop(source, None)
        self._trusted.discard(source)

    def _note_end(self, source: int) -> None:
        """Log the end of a connection that has brought nothing.

        ZeroMQ itself ends connections with a frame that is too long, or that do not speak its protocol.
        """
        watched = self._watched.get(source)
        if watched is not None and self._frames.get(source, 0) == watched.frames_before:
            self._log(watched.connection.peer, _ENDED)

    def _look(self, now: float) -> None:
        if self._drains != self._drains_seen:
            self._drains_seen, self._drained = self._drains, now
        for source, watched in list(self._watched.items()):
            self._update(source, watched, now)
        found = {id(watched.connection): (source, watched) for source, watched in self._watched.items()}
        connections = [watched.connection for watched in self._watched.values()]
        refused = refusals(connections, now, self._drained, largest=self._largest, descriptors=descriptor_limit())
        for connection, reason in refused:
            self._refuse(*found[id(connection)], reason)

    def _update(self, source: int, watched: _Watched, now: float) -> None:
        connection = watched.connection
        if source in self._trusted:
            connection.trust()
        delivered = self._bytes.get(source, 0) - watched.bytes_before
        frames = self._frames.get(source, 0) - watched.frames_before
        with suppress(OSError), self._probing(source, watched.inode) as probe:  # OSError: the event of its end is near
            connection.note(_bytes_received(probe), delivered, frames, now)

    def _refuse_all(self) -> None:
        self._closings_seen = self._closings
        for source, watched in list(self._watched.items()):
            self._refuse(source, watched, "keys have changed")

    def _refuse(self, source: int, watched: _Watched, reason: str) -> None:
        with suppress(OSError), self._probing(source, watched.inode) as probe:
            probe.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, _RESET)  # the peer learns of it at once
            probe.shutdown(sockets.SHUT_RDWR)
        self._forget(source)
        self._log(watched.connection.peer, reason)

    def _log(self, peer: str, reason: str) -> None:
        rate = self._log_limits[reason is _ENDED]
        if rate.allows(monotonic()):
            more = rate.take_withheld()
            others = {"others": more} if more else {}  # closed since the last line, and not named
            tell = log.debug if reason is _ENDED and self._keyed else log.warning  # who knocks is told with its key
            tell("a connection was closed", reason=reason, peer=peer, **others)

    @contextmanager
    def _probing(self, source: int, inode: int | None = None) -> Iterator[sockets.socket]:
        """Return a context with the socket behind a descriptor of ZeroMQ's.

        Raises `OSError` if the socket is gone, or another than `inode`. No new descriptor is needed, of which there may
        be none left. Hold the context as short as possible: a connection ends when its last descriptor is closed.
        """
        os.dup2(source, self._probe.fileno(), inheritable=False)
        try:
            if inode is not None and os.fstat(self._probe.fileno()).st_ino != inode:
                raise OSError("another connection has the descriptor")
            yield self._probe
        finally:
            os.dup2(self._blank.fileno(), self._probe.fileno(), inheritable=False)


def _bytes_received(probe: sockets.socket) -> int | None:
    """Return the number of bytes that came over a connection; None where the system does not tell."""
    if not hasattr(sockets, "TCP_INFO"):
        return None
    info = probe.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _BYTES_RECEIVED + 8)
    return None if len(info) < _BYTES_RECEIVED + 8 else int(struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0])
