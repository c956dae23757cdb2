"""The receiving side over ZeroMQ: one DEALER to one producing worker, shared by all consumers of its queues.

Whatever arrives damaged or out of turn is dropped and asked for again; the connection itself is made anew when
questions stay without an answer for long, and soon if whoever is at its other end does not speak ZeroMQ.
"""

from time import monotonic

import zmq

from stageline.broker.codec.message import Flow, Limits, Message, check_run, complete, fingerprint, read_header
from stageline.broker.errors import BadMessage, ForeignMessage
from stageline.pipeline.numbering import message_number

from . import socket_options as options
from .consumer import TOO_OFTEN, Acceptance, Consumer
from .handshake import Handshake
from .requests import Credit, pack, unpack_retention

UNANSWERED = 30.0  # seconds without any answer after which a connection is made anew; doubles up to LONGEST
LONGEST = 600.0
UNGREETED = 3.0  # seconds after which it is made anew if nobody has greeted over it
LOOK = 0.5  # seconds between two looks at a connection that brings no answer
_AT_ONCE = int(zmq.NOBLOCK)  # plain: pyzmq's own flags are enums, and slow


class Dealer:
    """Serves the consumers given to `add` from the producers at `endpoint`."""

    def __init__(
        self, context: options.Context, endpoint: str, run: str, *, microbatches: int, hwm: int, limits: Limits
    ) -> None:
        self.endpoint = endpoint
        self.consumers: dict[tuple[Flow, int], Consumer] = {}  # by their keys
        self._mute = False  # there is something to say, and no connection yet
        self._context = context
        self._run = run
        self._microbatches = microbatches
        self._hwm = hwm
        self._limits = limits
        self._damages = 0
        self._asked = 0.0  # since when there has been no answer to what was, or could not be, asked; 0: all is well
        self._patience = UNANSWERED
        self._look = 0.0  # when to look at the connection, if there is no answer
        self.socket = self._connect()

    def add(self, consumer: Consumer) -> None:
        self.consumers[consumer.key] = consumer
        consumer.meet()

    def remove(self, consumer: Consumer) -> None:
        self.consumers.pop(consumer.key, None)

    def next_of(self, consumer: Consumer, *, wait: bool = False) -> Message | None:
        """The message the consumer hands out next, if it is here; if one may `wait`, or comes within `ALONE` ms."""
        now = monotonic()
        while not consumer.ready and self.receive(now, wait=wait):
            wait = False
        message = consumer.pop() if consumer.ready else None
        if consumer.wants:
            self.speak(now)
        return message

    def receive(self, now: float, *, wait: bool = False) -> bool:
        """Takes in one message, if one is here. False if not.

        Raises `ForeignMessage`, and what `Consumer` raises about messages that contradict each other.
        """
        try:
            frame = self.socket.recv(0 if wait else _AT_ONCE, copy=False)
        except zmq.Again:
            return False
        frames = [frame.buffer]
        while frame.more:  # they are all here: ZeroMQ delivers a message whole
            frame = self.socket.recv(copy=False)
            frames.append(frame.buffer)
        self._asked, self._patience = 0.0, UNANSWERED
        try:
            if frames[0].nbytes:
                self._message(frames, now)
            else:  # nothing where a header would be: a `Standing`
                self._standing(b"".join(frames[1:]))
        except ForeignMessage:
            raise
        except BadMessage as error:
            self._damaged(str(error))
        else:
            self._damages = 0
        return True

    def speak(self, now: float) -> None:
        """Says what the consumers have to say, as far as there is a connection."""
        self._mute = False
        for consumer in self.consumers.values():
            take = consumer.request(now)
            if take is not None and not self._mute:
                self._say(consumer, take, now)
        if self._asked and now >= self._look:
            self._look = now + LOOK
            self._renew_if_of_no_use(now)

    @property
    def watched(self) -> int:
        """What to wait for at `socket`."""
        return zmq.POLLIN | zmq.POLLOUT if self._mute else zmq.POLLIN

    @property
    def due(self) -> float:
        """When `speak` may have something to say though nothing has happened."""
        look = self._look if self._asked else float("inf")
        if self._mute:  # a connection is something that happens
            return look
        return min([look, *[consumer.due for consumer in self.consumers.values()]])

    def close(self) -> None:
        self._greeting.close()
        self.socket.close()

    def _say(self, consumer: Consumer, take: Credit, now: float) -> None:
        try:
            self.socket.send(pack(take), _AT_ONCE)
        except zmq.Again:
            self._mute = True
        else:
            consumer.did_say(take, now)
        if take.ask or self._mute:
            self._asked = self._asked or now

    def _connect(self) -> options.Socket:
        socket = self._context.socket(zmq.DEALER)
        options.for_dealer(socket, self._hwm, self._limits.message_bytes)
        self._greeting = Handshake(self._context, socket)
        socket.connect(self.endpoint)
        return socket

    def _renew_if_of_no_use(self, now: float) -> None:
        if self._greeting.fails(now, UNGREETED):
            self._renew()
        elif now - self._asked > self._patience:
            self._patience = min(2 * self._patience, LONGEST)
            self._renew()

    def _renew(self) -> None:
        """Whatever the old connection is stuck in, a new one begins afresh."""
        self.close()
        self.socket = self._connect()
        self._asked = 0.0
        for consumer in self.consumers.values():
            consumer.meet()

    def _message(self, frames: list[memoryview], now: float) -> None:
        header = read_header(frames[0], limits=self._limits)
        if header.run != self._run:
            check_run(header, self._run)
        consumer = self.consumers.get((header.flow, header.stage))
        if consumer is None:  # of a queue that comes over another connection now
            return
        if header.microbatch >= self._microbatches:
            raise ForeignMessage(
                f"{header.identity} is not of this plan, which has {self._microbatches} microbatches: "
                "start all workers from the same plan"
            )
        number, marks = header.number(self._microbatches), fingerprint(header)
        whole = len(frames) > 1 or not header.tensors
        if consumer.judge(number, marks, whole=whole) is Acceptance.DROP:
            return
        try:
            message = complete(header, frames[1:])
        except BadMessage as error:
            consumer.damaged(str(error))
        else:
            consumer.accept(message, marks, now)

    def _standing(self, frame: bytes) -> None:
        standing = unpack_retention(frame)
        if standing.run != self._run:
            raise ForeignMessage(
                f"the worker at {self.endpoint} belongs to run {standing.run!r}, this one to run {self._run!r}; "
                "two runs share a queue address: give one of them another queues.url"
            )
        if consumer := self.consumers.get(standing.key):
            consumer.hear(standing)

    def _damaged(self, reason: str) -> None:
        """It cannot be known whose message it was: all ask again."""
        self._damages += 1
        if self._damages > TOO_OFTEN:
            raise BadMessage(
                f"{self._damages} messages in a row from the worker at {self.endpoint} arrived damaged: {reason}"
            )
        for consumer in self.consumers.values():
            consumer.lost()
