"""The thread of `top` that asks a run's broker: what it hands on while the broker answers, and while it does not."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Queue
from typing import Any

import pytest

from stageline.pipeline.errors import StagelineError
from stageline.workers.cli.top.facts import Glance, Looker, Question
from support.conversation import Conversation
from support.top_facts import PANELS, AskedBroker, answers

BOUND = 60.0  # seconds for what is waited for


@pytest.fixture
def broker() -> AskedBroker:
    talk = Conversation()
    talk.join(0), talk.join(1)
    return AskedBroker(talk)


@contextmanager
def looking(broker: AskedBroker, recorded: Any = None) -> Iterator[tuple[Looker, Callable[..., Glance]]]:
    """A thread that looks often, and what waits for a look of which something is true."""
    seen: Queue[Glance] = Queue()
    looker = Looker(seen.put, broker, recorded, every=0.01)

    def until(what: Callable[[Glance], object]) -> Glance:
        while not what(found := seen.get(timeout=BOUND)):
            continue
        return found

    looker.start()
    try:
        yield looker, until
    finally:
        looker.stop()
    assert not looker.runs


def test_a_look_has_an_answer_to_each_question_and_asks_nothing_that_changes_a_run(broker: AskedBroker) -> None:
    with looking(broker) as (_, until):
        found = until(lambda seen: seen.answers)
        assert found.answers.keys() == set(PANELS)
        assert (found.trouble, found.over, found.refused) == ("", False, {})
    assert set(broker.questions) == set(PANELS)
    assert broker.questions.count("why") < broker.questions.count("status") or broker.questions.count("status") < 3


def test_something_else_is_looked_at_closely_at_once(broker: AskedBroker) -> None:
    with looking(broker) as (looker, until):
        question = Question("queue", {"name": "forward-1"})
        looker.look_closely(question)
        found = until(lambda seen: seen.close)
        assert found.close is not None
        assert found.close[0] == question
        assert found.close[1]["row"]["queue"] == "forward-1"
        looker.look_closely(Question("queue", {"name": "forward-9"}))
        found = until(lambda seen: seen.close and isinstance(seen.close[1], str))
        assert "forward-9" in found.close[1]
        looker.look_closely(None)
        until(lambda seen: seen.close is None)


def test_a_broker_that_is_gone_is_told_and_one_that_is_back_is_asked_again(broker: AskedBroker) -> None:
    with looking(broker) as (_, until):
        until(lambda seen: seen.answers)
        broker.away = "no broker answered at ipc://x within 3 s"
        assert broker.away in until(lambda seen: seen.trouble).trouble
        broker.away = ""
        until(lambda seen: seen.answers and not seen.trouble)


@pytest.mark.parametrize(("state", "over"), [("running", False), ("finished", True)])
def test_while_no_broker_answers_the_records_do_and_say_whether_the_run_is_over(broker, state, over) -> None:
    kept = answers(broker.talk)

    def recorded(what: str, **of: str) -> dict[str, Any]:
        return {**kept[what], "source": "records", "as_of": 1.0, "state": state}

    broker.away = "no broker listens"
    with looking(broker, recorded) as (_, until):
        found = until(lambda seen: seen.answers)
        assert found.over is over
        assert bool(found.trouble) is not over
        assert over or "no broker listens" in found.trouble


def test_records_that_cannot_be_read_are_told(broker: AskedBroker) -> None:
    def recorded(what: str, **of: str) -> dict[str, Any]:
        raise StagelineError("broker.sqlite is damaged")

    broker.away = "no broker listens"
    with looking(broker, recorded) as (_, until):
        assert until(lambda seen: seen.trouble).trouble == "broker.sqlite is damaged"


def test_what_nobody_expected_is_told_on_the_screen_too(broker: AskedBroker) -> None:
    def breaks(what: str, **of: str) -> dict[str, Any]:
        raise KeyError("queues")

    broker.breaks = breaks
    with looking(broker) as (_, until):
        assert "KeyError" in until(lambda seen: seen.trouble).trouble
