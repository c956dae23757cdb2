"""The consuming end of a queue without its transport: which message is accepted, and what to ask the producer for.

Only the next message is accepted (go-back-N). What is before it is a duplicate and compared; what is after it shows
that one was lost, and all from there on are asked for again. Credit is absolute: "send what is before number c".
"""

from collections import deque
from collections.abc import Hashable
from enum import Enum, auto

from stageline.broker.codec.message import Message
from stageline.broker.errors import BadMessage, Disagreement, Fenced, QueueGap
from stageline.broker.queues.base import QueueKey

from .requests import Credit, Retention

PATIENCE = 0.5  # seconds without an arrival after which a consumer asks again
LONGEST = 5.0  # seconds; the pause between two questions doubles up to this
REMEMBERED = 4096  # accepted messages whose checksums are kept for comparison with duplicates
TOO_OFTEN = 8  # the same message arriving damaged


class Acceptance(Enum):
    """What to do with a message that has arrived."""

    ACCEPT = auto()
    DROP = auto()


class Consumer:
    """Decides for queue `key`. `ready` holds accepted messages that nobody has taken yet, `window` at most.

    `wants` says that there is something to say to the producer at once.
    """

    def __init__(self, run: str, key: QueueKey, incarnation: int, window: int) -> None:
        self.key = key
        self.next = 0
        self.wants = True
        self.ready: deque[Message] = deque()
        self._run = run
        self._incarnation = incarnation
        self._window = window
        self._known: dict[int, Hashable] = {}
        self._granted = 0
        self._serial = 0
        self._resent = 0  # the serial of the newest Take that wanted a resend
        self._resend = False
        self._ask = True
        self._gap = -1  # the message whose absence has been complained about
        self._damages = 0
        self._pause = PATIENCE
        self._due = 0.0

    def judge(self, number: int, fingerprint: Hashable, *, whole: bool) -> Acceptance:
        """What to do with message `number`; `whole` says whether its tensors came with it.

        Raises `Disagreement` if it has arrived before with other bits.
        """
        if number == self.next and whole and number not in self._known:
            return Acceptance.ACCEPT
        if self._known.get(number, fingerprint) != fingerprint:
            raise Disagreement(
                f"message {number} of {self.key} came twice with different bits: what computed it was not "
                "deterministic. See that all operations are, and that software, hardware type and thread count are "
                "the same wherever the stage runs"
            )
        if number == self.next and whole:
            return Acceptance.ACCEPT
        if number >= self.next:
            self._miss()
        elif whole:
            self.wants = True  # the producer does not know how far we are
        return Acceptance.DROP

    def accept(self, message: Message, fingerprint: Hashable, now: float) -> None:
        """The next message is here, whole and undamaged."""
        self._known[self.next] = fingerprint
        if len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]
        self.ready.append(message)
        self.next += 1
        self._damages = 0
        self._pause = PATIENCE
        self._due = now + PATIENCE

    def damaged(self, reason: str) -> None:
        """The next message arrived damaged. Raises `BadMessage` when that has happened too often."""
        self._damages += 1
        if self._damages > TOO_OFTEN:
            raise BadMessage(
                f"message {self.next} of {self.key} arrived damaged {self._damages} times in a row: {reason}. "
                "Look at the network and the memory of the machines on the way"
            )
        self.lost()

    def pop(self) -> Message:
        """The first of `ready`, now taken."""
        message = self.ready.popleft()
        left = self._granted - (self.next - len(self.ready))
        if 2 * left <= self._window:
            self.wants = True
        return message

    def rewind(self, number: int) -> None:
        """Begins again at `number`."""
        self.ready.clear()
        self.next = number
        self._damages = 0
        self.lost()
        self.meet()

    def lost(self) -> None:
        """What was sent from the next message on may be lost: ask for it again."""
        self._gap = self.next
        self.wants = self._resend = True

    def meet(self) -> None:
        """There is a new producer, or a new way to it: tell it at once where this end is."""
        self.wants = self._ask = True
        self._pause = PATIENCE

    def request(self, now: float) -> Credit | None:
        """What to tell the producer now, if anything; `did_say` when it could be sent."""
        late = now >= self._due
        if not self.wants and not late:
            return None
        return Credit(
            self._run,
            self.key.flow,
            self.key.stage,
            self._incarnation,
            self._serial + 1,
            next=self.next,
            credit=self.next - len(self.ready) + self._window,
            resend=self._resend,
            ask=self._ask or late,
        )

    def did_say(self, take: Credit, now: float) -> None:
        self._serial, self._granted = take.serial, take.credit
        if take.resend:
            self._resent = take.serial
        if take.ask:
            self._due = now + self._pause
            self._pause = min(2 * self._pause, LONGEST)
        self.wants = self._resend = self._ask = False

    @property
    def due(self) -> float:
        """When to look at `request` again though nothing has happened."""
        return self._due

    def hear(self, standing: Retention) -> None:
        """What the producer answers. It came after all that was sent before it, so what is not here now is lost.

        Raises `Fenced` if the producer serves a newer incarnation, `QueueGap` if it has forgotten the next message.
        """
        if standing.incarnation > self._incarnation:
            raise Fenced(
                f"{self.key} is taken by incarnation {standing.incarnation} now; this worker is incarnation "
                f"{self._incarnation} and must stop"
            )
        if standing.serial < self._resent:
            return
        if standing.first > self.next:
            raise QueueGap(
                f"message {self.next} of {self.key} cannot be had any more: its producer keeps messages from "
                f"{standing.first} on. The stage was resumed from before the newest complete checkpoint"
            )
        if standing.sent > self.next:
            self.lost()

    def _miss(self) -> None:
        """The next message was lost on the way; one complaint is enough, the timer takes care of the rest."""
        if self._gap != self.next:
            self.lost()
