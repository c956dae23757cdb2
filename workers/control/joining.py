"""The worker's side of the control protocol until it has a place, and what it tells of itself: no sockets or threads.

Joining    Hello (every JOIN seconds) ............ until Assigned
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from stageline.broker.control.messages import Assigned, FromBroker, Hello, Refused, Standby, Stop
from stageline.broker.control.records import Inspection
from stageline.pipeline.errors import ExitCode, StagelineError, documented

JOIN = 0.5  # seconds between two Hellos of a worker that has no place


class Stopped(StagelineError):
    """The end of a worker before its program is over.

    Attributes:
        exit_code: The exit code of the process.
        broker_knows: True if the worker leaves with a Goodbye, since the run need not end for it.
        over: True if the broker has said that the run is over.
    """

    def __init__(self, reason: str, exit_code: int, *, broker_knows: bool = False, over: bool = False) -> None:
        """Keep the exit code and the way to leave; `reason` is the text for people."""
        super().__init__(reason)
        self.exit_code = exit_code
        self.broker_knows = broker_knows
        self.over = over


class OwnStop(Stop, frozen=True):
    """A stop that this process itself has ordered: the run may go on."""


class NotAdmitted(Stopped):
    """Error that the broker has no place for a worker, or refuses it: another plan, code or version.

    Mend: Give every machine the same plan, the same code and the same version of stageline; `stageline status` shows
    which places are taken.

    Example: worker-1 uses control protocol version 20, the broker version 21; install the same stageline on both
    machines
    """

    error_code = "SL513"


class WorkersMissing(Stopped):
    """Error that the other workers of the run did not come in time.

    Mend: Start `stageline worker` for each place that `stageline status` shows as missing.

    Example: the other workers did not come within 600 s: see `stageline status`
    """

    error_code = "SL514"

    def __init__(self, reason: str) -> None:
        """Take the text for people."""
        super().__init__(reason, ExitCode.NO_WORKER)


class SnapshotInventory(Protocol):
    """A worker's view of a run's snapshots on its disk."""

    def snapshots(self, run: str) -> list[tuple[int, int]] | None:
        """Return (stage, step) of each snapshot of `run`, or None if they cannot be read."""

    def disk(self, run: str) -> str:
        """Return a name of the folder of `run` that no other folder has, "" if it has none."""

    def can_begin(self, assigned: Assigned) -> bool:
        """Return False if the snapshots that the place begins with were deleted after newer ones were written."""

    def inspect(self, run: str, step: int, claim: int | None) -> Inspection:
        """Read the snapshots of `step` and return which are intact.

        Args:
            run: The run's id.
            step: The step of the snapshots.
            claim: Index of the worker whose stages are read; None for all stages found.
        """

    def abandon(self, assigned: Assigned) -> None:
        """Delete the snapshots of the place after its first step that are older than the last restart of the whole run.

        Raises an error if they cannot be deleted.
        """


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """A worker's description of itself for the broker.

    Attributes:
        base: A Hello with the fields that all of this worker's Hellos share.
        disk: The worker's snapshots; None in a run whose workers are not replaced.
        why_not: Returns why the run that a broker names cannot be this worker's run, or None if it can. It is called
            before anything of that run is read or changed.
    """

    base: Hello
    disk: SnapshotInventory | None = None
    why_not: Callable[[str], str | None] = lambda run: None

    def hello(self, run: str, **changes: object) -> Hello:
        """Return a Hello with `changes` to the base and the snapshots of `run`.

        Args:
            run: The run's id, or "" if it is not known; then the snapshots are not known either, and stay None.
            **changes: Fields that differ from the base.
        """
        snapshots = self.disk.snapshots(run) if run and self.disk is not None else None
        return msgspec.structs.replace(self.base, snapshots=snapshots, **changes)


class Joining:
    """A worker's request for a place, which is repeated while the worker stands by.

    Attributes:
        urgent: True if the next `hello` is to be sent at once.
    """

    def __init__(self, identity: WorkerIdentity) -> None:
        """Start without a run, an inspection or a declined place."""
        self.urgent = False
        self._identity = identity
        self._inspection: Inspection | None = None  # the newest
        self._run = ""
        self._declined = 0  # the incarnation of a place that could not be taken

    def hello(self) -> Hello:
        """Return the Hello to send now, and again every JOIN seconds."""
        self.urgent = False
        return self._identity.hello(self._run, incarnation=self._declined, inspection=self._inspection)

    def receive(self, message: FromBroker) -> Assigned | None:
        """Return the place that `message` assigns, or None if there is none yet.

        Raises:
            NotAdmitted: The broker refuses this worker.
            Stopped: The broker ends the run, or the run cannot be this worker's.
        """
        match message:
            case Assigned() as assigned:
                return self._consider(assigned)
            case Standby(_, run, step) if run:
                self._enter(run)
                self._declined = 0
                self._inspect(step)
            case Refused(reason, code, over):
                raise NotAdmitted(reason, documented(code), over=over)
            case Stop(reason, code):
                raise Stopped(reason, documented(code), over=True)
        return None

    def _consider(self, assigned: Assigned) -> Assigned | None:
        """Return the place, or None if the snapshots to begin with are gone.

        In that case the broker's records are old; the next Hello says so.
        """
        self._enter(assigned.run)
        disk = self._identity.disk
        if disk is not None and not disk.can_begin(assigned):
            self._declined = assigned.incarnation
            return None
        if disk is not None and assigned.since:
            disk.abandon(assigned)
        return assigned

    def _enter(self, run: str) -> None:
        """Make `run` the worker's run. Raises `Stopped` if the worker's identity rules that run out."""
        if run != self._run and (reason := self._identity.why_not(run)) is not None:
            raise Stopped(reason, ExitCode.REFUSED)
        self._run = run

    def _inspect(self, step: int) -> None:
        """Read the snapshots that the broker asks about, once for each step."""
        disk, last = self._identity.disk, self._inspection
        if disk is None or not step or (last is not None and last.step == step):
            return
        self._inspection = disk.inspect(self._run, step, self._identity.base.claim)
        self.urgent = True
