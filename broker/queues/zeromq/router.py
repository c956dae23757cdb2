"""The socket of all queues that begin at a worker: a ROUTER, which sends what its senders have due.

A ROUTER gives every connection an identity of its own, which is how a sender notices that its consumer uses a new one.
It never blocks: what cannot be sent now stays due.
"""

import errno
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic

import structlog
import zmq

from stageline.broker.codec.message import Flow, Frame
from stageline.broker.errors import BadMessage, EndpointTaken, ForeignMessage
from stageline.broker.network.bind import bind
from stageline.broker.network.connection_guard import guarded
from stageline.broker.network.rate_limit import RateLimit
from stageline.broker.queues.base import QueueKey
from stageline.broker.queues.delivery import Sender

from .connection import REQUEST_BYTES, Context, open_socket
from .requests import CreditRequest, RetentionReply, pack, reply_to, run_named_in, unpack

# Bytes of a frame from which on its memory is handed over and not copied. To give memory back, pyzmq wakes a thread of
# its own, which costs as much as copying half a megabyte (measured over ipc and tcp, 16 KB to 16 MB).
ZERO_COPY = 2**19
EARLY = 64  # requests for queues that have no sender yet which are kept for it, the newest
REQUESTS = 256  # taken in one turn at most, so that the compute loop goes on; the others wait for the next
INTRODUCED = 20  # consumers of another run or version that are answered in a second; the others repeat their request
REFUSALS = 5  # log lines in a second about requests that are not of this run

log = structlog.get_logger()

_NOBLOCK = int(zmq.NOBLOCK)  # plain: pyzmq's own flags are enums, and slow
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class Router:
    """Serves the senders given to `add` at `url`; `endpoint` is where to connect to.

    `hwm` is how many messages may wait for one connection. `key` is the run's, which requests are sealed with.
    """

    def __init__(self, context: Context, url: str, run: str, hwm: int, key: bytes = b"") -> None:
        self._run = run
        self._key = key
        self._refusals = RateLimit(REFUSALS)
        self._senders: dict[QueueKey, Sender] = {}
        self._early: dict[QueueKey, tuple[bytes, CreditRequest]] = {}
        self._introductions = RateLimit(INTRODUCED)
        self.socket = open_socket(context, zmq.ROUTER, hwm)
        self.socket.copy_threshold = 0  # what is copied is decided here, by ZERO_COPY
        self._send_frame: Callable[..., object] = super(zmq.Socket, self.socket).send  # the bare one, for every frame
        self._guard = guarded(context, self.socket, url, hwm * REQUEST_BYTES)
        try:
            self.endpoint = bind(self.socket, url)
        except EndpointTaken:
            self._guard.close()
            raise

    def add(self, sender: Sender) -> None:
        key = sender.log.key
        self._senders[key] = sender
        if key in self._early:
            self._answer(sender, *self._early.pop(key))

    def serve(self) -> None:
        """Receives what requests have arrived, and sends everything that is due."""
        for _ in range(REQUESTS):
            if not int(self.socket.get(zmq.EVENTS)) & zmq.POLLIN:
                self._guard.drained()
                break
            self._receive_request()
        for sender in self._senders.values():
            self.flush(sender)

    def close(self) -> None:
        self._guard.close()
        self.socket.close()

    @property
    def is_behind(self) -> bool:
        """Whether there are messages that have not been sent."""
        return any(sender.is_behind for sender in self._senders.values())

    def flush(self, sender: Sender) -> None:
        """Sends what is due, as far as the connection takes it."""
        number = sender.due()
        while number is not None and self._send_message(sender, number):
            number = sender.mark_sent(number)

    def _send_message(self, sender: Sender, number: int) -> bool:
        """False if the connection takes nothing now or is gone."""
        frames = sender.frames(number)
        try:
            self._send(sender.route, frames)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            sender.route = None
            return False
        return True

    def _send(self, route: bytes | None, frames: Sequence[Frame]) -> None:
        send = self._send_frame
        send(route, _NOBLOCK_MORE)  # fails if the rest could not be sent
        for frame in frames[:-1]:
            send(frame, _NOBLOCK_MORE, copy=len(frame) < ZERO_COPY)
        send(frames[-1], _NOBLOCK, copy=len(frames[-1]) < ZERO_COPY)

    def _receive_request(self) -> None:
        """Takes in one request. What has more frames than one is none, and is dropped without being joined."""
        route = self.socket.recv(_NOBLOCK)
        frame = self.socket.recv(_NOBLOCK, copy=False)
        source, several = frame.get(zmq.SRCFD), frame.more
        self._guard.note(source, len(frame))
        if not several:
            self._receive(route, source, frame.bytes)
        while frame.more:
            frame = self.socket.recv(_NOBLOCK, copy=False)
            self._guard.note(source, len(frame))

    def _receive(self, route: bytes, source: int, frame: bytes) -> None:
        try:
            request = unpack(frame, CreditRequest, self._key)
        except ForeignMessage:
            self._introduce(route)
            return
        except BadMessage as error:  # if it was damaged, the consumer will repeat it
            self._refuse(route, frame, str(error))
            return
        if request.run != self._run:
            self._introduce(route)
            return
        self._guard.trust(source)
        if request.key in self._senders:
            self._answer(self._senders[request.key], route, request)
            return
        early = self._early.pop(request.key, (route, request))
        if len(self._early) == EARLY:
            del self._early[next(iter(self._early))]
        self._early[request.key] = max(early, (route, request), key=lambda each: each[1].stamp)

    def _refuse(self, route: bytes, frame: bytes, reason: str) -> None:
        """What is not proven to be of this run changes nothing. One of another run is told so."""
        with suppress(BadMessage):
            if run_named_in(frame) != self._run:
                self._introduce(route)
        if self._refusals.allows(monotonic()):
            log.warning("refused", reason=reason, before=self._refusals.take_withheld())

    def _answer(self, sender: Sender, route: bytes, request: CreditRequest) -> None:
        sender.update(request.to_credit(), route)
        self.flush(sender)
        if request.ask:
            self._reply(route, pack(reply_to(request, sender), self._key))

    def _introduce(self, route: bytes) -> None:
        """Lets a consumer of another run or version find out which these are: without the key, which is this run's."""
        if self._introductions.allows(monotonic()):
            self._reply(route, pack(RetentionReply(self._run, Flow.FORWARD, 0, 0, 0, 0, 0)))

    def _reply(self, route: bytes, frame: bytes) -> None:
        with suppress(zmq.ZMQError):  # if the connection is gone or full, the consumer repeats its request
            self._send(route, [b"", frame])
