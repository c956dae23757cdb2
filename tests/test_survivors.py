"""A broker that was killed, and is started with `--resume` as containers are: whoever is still at work goes on."""

import msgspec
import pytest

from broker.control import Answer, Ask, Assigned, Memory, Report, Standby, StopRun
from broker.run import Phase, run_of
from broker.stores.memory import MemoryStore
from talk import PLAN, Talk, having_read, hello, name, steps
from test_rollcall import SNAPSHOTS


def at_work(store: MemoryStore | None = None) -> Talk:
    """Checkpoint 40 is complete, and both workers are at step 47."""
    talk = Talk(store, terms=SNAPSHOTS)
    for index in (0, 1):
        talk.join(index)
        more = {"snapshots": [(index, 20), (index, 40)], "steps": steps(index, *range(47), loss=0.5), "number": 1}
        talk.say(name(index), Report(index + 1, 9, "computes", 0.0, 0.0, **more))
    return talk


@pytest.fixture
def talk() -> Talk:
    before = at_work()
    assert run_of(before.store, PLAN, "run-1", resume=True) == "run-1"
    return Talk(before.store, now=200.0, terms=SNAPSHOTS)


def why(talk: Talk) -> object:
    ((_, answer),) = talk.say(b"me", Ask("why"))
    assert isinstance(answer, Answer)
    return answer.facts["text"]


def test_workers_that_are_still_at_work_keep_their_places_and_what_they_have(talk):
    assert talk.after(0.5) == []
    talk.say(name(0), Report(1, 12, "computes", 0.0, 0.0, steps=steps(0, 47), number=2))
    talk.after(0.5)
    talk.say(name(1), Report(2, 12, "computes", 0.0, 0.0, steps=steps(1, 47, loss=0.5), number=2))
    talk.after(0.5)
    assert talk.core.ledger.finished == [48, 48]
    assert [member.incarnation for member in talk.core.registry.present()] == [1, 2]
    assert talk.status()["restarts"] == 0
    assert not talk.store.load().facts["resumed"]
    again = Talk(talk.store, now=300.0, terms=SNAPSHOTS)
    assert not again.core.reception.listening


def test_if_nobody_is_all_begin_anew_once_they_have_had_a_lease_to_say_so(talk):
    talk.after(9.0)
    assert talk.core.phase is Phase.RUNNING
    assert len(talk.core.registry.members) == 2
    talk.after(2.0)
    assert talk.core.registry.members == {}
    assert talk.core.reception.roll_call is not None
    assert talk.core.ledger.finished == [40, 40]


def test_workers_that_were_started_again_are_known_by_their_names_and_wait_two_seconds(talk):
    for index in (0, 1):
        ((_, said),) = talk.say(name(index), msgspec.structs.replace(hello(index), pid=7))
        assert isinstance(said, Standby)
        assert "about to say so" in said.reason
    assert why(talk) == said.reason
    talk.after(2.5)
    for index in (0, 1):
        ((_, said),) = talk.say(name(index), msgspec.structs.replace(hello(index), pid=7))
        assert isinstance(said, Standby)
        assert said.step == 40
    sends = []
    for index in (0, 1):
        talk.say(name(index), msgspec.structs.replace(having_read(index, 40), pid=7))
    talk.after(0.2)
    for index in (0, 1):
        sends += talk.say(name(index), msgspec.structs.replace(having_read(index, 40), pid=7))
    assert [said.step for _, said in sends if isinstance(said, Assigned)] == [40, 40]


def test_one_that_is_at_work_goes_on_and_the_other_is_replaced_alone(talk):
    assert isinstance(talk.say(name(1), msgspec.structs.replace(hello(1), pid=7))[0][1], Standby)
    talk.say(name(0), Report(1, 12, "computes", 0.0, 0.0, steps=steps(0, 47), number=2))
    talk.after(2.5)
    talk.say(name(0), Report(1, 13, "computes", 0.0, 0.0, number=3))
    assert talk.assigned(name(1), msgspec.structs.replace(hello(1), pid=7)).step == 40
    assert talk.core.ledger.finished == [48, 40]
    assert talk.core.registry.members[0].incarnation == 1


def test_it_can_be_stopped_meanwhile(talk):
    talk.say(b"me", StopRun("enough", 130))
    talk.after(0.2)
    assert talk.core.phase is Phase.FAILED
    assert talk.core.outcome is not None
    assert talk.core.outcome.code == 75


def test_a_worker_that_knows_more_than_the_records_is_asked_like_everyone(talk):
    memory = Memory("run-1", 0, 60, 61)
    talk.say(name(0), msgspec.structs.replace(hello(0), incarnation=10**9, memory=memory, snapshots=[(0, 60)]))
    assert talk.core.reception.election is not None
    assert not talk.core.reception.listening


def test_nobody_is_listened_for_if_the_run_was_stopped_or_the_broker_is_alone():
    before = at_work()
    assert run_of(before.store, PLAN, "run-1", resume=True, alone=True) == "run-1"
    assert Talk(before.store, now=200.0, terms=SNAPSHOTS).core.registry.members == {}
    stopped = at_work()
    stopped.say(b"me", StopRun("enough", 130))
    assert run_of(stopped.store, PLAN, "run-1", resume=True) == "run-1"
    assert Talk(stopped.store, now=200.0, terms=SNAPSHOTS).core.registry.members == {}


def test_a_broker_that_is_killed_while_it_listens_is_followed_by_one_that_listens(talk):
    run_of(talk.store, PLAN, "run-1", resume=True)
    again = Talk(talk.store, now=300.0, terms=SNAPSHOTS)
    assert again.core.reception.listening
    again.say(name(0), Report(1, 12, "computes", 0.0, 0.0, number=2))
    again.after(0.1)
    assert not again.core.reception.listening
