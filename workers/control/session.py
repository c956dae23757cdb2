"""What a worker sends to the broker and when, how it seals that, and how it takes the answers: no sockets or threads.

    Joining    Hello (every JOIN seconds) ............ until Assigned
    Session    Hello (whenever the broker may be another one), Report (every BEAT seconds), Finished, until Stop

Times are monotonic, in seconds.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import msgspec

from stageline.broker.control.messages import (
    Assigned,
    Confirmed,
    Failed,
    Finished,
    FromBroker,
    Goodbye,
    Hello,
    Refused,
    Report,
    ScheduleOrders,
    Standby,
    Stop,
)
from stageline.broker.control.records import Inspection
from stageline.pipeline.errors import ExitCode, documented

from .reporter import Reporter

WorkerMessage = Hello | Report | Failed | Finished | Goodbye

JOIN = 0.5  # seconds between two Hellos of a worker that has no place
BEAT = 0.1  # seconds between two reports
AGAIN = 0.25  # seconds after which an unanswered Hello is sent again
UNANSWERED = 2.0  # seconds without a message from the broker, which confirms every report, until Hello is sent again


class Stopped(Exception):
    """The worker exits before its program is over, with exit code `code`. `broker_knows`: it leaves with a Goodbye,
    since the run need not be ended for it."""

    def __init__(self, reason: str, code: int, *, broker_knows: bool = False) -> None:
        super().__init__(reason)
        self.code = code
        self.broker_knows = broker_knows


class NotAdmitted(Stopped):
    """The broker has no place for a worker that asks for one."""


class SnapshotInventory(Protocol):
    """What a worker finds of a run's snapshots."""

    def snapshots(self, run: str) -> list[tuple[int, int]] | None:
        """(stage, step) of each; None if they cannot be looked at."""

    def can_begin(self, assigned: Assigned) -> bool:
        """Whether the place can be taken: not if the snapshots to begin with were deleted after newer ones."""

    def inspect(self, run: str, step: int, claim: int | None) -> Inspection:
        """Reads the snapshots of `step`: of the stages of worker `claim`, or of all that there are."""

    def abandon(self, assigned: Assigned) -> None:
        """Deletes the place's snapshots of steps after that which it begins at, as far as the run was restarted as a
        whole since they were written. Raises if it cannot."""


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """How a worker introduces itself: `base` has what is the same in each of its Hellos. `disk`: None in a run whose
    workers are not replaced. `why_not(run)` says why the run that a broker names cannot be this worker's; nothing of
    that run is read or changed before."""

    base: Hello
    disk: SnapshotInventory | None = None
    why_not: Callable[[str], str | None] = lambda run: None

    def hello(self, run: str, **changes: object) -> Hello:
        """`run`: the run's id, "" if it is not known; then it is not known either which snapshots are the run's."""
        snapshots = self.disk.snapshots(run) if run and self.disk is not None else None
        return msgspec.structs.replace(self.base, snapshots=snapshots, **changes)


class Joining:
    """Asks for a place, and stands by for one. `urgent`: `hello` is to be sent at once."""

    def __init__(self, identity: WorkerIdentity) -> None:
        self.urgent = False
        self._identity = identity
        self._inspection: Inspection | None = None  # the newest
        self._run = ""
        self._declined = 0  # the incarnation of a place that could not be taken

    def hello(self) -> Hello:
        """What to send now, and every JOIN seconds."""
        self.urgent = False
        return self._identity.hello(self._run, incarnation=self._declined, inspection=self._inspection)

    def receive(self, message: FromBroker) -> Assigned | None:
        """The place, if there is one now. Raises `Stopped`."""
        match message:
            case Assigned() as assigned:
                return self._consider(assigned)
            case Standby(_, run, step) if run:
                self._enter(run)
                self._declined = 0
                self._inspect(step)
            case Refused(reason, code):
                raise NotAdmitted(reason, documented(code))
            case Stop(reason, code):
                raise Stopped(reason, documented(code))
        return None

    def _consider(self, assigned: Assigned) -> Assigned | None:
        """If what to begin with is gone, the broker's records are old: it learns that from the next hello."""
        self._enter(assigned.run)
        disk = self._identity.disk
        if disk is not None and not disk.can_begin(assigned):
            self._declined = assigned.incarnation
            return None
        if disk is not None and assigned.since:
            disk.abandon(assigned)
        return assigned

    def _enter(self, run: str) -> None:
        """From now on `run` is the run. Raises `Stopped` if it cannot be."""
        if run != self._run and (reason := self._identity.why_not(run)) is not None:
            raise Stopped(reason, ExitCode.REFUSED)
        self._run = run

    def _inspect(self, step: int) -> None:
        """Reads the snapshots that the broker asks about, once."""
        disk, last = self._identity.disk, self._inspection
        if disk is None or not step or (last is not None and last.step == step):
            return
        self._inspection = disk.inspect(self._run, step, self._identity.base.claim)
        self.urgent = True


class Session:
    """Of a worker that is `assigned` its place, and whose queues are at `endpoint`.

    `outbox`: what is to be sent before the next report, in order; `Finished` is sent after all reports, until the
    broker stops the run. `last_received`: when the broker's last message came.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        assigned: Assigned,
        endpoint: str,
        reporter: Reporter,
        outbox: deque[Failed | Finished | Goodbye],
        *,
        now: float,
    ) -> None:
        self.last_received = now
        self._identity = identity
        self._assigned = assigned
        self._endpoint = endpoint
        self._progress = reporter.progress
        self.reporter = reporter
        self._known = False  # whether the broker has answered the Hello that was sent over this connection
        self._hello_sent = float("-inf")
        self._outbox = outbox
        self._finished: Finished | None = None
        self._parting: Failed | Goodbye | None = None  # of a worker: it says nothing else any more

    def reconnected(self) -> None:
        """There is a new connection, perhaps to another broker, which knows neither this worker nor its endpoint; and
        the last messages of the former one may be lost. A new Hello is answered with the endpoints of the peers."""
        self._known = False
        self.reporter.resend_all(self.reporter.incarnation)

    def may_hear(self, message: FromBroker) -> bool:
        """True if `message` counts though it is not sealed for this worker: its place was given by a broker whose
        records are lost, and with them the secrets, or another broker refuses it. Only as long as no broker has proven
        over this connection that it is the former one."""
        renews = isinstance(message, Assigned) and message.keep and message.incarnation > self.reporter.incarnation
        return not self._known and (renews or isinstance(message, Refused))

    def due(self, now: float) -> Iterator[WorkerMessage]:
        """What to send in this beat. Once a worker has said that it ends, it repeats that: if it said anything else,
        the broker would take it for alive."""
        if self._parting is not None:
            yield self._parting
            return
        if now - self.last_received > UNANSWERED:
            self._known = False
        if not self._known and now - self._hello_sent >= AGAIN:
            self._hello_sent = now
            yield self._hello()
        yield from self.unsent()
        yield from self._reports(now)

    def _reports(self, now: float) -> Iterator[WorkerMessage]:
        if self._parting is not None:
            return
        # Finished steps can be many bytes, and the broker limits what comes before it knows from whom.
        yield self.reporter.report(now) if self._known else self.reporter.heartbeat(now)
        if self._finished is not None and self.reporter.all_confirmed:
            yield msgspec.structs.replace(self._finished, incarnation=self.reporter.incarnation)

    def unsent(self) -> Iterator[WorkerMessage]:
        """What is left to be sent if there is no other beat."""
        while self._outbox:
            message = self._outbox.popleft()
            if isinstance(message, Finished):
                self._finished = message
            else:
                message = msgspec.structs.replace(message, incarnation=self.reporter.incarnation)
                if not self._progress.leaves_before_its_end:
                    self._parting = message
                yield message

    def receive(self, message: FromBroker, now: float) -> FromBroker | None:
        """Return the broker's message, or the part of it that is a command for the compute loop.

        A broker that had lost its records may have learned from others of orders that this worker does not know. They
        come with the place that the worker keeps, before its peers do: until then it may not have begun a step.
        """
        self.last_received = now
        match message:
            case Confirmed(number):
                self.reporter.confirmed(number)
            case Assigned():
                self._known = True
                if message.keep and message.incarnation > self.reporter.incarnation:  # the broker had lost its records
                    self.reporter.resend_all(message.incarnation)
                    return ScheduleOrders(message.orders, message.closed)
            case _:
                return message
        return None

    def _hello(self) -> Hello:
        run, index = self._assigned.run, self._assigned.index
        # First the disk, then the memory: the loop goes on meanwhile, and must not seem to be behind its snapshots.
        incarnation = self.reporter.incarnation
        here = {"endpoint": self._endpoint, "queues": self._progress.ends}
        hello = self._identity.hello(run, incarnation=incarnation, spare=False, **here)
        if self._identity.disk is None:
            return hello
        return msgspec.structs.replace(hello, memory=self._progress.memory(run, index))
