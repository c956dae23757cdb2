"""Spares and restarted workers stand by until a place is free: first come, first served."""

import msgspec
import pytest

from stageline.broker.control.messages import (
    CONTROL_VERSION,
    WAITS,
    Assigned,
    Hello,
    Refused,
    Report,
    Standby,
    Stop,
    StopRun,
)
from stageline.broker.coordinator.run import RunPhase
from stageline.broker.ledger.losses import SILENCE
from support.conversation import TERMS, Conversation, hello, name, report
from support.replacements import REPLACING, Sends, kill, reach, replacement, talk_of


@pytest.fixture
def talk() -> Conversation:
    return talk_of()


def spare(pid: int, *, claim: int | None = None, name: str = "spare") -> Hello:
    return Hello(CONTROL_VERSION, "d" * 64, name, "cloud", pid, "", claim, spare=True)


def test_a_spare_stands_by_until_a_worker_is_lost_and_is_placed_at_once(talk: Conversation):
    ((_, standby),) = talk.send(b"spare", spare(1))
    assert isinstance(standby, Standby)
    assert standby.reason.startswith("all 2 workers of the plan have joined")
    reach(talk, 20)
    told = [message for recipient, message in kill(talk, 1, 101) if recipient == b"spare"]
    assert told[0] == Assigned("run-1", 1, 3, 20)
    assert talk.status()["spares"] == []


def test_a_spare_leaves_the_places_to_others_before_the_run_has_begun():
    talk = Conversation(terms=REPLACING)
    ((_, standby),) = talk.send(b"spare", spare(1))
    assert standby == Standby("the run has not begun; a spare takes the place of a lost worker")
    talk.join(0), talk.join(1)
    assert talk.core.run.phase is RunPhase.RUNNING


def test_spares_are_placed_in_turn_and_only_where_they_claim(talk: Conversation):
    talk.send(b"a", spare(1, claim=0)), talk.send(b"b", spare(2)), talk.send(b"c", spare(3))
    talk.send(b"b", spare(2))
    assert talk.status()["spares"] == [
        {"name": "spare", "host": "cloud", "pid": pid, "heard": 0.0} for pid in (1, 2, 3)
    ]
    assert [to for to, message in kill(talk, 1, 101) if isinstance(message, Assigned)] == [b"b"]
    talk.send(b"a", spare(1, claim=0)), talk.send(b"c", spare(3))
    assert [to for to, message in kill(talk, 0, 100) if isinstance(message, Assigned)] == [b"a"]


def test_a_silent_spare_is_not_placed(talk: Conversation):
    talk.send(b"spare", spare(1))
    talk.after(SILENCE)
    assert kill(talk, 1, 101) == []
    assert talk.core.run.registry.missing == [1]


def test_a_spare_that_does_not_answer_its_call_loses_the_place_to_the_next(talk: Conversation):
    talk.send(b"dead", spare(1))
    kill(talk, 1, 101)
    sends: Sends = []
    while not sends:
        talk.send(name(0), report(0)), talk.send(b"next", spare(2))
        sends = talk.after(0.5)
    assert sends == [(b"next", Assigned("run-1", 1, 4, 0))]


def test_a_spare_that_has_answered_may_take_its_time_to_load(talk: Conversation):
    talk.send(b"spare", spare(1))
    kill(talk, 1, 101)
    talk.send(b"spare", Report(3, 0, "waits for its model", 0.0, 0.0))
    for _ in range(40):
        talk.send(name(0), report(0)), talk.after(1.0)
    assert talk.core.run.registry.missing == []


def test_loading_for_longer_than_a_lease_is_no_lack_of_progress_once_it_is_done(talk: Conversation):
    """A worker's first message after its call counted as its last progress: it was lost as soon as it was ready."""
    talk.send(b"spare", spare(1))
    kill(talk, 1, 101)
    talk.send(b"spare", Report(3, 0, f"{WAITS} for its queues and its model", since=talk.now, idle=1.0))
    for _ in range(30):
        talk.send(name(0), report(0)), talk.after(1.0)
    talk.send(b"spare", msgspec.structs.replace(spare(1), endpoint="tcp://cloud:5555", incarnation=3))
    assert talk.core.run.registry.members[1].introduced
    for _ in range(5):
        (
            talk.send(name(0), report(0)),
            talk.send(b"spare", Report(3, 0, "1F0 of step 0", talk.now, 0.0)),
            talk.after(1.0),
        )
    assert talk.core.run.registry.missing == []


def test_a_spare_whose_assignment_got_lost_gets_it_again(talk: Conversation):
    talk.send(b"spare", spare(1))
    kill(talk, 1, 101)
    assert talk.assigned(b"spare", spare(1)) == Assigned("run-1", 1, 3, 0)


def test_a_spare_gets_the_stop_message(talk: Conversation):
    talk.send(b"spare", spare(1))
    stop = Stop("enough; nothing is saved yet", 130)
    assert (b"spare", stop) in talk.send(b"train", StopRun("enough"))
    assert talk.send(b"late", spare(2)) == [(b"late", stop)]


def test_without_restarts_there_are_no_spares():
    talk = talk_of(terms=TERMS)
    ((_, refused),) = talk.send(b"spare", spare(1))
    assert isinstance(refused, Refused)


@pytest.mark.parametrize("asker", ["its name", "a spare", "any place"])
def test_a_paused_worker_keeps_its_place_for_a_lease_though_another_process_of_its_host_asks_for_it(
    asker: str, talk: Conversation
):
    """A process that named the worker's name and host, or its host alone, had the place after 2.0 or 4.0 s."""
    stranger = {
        "its name": msgspec.structs.replace(replacement(1, 101), token="b" * 32),
        "a spare": msgspec.structs.replace(spare(1), host="desk"),
        "any place": by_hand(301),
    }[asker]
    lease = TERMS.lease
    for _ in range(round(10 * lease) - 2):
        told = talk.send(b"stranger", stranger) + talk.after(0.1)
        assert [message for to, message in told if to == b"stranger" and not isinstance(message, Standby)] == []
        alive(talk, 0)
    alive(talk, 1)
    talk.send(b"stranger", stranger), talk.after(1.0)
    assert talk.core.run.registry.members[1].incarnation == 2
    assert talk.status()["restarts"] == 0


def test_a_worker_restarted_before_its_loss_was_noticed_stands_by_and_has_its_place_after_a_lease(talk: Conversation):
    talk.after(1.5)
    talk.send(name(0), report(0))
    while not (told := [each for to, each in talk.after(0.5) if to == b"again"]):
        ((_, standby),) = talk.send(b"again", replacement(1, 101))
        assert isinstance(standby, Standby)
        alive(talk, 0)
    assert told == [Assigned("run-1", 1, 3, 0)]
    assert "was silent for 10.0 s (recovery.lease is 10 s)" in talk.core.run.events.infos[-2]


def test_a_worker_restarted_while_the_broker_was_away_soon_has_its_place_from_the_next_broker(talk: Conversation):
    """No process has told that broker of its predecessor's end, and it has never heard of it."""
    again = Conversation(talk.store, now=talk.now, terms=REPLACING)
    again.send(name(0), hello(0, incarnation=1, endpoint="ipc://0"))
    begun, told = again.now, []
    while not told:
        again.send(b"again", replacement(1, 201)), alive(again, 0)
        told = [each for to, each in again.after(0.5) if to == b"again"]
    assert isinstance(told[0], Assigned)
    assert again.now - begun <= 2.5
    assert "while another process asked for its place" in again.core.run.events.infos[-2]


def by_hand(pid: int) -> Hello:
    """Of a worker that claims no place, on the host of the others."""
    return Hello(CONTROL_VERSION, "d" * 64, "worker", "desk", pid, "")


def alive(talk: Conversation, *indexes: int) -> None:
    for index in indexes:
        talk.send(name(index), report(index))


@pytest.mark.parametrize("silence", [0.0, 1.9])
def test_a_worker_started_again_by_hand_has_the_place_of_its_killed_predecessor_after_a_lease(
    talk: Conversation, silence: float
):
    """It was refused meanwhile: "all 2 workers of the plan have joined"."""
    for _ in range(round(silence * 10)):
        talk.after(0.1)
        alive(talk, 0)
    places: list[Assigned] = []
    waited = 0.0
    while not places:
        said = talk.send(b"again", by_hand(301)) + talk.after(0.1)
        assert not any(isinstance(message, Refused) for _, message in said)
        places = [message for to, message in said if to == b"again" and isinstance(message, Assigned)]
        alive(talk, 0)
        waited += 0.1
    assert places == [Assigned("run-1", 1, 3, 0)]
    assert waited == pytest.approx(TERMS.lease - silence, abs=0.2)


def test_a_worker_too_many_is_refused_once_all_others_were_heard(talk: Conversation):
    ((_, standby),) = talk.send(b"extra", by_hand(301))
    assert isinstance(standby, Standby)
    assert "all 2 workers of the plan have joined" in standby.reason
    talk.after(0.1)
    alive(talk, 0)
    ((_, still),) = talk.send(b"extra", by_hand(301))
    assert isinstance(still, Standby)
    alive(talk, 1)
    ((_, refused),) = talk.send(b"extra", by_hand(301))
    assert isinstance(refused, Refused)
    assert [member.pid for member in talk.core.run.registry.members.values()] == [100, 101]


def test_a_worker_that_loads_its_model_keeps_its_place_and_the_newcomer_does_not_wait_for_ever():
    talk = Conversation(terms=REPLACING)
    for index in range(2):
        talk.send(name(index), hello(index))
    kinds: list[type] = []
    while Refused not in kinds:
        kinds += [type(message) for to, message in talk.send(b"extra", by_hand(301)) if to == b"extra"]
        talk.after(0.1)
    assert set(kinds) == {Standby, Refused}
    assert len(kinds) <= 32  # 3 s


def test_a_newcomer_on_another_host_cannot_have_been_started_in_a_workers_stead(talk: Conversation):
    other = msgspec.structs.replace(by_hand(301), host="laptop")
    ((_, refused),) = talk.send(b"extra", other)
    assert isinstance(refused, Refused)


def test_a_worker_that_reports_keeps_its_place_though_another_of_its_name_claims_it(talk: Conversation):
    for _ in range(30):
        talk.send(name(0), report(0)), talk.send(name(1), report(1)), talk.send(b"again", replacement(1, 201))
        assert talk.after(0.3) == []
    assert talk.core.run.registry.members[1].pid == 101


def test_two_machines_that_claim_one_place_have_made_a_mistake(talk: Conversation):
    ((_, refused),) = talk.send(b"other", Hello(CONTROL_VERSION, "d" * 64, "worker-1", "laptop", 7, "", 1))
    assert isinstance(refused, Refused)


def test_a_worker_that_returns_after_its_place_was_given_away_stands_by(talk: Conversation):
    talk.send(b"spare", spare(1))
    kill(talk, 1, 101)
    ((_, standby),) = talk.send(b"back", replacement(1, 201))
    assert isinstance(standby, Standby)
