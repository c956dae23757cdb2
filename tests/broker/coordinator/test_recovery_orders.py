"""Whatever the order in which workers come, report, die, wake up, and the broker is killed: recovery's rules hold.

A model of the processes is driven at random against the real core. It knows, of each process, what it has really done.
"""

import copy
from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stageline.broker.control.checkpoints import Trim
from stageline.broker.control.messages import (
    CONTROL_VERSION,
    Assigned,
    Exited,
    FromBroker,
    Hello,
    Peers,
    Refused,
    Report,
)
from stageline.broker.control.records import StepRecord, WorkerRecord
from stageline.broker.control.store import MemoryStore
from stageline.broker.coordinator.records import facts_of
from stageline.broker.coordinator.run import RunPhase
from stageline.broker.coordinator.state import Life
from stageline.pipeline.schedule import make_schedule
from support.conversation import PLAN, TERMS, Conversation

PLACEMENT = ((0, 2), (1,))
STAGES = 3
EVERY = 2  # steps between snapshots
LENGTH = 30  # steps of the run
SCHEDULE = make_schedule("1f1b", PLACEMENT, 2)
ENDLESS = replace(TERMS, schedule=SCHEDULE, restarts=10**6, snapshots=True, log_every=1)


Disk = dict[int, set[int]]  # stage -> steps
RENEWED = ([Assigned, Trim], [Assigned, Peers], [Assigned, Peers, Trim], [Assigned])


@dataclass
class ModelProcess:
    """A worker process. `done` counts the steps it has done on each stage; `has` what it has on disk of them."""

    pid: int
    claim: int | None
    spare: bool
    assigned: Assigned | None = None
    alive: bool = True
    done: dict[int, int] = field(default_factory=dict)
    has: dict[int, set[int]] = field(default_factory=dict)
    complete: int = 0  # the newest checkpoint that it was told of

    @property
    def sender(self) -> bytes:
        return b"%d" % self.pid

    @property
    def stages(self) -> tuple[int, ...]:
        return PLACEMENT[self.assigned.index] if self.assigned else ()

    def begin(self, assigned: Assigned) -> None:
        if self.assigned is None:
            self.complete = assigned.step
            self.assigned = assigned
            self.done = dict.fromkeys(self.stages, assigned.step)
            self.has = {stage: {assigned.step} for stage in self.stages}
        if assigned.keep:
            assert all(done >= assigned.step for done in self.done.values())
            self.assigned = assigned
        assert self.assigned == assigned  # told twice, it is the same place, incarnation and beginning

    def hello(self, disk: Disk) -> Hello:
        incarnation = self.assigned.incarnation if self.assigned else 0
        name = f"worker-{self.pid}"
        found = sorted((stage, step) for stage, steps in disk.items() for step in steps)
        endpoint = f"ipc://{self.pid}" if incarnation else ""
        return Hello(
            CONTROL_VERSION,
            PLAN,
            name,
            "desk",
            self.pid,
            endpoint,
            self.claim,
            incarnation,
            spare=self.spare,
            memory=self.memory(),
            snapshots=found,
        )

    def memory(self) -> WorkerRecord | None:
        return self.assigned and WorkerRecord("run-1", self.assigned.index, self.complete, min(self.done.values()))

    def advance(self, stage: int, steps: int) -> None:
        before, self.done[stage] = self.done[stage], min(LENGTH, self.done[stage] + steps)
        self.has[stage] |= {step for step in range(before + 1, self.done[stage] + 1) if step % EVERY == 0}

    def report(self, *, records: bool, snapshots: bool) -> Report:
        """All its steps since it began, if they did not get lost, and its snapshots, if they are read back by now."""
        assert self.assigned is not None
        steps = [
            StepRecord(stage, step, b"", float(step) if stage == STAGES - 1 else None)
            for stage in self.stages
            for step in range(self.assigned.step, self.done[stage])
        ]
        durable = [(stage, step) for stage in self.stages for step in self.has[stage]]
        return Report(
            self.assigned.incarnation,
            sum(self.done.values()),
            "computes",
            since=0.0,
            idle=0.0,
            steps=steps if records else [],
            snapshots=durable if snapshots else [],
            number=1,
            complete=self.complete,
        )


class Orders(RuleBasedStateMachine):
    """Worker processes, a network that loses what the broker says, and the deaths of all of them."""

    @initialize()
    def begin(self) -> None:
        self.store = MemoryStore()
        self.talk = Conversation(self.store, terms=ENDLESS)
        self.processes: list[ModelProcess] = []
        self.owners: dict[int, ModelProcess] = {}  # by incarnation
        self.complete = 0
        self.backups: list[MemoryStore] = []
        self.lossless = self.informed = True
        for index in range(len(PLACEMENT)):
            self.start(index)
            self.say_hello(self.processes[index])

    def disk(self) -> Disk:
        """All share it, and nothing that is newer than what they were told to be complete is ever deleted."""
        found: Disk = {stage: set() for stage in range(STAGES)}
        for process in self.processes:
            for stage, steps in process.has.items():
                found[stage] |= {step for step in steps if step}
        return found

    def start(self, claim: int | None, *, spare: bool = False, lost: bool = False) -> None:
        self.processes.append(ModelProcess(len(self.processes), claim, spare))
        self.say_hello(self.processes[-1], lost)

    def say_hello(self, process: ModelProcess, lost: bool = False) -> None:
        self.tell(self.talk.send(process.sender, process.hello(self.disk())), lost)

    def tell(self, sends: list[tuple[bytes, FromBroker]], lost: bool = False) -> None:
        """The broker's words arrive, or do not; either way they were said."""
        for recipient, message in sends:
            process = self.processes[int(recipient)]
            match message:
                case Assigned() as assigned:
                    self.check_assignment(process, assigned)
                    if not lost and process.alive:
                        process.begin(message)
                case Trim(step):
                    assert step <= self.talk.core.run.checkpoints.complete
                    process.complete = process.complete if lost else max(process.complete, step)
                case Refused():
                    process.alive = process.alive and lost
                case _:
                    continue
        self.check_checkpoint()

    def check_assignment(self, process: ModelProcess, assigned: Assigned) -> None:
        incarnation, step = assigned.incarnation, assigned.step
        new = incarnation not in self.owners
        assert self.owners.setdefault(incarnation, process) is process
        if new:
            assert step == self.talk.core.run.checkpoints.complete
        if assigned.keep:
            assert process.assigned is not None
            return
        assert process.assigned is None or process.assigned.incarnation == incarnation

    def is_current(self, process: ModelProcess) -> bool:
        assert process.assigned is not None
        return self.talk.core.run.registry.current(process.assigned.incarnation) is not None

    def placed(self, alive: bool = True) -> list[ModelProcess]:
        return [each for each in self.processes if each.assigned and (each.alive or not alive)]

    @precondition(lambda self: len([each for each in self.processes if each.alive]) < 5)
    @rule(claim=st.sampled_from([None, 0, 1]), spare=st.booleans(), lost=st.booleans())
    def a_process_is_started(self, claim: int | None, spare: bool, lost: bool) -> None:
        self.start(claim, spare=spare, lost=lost)

    @precondition(lambda self: any(each.alive for each in self.processes))
    @rule(data=st.data(), lost=st.booleans())
    def a_process_says_hello_again(self, data: st.DataObject, lost: bool) -> None:
        self.say_hello(data.draw(st.sampled_from([each for each in self.processes if each.alive])), lost)

    @precondition(lambda self: self.placed())
    @rule(data=st.data(), steps=st.integers(1, 5), records=st.booleans(), snapshots=st.booleans())
    def a_worker_gets_on(self, data: st.DataObject, steps: int, records: bool, snapshots: bool) -> None:
        process = data.draw(st.sampled_from(self.placed()))
        for stage in process.stages:
            process.advance(stage, data.draw(st.integers(0, steps)))
        if records or snapshots:
            self.speak(process, records=records, snapshots=snapshots)

    @precondition(lambda self: self.placed())
    @rule(data=st.data(), steps=st.sampled_from([EVERY, 1, 3]))
    def all_but_one_get_on(self, data: st.DataObject, steps: int) -> None:
        lagging = data.draw(st.none() | st.sampled_from(self.placed()))
        for process in self.placed():
            for stage in process.stages if process is not lagging else ():
                process.advance(stage, steps)
            self.speak(process)

    def speak(self, process: ModelProcess, *, records: bool = True, snapshots: bool = True) -> None:
        """A worker of a stale incarnation may send messages too: they have no effect."""
        stale, before = not self.is_current(process), self.decided()
        sends = self.talk.send(process.sender, process.report(records=records, snapshots=snapshots))
        if stale:
            assert self.decided() == before
            assert [type(message) for _, message in sends] in ([Refused], [], *RENEWED)
        self.tell(sends)

    @precondition(lambda self: self.placed())
    @rule(data=st.data(), seen=st.booleans())
    def a_worker_is_killed(self, data: st.DataObject, seen: bool) -> None:
        process = data.draw(st.sampled_from(self.placed()))
        process.alive = False
        assert process.assigned is not None
        if seen:
            self.tell(self.talk.send(process.sender, Exited(process.assigned.index, process.pid, -9)))

    @precondition(lambda self: self.placed())
    @rule(data=st.data())
    def a_worker_is_killed_and_comes_back(self, data: st.DataObject) -> None:
        process = data.draw(st.sampled_from(self.placed()))
        assert process.assigned is not None
        process.alive = False
        self.tell(self.talk.send(process.sender, Exited(process.assigned.index, process.pid, -9)))
        self.tell(self.talk.after(0.5))
        self.start(process.assigned.index)
        self.say_hello(self.processes[-1])

    @rule(seconds=st.sampled_from([0.5, 2.5, 11.0]), speaking=st.booleans())
    def time_passes(self, seconds: float, speaking: bool) -> None:
        """With the live workers speaking, only the dead are lost; without, all are."""
        end = self.talk.now + seconds
        while self.talk.now < end and self.talk.core.run.outcome is None:
            if speaking:
                for process in self.placed():
                    self.speak(process, snapshots=False)
            self.tell(self.talk.after(0.5))

    @rule(now_and_then=st.booleans())
    def the_broker_is_killed_and_started_again(self, now_and_then: bool) -> None:
        self.talk = Conversation(self.store, now=self.talk.now + 1.0, terms=ENDLESS)
        self.informed = self.lossless  # what it knew of the loss of its records is gone with it
        self.check_checkpoint()
        for process in self.placed() if not self.lossless else ():
            self.say_hello(process)  # as at every new connection
        self.informed = True
        if now_and_then:
            self.backups.append(copy.deepcopy(self.store))
        assert self.talk.core.run.id == "run-1"

    @rule(backup=st.none() | st.integers(0, 9), data=st.data())
    def the_records_are_lost(self, backup: int | None, data: st.DataObject) -> None:
        """The broker begins with nothing, or with what it knew some time ago; its workers notice that it is back."""
        old = self.backups[backup % len(self.backups)] if backup is not None and self.backups else MemoryStore()
        self.store = copy.deepcopy(old)
        self.talk = Conversation(self.store, now=self.talk.now + 3.0, terms=ENDLESS)
        self.complete = 0
        self.lossless = self.informed = False
        alive = [each for each in self.processes if each.alive]
        for process in data.draw(st.permutations(alive)):
            self.say_hello(process, data.draw(st.booleans()))
        for _ in range(data.draw(st.sampled_from([6, 0, 1]))):
            for process in data.draw(st.sets(st.sampled_from(range(len(alive))))) if alive else ():
                self.say_hello(alive[process])
            self.tell(self.talk.after(2.0))
        for process in self.placed():
            self.say_hello(process)
        self.informed = True

    def decided(self) -> object:
        known = self.talk.core.run
        return facts_of(known), list(known.ledger.finished)

    def current_owners(self) -> list[ModelProcess]:
        return [self.owners[member.incarnation] for member in self.talk.core.run.registry.members.values()]

    def check_checkpoint(self) -> None:
        """It never goes back; when it comes to be, all stages' snapshots are there, and every owner has come so far."""
        known = self.talk.core.run
        complete, disk = known.checkpoints.complete, self.disk()
        assert complete >= self.complete
        if complete > self.complete:
            assert all(complete in steps for steps in disk.values())
            begun = [owner for owner in self.current_owners() if owner.assigned]  # others will begin there
            assert all(done >= complete for owner in begun for done in owner.done.values())
        if complete > self.complete and self.lossless:
            assert known.registry.missing == []
            for member in known.registry.members.values():
                assert all(complete in self.owners[member.incarnation].has[stage] for stage in member.stages)
        if known.lifecycle.state is not Life.RECONCILING and self.informed:
            begun = [owner for owner in self.current_owners() if owner.assigned]  # others may be told of a lost run's
            assert all(owner.complete <= complete for owner in begun if owner.alive)
        self.complete = complete

    @invariant()
    def the_losses_before_the_checkpoint_are_stored(self) -> None:
        assert not self.lossless or set(self.store.load().losses) >= set(range(self.complete))

    @invariant()
    def what_is_stored_is_what_was_decided(self) -> None:
        again = Conversation(self.store, now=self.talk.now, terms=ENDLESS).core.run
        assert facts_of(again)["checkpoints"] == facts_of(self.talk.core.run)["checkpoints"]
        assert again.registry.incarnation == self.talk.core.run.registry.incarnation

    @invariant()
    def only_a_place_that_stays_empty_ends_the_run(self) -> None:
        outcome = self.talk.core.run.outcome
        assert outcome is None or (outcome.phase is RunPhase.FAILED and outcome.code == 69)


TestOrders = Orders.TestCase
TestOrders.settings = settings(stateful_step_count=40)
