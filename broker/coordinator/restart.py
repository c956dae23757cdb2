"""Decides at which step each stage starts when a run is resumed, or when the broker's records are lost.

RECONNECTING          does any worker still run? One lease; then it goes on, or is restarted as a whole
RECONCILING           what do the workers and the disks know? See recovery/reconcile
CHOOSING_CHECKPOINT   of which checkpoint can all snapshots be read? See recovery/resume
"""

from stageline.broker.control.protocol import Hello
from stageline.broker.membership.member import Member, worker_label
from stageline.broker.membership.standby import StandbyWorkers
from stageline.broker.recovery.reconcile import Reconciliation
from stageline.broker.recovery.resume import CheckpointPoll, ResumePoint
from stageline.pipeline.errors import ExitCode

from .assignments import Assignments
from .events import EventLog
from .run import RESUMED, ResumeMode, RunConfig, RunFailure
from .run_state import RunEvent, RunLifecycle, RunState

RECONCILE_RESUMED = 600.0  # seconds that a resumed run without records waits for the workers with its snapshots


class Restart:
    """Moves the run from STARTING to WAITING. Times are seconds since the epoch."""

    def __init__(
        self,
        run: str,
        config: RunConfig,
        lifecycle: RunLifecycle,
        assignments: Assignments,
        standby: StandbyWorkers,
        events: EventLog,
    ) -> None:
        self.damages: tuple[str, ...] = ()  # what was wrong with the snapshots that could not be used
        self._run = run
        self._config = config
        self._lifecycle = lifecycle
        self._assignments = assignments
        self._store = assignments.store
        self._registry = assignments.registry
        self._checkpoints = assignments.checkpoints
        self._standby = standby
        self._events = events
        self._reconciliation = Reconciliation(self._registry.placement, config.lease, 0.0)
        self._poll = CheckpointPoll(self._registry.placement, 0)

    @property
    def polled_step(self) -> int:
        """The step whose snapshots are to be verified."""
        return self._poll.step

    @property
    def missing(self) -> list[int]:
        """The indexes of workers that the run waits for."""
        if self._lifecycle.state is RunState.CHOOSING_CHECKPOINT:
            return self._poll.absent(self._candidates())
        return self._registry.missing

    @property
    def waiting_for(self) -> str:
        """What has to happen before places are given, for people; "" if nothing."""
        match self._lifecycle.state:
            case RunState.RECONCILING:
                return "the broker has lost its records and asks the workers, which keep training, how far the run is"
            case RunState.RECONNECTING:
                return (
                    f"broker restarted: waiting up to {self._config.lease:g} s for running workers to reconnect "
                    "(a minute if they were loading); if none does, all begin at checkpoint "
                    f"{self._checkpoints.complete}"
                )
            case RunState.CHOOSING_CHECKPOINT:
                absent = [worker_label(index, self._registry.placement[index]) for index in self.missing]
                others = f"; it waits for {' and '.join(absent)}" if absent else ""
                verified = f"all workers have verified their snapshots of step {self._poll.step}"
                return f"the run continues when {verified}{others}"
            case _:
                return ""

    def begin(self, mode: ResumeMode | None, now: float) -> None:
        """At the broker's start: `mode` says how the run is resumed, None if the broker only restarts."""
        if mode is ResumeMode.WITHOUT_RECORDS and self._config.restarts:
            self.lose_records(f"there are no records of run {self._run} here", now, resumed=True)
        elif mode is ResumeMode.UNLESS_AT_WORK and self._registry.members:
            self._lifecycle.move(RunEvent.BROKER_RESTARTED)
        elif mode is not None:
            self._resume(now)
        else:
            self._open()

    def lose_records(self, why: str, now: float, *, resumed: bool = False) -> None:
        """The records are lost or stale: collects what the workers and the disks know."""
        if not self._lifecycle.allows(RunEvent.RECORDS_LOST):
            return
        self._lifecycle.move(RunEvent.RECORDS_LOST)
        log = self._events.info if resumed else self._events.warn
        log(f"{why}: asking all workers how far the run is")
        self._reconciliation = Reconciliation(self._registry.placement, self._config.lease, now, resumed=resumed)

    def collect(self, hello: Hello, sender: bytes, now: float) -> None:
        """While RECONCILING."""
        self._reconciliation.add(hello, sender, now)

    def reconnect(self, now: float) -> None:
        """While RECONNECTING: the run continues if workers still run, or is restarted as a whole if none does."""
        at_work = self._assignments.workers_at_work(now)
        if at_work:
            self._store.put(RESUMED, {})
            self._events.info(f"run {self._run} continues: its workers are still running")
            self._lifecycle.move(RunEvent.START_KNOWN)
        elif at_work is not None:
            self._resume(now)

    def reconcile(self, now: float) -> list[Member] | RunFailure:
        """While RECONCILING: the workers that keep running once that is known, or why it cannot become known."""
        collected = self._reconciliation
        patience = RECONCILE_RESUMED if collected.resumed else max(self._config.patience, self._config.lease)
        if now - collected.began >= patience and collected.unknown:
            places = " and ".join(worker_label(index, self._registry.placement[index]) for index in collected.unknown)
            what = f"the broker's records are lost, and no worker joined that knows which snapshots exist of {places}"
            return RunFailure(f"{what}; start a worker where they are", ExitCode.NO_WORKER)
        found = collected.result(now)
        if found is None:
            return []
        if collected.resumed and not found.kept:
            self._assignments.restart_all_at(found.step)
            self._events.info(f"the run is at checkpoint {found.step}")
            self._open()
        else:
            self._assignments.apply_reconciled(found, collected.incarnation, now)
            self._events.info(f"the run is at checkpoint {found.step}; {len(found.kept)} workers keep running")
            self._lifecycle.move(RunEvent.START_KNOWN)
        self._store.put(RESUMED, {})
        return self._registry.reachable()

    def choose_checkpoint(self, now: float) -> RunFailure | None:
        """While CHOOSING_CHECKPOINT: decides where the run begins, once all workers are there; or why it cannot."""
        self._standby.prune(now)
        found = self._poll.result(self._candidates())
        if found is None:
            return None
        for damage in found.damages[len(self.damages) :]:
            self._events.warn(damage)
        self.damages = found.damages
        if isinstance(found, ResumePoint):
            return self._begin_at(found)
        self._events.warn(f"checkpoint {self._poll.step} cannot be used: checking checkpoint {found.step}")
        self._poll = found
        return None

    def _resume(self, now: float) -> None:
        """Continues a run that was stopped, or whose processes are all gone."""
        self._assignments.restart_all(now)
        self._store.put(RESUMED, {})
        self._events.info(f"run {self._run} is resumed; its newest complete checkpoint is {self._checkpoints.complete}")
        self._open()

    def _open(self) -> None:
        """Places may be given, but if all stages start at a checkpoint its snapshots are verified first."""
        if self._assignments.restarts_from_checkpoint:
            self._poll = CheckpointPoll(self._registry.placement, self._checkpoints.complete)
            self._lifecycle.move(RunEvent.CHECKPOINT_UNVERIFIED)
        else:
            self._lifecycle.move(RunEvent.START_KNOWN)

    def _candidates(self) -> list[Hello]:
        return [contact.hello for contact in self._standby if not contact.hello.spare]

    def _begin_at(self, point: ResumePoint) -> RunFailure | None:
        newest = self._checkpoints.complete
        if point.step is None:
            return RunFailure(
                f"checkpoint {newest} cannot be used, and there is no other one that can: "
                f"{'; '.join(point.damages)}. Put the files back and resume the run, or begin another",
                ExitCode.FAILED,
            )
        if point.step != newest:
            self._assignments.restart_all_at(point.step)
            instead = f"checkpoint {newest} cannot be used: the run begins at checkpoint {point.step} instead"
            self.damages = (*self.damages, instead)
            self._events.warn(instead)
        self._events.info(f"run {self._run} continues; every stage begins at step {point.step}")
        self._lifecycle.move(RunEvent.START_KNOWN)
        return None
