"""A broker that was killed, and is started with `--resume` as containers are: workers that still run go on."""

from dataclasses import replace

import msgspec
import pytest

from stageline.broker.control.messages import (
    Answer,
    Ask,
    Assigned,
    Exited,
    Failed,
    Hello,
    Refused,
    Report,
    Standby,
    StopRun,
)
from stageline.broker.control.records import WorkerRecord
from stageline.broker.control.store import MemoryStore
from stageline.broker.coordinator.run import RunPhase, run_of
from stageline.broker.coordinator.state import Life
from stageline.broker.ledger.recovery import EarlierRun
from support.conversation import PLAN, SNAPSHOTS, TERMS, Conversation, finished, having_read, hello, name, steps

MEMORY = WorkerRecord("run-1", 0, 40, 47)


def at_work(store: MemoryStore | None = None) -> Conversation:
    """Checkpoint 40 is complete, and both workers are at step 47."""
    talk = Conversation(store, terms=SNAPSHOTS)
    for index in (0, 1):
        talk.join(index)
        more = {"snapshots": [(index, 20), (index, 40)], "steps": steps(index, *range(47), loss=0.5), "number": 1}
        talk.send(name(index), Report(index + 1, 9, "computes", 0.0, 0.0, **more))
    return talk


@pytest.fixture
def talk() -> Conversation:
    before = at_work()
    assert run_of(before.store, PLAN, "run-1", b"", resume=True) == "run-1"
    return Conversation(before.store, now=200.0, terms=SNAPSHOTS)


def why(talk: Conversation) -> dict[str, object]:
    ((_, answer),) = talk.send(b"me", Ask("why"))
    assert isinstance(answer, Answer)
    return {name: answer.facts[name] for name in ("text", "action")}


def again(talk: Conversation, *, resume: bool = True, alone: bool = False) -> Conversation:
    """The broker is killed and started again."""
    run_of(talk.store, PLAN, "run-1", b"", resume=resume, alone=alone)
    return Conversation(talk.store, now=talk.now + 5.0, terms=talk.core.run.config)


def working(index: int, turn: int = 0) -> Report:
    return Report(index + 1, 12 + turn, "computes", 0.0, 0.0, number=2 + turn)


def test_workers_that_are_still_at_work_keep_their_places_and_what_they_have(talk):
    assert talk.after(0.5) == []
    talk.send(name(0), Report(1, 12, "computes", 0.0, 0.0, steps=steps(0, 47), number=2))
    talk.after(0.5)
    talk.send(name(1), Report(2, 12, "computes", 0.0, 0.0, steps=steps(1, 47, loss=0.5), number=2))
    talk.after(0.5)
    assert talk.core.run.ledger.finished == [48, 48]
    assert [member.incarnation for member in talk.core.run.registry.reachable()] == [1, 2]
    assert talk.status()["restarts"] == 0
    assert again(talk, resume=False).core.run.lifecycle.state is not Life.RECONNECTING


def test_if_no_worker_reconnects_within_a_lease_all_begin_again(talk):
    talk.after(9.0)
    assert talk.core.run.phase is RunPhase.RUNNING
    assert len(talk.core.run.registry.members) == 2
    talk.after(2.0)
    assert talk.core.run.registry.members == {}
    assert talk.core.run.lifecycle.state is Life.CHOOSING_CHECKPOINT
    assert talk.core.run.ledger.finished == [40, 40]


def test_workers_that_were_started_again_are_known_by_their_names_and_wait_two_seconds(talk):
    for index in (0, 1):
        ((_, said),) = talk.send(name(index), msgspec.structs.replace(hello(index), pid=7))
        assert isinstance(said, Standby)
        assert "waiting up to 10 s for running workers to reconnect (60 s if they were loading)" in said.reason
        assert said.reason.endswith("if none does, all begin at checkpoint 40")
    assert why(talk) == {"text": said.reason, "action": "wait: the run continues by itself"}
    assert talk.status()["listening"]
    assert {worker["standing"] for worker in talk.status()["workers"]} == {"unheard"}
    talk.after(2.5)
    for index in (0, 1):
        ((_, said),) = talk.send(name(index), msgspec.structs.replace(hello(index), pid=7))
        assert isinstance(said, Standby)
        assert said.step == 40
    sends = []
    for index in (0, 1):
        talk.send(name(index), msgspec.structs.replace(having_read(index, 40), pid=7))
    talk.after(0.2)
    for index in (0, 1):
        sends += talk.send(name(index), msgspec.structs.replace(having_read(index, 40), pid=7))
    assert [said.step for _, said in sends if isinstance(said, Assigned)] == [40, 40]


def test_a_running_worker_continues_and_only_the_lost_one_is_replaced(talk):
    assert isinstance(talk.send(name(1), msgspec.structs.replace(hello(1), pid=7))[0][1], Standby)
    talk.send(name(0), Report(1, 12, "computes", 0.0, 0.0, steps=steps(0, 47), number=2))
    talk.after(2.5)
    talk.send(name(0), Report(1, 13, "computes", 0.0, 0.0, number=3))
    assert talk.assigned(name(1), msgspec.structs.replace(hello(1), pid=7)).step == 40
    assert talk.core.run.ledger.finished == [48, 40]
    assert talk.core.run.registry.members[0].incarnation == 1


def test_a_worker_that_registers_again_is_at_work_too(talk):
    talk.send(name(0), msgspec.structs.replace(hello(0, incarnation=1, endpoint="ipc://0"), memory=MEMORY))
    talk.after(0.2)
    assert talk.core.run.lifecycle.state is not Life.RECONNECTING


def test_a_new_worker_stands_by_until_the_workers_before_it_have_reconnected_or_are_lost(talk):
    """It comes from another machine, or without an index, and it is not known yet whose place it might take."""
    stranger = msgspec.structs.replace(hello(1), name="spot-7", host="elsewhere", claim=None)
    assert isinstance(talk.send(b"stranger", stranger)[0][1], Standby)
    talk.send(name(0), working(0))
    talk.after(0.2)
    ((_, said),) = talk.send(b"stranger", stranger)
    assert isinstance(said, Standby)
    assert "it has not reconnected yet" in str(why(talk)["text"])
    assert why(talk)["action"] == "wait: it reconnects, or is declared lost in 10 s"
    for turn in range(12):
        sends = talk.after(1.0)
        talk.send(name(0), working(0, turn))
        if any(isinstance(message, Assigned) and to == b"stranger" for to, message in sends):
            break
        talk.send(b"stranger", stranger)
    assert talk.core.run.registry.members[1].name == "spot-7"


def spare(pid: int) -> Hello:
    return msgspec.structs.replace(hello(1), name=f"spare-{pid}", pid=pid, claim=None, spare=True)


@pytest.mark.parametrize(("told", "seconds"), [(True, 2), (False, 12)], ids=["exit reported", "exit not known"])
def test_a_spare_that_died_with_the_broker_which_gave_it_a_place_is_not_waited_for_as_if_it_were_loading(
    told: bool, seconds: int
):
    """The next broker waited for `recovery.loading`, 60 s here, though another spare stood by."""
    before = at_work()
    before.send(b"first", spare(301))
    before.send(b"supervisor", Exited(1, 101, -9))
    assert [to for to, message in before.after(1.0) if isinstance(message, Assigned)] == [b"first"]
    talk = again(before, resume=False)
    if told:
        talk.send(b"supervisor", Exited(1, 301, -9))
    sends = []
    for turn in range(seconds):
        talk.send(name(0), working(0, turn))
        talk.send(b"second", spare(302))
        sends += talk.after(1.0)
    assert [to for to, message in sends if isinstance(message, Assigned)] == [b"second"]


def test_once_all_have_reconnected_a_new_worker_is_refused(talk):
    for index in (0, 1):
        talk.send(name(index), working(index))
    talk.after(0.2)
    stranger = msgspec.structs.replace(hello(1), name="spot-7", host="elsewhere")
    assert isinstance(talk.send(b"stranger", stranger)[0][1], Refused)


def test_without_recovery_a_part_of_the_workers_is_of_no_use():
    before = Conversation(MemoryStore(), terms=TERMS)
    for index in (0, 1):
        before.join(index)
    talk = again(before)
    talk.send(name(0), working(0))
    talk.after(0.2)
    assert talk.core.run.lifecycle.state is Life.RECONNECTING
    talk.send(name(1), working(1))
    talk.after(0.2)
    assert [member.incarnation for member in talk.core.run.registry.reachable()] == [1, 2]
    talk = again(talk)
    for turn in range(12):
        talk.send(name(0), working(0, turn))
        talk.after(1.0)
    assert (talk.core.run.registry.members, talk.core.run.phase) == ({}, RunPhase.WAITING)


def test_without_recovery_a_failure_ends_the_run_in_the_turn_in_which_the_last_worker_reconnects():
    """The broker let the failed run go on, and ended with an error of its own."""
    before = Conversation(MemoryStore(), terms=TERMS)
    for index in (0, 1):
        before.join(index)
    talk = again(before)
    talk.send(name(0), Failed(1, "the disk is full", 1))
    talk.now += 1.5  # without a turn of the broker
    talk.send(name(1), working(1))
    talk.core.tick(talk.now)
    assert talk.core.run.lifecycle.state is Life.FAILED
    assert talk.core.run.outcome is not None
    assert "the disk is full" in talk.core.run.outcome.reason


@pytest.mark.parametrize("at_step_end", [False, True])
def test_it_can_be_stopped_meanwhile_and_stays_stopped(talk, at_step_end: bool):
    talk.send(b"me", StopRun("enough", at_step_end))
    talk.after(2.0)
    assert talk.core.run.outcome is not None
    assert (talk.core.run.phase, talk.core.run.outcome.code) == (RunPhase.FAILED, 75)
    assert again(talk, resume=False).core.run.outcome == talk.core.run.outcome
    resumed = again(talk)
    assert (resumed.core.run.registry.members, resumed.core.run.outcome) == ({}, None)
    assert again(resumed, resume=False).core.run.outcome is None


def test_a_run_that_ends_while_workers_may_reconnect_has_ended(talk):
    for index in (0, 1):
        talk.send(name(index), finished(index))
    assert talk.core.run.phase is RunPhase.FINISHED
    for resume in (False, True):
        run = again(talk, resume=resume).core.run
        assert (run.phase, run.all_left, run.all_heard) == (RunPhase.FINISHED, True, False)


def test_a_worker_that_knows_more_than_the_records_starts_reconciliation_and_the_end_of_that_run_lasts(talk):
    for index in (0, 1):
        knows = WorkerRecord("run-1", index, 60, 61)
        both = [(0, 60), (1, 60)]
        said = msgspec.structs.replace(hello(index), incarnation=10**9 + index, memory=knows, snapshots=both)
        talk.send(name(index), said)
    assert talk.core.run.lifecycle.state is Life.RECONCILING
    assert talk.core.run.lifecycle.state is not Life.RECONNECTING
    talk.after(11.0)
    for index, member in enumerate(talk.core.run.registry.reachable()):
        talk.send(name(index), msgspec.structs.replace(finished(index), incarnation=member.incarnation))
    assert talk.core.run.phase is RunPhase.FINISHED
    assert again(talk).core.run.phase is RunPhase.FINISHED


def test_a_run_whose_workers_all_begin_again_may_put_other_messages_than_before():
    """A script that is resumed may call for other things: what both ends reported of before says nothing of those."""
    talk = Conversation(terms=SNAPSHOTS)
    talk.join(0), talk.join(1)
    for index in (0, 1):
        sent = {"snapshots": [(index, 3)], "steps": steps(index, *range(5)), "digests": [("forward-1", 4, "a" * 16)]}
        talk.send(name(index), Report(index + 1, 9, "computes", 0.0, 0.0, **sent))
    talk.send(name(1), Report(2, 9, "computes", 0.0, 0.0, complete=6))
    assert talk.core.run.lifecycle.state is Life.RECONCILING
    begun = [msgspec.structs.replace(hello(index), pid=200 + index, snapshots=[(index, 3)]) for index in (0, 1)]
    while talk.core.run.lifecycle.state is Life.RECONCILING and talk.now < 60.0:
        for index in (0, 1):
            talk.send(name(index), begun[index])
        talk.after(0.5)
    for index in (0, 1):
        given = talk.assigned(name(index), begun[index])
        assert (given.step, given.keep) == (3, False)
        other = Report(given.incarnation, 9, "computes", 0.0, 0.0, digests=[("forward-1", 4, "b" * 16)])
        talk.send(name(index), other)
    assert talk.core.run.outcome is None


def test_no_worker_is_waited_for_if_the_run_was_stopped_or_the_broker_is_alone():
    assert again(at_work(), alone=True).core.run.registry.members == {}
    stopped = at_work()
    stopped.send(b"me", StopRun("enough"))
    assert again(stopped).core.run.registry.members == {}


def test_a_broker_killed_while_workers_reconnect_is_followed_by_one_that_waits_too_unless_it_is_alone(talk):
    listening = again(talk)
    assert listening.core.run.lifecycle.state is Life.RECONNECTING
    listening.send(name(0), working(0))
    listening.after(0.1)
    assert listening.core.run.lifecycle.state is not Life.RECONNECTING
    assert again(again(listening), alone=True).core.run.registry.members == {}


EARLIER = EarlierRun(40, "runs/small-1", "runs/small-1-at40-5e1d03")
GOES_ON = replace(SNAPSHOTS, earlier=EARLIER)


def looked(talk: Conversation, *found: list[tuple[int, int]]) -> None:
    """Both workers come, with the snapshots that each has found."""
    for index, snapshots in enumerate(found):
        talk.send(name(index), msgspec.structs.replace(hello(index), snapshots=snapshots))
    talk.after(0.2)


@pytest.mark.parametrize("resume", [True, False])
def test_a_run_in_another_layout_does_not_begin_below_the_step_that_it_goes_on_from(resume: bool):
    """It was at checkpoint 0, and trained from there, if one machine had not written its snapshot."""
    store = MemoryStore()
    run_of(store, PLAN, "run-1", b"", resume=resume)
    talk = Conversation(store, now=200.0, terms=GOES_ON)
    looked(talk, [(0, 40)], [])
    outcome = talk.core.run.outcome
    assert outcome is not None
    assert (outcome.phase, outcome.code, outcome.reason) == (RunPhase.FAILED, 1, EARLIER.refusal(((0,), (1,)), [1]))
    talk = again(talk)
    looked(talk, [(0, 20), (0, 40)], [(1, 20), (1, 40)])  # 20 is the best one of the run that it goes on from
    assert talk.core.run.lifecycle.state is Life.CHOOSING_CHECKPOINT
    for index, damages in enumerate([(), ("it is damaged",)]):
        talk.send(name(index), having_read(index, 40, *damages, there=(20,)))
    talk.after(0.2)
    assert talk.core.run.outcome is not None
    assert "`stageline checkpoint split runs/small-1 --step 40 --write`" in talk.core.run.outcome.reason


def test_without_recovery_it_does_not_begin_at_all():
    talk = Conversation(MemoryStore(), terms=replace(TERMS, earlier=EARLIER))
    assert talk.core.run.phase is RunPhase.FAILED


def test_a_broker_that_resumes_a_run_without_records_does_not_say_that_it_had_some():
    store = MemoryStore()
    assert run_of(store, PLAN, "run-1", b"", resume=True) == "run-1"
    talk = Conversation(store, now=200.0, terms=SNAPSHOTS)
    ((_, said),) = talk.send(name(0), hello(0))
    assert said == Standby(
        "the broker has no records of this run and asks all workers whether and how far it has run", "run-1"
    )
