"""The broker without its sockets: a message comes in, is decided on and stored, and messages go out.

    receive(message)  is it genuine? Then:
    handle(message)   Hello: registration; Report: ledger, store; Exited: supervision; StopRun: shutdown; Ask: queries
    tick(now)         restart, or supervision, shutdown, registration and trims

The run's life is the table in `run_state.py`. No clock either; `now` is seconds since the epoch and never goes back.
"""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from stageline.broker.control.channel import Envelope
from stageline.broker.control.messages import (
    Answer,
    Ask,
    Assigned,
    Confirmed,
    Declined,
    Exited,
    Failed,
    Finished,
    Goodbye,
    Hello,
    Report,
    Standby,
    StopRun,
    ToBroker,
    is_full,
)
from stageline.broker.control.protocol import SealedMessage
from stageline.broker.control.records import EvaluationRecord
from stageline.broker.ledger.evaluations import EvaluationsDiffer, not_finite, told
from stageline.broker.ledger.ledger import Holder, IllegalTransition
from stageline.broker.ledger.member import Member
from stageline.broker.stores.base import Store
from stageline.pipeline.errors import ExitCode

from .authenticity import Authenticity, OutgoingSeals, refusal_to
from .lifecycle import RunEvent, RunState
from .observation import OBSERVED, observe, recall_result
from .ordering import Ordering
from .plausibility import implausible, is_due
from .queries import RunView, answer
from .records import Outgoing, RunRecords
from .registration import FromMember, Registration
from .restart import Restart
from .run import ResumeMode, RunConfig, RunPhase
from .shutdown import Finishing, Shutdown
from .supervision import Supervision

TRIM_EVERY = 0.05  # seconds between two announcements
QUESTIONS = 20  # of strangers that are answered in a turn: an answer can be long, and takes a while
_DIFFERING = (
    "what was taken from {} in step {} is not what was put there: another client of the queues' server has replaced "
    "messages, or what computed them was not deterministic. Let only this run's processes use that server (a password, "
    "and TLS), and resume the run: it begins at its newest complete checkpoint, without those messages"
)
AWAY = 0.5  # seconds between two ticks from which on the broker counts as having been away, however short the lease


class Reception(NamedTuple):
    """What follows from a message: `outgoing`, and whether its sender is `trusted`: it has proven who it is, was given
    a place, or stands by for one."""

    outgoing: list[Outgoing]
    trusted: bool


class Coordinator:
    """Makes every decision of the broker. `run` is the run's id; what `store` has of it is restored.

    What must survive a crash is stored before it is sent; raises `StoreUnusable` if that fails.
    """

    def __init__(self, config: RunConfig, store: Store, run: str, now: float) -> None:
        self.run = RunRecords(run, config, store)
        self._authenticity = Authenticity(self.run)
        self.is_proven = self._authenticity.is_proven
        self._seals = OutgoingSeals(self.run)
        self._strangers: set[bytes] = set()  # who have said something in this turn, and proven nothing
        self._questions = 0  # theirs
        self._restart = Restart(self.run)
        self._registration = Registration(self.run, self._restart)
        self._shutdown = Shutdown(self.run)
        self._finishing = Finishing(self.run, self._shutdown)
        self._supervision = Supervision(self.run, self._shutdown)
        self.ordering = Ordering(self.run)
        self.is_interrupted = False  # a person has stopped the run before its end
        self._trimmed, self._trimmed_at = 0, now
        self._ticked = now
        stored = store.load()
        self.run.restore(stored, now)
        if self.run.outcome is not None:
            self.run.lifecycle.move(
                RunEvent.ALL_FINISHED if self.run.outcome.phase is RunPhase.FINISHED else RunEvent.FAILURE
            )
            recall_result(self.run, stored.facts)
        else:
            self._restart.begin(ResumeMode.stored_in(stored.facts), now)
            self._start_if_all_present()

    @property
    def stop_requested(self) -> bool:
        return self._shutdown.request is not None or self.run.lifecycle.state is RunState.DISMISSED

    def receive(self, sender: bytes, sealed: SealedMessage, now: float) -> Reception:
        """Decides on a message from the wire, if it is genuine. Who proves nothing is heard once in a turn."""
        verdict = self._authenticity.judge(sealed)
        if verdict.refusal:
            self.run.events.count("forged", f"refused: {verdict.refusal}")
        if not (verdict.proven or self._hears(sender, sealed.message)):
            return Reception([], trusted=False)
        if verdict.refusal:
            answer = refusal_to(sealed)
            return Reception([] if answer is None else [(sender, answer)], trusted=False)
        if verdict.proven and isinstance(sealed.message, Report | Finished | Failed | Goodbye | Hello):
            self._seals.note_proven(sender, sealed.message.incarnation)
        outgoing = self.handle(sender, sealed.message, now)
        placed = any(to == sender and isinstance(message, Assigned | Standby) for to, message in outgoing)
        return Reception(outgoing, trusted=verdict.proven or placed)

    def envelopes(self, outgoing: Iterable[Outgoing], now: float) -> list[Envelope]:
        """Return `outgoing` as bytes, sealed for recipients that can verify a seal."""
        return [self._seals.envelope(each, now) for each in outgoing]

    def _hears(self, sender: bytes, message: ToBroker) -> bool:
        """It repeats what matters."""
        if sender in self._strangers:
            return False
        self._strangers.add(sender)
        self._questions += isinstance(message, Ask)
        return self._questions <= QUESTIONS or not isinstance(message, Ask)

    def handle(self, sender: bytes, message: ToBroker, now: float) -> list[Outgoing]:
        """Decides on a message; returns the messages to send, with their recipients."""
        self.run.outgoing = []
        match message:
            case Report() | Finished() | Failed() | Goodbye():
                self._handle_member(sender, message, now)
            case Hello():
                self._registration.answer(message, sender, now)
                self._start_if_all_present()
            case Declined(host, pid, reason):
                self.run.events.count("declined", f"process {pid} on host {host} does not join: {reason}")
                self.run.note_declined(host, pid, reason)
                self.run.outgoing.append((sender, Answer("declined/1", {})))
            case Exited():
                self._supervision.note_exit(message, now)
            case StopRun():
                self.is_interrupted = self.is_interrupted or (self.run.outcome is None and not message.over)
                self._shutdown.stop(message, now)
            case Ask():
                self.run.outgoing.append(self.answer(sender, message, now))
        return self.run.outgoing

    def answer(self, sender: bytes, ask: Ask, now: float) -> Outgoing:
        """The answer to a query. It may come in the middle of another message, while the store waits."""
        return sender, answer(RunView(now, self.run, self._restart, self._supervision), ask)

    def tick(self, now: float) -> list[Outgoing]:
        """What is due by time. Call it several times a second, after all messages that have arrived were handled."""
        self.run.outgoing = []
        self.run.events.turn(now)
        self._strangers.clear()
        self._questions = 0
        away, self._ticked = now - self._ticked, now
        if away > max(self.run.config.lease / 2, AWAY):
            self.run.events.warnings.append(f"the broker itself was away for {away:.1f} s; every lease starts over")
            self.run.registry.restart_leases(now)
            self.run.replacements.restart_deadlines(now)
        match self.run.lifecycle.state:
            case RunState.RECONCILING:
                self._reconcile(now)
            case RunState.RECONNECTING:
                self._supervision.check_partings(now)
                if self.run.lifecycle.state is RunState.RECONNECTING:  # a failure may have ended the run
                    self._restart.reconnect(now)
                    self._start_if_all_present()
                if self.run.lifecycle.state is RunState.RECONNECTING:
                    self._shutdown.stop_if_due(now)
            case RunState.STOPPED | RunState.FINISHED | RunState.FAILED | RunState.DISMISSED:
                self._supervision.mark_lost(now)
                self.ordering.tick(now)  # workers that are to finish a step may wait for its order
            case _:
                self._supervise(now)
        return self.run.outgoing

    def keep_observation(self, now: float) -> None:
        """Stores what only this process knows, for those who ask after its end: call it about once a second."""
        self.run.store.put(OBSERVED, observe(self.run, self._restart.damages, now))

    def _start_if_all_present(self) -> None:
        if self.run.lifecycle.state is RunState.WAITING and self.run.registry.begun:
            self.run.lifecycle.move(RunEvent.ALL_PRESENT)
            if self.stop_requested:  # before the records were lost
                self.run.lifecycle.move(RunEvent.STOP_REQUESTED)

    def _supervise(self, now: float) -> None:
        self._shutdown.note_progress(now)
        self._supervision.check(now)
        self._finishing.check(now)
        if self.run.lifecycle.state is RunState.CHOOSING_CHECKPOINT:
            self._restart.choose_checkpoint(now)
        self._shutdown.stop_if_due(now)
        if not self.run.lifecycle.over:
            self._registration.promote(now)
            self._supervision.check_empty_places(now)
            self._trim(now)
            self.ordering.tick(now)

    def _reconcile(self, now: float) -> None:
        if self._restart.reconcile(now):
            self._start_if_all_present()
            self._registration.assign_again()

    def _handle_member(self, sender: bytes, message: FromMember, now: float) -> None:
        member = self.run.registry.current(message.incarnation)
        if (
            isinstance(message, Report)
            and message.complete > self.run.checkpoints.complete
            and self.run.lack_checkpoint(message.complete, member)
        ):
            self._restart.lose_records(
                f"a worker knows of checkpoint {message.complete}, the broker's records do not", now
            )
        if isinstance(message, Report) and member is not None and self.run.lack_order(message):
            self._restart.lose_records("a worker knows of a schedule that the broker's records do not have", now)
        if member is None or self.run.lifecycle.state is RunState.RECONCILING:
            self._registration.answer_unknown(message, sender)
            return
        self.run.registry.note_contact(member, sender, now)
        if isinstance(message, Report | Finished):
            self._supervision.note_alive(member)
        match message:
            case Report():
                self._ingest(member, message, now)
            case Finished():
                self._finish(member, message, now)
            case Failed() | Goodbye():
                self._supervision.note_parting(member, message, now)

    def _ingest(self, member: Member, report: Report, now: float) -> None:
        if wrong := implausible(report):
            self.run.events.count("implausible", f"{member.label} reports what cannot be: {wrong}")
            return
        self.run.registry.note_report(member, report, now)
        if (place := self.run.digests.differing(report.digests)) is not None:
            self.run.fail(_DIFFERING.format(*place), ExitCode.FAILED)
        if self.run.digests.differed:  # now or before: later snapshots contain what came of it too
            report = msgspec.structs.replace(report, snapshots=[])
        self._note_training_steps(member, report.training_steps)
        holder = Holder(member.name, member.incarnation)
        found = self.run.ledger.ingest(report, member.stages, holder, counted=member.counted)
        if found.steps:
            self.run.store.append(found.steps, found.losses)
            member.counted.update(record.stage for record in found.steps)
        self.ordering.note(member, report, found.steps, now)
        found.illegal.extend(self._add_evaluations(report, member))
        if report.snapshots or (report.steps and self.run.checkpoints.candidates):
            found.illegal.extend(self._record_snapshots(report, member))
            if self.run.outcome is not None:
                self._shutdown.update_outcome(self.run.outcome)
        for error in found.illegal:
            self.run.events.count("illegal", f"{member.label} reports what cannot be: {error}")
        if (report.actions or member.is_script) and member.index in self.run.replacements.pending:
            since = now - self.run.replacements.pending.pop(member.index).since
            does = "is there again" if member.is_script else "computes again"
            self.run.events.infos.append(f"{member.label} {does}, {since:.1f} s after its loss was detected")
        if report.number:
            self.run.outgoing.append((member.sender, Confirmed(report.number)))
        if self.run.outcome is not None:
            self.run.outgoing.append((member.sender, self.run.outcome.stop_message))

    def _note_training_steps(self, member: Member, told: int | None) -> None:
        """Note after how many steps the run ends.

        The script alone knows that of a scripted run, once it makes no more calls. Until then it tells None, which
        replaces what a lost script before it has told.
        """
        if self.run.config.scripted:
            if member.is_script and member.reachable:
                self._shutdown.called_for = told
        elif told is not None:
            self.run.training_steps = self.run.steps_to_train_of(told)

    def _add_evaluations(self, report: Report, member: Member) -> list[IllegalTransition]:
        """Stores what rounds of evaluation found, before the snapshots that come with it are counted: the best round is
        known before a checkpoint lets go of its snapshots. Returns what was wrong."""
        illegal = []
        for record in report.evaluations:
            try:
                if self.run.config.schedule.stages - 1 not in member.stages:
                    raise IllegalTransition(f"the evaluation after step {record.step} is not its own")
                if self.run.add_evaluation(record):
                    self._tell(record)
            except EvaluationsDiffer as error:
                self.run.fail(str(error), ExitCode.FAILED)
            except KeyError as error:
                illegal.append(IllegalTransition(f"the evaluation after step {record.step} has no {error}"))
            except IllegalTransition as error:
                illegal.append(error)
        return illegal

    def _tell(self, record: EvaluationRecord) -> None:
        standing = self.run.evaluations.standing()
        best = ", the best so far" if standing is not None and standing.improved else ""
        self.run.events.infos.append(f"evaluation after step {record.step}: {told(record)}{best}")
        for name, value in not_finite(record).items():
            self.run.events.warnings.append(
                f"evaluation after step {record.step}: {name} is {value}, which is not better than any number"
            )

    def _record_snapshots(self, report: Report, member: Member) -> list[IllegalTransition]:
        """Records the snapshots that `member` reports; completes a checkpoint if it can. Returns what was wrong."""
        illegal = {each: wrong for each in report.snapshots if (wrong := self._wrong_with(each, report, member))}
        added = [self.run.checkpoints.add(*each) for each in report.snapshots if each not in illegal]
        completed = self.run.checkpoints.advance(self.run.ledger.finished_floor)
        if completed:
            self.run.replacements.in_a_row.clear()
        if completed or any(added):
            self.run.save()
        return [IllegalTransition(wrong) for wrong in illegal.values()]

    def _wrong_with(self, snapshot: tuple[int, int], report: Report, member: Member) -> str:
        """Why the stage cannot have written that snapshot; "" if it can."""
        stage, step = snapshot
        if stage not in member.stages:
            return f"stage {stage} is not its own"
        stopped = None if self.run.outcome is None else self.run.outcome.step
        ends = (step if self.run.config.scripted else self.run.training_steps, stopped)  # the script may end anywhere
        criterion, rounds = self.run.config.criterion, self.run.rounds
        keeps = self.run.config.keeps_best or (criterion is not None and criterion.patience is not None)
        evaluated = keeps and (rounds is None or rounds.due(step))  # it may be the last step: the verdict comes later
        if not evaluated and not is_due(step, self.run.config.snapshot_every, ends):
            return f"stage {stage} writes no snapshot of step {step}"
        # If there are so many steps that they do not fit into one report, snapshots come before the rest of them.
        full = is_full(len(report.steps), sum(len(record.times) for record in report.steps))
        if stage in member.counted and not full and step > self.run.ledger.finished[stage]:
            return f"stage {stage} has not come to step {step}, of which it has a snapshot"
        return ""

    def _finish(self, member: Member, finished: Finished, now: float) -> None:
        if self.run.outcome is not None:
            self.run.outgoing.append((member.sender, self.run.outcome.stop_message))
            return
        if member.is_script:
            self.run.events.count("illegal", f"{member.label} has no stages, and says that it has finished them")
            return
        outcome = self._finishing.note(member, finished, now)
        if outcome is not None and outcome.code:
            self.run.fail(outcome.reason, outcome.code)
        elif outcome is not None:
            self.run.training_steps = self.run.ledger.finished_floor  # of which the result tells
            self.keep_observation(now)  # first: records that say that it has finished have their whole result
            self.run.end(RunEvent.ALL_FINISHED, outcome)

    def _trim(self, now: float) -> None:
        floor = self.run.trimmable
        due = floor > self._trimmed and not self.run.lifecycle.over and now - self._trimmed_at >= TRIM_EVERY
        if due and (announcement := self.run.announcement(floor)) is not None:
            self._trimmed, self._trimmed_at = floor, now
            self.run.broadcast(announcement)
