"""The socket of the queues that a worker takes from one other: a DEALER, connected to that worker's ROUTER.

What arrives damaged or out of turn is dropped and requested again. The connection is replaced when requests stay
unanswered for long, and soon if the other end does not speak ZeroMQ.
"""

from contextlib import ExitStack
from time import monotonic

import zmq

from stageline.broker.codec.message import (
    Flow,
    Message,
    check_run,
    complete,
    fingerprint,
    message_number,
    messages_per_step,
    read_header,
)
from stageline.broker.errors import BadMessage, ForeignMessage
from stageline.broker.queues.delivery import TOO_OFTEN, Receiver

from .connection import Context, Handshake, open_socket
from .requests import CreditRequest, Requester, RetentionReply, pack, unpack

UNANSWERED = 30.0  # seconds without any answer after which a connection is replaced; doubles up to LONGEST_UNANSWERED
LONGEST_UNANSWERED = 600.0
NO_HANDSHAKE = 3.0  # seconds without ZeroMQ's handshake after which a connection is replaced
CHECK = 0.5  # seconds between two checks of a connection that brings no answer

_NOBLOCK = int(zmq.NOBLOCK)  # plain: pyzmq's own flags are enums, and slow
_POLLIN = int(zmq.POLLIN)
_POLLIN_POLLOUT = int(zmq.POLLIN | zmq.POLLOUT)


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
        self._per_step = {flow: messages_per_step(flow, microbatches) for flow in Flow}
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
        return self.pop(receiver)

    def pop(self, receiver: Receiver) -> Message | None:
        """The next message of the receiver, of those that `receive` has taken in."""
        message = receiver.pop() if receiver.ready else None
        if receiver.must_report:
            self.send_requests(monotonic())
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
        return _POLLIN_POLLOUT if self._blocked else _POLLIN

    @property
    def due(self) -> float:
        """When to call `send_requests` again though nothing has happened."""
        check = self._next_check if self._unanswered else float("inf")
        if self._blocked:  # until there is a connection, which `events` include
            return check
        return min([check, *[requester.due for requester in self.requesters.values()]])

    def close(self) -> None:
        if not self.socket.closed:  # else it could not be replaced
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
        """Leaves no socket open if that fails: its context could never be closed."""
        with ExitStack() as opened:
            self.socket = open_socket(self._context, zmq.DEALER, self._hwm)
            opened.callback(self.socket.close)
            self._handshake = Handshake(self._context, self.socket)
            opened.callback(self._handshake.close)
            self.socket.connect(self.endpoint)
            opened.pop_all()

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
        per_step = self._per_step[header.flow]
        if header.microbatch >= per_step:
            raise ForeignMessage(
                f"{header.identity} is not of this plan, in which a step has {per_step} of them: "
                "start all workers from the same plan"
            )
        receiver, bits = requester.receiver, fingerprint(header)
        number = message_number(header.step, header.microbatch, per_step)
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
