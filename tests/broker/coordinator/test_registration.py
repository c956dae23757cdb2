"""Which workers get a place, and what all of them are sent."""

from dataclasses import replace

import msgspec
import pytest

from stageline.broker.control.messages import CONTROL_VERSION, Assigned, Hello, Peers, Refused, Standby
from stageline.broker.control.records import RunLength
from stageline.broker.coordinator.run import RunPhase
from support.conversation import PLAN, SETTINGS, TERMS, Conversation, hello, name


@pytest.fixture
def talk() -> Conversation:
    """A run that has just begun: both workers are there."""
    talk = Conversation()
    talk.join(0), talk.join(1)
    return talk


def test_workers_are_assigned_and_get_their_peers_once_all_have_joined():
    talk = Conversation()
    assert talk.send(b"a", hello(0)) == [(b"a", Assigned("run-1", 0, 1, 0))]
    assert talk.join(1)[1:] == []
    assert talk.core.run.phase is RunPhase.WAITING
    peers = Peers({0: (1, "ipc://a"), 1: (2, "ipc://1")})
    sends = talk.send(b"a", hello(0, incarnation=1, endpoint="ipc://a"))
    assert sends == [(b"a", Assigned("run-1", 0, 1, 0)), (b"a", peers), (name(1), peers)]
    assert talk.core.run.phase is RunPhase.RUNNING


def test_a_repeated_hello_is_answered_with_the_peers_again(talk: Conversation):
    sends = talk.send(b"new socket", hello(1, incarnation=2, endpoint="ipc://1"))
    assert sends[1:] == [(b"new socket", Peers({0: (1, "ipc://0"), 1: (2, "ipc://1")}))]


def test_a_worker_that_names_its_endpoint_at_once_need_not_repeat_it():
    talk = Conversation()
    for index in (0, 1):
        talk.send(name(index), hello(index, endpoint="memory://"))
    assert talk.core.run.phase is RunPhase.RUNNING


def test_an_incarnation_is_stored_before_it_is_handed_out():
    talk = Conversation()
    ((_, assigned),) = talk.send(b"a", hello(0))
    assert isinstance(assigned, Assigned)
    assert talk.store.load().facts["registry"]["incarnation"] == assigned.incarnation


def test_another_control_version_is_refused_naming_both():
    ((_, refused),) = Conversation().send(b"a", hello(0, version=CONTROL_VERSION + 1))
    assert isinstance(refused, Refused)
    assert (
        f"uses control protocol version {CONTROL_VERSION + 1}, the broker version {CONTROL_VERSION}" in refused.reason
    )


def test_a_worker_that_writes_no_snapshots_is_refused_where_the_others_do():
    """Its stages would have none, no checkpoint would ever be complete, and no message would say so."""
    settings = {"recovery": {"restarts": 0, "snapshot_every": 20}}
    other = Hello(CONTROL_VERSION, PLAN, "desk-2", "desk", 1, "", settings=settings)
    ((_, refused),) = Conversation(terms=replace(TERMS, restarts=5, snapshots=True)).send(b"a", other)
    assert isinstance(refused, Refused)
    assert refused.code == 78
    assert "desk-2 has recovery.restarts = 0, the broker has 5" in refused.reason


def test_another_plan_is_refused_naming_what_differs():
    other = Hello(
        CONTROL_VERSION, "e" * 64, "desk-2", "desk", 1, "", settings={"schedule": {"name": "1f1b", "microbatches": 8}}
    )
    ((_, refused),) = Conversation().send(b"a", other)
    assert isinstance(refused, Refused)
    assert refused.code == 78
    assert "desk-2 has another plan than the broker: schedule.microbatches: 8 here, 4 there" in refused.reason


@pytest.mark.parametrize("settings", [{}, {"a": [{b"\xff": 1}]}, {"schedule": SETTINGS["schedule"]}])
def test_another_plan_whose_difference_is_unknown_is_refused_by_digest(settings: dict[str, object]):
    ((_, refused),) = Conversation().send(
        b"a", Hello(CONTROL_VERSION, "e" * 64, "desk-2", "desk", 1, "", settings=settings)
    )
    assert isinstance(refused, Refused)
    assert "its digest is eeeeeeeeeeee, the broker's dddddddddddd" in refused.reason


def test_queues_on_sockets_of_one_machine_are_refused_on_two():
    talk = Conversation()
    talk.join(0)
    talk.send(name(1), msgspec.structs.replace(hello(1), host="laptop"))
    said = talk.send(name(1), msgspec.structs.replace(hello(1, incarnation=2, endpoint="ipc://1"), host="laptop"))
    (refusal,) = [message for _, message in said if isinstance(message, Refused)]
    assert refusal.code == 78
    assert "set queues.url to tcp://" in refusal.reason


LENGTH = RunLength(460, 6)


def without_data(index: int, incarnation: int = 0, endpoint: str = "") -> Hello:
    return msgspec.structs.replace(hello(index, incarnation=incarnation, endpoint=endpoint), needs_length=True)


def with_data(index: int, length: RunLength = LENGTH) -> Hello:
    return msgspec.structs.replace(hello(index), length=length)


def test_a_worker_without_data_stands_by_until_one_with_data_has_come():
    talk = Conversation()
    ((_, standby),) = talk.send(name(1), without_data(1))
    assert isinstance(standby, Standby)
    assert "no worker that has the data has come yet" in standby.reason
    talk.send(name(0), with_data(0))
    assert talk.assigned(name(1), without_data(1)).length == LENGTH


def test_a_worker_without_data_is_placed_at_once_if_the_broker_was_told_the_length():
    talk = Conversation(terms=replace(TERMS, length=LENGTH))
    assert talk.assigned(name(1), without_data(1)).length == LENGTH


def test_a_worker_with_a_place_needs_nothing_when_another_broker_does_not_know_the_length():
    talk = Conversation(terms=replace(TERMS, restarts=5, snapshots=True))
    talk.send(name(0), with_data(0))
    taken = talk.assigned(name(1), without_data(1)).incarnation
    after = Conversation(talk.store, talk.now, terms=replace(TERMS, restarts=5, snapshots=True))
    said = [message for _, message in after.send(name(1), without_data(1, taken, "ipc://1"))]
    assert [type(message) for message in said if not isinstance(message, Peers)] == [Assigned]


def test_a_standby_worker_without_data_does_not_take_a_place_before_the_length_is_known():
    terms = replace(TERMS, restarts=5, snapshots=True)
    talk = Conversation(terms=terms)
    talk.send(name(0), with_data(0))
    talk.join(1)
    after = Conversation(talk.store, talk.now, terms=terms)
    after.send(b"new", msgspec.structs.replace(without_data(1), pid=999))
    sent = after.after(60.0)
    assert not [message for recipient, message in sent if recipient == b"new" and isinstance(message, Assigned)]


def test_workers_whose_data_give_runs_of_different_lengths_are_told_so():
    """One had the newer file: they waited for each other's messages until the run was stopped."""
    talk = Conversation()
    talk.send(name(0), with_data(0))
    ((_, refused),) = talk.send(name(1), with_data(1, RunLength(480, 6)))
    assert isinstance(refused, Refused)
    assert refused.code == 78
    assert (
        "worker-1 has data for 480 training steps and 6 batches to evaluate, the run has 460 training" in refused.reason
    )


def with_queues(talk: Conversation, index: int, **changes: object) -> Hello:
    queues = [
        msgspec.structs.replace(queue, **changes) if queue.name == "forward-1" else queue
        for queue in talk.queues(index)
    ]
    said = hello(index, incarnation=index + 1, endpoint=f"ipc://{index}")
    return msgspec.structs.replace(said, queues=tuple(queues))


def test_a_worker_whose_queues_are_others_than_those_of_its_neighbour_is_refused_with_the_queue():
    """Two files of one feature declared a queue of four messages and one of eight: the run stood still."""
    talk = Conversation()
    talk.join(0)
    talk.send(name(1), hello(1))
    ((_, refused),) = talk.send(name(1), with_queues(talk, 1, count=8))
    assert isinstance(refused, Refused)
    assert "worker-1 and worker 0 have different queues: forward-1, whose count is 8 and 4" in refused.reason
    lacking = msgspec.structs.replace(with_queues(talk, 1), queues=talk.queues(1)[1:])
    ((_, refused),) = talk.send(name(1), lacking)
    assert isinstance(refused, Refused)
    assert f"{talk.queues(1)[0].name}, which only one of them has" in refused.reason
    (_, found), *_ = talk.send(name(1), with_queues(talk, 1))
    assert isinstance(found, Assigned)


@pytest.mark.parametrize("changes", [{"producer": 7}, {"consumer": 0}, {"source": 1}, {"target": 99}])
def test_a_worker_brings_no_queues_but_its_own(changes: dict[str, int]):
    talk = Conversation()
    talk.send(name(1), hello(1))
    said = msgspec.structs.replace(with_queues(talk, 1, **changes), incarnation=1)
    ((_, refused),) = talk.send(name(1), said)
    assert isinstance(refused, Refused)
    assert "forward-1" in refused.reason


def test_a_restarted_broker_knows_the_queues_of_its_workers():
    talk = Conversation()
    talk.join(0)
    again = Conversation(talk.store)
    assert again.core.run.registry.members[0].queues == talk.queues(0)
