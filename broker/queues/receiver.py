"""The consuming end of a queue without its transport: which message is accepted, and what to report to the producer.

Only the next message is accepted (go-back-N):

    number < next    a duplicate: its bits are compared with those that were accepted, then it is dropped
    number = next    accepted, kept in `ready` until it is taken
    number > next    dropped: the next message was lost, and everything from there on is reported missing

Credit lets the producer stay up to `window` messages ahead of what is taken; it is renewed once half is used up.
"""

from collections import deque
from collections.abc import Hashable

from stageline.broker.codec.message import Message
from stageline.broker.errors import BadMessage, Disagreement

from .base import QueueKey
from .credit import Retention

REMEMBERED = 4096  # accepted messages whose fingerprints are kept for comparison with duplicates
TOO_OFTEN = 8  # times that the same message may arrive damaged


class Receiver:
    """Decides for queue `key`. `ready` holds accepted messages that have not been taken yet, at most `window`.

    `must_report`: the producer should get a new credit now. `missing`: the message last reported missing, until it
    arrives. `resend`: the report that it is missing has not been sent yet.
    """

    def __init__(self, key: QueueKey, window: int) -> None:
        self.key = key
        self.next = 0
        self.ready: deque[Message] = deque()
        self.must_report = True
        self.missing: int | None = None
        self.resend = False
        self.failures = 0  # times in a row that the next message was not usable
        self._window = window
        self._granted = 0
        self._fingerprints: dict[int, Hashable] = {}

    @property
    def taken(self) -> int:
        """All messages before it have been taken."""
        return self.next - len(self.ready)

    @property
    def room(self) -> int:
        """How many messages `ready` has room for."""
        return self._window - len(self.ready)

    @property
    def limit(self) -> int:
        """The producer may send the messages before it."""
        return self.next - len(self.ready) + self._window

    def accepts(self, number: int, fingerprint: Hashable, *, whole: bool = True) -> bool:
        """Whether message `number` is the next one; `whole` says whether its tensors came with it.

        Raises `Disagreement` if it has arrived before with other bits.
        """
        if number == self.next and whole and number not in self._fingerprints:
            return True
        if self._fingerprints.get(number, fingerprint) != fingerprint:
            raise Disagreement(
                f"message {number} of {self.key} came twice with different bits: what computed it was not "
                "deterministic. See that all operations are, and that software, hardware type and thread count are "
                "the same wherever the stage runs"
            )
        if number == self.next and whole:
            return True
        if number >= self.next:
            self.miss()
        elif whole:
            self.must_report = True  # the producer does not know what has arrived
        return False

    def accept(self, message: Message, fingerprint: Hashable) -> None:
        """The next message has arrived, whole and undamaged."""
        self._fingerprints[self.next] = fingerprint
        if len(self._fingerprints) > REMEMBERED:
            del self._fingerprints[next(iter(self._fingerprints))]
        self.ready.append(message)
        self.next += 1
        self.failures = 0
        self.missing = None

    def count_damage(self, reason: str) -> None:
        """The next message arrived damaged. Raises `BadMessage` if that has happened too often in a row."""
        self.failures += 1
        if self.failures > TOO_OFTEN:
            raise BadMessage(
                f"message {self.next} of {self.key} arrived damaged {self.failures} times in a row: {reason}. "
                "Look at the network and the memory of the machines on the way"
            )

    def pop(self) -> Message:
        """The first message of `ready`, which counts as taken from now on."""
        message = self.ready.popleft()
        if 2 * (self._granted - self.next + len(self.ready)) <= self._window:
            self.must_report = True
        return message

    def rewind(self, number: int) -> None:
        """Message `number` is the next one to accept."""
        self.ready.clear()
        self.next = number
        self.failures = 0
        self.missing = None
        self.must_report = True

    def miss(self) -> None:
        """The next message was lost. It is reported once; the transport repeats the report while it does not come."""
        if self.missing != self.next:
            self.lose()

    def lose(self) -> None:
        """What was sent from the next message on is lost: report it, also if it was reported before."""
        self.missing = self.next
        self.must_report = self.resend = True

    def mark_reported(self, limit: int) -> None:
        """A credit that goes up to `limit`, and says what is missing, was sent."""
        self._granted = limit
        self.must_report = self.resend = False

    def was_sent(self, retention: Retention) -> bool:
        """Whether the producer has sent the next message. Raises `QueueGap` if it no longer holds that."""
        retention.check_holds(self.key, self.next)
        return retention.sent > self.next
