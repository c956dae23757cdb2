"""The producing end of a queue without its transport: which message to send next, and over which connection.

It sends what the newest credit allows, from its own log, in order:

    retained   first ──────── received ──────── sent ──────── limit ──────── end
               arrived        on its way        may be sent   waits for credit

Of a message that the consumer already has, only the header is sent: a replacement puts its predecessor's messages
again, and the consumer compares their checksums with those that it got before.
"""

from stageline.broker.codec.message import Frame

from .base import Depth
from .credit import Credit, Retention
from .log import Log


class Sender:
    """Decides for one `log`. All messages before `sent` were sent, or need not be;
    those before `received` have arrived.

    `route` is the connection that the newest credit came over; None while the consumer cannot be reached.
    """

    def __init__(self, log: Log) -> None:
        self.log = log
        self.route: bytes | None = None
        self.sent = 0
        self.newest = (0, 0)  # incarnation and serial of the newest credit
        self.received = 0
        self._limit = 0

    def update(self, credit: Credit, route: bytes = b"") -> bool:
        """Takes in what the consumer reports over `route`. False if a newer report has overruled it.

        Over a new connection everything that has not arrived is sent again: what the old one held is lost with it.
        """
        stamp = credit.incarnation, credit.serial
        if stamp <= self.newest:
            return False
        self.newest = stamp
        if credit.missing is not None and credit.missing >= self.log.first:
            self.resend(credit.missing)
        if route != self.route:
            self.resend(credit.received)
        self.route = route
        self.received, self._limit = credit.received, credit.limit
        return True

    def lose_route(self) -> None:
        """The connection is gone; what it held is sent again when credit comes over another."""
        self.route = None

    def resend(self, number: int) -> None:
        """Messages from `number` on must be sent again, those that are still retained."""
        self.sent = max(min(self.sent, number), self.log.first)

    def due(self) -> int | None:
        """The number of the message to send now, None if there is none; `mark_sent` moves on."""
        log = self.log
        if self.sent < log.first:
            self.sent = log.first
        return self.sent if self.sent < log.end and self.sent < self._limit and self.route is not None else None

    def frames(self, number: int) -> list[Frame]:
        """The frames to send of message `number`: only the header if the consumer has it."""
        frames = self.log.frames(number)
        return frames[:1] if number < self.received else frames

    def mark_sent(self, number: int) -> int | None:
        """The number of the message to send after it, as `due`."""
        self.sent = number + 1
        return self.due() if self.sent < self.log.end else None

    @property
    def is_behind(self) -> bool:
        """Whether there are messages that have not been sent."""
        return self.sent < self.log.end

    @property
    def batch_end(self) -> int:
        """All messages from `sent` up to here may be sent now."""
        return min(self.log.end, self._limit)

    @property
    def retention(self) -> Retention:
        return Retention(self.log.first, self.sent)

    def depth(self, now: float) -> Depth:
        """`now` in seconds, on the clock of `Log.put`."""
        log = self.log
        sent = max(self.sent, log.first)
        return Depth(
            ready=max(0, log.end - max(sent, self.received)),
            in_flight=max(0, sent - max(self.received, log.first)),
            retained=len(log),
            bytes=log.bytes,
            oldest=log.oldest(now),
        )
