"""Decisions of a queue's two ends, without their transport: which message is sent next, accepted and reported.

The producer's `Sender` sends what the newest credit allows, from its own log, in order:

    retained   first ──────── received ──────── sent ──────── limit ──────── end
               arrived        on its way        may be sent   waits for credit

The consumer's `Receiver` accepts only the next message (go-back-N):

    number < next    a duplicate: its bits are compared with those that were accepted, then it is dropped
    number = next    accepted, kept in `ready` until it is taken
    number > next    dropped: the next message was lost, and everything from there on is reported missing

    consumer ── Credit ────> producer     what has arrived, and what may be sent
    producer ── Retention ─> consumer     what can still be had, and what has been sent

Numbers are absolute ("may be sent what is before number c"), so that a report may be lost, repeated or late: the newest
one is complete in itself.

`Looking` decides how long a consumer polls for a message before it sleeps: waking up takes longer than most messages
do. A worker that polls in vain takes a processor from those that compute, so each poll in vain doubles the number of
waits that sleep at once. A wait that slept for less than a poll ends that: polling would have found the message.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from stageline.broker.codec.message import Frame, Message
from stageline.broker.codec.structure import agree
from stageline.broker.control.queue_counts import KEPT_RESENDS, Depth, Intake, Resend, ResendReason
from stageline.broker.errors import BadMessage, Disagreement, Fenced, QueueGap
from stageline.pipeline.program import Queue

from .log import Log

REMEMBERED = 4096  # messages before the next one whose fingerprints are kept for comparison with duplicates
TOO_OFTEN = 8  # times that the same message may arrive damaged
LOOK = 800e-6  # seconds
MOST = 64  # waits in a row that sleep at once


class Credit(NamedTuple):
    """Report number `serial` of the consumer of this incarnation; the highest (`incarnation`, `serial`) counts.

    The consumer has all messages before `received`, and the producer may send those before `limit`. Messages sent from
    number `missing` on are lost; None: no message is lost.
    """

    incarnation: int
    serial: int
    received: int
    limit: int
    missing: int | None = None


class Retention(NamedTuple):
    """Report of the producer: it holds its messages from `first` on, and has sent those before `sent`."""

    first: int
    sent: int

    def check_holds(self, queue: str, number: int) -> None:
        """Raise `QueueGap` if message `number` of the queue named `queue` is no longer held."""
        if number < self.first:
            raise QueueGap(
                f"message {number} of {queue} is no longer available: its producer keeps those from {self.first} on. "
                "The stage was resumed from before the newest complete checkpoint"
            )


def check_current(duty: str, newest: int, own: int) -> None:
    """Raise `Fenced` if incarnation `newest` has replaced the worker of incarnation `own`.

    Args:
        duty: Duty that the worker was replaced in, as the beginning of a sentence: "X is taken".
        newest: Highest incarnation known for that duty.
        own: Incarnation of this worker.
    """
    if newest > own:
        raise Fenced(f"{duty} by incarnation {newest} now; this worker is incarnation {own} and must stop")


@dataclass(slots=True)
class _Resent:
    """Messages that are sent again; `found` is when they were first reported, which `Sender` has no clock for."""

    first: int
    end: int
    reason: ResendReason
    found: float | None = None

    def told(self, now: float) -> Resend:
        """Return what is reported of it at `now`, in seconds of a clock that is never set back."""
        self.found = now if self.found is None else self.found
        return Resend(self.first, self.end, self.reason, now - self.found)


class Sender:
    """Decisions of the producer's end of the queue of `log`.

    All messages before `sent` were sent, or need not be; those before `received` have arrived; those before `limit` may
    be sent. `route` is the connection that the newest credit came over; None while the consumer cannot be reached.
    """

    def __init__(self, log: Log) -> None:
        """Begin with nothing sent and no credit from the consumer."""
        self.log = log
        self.route: bytes | None = None
        self.sent = 0
        self.newest = (0, 0)  # incarnation and serial of the newest credit
        self.received = 0
        self.limit = 0
        self.resent = 0  # messages
        self._resends: deque[_Resent] = deque(maxlen=KEPT_RESENDS)

    def update(self, credit: Credit, route: bytes = b"") -> bool:
        """Record `credit`, which the consumer sent over `route`. Returns False if a newer report has overruled it.

        Over a new connection every message that has not arrived is sent again: what the old connection held is lost
        with it.
        """
        stamp = credit.incarnation, credit.serial
        if stamp <= self.newest:
            return False
        self.newest = stamp
        if credit.missing is not None and credit.missing >= self.log.first:
            self.resend(credit.missing, ResendReason.MISSING)
        if route != self.route:
            self.resend(credit.received, ResendReason.CONNECTION)
        self.route = route
        self.received, self.limit = credit.received, credit.limit
        return True

    def resend(self, number: int, reason: ResendReason) -> None:
        """Send messages from `number` on again, as far as they are still retained; count them as resent."""
        before, self.sent = self.sent, max(min(self.sent, number), self.log.first)
        if self.sent < before:
            self.resent += before - self.sent
            self._resends.append(_Resent(self.sent, before, reason))

    def lose_route(self) -> None:
        """Send nothing until the consumer's next credit, because its connection is gone."""
        self.route = None

    def due(self) -> int | None:
        """Return the number of the message to send now, None if there is none; `mark_sent` moves on."""
        log = self.log
        if self.sent < log.first:
            self.sent = log.first
        return self.sent if self.sent < log.end and self.sent < self.limit and self.route is not None else None

    def frames(self, number: int) -> list[Frame]:
        """Return the frames to send of message `number`: only the header if the consumer has the message.

        A replacement puts its predecessor's messages again, and the consumer compares their checksums with those that
        it got before.
        """
        frames = self.log.frames(number)
        return frames[:1] if number < self.received else frames

    def mark_sent(self, number: int) -> int | None:
        """Count message `number` as sent. Returns the number of the message to send after it, None if there is none."""
        self.sent = number + 1
        return self.due() if self.sent < self.log.end else None

    @property
    def is_behind(self) -> bool:
        """True if there are messages that have not been sent."""
        return self.sent < self.log.end

    @property
    def retention(self) -> Retention:
        """Report of the messages that are held and those that were sent, for the consumer."""
        return Retention(self.log.first, self.sent)

    def depth(self, now: float) -> Depth:
        """Return the queue's content and positions at time `now`, in seconds on the clock of `Log.put`."""
        log = self.log
        sent = max(self.sent, log.first)
        return Depth(
            ready=max(0, log.end - max(sent, self.received)),
            in_flight=max(0, sent - max(self.received, log.first)),
            retained=len(log),
            bytes=log.bytes,
            oldest=log.oldest(now),
            put=log.end,
            sent=sent,
            arrived=self.received,
            granted=self.limit,
            put_bytes=log.put_bytes,
            resent=self.resent,
            resends=self._newest_resends(now) if self.resent else (),
        )

    def _newest_resends(self, now: float) -> tuple[Resend, ...]:
        return tuple(each.told(now) for each in self._resends)


class Receiver:
    """Decisions of the consumer's end of `queue`.

    `ready` holds accepted messages that have not been taken yet, at most the queue's window: credit lets the producer
    stay so far ahead of what is taken, and is renewed once half is used up.

    Attributes:
        next: Number of the next message to accept.
        must_report: True if the producer should get a new credit now.
        missing: Number of the message last reported missing, until it arrives.
        resend: True if the report that `missing` is missing has not been sent yet.
    """

    def __init__(self, queue: Queue) -> None:
        """Begin at message 0. Raises `ValueError` if the queue has no window."""
        if not queue.window:
            raise ValueError(f"{queue.name} has no window: its consumer would grant no message")
        self.queue = queue
        self.name = queue.name
        self.next = 0
        self.ready: deque[Message] = deque()
        self.must_report = True
        self.missing: int | None = None
        self.resend = False
        self.failures = 0  # times in a row that the next message was not usable
        self.duplicates = self.damaged = 0  # messages, so far
        self.losses = 0  # times that the next message was lost
        self._window = queue.window
        self._granted = 0
        self._fingerprints: dict[int, Hashable] = {}

    @property
    def taken(self) -> int:
        """Number of the message that is taken next."""
        return self.next - len(self.ready)

    @property
    def room(self) -> int:
        """Number of messages that `ready` has room for."""
        return self._window - len(self.ready)

    @property
    def limit(self) -> int:
        """Number of the first message that the producer may not send yet."""
        return self.taken + self._window

    def accepts(self, number: int, fingerprint: Hashable, *, whole: bool = True) -> bool:
        """Return True if message `number` is the next one to accept.

        A duplicate is only compared; a message beyond the next one shows that the next one was lost, which is reported.

        Args:
            number: Number of a message that has arrived.
            fingerprint: Bits of the message, as `fingerprint` of the codec gives them.
            whole: True if the message's tensors came with it, not only its header.

        Raises:
            Disagreement: The message has arrived before with other bits.
        """
        if number == self.next and whole and number not in self._fingerprints:
            return True
        if not agree(self._fingerprints.get(number, fingerprint), fingerprint):
            raise Disagreement(
                f"message {number} of {self.name} came twice with different bits: what computed it was not "
                "deterministic. See that all operations are, and that software, hardware type and thread count are "
                "the same wherever the stage runs"
            )
        if number == self.next and whole:
            return True
        self.duplicates += number < self.next
        if number >= self.next:
            self.miss()
        elif whole:
            self.must_report = True  # the producer does not know what has arrived
        return False

    def accept(self, message: Message, fingerprint: Hashable) -> None:
        """Keep the next message, which has arrived whole and undamaged, in `ready`."""
        self._fingerprints[self.next] = fingerprint
        self._fingerprints.pop(self.next - REMEMBERED, None)  # to find a first key takes longer, the more are gone
        self.ready.append(message)
        self.next += 1
        self.failures = 0
        self.missing = None

    def count_damage(self, reason: str) -> None:
        """Count an arrival of the next message that is damaged for `reason`.

        Raises `BadMessage` if that has happened more than `TOO_OFTEN` times in a row.
        """
        self.failures += 1
        self.damaged += 1
        if self.failures > TOO_OFTEN:
            raise BadMessage(
                f"message {self.next} of {self.name} arrived damaged {self.failures} times in a row: {reason}. "
                "Look at the network and the memory of the machines on the way"
            )

    def count_absence(self, last: int | None = None) -> None:
        """Count a search for the next message that found something else.

        Args:
            last: Number of the search that this one counts as, if it shows that further ones are in vain.
        """
        self.failures = self.failures + 1 if last is None else last

    def pop(self) -> Message:
        """Remove the first message of `ready` and return it; it counts as taken from now on."""
        message = self.ready.popleft()
        if 2 * (self._granted - self.next + len(self.ready)) <= self._window:
            self.must_report = True
        return message

    def rewind(self, number: int) -> None:
        """Accept message `number` next, and forget the accepted ones that were not taken."""
        if number > self.next:  # their numbers are not those before it
            self._fingerprints.clear()
        self.ready.clear()
        self.next = number
        self.failures = 0
        self.missing = None
        self.must_report = True

    def miss(self) -> None:
        """Report that the next message was lost, unless that was reported before.

        The transport repeats the report while the message does not come.
        """
        if self.missing != self.next:
            self.lose()

    def report(self) -> None:
        """Have the producer get a new credit now."""
        self.must_report = True

    def lose(self) -> None:
        """Report that everything sent from the next message on is lost, even if it was reported before."""
        self.losses += 1
        self.restart()

    def restart(self) -> None:
        """Have everything from the next message on sent again."""
        self.missing = self.next
        self.must_report = self.resend = True

    def mark_reported(self, limit: int) -> None:
        """Record that a credit up to `limit`, which also says what is missing, was sent."""
        self._granted = limit
        self.must_report = self.resend = False

    def intake(self) -> Intake:
        """Return the positions of this end, and what came to it in vain."""
        return Intake(self.next, self.taken, self._granted, self.duplicates, self.damaged, self.losses)

    def was_sent(self, retention: Retention) -> bool:
        """Return True if the producer has sent the next message. Raises `QueueGap` if that is no longer held."""
        retention.check_holds(self.name, self.next)
        return retention.sent > self.next


class Looking:
    """Decision of how long one worker polls for a message before it sleeps, learned from its waits so far."""

    def __init__(self, processors: int) -> None:
        """Begin with polling, or with sleeping on a machine of one processor, which the producer needs.

        Args:
            processors: Number of processors that this process may use.
        """
        self._alone = processors == 1  # the producer needs the processor on which this one would look
        self._in_vain = MOST if self._alone else 1
        self._sleeps = MOST if self._alone else 0

    def seconds(self) -> float:
        """Return for how long to poll in this wait, in seconds; 0 to sleep at once.

        Call it for a message that is not here yet, and call `ended` after the wait.
        """
        if self._sleeps:
            self._sleeps -= 1
            return 0.0
        return LOOK

    def ended(self, looked: float, waited: float | None) -> None:
        """Record a wait that is over, for the length of later polls.

        Args:
            looked: Seconds to poll that `seconds` returned for this wait.
            waited: Seconds after which the message came; None if it did not come.
        """
        if looked and waited is not None and waited <= looked:
            self._in_vain = 1
        elif looked:
            self._in_vain = self._sleeps = min(2 * self._in_vain, MOST)
        elif waited is not None and waited < LOOK and not self._alone:
            self._sleeps = 0
