"""Lost workers: the rule by which a member counts as lost, the replacements of lost ones, and the standby processes.

A worker is lost if it is silent, loads, or is in one action for too long, or if its process has ended. A worker that
waits for a message is not to blame for making no progress. When all of them wait, the messages do not arrive:
`Standstill` notices that. The script is lost by silence alone, or by its process's end: its user's code may take hours
between two calls.

    lost ──> pending, place empty ──(a worker is placed)──> pending, place taken ──(it completes an action)──> done
                  └──(no worker comes in time)──> the run is given up
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from .member import Member, MemberStatus
from .registry import Contact, ProcessKey, may_take

MOST = 1000  # processes that stand by at a time, beside one for each place
SILENCE = 3.0  # seconds after which a worker on standby, which should send Hello every second, is gone
EXIT_GRACE = 0.5  # seconds that a process's last messages may arrive after the news of its exit
PARTING = 1.0  # seconds of silence after which a worker is believed that it ends: it reports ten times a second
KILL_GRACE = 0.1  # likewise for a process that was killed
SUPERSEDED_AFTER = 2.0  # seconds of silence after which a worker counts as lost while another asks for its place
STANDSTILL_LEASES, STANDSTILL_LEAST = 6, 60.0  # a standstill ends the run after that many leases, and that many seconds


@dataclass(frozen=True, slots=True)
class Leases:
    """The longest silence, action and loading of a worker, in seconds, before it counts as lost.

    `loading` applies until the worker is ready to work.
    """

    silence: float
    action: float
    loading: float


@dataclass(frozen=True, slots=True)
class WorkerLoss:
    """A worker's loss, with its cause.

    Attributes:
        member: The lost worker.
        why: The end of a sentence about the worker.
        exited: True if its process has ended.
        result: The exit code that its command returned, if it did.
    """

    member: Member
    why: str
    exited: bool = False
    result: int | None = None


def losses(members: Iterable[Member], leases: Leases, now: float) -> list[WorkerLoss]:
    """Return the losses among `members`.

    Args:
        members: Members that messages are still sent to.
        leases: The limits.
        now: Seconds since the epoch.
    """
    found = (loss_of(member, leases, now) for member in members)
    return [loss for loss in found if loss is not None]


def loss_of(member: Member, leases: Leases, now: float) -> WorkerLoss | None:
    """Return the loss of `member` if it counts as lost, else None.

    Args:
        member: The worker, or the script.
        leases: The limits.
        now: Seconds since the epoch.
    """
    if member.exited is not None:
        when, end = member.exited
        if now - when >= (EXIT_GRACE if end.status >= 0 else KILL_GRACE):
            return WorkerLoss(member, member.describe_end(end), exited=True, result=end.result)
    silence, stalled = now - member.last_seen, member.stalled(now)
    if member.superseded and silence >= SUPERSEDED_AFTER:
        return WorkerLoss(member, f"was silent for {silence:.1f} s while another process asked for its place")
    key, longest = silence_limit(member, leases)
    if silence >= longest:
        return WorkerLoss(member, f"was silent for {silence:.1f} s ({key} is {longest:g} s)")
    if stalled >= leases.action:
        return WorkerLoss(
            member,
            f"is alive, but completed no action for {stalled:.1f} s; if one may take this long, "
            f"raise recovery.action ({leases.action:g} s)",
        )
    return None


def silence_limit(member: Member, leases: Leases) -> tuple[str, float]:
    """Return the plan's key that bounds the silence of `member`, and its seconds.

    A worker promoted from standby was ready to answer; any other may load its model before it does.
    """
    starting = not member.introduced and (member.aware or not member.promoted)
    if starting and leases.loading > leases.silence:
        return "recovery.loading", leases.loading
    return "recovery.lease", leases.silence


class Standstill:
    """A measurement of how long all workers have been waiting for each other."""

    def __init__(self, lease: float) -> None:
        """Start without a standstill; `lease` is in seconds and sets the `bound` after which the run is given up."""
        self.bound = max(STANDSTILL_LEAST, STANDSTILL_LEASES * lease)  # seconds after which the run is given up
        self._actions = -1
        self._since = 0.0

    def lasts(self, members: Iterable[Member], now: float) -> float:
        """Return the seconds of the standstill at `now`.

        Returns 0 if a worker computes, has completed an action, or has yet to report.
        """
        reports = [member.report for member in members if member.status is MemberStatus.PRESENT]
        waiting = [report for report in reports if report is not None and report.waiting]
        actions = sum(report.actions + report.copies.chunks for report in waiting)
        if not reports or len(waiting) < len(reports) or actions != self._actions:
            self._actions, self._since = actions, now
        return now - self._since


class Replacement(msgspec.Struct, frozen=True):
    """A pending replacement of the worker of place `index`, whose process was `pid` on `host`.

    Times are seconds since the epoch.
    """

    index: int
    since: float  # when the worker was found to be lost
    why: str
    pid: int
    awaited: float  # the deadline for a replacement to come counts from here
    how: str = ""  # its end or its silence alone, continuing a sentence about it
    host: str = ""
    left: bool = False  # the worker has left on notice


class Replacements:
    """The pending replacements by index, with counts of all replacements."""

    def __init__(self, pending: Iterable[Replacement] = ()) -> None:
        """Start with the `pending` replacements, and with no counts."""
        self.pending = {each.index: each for each in pending}
        self.in_a_row: Counter[int] = Counter()  # by index: replaced since the newest complete checkpoint
        self.ever: Counter[int] = Counter()  # by index: replaced in this run

    def generation(self, index: int) -> int:
        """Return the number of the place's present worker, or of its next one: 1 for the first."""
        return self.ever[index] + 1

    def count(self, index: int, *, failed: bool = True) -> None:
        """Count the loss of a worker, or of a process that was to become one; one that left on notice did not fail."""
        self.in_a_row[index] += failed
        self.ever[index] += 1

    def explain(self, index: int, detail: str) -> bool:
        """Add the `detail` that a lost process has told at its end. Return False if it is not new."""
        pending = self.pending[index]
        new = bool(detail) and detail not in pending.why
        if new:
            self.pending[index] = msgspec.structs.replace(pending, why=f"{pending.why}. It was {detail}")
        return new

    def clear(self) -> None:
        """Forget the pending replacements and the counts in a row; the run's totals stay."""
        self.pending.clear()
        self.in_a_row.clear()

    def restart_deadlines(self, now: float) -> None:
        """Start the time to wait for each replacement over: the broker itself was away."""
        for index, pending in self.pending.items():
            self.pending[index] = msgspec.structs.replace(pending, awaited=now)


class StandbyWorkers(dict[ProcessKey, Contact]):
    """A table of the contacts on standby by `process_key`, in the order in which they came.

    A repeated Hello keeps its turn.
    """

    def take(self, index: int, stages: Sequence[int], *, length_known: bool = True) -> Contact | None:
        """Remove and return the first process that may have place `index`; None if there is none.

        Args:
            index: The place's index.
            stages: The place's stages.
            length_known: True if the run's length is known; else only processes that need no length may have the place.
        """
        able = ((key, contact.hello) for key, contact in self.items() if length_known or not contact.hello.needs_length)
        found = next((key for key, hello in able if may_take(hello.claim, index, stages)), None)
        return None if found is None else self.pop(found)

    def prune(self, now: float) -> None:
        """Remove processes that have been silent for SILENCE seconds or more."""
        for key in [key for key, contact in self.items() if now - contact.last_seen >= SILENCE]:
            del self[key]
