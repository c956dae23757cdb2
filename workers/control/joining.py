"""How a worker asks the broker for a place, and what it tells of itself: no sockets or threads.

Joining    Hello (every JOIN seconds) ............ until Assigned
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from stageline.broker.control.messages import Assigned, FromBroker, Hello, Refused, Standby, Stop
from stageline.broker.control.records import Inspection
from stageline.pipeline.errors import ExitCode, documented

JOIN = 0.5  # seconds between two Hellos of a worker that has no place


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
