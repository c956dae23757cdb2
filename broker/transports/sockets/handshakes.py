"""Handshakes with a broker or a producer, and why they fail, from the events of the client's socket's monitor.

libzmq 4.3.5 really does this, after CONNECTED:

| at the broker's address | events | dials again |
|---|---|---|
| a broker that does not admit the key (ZAP's 400) | HANDSHAKE_FAILED_AUTH 400, DISCONNECTED | never |
| a broker that has revoked the key (ZAP's 500) | HANDSHAKE_FAILED_AUTH 500, DISCONNECTED | never |
| a broker with another key | HANDSHAKE_FAILED_NO_DETAIL, DISCONNECTED | every 20 ms |
| a broker whose ZAP thread is dead, or says 300 | the same, 300: after `HANDSHAKE_IVL` | every 20 ms |
| a proxy or a tunnel whose target is away | the same | every 20 ms |
| a process that accepts and is silent | the same, after `HANDSHAKE_IVL` | every 20 ms |
| ZeroMQ without keys, or with keys for a client without | HANDSHAKE_FAILED_PROTOCOL, 0x11000001, DISCONNECTED | never |
| a program that does not speak ZeroMQ | DISCONNECTED alone | never |

So no event tells another key from an absent broker. A probe does: a broker with another key greets as a broker with
keys does, and ends the connection in reply to a HELLO, which a client makes with the key that it expects. Brokers that
have that key reply with a WELCOME, before they ask who is admitted.
"""

import re
import socket as sockets
from contextlib import suppress
from typing import Any

import zmq

from stageline.broker.keys.admission import KeyRefusal

from .curve import CurveClient, open_keyed
from .monitors import open_monitor, received_event

PROBING = 2.0  # seconds that each step of a probe may take
PROBES = 2  # that must agree: a broker may end in the middle of one
UNCLEAR = 3  # failures in a row before the first probe; each probe that finds nothing doubles it

_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_TCP = re.compile(r"tcp://\[?(.+?)\]?:(\d+)")
_MECHANISM = b"CURVE".ljust(20, b"\0")
_GREETING = b"\xff" + bytes(7) + b"\x01\x7f" + b"\x03\x00" + _MECHANISM + bytes(32)  # of ZMTP 3.0
_HELLO_BYTES = 202
_REVOKED = 500  # status of ZAP
_STEPS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class ClientHandshakes:
    """Handshakes of `socket`, which has the keys of `curve` and does not dial yet."""

    def __init__(
        self, context: "zmq.Context[Any]", socket: "zmq.Socket[Any]", url: str, curve: CurveClient | None
    ) -> None:
        """Begin to watch.

        Args:
            context: Context of `socket`.
            socket: Socket to watch.
            url: Address that it is going to dial.
            curve: Keys of the socket; None: it has none.
        """
        self._url = url
        self._curve = curve
        self._new = False
        self._explained = False  # the last attempt has succeeded, or had an event that says why it failed
        self._unclear = 0  # failures in a row without a reason
        self._patience = UNCLEAR
        self._refusal = KeyRefusal.NONE
        self._socket = socket
        self._monitor = open_monitor(context, socket, int(_EVENTS))

    def renewed(self) -> bool:
        """Return True if a connection was established since the last call."""
        self._take_events()
        new, self._new = self._new, False
        return new

    @property
    def refusal(self) -> KeyRefusal:
        """The reason why there is no connection, as far as it is known; may take seconds to find out."""
        self._take_events()
        if self._curve is not None and self._unclear >= self._patience:
            self._unclear = 0
            self._patience *= 2
            if all(refuses_hello(self._url, self._curve) for _ in range(PROBES)):
                self._refusal = KeyRefusal.ANOTHER_KEY
        return self._refusal

    def close(self) -> None:
        """Stop watching. Call this before the socket is closed."""
        self._socket.disable_monitor()
        self._monitor.close()

    def _take_events(self) -> None:
        while self._monitor.poll(0):
            self._note(*received_event(self._monitor))

    def _note(self, event: int, value: int) -> None:
        match event:
            case zmq.EVENT_CONNECTED:
                self._explained = False
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._explained = self._new = True
                self._unclear, self._patience, self._refusal = 0, UNCLEAR, KeyRefusal.NONE
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._explain(KeyRefusal.REVOKED if value == _REVOKED else KeyRefusal.NOT_ADMITTED)
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._explain(_refusal_in(value, self._curve))
            case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._explained = True
                self._unclear += 1
            case zmq.EVENT_DISCONNECTED if not self._explained and self._curve is not None:
                self._explain(KeyRefusal.NO_KEYS)

    def _explain(self, refusal: KeyRefusal) -> None:
        self._explained, self._refusal = True, refusal


def _refusal_in(error: int, curve: CurveClient | None) -> KeyRefusal:
    """Return the refusal that a `zmq.PROTOCOL_ERROR_*` shows."""
    if error == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:  # a WELCOME that was not made with the key that is expected
        return KeyRefusal.ANOTHER_KEY
    return KeyRefusal.KEYS_NEEDED if curve is None else KeyRefusal.NO_KEYS


def refuses_hello(url: str, curve: CurveClient) -> bool:
    """Return True if a broker at `url` has keys, and ends the connection in reply to a HELLO for the key in `curve`.

    Returns False if it replies otherwise, is not there, or `url` is not an address of TCP.
    """
    found = _TCP.fullmatch(url)
    if found is None:
        return False
    with suppress(OSError):
        hello = _hello(curve)
        with sockets.create_connection((found[1], int(found[2])), timeout=PROBING) as broker:
            broker.sendall(_GREETING)
            if _read(broker, len(_GREETING))[12:32] != _MECHANISM:
                return False
            broker.sendall(hello)
            return _is_over(broker)
    return False


def _hello(curve: CurveClient) -> bytes:
    """Return a HELLO as ZeroMQ makes it: it has a key of its own for this connection, and nothing of the client's."""
    with sockets.create_server(("127.0.0.1", 0)) as listener, zmq.Context() as context:
        listener.settimeout(PROBING)
        with open_keyed(context, zmq.DEALER, {zmq.LINGER: 0, zmq.MAXMSGSIZE: _HELLO_BYTES}, curve) as dealer:
            dealer.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
            with listener.accept()[0] as peer:
                peer.settimeout(PROBING)
                peer.sendall(_GREETING)
                return _read(peer, len(_GREETING) + _HELLO_BYTES)[len(_GREETING) :]


def _read(connection: sockets.socket, count: int) -> bytes:
    """Return the next `count` bytes. Raises `OSError` if they do not come."""
    found = b""
    while len(found) < count:
        if not (more := connection.recv(count - len(found))):
            raise ConnectionError("the connection has ended")
        found += more
    return found


def _is_over(connection: sockets.socket) -> bool:
    """Return True if the connection ends, False if something comes. Raises `TimeoutError` after a while."""
    try:
        return not connection.recv(1)
    except ConnectionError:
        return True


class Handshake:
    """Watch over the connection of a consumer to its producer, which tells when a handshake is stuck.

    not connected ─────> CONNECTED ──> HANDSHAKE_SUCCEEDED
    ^               v                 v
    └─(maybe)── DISCONNECTED <────────┘         stuck: too long CONNECTED, or DISCONNECTED for good
    """

    def __init__(self, context: "zmq.Context[Any]", socket: "zmq.Socket[Any]") -> None:
        """Begin to watch `socket`, a socket of `context` that is not connected yet."""
        self._socket = socket
        self._stuck: float | None = None  # since when there has been no completed handshake
        self._events = open_monitor(context, socket, int(_STEPS))

    def fails(self, now: float, patience: float) -> bool:
        """Return True if for `patience` seconds the connection has been without a handshake, or ended."""
        newest = None
        while self._events.poll(0):
            newest, _ = received_event(self._events)
        if newest is not None:
            self._stuck = None if newest == zmq.EVENT_HANDSHAKE_SUCCEEDED else now
        return self._stuck is not None and now - self._stuck >= patience

    def close(self) -> None:
        """Stop watching. Call this before the socket is closed."""
        self._socket.disable_monitor()
        self._events.close()
