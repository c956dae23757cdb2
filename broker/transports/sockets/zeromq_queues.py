"""Queues between processes over ZeroMQ: `ipc://` on one machine, `tcp://` across machines.

    worker 0                              worker 1
    Outbound -- Sender -- ROUTER          DEALER -- Receiver -- Inbound
                          (bound)  <- CreditRequest
                                messages ->

A ROUTER gives every connection an identity of its own, which is how a sender notices that its consumer uses a new one.
It never blocks: what cannot be sent now stays due. A DEALER's connection is replaced when requests stay unanswered for
long, and soon if the other end does not speak ZeroMQ: when the bytes on a connection are not its protocol, ZeroMQ
gives it up for good, or takes them for those of its first version, and reports neither. Only the events of its monitor
show it: `handshake.py`.
"""

import errno
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import zmq

from stageline.broker.codec.message import LIMITS, Frame, Message
from stageline.broker.errors import EndpointTaken
from stageline.broker.keys.pairs import KeyPair, PublicKey
from stageline.broker.queues.base import Trouble
from stageline.broker.queues.delivery import Receiver
from stageline.broker.queues.ends import LinkedQueues, QueueOptions
from stageline.broker.queues.links import InboundLink, OutboundLink, RouteGone
from stageline.broker.queues.requests import CreditRequest, Requester
from stageline.broker.queues.secrets import NO_KEYS, Keys, QueueSecrets
from stageline.broker.transports.base import key_expected
from stageline.pipeline.addresses import parted

from .bind import bind, bind_again, connect
from .curve import CurveClient, CurveServer, Succession, client_of, endpoint_of, in_pieces, open_keyed, server_of
from .handshakes import Handshake
from .zeromq_channel import guarded

Socket = zmq.Socket[Any]
Context = zmq.Context[Socket]

REQUEST_BYTES = 2**12  # the most that a request may have
SOLE_WAIT = 20  # ms that a worker without unsent messages waits at one socket before it polls all of them

COMMON_OPTIONS: dict[int, int] = {
    zmq.HANDSHAKE_IVL: 5000,  # ms after which a connection without ZeroMQ's handshake is dropped
    # A dead host is noticed by TCP, not by ZeroMQ's heartbeats: those time out while one long message is on its way.
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 10,  # seconds
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 4,
    zmq.TCP_MAXRT: 30_000,  # ms that sent bytes may stay unconfirmed
}
OPTIONS: dict[int, dict[int, int]] = {
    # The producing side: bound, with many connections, sending to one of them at a time.
    zmq.ROUTER: {
        zmq.ROUTER_MANDATORY: 1,  # a connection that is gone or full is an error, not a silent loss
        zmq.MAXMSGSIZE: REQUEST_BYTES,
        zmq.LINGER: 1000,  # ms; the last messages of a run may still be on their way out
    },
    # The consuming side: connected to one producing worker.
    zmq.DEALER: {
        zmq.IMMEDIATE: 1,  # without a connection a request is not queued, so that it is sent up to date
        zmq.MAXMSGSIZE: LIMITS.message_bytes,  # per frame
        zmq.LINGER: 0,  # a request is of no use after this end is gone
        zmq.RCVTIMEO: SOLE_WAIT,
        zmq.RECONNECT_IVL: 20,  # ms
        zmq.RECONNECT_IVL_MAX: 1000,
    },
}

UNANSWERED = 30.0  # seconds without any answer after which a connection is replaced; doubles up to LONGEST_UNANSWERED
LONGEST_UNANSWERED = 600.0
NO_HANDSHAKE = 3.0  # seconds without ZeroMQ's handshake after which a connection is replaced
CHECK = 0.5  # seconds between two checks of a connection that brings no answer

# Bytes of a frame from which on its memory is handed over and not copied. To give memory back, pyzmq wakes a thread of
# its own, which costs as much as copying half a megabyte (measured over ipc and tcp, 16 KB to 16 MB).
ZERO_COPY = 2**19
REQUESTS = 256  # taken in one turn at most, so that the compute loop goes on; the others wait for the next

# Plain numbers: pyzmq's own flags are enums, and slow.
_NOBLOCK, _NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_POLLIN, _POLLIN_POLLOUT = int(zmq.POLLIN), int(zmq.POLLIN | zmq.POLLOUT)


def _options(kind: int, hwm: int) -> dict[int, int]:
    """Return the options of a ROUTER or a DEALER.

    Credit keeps `hwm` messages or fewer under way; the socket's own limit holds should that fail.
    """
    return {**COMMON_OPTIONS, **OPTIONS[kind], zmq.SNDHWM: hwm, zmq.RCVHWM: hwm}


class Dealer(InboundLink):
    """Client of the producers at `endpoint` for the requesters given to `add`. Times are monotonic, in seconds."""

    def __init__(
        self,
        context: Context,
        endpoint: str,
        run: str,
        *,
        hwm: int,
        keys: Keys = NO_KEYS,
        curve: CurveClient | None = None,
    ) -> None:
        """Connect to the producers.

        Args:
            context: Context of the worker's sockets.
            endpoint: Address of the producers' worker.
            run: Id of the run, which messages must name.
            hwm: Number of messages that may wait on the connection.
            keys: Keys of the worker's queues, which requests and replies are sealed with.
            curve: Keys of the connection; None: it has none.
        """
        super().__init__(endpoint, run, keys)
        self._curve = curve
        self._blocked = False  # there is a request to send, and no connection yet
        self._context = context
        self._hwm = hwm
        self._unanswered = 0.0  # since when a request has had, or could have, no answer; 0: all are answered
        self._patience = UNANSWERED
        self._next_check = 0.0
        self._connect()

    def has_arrived(self) -> bool:
        """Return True if a message is here."""
        return bool(int(self.socket.get(zmq.EVENTS)) & _POLLIN)

    def receive(self, now: float, *, wait: bool = False) -> bool:
        """Process one message, as `InboundLink.receive`; with `wait`, wait `SOLE_WAIT` ms for it."""
        try:
            frame = self.socket.recv(0 if wait else _NOBLOCK, copy=False)
        except zmq.Again:
            return False
        frames = [frame.buffer]
        while frame.more:  # they have all arrived: ZeroMQ delivers a message whole
            frame = self.socket.recv(copy=False)
            frames.append(frame.buffer)
        self._unanswered, self._patience = 0.0, UNANSWERED
        self._take_in(frames, now)
        return True

    def send_requests(self, now: float) -> None:
        """Send the requests that are due, and replace the connection if it seems to be of no use any more."""
        self._blocked = False
        for requester in self.requesters.values():
            request = requester.request(now)
            if request is not None and not self._blocked:
                self._send(requester, request, now)
        if self._unanswered and now >= self._next_check:
            self._next_check = now + CHECK
            self._check_connection(now)

    @property
    def handle(self) -> Socket:
        """Socket to poll for arrivals. `send_requests` may replace it."""
        return self.socket

    @property
    def events(self) -> int:
        """Events to poll `handle` for."""
        return _POLLIN_POLLOUT if self._blocked else _POLLIN

    @property
    def due(self) -> float:
        """Time at which to call `send_requests` again, for a request or a check of the connection."""
        check = self._next_check if self._unanswered else float("inf")
        if self._blocked:  # until there is a connection, which `events` include
            return check
        return min([check, *[requester.due for requester in self.requesters.values()]])

    def close(self) -> None:
        """Close the connection. Closing twice has the effect of closing once."""
        if not self.socket.closed:  # else it could not be replaced
            self._handshake.close()
            self.socket.close()

    def _send(self, requester: Requester, request: CreditRequest, now: float) -> None:
        try:
            self.socket.send(self._pack(request), _NOBLOCK)
        except zmq.Again:
            self._blocked = True
        else:
            requester.mark_sent(request, now)
        if request.ask or self._blocked:
            self._unanswered = self._unanswered or now

    def _connect(self) -> None:
        """Connect, and leave no socket open if that fails: its context could never be closed."""
        with ExitStack() as opened:
            self.socket = open_keyed(self._context, zmq.DEALER, _options(zmq.DEALER, self._hwm), self._curve)
            opened.callback(self.socket.close)
            self._handshake = Handshake(self._context, self.socket)
            opened.callback(self._handshake.close)
            connect(self.socket, self.endpoint)
            opened.pop_all()

    def _check_connection(self, now: float) -> None:
        """Replace the connection if it seems to be of no use any more."""
        if not self._handshake.fails(now, NO_HANDSHAKE):
            if now - self._unanswered <= self._patience:
                return
            self._patience = min(2 * self._patience, LONGEST_UNANSWERED)
        self.close()
        self._connect()
        self._unanswered = 0.0
        for requester in self.requesters.values():
            requester.introduce()


class Router(OutboundLink):
    """Server of the senders given to `add`; `endpoint` is where to connect to."""

    def __init__(
        self, context: Context, url: str, run: str, hwm: int, keys: Keys = NO_KEYS, curve: CurveServer | None = None
    ) -> None:
        """Listen at `url`. Raises `EndpointTaken`.

        Args:
            context: Context of the worker's sockets.
            url: Address, in which port 0 stands for any free port, and 5600-5609 for the first of these that is free.
            run: Id of the run, which requests must name.
            hwm: Number of messages that may wait for one connection.
            keys: Keys of the worker's queues, which requests are sealed with.
            curve: Keys of the connections; None: they have none.
        """
        super().__init__(run, keys)
        self._succession = None if curve is None else Succession(curve.admits)
        if curve is not None and self._succession is not None:
            curve = CurveServer(curve.pair, self._succession)
        self.socket = open_keyed(context, zmq.ROUTER, _options(zmq.ROUTER, hwm), curve)
        self._encrypts = curve is not None
        self.socket.copy_threshold = 0  # what is copied is decided here, by ZERO_COPY
        self._send_frame: Callable[..., object] = super(zmq.Socket, self.socket).send  # the bare one, for every frame
        self._guard = guarded(context, self.socket, url, hwm * REQUEST_BYTES, curve)
        try:
            self.endpoint = endpoint_of(bind(self.socket, url), curve)
        except EndpointTaken:
            self._guard.close()
            raise

    def serve(self) -> None:
        """Receive the requests that have arrived and send everything that is due."""
        for _ in range(REQUESTS):
            if not int(self.socket.get(zmq.EVENTS)) & zmq.POLLIN:
                self._guard.drained()
                break
            self._receive_request()
        self.flush_all()

    def readmit(self) -> None:
        """Close all connections soon, as `ServerChannel.readmit`."""
        self._guard.close_all()

    def renew(self, curve: CurveServer) -> None:
        """Use the keys of `curve` from now on: listen again at the same place, and close all connections soon.

        Raises `EndpointTaken` if another process has taken the place in that moment.
        """
        address, _ = parted(self.endpoint)
        self.socket.unbind(address)
        if self._succession is not None:
            self._succession.renew(curve.admits)
        for option, value in curve.options.items():
            self.socket.set(option, value)
        self.endpoint = endpoint_of(bind_again(self.socket, address), curve)
        self._guard.close_all()

    def watched(self, now: float) -> dict[Any, int]:
        """Return the socket to poll, with the event of an arrival."""
        return {self.socket: _POLLIN}

    def close(self) -> None:
        """Stop listening and close all connections."""
        self._guard.close()
        self.socket.close()

    def _send_message(self, route: bytes, frames: Sequence[Frame]) -> bool:
        try:
            self._send_frames(route, in_pieces(frames) if self._encrypts else frames)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            raise RouteGone from error
        return True

    def _send_reply(self, route: bytes, frame: bytes) -> None:
        with suppress(zmq.ZMQError):
            self._send_frames(route, [b"", frame])

    def _send_frames(self, route: bytes, frames: Sequence[Frame]) -> None:
        send = self._send_frame
        send(route, _NOBLOCK_MORE)  # fails if the rest could not be sent
        for frame in frames[:-1]:
            send(frame, _NOBLOCK_MORE, copy=len(frame) < ZERO_COPY)
        send(frames[-1], _NOBLOCK, copy=len(frames[-1]) < ZERO_COPY)

    def _receive_request(self) -> None:
        """Process one request. A message of several frames is none, and is dropped without being joined."""
        route = self.socket.recv(_NOBLOCK)
        frame = self.socket.recv(_NOBLOCK, copy=False)
        source, several = frame.get(zmq.SRCFD), frame.more
        self._guard.note(source, len(frame))
        if not several and self.take_in(route, frame.bytes):
            self._guard.trust(source)
        while frame.more:
            frame = self.socket.recv(_NOBLOCK, copy=False)
            self._guard.note(source, len(frame))


class ZeroMQQueues(LinkedQueues):
    """All queue ends of one worker, over ZeroMQ."""

    schemes: tuple[str, ...] = ("ipc://", "tcp://")

    def __init__(self, run: str, incarnation: int, bind_url: str, options: QueueOptions) -> None:
        """Open the queues, with a socket that listens at `bind_url`.

        Args:
            run: Id of the run.
            incarnation: Incarnation of the worker.
            bind_url: `ipc:///path` or `tcp://host:port`, port 0 for any that is free, 5600-5609 for one of these.
            options: Windows, limits and secrets.

        Raises:
            EndpointTaken: `bind_url` cannot be bound.
        """
        super().__init__(run, incarnation, options)
        self._hwm = 2 * options.ahead + 16  # a resend may double what is on its way
        self._context: Context = zmq.Context()
        try:
            self.router = self.outbound_link = Router(
                self._context, bind_url, run, self._hwm, options.secrets.requests, server_of(options.secrets.curve)
            )
        except EndpointTaken:
            self._context.destroy(0)
            self._wakeup.close()
            raise
        self.endpoint = self.router.endpoint

    def rekey(self, secrets: QueueSecrets) -> None:
        """Use other secrets from now on, as `WorkerQueues.rekey`; connections with former keys are closed."""
        had, curve = self.options.secrets.curve, server_of(secrets.curve)
        super().rekey(secrets)
        if curve is not None and secrets.curve != had:
            self.router.renew(curve)
            self.endpoint = self._met_at(curve.pair)
            self._reopen_links()

    @property
    def trouble(self) -> Trouble | None:
        """None: no server stands between the workers."""
        return None

    def _sleep(self, link: InboundLink, receiver: Receiver, timeout: float) -> Message | None:
        """Wait at one socket if nothing waits to be sent: one system call, not several."""
        if not self.options.wakes_at_once and not self.router.is_behind:
            message = link.take(receiver, wait=True)
            if message is not None:
                return message
        return super()._sleep(link, receiver, timeout)

    def close(self) -> None:
        """Close the queues, after a second at most for what is on its way out."""
        super().close()
        self._context.term()

    def _ready(self, watched: dict[Any, int], seconds: float) -> Collection[Any]:
        return dict(zmq.zmq_poll(list(watched.items()), max(0, math.ceil(seconds * 1000))))

    def _open_link(self, endpoint: str) -> Dealer:
        secrets = self.options.secrets
        pair = None if secrets.curve is None else secrets.curve.pair
        address, server = key_expected(endpoint, pair)
        way, curve = self._way_to(address, server), client_of(pair, server)
        return Dealer(self._context, way, self.run, hwm=self._hwm, keys=secrets.requests, curve=curve)

    def _met_at(self, pair: KeyPair) -> str:
        """Return the address at which others find the router, which has the keys of `pair` from now on."""
        return self.router.endpoint

    def _way_to(self, address: str, server: PublicKey | None) -> str:
        """Return the address to dial for the worker at `address` that has the key `server`."""
        return address
