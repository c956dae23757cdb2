"""Actions of a compute loop, and the waits between them with their causes.

They go into the records of a step.
"""

from collections.abc import Iterable

import msgspec

from stageline.broker.control.records import Lack, Wait
from stageline.broker.ledger.times import ENTRY, LEAST, LETTERS, NO_STAGE, WaitCause
from stageline.pipeline.program import Instruction, Program

from .machine import AwaitCredit, Take

MOST_WAITS = 64  # between two actions, of which each is kept on its own

Waited = tuple[WaitCause, Take | AwaitCredit | None, float, float]  # for what, the command if any, from when to when


class Doing(msgspec.Struct, frozen=True):
    """The work of a process at one instant, for a report.

    `said` is the work in words, `waits` what it waits for. `computing` says from when on it has computed without a
    break, and until when if that is over; None while it waits. `stage` is the stage that computes, if one does.
    """

    said: str
    waits: tuple[Wait, ...] = ()
    computing: tuple[float, float | None] | None = None
    stage: int | None = None


class Done(msgspec.Struct):
    """An action of the step that is still open at its stage, with its start and end in seconds since the epoch.

    `waits` are those before it and in it, in order.
    """

    instruction: Instruction
    start: float
    end: float
    waits: tuple[Waited, ...] = ()


def times_of(done: Iterable[Done], program: Program | None) -> bytes:
    """Return `StepRecord.times` for actions in the order in which they ran, and for the waits around them.

    The other ends of queues are as `program` has them; None, if it is not known.
    """
    packed = []
    for each in done:
        action, after = each.instruction.op.action, b""
        for cause, lacking, start, end in each.waits:
            entry = ENTRY.pack(LETTERS[cause], _other(cause, lacking, program), start, end)
            if cause is WaitCause.ROOM:
                after = entry
            else:
                packed.append(entry)
        packed.append(ENTRY.pack(action.kind.encode(), action.microbatch, each.start, each.end))
        if after:
            packed.append(after)
    return b"".join(packed)


def _other(cause: WaitCause, lacking: Take | AwaitCredit | None, program: Program | None) -> int:
    """Return the stage at the other end of the queue that is waited for."""
    if lacking is None or program is None:
        return NO_STAGE
    queue = program.queues[lacking.queue]
    other = queue.source if cause is WaitCause.MESSAGE else queue.target
    return NO_STAGE if other is None else other


class CallWait(msgspec.Struct, frozen=True):
    """A wait for a call that has not come, or for room to put a message (`lacks`).

    `said` continues "waits for". Message `number` of `queue` brings the call `name`; `queue` is "" if the broker does.
    `cause` is that of the wait in the records of a step.
    """

    said: str
    queue: str = ""
    number: int = 0
    name: str = ""
    lacks: Lack = Lack.MESSAGE
    cause: WaitCause = WaitCause.SCRIPT


class IdleTime:
    """The time since the last action, divided into waits. Times are in seconds since the epoch.

    The loop says what it waits for before it waits, without a look at the clock; the wait ends with the next event that
    has a time. Waits shorter than `LEAST` are not kept. Between two actions there may be any number of calls that do
    not train: from `MOST_WAITS` waits on, the last one of a cause grows by the others, and may then overlap others.
    """

    def __init__(self, now: float = 0.0) -> None:
        """Begin at `now`, with no wait."""
        self._since = now  # when the last action or the last of the waits ended
        self._cause: WaitCause | None = None
        self._lacking: Take | AwaitCredit | None = None
        self._waits: list[Waited] = []

    def lacks(self, lacking: Take | AwaitCredit) -> None:
        """Note that a message or credit is waited for, which may be there already."""
        self._cause = WaitCause.MESSAGE if type(lacking) is Take else WaitCause.CREDIT
        self._lacking = lacking

    def awaits(self, cause: WaitCause) -> None:
        """Note that the next call is waited for, for `cause`."""
        self._cause, self._lacking = cause, None

    def ends(self, now: float) -> None:
        """Note that what was waited for is there."""
        if self._cause is not None and now - self._since >= LEAST:
            self.note((self._cause, self._lacking, self._since, now))
        self._since, self._cause, self._lacking = now, None, None

    def lap(self, now: float, cause: WaitCause) -> None:
        """Note that all time since the last event went into `cause`."""
        last = self._waits[-1] if self._waits else None
        if last is not None and last[0] is cause and last[3] == self._since:
            self._waits[-1] = (cause, None, last[2], now)
        else:
            self.note((cause, None, self._since, now))
        self._since, self._cause, self._lacking = now, None, None

    def note(self, waited: Waited) -> None:
        """Keep a wait, unless it is too short."""
        if waited[3] - waited[2] < LEAST:
            return
        if len(self._waits) < MOST_WAITS or not self._grown(*waited):
            self._waits.append(waited)

    def _grown(self, cause: WaitCause, lacking: Take | AwaitCredit | None, start: float, end: float) -> bool:
        """Return True if the last wait of the same cause has been prolonged by this one; False if there is none."""
        for place in reversed(range(len(self._waits))):
            found = self._waits[place]
            if found[0] is cause and found[1] is lacking:
                self._waits[place] = (cause, lacking, found[2], found[3] + end - start)
                return True
        return False

    def taken(self, now: float) -> tuple[Waited, ...]:
        """Return the waits before the action that has ended at `now`, and begin the next ones."""
        waits: tuple[Waited, ...] = ()
        if self._waits:
            waits = tuple(self._waits)
            self._waits.clear()
        self._since, self._cause, self._lacking = now, None, None
        return waits
