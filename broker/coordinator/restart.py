"""Decides at which step each stage starts when a run is resumed, or when the broker's records are lost.

RECONNECTING          does any worker still run? One lease; then it goes on, or is restarted as a whole
RECONCILING           what do the workers and the disks know? See recovery/reconcile
CHOOSING_CHECKPOINT   of which checkpoint can all snapshots be read? See recovery/resume
"""

from stageline.broker.control.messages import Hello
from stageline.broker.ledger.member import worker_label
from stageline.broker.ledger.recovery import CheckpointPoll, ReconciledState, Reconciliation, ResumePoint
from stageline.broker.ledger.registry import Replacement
from stageline.pipeline.errors import ExitCode

from .lifecycle import RunEvent, RunState
from .records import RunRecords
from .run import RESUMED, ResumeMode

RECONCILE_RESUMED = 600.0  # seconds that a resumed run without records waits for the workers with its snapshots


class Restart:
    """Moves the run from STARTING to WAITING. Times are seconds since the epoch."""

    def __init__(self, run: RunRecords) -> None:
        placement = run.config.placement
        self.damages: tuple[str, ...] = ()  # what was wrong with the snapshots that could not be used
        self.reconciliation = Reconciliation(placement, run.config.lease, 0.0)  # while RECONCILING
        self.poll = CheckpointPoll(placement, 0)  # while CHOOSING_CHECKPOINT
        self._run = run
        self._placement = placement

    @property
    def missing(self) -> list[int]:
        """The indexes of workers that the run waits for."""
        if self._run.lifecycle.state is RunState.CHOOSING_CHECKPOINT:
            return self.poll.absent(self._candidates())
        return self._run.registry.missing

    @property
    def waiting_for(self) -> str:
        """What has to happen before places are given, for people; "" if nothing."""
        match self._run.lifecycle.state:
            case RunState.RECONCILING if self.reconciliation.resumed:
                return "the broker has no records of this run and asks all workers whether and how far it has run"
            case RunState.RECONCILING:
                return "the broker has lost its records and asks the workers, which keep training, how far the run is"
            case RunState.RECONNECTING:
                leases, complete = self._run.config.leases, self._run.checkpoints.complete
                return (
                    f"broker restarted: waiting up to {leases.silence:g} s for running workers to reconnect "
                    f"({leases.loading:g} s if they were loading); if none does, all begin at checkpoint {complete}"
                )
            case RunState.CHOOSING_CHECKPOINT:
                absent = self._labels(self.missing)
                return (
                    f"the run continues when all workers have verified their snapshots of step {self.poll.step}"
                    f"{f'; it waits for {absent}' if absent else ''}"
                )
            case _:
                return ""

    def begin(self, mode: ResumeMode | None, now: float) -> None:
        """At the broker's start: `mode` says how the run is resumed, None if the broker only restarts."""
        below = self._is_below(self._run.checkpoints.complete)
        if (below or mode is ResumeMode.WITHOUT_RECORDS) and self._run.config.restarts:
            self.lose_records(f"there are no records of run {self._run.id} here", now, resumed=True)
        elif mode is ResumeMode.UNLESS_AT_WORK and self._run.registry.members:
            self._run.lifecycle.move(RunEvent.BROKER_RESTARTED)
        elif mode is not None:
            self._resume(now)
        else:
            self._open()

    def lose_records(self, why: str, now: float, *, resumed: bool = False) -> None:
        """The records are lost or stale: collects what the workers and the disks know."""
        if not self._run.lifecycle.allows(RunEvent.RECORDS_LOST):
            return
        self._run.lifecycle.move(RunEvent.RECORDS_LOST)
        lines = self._run.events.infos if resumed else self._run.events.warnings
        lines.append(f"{why}: asking all workers how far the run is")
        self.reconciliation = Reconciliation(self._placement, self._run.config.lease, now, resumed=resumed)

    def reconnect(self, now: float) -> None:
        """While RECONNECTING: the run continues if workers still run, or is restarted as a whole if none does."""
        at_work = self._workers_at_work(now)
        if at_work:
            self._run.store.put(RESUMED, {})
            self._run.events.infos.append(f"run {self._run.id} continues: its workers are still running")
            self._run.lifecycle.move(RunEvent.START_KNOWN)
        elif at_work is not None:
            self._resume(now)

    def reconcile(self, now: float) -> bool:
        """While RECONCILING: ends that once the run's state is known, or the run if that cannot become known.

        Whether it is known now.
        """
        config, collected = self._run.config, self.reconciliation
        patience = RECONCILE_RESUMED if collected.resumed else max(config.patience, config.lease)
        if now - collected.began >= patience and collected.unknown:
            self._run.fail(
                "the broker's records are lost, and no worker joined that knows which snapshots exist of "
                f"{self._labels(collected.unknown)}; start a worker where they are",
                ExitCode.NO_WORKER,
            )
            return False
        found = collected.result(now)
        if found is None:
            return False
        if self._is_below(found.step):
            self._refuse(collected.lacking(self._floor))
            return False
        if collected.resumed and not found.kept:
            self._restart_all_at(found.step)
            self._run.events.infos.append(f"the run is at checkpoint {found.step}")
            self._open()
        else:
            self._apply(found, now)
            workers = len(found.kept.keys() - {config.script})
            self._run.events.infos.append(f"the run is at checkpoint {found.step}; {workers} workers keep running")
            self._run.lifecycle.move(RunEvent.START_KNOWN)
        self._run.store.put(RESUMED, {})
        return True

    def choose_checkpoint(self, now: float) -> None:
        """While CHOOSING_CHECKPOINT: decides where the run begins, once all workers are there; or ends it."""
        self._run.standby.prune(now)
        found = self.poll.result(self._candidates())
        if found is None:
            return
        self._run.events.warnings.extend(found.damages[len(self.damages) :])
        self.damages = found.damages
        if isinstance(found, ResumePoint):
            self._begin_at(found)
        else:
            self._run.events.warnings.append(
                f"checkpoint {self.poll.step} cannot be used: checking checkpoint {found.step}"
            )
            self.poll = found

    def _workers_at_work(self, now: float) -> bool | None:
        """Whether workers of a restarted broker's run are still running; None while they may still reconnect.

        If some are lost, the others are of use only if those can be replaced.
        """
        replaces, registry = self._run.config.restarts > 0, self._run.registry
        members, lost = registry.members.values(), len(registry.losses(now))
        reconnected = [member for member in members if member.sender]
        if len(reconnected) == len(members) or (reconnected and replaces):
            return True
        return False if lost == len(members) or (lost and not replaces) else None

    def _resume(self, now: float) -> None:
        """Continues a run that was stopped, or whose processes are all gone, at its newest complete checkpoint."""
        self._run.add_lost_work(self._run.registry.members.values(), "ended before the run was resumed", now)
        self._run.registry.free_all()
        self._run.replacements.clear()
        self._run.go_back(range(self._run.config.schedule.copies))
        self._run.store.put(RESUMED, {})
        self._run.events.infos.append(
            f"run {self._run.id} is resumed; its newest complete checkpoint is {self._run.checkpoints.complete}"
        )
        self._open()

    def _restart_all_at(self, step: int) -> None:
        """Empties every place; all stages will begin at checkpoint `step`, whatever the records say."""
        stages = range(self._run.config.schedule.copies)
        self._run.registry.free_all()
        self._run.checkpoints.reset(step)
        self._run.ledger.reset(stages, step)
        self._run.store.go_back(stages, step)
        self._run.save()

    def _apply(self, state: ReconciledState, now: float) -> None:
        """Replaces the records by what workers and disks know."""
        floor = max(self._run.registry.incarnation, self.reconciliation.incarnation, self._run.unused_incarnation(now))
        self._run.registry.reset(state.kept, state.step, floor, now)
        self._run.digests.clear()
        self._learn_orders(state)
        self._run.checkpoints.reset(state.step)
        self._run.replacements.clear()
        for index in self._run.registry.missing:
            who = "the script" if index == self._run.config.script else "its worker"
            self._run.replacements.pending[index] = Replacement(index, now, f"{who} did not reconnect", 0, now)
        for index, stages in enumerate(self._placement):
            kept = state.kept.get(index)
            memory = kept.hello.memory if kept is not None else None
            self._run.ledger.reset(stages, memory.step if memory is not None else state.step)
        self._run.store.go_back(range(self._run.config.schedule.copies), state.step)
        self._run.save()

    def _learn_orders(self, state: ReconciledState) -> None:
        """The workers that keep running know by which schedules: of orders, each knows the first so many."""
        memories = [each.hello.memory for each in state.kept.values() if each.hello.memory is not None]
        orders = max((memory.orders for memory in memories), key=len, default=[])
        if orders and len(orders) >= len(self._run.orders.orders):
            self._run.orders.learned(orders)
            self._run.store.put(*self._run.orders.fact())

    def _open(self) -> None:
        """Places may be given, but if all stages start at a checkpoint its snapshots are verified first."""
        if self._is_below(self._run.checkpoints.complete):
            self._refuse([])
        elif self._starts_at_checkpoint():
            self.poll = CheckpointPoll(self._placement, self._run.checkpoints.complete, floor=self._floor)
            self._run.lifecycle.move(RunEvent.CHECKPOINT_UNVERIFIED)
        else:
            self._run.lifecycle.move(RunEvent.START_KNOWN)

    def _starts_at_checkpoint(self) -> bool:
        """Whether no worker has a place in a run that was running before."""
        unplaced = not self._run.registry.begun and not self._run.registry.members
        return unplaced and self._run.config.snapshots and self._run.checkpoints.complete > 0

    def _begin_at(self, point: ResumePoint) -> None:
        newest, earlier = self._run.checkpoints.complete, self._run.config.earlier
        if point.step is None:
            way_out = "Put the files back" if earlier is None else f"{earlier.remedy(self._placement)},"
            self._run.fail(
                f"checkpoint {newest} cannot be used, and there is no other one that can: "
                f"{'; '.join(point.damages)}. {way_out} and resume the run, or begin another",
                ExitCode.FAILED,
            )
            return
        if point.step != newest:
            self._restart_all_at(point.step)
            instead = f"checkpoint {newest} cannot be used: the run begins at checkpoint {point.step} instead"
            self.damages = (*self.damages, instead)
            self._run.events.warnings.append(instead)
        self._run.events.infos.append(f"run {self._run.id} continues; every stage begins at step {point.step}")
        self._run.lifecycle.move(RunEvent.START_KNOWN)

    @property
    def _floor(self) -> int:
        """The step that the run begins at, and not below: 0, or that of the run which it goes on from."""
        return 0 if self._run.config.earlier is None else self._run.config.earlier.step

    def _is_below(self, step: int) -> bool:
        return step < self._floor

    def _refuse(self, lacking: list[int]) -> None:
        if (earlier := self._run.config.earlier) is not None:
            self._run.fail(earlier.refusal(self._placement, lacking), ExitCode.FAILED)

    def _candidates(self) -> list[Hello]:
        return [contact.hello for contact in self._run.standby.values() if not contact.hello.spare]

    def _labels(self, indexes: list[int]) -> str:
        return " and ".join(worker_label(index, self._run.config.labels[index]) for index in indexes)
