"""Observations of a broker are restored from its records as they were made, and are no newer than these."""

import json

import msgspec
import pytest

from stageline.broker.control.messages import Ask
from stageline.broker.control.queue_counts import Depth, Intake, Resend, ResendReason
from stageline.broker.control.records import EvaluationRecord, Event
from stageline.broker.coordinator.queries import answer
from stageline.broker.coordinator.records import OBSERVED, recall, restored
from stageline.broker.coordinator.state import RunState
from support.conversation import TERMS, Conversation, name, report, steps

BAD = EvaluationRecord(2, 8, 0.5, {"bad": float("nan")})
RESENDS = (Resend(1, 3, ResendReason.MISSING, 0.5),)
PUT = Depth(1, 2, 3, 4096, 0.5, put=6, sent=5, arrived=3, granted=9, put_bytes=8192, resent=2, resends=RESENDS)
QUESTIONS = [
    Ask("status"),
    Ask("queues"),
    Ask("queue", {"name": "forward-1"}),
    Ask("microbatches"),
    Ask("why"),
    Ask("story", {"step": "3", "microbatch": "2"}),
]


@pytest.fixture
def talk() -> Conversation:
    talk = Conversation()
    talk.join(0), talk.join(1)
    talk.send(name(0), report(0, puts={"forward-1": PUT}, events=[Event(0, 3, 2, "stashed", 1000.0)]))
    takes, done = {"forward-1": Intake(3, 2, 9)}, steps(1, 0, 1, 2)
    said = {"now": "1F2 of step 3", "training_steps": 9}
    talk.send(name(1), report(1, takes=takes, steps=done, evaluations=[BAD], **said))  # type: ignore[arg-type]
    talk.core.run.events.count("damaged", "a message arrived damaged")
    talk.now += 0.25
    return talk


def recorded(talk: Conversation) -> RunState:
    """The run as its records alone tell it."""
    stored = talk.store.load()
    run = restored("run-1", TERMS, talk.store, stored, talk.now)
    recall(run, stored.facts)
    return run


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.what)
def test_the_records_answer_as_the_broker_did_when_it_last_looked(talk: Conversation, question: Ask):
    ((_, live),) = talk.send(b"me", question)
    talk.core.keep_observation(talk.now)
    assert answer(recorded(talk), question, talk.now) == live


def test_an_observation_is_json_and_has_nothing_that_grows_with_the_run(talk: Conversation):
    talk.core.keep_observation(talk.now)
    before = len(json.dumps(talk.store.load().facts[OBSERVED], allow_nan=False))
    for step in range(3, 200):
        talk.send(name(1), report(1, now="1F2 of step 3", steps=steps(1, step)))
        talk.send(name(0), report(0, steps=steps(0, step)))
    talk.core.keep_observation(talk.now)
    assert len(json.dumps(talk.store.load().facts[OBSERVED], allow_nan=False)) <= before


def test_what_the_records_know_better_is_not_taken_from_an_older_observation(talk: Conversation):
    talk.core.keep_observation(talk.now)
    talk.send(name(0), report(0, steps=steps(0, *range(4))))  # the microbatch that was seen as stashed is done
    run = recorded(talk)
    assert list(run.ledger.unfinished(0)) == []
    assert run.ledger.finished == [4, 3]


def test_a_damaged_observation_is_refused(talk: Conversation):
    with pytest.raises(msgspec.ValidationError):
        recall(talk.core.run, {OBSERVED: {"at": "noon"}})
