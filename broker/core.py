"""The broker without its sockets: a sentence comes in, it is decided and stored, sentences go out.

    waiting ──(every worker of the plan is there)──> running ──(all have finished)──> finished
       └──────────(a worker fails or is lost, someone stops the run)──┴─────────────> failed

Where workers may be replaced, a lost one leaves its place to the next that says hello, and the run keeps running.
It has no clock either; `now` is seconds since the epoch, from a clock that never goes back.
"""

from collections.abc import Mapping

import msgspec

from pipeline.digest import TensorDigest, weights_sha256

from .answers import answer
from .control import (
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
from .crew import Crew, Send
from .diagnosis import Diagnosis, Prospect, diagnose
from .election import Election
from .intake import take_in
from .journal import Journal
from .ledger import Ledger
from .loss import Loss, exit_in_words
from .member import Member, Standing, place_in_words
from .obituary import obituary
from .reception import Reception
from .run import Outcome, Phase, Terms
from .standstill import Standstill
from .stopping import Pace, outcome_of
from .store import Kept, Store
from .waiting import Scene

TRIM_EVERY = 0.05  # seconds between two announcements
NOBODY = 69  # the exit code for a run that lacks a worker
AWAY = 0.5  # seconds between two ticks from which on the broker may be called away, however short the lease
_DELIBERATE = frozenset({2, 78})  # exit statuses of a process that would end likewise if it were started again
_PASSED_ON = frozenset({2, 75, 78, 130})  # a lost process's exit statuses that say more than "failed"


class Core:
    """Decides everything the broker decides. `run` is the run's id; what `store` knows of it is taken up.

    Whatever must not be forgotten is stored before it is said; `StoreUnusable` if that fails.
    """

    def __init__(self, terms: Terms, store: Store, run: str, now: float) -> None:
        schedule = terms.schedule
        self.terms = terms
        self.store = store
        self.run = run
        self.ledger = Ledger(schedule.stages, schedule.microbatches, terms.log_every)
        self.crew = Crew(terms, store, self.ledger)
        self.registry = self.crew.registry
        self.replacing = self.crew.replacing
        self.outcome: Outcome | None = None
        self.stop_asked = False
        self.dismissed = False  # told, after the run, that it may leave
        self.training_steps: int | None = None
        self.metrics: dict[str, float] = {}
        self.journal = Journal()
        self.reception = Reception(self.crew, terms, run, self.journal)
        self._ended_by: StopRun | None = None
        self._standstill = Standstill(terms.lease)
        self._pace = Pace()
        self._digests: dict[int, Mapping[str, TensorDigest]] = {}  # by worker
        self._trimmed, self._trimmed_at = 0, now
        self._ticked = now
        self._take_up(store.load(), now)

    @property
    def phase(self) -> Phase:
        if self.outcome is not None:
            return self.outcome.phase
        return Phase.RUNNING if self.registry.begun else Phase.WAITING

    @property
    def everyone_left(self) -> bool:
        """Whether no worker has anything to tell any more."""
        return all(member.standing is not Standing.PRESENT for member in self.registry.members.values())

    def handle(self, sender: bytes, sentence: ToBroker, now: float) -> list[Send]:
        """Decides on a sentence; returns what is to be said, and to whom."""
        match sentence:
            case Hello():
                return self.reception.welcome(sentence, sender, self.outcome, now)
            case Report() | Finished() | Failed() | Goodbye():
                return self._from_worker(sender, sentence, now)
            case Exited():
                return self._note_exit(sentence, now)
            case StopRun():
                return self._stop(sentence)
            case Ask():
                return [(sender, answer(self, sentence, now))]

    def tick(self, now: float) -> list[Send]:
        """What is due without being asked. Call it several times a second, after all that has come was handled."""
        if now - self._ticked > max(self.terms.lease / 2, AWAY):
            self.journal.warn(f"the broker itself was away for {now - self._ticked:.1f} s; every lease begins anew")
            self.crew.grant_grace(now)
        self._ticked = now
        self._pace.note(self.ledger.begun, now)
        if self.reception.election is not None and self.outcome is None:
            return self._recollect(self.reception.election, now)
        lost = [send for loss in self.registry.losses(now) for send in self._lose(loss, now)]
        return lost + self._fill(now) + self._end_standstill(now) + self._trim(now)

    def _end_standstill(self, now: float) -> list[Send]:
        """Ends a run in which all wait for each other: nothing will change that."""
        members = self.registry.present()
        lasts = self._standstill.lasts(members, now)
        if lasts < self._standstill.bound or self.outcome is not None or not self.registry.complete:
            return []
        places = ", ".join(f"worker {member.index} at {member.endpoint} on host {member.host}" for member in members)
        return self._fail(
            f"every worker has been waiting for another for {lasts:.0f} s: {self.diagnose(now).text}. "
            f"Can they reach each other's queues? They are: {places}. See queues.url",
            1,
        )

    def diagnose(self, now: float, worker: int | None = None) -> Diagnosis:
        """Why the run waits, or why `worker` does."""
        members, gaps = self.registry.members, self.replacing.gaps
        scene = Scene(self.terms.schedule, members, gaps, self.ledger, now)
        return diagnose(scene, Prospect(self.terms.lease, self.terms.patience, self.terms.restarts > 0), worker)

    def _take_up(self, kept: Kept, now: float) -> None:
        self.ledger.restore(kept.finished, kept.losses)
        self.crew.take_up(kept.facts, now)
        if kept.facts.get("resumed"):
            self._resume()
        elif kept.facts.get("outcome"):
            self.outcome = msgspec.convert(kept.facts["outcome"], Outcome)

    def _resume(self) -> None:
        """Takes up a run that was stopped, or whose processes are all gone."""
        self.crew.reopen()
        self.store.put("outcome", {})
        self.store.put("resumed", {})
        self.journal.tell(f"run {self.run} goes on; every stage begins at step {self.crew.checkpoints.complete}")

    def _from_worker(self, sender: bytes, said: Report | Finished | Failed | Goodbye, now: float) -> list[Send]:
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
                member.standing = Standing.LEFT
                return self._fail(f"{member.place} failed: {said.reason}", said.code or 1)
            case Goodbye():
                return self._leave(member, said, now)

    def _recollect(self, election: Election, now: float) -> list[Send]:
        """While the records are lost, everyone is listened to, and nothing else is decided."""
        if now - election.began < max(self.terms.patience, self.terms.lease) or not election.unknown:
            return self.reception.settle(now)
        places = " and ".join(place_in_words(index, self.registry.placement[index]) for index in election.unknown)
        what = f"the broker's records are lost, and nobody came who could say which snapshots there are of {places}"
        return self._fail(f"{what}; start a worker where they are", NOBODY)

    def _to_stranger(self, sender: bytes, said: Report | Finished | Failed | Goodbye) -> list[Send]:
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
            code=1,
        )

    def _take_in(self, member: Member, report: Report, now: float) -> list[Send]:
        self.registry.beat(member, report, now)
        self.metrics |= report.metrics
        if report.training_steps is not None:
            self.training_steps = report.training_steps
        for wrong in take_in(report, member, self.ledger, self.store) + self.crew.note_snapshots(report, member):
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

    def _finish(self, member: Member, finished: Finished) -> list[Send]:
        if self.outcome is not None:
            return [(member.sender, self.outcome.farewell)]
        member.standing = Standing.FINISHED
        self._digests[member.index] = finished.digests
        if len(self._digests) < len(self.terms.schedule.placement):
            return []
        all_digests = {name: digest for part in self._digests.values() for name, digest in part.items()}
        return self._end(Outcome(Phase.FINISHED, "all steps are done", 0, weights_sha256(all_digests)))

    def _leave(self, member: Member, goodbye: Goodbye, now: float) -> list[Send]:
        sends = self._lose(Loss(member, f"left: {goodbye.reason}"), now)
        member.standing = Standing.LEFT
        return sends

    def _note_exit(self, exited: Exited, now: float) -> list[Send]:
        member = self.registry.members.get(exited.index)
        how = exit_in_words(exited.status)
        if member is None and self.outcome is None and exited.index in self.registry.missing:
            return self._note_stillbirth(exited, how)
        if member is None or member.pid != exited.pid or not member.here:
            return []
        member.exited = now, exited.status
        if self.outcome is not None:
            member.standing = Standing.LEFT
        return []

    def _note_stillbirth(self, exited: Exited, how: str) -> list[Send]:
        """A process that was to take an empty place is gone; unless it is the one whose loss has emptied it."""
        gap = self.replacing.gaps.get(exited.index)
        if gap is not None and gap.pid == exited.pid:
            return []
        where = place_in_words(exited.index, self.registry.placement[exited.index])
        what = f"{where} {how} before it joined; its own output says why"
        if not self._may_replace(exited.index, exited.status):
            return self._fail(what, _code(exited.status))
        self.crew.count_loss(exited.index)
        self.journal.tell(what)
        return []

    def _may_replace(self, index: int, status: int | None) -> bool:
        return self.outcome is None and status not in _DELIBERATE and self.replacing.permits(index)

    def _lose(self, loss: Loss, now: float) -> list[Send]:
        """While the run waits for workers, one that is lost without a word of its exit only leaves its place."""
        if self.phase is Phase.WAITING and loss.status is None:
            self.registry.free(loss.member)
            self.journal.tell(f"{loss.member.place} is free again: {loss.member.process} {loss.why}")
            return []
        why = obituary(loss, self.ledger, now)
        if not self._may_replace(loss.member.index, loss.status):
            last_word = self._last_word(why, now) + self._patience_in_words(loss.member)
            loss.member.standing = Standing.LOST
            return self._fail(last_word, _code(loss.status))
        self._digests.pop(loss.member.index, None)
        self.crew.vacate(loss, why, now)
        self.journal.tell(f"{why}. Whoever takes its place begins at step {self.crew.checkpoints.complete}")
        return []

    def _patience_in_words(self, member: Member) -> str:
        times = self.replacing.times(member.index)
        if not times:
            return ""
        step, most = self.crew.checkpoints.complete, self.terms.restarts
        return f". It was replaced {times} times since checkpoint {step} (recovery.restarts is {most})"

    def _fill(self, now: float) -> list[Send]:
        """Calls whoever stands by; gives the run up if nobody has come to a place for too long."""
        if self.outcome is not None:
            return []
        called = self.reception.call(now)
        gap = next(iter(self.replacing.overdue(self.registry.missing, now)), None)
        if gap is None:
            return called
        place = place_in_words(gap.index, self.registry.placement[gap.index])
        nobody = f"nobody came within {now - gap.awaited:.0f} s to take the place of {place}"
        return self._fail(f"{nobody}: {self.diagnose(now, gap.index).text}", NOBODY)

    def _last_word(self, why: str, now: float) -> str:
        """Why a worker counts as lost, and who waited for it."""
        found = self.diagnose(now)
        if found.chain.harmless or not found.chain.lacks:
            return why
        return f"{why}. {found.text[0].upper()}{found.text[1:]}"

    def _stop(self, stop: StopRun) -> list[Send]:
        """Ends the run. Afterwards it dismisses the broker, and hastens workers that were allowed to finish a step."""
        self.stop_asked = True
        if self.outcome is None:
            self._ended_by = stop
            return self._end(outcome_of(stop, self._pace.end(self.ledger.begun, self.training_steps), self._saved))
        self.dismissed = True
        if not stop.at_step_end:
            self.outcome = msgspec.structs.replace(self.outcome, at_step_end=False, step=None)
        return self._farewell(self.outcome)

    @property
    def _saved(self) -> int | None:
        return self.crew.checkpoints.complete if self.terms.snapshots else None

    def _update_outcome(self) -> None:
        """Workers may have left a newer checkpoint after the run was stopped."""
        if self.outcome is None or self._ended_by is None:
            return
        newer = outcome_of(self._ended_by, self.outcome.step or 0, self._saved)
        if newer.reason != self.outcome.reason:
            self.outcome = msgspec.structs.replace(self.outcome, reason=newer.reason, code=newer.code)
            self.store.put("outcome", msgspec.to_builtins(self.outcome))

    def _fail(self, reason: str, code: int) -> list[Send]:
        """The first cause ends the run; what follows from it does not replace it."""
        return self._end(Outcome(Phase.FAILED, reason, code)) if self.outcome is None else []

    def _end(self, outcome: Outcome) -> list[Send]:
        self.outcome = outcome
        self.store.put("outcome", msgspec.to_builtins(outcome))
        self.journal.tell(f"run {self.run} has {outcome.phase}: {outcome.reason}")
        return self._farewell(outcome)

    def _farewell(self, outcome: Outcome) -> list[Send]:
        standing_by: list[Send] = [(spare.sender, outcome.farewell) for spare in self.reception.spares]
        return self.crew.tell_all(outcome.farewell) + standing_by

    def _trim(self, now: float) -> list[Send]:
        floor = self.crew.trimmable
        if floor <= self._trimmed or now - self._trimmed_at < TRIM_EVERY or self.outcome is not None:
            return []
        self._trimmed, self._trimmed_at = floor, now
        return self.crew.tell_all(Trim(floor))


def _code(status: int | None) -> int:
    return status if status in _PASSED_ON else 1
