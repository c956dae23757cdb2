"""A scripted run's broker starts again, with its records kept, old or lost. The script is a member without stages."""

import copy

import msgspec
import pytest

from stageline.broker.control.checkpoints import Trim
from stageline.broker.control.messages import Assigned, FromBroker, Hello, Refused, Standby, Stop
from stageline.broker.control.store import MemoryStore
from stageline.broker.coordinator.run import RunPhase, run_of
from stageline.broker.coordinator.state import Life
from support.conversation import PLAN, Conversation, having_read, hello, name, report
from support.scripted import (
    SCRIPT,
    SCRIPTED,
    heartbeats,
    join_script,
    knows,
    reach,
    script_hello,
    script_says,
    scripted,
)

Sends = list[tuple[bytes, FromBroker]]
LEASE = SCRIPTED.lease


def run_at_40(store: MemoryStore | None = None) -> Conversation:
    """Checkpoint 40 is complete; the script has asked for 47 steps."""
    talk = scripted(store)
    reach(talk, 40)
    talk.send(name(SCRIPT), script_says(calls=60, complete=40))
    return talk


def again(talk: Conversation, *, resume: bool = True, alone: bool = False) -> Conversation:
    """The broker is killed and started again on its records, some seconds later."""
    run_of(talk.store, PLAN, "run-1", b"", resume=resume, alone=alone)
    return Conversation(talk.store, now=talk.now + 5.0, terms=SCRIPTED)


def without_records() -> Conversation:
    """The broker of a run at checkpoint 40 is started again with nothing."""
    return Conversation(MemoryStore(), now=100.0, terms=SCRIPTED)


def remembering(index: int, incarnation: int, *, step: int = 45, complete: int = 40) -> Hello:
    there = [(index, 20), (index, 40)]
    said = hello(index, incarnation=incarnation, endpoint=f"ipc://{index}")
    return msgspec.structs.replace(said, memory=knows(index, complete=complete, step=step), snapshots=there)


def script_remembering(incarnation: int, *, step: int = 47, complete: int = 40) -> Hello:
    return script_hello(incarnation, memory=knows(SCRIPT, complete=complete, step=step))


def assignments(sends: Sends) -> dict[bytes, Assigned]:
    return {to: message for to, message in sends if isinstance(message, Assigned)}


# The records are kept


def test_a_broker_that_only_restarts_knows_its_script():
    talk = again(run_at_40(), resume=False)
    assert talk.core.run.lifecycle.state is Life.RUNNING
    sends = talk.send(name(SCRIPT), script_hello(3))
    assert sends[0] == (name(SCRIPT), Assigned("run-1", SCRIPT, 3, 0))
    assert (name(SCRIPT), Trim(40)) in sends
    heartbeats(talk, 15.0, 0, 1, SCRIPT)
    assert talk.core.run.lifecycle.state is Life.RUNNING


def test_while_reconnecting_a_script_alone_keeps_the_run_going():
    """All workers were killed with the broker: the script goes on, and they are replaced."""
    talk = again(run_at_40())
    assert talk.core.run.lifecycle.state is Life.RECONNECTING
    talk.send(name(SCRIPT), script_says())
    talk.after(0.2)
    assert talk.core.run.lifecycle.state is Life.RUNNING
    heartbeats(talk, 11.0, SCRIPT)
    assert talk.core.run.registry.missing == [0, 1]
    for index in (0, 1):
        assert talk.assigned(name(index), msgspec.structs.replace(hello(index), pid=200 + index)).step == 40
    assert talk.core.run.registry.members[SCRIPT].incarnation == 3


def test_while_reconnecting_workers_alone_keep_the_run_going_until_the_script_is_lost():
    talk = again(run_at_40())
    for _ in range(18):
        assert not [each for each in heartbeats(talk, 0.5, 0, 1) if isinstance(each[1], Stop)]
    assert talk.core.run.lifecycle.state is Life.RUNNING
    sends = heartbeats(talk, 13.0, 0, 1)
    (stop,) = {message for _, message in sends if isinstance(message, Stop)}
    assert (stop.code, talk.status()["restarts"]) == (75, 0)
    assert stop.reason == (
        "the script is gone: script (pid 102, host desk) was silent for 10.0 s (recovery.lease is 10 s). "
        "It had sent no report to this broker; the state after 40 steps is saved"
    )


def test_a_run_of_which_nothing_runs_any_more_begins_when_workers_and_script_are_there_again():
    talk = again(run_at_40())
    talk.after(LEASE + 1)
    assert talk.core.run.lifecycle.state is Life.CHOOSING_CHECKPOINT
    assert talk.core.run.registry.members == {}
    check_that_all_begin_at_40(talk)


@pytest.mark.parametrize("first", ["the script", "the workers"])
def test_the_checkpoint_is_chosen_without_the_script_which_has_no_snapshots(first: str):
    talk = again(run_at_40(), alone=True)
    assert talk.core.run.lifecycle.state is Life.CHOOSING_CHECKPOINT
    if first == "the script":
        ((_, said),) = talk.send(name(SCRIPT), script_hello(pid=777))
        assert isinstance(said, Standby)
        assert said.reason == (
            "the run continues when all workers have verified their snapshots of step 40; "
            "it waits for worker 0 (stage 0) and worker 1 (stage 1)"
        )
    check_that_all_begin_at_40(talk)


def check_that_all_begin_at_40(talk: Conversation) -> None:
    for index in (0, 1):
        talk.send(name(index), msgspec.structs.replace(having_read(index, 40), pid=200 + index))
    talk.after(0.2)
    assert talk.core.run.lifecycle.state is Life.WAITING
    for index in (0, 1):
        given = talk.assigned(name(index), msgspec.structs.replace(having_read(index, 40), pid=200 + index))
        assert given.step == 40
        at = hello(index, incarnation=given.incarnation, endpoint=f"ipc://{index}")
        talk.send(name(index), msgspec.structs.replace(at, pid=200 + index))
    assert talk.core.run.registry.missing == [SCRIPT]
    assert talk.core.run.phase is RunPhase.WAITING
    assert join_script(talk, pid=777) == 40
    assert talk.core.run.lifecycle.state is Life.RUNNING


def test_a_damaged_checkpoint_is_found_out_before_the_script_begins():
    talk = again(run_at_40(), alone=True)
    damaged = having_read(1, 40, "the snapshot stage-1/step-40 cannot be used", there=[20])
    talk.send(name(0), having_read(0, 40, there=[20])), talk.send(name(1), damaged)
    talk.after(0.2)
    talk.send(name(0), having_read(0, 20, there=[40])), talk.send(name(1), having_read(1, 20, there=[40]))
    talk.after(0.2)
    assert talk.core.run.checkpoints.complete == 20
    assert join_script(talk, pid=777) == 20


# The records are lost


def test_a_script_that_runs_is_kept_with_the_workers_under_a_new_incarnation():
    talk = without_records()
    for index in (0, 1):
        talk.send(name(index), remembering(index, index + 1))
    talk.send(name(SCRIPT), script_remembering(3))
    assert talk.core.run.lifecycle.state is Life.RECONCILING
    given = assignments(talk.after(LEASE + 0.2))
    assert {to: (each.index, each.step, each.keep) for to, each in given.items()} == {
        name(index): (index, 40, True) for index in (0, 1, SCRIPT)
    }
    assert talk.core.run.lifecycle.state is Life.RUNNING
    assert "the run is at checkpoint 40; 2 workers keep running" in talk.core.run.events.infos


def test_a_script_alone_keeps_its_place_and_the_workers_begin_at_the_newest_snapshots():
    talk = without_records()
    talk.send(name(SCRIPT), script_remembering(3))
    talk.after(1.0)
    for index in (0, 1):
        there = msgspec.structs.replace(hello(index), pid=200 + index, snapshots=[(index, 20), (index, 40)])
        assert isinstance(talk.send(name(index), there)[0][1], Standby)
    sends: Sends = []
    for _ in range(24):
        for index in (0, 1):
            there = msgspec.structs.replace(hello(index), pid=200 + index, snapshots=[(index, 20), (index, 40)])
            sends += talk.send(name(index), there)
        sends += talk.send(name(SCRIPT), script_remembering(3)) if not assignments(sends) else []
        sends += talk.after(0.5)
    given = assignments(sends)
    assert {to: (each.step, each.keep) for to, each in given.items()} == {
        name(0): (40, False), name(1): (40, False), name(SCRIPT): (40, True),
    }  # fmt: skip


def test_a_script_that_is_gone_when_the_records_are_lost_has_a_lease_to_be_resumed():
    talk = without_records()
    for index in (0, 1):
        talk.send(name(index), remembering(index, index + 1))
    given = assignments(talk.after(LEASE + 0.2))
    assert talk.core.run.registry.missing == [SCRIPT]
    sends: Sends = []
    for _ in range(24):
        for index in (0, 1):
            at = given[name(index)].incarnation
            sends += talk.send(name(index), msgspec.structs.replace(report(index), incarnation=at))
        sends += talk.after(0.5)
    (stop,) = {message for _, message in sends if isinstance(message, Stop)}
    assert (stop.reason, stop.code) == ("the script did not reconnect; the state after 40 steps is saved", 75)


def test_the_calls_of_a_script_do_not_make_a_run_late_that_has_finished_no_step():
    """A worker is absent, and the others have looked: there are no snapshots anywhere, so none can be missed."""
    talk = without_records()
    nothing = msgspec.structs.replace(remembering(0, 1, step=0, complete=0), snapshots=[])
    talk.send(name(0), nothing)
    talk.send(name(SCRIPT), script_remembering(3, step=1, complete=0))
    given = assignments(talk.after(LEASE + 0.2))
    assert {to: (each.step, each.keep) for to, each in given.items()} == {name(0): (0, True), name(SCRIPT): (0, True)}


def test_if_the_announced_checkpoint_is_nowhere_a_running_script_cannot_go_back():
    talk = without_records()
    talk.send(name(SCRIPT), script_remembering(3, step=61, complete=60))
    for index in (0, 1):
        talk.send(name(index), remembering(index, index + 1))
    talk.after(LEASE + 0.2)
    assert talk.core.run.checkpoints.complete == 40
    assert talk.core.run.registry.members == {}
    ((_, refused),) = talk.send(name(SCRIPT), script_says(calls=61))
    assert isinstance(refused, Refused)
    assert join_script(talk, pid=777) == 40


def test_a_resumed_run_without_records_needs_the_snapshots_alone():
    """Everything was killed, the records too: workers tell of their snapshots, and the script comes when it comes."""
    store = MemoryStore()
    run_of(store, PLAN, "run-1", b"", resume=True, alone=True)
    talk = Conversation(store, now=100.0, terms=SCRIPTED)
    assert talk.core.run.lifecycle.state is Life.RECONCILING
    assert isinstance(talk.send(name(SCRIPT), script_hello(pid=777))[0][1], Standby)
    for index in (0, 1):
        there = msgspec.structs.replace(hello(index), pid=200 + index, snapshots=[(index, 20), (index, 40)])
        talk.send(name(index), there)
    talk.after(0.2)
    assert talk.core.run.lifecycle.state is Life.CHOOSING_CHECKPOINT
    check_that_all_begin_at_40(talk)


# The records are old


def test_old_records_are_noticed_by_a_script_that_they_do_not_name():
    store = MemoryStore()
    talk = run_at_40(store)
    backup = copy.deepcopy(store)
    talk.send(name(SCRIPT), script_says())
    talk.after(LEASE + 1)
    heartbeats(talk, 0.5)
    old = Conversation(backup, now=100.0, terms=SCRIPTED)
    newer = msgspec.structs.replace(script_remembering(9), pid=777)
    old.send(name(SCRIPT), newer)
    assert old.core.run.lifecycle.state is Life.RECONCILING
    for index in (0, 1):
        old.send(name(index), remembering(index, index + 1))
    given = assignments(old.after(LEASE + 0.2))
    assert given.keys() == {name(0), name(1), name(SCRIPT)}
    assert old.core.run.registry.members[SCRIPT].pid == 777


def test_old_records_are_noticed_by_a_checkpoint_that_only_the_script_was_told():
    store = MemoryStore()
    talk = run_at_40(store)
    old = Conversation(copy.deepcopy(store), now=100.0, terms=SCRIPTED)
    assert talk.status()["checkpoint"] == 40
    assert old.send(name(SCRIPT), script_says(complete=60)) == []
    assert old.core.run.lifecycle.state is Life.RECONCILING


def test_old_records_are_noticed_by_a_script_that_cannot_begin_where_they_say():
    """The snapshots of checkpoint 40 were deleted after newer ones: it declines, and says what there is."""
    old = Conversation(copy.deepcopy(run_at_40(MemoryStore()).store), now=100.0, terms=SCRIPTED)
    old.core.run.registry.free(old.core.run.registry.members[SCRIPT])
    given = old.assigned(b"new", script_hello(pid=777))
    assert given.step == 40
    there = [(stage, step) for stage in (0, 1) for step in (60, 80)]
    old.send(b"new", msgspec.structs.replace(script_hello(given.incarnation, pid=777), snapshots=there))
    assert old.core.run.lifecycle.state is Life.RECONCILING
