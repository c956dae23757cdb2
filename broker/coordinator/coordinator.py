"""The broker without its sockets: a message comes in, is decided on and stored, and messages go out.

    handle(message)   Hello: registration; Report: ledger, store; Exited: supervision; StopRun: shutdown; Ask: queries
    tick(now)         restart, or supervision, shutdown, registration and trims

The run's life is the table in `run_state.py`. No clock either; `now` is seconds since the epoch and never goes back.
"""

import msgspec

from stageline.broker.control.protocol import (
    Ask,
    Exited,
    Failed,
    Finished,
    FromBroker,
    Goodbye,
    Heard,
    Hello,
    Refused,
    Report,
    StopRun,
    ToBroker,
    Trim,
)
from stageline.broker.ledger.ledger import Holder, Ledger
from stageline.broker.membership.failure_detector import WorkerLoss
from stageline.broker.membership.member import Member, MemberStatus
from stageline.broker.membership.registry import Registry
from stageline.broker.membership.replacements import Replacements
from stageline.broker.membership.standby import StandbyWorkers
from stageline.broker.recovery.checkpoint_tracker import CheckpointTracker
from stageline.broker.recovery.lost_work import LostWork
from stageline.broker.stores.base import Store, StoredRun
from stageline.pipeline.digest import weights_sha256
from stageline.pipeline.errors import ExitCode

from .assignments import Assignments, Outgoing
from .events import EventLog
from .queries import RunView, answer
from .registration import Registration
from .restart import Restart
from .run import ResumeMode, RunConfig, RunFailure, RunOutcome, RunPhase
from .run_state import RunEvent, RunLifecycle, RunState
from .shutdown import Shutdown
from .supervision import Supervision

TRIM_EVERY = 0.05  # seconds between two announcements
AWAY = 0.5  # seconds between two ticks from which on the broker counts as having been away, however short the lease

_FromMember = Report | Finished | Failed | Goodbye


class Coordinator:
    """Makes every decision of the broker. `run` is the run's id; what `store` has of it is restored.

    What must survive a crash is stored before it is sent; raises `StoreUnusable` if that fails.
    """

    def __init__(self, config: RunConfig, store: Store, run: str, now: float) -> None:
        schedule = config.schedule
        self.config = config
        self.run = run
        self.outcome: RunOutcome | None = None
        self.events = EventLog()
        self.ledger = Ledger(schedule.stages, schedule.microbatches, config.log_every)
        self.registry = Registry(schedule.placement, config.lease)
        self.checkpoints = CheckpointTracker(schedule.stages)
        self._store = store
        self._replacements = Replacements(config.restarts, config.patience)
        self._lost_work = LostWork()
        self._standby = StandbyWorkers()
        self._lifecycle = RunLifecycle()
        self._assignments = Assignments(
            config, store, self.ledger, self.registry, self.checkpoints, self._replacements, self._lost_work
        )
        self._restart = Restart(run, config, self._lifecycle, self._assignments, self._standby, self.events)
        self._registration = Registration(
            run, config, self._lifecycle, self._assignments, self._standby, self._restart, self.events
        )
        self._supervision = Supervision(config, self._assignments, self.events)
        self._shutdown = Shutdown(snapshots=config.snapshots)
        self._training_steps: int | None = None
        self._metrics: dict[str, float] = {}
        self._trimmed, self._trimmed_at = 0, now
        self._ticked = now
        self._restore(store.load(), now)

    @property
    def state(self) -> RunState:
        return self._lifecycle.state

    @property
    def phase(self) -> RunPhase:
        """How far the run is, as users see it."""
        if self.outcome is not None:
            return self.outcome.phase
        return RunPhase.RUNNING if self.registry.begun else RunPhase.WAITING

    @property
    def stop_requested(self) -> bool:
        return self._shutdown.request is not None or self.state is RunState.DISMISSED

    @property
    def all_left(self) -> bool:
        """Whether no worker has anything left to report."""
        return all(member.status is not MemberStatus.PRESENT for member in self.registry.members.values())

    def handle(self, sender: bytes, message: ToBroker, now: float) -> list[Outgoing]:
        """Decides on a message; returns the messages to send, with their recipients."""
        match message:
            case Hello():
                sends = self._registration.answer(message, sender, self.outcome, now)
                self._start_if_all_present()
                return sends
            case Report() | Finished() | Failed() | Goodbye():
                return self._from_worker(sender, message, now)
            case Exited():
                return self._note_exit(message, now)
            case StopRun():
                return self._stop(message, now)
            case Ask():
                return [(sender, answer(self._view(now), message))]

    def tick(self, now: float) -> list[Outgoing]:
        """What is due by time. Call it several times a second, after all messages that have arrived were handled."""
        away, self._ticked = now - self._ticked, now
        if away > max(self.config.lease / 2, AWAY):
            self.events.warn(f"the broker itself was away for {away:.1f} s; every lease starts over")
            self._assignments.restart_leases(now)
        match self.state:
            case RunState.RECONCILING:
                return self._reconcile(now)
            case RunState.RECONNECTING:
                return self._reconnect(now)
            case RunState.STOPPED | RunState.FINISHED | RunState.FAILED | RunState.DISMISSED:
                return self._mark_lost(now)
            case _:
                return self._supervise(now)

    def _restore(self, stored: StoredRun, now: float) -> None:
        self.ledger.restore(stored.finished, stored.losses)
        self._assignments.restore(stored.facts, now)
        if stored.facts.get("outcome"):
            self.outcome = msgspec.convert(stored.facts["outcome"], RunOutcome)
            finished = self.outcome.phase is RunPhase.FINISHED
            self._lifecycle.move(RunEvent.ALL_FINISHED if finished else RunEvent.FAILURE)
        else:
            self._restart.begin(ResumeMode.stored_in(stored.facts), now)
            self._start_if_all_present()

    def _start_if_all_present(self) -> None:
        if self.state is RunState.WAITING and self.registry.begun:
            self._lifecycle.move(RunEvent.ALL_PRESENT)
            if self.stop_requested:  # before the records were lost
                self._lifecycle.move(RunEvent.STOP_REQUESTED)

    def _supervise(self, now: float) -> list[Outgoing]:
        if self.state in (RunState.RUNNING, RunState.STOPPING):
            self._shutdown.note_progress(self.ledger.begun, now)
        sends = self._fail(self._supervision.check(now))
        if self.state is RunState.CHOOSING_CHECKPOINT:
            sends += self._fail(self._restart.choose_checkpoint(now))
        sends += self._stop_if_due(now)
        if self._lifecycle.over:
            return sends
        promoted = self._registration.promote(now)
        return [*promoted, *self._fail(self._supervision.check_empty_places(now)), *self._trim(now)]

    def _reconcile(self, now: float) -> list[Outgoing]:
        found = self._restart.reconcile(now)
        if isinstance(found, RunFailure):
            return self._fail(found)
        self._start_if_all_present()
        return [send for member in found for send in self._registration.assign(member)]

    def _reconnect(self, now: float) -> list[Outgoing]:
        self._restart.reconnect(now)
        self._start_if_all_present()
        return self._stop_if_due(now) if self.state is RunState.RECONNECTING else []

    def _mark_lost(self, now: float) -> list[Outgoing]:
        """After the run, silent workers have left or are lost; nothing follows from it."""
        for loss in self.registry.losses(now):
            finished = loss.member.status is MemberStatus.FINISHED
            loss.member.status = MemberStatus.LEFT if finished else MemberStatus.LOST
        return []

    def _from_worker(self, sender: bytes, message: _FromMember, now: float) -> list[Outgoing]:
        member = self.registry.current(message.incarnation)
        if (
            isinstance(message, Report)
            and message.complete > self.checkpoints.complete
            and self._assignments.records_lack_checkpoint(message.complete, member)
        ):
            why = f"a worker knows of checkpoint {message.complete}, the broker's records do not"
            self._restart.lose_records(why, now)
        if member is None or self.state is RunState.RECONCILING:
            return self._to_unknown(sender, message)
        self.registry.note_contact(member, sender, now)
        match message:
            case Report():
                return self._ingest(member, message, now)
            case Finished():
                return self._finish(member, message)
            case Failed():
                member.status = MemberStatus.LEFT
                return self._fail(
                    RunFailure(f"{member.label} failed: {message.reason}", message.code or ExitCode.FAILED)
                )
            case Goodbye():
                return self._leave(member, message, now)

    def _to_unknown(self, sender: bytes, message: _FromMember) -> list[Outgoing]:
        """A worker whose incarnation may only be missing in the records gets no answer before it sends Hello."""
        incarnation = message.incarnation
        renewed = self.registry.renewed(incarnation)
        if renewed is not None:
            renewed.sender = sender
            return self._registration.assign(renewed)
        if self.state is RunState.RECONCILING or (self.config.restarts and self.registry.is_unknown(incarnation)):
            return []
        self.events.count("fenced", f"{type(message).__name__} of incarnation {incarnation}, which is not current")
        refused = Refused(
            f"incarnation {incarnation} is not current in run {self.run}: its stages belong to another process, "
            "or its run is over. Stop this worker",
            code=ExitCode.FAILED,
        )
        return [(sender, refused)]

    def _ingest(self, member: Member, report: Report, now: float) -> list[Outgoing]:
        self.registry.note_report(member, report, now)
        self._metrics |= report.metrics
        if report.training_steps is not None:
            self._training_steps = report.training_steps
        found = self.ledger.ingest(report, member.stages, Holder(member.name, member.incarnation))
        if found.steps:
            self._store.append(found.steps, found.losses)
        illegal = found.illegal
        if report.snapshots or (report.steps and self.checkpoints.candidates):
            illegal += self._assignments.record_snapshots(report, member)
            self._update_outcome()
        for error in illegal:
            self.events.count("illegal", f"{member.label} reports what cannot be: {error}")
        if report.actions and member.index in self._replacements.pending:
            self._note_replaced(member, now)
        confirmed: list[FromBroker] = [Heard(report.number)] if report.number else []
        stop = [self.outcome.stop_message] if self.outcome else []
        return [(member.sender, message) for message in (*confirmed, *stop)]

    def _note_replaced(self, member: Member, now: float) -> None:
        replaced = self._replacements.close(member.index)
        if replaced is not None:
            self.events.info(f"{member.label} computes again, {now - replaced.since:.1f} s after its loss was detected")

    def _finish(self, member: Member, finished: Finished) -> list[Outgoing]:
        if self.outcome is not None:
            return [(member.sender, self.outcome.stop_message)]
        member.status = MemberStatus.FINISHED
        member.digests = finished.digests
        parts = [each.digests for each in self.registry.members.values() if each.digests is not None]
        if len(parts) < len(self.config.schedule.placement):
            return []
        digest = weights_sha256({name: digest for part in parts for name, digest in part.items()})
        outcome = RunOutcome(RunPhase.FINISHED, "all steps are done", ExitCode.OK, digest)
        return self._end(RunEvent.ALL_FINISHED, outcome)

    def _leave(self, member: Member, goodbye: Goodbye, now: float) -> list[Outgoing]:
        loss = WorkerLoss(member, f"left: {goodbye.reason}")
        failure = None if self._lifecycle.over else self._supervision.lose(loss, now)
        member.status = MemberStatus.LEFT
        return self._fail(failure)

    def _note_exit(self, exited: Exited, now: float) -> list[Outgoing]:
        if not self._lifecycle.over:
            return self._fail(self._supervision.note_exit(exited, now))
        member = self.registry.members.get(exited.index)
        if member is not None and member.pid == exited.pid:
            member.status = MemberStatus.LEFT
        return []

    def _stop(self, request: StopRun, now: float) -> list[Outgoing]:
        """Stops the run. After its end: dismisses the broker, and workers no longer finish the step."""
        self._lifecycle.move(RunEvent.STOP_REQUESTED)
        if self.outcome is None:
            self._shutdown.ask(request, now)
            return self._stop_if_due(now)
        if not request.at_step_end:
            self.outcome = msgspec.structs.replace(self.outcome, at_step_end=False, step=None)
        return self._stop_workers(self.outcome)

    def _stop_if_due(self, now: float) -> list[Outgoing]:
        if self._lifecycle.over or not self._shutdown.is_due(now, running=self.registry.begun):
            return []
        outcome = self._shutdown.end(self.checkpoints.complete, self.ledger.begun, self._training_steps, now)
        return self._end(RunEvent.STOP_DUE, outcome) if outcome is not None else []

    def _update_outcome(self) -> None:
        """Workers of a stopped run may complete a newer checkpoint."""
        if self.outcome is None:
            return
        updated = self._shutdown.updated(self.outcome, self.checkpoints.complete)
        if updated != self.outcome:
            self.outcome = updated
            self._store.put("outcome", msgspec.to_builtins(updated))

    def _fail(self, failure: RunFailure | None) -> list[Outgoing]:
        """The first failure ends the run; what follows from it does not replace it."""
        if failure is None or self._lifecycle.over:
            return []
        return self._end(RunEvent.FAILURE, RunOutcome(RunPhase.FAILED, failure.reason, failure.code))

    def _end(self, event: RunEvent, outcome: RunOutcome) -> list[Outgoing]:
        self._lifecycle.move(event)
        self.outcome = outcome
        self._store.put("outcome", msgspec.to_builtins(outcome))
        self.events.info(f"run {self.run} has {outcome.phase}: {outcome.reason}")
        return self._stop_workers(outcome)

    def _stop_workers(self, outcome: RunOutcome) -> list[Outgoing]:
        standby: list[Outgoing] = [(contact.sender, outcome.stop_message) for contact in self._standby]
        return self._assignments.broadcast(outcome.stop_message) + standby

    def _trim(self, now: float) -> list[Outgoing]:
        floor = self._assignments.trimmable
        if self._lifecycle.over or floor <= self._trimmed or now - self._trimmed_at < TRIM_EVERY:
            return []
        self._trimmed, self._trimmed_at = floor, now
        return self._assignments.broadcast(Trim(floor))

    def _view(self, now: float) -> RunView:
        return RunView(
            now=now,
            run=self.run,
            config=self.config,
            phase=self.phase,
            state=self.state,
            outcome=self.outcome,
            missing=self._restart.missing,
            waiting_for=self._restart.waiting_for,
            damages=self._restart.damages,
            training_steps=self._training_steps,
            metrics=self._metrics,
            anomalies=self.events.anomalies,
            complete=self.checkpoints.complete,
            restarts=self._replacements.total,
            pending=self._replacements.pending,
            members=self.registry.members,
            standby=list(self._standby),
            ledger=self.ledger,
            record=self._store.record,
            attempts=self._lost_work.attempts,
            diagnose=lambda worker: self._supervision.diagnose(now, worker),
        )
