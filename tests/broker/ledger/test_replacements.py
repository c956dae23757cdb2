"""Lost workers are replaced and checkpoints completed: conversations with the core, rule by rule."""

from dataclasses import replace

import pytest

from stageline.broker.control.checkpoints import Trim
from stageline.broker.control.messages import (
    CONTROL_VERSION,
    Assigned,
    Exited,
    Failed,
    Finished,
    Goodbye,
    Hello,
    Peers,
    Refused,
    Report,
    Stop,
)
from stageline.broker.control.records import Event
from stageline.broker.coordinator.run import RunPhase
from stageline.broker.ledger.losses import PARTING
from support.conversation import Conversation, finished, hello, name, report, steps
from support.replacements import REPLACING, kill, reach, replacement, said, stops, talk_of


@pytest.fixture
def talk() -> Conversation:
    return talk_of()


# Complete checkpoints


# A slow snapshot of a stage that has been given away was once taken for its new owner's: the checkpoint looked
# complete, its neighbour forgot what the new owner still had to be sent, and both waited for ever.


# Replacement


def test_a_lost_workers_place_goes_to_the_next_at_the_newest_complete_checkpoint(talk: Conversation):
    reach(talk, 20)
    talk.send(name(1), said(2, upto=37))
    assert stops(kill(talk, 1, 101)) == []
    assert talk.core.run.phase is RunPhase.RUNNING
    assert talk.send(b"new", replacement(1, 201)) == [(b"new", Assigned("run-1", 1, 3, 20)), (b"new", Trim(20))]
    assert talk.core.run.events.infos[-1].endswith("is worker-1 (pid 201, host desk), generation 2, incarnation 3")


def test_an_incarnation_and_its_start_are_stored_before_they_are_handed_out(talk: Conversation):
    reach(talk, 20)
    kill(talk, 1, 101)
    talk.assigned(b"new", replacement(1, 201))
    kept = talk.store.load().facts["registry"]
    assert kept["incarnation"] == 3
    assert [(member["index"], member["incarnation"], member["start"]) for member in kept["members"]] == [
        (0, 1, 0),
        (1, 3, 20),
    ]


def test_all_workers_get_the_replacements_endpoint_and_survivors_keep_their_incarnations(talk: Conversation):
    kill(talk, 1, 101)
    talk.assigned(b"new", replacement(1, 201))
    sends = talk.send(b"new", replacement(1, 201, incarnation=3, endpoint="ipc://new"))
    peers = Peers({0: (1, "ipc://0"), 1: (3, "ipc://new")})
    assert sends == [(b"new", Assigned("run-1", 1, 3, 0)), (name(0), peers), (b"new", peers)]


def test_a_lost_stages_ledger_goes_back_to_the_checkpoint_and_the_losses_stay(talk: Conversation):
    reach(talk, 20)
    talk.send(name(1), Report(2, 9, "1F3", 0.0, 0.0, steps(1, *range(37), loss=0.5), [Event(1, 40, 2, "forward", 1.0)]))
    kill(talk, 1, 101)
    assert talk.core.run.ledger.finished == [20, 20]
    assert talk.store.load().finished == {0: 20, 1: 20}
    assert talk.core.run.ledger.held([1]) == []
    assert sorted(talk.store.load().losses) == list(range(37))


def test_two_workers_and_all_workers_may_be_lost_at_once(talk: Conversation):
    reach(talk, 20)
    talk.send(b"supervisor", Exited(0, 100, -9))
    assert stops(kill(talk, 1, 101)) == []
    assert talk.assigned(b"b", replacement(1, 201)) == Assigned("run-1", 1, 3, 20)
    assert talk.assigned(b"a", replacement(0, 200)) == Assigned("run-1", 0, 4, 20)
    assert talk.send(b"b", replacement(1, 201, 3, "ipc://b")) == [(b"b", Assigned("run-1", 1, 3, 20)), (b"b", Trim(20))]
    peers = Peers({0: (4, "ipc://a"), 1: (3, "ipc://b")})
    sends = talk.send(b"a", replacement(0, 200, 4, "ipc://a"))
    assert [send for send in sends if isinstance(send[1], Peers)] == [(b"a", peers), (b"b", peers)]


def test_a_worker_without_a_claim_gets_the_lost_ones_place(talk: Conversation):
    kill(talk, 1, 101)
    assert talk.assigned(b"new", Hello(CONTROL_VERSION, "d" * 64, "spot-7", "cloud", 1, "")).index == 1


def test_a_worker_that_hangs_is_replaced_and_refused_when_it_wakes(talk: Conversation):
    while not talk.status()["recovering"]:
        talk.send(name(0), report(0)), talk.send(name(1), report(1, now="1F3 of step 2"))
        assert stops(talk.after(0.5)) == []
    assert talk.assigned(b"new", replacement(1, 201)).incarnation == 3
    for words in (
        said(2, upto=9),
        Finished(2, {}),
        Failed(2, "timeout", 1),
        Goodbye(2, "told"),
        hello(1, incarnation=2),
    ):
        ((_, refused),) = talk.send(name(1), words)
        assert isinstance(refused, Refused)
        assert refused.code == 1
    assert (talk.core.run.phase, talk.core.run.ledger.finished) == (RunPhase.RUNNING, [0, 0])


def test_a_replacement_may_take_its_time_to_load(talk: Conversation):
    kill(talk, 1, 101)
    talk.assigned(b"new", replacement(1, 201))
    for _ in range(40):
        talk.send(name(0), report(0)), talk.after(1.0)
    assert (talk.core.run.phase, talk.core.run.registry.missing) == (RunPhase.RUNNING, [])
    talk.send(b"new", replacement(1, 201, incarnation=3, endpoint="ipc://new"))
    for _ in range(40):
        talk.send(name(0), report(0)), talk.after(1.0)
        talk.send(b"new", Report(3, 0, "waits for its snapshot to be read", 0.0, 0.0))
    assert (talk.core.run.phase, talk.core.run.registry.missing) == (RunPhase.RUNNING, [])


def test_a_finished_worker_that_is_lost_has_to_finish_again(talk: Conversation):
    talk.send(name(1), finished(1))
    kill(talk, 1, 101)
    assert stops(talk.send(name(0), finished(0))) == []
    talk.assigned(b"new", replacement(1, 201))
    assert stops(talk.send(b"new", Finished(3, finished(1).digests))) == [Stop("all steps are done", 0)] * 2


def test_a_worker_that_leaves_on_purpose_may_be_replaced(talk: Conversation):
    assert stops(talk.send(name(1), Goodbye(2, "the machine is wanted back")) + talk.after(PARTING)) == []
    assert talk.assigned(b"new", replacement(1, 201)) == Assigned("run-1", 1, 3, 0)


# Workers that stand by


# A container that is restarted says hello long before the lease of its former self is over.


# What ends the run all the same


# A broker that is killed and started again


# Status


def test_status_names_the_missing_worker_since_when_and_why(talk: Conversation):
    kill(talk, 1, 101)
    talk.now += 2.0
    (gap,) = talk.status()["recovering"]  # type: ignore[misc]
    assert gap.pop("why").startswith("worker 1 (stage 1), worker-1 (pid 101, host desk), was killed by SIGKILL")
    assert gap.pop("since") == pytest.approx(2.6, abs=0.1)
    left = gap.pop("left")
    talk.now += 1.0
    assert talk.status()["recovering"][0]["left"] == pytest.approx(left - 1.0)  # type: ignore[index]
    assert gap.pop("how").startswith("was killed by SIGKILL (")
    assert gap == {"index": 1, "pid": 101, "host": "desk", "stages": [1], "given": False, "on_notice": False}
    talk.assigned(b"new", replacement(1, 201))
    assert talk.status()["recovering"][0]["given"] is True  # type: ignore[index]
    talk.send(b"new", said(3, actions=0))
    assert talk.status()["recovering"] != []
    talk.send(b"new", said(3, actions=1))
    assert (talk.status()["recovering"], talk.status()["restarts"]) == ([], 1)


def test_without_restarts_a_loss_ends_the_run():
    talk = talk_of(terms=replace(REPLACING, restarts=0))
    (stop,) = stops(kill(talk, 1, 101))
    assert stop.reason.endswith("out-of-memory killer: see dmesg). It had sent no report")
