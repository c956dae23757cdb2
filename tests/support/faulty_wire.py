"""A queue over a wire that drops, repeats, delays, reorders and damages frames, and is cut, on a virtual clock.

Only the two ends without I/O are real; every fault is drawn from one seed and counted, so that a test can see it fired.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch

from stageline.broker.codec.message import Message, allocate, assemble, fingerprint, read_header
from stageline.broker.errors import BadMessage
from stageline.broker.queues.delivery import Receiver, Sender
from stageline.broker.queues.log import Log, RetentionBudget
from stageline.broker.queues.requests import (
    CreditRequest,
    Requester,
    RetentionReply,
    pack,
    reply_to,
    unpack,
)
from support.queue_pair import queue_of

RUN = "wire-run"
KEY = queue_of("forward-1")
MICROBATCHES = 4


def value(number: int) -> torch.Tensor:
    """Content of message `number`."""
    return torch.arange(number, number + 5, dtype=torch.float64)


@dataclass(frozen=True)
class Faults:
    """Probabilities of each fault, per frame group sent; `slowness` is the mean delay in seconds."""

    drop: float = 0.0
    repeat: float = 0.0
    damage: float = 0.0
    cut: float = 0.0
    slowness: float = 0.01
    ordered: bool = True

    @classmethod
    def drawn(cls, dice: random.Random) -> "Faults":
        rates = [dice.choice([0.0, 0.05, 0.2]) for _ in range(3)]
        return cls(
            *rates, cut=dice.choice([0.0, 0.02]), slowness=dice.choice([0.001, 0.1, 2.0]), ordered=dice.random() < 0.3
        )


class WireWorld:
    """One queue with its two ends. `steps` steps of messages are put, one after another, and taken."""

    def __init__(self, seed: int, faults: Faults | None = None, *, steps: int = 8, window: int = 5) -> None:
        self.dice = random.Random(seed)
        self.faults = faults or Faults.drawn(self.dice)
        self.fired: Counter[str] = Counter()
        self.now = 0.0
        self.end = steps * MICROBATCHES
        self.window = window
        self.delivered: list[tuple[int, bytes]] = []
        self.most_in_flight = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._connection = 0
        self._arrival = {True: 0.0, False: 0.0}
        self.compute: Callable[[int], torch.Tensor] = value
        self.start_producer(1, 0)
        self.start_consumer(2, 0)

    def start_producer(self, incarnation: int, step: int) -> None:
        """A producer that begins with `step`, in place of the one there was; connections to that are gone."""
        self._incarnation = incarnation
        self._put = step * MICROBATCHES
        self.sender = Sender(Log(RUN, KEY, RetentionBudget()))
        self.cut()

    def start_consumer(self, incarnation: int, step: int) -> None:
        """A consumer that begins with `step`, in place of the one there was."""
        self.receiver = Receiver(queue_of("forward-1", window=self.window))
        self.requester = Requester(RUN, incarnation, self.receiver)
        self.requester.rewind(step * MICROBATCHES)
        self.cut()

    def cut(self) -> None:
        """The connection breaks: all that is on its way is gone, and the consumer comes back over another."""
        self._connection += 1
        self._events.clear()

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Goes on until all is delivered, or `until`."""
        done = until or (lambda: bool(self.delivered) and self.delivered[-1][0] == self.end - 1)
        for _ in range(200_000):
            if done():
                return
            self._turn()
        raise AssertionError(f"nothing moves any more at {self.now:.1f} s: {len(self.delivered)} delivered")

    def put(self) -> None:
        """The producer computes its next message."""
        payload = self.compute(self._put)
        message = Message(RUN, KEY.name, self._put, self._incarnation, payload)
        self.sender.log.put(message, self.now)
        self._put += 1
        self._flush()

    def take(self) -> None:
        if self.receiver.ready:
            message = self.receiver.pop()
            assert isinstance(message.payload, torch.Tensor)
            self.delivered.append((message.number, message.payload.numpy().tobytes()))

    def request(self, request: CreditRequest) -> None:
        """Any consumer's request to the producer, over the wire."""
        self._send([pack(request)], self._connection, to_producer=True)

    def _turn(self) -> None:
        """One of the ends does something; which one, is drawn."""
        match self.dice.randrange(4):
            case 0 if self._put < self.end:
                self.put()
            case 1:
                self.take()
            case 2:
                self._request()
            case _:
                self._wait()

    def _request(self) -> None:
        request = self.requester.request(self.now)
        if request is not None:
            self.request(request)
            self.requester.mark_sent(request, self.now)

    def _wait(self) -> None:
        """Time passes until the next frames arrive, or a request is repeated."""
        if self._events and self._events[0][0] <= self.requester.due:
            self.now, _, deliver = heapq.heappop(self._events)
            deliver()
        else:
            self.now = max(self.now, self.requester.due)

    def _flush(self) -> None:
        while (number := self.sender.due()) is not None:
            frames = self.sender.frames(number)
            self.sender.mark_sent(number)
            self._send([bytes(frame) for frame in frames], self._connection, to_producer=False)
        self.most_in_flight = max(self.most_in_flight, self.sender.depth(self.now).in_flight)

    def _send(self, frames: list[bytes], connection: int, *, to_producer: bool) -> None:
        faults = self.faults
        if self._happens("drop", faults.drop):
            return
        for _ in range(2 if self._happens("repeat", faults.repeat) else 1):
            sent = self._damaged(frames) if self._happens("damage", faults.damage) else frames
            deliver = partial(self._producer_receives if to_producer else self._consumer_receives, sent, connection)
            heapq.heappush(self._events, (self._arrives(to_producer), next(self._order), deliver))
        if self._happens("cut", faults.cut):
            self.cut()

    def _arrives(self, to_producer: bool) -> float:
        at = self.now + self.dice.expovariate(1 / self.faults.slowness)
        if self.faults.ordered:
            at = self._arrival[to_producer] = max(at, self._arrival[to_producer])
        elif at < self._arrival[to_producer]:
            self.fired["overtake"] += 1
        self._arrival[to_producer] = max(at, self._arrival[to_producer])
        return at

    def _producer_receives(self, frames: list[bytes], connection: int) -> None:
        try:
            request = unpack(frames[0], CreditRequest)
        except BadMessage:
            return
        self.sender.update(request.to_credit(), connection.to_bytes(4, "little"))
        self._flush()
        if request.ask:
            self._send([b"", pack(reply_to(request, self.sender))], connection, to_producer=False)

    def _consumer_receives(self, frames: list[bytes], connection: int) -> None:
        try:
            if frames[0]:
                self._message(frames)
            else:
                self.requester.receive(unpack(frames[1], RetentionReply))
        except BadMessage:
            self.receiver.lose()

    def _message(self, frames: list[bytes]) -> None:
        header = read_header(frames[0])
        number, bits = header.number, fingerprint(header)
        if not self.receiver.accepts(number, bits, whole=len(frames) > 1):
            return
        buffers = allocate(header)
        for buffer, frame in zip(buffers, frames[1:], strict=True):
            buffer[:] = frame
        try:
            message = assemble(header, buffers)
        except BadMessage as error:
            self.receiver.count_damage(str(error))
            self.receiver.lose()
        else:
            self.receiver.accept(message, bits)
            self.requester.postpone(self.now)

    def _damaged(self, frames: list[bytes]) -> list[bytes]:
        place = self.dice.choice([place for place, frame in enumerate(frames) if frame])
        frame = bytearray(frames[place])
        frame[self.dice.randrange(len(frame))] ^= 1 << self.dice.randrange(8)
        return [*frames[:place], bytes(frame), *frames[place + 1 :]]

    def _happens(self, fault: str, probability: float) -> bool:
        happens = self.dice.random() < probability
        self.fired[fault] += happens
        return happens
