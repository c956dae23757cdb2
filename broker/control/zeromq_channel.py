"""Control messages over ZeroMQ: the broker has a ROUTER, all others a DEALER."""

import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack

import zmq
from zmq.utils.monitor import recv_monitor_message

from stageline.broker.errors import AddressUnusable
from stageline.broker.network.bind import listening
from stageline.pipeline.plan.addresses import masked

from .channel import LARGEST, Envelope, Received

_BATCH = 1000  # messages taken in one turn at most, so that leases and trims are not delayed for ever

_DEALER_OPTIONS = {zmq.LINGER: 500, zmq.SNDHWM: 64, zmq.RECONNECT_IVL: 20, zmq.RECONNECT_IVL_MAX: 1000}
_ROUTER_OPTIONS = {
    zmq.ROUTER_MANDATORY: 1,  # a recipient that is gone raises, instead of being ignored
    zmq.ROUTER_HANDOVER: 1,  # a worker that reconnects takes its old connection's place
    zmq.MAXMSGSIZE: LARGEST,
    zmq.HANDSHAKE_IVL: 5000,
    zmq.TCP_KEEPALIVE: 1,
    zmq.LINGER: 500,
}


class ZeroMQClientChannel:
    """See `ClientChannel`."""

    def __init__(self, url: str, *, keeps: bool = False) -> None:
        self._url = url
        self._context = zmq.Context()
        try:
            self._socket = _open(self._context, zmq.DEALER, {**_DEALER_OPTIONS, zmq.IMMEDIATE: not keeps})
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            self._socket.connect(url)
        except zmq.ZMQError as error:  # also where the system has no sockets left
            self._context.destroy(linger=0)
            raise AddressUnusable(f"cannot use {url}: {error}") from error

    def send(self, message: bytes) -> bool:
        try:
            self._socket.send(message, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, timeout: float) -> bytes | None:
        if not self._socket.poll(max(0, int(timeout * 1000))):
            return None
        return self._socket.recv()

    @property
    def trouble(self) -> str:
        """That the host's name cannot be resolved. ZeroMQ reports nothing else: it keeps trying."""
        host = self._url.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        if not self._url.startswith("tcp://"):
            return ""
        try:
            socket.getaddrinfo(host, None)
        except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
            return f"the name {host!r} in {masked(self._url)} cannot be resolved: {error}"
        return ""

    def renewed(self) -> bool:
        new = False
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            new = True
        return new

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()


class ZeroMQServerChannel:
    """See `ServerChannel`. Raises `EndpointTaken`."""

    def __init__(self, url: str) -> None:
        context = zmq.Context()
        self._router = _open(context, zmq.ROUTER, _ROUTER_OPTIONS)
        with ExitStack() as cleanup:
            cleanup.callback(context.term)
            cleanup.callback(self._router.close)
            self.endpoint = cleanup.enter_context(listening(self._router, url))
            self._resources = cleanup.pop_all()

    def receive(self, timeout: float) -> Sequence[Received]:
        self._router.poll(int(timeout * 1000))
        found: list[Received] = []
        while len(found) < _BATCH:
            try:
                sender, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            found.append((sender, frames[0] if len(frames) == 1 else None))
        return found

    def trust(self, sender: bytes) -> None:
        """Nothing is limited yet."""

    def send(self, envelopes: Iterable[Envelope]) -> None:
        for envelope in envelopes:
            try:
                self._router.send_multipart(envelope, zmq.NOBLOCK)
            except zmq.ZMQError as error:
                # Gone, or so slow that its pipe is full. It repeats what it needs answered.
                if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                    raise

    def close(self) -> None:
        self._resources.close()


def _open(context: "zmq.Context[zmq.SyncSocket]", kind: int, options: Mapping[zmq.SocketOption, int]) -> zmq.SyncSocket:
    opened = context.socket(kind)
    for option, value in options.items():
        opened.set(option, value)
    return opened
