"""The life of a run as its broker sees it: one table of states and events. Pure.

STARTING ──> RECONNECTING ──┬──> RECONCILING ──┬──> CHOOSING_CHECKPOINT
    │             │         │         │        │             │
    └─────────────┴─────────┴─────────┴────────┴─────────────┴──> WAITING ──> RUNNING ──> STOPPING
                                                                      (all present)   (stop requested)

RECONCILING is also entered from every later state of a run that is not over, when a worker proves the records
lost or stale. From there the run continues at WAITING, as after every restart.

RUNNING, STOPPING ──(all workers finished)──────────> FINISHED ──┐
any but STARTING and RUNNING ──(its stop is due)────> STOPPED  ──┼──(another stop request)──> DISMISSED
any that is not over ──(failure)────────────────────> FAILED   ──┘

From the records, STARTING reaches FINISHED and FAILED too; so do RECONNECTING and WAITING reach FINISHED, by reports
of workers that finished while the broker was away.
"""

from collections.abc import Mapping
from enum import StrEnum


class RunState(StrEnum):
    """What the broker is doing for the run."""

    STARTING = "starting"  # reading the stored records
    RECONNECTING = "reconnecting"  # after a broker restart: workers that still run have one lease to reconnect
    RECONCILING = "reconciling"  # the records are lost or stale: collecting what the workers and the disks know
    CHOOSING_CHECKPOINT = "choosing checkpoint"  # a resumed run: workers verify their snapshots before they are placed
    WAITING = "waiting"  # for workers of the plan that have not joined yet
    RUNNING = "running"
    STOPPING = "stopping"  # a stop was requested; the step that all stages can stop after is not known yet
    STOPPED = "stopped"  # on request; workers may still report newer snapshots
    FINISHED = "finished"  # all steps are done
    FAILED = "failed"
    DISMISSED = "dismissed"  # over, and nothing is left for the broker to do


class RunEvent(StrEnum):
    """What moves a run from one state to the next."""

    BROKER_RESTARTED = "broker restarted"  # to resume a run without a recorded end
    RECORDS_LOST = "records lost"  # or older than the run
    CHECKPOINT_UNVERIFIED = "checkpoint unverified"  # every stage starts at a checkpoint that has not been read back
    START_KNOWN = "start known"  # at which step each stage starts: places may be given
    ALL_PRESENT = "all present"  # every worker of the plan has joined
    STOP_REQUESTED = "stop requested"
    STOP_DUE = "stop due"
    ALL_FINISHED = "all finished"
    FAILURE = "failure"


class IllegalRunEvent(Exception):
    """An event that cannot happen in the run's state: a bug in the coordinator."""


OVER = frozenset({RunState.STOPPED, RunState.FINISHED, RunState.FAILED, RunState.DISMISSED})

_S, _E = RunState, RunEvent

TRANSITIONS: Mapping[tuple[RunState, RunEvent], RunState] = {
    (_S.STARTING, _E.BROKER_RESTARTED): _S.RECONNECTING,
    (_S.STARTING, _E.RECORDS_LOST): _S.RECONCILING,
    (_S.STARTING, _E.CHECKPOINT_UNVERIFIED): _S.CHOOSING_CHECKPOINT,
    (_S.STARTING, _E.START_KNOWN): _S.WAITING,
    (_S.STARTING, _E.ALL_FINISHED): _S.FINISHED,  # so the records say
    (_S.STARTING, _E.FAILURE): _S.FAILED,  # likewise, and of a stopped run too
    (_S.RECONNECTING, _E.RECORDS_LOST): _S.RECONCILING,
    (_S.RECONNECTING, _E.CHECKPOINT_UNVERIFIED): _S.CHOOSING_CHECKPOINT,
    (_S.RECONNECTING, _E.START_KNOWN): _S.WAITING,
    (_S.RECONNECTING, _E.STOP_REQUESTED): _S.RECONNECTING,
    (_S.RECONNECTING, _E.STOP_DUE): _S.STOPPED,
    (_S.RECONNECTING, _E.ALL_FINISHED): _S.FINISHED,
    (_S.RECONNECTING, _E.FAILURE): _S.FAILED,
    (_S.RECONCILING, _E.CHECKPOINT_UNVERIFIED): _S.CHOOSING_CHECKPOINT,
    (_S.RECONCILING, _E.START_KNOWN): _S.WAITING,
    (_S.RECONCILING, _E.STOP_REQUESTED): _S.RECONCILING,
    (_S.RECONCILING, _E.STOP_DUE): _S.STOPPED,
    (_S.RECONCILING, _E.FAILURE): _S.FAILED,
    (_S.CHOOSING_CHECKPOINT, _E.RECORDS_LOST): _S.RECONCILING,
    (_S.CHOOSING_CHECKPOINT, _E.START_KNOWN): _S.WAITING,
    (_S.CHOOSING_CHECKPOINT, _E.STOP_REQUESTED): _S.CHOOSING_CHECKPOINT,
    (_S.CHOOSING_CHECKPOINT, _E.STOP_DUE): _S.STOPPED,
    (_S.CHOOSING_CHECKPOINT, _E.FAILURE): _S.FAILED,
    (_S.WAITING, _E.RECORDS_LOST): _S.RECONCILING,
    (_S.WAITING, _E.ALL_PRESENT): _S.RUNNING,
    (_S.WAITING, _E.STOP_REQUESTED): _S.WAITING,
    (_S.WAITING, _E.STOP_DUE): _S.STOPPED,
    (_S.WAITING, _E.ALL_FINISHED): _S.FINISHED,  # workers that never named an endpoint
    (_S.WAITING, _E.FAILURE): _S.FAILED,
    (_S.RUNNING, _E.RECORDS_LOST): _S.RECONCILING,
    (_S.RUNNING, _E.STOP_REQUESTED): _S.STOPPING,
    (_S.RUNNING, _E.ALL_FINISHED): _S.FINISHED,
    (_S.RUNNING, _E.FAILURE): _S.FAILED,
    (_S.STOPPING, _E.RECORDS_LOST): _S.RECONCILING,
    (_S.STOPPING, _E.STOP_REQUESTED): _S.STOPPING,
    (_S.STOPPING, _E.STOP_DUE): _S.STOPPED,
    (_S.STOPPING, _E.ALL_FINISHED): _S.FINISHED,
    (_S.STOPPING, _E.FAILURE): _S.FAILED,
    (_S.STOPPED, _E.STOP_REQUESTED): _S.DISMISSED,
    (_S.FINISHED, _E.STOP_REQUESTED): _S.DISMISSED,
    (_S.FAILED, _E.STOP_REQUESTED): _S.DISMISSED,
    (_S.DISMISSED, _E.STOP_REQUESTED): _S.DISMISSED,
}


class RunLifecycle:
    """Holds the run's state; `move` is the only way to change it."""

    def __init__(self) -> None:
        self.state = RunState.STARTING

    @property
    def over(self) -> bool:
        return self.state in OVER

    def allows(self, event: RunEvent) -> bool:
        return (self.state, event) in TRANSITIONS

    def move(self, event: RunEvent) -> None:
        """Raises `IllegalRunEvent` if `event` cannot happen now."""
        if not self.allows(event):
            raise IllegalRunEvent(f"{event!s} cannot happen to a run that is {self.state!s}")
        self.state = TRANSITIONS[self.state, event]
