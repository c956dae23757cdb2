"""The queues that a worker takes from one other, over one connection to that: requests go out, messages come in.

What arrives damaged or out of turn is dropped and requested again. What the connection is, a transport knows.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from time import monotonic

from stageline.broker.codec.message import (
    Flow,
    Frame,
    Header,
    Message,
    check_run,
    complete,
    fingerprint,
    message_number,
    messages_per_step,
    read_header,
)
from stageline.broker.errors import BadMessage, ForeignMessage

from .base import QueueKey
from .delivery import TOO_OFTEN, Receiver
from .requests import CreditRequest, Requester, RetentionReply, pack, unpack


class InboundLink(ABC):
    """Serves the requesters given to `add` from the producers at `endpoint`. Times are monotonic, in seconds."""

    def __init__(self, endpoint: str, run: str, microbatches: int, key: bytes) -> None:
        self.endpoint = endpoint
        self.requesters: dict[tuple[Flow, int], Requester] = {}  # by their queues' keys
        self._key = key
        self._run = run
        self._microbatches = microbatches
        self._per_step = {flow: messages_per_step(flow, microbatches) for flow in Flow}
        self._damages = 0

    @abstractmethod
    def receive(self, now: float, *, wait: bool = False) -> bool:
        """Takes in one message. False if none has arrived; with `wait`, not for some milliseconds.

        Raises `ForeignMessage`, and what `Receiver` raises about messages that contradict each other.
        """

    @abstractmethod
    def has_arrived(self) -> bool:
        """Whether `receive` would find something: this takes less time than to find nothing."""

    @abstractmethod
    def send_requests(self, now: float) -> None:
        """Sends the requests that are due, as far as there is a connection."""

    @property
    @abstractmethod
    def due(self) -> float:
        """When to call `send_requests` again though nothing has happened."""

    @abstractmethod
    def close(self) -> None:
        """What was to be requested is not."""

    def add(self, requester: Requester) -> None:
        self.requesters[requester.receiver.key.wire] = requester
        requester.introduce()

    def remove(self, key: QueueKey) -> None:
        """The queue is taken over another connection, if it was over this one."""
        if (requester := self.requesters.get(key.wire)) is not None and requester.receiver.key == key:
            del self.requesters[key.wire]

    def take(self, receiver: Receiver, *, wait: bool = False) -> Message | None:
        """The next message of the receiver, or None. With `wait`, waits for it as `receive` does."""
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

    def _pack(self, request: CreditRequest) -> bytes:
        return pack(request, self._key)

    def _take_in(self, frames: Sequence[Frame], now: float) -> None:
        """Frames that came: of a message, or of a reply, which has an empty one where a message has its header."""
        try:
            if len(frames[0]):
                self._take_in_message(frames, now)
            else:
                self._take_in_reply(b"".join(frames[1:]))
        except ForeignMessage:
            raise
        except BadMessage as error:
            self._count_damage(str(error))
        else:
            self._damages = 0

    def _take_in_message(self, frames: Sequence[Frame], now: float) -> None:
        header = read_header(frames[0])
        check_run(header, self._run)
        requester = self.requesters.get((header.flow, header.stage))
        if requester is None:  # of a queue that has moved to another connection
            return
        receiver, bits = requester.receiver, fingerprint(header)
        number = self._number(header, receiver.key)
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

    def _number(self, header: Header, key: QueueKey) -> int:
        """Of a message in its queue. Raises `ForeignMessage` if the plan has none such."""
        if key.part is not None:
            return _number_in_part(header, key, self._microbatches)
        per_step = self._per_step[header.flow]
        if header.microbatch >= per_step:
            raise ForeignMessage(
                f"{header.identity} is not of this plan, in which a step has {per_step} of them: {_SAME_PLAN}"
            )
        return message_number(header.step, header.microbatch, per_step)

    def _take_in_reply(self, frame: bytes) -> None:
        reply = self._unpack_reply(frame)
        if reply.run != self._run:
            raise ForeignMessage(
                f"the worker at {self.endpoint} belongs to run {reply.run!r}, this one to run {self._run!r}; "
                "two runs share a queue address: give one of them another queues.url"
            )
        if requester := self.requesters.get(reply.key.wire):
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


def _number_in_part(header: Header, key: QueueKey, microbatches: int) -> int:
    per_step = key.per_step(microbatches)
    try:
        place = key.place(header.microbatch)
    except ValueError as error:
        raise ForeignMessage(f"{header.identity} is not of this plan: {error}; {_SAME_PLAN}") from error
    if place >= per_step:
        raise ForeignMessage(f"{header.identity} is not of this plan: {key} has {per_step} in a step; {_SAME_PLAN}")
    return message_number(header.step, place, per_step)


_SAME_PLAN = "start all workers from the same plan"
