"""What a worker sends to the broker and when, and how it takes the answers: no sockets, no threads, no clock.

    Joining    Hello (every JOIN seconds) ............ until Assigned
    Session    Hello (whenever the broker may be another one), Report (every BEAT seconds), Finished, until Stop

Times are monotonic, in seconds.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import msgspec

from stageline.broker.control.protocol import (
    CONTROL_VERSION,
    WAITS,
    Assigned,
    Failed,
    Finished,
    FromBroker,
    Goodbye,
    Heard,
    Hello,
    Inspection,
    Refused,
    Report,
    Standby,
    Stop,
    ToBroker,
)
from stageline.workers.runtime.progress import Progress

from .reporter import Reporter

JOIN = 0.5  # seconds between two Hellos of a worker that has no place
BEAT = 0.1  # seconds between two reports
AGAIN = 0.25  # seconds after which an unanswered Hello is sent again
UNANSWERED = 2.0  # seconds without a message from the broker, which confirms every report, until Hello is sent again


class Stopped(Exception):
    """The worker exits before its program is over, with exit code `code`. `told`: the broker knows of it."""

    def __init__(self, reason: str, code: int, *, told: bool = False) -> None:
        super().__init__(reason)
        self.code = code
        self.told = told


class TurnedAway(Stopped):
    """The broker refuses this worker a place, or ends the run before it had one."""


class SnapshotInventory(Protocol):
    """What a worker finds of a run's snapshots."""

    def snapshots(self, run: str) -> list[tuple[int, int]] | None:
        """(stage, step) of each; None if they cannot be looked at."""

    def can_begin(self, assigned: Assigned) -> bool:
        """Whether the place can be taken: not if the snapshots to begin with were deleted after newer ones."""

    def inspect(self, run: str, step: int, claim: int | None) -> Inspection:
        """Reads the snapshots of `step`: of the stages of worker `claim`, or of all that there are."""

    def abandon(self, assigned: Assigned) -> None:
        """Deletes the place's snapshots of steps after that which it begins at. Raises if it cannot."""


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """How a worker introduces itself, see `Hello`. `disk`: None in a run whose workers are not replaced."""

    plan: str
    name: str
    host: str
    pid: int
    claim: int | None
    settings: dict[str, object]
    disk: SnapshotInventory | None = None
    spare: bool = False

    def hello(
        self,
        *,
        run: str = "",
        endpoint: str = "",
        incarnation: int = 0,
        inspection: Inspection | None = None,
    ) -> Hello:
        """`run`: the run's id, if that is known; then it can be told which snapshots are the run's."""
        return Hello(
            CONTROL_VERSION,
            self.plan,
            self.name,
            self.host,
            self.pid,
            endpoint,
            self.claim,
            incarnation,
            self.settings,
            self.spare and not endpoint,
            None,
            self.disk.snapshots(run) if run and self.disk is not None else None,
            inspection,
        )


class Joining:
    """Asks for a place, and stands by for one. `urgent`: `hello` is to be sent at once."""

    def __init__(self, identity: WorkerIdentity) -> None:
        self.urgent = False
        self._identity = identity
        self._inspection: Inspection | None = None  # the newest, and the highest step of all
        self._inspected = 0
        self._run = ""
        self._declined = 0  # the incarnation of a place that could not be taken

    def hello(self) -> Hello:
        """What to send now, and every JOIN seconds."""
        self.urgent = False
        return self._identity.hello(run=self._run, incarnation=self._declined, inspection=self._inspection)

    def receive(self, message: FromBroker) -> Assigned | None:
        """The place, if there is one now. Raises `TurnedAway`."""
        match message:
            case Assigned() as assigned:
                return self._consider(assigned)
            case Standby(_, run, step) if run:
                self._run, self._declined = run, 0
                self._inspect(step)
            case Refused(reason, code) | Stop(reason, code):
                raise TurnedAway(reason, code)
        return None

    def _consider(self, assigned: Assigned) -> Assigned | None:
        """If what to begin with is gone, the broker's records are old: it learns that from the next hello."""
        self._run = assigned.run
        disk = self._identity.disk
        if disk is not None and not disk.can_begin(assigned):
            self._declined = assigned.incarnation
            return None
        if disk is not None and assigned.step < self._inspected:
            disk.abandon(assigned)
        return assigned

    def _inspect(self, step: int) -> None:
        """Reads the snapshots that the broker asks about, once."""
        disk, last = self._identity.disk, self._inspection
        if disk is None or not step or (last is not None and last.step == step):
            return
        self._inspection = disk.inspect(self._run, step, self._identity.claim)
        self._inspected = max(self._inspected, step)
        self.urgent = True


def acknowledgement(assigned: Assigned, now: float) -> Report:
    """What a worker sends as soon as it is given a place, at `now` (seconds since the epoch): it may take longer than
    a lease until it has loaded what it needs and reports regularly."""
    return Report(assigned.incarnation, 0, f"{WAITS} for its queues and its model", since=now, idle=1.0)


class Session:
    """Of a worker that is `assigned` its place, and whose queues are at `endpoint`.

    `outbox`: what is to be sent before the next report, in order; `Finished` is sent after all reports, until the
    broker stops the run. `last_received`: when the broker's last message came. `clock` gives the seconds since the
    epoch.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        assigned: Assigned,
        endpoint: str,
        progress: Progress,
        outbox: deque[Failed | Finished | Goodbye],
        *,
        steps: int,
        now: float,
        clock: Callable[[], float],
    ) -> None:
        self.last_received = now
        self._identity = identity
        self._assigned = assigned
        self._endpoint = endpoint
        self._progress = progress
        self._reporter = Reporter(progress, assigned.incarnation, steps, clock)
        self._known = False  # whether the broker has answered the Hello that was sent over this connection
        self._hello_sent = float("-inf")
        self._outbox = outbox
        self._finished: Finished | None = None

    @property
    def incarnation(self) -> int:
        """The worker's own: another one than it was assigned first if the broker has lost its records since."""
        return self._assigned.incarnation

    @property
    def all_confirmed(self) -> bool:
        """Whether the broker has stored all finished steps and snapshots."""
        return self._reporter.all_confirmed

    def reconnected(self) -> None:
        """There is a new connection, perhaps to another broker, which knows neither this worker nor its endpoint; and
        the last messages of the former one may be lost. A new Hello is answered with the endpoints of the peers."""
        self._known = False
        self._reporter.resend_all(self.incarnation)

    def due(self, now: float) -> Iterator[ToBroker]:
        """What to send in this beat."""
        if now - self.last_received > UNANSWERED:
            self._known = False
        if not self._known and now - self._hello_sent >= AGAIN:
            self._hello_sent = now
            yield self._hello()
        yield from self.unsent()
        yield self._reporter.report(now)
        if self._finished is not None and self.all_confirmed:
            yield msgspec.structs.replace(self._finished, incarnation=self.incarnation)

    def unsent(self) -> Iterator[ToBroker]:
        """What is left to be sent if there is no other beat."""
        while self._outbox:
            message = self._outbox.popleft()
            if isinstance(message, Finished):
                self._finished = message
            else:
                yield msgspec.structs.replace(message, incarnation=self.incarnation)

    def receive(self, message: FromBroker, now: float) -> FromBroker | None:
        """The broker's message, if it is a command for the compute loop."""
        self.last_received = now
        match message:
            case Heard(number):
                self._reporter.confirmed(number)
            case Assigned():
                self._known = True
                self._keep_place(message)
            case _:
                return message
        return None

    def _keep_place(self, assigned: Assigned) -> None:
        """The broker had lost its records: the worker continues under a new incarnation."""
        if assigned.keep and assigned.incarnation > self.incarnation:
            self._assigned = assigned
            self._reporter.resend_all(assigned.incarnation)

    def _hello(self) -> Hello:
        run, index = self._assigned.run, self._assigned.index
        # First the disk, then the memory: the loop goes on meanwhile, and must not seem to be behind its snapshots.
        hello = self._identity.hello(run=run, endpoint=self._endpoint, incarnation=self.incarnation)
        if self._identity.disk is None:
            return hello
        return msgspec.structs.replace(hello, memory=self._progress.memory(run, index))
