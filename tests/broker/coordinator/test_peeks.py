"""A question about retained messages is passed on to the worker that has them, and its answer to who asked."""

import msgspec
import pytest

from stageline.broker.control.answers import PeekFacts, StackFacts, StackFrame, ThreadStack
from stageline.broker.control.log_answer import KeptLine, KeptLines, WorkerLog
from stageline.broker.control.messages import Answer, Ask, Goodbye, Refused
from stageline.broker.control.peek import Peek, Peeked, ShowLog, ShowStacks
from stageline.broker.coordinator.peeks import MOST_OF_ONE, PATIENCE
from stageline.pipeline.errors import ExitCode
from support.conversation import Conversation, name, report

FACTS = PeekFacts(run="run-1", queue="forward-1", worker=0, first=3, end=5, withheld="", messages=[])


@pytest.fixture
def talk() -> Conversation:
    talk = Conversation()
    talk.join(0), talk.join(1)
    return talk


def passed_on(talk: Conversation, what: str = "peek", sender: bytes = b"me", **of: str) -> tuple[bytes, Peek]:
    ((to, peek),) = talk.send(sender, Ask(what, {"name": "forward-1", **of}))
    assert isinstance(peek, Peek), peek
    return to, peek


def refusal(talk: Conversation, **of: str) -> str:
    ((to, refused),) = talk.send(b"me", Ask("peek", of))
    assert isinstance(refused, Refused), refused
    assert to == b"me"
    return refused.reason


def test_a_question_goes_to_the_producer_and_its_answer_to_who_asked(talk: Conversation):
    to, peek = passed_on(talk, count="5", at="3")
    assert (to, peek.queue, peek.count, peek.at, peek.offset) == (name(0), "forward-1", 5, 3, None)
    ((back, answer),) = talk.send(name(0), Peeked(1, peek.id, FACTS))
    assert isinstance(answer, Answer)
    assert (back, answer.schema) == (b"me", "peek/1")
    assert answer.facts["first"] == 3


def test_two_who_ask_at_once_get_their_own_answers(talk: Conversation):
    _, first = passed_on(talk, sender=b"a")
    _, second = passed_on(talk, sender=b"b")
    assert first.id != second.id
    ((to_b, _),) = talk.send(name(0), Peeked(1, second.id, FACTS))
    ((to_a, _),) = talk.send(name(0), Peeked(1, first.id, FACTS))
    assert (to_a, to_b) == (b"a", b"b")


def test_bytes_are_passed_as_they_are(talk: Conversation):
    _, peek = passed_on(talk, "export", at="3", offset="7")
    assert (peek.at, peek.offset) == (3, 7)
    ((_, answer),) = talk.send(name(0), Peeked(1, peek.id, piece=b"\x00\xff", sizes=[2]))
    assert answer == Answer("export/1", {"piece": b"\x00\xff", "sizes": [2]})


def test_a_refusal_of_the_worker_is_that_of_the_broker(talk: Conversation):
    _, peek = passed_on(talk)
    ((_, refused),) = talk.send(name(0), Peeked(1, peek.id, refusal="no tensor is shown"))
    assert refused == Refused("peek: no tensor is shown", code=ExitCode.USAGE)


def test_an_answer_of_another_worker_or_one_that_was_not_asked_for_is_dropped(talk: Conversation):
    _, peek = passed_on(talk)
    assert talk.send(name(1), Peeked(2, peek.id, FACTS)) == []
    assert talk.send(name(0), Peeked(1, peek.id + 1, FACTS)) == []
    assert talk.core.run.events.anomalies["unasked"] == 2
    ((to, _),) = talk.send(name(0), Peeked(1, peek.id, FACTS))
    assert to == b"me"
    assert talk.send(name(0), Peeked(1, peek.id, FACTS)) == []


def test_a_worker_that_does_not_answer_is_named_and_the_question_is_forgotten(talk: Conversation):
    _, peek = passed_on(talk)
    sends = talk.after(PATIENCE + 0.2)
    ((to, refused),) = [(to, message) for to, message in sends if isinstance(message, Refused)]
    assert to == b"me"
    assert "worker 0" in refused.reason
    assert talk.core.run.peeks == {}
    assert talk.send(name(0), Peeked(1, peek.id, FACTS)) == []


def test_questions_that_wait_for_one_worker_are_bounded(talk: Conversation):
    for number in range(MOST_OF_ONE):
        _, peek = passed_on(talk, sender=b"%d" % number)
    assert f"{MOST_OF_ONE} looks wait for worker 0" in refusal(talk, name="forward-1")
    ((to, _),) = talk.send(b"me", Ask("peek", {"name": "backward-0"}))
    assert to == name(1)
    talk.send(name(0), Peeked(1, peek.id, FACTS))
    passed_on(talk)


@pytest.mark.parametrize(("of", "said"), [({}, "''"), ({"name": "forward-9"}, "forward-1, backward-0")])
def test_an_unknown_queue_names_the_ones_there_are(talk: Conversation, of, said):
    assert said in refusal(talk, **of)


@pytest.mark.parametrize("wrong", [{"at": "-1"}, {"count": "all"}, {"offset": "9" * 30}])
def test_what_is_no_number_is_refused(talk: Conversation, wrong):
    assert "must be a number" in refusal(talk, name="forward-1", **wrong)


def test_a_run_that_is_over_says_what_became_of_its_messages(talk: Conversation):
    talk.core.run.fail("it failed", 1)
    assert "is over" in refusal(talk, name="forward-1")
    assert "stageline replay" in refusal(talk, name="forward-1")


def test_a_producer_that_is_gone_is_named(talk: Conversation):
    talk.send(name(0), report(0))
    del talk.core.run.registry.members[0]
    assert "worker 0" in refusal(talk, name="forward-1")


def test_no_look_keeps_a_worker_from_saying_that_it_leaves(talk: Conversation):
    passed_on(talk)
    talk.send(name(0), Goodbye(1, "enough"))
    assert talk.core.run.registry.members[0].parting is not None


STACK = ThreadStack(
    thread="main", left_out=0, frames=[StackFrame(file="loop.py", line=7, function="poll", text="turn()")]
)


def test_a_question_for_stacks_goes_to_the_worker_and_its_answer_to_who_asked(talk: Conversation):
    ((to, request),) = talk.send(b"me", Ask("stack", {"worker": "1"}))
    assert to == name(1)
    assert isinstance(request, ShowStacks)
    ((back, answer),) = talk.send(name(1), Peeked(2, request.id, threads=[STACK]))
    assert isinstance(answer, Answer)
    assert (back, answer.schema) == (b"me", "stack/1")
    found = msgspec.convert({"run": answer.facts["run"], "workers": answer.facts["workers"]}, StackFacts)
    assert [(each.worker, each.threads) for each in found.workers] == [(1, [STACK])]


def test_a_question_for_the_stack_of_a_worker_that_is_not_there_is_refused_with_its_number(talk: Conversation):
    ((_, refused),) = talk.send(b"me", Ask("stack", {"worker": "7"}))
    assert isinstance(refused, Refused)
    assert "worker 7" in refused.reason


def test_a_question_for_a_log_goes_to_the_worker_with_the_first_line_that_is_wanted(talk: Conversation):
    ((to, request),) = talk.send(b"me", Ask("log", {"worker": "1", "start": "40"}))
    assert to == name(1)
    assert isinstance(request, ShowLog)
    assert request.start == 40
    kept = KeptLines(first=40, lines=[KeptLine(time=1.0, level="info", text="assigned")])
    ((back, answer),) = talk.send(name(1), Peeked(2, request.id, log=kept))
    assert isinstance(answer, Answer)
    assert (back, answer.schema) == (b"me", "log/1")
    found = msgspec.convert(answer.facts, WorkerLog)
    assert (found.worker, found.kept) == (1, kept)


def test_no_log_is_told_of_a_place_without_a_worker(talk: Conversation):
    ((_, refused),) = talk.send(b"me", Ask("log", {"worker": "7"}))
    assert isinstance(refused, Refused)
    assert "worker 7" in refused.reason
