"""The broker without its sockets: a message comes in, is decided on and stored, and messages go out.

    handle(message)   Hello: registration; Report: ledger, store; Exited: supervision; StopRun: shutdown; Ask: queries
    tick(now)         restart, or supervision, shutdown, registration and trims

The run's life is the table in `run_state.py`. No clock either; `now` is seconds since the epoch and never goes back.
"""

from stageline.broker.control.protocol import (
    Ask,
    Confirmed,
    Exited,
    Failed,
    Finished,
    Goodbye,
    Hello,
    Report,
    StopRun,
    ToBroker,
    Trim,
)
from stageline.broker.ledger.ledger import Holder, IllegalTransition
from stageline.broker.membership.member import Member, MemberStatus
from stageline.broker.stores.base import Store
from stageline.pipeline.digest import weights_sha256
from stageline.pipeline.errors import ExitCode

from .queries import RunView, answer
from .records import Outgoing, RunRecords
from .registration import FromMember, Registration
from .restart import Restart
from .run import ResumeMode, RunConfig, RunOutcome, RunPhase
from .run_state import RunEvent, RunState
from .shutdown import Shutdown
from .supervision import Supervision

TRIM_EVERY = 0.05  # seconds between two announcements
AWAY = 0.5  # seconds between two ticks from which on the broker counts as having been away, however short the lease


class Coordinator:
    """Makes every decision of the broker. `run` is the run's id; what `store` has of it is restored.

    What must survive a crash is stored before it is sent; raises `StoreUnusable` if that fails.
    """

    def __init__(self, config: RunConfig, store: Store, run: str, now: float) -> None:
        self.records = RunRecords(run, config, store)
        self._restart = Restart(self.records)
        self._registration = Registration(self.records, self._restart)
        self._supervision = Supervision(self.records)
        self._shutdown = Shutdown(self.records)
        self._trimmed, self._trimmed_at = 0, now
        self._ticked = now
        self._restore(now)

    @property
    def stop_requested(self) -> bool:
        return self._shutdown.request is not None or self.records.lifecycle.state is RunState.DISMISSED

    def handle(self, sender: bytes, message: ToBroker, now: float) -> list[Outgoing]:
        """Decides on a message; returns the messages to send, with their recipients."""
        self.records.outgoing = []
        match message:
            case Report() | Finished() | Failed() | Goodbye():
                self._handle_member(sender, message, now)
            case Hello():
                self._registration.answer(message, sender, now)
                self._start_if_all_present()
            case Exited():
                self._supervision.note_exit(message, now)
            case StopRun():
                self._shutdown.stop(message, now)
            case Ask():
                view = RunView(now, self.records, self._restart, self._supervision)
                self.records.outgoing.append((sender, answer(view, message)))
        return self.records.outgoing

    def tick(self, now: float) -> list[Outgoing]:
        """What is due by time. Call it several times a second, after all messages that have arrived were handled."""
        self.records.outgoing = []
        away, self._ticked = now - self._ticked, now
        if away > max(self.records.config.lease / 2, AWAY):
            self.records.events.warnings.append(f"the broker itself was away for {away:.1f} s; every lease starts over")
            self.records.registry.restart_leases(now)
            self.records.replacements.restart_deadlines(now)
        match self.records.lifecycle.state:
            case RunState.RECONCILING:
                self._reconcile(now)
            case RunState.RECONNECTING:
                self._restart.reconnect(now)
                self._start_if_all_present()
                if self.records.lifecycle.state is RunState.RECONNECTING:
                    self._shutdown.stop_if_due(now)
            case RunState.STOPPED | RunState.FINISHED | RunState.FAILED | RunState.DISMISSED:
                self._supervision.mark_lost(now)
            case _:
                self._supervise(now)
        return self.records.outgoing

    def _restore(self, now: float) -> None:
        stored = self.records.store.load()
        self.records.restore(stored, now)
        if self.records.outcome is not None:
            finished = self.records.outcome.phase is RunPhase.FINISHED
            self.records.lifecycle.move(RunEvent.ALL_FINISHED if finished else RunEvent.FAILURE)
        else:
            self._restart.begin(ResumeMode.stored_in(stored.facts), now)
            self._start_if_all_present()

    def _start_if_all_present(self) -> None:
        if self.records.lifecycle.state is RunState.WAITING and self.records.registry.begun:
            self.records.lifecycle.move(RunEvent.ALL_PRESENT)
            if self.stop_requested:  # before the records were lost
                self.records.lifecycle.move(RunEvent.STOP_REQUESTED)

    def _supervise(self, now: float) -> None:
        self._shutdown.note_progress(now)
        self._supervision.check(now)
        if self.records.lifecycle.state is RunState.CHOOSING_CHECKPOINT:
            self._restart.choose_checkpoint(now)
        self._shutdown.stop_if_due(now)
        if not self.records.lifecycle.over:
            self._registration.promote(now)
            self._supervision.check_empty_places(now)
            self._trim(now)

    def _reconcile(self, now: float) -> None:
        if self._restart.reconcile(now):
            self._start_if_all_present()
            for member in self.records.registry.reachable():
                self._registration.assign(member)

    def _handle_member(self, sender: bytes, message: FromMember, now: float) -> None:
        records = self.records
        member = records.registry.current(message.incarnation)
        if (
            isinstance(message, Report)
            and message.complete > records.checkpoints.complete
            and records.lack_checkpoint(message.complete, member)
        ):
            why = f"a worker knows of checkpoint {message.complete}, the broker's records do not"
            self._restart.lose_records(why, now)
        if member is None or records.lifecycle.state is RunState.RECONCILING:
            self._registration.answer_unknown(message, sender)
            return
        records.registry.note_contact(member, sender, now)
        match message:
            case Report():
                self._ingest(member, message, now)
            case Finished():
                self._finish(member, message)
            case Failed():
                member.status = MemberStatus.LEFT
                records.fail(f"{member.label} failed: {message.reason}", message.code or ExitCode.FAILED)
            case Goodbye():
                self._supervision.note_goodbye(member, message, now)

    def _ingest(self, member: Member, report: Report, now: float) -> None:
        records = self.records
        records.registry.note_report(member, report, now)
        records.metrics |= report.metrics
        if report.training_steps is not None:
            records.training_steps = report.training_steps
        found = records.ledger.ingest(report, member.stages, Holder(member.name, member.incarnation))
        if found.steps:
            records.store.append(found.steps, found.losses)
        illegal = found.illegal
        if report.snapshots or (report.steps and records.checkpoints.candidates):
            illegal += self._record_snapshots(report, member)
            if records.outcome is not None:
                self._shutdown.update_outcome(records.outcome)
        for error in illegal:
            records.events.count("illegal", f"{member.label} reports what cannot be: {error}")
        if report.actions and member.index in records.replacements.pending:
            lost = records.replacements.pending.pop(member.index).since
            records.events.infos.append(
                f"{member.label} computes again, {now - lost:.1f} s after its loss was detected"
            )
        if report.number:
            records.outgoing.append((member.sender, Confirmed(report.number)))
        if records.outcome is not None:
            records.outgoing.append((member.sender, records.outcome.stop_message))

    def _record_snapshots(self, report: Report, member: Member) -> list[IllegalTransition]:
        """Records the snapshots that `member` reports; completes a checkpoint if it can. Returns what was wrong."""
        records = self.records
        own = [(stage, step) for stage, step in report.snapshots if stage in member.stages]
        added = [records.checkpoints.add(stage, step) for stage, step in own]
        completed = records.checkpoints.advance(records.ledger.finished_floor)
        if completed:
            records.replacements.in_a_row.clear()
        if completed or any(added):
            records.save()
        foreign = (stage for stage, _ in report.snapshots if stage not in member.stages)
        return [IllegalTransition(f"stage {stage} is not its own") for stage in foreign]

    def _finish(self, member: Member, finished: Finished) -> None:
        records = self.records
        if records.outcome is not None:
            records.outgoing.append((member.sender, records.outcome.stop_message))
            return
        member.status = MemberStatus.FINISHED
        member.digests = finished.digests
        parts = [each.digests for each in records.registry.members.values() if each.digests is not None]
        if len(parts) == len(records.config.schedule.placement):
            digest = weights_sha256({name: digest for part in parts for name, digest in part.items()})
            outcome = RunOutcome(RunPhase.FINISHED, "all steps are done", ExitCode.OK, digest)
            records.end(RunEvent.ALL_FINISHED, outcome)

    def _trim(self, now: float) -> None:
        floor = self.records.trimmable
        over, recent = self.records.lifecycle.over, now - self._trimmed_at < TRIM_EVERY
        if floor > self._trimmed and not over and not recent:
            self._trimmed, self._trimmed_at = floor, now
            self.records.broadcast(Trim(floor))
