"""The broker without its sockets: a sentence comes in, it is decided and stored, sentences go out.

    waiting ──(every worker of the plan is there)──> running ──(all have finished)──> finished
       └──────────(a worker fails or is lost, someone stops the run)──┴─────────────> failed

Where workers may be replaced, a lost one leaves its place to the next that says hello, and the run keeps running.
It has no clock either; `now` is seconds since the epoch, from a clock that never goes back.
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
from stageline.broker.ledger.ledger import Ledger
from stageline.broker.membership.failure_detector import WorkerLoss
from stageline.broker.membership.member import Member, MemberStatus, place_in_words
from stageline.broker.recovery.reconcile import Reconciliation
from stageline.broker.stores.base import Store, StoredRun
from stageline.pipeline.digest import weights_sha256
from stageline.pipeline.exit_code import ExitCode

from .assignments import Assignments, Outgoing
from .events import EventLog
from .ingest import ingest_report
from .queries import answer
from .registration import Registration
from .run import RESUMED, Resuming, RunConfig, RunOutcome, RunPhase
from .shutdown import Shutdown
from .supervision import RunFailure, Supervision

TRIM_EVERY = 0.05  # seconds between two announcements
RESUMING = 600.0  # seconds that a resumed run without records waits for all its workers
AWAY = 0.5  # seconds between two ticks from which on the broker may be called away, however short the lease


class Coordinator:
    """Decides everything the broker decides. `run` is the run's id; what `store` knows of it is taken up.

    Whatever must not be forgotten is stored before it is said; `StoreUnusable` if that fails.
    """

    def __init__(self, terms: RunConfig, store: Store, run: str, now: float) -> None:
        schedule = terms.schedule
        self.terms = terms
        self.store = store
        self.run = run
        self.ledger = Ledger(schedule.stages, schedule.microbatches, terms.log_every)
        self.crew = Assignments(terms, store, self.ledger)
        self.registry = self.crew.registry
        self.replacing = self.crew.replacing
        self.outcome: RunOutcome | None = None
        self.stop_asked = False
        self.dismissed = False  # told, after the run, that it may leave
        self.training_steps: int | None = None
        self.metrics: dict[str, float] = {}
        self.journal = EventLog()
        self.reception = Registration(self.crew, terms, run, self.journal)
        self.watch = Supervision(self.crew, terms, self.ledger, self.journal)
        self._stopper = Shutdown(snapshots=terms.snapshots)
        self._was_stopped = False
        self._trimmed, self._trimmed_at = 0, now
        self._ticked = now
        self._take_up(store.load(), now)

    @property
    def phase(self) -> RunPhase:
        if self.outcome is not None:
            return self.outcome.phase
        return RunPhase.RUNNING if self.registry.begun else RunPhase.WAITING

    @property
    def everyone_left(self) -> bool:
        """Whether no worker has anything to tell any more."""
        return all(member.standing is not MemberStatus.PRESENT for member in self.registry.members.values())

    def handle(self, sender: bytes, sentence: ToBroker, now: float) -> list[Outgoing]:
        """Decides on a sentence; returns what is to be said, and to whom."""
        match sentence:
            case Hello():
                return self.reception.welcome(sentence, sender, self.outcome, now)
            case Report() | Finished() | Failed() | Goodbye():
                return self._from_worker(sender, sentence, now)
            case Exited():
                return self._note_exit(sentence, now)
            case StopRun():
                return self._stop(sentence, now)
            case Ask():
                return [(sender, answer(self, sentence, now))]

    def tick(self, now: float) -> list[Outgoing]:
        """What is due without being asked. Call it several times a second, after all that has come was handled."""
        if now - self._ticked > max(self.terms.lease / 2, AWAY):
            self.journal.warn(f"the broker itself was away for {now - self._ticked:.1f} s; every lease begins anew")
            self.crew.grant_grace(now)
        self._ticked = now
        return self._after_the_end(now) if self.outcome is not None else self._go_on(now)

    def _go_on(self, now: float) -> list[Outgoing]:
        if self.reception.election is not None:
            return self._recollect(self.reception.election, now)
        if self.reception.listening:
            return self._listen(now)
        if self.phase is RunPhase.RUNNING:
            self._stopper.note(self.ledger.begun, now)
        ended = self._fail(self.watch.look(now)) + self._fail(self.reception.muster(now)) + self._stop_if_due(now)
        if self.outcome is not None:
            return ended
        return [*self.reception.call(now), *self._fail(self.watch.waited_too_long(now)), *self._trim(now)]

    def _after_the_end(self, now: float) -> list[Outgoing]:
        for loss in self.registry.losses(now):
            done = loss.member.standing is MemberStatus.FINISHED
            loss.member.standing = MemberStatus.LEFT if done else MemberStatus.LOST
        return []

    def _take_up(self, kept: StoredRun, now: float) -> None:
        self.ledger.restore(kept.finished, kept.losses)
        self.crew.take_up(kept.facts, now)
        resuming = Resuming.told(kept.facts)
        if kept.facts.get("outcome"):
            self.outcome = msgspec.convert(kept.facts["outcome"], RunOutcome)
        elif resuming is Resuming.WITHOUT_RECORDS and self.terms.restarts:
            self.reception.elect(f"there are no records of run {self.run} here", now, resumed=True)
        elif resuming is Resuming.UNLESS_AT_WORK and self.registry.members:
            self.reception.listening = True
        elif resuming is not None:
            self._resume(now)
        else:
            self.reception.call_the_roll()

    def _resume(self, now: float) -> None:
        """Takes up a run that was stopped, or whose processes are all gone."""
        self.crew.reopen(now)
        self.store.put(RESUMED, {})
        self.journal.tell(
            f"run {self.run} is resumed; its newest complete checkpoint is {self.crew.checkpoints.complete}"
        )
        self.reception.call_the_roll()

    def _from_worker(self, sender: bytes, said: Report | Finished | Failed | Goodbye, now: float) -> list[Outgoing]:
        member = self.registry.current(said.incarnation)
        if isinstance(said, Report) and self.crew.is_behind(said.complete, said.incarnation):
            self.reception.elect(f"a worker knows of checkpoint {said.complete}, the broker's records do not", now)
        if member is None or self.reception.election is not None:
            return self._to_stranger(sender, said)
        self.registry.hear(member, sender, now)
        match said:
            case Report():
                return self._take_in(member, said, now)
            case Finished():
                return self._finish(member, said)
            case Failed():
                member.standing = MemberStatus.LEFT
                return self._fail(RunFailure(f"{member.place} failed: {said.reason}", said.code or ExitCode.FAILED))
            case Goodbye():
                return self._leave(member, said, now)

    def _recollect(self, election: Reconciliation, now: float) -> list[Outgoing]:
        """While the records are lost, everyone is listened to, and nothing else is decided."""
        patience = RESUMING if election.resumed else max(self.terms.patience, self.terms.lease)
        if now - election.began < patience or not election.unknown:
            sends = self.reception.settle(now)
            if self.reception.election is None:
                self.store.put(RESUMED, {})
            return sends
        places = " and ".join(place_in_words(index, self.registry.placement[index]) for index in election.unknown)
        what = f"the broker's records are lost, and nobody came who could say which snapshots there are of {places}"
        return self._fail(RunFailure(f"{what}; start a worker where they are", ExitCode.NO_WORKER))

    def _listen(self, now: float) -> list[Outgoing]:
        """Nobody has recorded that the run was stopped: its workers go on if they are still at work, or all begin anew
        if nobody is."""
        survive = self.crew.survives(now)
        if survive is None:
            return self._stop_if_due(now)
        self.reception.listening = False
        if survive:
            self.store.put(RESUMED, {})
            self.journal.tell(f"run {self.run} goes on: workers are still at work")
        else:
            self._resume(now)
        return []

    def _to_stranger(self, sender: bytes, said: Report | Finished | Failed | Goodbye) -> list[Outgoing]:
        """One whose incarnation the records do not know hears nothing until it has introduced itself."""
        renewed = self.registry.former(said.incarnation)
        if renewed is not None:
            renewed.sender = sender
            return self.reception.assign(renewed)
        strange = self.reception.election is not None or self.crew.is_strange(said.incarnation)
        return [] if strange else [(sender, self._fenced(said))]

    def _fenced(self, said: Report | Finished | Failed | Goodbye) -> Refused:
        self.journal.odd("fenced", f"{type(said).__name__} of incarnation {said.incarnation}, which nobody holds")
        return Refused(
            f"incarnation {said.incarnation} is not current in run {self.run}: its stages belong to another process, "
            "or its run is over. Stop this worker",
            code=ExitCode.FAILED,
        )

    def _take_in(self, member: Member, report: Report, now: float) -> list[Outgoing]:
        self.registry.beat(member, report, now)
        self.metrics |= report.metrics
        if report.training_steps is not None:
            self.training_steps = report.training_steps
        for wrong in ingest_report(report, member, self.ledger, self.store) + self.crew.note_snapshots(report, member):
            self.journal.odd("illegal", f"{member.place} reports what cannot be: {wrong}")
        self._update_outcome()
        if report.actions:
            self._note_return(member, now)
        heard: list[FromBroker] = [Heard(report.number)] if report.number else []
        farewell = [self.outcome.farewell] if self.outcome else []
        return [(member.sender, sentence) for sentence in (*heard, *farewell)]

    def _note_return(self, member: Member, now: float) -> None:
        gap = self.replacing.close(member.index)
        if gap is not None:
            self.journal.tell(f"{member.place} computes again, {now - gap.since:.1f} s after it was found to be lost")

    def _finish(self, member: Member, finished: Finished) -> list[Outgoing]:
        if self.outcome is not None:
            return [(member.sender, self.outcome.farewell)]
        member.standing = MemberStatus.FINISHED
        member.digests = finished.digests
        parts = [each.digests for each in self.registry.members.values() if each.digests is not None]
        if len(parts) < len(self.terms.schedule.placement):
            return []
        all_digests = {name: digest for part in parts for name, digest in part.items()}
        return self._end(RunOutcome(RunPhase.FINISHED, "all steps are done", ExitCode.OK, weights_sha256(all_digests)))

    def _leave(self, member: Member, goodbye: Goodbye, now: float) -> list[Outgoing]:
        failure = self.watch.lose(WorkerLoss(member, f"left: {goodbye.reason}"), now) if self.outcome is None else None
        member.standing = MemberStatus.LEFT
        return self._fail(failure)

    def _note_exit(self, exited: Exited, now: float) -> list[Outgoing]:
        if self.outcome is None:
            return self._fail(self.watch.note_exit(exited, now))
        member = self.registry.members.get(exited.index)
        if member is not None and member.pid == exited.pid:
            member.standing = MemberStatus.LEFT
        return []

    def _stop(self, stop: StopRun, now: float) -> list[Outgoing]:
        """Ends the run. Afterwards it dismisses the broker, and hastens workers that were allowed to finish a step."""
        self.stop_asked = True
        if self.outcome is None:
            self._stopper.ask(stop, now)
            return self._stop_if_due(now)
        self.dismissed = True
        if not stop.at_step_end:
            self.outcome = msgspec.structs.replace(self.outcome, at_step_end=False, step=None)
        return self._farewell(self.outcome)

    def _stop_if_due(self, now: float) -> list[Outgoing]:
        if self.outcome is not None or not self._stopper.is_due(now, running=self.phase is RunPhase.RUNNING):
            return []
        complete = self.crew.checkpoints.complete
        self._was_stopped = True
        outcome = self._stopper.outcome(complete, self.ledger.begun, self.training_steps, now)
        return self._end(outcome) if outcome is not None else []

    def _update_outcome(self) -> None:
        """Workers may have left a newer checkpoint after the run was stopped."""
        if self.outcome is None or not self._was_stopped:
            return
        better = self._stopper.better(self.outcome, self.crew.checkpoints.complete)
        if better != self.outcome:
            self.outcome = better
            self.store.put("outcome", msgspec.to_builtins(better))

    def _fail(self, failure: RunFailure | None) -> list[Outgoing]:
        """The first cause ends the run; what follows from it does not replace it."""
        if failure is None or self.outcome is not None:
            return []
        return self._end(RunOutcome(RunPhase.FAILED, failure.reason, failure.code))

    def _end(self, outcome: RunOutcome) -> list[Outgoing]:
        self.outcome = outcome
        self.store.put("outcome", msgspec.to_builtins(outcome))
        self.journal.tell(f"run {self.run} has {outcome.phase}: {outcome.reason}")
        return self._farewell(outcome)

    def _farewell(self, outcome: RunOutcome) -> list[Outgoing]:
        standing_by: list[Outgoing] = [(spare.sender, outcome.farewell) for spare in self.reception.spares]
        return self.crew.tell_all(outcome.farewell) + standing_by

    def _trim(self, now: float) -> list[Outgoing]:
        floor = self.crew.trimmable
        if self.outcome is not None or floor <= self._trimmed or now - self._trimmed_at < TRIM_EVERY:
            return []
        self._trimmed, self._trimmed_at = floor, now
        return self.crew.tell_all(Trim(floor))
