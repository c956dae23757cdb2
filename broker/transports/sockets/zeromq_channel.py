"""Control messages over ZeroMQ: the broker has a ROUTER, all others a DEALER."""

import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import zmq

from stageline.broker.control.channel import LARGEST, LARGEST_UNTRUSTED, Envelope, Received
from stageline.broker.errors import AddressUnusable
from stageline.pipeline.addresses import masked

from .bind import connect, listening
from .curve import CurveClient, CurveServer, endpoint_of, key_in, open_keyed, surplus
from .handshakes import ClientHandshakes

if TYPE_CHECKING:
    from .connection_guard import ConnectionGuard

# Taken in one turn at most, so that leases and trims are not delayed for ever; what else has come waits for the next.
_BATCH = 1000  # messages
_BATCH_BYTES = 8 * 2**20  # a message that is longer is a turn of its own

_DEALER_OPTIONS: dict[int, int] = {
    zmq.MAXMSGSIZE: LARGEST,
    zmq.LINGER: 500,
    zmq.SNDHWM: 64,
    zmq.RECONNECT_IVL: 20,
    zmq.RECONNECT_IVL_MAX: 1000,
}
_ROUTER_OPTIONS: dict[int, int] = {
    zmq.ROUTER_MANDATORY: 1,  # a recipient that is gone raises, instead of being ignored
    # Not ROUTER_HANDOVER: with it, a peer that names itself as another takes the messages of that.
    zmq.MAXMSGSIZE: LARGEST,
    zmq.RCVHWM: 64,  # messages of a connection that wait to be taken; TCP holds back the others
    zmq.SNDHWM: 256,  # messages to a connection that wait to be sent; of more, the newest are lost
    zmq.HANDSHAKE_IVL: 5000,
    zmq.TCP_KEEPALIVE: 1,
    zmq.LINGER: 500,
}


class Unguarded:
    """Stand-in for the guard of a socket that only this user can reach, because the file system says so: `ipc://`."""

    def note(self, source: int, size: int) -> None:
        """Do nothing."""

    def drained(self) -> None:
        """Do nothing."""

    def trust(self, source: int) -> None:
        """Do nothing."""

    def trusts(self, source: int) -> bool:
        """Return True: every peer is a process of this user."""
        return True

    def close_all(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def guarded(
    context: "zmq.Context[Any]", socket: "zmq.Socket[Any]", url: str, largest: int, curve: CurveServer | None
) -> "ConnectionGuard | Unguarded":
    """Return the guard of `socket`, which is going to be bound to `url`.

    Args:
        context: Context of `socket`.
        socket: Socket that is not bound yet.
        url: Address; only sockets at `tcp://` need a guard.
        largest: Bytes of the largest message from a trusted peer.
        curve: Keys of the socket.
    """
    if not url.startswith("tcp://"):
        return Unguarded()
    from .connection_guard import ConnectionGuard  # imports asyncio and rich, for which a command that asks would wait

    return ConnectionGuard(context, socket, largest, surplus(curve))


def _no_key(frame: zmq.Frame) -> str:
    return ""


class ZeroMQClientChannel:
    """`ClientChannel` to a broker at a ZeroMQ address."""

    def __init__(self, url: str, curve: CurveClient | None = None, *, keeps: bool = False) -> None:
        """Connect to the broker at `url`. Raises `AddressUnusable`.

        Args:
            url: Address of the broker.
            curve: Keys; None: the connection has none.
            keeps: If True, messages sent before the connection is established wait for it.
        """
        self._url = url
        self._context = zmq.Context()
        try:
            self._socket = open_keyed(self._context, zmq.DEALER, {**_DEALER_OPTIONS, zmq.IMMEDIATE: not keeps}, curve)
            self._handshakes = ClientHandshakes(self._context, self._socket, url, curve)
            connect(self._socket, url)
        except zmq.ZMQError as error:  # also where the system has no sockets left
            self._context.destroy(linger=0)
            raise AddressUnusable(f"cannot use {url}: {error}") from error

    def send(self, message: bytes) -> bool:
        """Send `message` without waiting. Returns False if there is no connection or no room."""
        try:
            self._socket.send(message, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, timeout: float) -> bytes | None:
        """Return the next message, None after `timeout` seconds."""
        if not self._socket.poll(max(0, int(timeout * 1000))):
            return None
        return self._socket.recv()

    @property
    def trouble(self) -> str:
        """Reason, if the host's name cannot be resolved, else "". ZeroMQ reports nothing else: it keeps trying."""
        host = self._url.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        if not self._url.startswith("tcp://"):
            return ""
        try:
            socket.getaddrinfo(host, None)
        except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
            return f"the name {host!r} in {masked(self._url)} cannot be resolved: {error}"
        return ""

    @property
    def refusal(self) -> str:
        """The reason why what is at the address gives no connection, a `KeyRefusal`; may take seconds."""
        return self._handshakes.refusal

    def renewed(self) -> bool:
        """Return True if a connection was established since the last call."""
        return self._handshakes.renewed()

    def close(self) -> None:
        """Close the connection, after half a second at most for what is on its way out."""
        self._handshakes.close()
        self._socket.close()
        self._context.term()


class ZeroMQServerChannel:
    """`ServerChannel` of a broker that listens at a ZeroMQ address."""

    def __init__(self, url: str, curve: CurveServer | None = None) -> None:
        """Listen at `url`, with the keys of `curve` unless that is None: `endpoint` is keyed then.

        Raises `EndpointTaken`.
        """
        context = zmq.Context()
        self._router = open_keyed(context, zmq.ROUTER, _ROUTER_OPTIONS, curve)
        self._sources: dict[bytes, int] = {}  # the connection of each sender in the last batch
        self._keys: dict[bytes, str] = {}  # likewise
        self._key_in: Callable[[zmq.Frame], str] = _no_key if curve is None else key_in
        self._emptied = False  # the last batch was all that had arrived
        with ExitStack() as cleanup:
            cleanup.callback(context.term)
            cleanup.callback(self._router.close)
            self._guard = guarded(context, self._router, url, LARGEST, curve)
            cleanup.callback(self._guard.close)
            self.endpoint = endpoint_of(cleanup.enter_context(listening(self._router, url)), curve)
            self._resources = cleanup.pop_all()

    def receive(self, timeout: float) -> Sequence[Received]:
        """Return what has arrived within `timeout` seconds: senders and their messages, at most one batch.

        A message is None if it has more than one frame, is too long for its sender, or is that of another key than an
        earlier one of its sender.
        """
        if self._emptied:  # and what was found genuine is trusted by now
            self._guard.drained()
        self._router.poll(int(timeout * 1000))
        self._sources, self._keys, self._emptied = {}, {}, False
        found: list[Received] = []
        size = 0
        while len(found) < _BATCH and size < _BATCH_BYTES:
            try:
                sender = self._router.recv(zmq.NOBLOCK)
            except zmq.Again:
                self._emptied = True
                break
            message = self._receive_message(sender)
            size += len(message or b"")
            found.append((sender, message))
        return found

    def _receive_message(self, sender: bytes) -> bytes | None:
        """Return the message, None if it is refused, as `receive` says.

        Frames of a message that is dropped are not joined.
        """
        frame = self._router.recv(copy=False)
        source = self._sources[sender] = frame.get(zmq.SRCFD)
        self._guard.note(source, len(frame))
        key = self._key_in(frame)
        fits = not frame.more and (len(frame) <= LARGEST_UNTRUSTED or self._guard.trusts(source))
        fits = fits and self._keys.setdefault(sender, key) == key  # else a later peer took the sender's identity
        message = frame.bytes if fits else None
        while frame.more:
            frame = self._router.recv(copy=False)
            self._guard.note(source, len(frame))
        return message

    def key_of(self, sender: bytes) -> str:
        """Return the text of the public key of `sender`, a sender in the last batch; "" without keys."""
        return self._keys.get(sender, "")

    def trust(self, sender: bytes) -> None:
        """Trust the connection of `sender`, a sender in the last batch, which has brought a genuine message."""
        if sender in self._sources:
            self._guard.trust(self._sources[sender])

    def readmit(self) -> None:
        """Close all connections soon: peers dial again, and are admitted or refused by their keys."""
        self._guard.close_all()

    def send(self, envelopes: Iterable[Envelope]) -> None:
        """Send the envelopes without waiting; those for a recipient that is gone or too slow are lost.

        A recipient repeats what it needs answered.
        """
        for envelope in envelopes:
            try:
                self._router.send_multipart(envelope, zmq.NOBLOCK)
            except zmq.ZMQError as error:
                # Gone, or so slow that its pipe is full. It repeats what it needs answered.
                if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                    raise

    def close(self) -> None:
        """Stop listening, after half a second at most for what is on its way out."""
        self._resources.close()
