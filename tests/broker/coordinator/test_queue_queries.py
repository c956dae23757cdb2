"""Answers about queues join what both ends count; microbatches are listed by their state."""

import msgspec
import pytest

from stageline.broker.control.answers import MicrobatchesFacts, QueueFacts, QueuesFacts
from stageline.broker.control.messages import Answer, Ask, Refused
from stageline.broker.control.queue_counts import Depth, Intake, Resend, ResendReason
from stageline.broker.control.records import Event
from support.conversation import Conversation, name, report, steps
from support.scripted import SCRIPT, SCRIPTED

RESENDS = (Resend(36, 38, ResendReason.MISSING, 2.0),)
PUT = Depth(1, 2, 5, 4096, 0.5, put=41, sent=40, arrived=38, granted=44, put_bytes=9000, resent=2, resends=RESENDS)
TAKEN = Intake(received=39, taken=37, granted=45, duplicates=3, damaged=1, lost=2)


@pytest.fixture
def talk() -> Conversation:
    talk = Conversation()
    talk.join(0), talk.join(1)
    return talk


def asked(talk: Conversation, what: str, **of: str) -> dict:
    ((_, answer),) = talk.send(b"me", Ask(what, of))
    assert isinstance(answer, Answer), answer
    return answer.facts


def row(talk: Conversation, queue: str = "forward-1") -> dict:
    (found,) = [each for each in asked(talk, "queues")["queues"] if each["queue"] == queue]
    return found


def test_a_queue_has_one_row_with_what_both_its_ends_have_counted(talk: Conversation):
    talk.send(name(0), report(0, puts={"forward-1": PUT}))
    talk.send(name(1), report(1, takes={"forward-1": TAKEN}))
    assert row(talk) == {
        "queue": "forward-1", "producer": "stage 0", "consumer": "stage 1", "put": 41, "taken": 37, "ready": 1,
        "in_flight": 2, "retained": 5, "bytes": 4096, "put_pace": None, "taken_pace": None, "credit_used": 4,
        "credit_limit": 8, "resent": 2, "oldest": 0.5,
    }  # fmt: skip
    ((_, answer),) = talk.send(b"me", Ask("queues"))
    assert isinstance(answer, Answer)
    assert answer.schema == "queues/2"
    msgspec.convert(answer.facts, QueuesFacts)


def test_a_queue_that_no_end_has_counted_has_a_row_without_counts(talk: Conversation):
    assert (row(talk)["put"], row(talk)["taken"], row(talk)["credit_limit"]) == (None, None, None)
    assert asked(talk, "queues")["heard"] is None


def test_credit_is_what_the_producer_knows_as_long_as_the_consumer_has_not_counted(talk: Conversation):
    talk.send(name(0), report(0, puts={"forward-1": PUT}))
    assert (row(talk)["credit_used"], row(talk)["credit_limit"]) == (3, 6)


def test_messages_beyond_the_credit_do_not_count_as_credit_that_is_used(talk: Conversation):
    talk.send(name(0), report(0, puts={"forward-1": msgspec.structs.replace(PUT, put=60)}))
    talk.send(name(1), report(1, takes={"forward-1": TAKEN}))
    assert (row(talk)["credit_used"], row(talk)["credit_limit"]) == (8, 8)


def test_a_queue_without_a_limit_has_no_limit_of_its_credit(talk: Conversation):
    talk.send(name(0), report(0, puts={"forward-1": msgspec.structs.replace(PUT, granted=None)}))
    talk.send(name(1), report(1, takes={"forward-1": msgspec.structs.replace(TAKEN, granted=None)}))
    assert (row(talk)["credit_used"], row(talk)["credit_limit"]) == (4, None)


def test_the_pace_of_a_queue_is_that_of_the_last_seconds(talk: Conversation):
    for second in range(20):
        put = msgspec.structs.replace(PUT, put=10 * second + 5 * max(0, second - 10))
        talk.send(name(0), report(0, puts={"forward-1": put}))
        talk.send(name(1), report(1, takes={"forward-1": Intake(4 * second, 4 * second)}))
        talk.now += 1.0
    assert (row(talk)["put_pace"], row(talk)["taken_pace"]) == (15.0, 4.0)


def test_a_queue_whose_replacement_begins_again_has_no_pace_until_it_is_where_it_was(talk: Conversation):
    for put in (100, 110, 40, 50):
        talk.send(name(0), report(0, puts={"forward-1": msgspec.structs.replace(PUT, put=put)}))
        talk.now += 1.0
    assert row(talk)["put_pace"] is None


def test_ages_count_from_when_the_ends_were_counted(talk: Conversation):
    talk.send(name(0), report(0, puts={"forward-1": PUT}, counted=0.25))
    talk.now += 2.0
    assert asked(talk, "queues")["heard"] == 2.25
    assert row(talk)["oldest"] == 2.75


def test_one_queue_is_shown_with_both_ends_and_its_positions_in_steps(talk: Conversation):
    talk.send(name(0), report(0, puts={"forward-1": PUT}))
    talk.send(name(1), report(1, takes={"forward-1": TAKEN}))
    facts = asked(talk, "queue", name="forward-1")
    found = msgspec.convert(facts, QueueFacts)
    producer, consumer = found.producer, found.consumer
    assert (producer.name, consumer.name) == ("worker-0 (pid 100, host desk)", "worker-1 (pid 101, host desk)")
    assert msgspec.to_builtins(producer.put) == {"number": 41, "unit": "step", "index": 10, "microbatch": 1}
    assert msgspec.to_builtins(producer.first) == {"number": 36, "unit": "step", "index": 9, "microbatch": 0}
    assert msgspec.to_builtins(consumer.taken) == {"number": 37, "unit": "step", "index": 9, "microbatch": 1}
    assert (producer.resent, producer.resends[0].reason) == (2, ResendReason.MISSING)
    assert (consumer.waiting, consumer.duplicates, consumer.damaged, consumer.lost) == (2, 3, 1, 2)
    assert found.row == msgspec.convert(row(talk), type(found.row))


def test_an_unknown_queue_names_the_ones_there_are(talk: Conversation):
    ((_, answer),) = talk.send(b"me", Ask("queue", {"name": "forward-7"}))
    assert isinstance(answer, Refused)
    assert "'forward-7'" in answer.reason
    assert "forward-1" in answer.reason
    assert "backward-0" in answer.reason


def test_the_queues_of_a_script_name_it(talk: Conversation):
    scripted = Conversation(terms=SCRIPTED)
    scripted.join(0), scripted.join(1), scripted.join(SCRIPT)
    assert (row(scripted, "call-1")["producer"], row(scripted, "call-1")["consumer"]) == ("the script", "worker 1")


def test_microbatches_are_listed_by_state_with_the_number_in_each(talk: Conversation):
    talk.send(
        name(0), report(0, steps=steps(0, 0), events=[Event(0, 1, 0, "stashed", 7.0), Event(0, 1, 1, "forward", 8.0)])
    )
    talk.send(name(1), report(1, steps=steps(1, 0), events=[Event(1, 1, 0, "forward", 9.0)]))
    facts = asked(talk, "microbatches")
    found = msgspec.convert(facts, MicrobatchesFacts)
    assert [(each.step, each.microbatch, each.stage, each.state) for each in found.microbatches] == [
        (1, 0, "0", "stashed"),
        (1, 0, "1", "forward"),
        (1, 1, "0", "forward"),
    ]
    assert {state: count for state, count in found.states.items() if count} == {"stashed": 1, "forward": 2, "queued": 5}
    (stashed,) = asked(talk, "microbatches", state="stashed")["microbatches"]
    assert (stashed["worker"], stashed["since"], stashed["holder"]) == (0, 7.0, "worker-0")
    assert len(asked(talk, "microbatches", state="queued")["microbatches"]) == 5


def test_an_unknown_state_of_microbatches_names_the_states_there_are(talk: Conversation):
    ((_, answer),) = talk.send(b"me", Ask("microbatches", {"state": "lost"}))
    assert isinstance(answer, Refused)
    assert all(state in answer.reason for state in ("'lost'", "queued", "halfway", "done"))


def test_more_microbatches_than_an_answer_holds_are_counted_and_left_out(talk: Conversation, monkeypatch):
    monkeypatch.setattr("stageline.broker.coordinator.queue_queries.MOST_ROWS", 10)
    for step in range(3):
        talk.send(name(0), report(0, events=[Event(0, step, each, "stashed", 1.0) for each in range(4)]))
    found = msgspec.convert(asked(talk, "microbatches", state="stashed"), MicrobatchesFacts)
    assert (len(found.microbatches), found.left_out, found.states["stashed"]) == (10, 2, 12)
