"""The producing end of a queue without its transport: who is to get which message next.

It sends what the newest `Credit` allows, from its own log, to the consumer that said it. Of a message that the consumer
already has (a replacement puts its predecessor's messages again) only the header goes: the consumer compares its
checksums with what it got then, so that a producer that is not deterministic does not stay unnoticed.
"""

from stageline.broker.codec.message import Frame
from stageline.broker.queues.base import Depth
from stageline.broker.queues.log import Log

from .requests import Credit, Retention


class Producer:
    """Decides for one `log`. `peer` is the connection over which its consumer spoke last; None: nobody is there.

    The consumer has all messages before `taken`.
    """

    def __init__(self, log: Log) -> None:
        self.log = log
        self.peer: bytes | None = None
        self._heard = (-1, -1)  # incarnation and serial of the newest Take
        self._sent = 0  # all before it were sent, or need not be
        self.taken = 0  # all before it have arrived
        self._credit = 0

    def hear(self, peer: bytes, take: Credit) -> None:
        """Takes in what a consumer says; what a newer one, or the same one later, has overruled changes nothing.

        Over a new connection everything not yet taken is sent again: what the old one held is gone with it.
        """
        if (take.incarnation, take.serial) <= self._heard:
            return
        self._heard = take.incarnation, take.serial
        if take.resend or peer != self.peer:
            self._sent = min(self._sent, take.next)
        self.peer = peer
        self.taken, self._credit = take.next, take.credit

    def lose_peer(self) -> None:
        """The connection is gone; what it held will be sent again when the consumer speaks over another."""
        self.peer = None

    def due(self) -> int | None:
        """The number of the message to send now, if there is one; `did_send` moves on."""
        log = self.log
        if self._sent < log.first:
            self._sent = log.first
        return self._sent if self._sent < log.end and self._sent < self._credit and self.peer is not None else None

    @property
    def behind(self) -> bool:
        """Whether there are messages that have not been sent."""
        return self._sent < self.log.end

    def frames(self, number: int) -> list[Frame]:
        """What to send as message `number`: only its header if the consumer has it."""
        frames = self.log.frames(number)
        return frames[:1] if number < self.taken else frames

    def did_send(self, number: int) -> int | None:
        """The number of the message to send after it, as `due`."""
        self._sent = number + 1
        return self.due() if self._sent < self.log.end else None

    def standing(self, take: Credit) -> Retention:
        """The answer to `take`, true if whatever was due has been sent before."""
        return Retention(
            self.log.run,
            self.log.key.flow,
            self.log.key.stage,
            max(self._heard[0], 0),
            take.serial,
            self.log.first,
            self._sent,
        )

    def depth(self, now: float) -> Depth:
        sent = max(self._sent, self.log.first)
        return Depth(
            ready=max(0, self.log.end - max(sent, self.taken)),
            in_flight=max(0, sent - max(self.taken, self.log.first)),
            retained=len(self.log),
            bytes=self.log.bytes,
            oldest=self.log.oldest(now),
        )
