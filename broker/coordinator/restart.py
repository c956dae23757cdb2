"""Decides at which step each stage starts when a run is resumed, or when the broker's records are lost.

RECONNECTING          does any worker still run? One lease; then it goes on, or is restarted as a whole
RECONCILING           what do the workers and the disks know? See recovery/reconcile
CHOOSING_CHECKPOINT   of which checkpoint can all snapshots be read? See recovery/resume
"""

from stageline.broker.control.protocol import Hello
from stageline.broker.membership.member import worker_label
from stageline.broker.membership.replacements import Replacement
from stageline.broker.recovery.reconcile import ReconciledState, Reconciliation
from stageline.broker.recovery.resume import CheckpointPoll, ResumePoint
from stageline.pipeline.errors import ExitCode

from .records import RunRecords
from .run import RESUMED, ResumeMode
from .run_state import RunEvent, RunState

RECONCILE_RESUMED = 600.0  # seconds that a resumed run without records waits for the workers with its snapshots


class Restart:
    """Moves the run from STARTING to WAITING. Times are seconds since the epoch."""

    def __init__(self, records: RunRecords) -> None:
        placement = records.config.schedule.placement
        self.damages: tuple[str, ...] = ()  # what was wrong with the snapshots that could not be used
        self.reconciliation = Reconciliation(placement, records.config.lease, 0.0)  # while RECONCILING
        self.poll = CheckpointPoll(placement, 0)  # while CHOOSING_CHECKPOINT
        self._records = records
        self._placement = placement

    @property
    def missing(self) -> list[int]:
        """The indexes of workers that the run waits for."""
        if self._records.lifecycle.state is RunState.CHOOSING_CHECKPOINT:
            return self.poll.absent(self._candidates())
        return self._records.registry.missing

    @property
    def waiting_for(self) -> str:
        """What has to happen before places are given, for people; "" if nothing."""
        match self._records.lifecycle.state:
            case RunState.RECONCILING:
                return "the broker has lost its records and asks the workers, which keep training, how far the run is"
            case RunState.RECONNECTING:
                lease, complete = self._records.config.lease, self._records.checkpoints.complete
                return (
                    f"broker restarted: waiting up to {lease:g} s for running workers to reconnect (a minute if they "
                    f"were loading); if none does, all begin at checkpoint {complete}"
                )
            case RunState.CHOOSING_CHECKPOINT:
                absent = self._labels(self.missing)
                verified = f"all workers have verified their snapshots of step {self.poll.step}"
                return f"the run continues when {verified}{f'; it waits for {absent}' if absent else ''}"
            case _:
                return ""

    def begin(self, mode: ResumeMode | None, now: float) -> None:
        """At the broker's start: `mode` says how the run is resumed, None if the broker only restarts."""
        if mode is ResumeMode.WITHOUT_RECORDS and self._records.config.restarts:
            self.lose_records(f"there are no records of run {self._records.run} here", now, resumed=True)
        elif mode is ResumeMode.UNLESS_AT_WORK and self._records.registry.members:
            self._records.lifecycle.move(RunEvent.BROKER_RESTARTED)
        elif mode is not None:
            self._resume(now)
        else:
            self._open()

    def lose_records(self, why: str, now: float, *, resumed: bool = False) -> None:
        """The records are lost or stale: collects what the workers and the disks know."""
        if not self._records.lifecycle.allows(RunEvent.RECORDS_LOST):
            return
        self._records.lifecycle.move(RunEvent.RECORDS_LOST)
        events = self._records.events
        (events.infos if resumed else events.warnings).append(f"{why}: asking all workers how far the run is")
        self.reconciliation = Reconciliation(self._placement, self._records.config.lease, now, resumed=resumed)

    def reconnect(self, now: float) -> None:
        """While RECONNECTING: the run continues if workers still run, or is restarted as a whole if none does."""
        at_work = self._workers_at_work(now)
        if at_work:
            self._records.store.put(RESUMED, {})
            self._records.events.infos.append(f"run {self._records.run} continues: its workers are still running")
            self._records.lifecycle.move(RunEvent.START_KNOWN)
        elif at_work is not None:
            self._resume(now)

    def reconcile(self, now: float) -> bool:
        """While RECONCILING: ends that once the run's state is known, or the run if that cannot become known.

        Whether it is known now.
        """
        config, collected = self._records.config, self.reconciliation
        patience = RECONCILE_RESUMED if collected.resumed else max(config.patience, config.lease)
        if now - collected.began >= patience and collected.unknown:
            which = f"which snapshots exist of {self._labels(collected.unknown)}"
            what = (
                f"the broker's records are lost, and no worker joined that knows {which}; start a worker where they are"
            )
            self._records.fail(what, ExitCode.NO_WORKER)
            return False
        found = collected.result(now)
        if found is None:
            return False
        if collected.resumed and not found.kept:
            self._restart_all_at(found.step)
            self._records.events.infos.append(f"the run is at checkpoint {found.step}")
            self._open()
        else:
            self._apply(found, now)
            kept = f"{len(found.kept)} workers keep running"
            self._records.events.infos.append(f"the run is at checkpoint {found.step}; {kept}")
            self._records.lifecycle.move(RunEvent.START_KNOWN)
        self._records.store.put(RESUMED, {})
        return True

    def choose_checkpoint(self, now: float) -> None:
        """While CHOOSING_CHECKPOINT: decides where the run begins, once all workers are there; or ends it."""
        self._records.standby.prune(now)
        found = self.poll.result(self._candidates())
        if found is None:
            return
        warnings = self._records.events.warnings
        warnings += found.damages[len(self.damages) :]
        self.damages = found.damages
        if isinstance(found, ResumePoint):
            self._begin_at(found)
        else:
            warnings.append(f"checkpoint {self.poll.step} cannot be used: checking checkpoint {found.step}")
            self.poll = found

    def _workers_at_work(self, now: float) -> bool | None:
        """Whether workers of a restarted broker's run are still running; None while they may still reconnect.

        If some are lost, the others are of use only if those can be replaced.
        """
        replaces, registry = self._records.config.restarts > 0, self._records.registry
        members, lost = registry.members.values(), len(registry.losses(now))
        reconnected = [member for member in members if member.sender]
        if len(reconnected) == len(members) or (reconnected and replaces):
            return True
        return False if lost == len(members) or (lost and not replaces) else None

    def _resume(self, now: float) -> None:
        """Continues a run that was stopped, or whose processes are all gone, at its newest complete checkpoint."""
        records = self._records
        records.add_lost_work(records.registry.members.values(), "ended before the run was resumed", now)
        records.registry.free_all()
        records.replacements.clear()
        records.go_back(range(records.config.schedule.stages))
        records.store.put(RESUMED, {})
        newest = f"its newest complete checkpoint is {records.checkpoints.complete}"
        records.events.infos.append(f"run {records.run} is resumed; {newest}")
        self._open()

    def _restart_all_at(self, step: int) -> None:
        """Empties every place; all stages will begin at checkpoint `step`, whatever the records say."""
        records, stages = self._records, range(self._records.config.schedule.stages)
        records.registry.free_all()
        records.checkpoints.reset(step)
        records.ledger.reset(stages, step)
        records.store.go_back(stages, step)
        records.save()

    def _apply(self, state: ReconciledState, now: float) -> None:
        """Replaces the records by what workers and disks know."""
        records = self._records
        floor = max(records.registry.incarnation, self.reconciliation.incarnation, records.unused_incarnation(now))
        records.registry.reset(state.kept, state.step, floor, now)
        records.checkpoints.reset(state.step)
        records.replacements.clear()
        for index in records.registry.missing:
            records.replacements.pending[index] = Replacement(index, now, "its worker did not reconnect", 0, now)
        for index, stages in enumerate(self._placement):
            kept = state.kept.get(index)
            memory = kept.hello.memory if kept is not None else None
            records.ledger.reset(stages, memory.step if memory is not None else state.step)
        records.store.go_back(range(records.config.schedule.stages), state.step)
        records.save()

    def _open(self) -> None:
        """Places may be given, but if all stages start at a checkpoint its snapshots are verified first."""
        if self._starts_at_checkpoint():
            self.poll = CheckpointPoll(self._placement, self._records.checkpoints.complete)
            self._records.lifecycle.move(RunEvent.CHECKPOINT_UNVERIFIED)
        else:
            self._records.lifecycle.move(RunEvent.START_KNOWN)

    def _starts_at_checkpoint(self) -> bool:
        """Whether no worker has a place in a run that was running before."""
        unplaced = not self._records.registry.begun and not self._records.registry.members
        return unplaced and self._records.config.snapshots and self._records.checkpoints.complete > 0

    def _begin_at(self, point: ResumePoint) -> None:
        records, newest = self._records, self._records.checkpoints.complete
        if point.step is None:
            records.fail(
                f"checkpoint {newest} cannot be used, and there is no other one that can: "
                f"{'; '.join(point.damages)}. Put the files back and resume the run, or begin another",
                ExitCode.FAILED,
            )
            return
        if point.step != newest:
            self._restart_all_at(point.step)
            instead = f"checkpoint {newest} cannot be used: the run begins at checkpoint {point.step} instead"
            self.damages = (*self.damages, instead)
            records.events.warnings.append(instead)
        records.events.infos.append(f"run {records.run} continues; every stage begins at step {point.step}")
        records.lifecycle.move(RunEvent.START_KNOWN)

    def _candidates(self) -> list[Hello]:
        return [contact.hello for contact in self._records.standby.values() if not contact.hello.spare]

    def _labels(self, indexes: list[int]) -> str:
        return " and ".join(worker_label(index, self._placement[index]) for index in indexes)
