"""The two sockets of a worker's queues: a ROUTER for all its senders, a DEALER for each worker that it consumes from.

A ROUTER gives every connection an identity of its own, which is how a sender notices that its consumer uses a new one.
It never blocks: what cannot be sent now stays due. What arrives at a DEALER damaged or out of turn is dropped and
requested again. Its connection is replaced when requests stay unanswered for long, and soon if the other end does not
speak ZeroMQ.
"""

import errno
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic

import structlog
import zmq

from stageline.broker.codec.message import (
    Flow,
    Frame,
    Message,
    check_run,
    complete,
    fingerprint,
    message_number,
    read_header,
)
from stageline.broker.errors import BadMessage, EndpointTaken, ForeignMessage
from stageline.broker.network.bind import bind
from stageline.broker.network.connection_guard import guarded
from stageline.broker.network.rate_limit import RateLimit
from stageline.broker.queues.base import QueueKey
from stageline.broker.queues.delivery import TOO_OFTEN, Receiver, Sender

from .connection import REQUEST_BYTES, Context, Handshake, open_socket
from .requests import CreditRequest, Requester, RetentionReply, pack, reply_to, run_named_in, unpack

# Bytes of a frame from which on its memory is handed over and not copied. To give memory back, pyzmq wakes a thread of
# its own, which costs as much as copying half a megabyte (measured over ipc and tcp, 16 KB to 16 MB).
ZERO_COPY = 2**19
EARLY = 64  # requests for queues that have no sender yet which are kept for it, the newest
REQUESTS = 256  # taken in one turn at most, so that the compute loop goes on; the others wait for the next
INTRODUCED = 20  # consumers of another run or version that are answered in a second; the others repeat their request
UNANSWERED = 30.0  # seconds without any answer after which a connection is replaced; doubles up to LONGEST_UNANSWERED
LONGEST_UNANSWERED = 600.0
REFUSALS = 5  # log lines in a second about requests that are not of this run
NO_HANDSHAKE = 3.0  # seconds without ZeroMQ's handshake after which a connection is replaced
CHECK = 0.5  # seconds between two checks of a connection that brings no answer

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


class Dealer:
    """Serves the requesters given to `add` from the producers at `endpoint`. Times are monotonic, in seconds."""

    def __init__(
        self, context: Context, endpoint: str, run: str, *, microbatches: int, hwm: int, key: bytes = b""
    ) -> None:
        self.endpoint = endpoint
        self._key = key
        self.requesters: dict[tuple[Flow, int], Requester] = {}  # by their queues' keys
        self._blocked = False  # there is a request to send, and no connection yet
        self._context = context
        self._run = run
        self._microbatches = microbatches
        self._hwm = hwm
        self._damages = 0
        self._unanswered = 0.0  # since when a request has had, or could have, no answer; 0: all are answered
        self._patience = UNANSWERED
        self._next_check = 0.0
        self._connect()

    def add(self, requester: Requester) -> None:
        self.requesters[requester.receiver.key] = requester
        requester.introduce()

    def take(self, receiver: Receiver, *, wait: bool = False) -> Message | None:
        """The next message of the receiver, or None. With `wait`, blocks up to `SOLE_WAIT` ms."""
        now = monotonic()
        while not receiver.ready and self.receive(now, wait=wait):
            wait = False
        message = receiver.pop() if receiver.ready else None
        if receiver.must_report:
            self.send_requests(now)
        return message

    def receive(self, now: float, *, wait: bool = False) -> bool:
        """Takes in one message. False if none has arrived.

        Raises `ForeignMessage`, and what `Receiver` raises about messages that contradict each other.
        """
        try:
            frame = self.socket.recv(0 if wait else _NOBLOCK, copy=False)
        except zmq.Again:
            return False
        frames = [frame.buffer]
        while frame.more:  # they have all arrived: ZeroMQ delivers a message whole
            frame = self.socket.recv(copy=False)
            frames.append(frame.buffer)
        self._unanswered, self._patience = 0.0, UNANSWERED
        try:
            if frames[0].nbytes:
                self._receive_message(frames, now)
            else:  # a reply has an empty frame where a message has its header
                self._receive_reply(b"".join(frames[1:]))
        except ForeignMessage:
            raise
        except BadMessage as error:
            self._count_damage(str(error))
        else:
            self._damages = 0
        return True

    def send_requests(self, now: float) -> None:
        """Sends the requests that are due, as far as there is a connection."""
        self._blocked = False
        for requester in self.requesters.values():
            request = requester.request(now)
            if request is not None and not self._blocked:
                self._send(requester, request, now)
        if self._unanswered and now >= self._next_check:
            self._next_check = now + CHECK
            self._check_connection(now)

    @property
    def events(self) -> int:
        """What to poll `socket` for."""
        return zmq.POLLIN | zmq.POLLOUT if self._blocked else zmq.POLLIN

    @property
    def due(self) -> float:
        """When to call `send_requests` again though nothing has happened."""
        check = self._next_check if self._unanswered else float("inf")
        if self._blocked:  # until there is a connection, which `events` include
            return check
        return min([check, *[requester.due for requester in self.requesters.values()]])

    def close(self) -> None:
        self._handshake.close()
        self.socket.close()

    def _send(self, requester: Requester, request: CreditRequest, now: float) -> None:
        try:
            self.socket.send(pack(request, self._key), _NOBLOCK)
        except zmq.Again:
            self._blocked = True
        else:
            requester.mark_sent(request, now)
        if request.ask or self._blocked:
            self._unanswered = self._unanswered or now

    def _connect(self) -> None:
        self.socket = open_socket(self._context, zmq.DEALER, self._hwm)
        self._handshake = Handshake(self._context, self.socket)
        self.socket.connect(self.endpoint)

    def _check_connection(self, now: float) -> None:
        """Replaces the connection if it seems to be of no use any more."""
        if not self._handshake.fails(now, NO_HANDSHAKE):
            if now - self._unanswered <= self._patience:
                return
            self._patience = min(2 * self._patience, LONGEST_UNANSWERED)
        self.close()
        self._connect()
        self._unanswered = 0.0
        for requester in self.requesters.values():
            requester.introduce()

    def _receive_message(self, frames: list[memoryview], now: float) -> None:
        header = read_header(frames[0])
        check_run(header, self._run)
        requester = self.requesters.get((header.flow, header.stage))
        if requester is None:  # of a queue that has moved to another connection
            return
        if header.microbatch >= self._microbatches:
            raise ForeignMessage(
                f"{header.identity} is not of this plan, which has {self._microbatches} microbatches: "
                "start all workers from the same plan"
            )
        receiver, bits = requester.receiver, fingerprint(header)
        number = message_number(header.step, header.microbatch, self._microbatches)
        whole = len(frames) > 1 or not header.tensors
        if not receiver.accepts(number, bits, whole=whole):
            return
        try:
            message = complete(header, frames[1:])
        except BadMessage as error:
            receiver.count_damage(str(error))
            receiver.lose()
        else:
            receiver.accept(message, bits)
            requester.postpone(now)

    def _receive_reply(self, frame: bytes) -> None:
        reply = self._unpack_reply(frame)
        if reply.run != self._run:
            raise ForeignMessage(
                f"the worker at {self.endpoint} belongs to run {reply.run!r}, this one to run {self._run!r}; "
                "two runs share a queue address: give one of them another queues.url"
            )
        if requester := self.requesters.get(reply.key):
            requester.receive(reply)

    def _unpack_reply(self, frame: bytes) -> RetentionReply:
        """A producer of another run introduces itself without a key. Of this run nothing counts without its seal."""
        try:
            return unpack(frame, RetentionReply, self._key)
        except ForeignMessage:
            raise
        except BadMessage:
            introduction = unpack(frame, RetentionReply)
            if introduction.run == self._run:
                raise
            return introduction

    def _count_damage(self, reason: str) -> None:
        """Something arrived damaged, of an unknown queue: all receivers request again."""
        self._damages += 1
        if self._damages > TOO_OFTEN:
            raise BadMessage(
                f"{self._damages} messages in a row from the worker at {self.endpoint} arrived damaged: {reason}"
            )
        for requester in self.requesters.values():
            requester.receiver.lose()
