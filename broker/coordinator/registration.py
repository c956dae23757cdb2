"""Answers whoever says hello, calls those that stand by to the places of lost workers, and tells everyone who is where.

hello ──> assigned                           a place is free, or it is the worker's own
    ├───> standby ──(a place is free)──> assigned
    └───> refused

If a worker knows more of the run than the broker's records, they are lost, or too old; see `election`. In a run that is
resumed, all stand by until it is known whether its workers are still at work, and where to begin if not; see
`rollcall`.
"""

import msgspec

from stageline.broker.control.protocol import Assigned, Hello, Peers, Refused, Standby, Trim
from stageline.broker.membership.member import Member, place_in_words
from stageline.broker.membership.standby import Spares
from stageline.broker.recovery.reconcile import Reconciliation
from stageline.broker.recovery.resume import CheckpointPoll, ResumePoint
from stageline.pipeline.exit_code import ExitCode

from .admission import apart, misfit
from .assignments import Assignments, Outgoing
from .events import EventLog
from .run import RunConfig, RunOutcome
from .supervision import RunFailure


class Registration:
    """The broker's door. `run` is the run's id."""

    def __init__(self, crew: Assignments, terms: RunConfig, run: str, journal: EventLog) -> None:
        self.spares = Spares()
        self.election: Reconciliation | None = None  # while the records are lost
        self.listening = False  # while it is not known whether workers of a resumed run are still at work
        self.roll_call: CheckpointPoll | None = None  # while it is not known at which checkpoint a resumed run begins
        self.damages: tuple[str, ...] = ()  # what was wrong with the steps that were asked about first
        self._crew = crew
        self._terms = terms
        self._run = run
        self._journal = journal
        self._peers: dict[int, tuple[int, str]] = {}  # as last told

    def welcome(self, hello: Hello, sender: bytes, outcome: RunOutcome | None, now: float) -> list[Outgoing]:
        """Answers a hello."""
        if outcome is not None and self._belongs(hello):
            return [(sender, outcome.farewell)]
        if self._shows_a_loss(hello):
            self.elect(f"{hello.name} knows more of the run than the broker's records, which are lost, or too old", now)
        before = self._crew.registry.incarnation
        members = self._crew.registry.members.values()
        match misfit(hello, self._terms, outcome) or apart(hello, members) or self._place(hello, sender, now):
            case Member() as member:
                return self.assign(member, new=member.incarnation > before)
            case Refused() as refused:
                self._journal.odd("refused", f"{hello.name}: {refused.reason}")
                return [(sender, refused)]
            case None:
                return []
            case standby:
                self._crew.note_successor(hello)
                self.spares.note(hello, sender, now)
                return [(sender, standby)]

    def elect(self, why: str, now: float, *, resumed: bool = False) -> None:
        """The records are lost, or too old: asks everyone."""
        if self.election is None:
            tell = self._journal.tell if resumed else self._journal.warn
            tell(f"{why}: everyone is asked how far the run is")
            self.election = Reconciliation(self._crew.registry.placement, self._terms.lease, now, resumed=resumed)
            self.listening, self.roll_call = False, None

    def call_the_roll(self) -> None:
        """If the run goes on as a whole, and nobody has a place, everyone reads its snapshots first."""
        if self._crew.begins_anew:
            self.roll_call = CheckpointPoll(self._crew.registry.placement, self._crew.checkpoints.complete)

    def muster(self, now: float) -> RunFailure | None:
        """Decides where a resumed run begins, once everyone is there; why it cannot, if that is what it comes to."""
        if self.roll_call is None:
            return None
        self.spares.prune(now)
        found = self.roll_call.look(self._mustered())
        if found is None:
            return None
        for damage in found.damages[len(self.damages) :]:
            self._journal.warn(damage)
        self.damages = found.damages
        if isinstance(found, ResumePoint):
            return self._begin_at(found)
        self._journal.warn(f"checkpoint {self.roll_call.step} cannot be used: is checkpoint {found.step} whole?")
        self.roll_call = found
        return None

    @property
    def missing(self) -> list[int]:
        """The indexes for which nobody is there."""
        if self.roll_call is not None:
            return self.roll_call.absent(self._mustered())
        return self._crew.registry.missing

    def settle(self, now: float) -> list[Outgoing]:
        """Goes on with what the workers and the disks know, once they have had time to say it."""
        verdict = self.election.verdict(now) if self.election is not None else None
        if self.election is None or verdict is None:
            return []
        anew = self.election.resumed and not verdict.kept
        if anew:
            self._crew.find_again(verdict.step)
        else:
            self._crew.settle(self.election, verdict, now)
        self.election = None
        if anew:
            self.call_the_roll()
        kept = self._crew.registry.present()
        others = "" if anew else f"; {len(kept)} workers go on where they are"
        self._journal.tell(f"the run stands at checkpoint {verdict.step}{others}")
        return [send for member in kept for send in self.assign(member)]

    def call(self, now: float) -> list[Outgoing]:
        """Gives the places of lost workers to those that stand by."""
        self.spares.prune(now)
        vacant = self._crew.registry.missing if self._crew.registry.begun else []
        return [send for index in vacant for send in self._call_to(index, now)]

    @property
    def question(self) -> str:
        """What a resumed run waits for, in words; "" if that is known by now."""
        if self.listening:
            step = self._crew.checkpoints.complete
            hears = f"the broker was started again, and hears first who is still at work, for {self._terms.lease:g} s"
            return f"{hears} (a minute, if they were loading); if nobody is, all begin at checkpoint {step}"
        if self.roll_call is None:
            return ""
        absent = [place_in_words(index, self._crew.registry.placement[index]) for index in self.missing]
        others = f"; it waits for {' and '.join(absent)}" if absent else ""
        return f"the run goes on when everyone has read its snapshots of step {self.roll_call.step}{others}"

    def assign(self, member: Member, *, new: bool = False) -> list[Outgoing]:
        """Tells a worker its place."""
        if new:
            which = f"life {member.life}, incarnation {member.incarnation}"
            self._journal.tell(f"{member.place} is {member.process}, {which}")
        start, keep, since = self._crew.start_of(member), member.former > 0, self._crew.registry.since
        assigned = Assigned(self._run, member.index, member.incarnation, start, keep, since)
        return [(member.sender, assigned), *self._introduce(member.sender), *self._remind(member.sender)]

    def _shows_a_loss(self, hello: Hello) -> bool:
        if hello.plan != self._terms.plan:
            return False
        memory = hello.memory
        if memory is None:
            return self._crew.lacks_its_beginning(hello)
        if memory.run != self._run:
            return False
        return self._crew.is_strange(hello.incarnation) or self._crew.is_behind(memory.complete, hello.incarnation)

    def _belongs(self, hello: Hello) -> bool:
        """Whether the run's end is the end of this worker too."""
        has_place = self._crew.registry.current(hello.incarnation) is not None
        return has_place or hello.spare or self.spares.knows(hello)

    def _place(self, hello: Hello, sender: bytes, now: float) -> Member | Refused | Standby | None:
        if self.election is not None:
            self.election.hear(hello, sender)
            return None if hello.memory else Standby("the broker asks everyone how far the run is", self._run)
        if self.listening and not hello.incarnation:
            return Standby(self.question)
        if hello.spare and not self._crew.registry.begun:
            return Standby("the run has not begun; a spare takes the place of a worker that is lost")
        if self.roll_call is not None and self._may_answer(hello):
            return Standby(self.question, self._run, self.roll_call.step)
        found = self._crew.place(hello, sender, now)
        if isinstance(found, Refused) and self._crew.may_wait(hello):
            return Standby(found.reason)
        self.spares.forget(hello)
        return found

    def _may_answer(self, hello: Hello) -> bool:
        """Whether it can have a place in a resumed run; one from before, or with an impossible claim, cannot."""
        return not hello.incarnation and (hello.claim is None or hello.claim < len(self._terms.schedule.placement))

    def _mustered(self) -> list[Hello]:
        return [spare.hello for spare in self.spares if not spare.hello.spare]

    def _begin_at(self, verdict: ResumePoint) -> RunFailure | None:
        newest, self.roll_call = self._crew.checkpoints.complete, None
        if verdict.step is None:
            return RunFailure(
                f"checkpoint {newest} cannot be used, and there is no other one that can: "
                f"{'; '.join(verdict.damages)}. Put the files back and resume the run, or begin another",
                code=ExitCode.FAILED,
            )
        if verdict.step != newest:
            self._crew.begin_at(verdict.step)
            instead = f"checkpoint {newest} cannot be used: the run begins at checkpoint {verdict.step} instead"
            self.damages = (*self.damages, instead)
            self._journal.warn(instead)
        self._journal.tell(f"run {self._run} goes on; every stage begins at step {verdict.step}")
        return None

    def _introduce(self, sender: bytes) -> list[Outgoing]:
        """Tells who is where: everyone if that is news, else whoever has just said hello again."""
        peers = self._crew.registry.peers
        if not self._crew.registry.complete:
            return []
        if peers == self._peers:
            return [(sender, Peers(peers))]
        self._peers = peers
        self._journal.tell(f"run {self._run}: every worker is there")
        return self._crew.tell_all(Peers(peers))

    def _remind(self, sender: bytes) -> list[Outgoing]:
        """The newest checkpoint: its announcement may have been missed."""
        step = self._crew.checkpoints.complete
        return [(sender, Trim(step))] if step and self._terms.snapshots else []

    def _call_to(self, index: int, now: float) -> list[Outgoing]:
        spare = self.spares.take(index)
        if spare is None:
            return []
        member = self._crew.place(msgspec.structs.replace(spare.hello, claim=index), spare.sender, now)
        if isinstance(member, Refused):
            return []
        member.called = True
        return self.assign(member, new=True)
