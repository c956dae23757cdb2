"""Pace of a run, as its broker tells it: also one that was started again, and of steps by several schedules."""

import msgspec
import pytest

from stageline.broker.control.messages import Answer, Ask, Refused
from stageline.broker.control.records import ScheduleOrder
from stageline.broker.control.store import MemoryStore
from stageline.broker.coordinator.pacing import schedule_at, slow
from support.conversation import TERMS, Conversation, name, report
from support.slow_steps import SlowRun

SLOW = SlowRun(TERMS.schedule, (0.01, 0.04), (0.0001,), noise=0.01)


def joined(store: MemoryStore | None = None) -> Conversation:
    talk = Conversation(store)
    for index in range(2):
        talk.join(index)
    return talk


def trained(steps: int = 30) -> Conversation:
    talk = joined()
    for record in SLOW.records(steps, 0):
        talk.now += 0.25
        talk.send(name(record.stage), report(record.stage, actions=record.step, steps=[record], memory=2**28))
    return talk


def asked(talk: Conversation, what: str, **of: str) -> dict:
    ((_, answer),) = talk.send(b"me", Ask(what, of))
    assert isinstance(answer, Answer), answer
    return answer.facts


def test_why_names_what_limits_a_run_that_makes_progress() -> None:
    told = asked(trained(), "why")["slow"]
    (found,) = told["findings"]
    assert (found["cause"], found["worker"]) == ("compute", 1)
    assert told["limiting"]["worker"] == 1
    assert "on desk" in found["text"]


def test_a_stall_goes_before_and_one_stage_is_explained_as_it_waits() -> None:
    talk = trained()
    assert asked(talk, "why", stage="1")["slow"] is None
    talk.core.run.registry.members.pop(1)
    facts = asked(talk, "why")
    assert facts["slow"] is None
    assert "did not join yet" in facts["text"]


def test_the_status_has_the_pace_the_memory_and_the_bubble() -> None:
    talk = trained()
    talk.send(name(0), report(0, training_steps=100))
    facts = talk.status()
    pace = facts["pace"]
    assert pace["last_minute"] == pytest.approx(2, rel=0.1)
    assert pace["left"] == pytest.approx(70 / pace["last_minute"])
    assert pace["bubble"]["planned"] == pytest.approx(0.2)
    assert 0 < pace["bubble"]["measured"] < 0.2
    assert [each["memory"] for each in facts["workers"]] == [None, 2**28]


def test_a_broker_that_was_started_again_knows_from_its_store_what_limits_the_run() -> None:
    before = trained()
    again = Conversation(before.store)
    assert again.core.run.ledger.finished_floor == 30
    (found,) = slow(again.core.run)["findings"]
    assert (found["cause"], found["worker"]) == ("compute", 1)


def test_the_store_is_asked_once_however_many_steps_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    again = Conversation(trained().store)
    reads = []
    plain = MemoryStore.records
    monkeypatch.setattr(MemoryStore, "records", lambda self, wanted: reads.append(len(wanted)) or plain(self, wanted))
    for _ in range(3):
        slow(again.core.run)
        again.status()
    assert len(reads) == 1
    assert reads[0] <= 4000
    asked(again, "timetable", first="3", last="20")
    assert reads[1:] == [18 * 2]


def test_each_step_has_the_schedule_that_was_ordered_for_it() -> None:
    talk = trained()
    run = talk.core.run
    run.orders.orders = [ScheduleOrder(10, "gpipe"), ScheduleOrder(20, "window", (3, 1))]
    found = [(schedule_at(run, step)[0].name, schedule_at(run, step)[1]) for step in (9, 10, 19, 20)]
    assert found == [("1f1b", 0), ("gpipe", 10), ("gpipe", 10), ("window", 20)]
    facts = asked(talk, "timetable", first="8", last="21")
    assert [each["schedule"] for each in facts["steps"]] == [*["1f1b"] * 2, *["gpipe"] * 10, *["window"] * 2]
    assert asked(talk, "why")["slow"]["steps"][0] >= 20


def test_more_steps_than_an_answer_takes_are_refused_with_how_many_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    each = sum(map(len, TERMS.schedule.workers))
    monkeypatch.setattr("stageline.broker.coordinator.pacing.MOST_ACTIONS", 5 * each)
    talk = trained()
    assert len(asked(talk, "timetable", first="3", last="7")["steps"]) == 5
    ((_, refused),) = talk.send(b"me", Ask("timetable", {"first": "3", "last": "8"}))
    assert isinstance(refused, Refused)
    assert f"3..8 are 6, of {each} actions each: ask for 5 steps" in refused.reason
    monkeypatch.setattr("stageline.broker.coordinator.pacing.MOST_ACTIONS", 1)
    assert len(asked(talk, "timetable", first="3", last="4")["steps"]) == 2  # of any length, one beside its neighbour


def test_a_run_whose_steps_are_not_timed_has_no_answer() -> None:
    talk = joined()
    for record in SLOW.records(6, 0):
        untimed = msgspec.structs.replace(record, times=b"")
        talk.send(name(record.stage), report(record.stage, steps=[untimed]))
    assert asked(talk, "why")["slow"] is None
    assert talk.status()["pace"]["bubble"]["measured"] is None


def test_the_course_has_the_ends_of_steps_and_the_memory_of_workers_also_from_the_records() -> None:
    talk = trained()
    talk.core.keep_observation(talk.now)
    live = asked(talk, "course")
    assert [step for step, _ in live["ends"]] == list(range(30))
    ends = [at for _, at in live["ends"]]
    assert ends == sorted(ends)
    assert live["workers"]["memory"] == [[2**28], [2**28]]
    again = Conversation(talk.store, now=talk.now)
    assert asked(again, "course") == live


def test_the_course_of_a_long_run_is_told_at_even_distances_and_up_to_its_newest_step(monkeypatch) -> None:
    monkeypatch.setattr("stageline.broker.coordinator.pacing._MOST_ENDS", 8)
    assert [step for step, _ in asked(trained(), "course")["ends"]] == [0, 4, 8, 12, 16, 20, 24, 28, 29]
    assert asked(joined(), "course")["ends"] == []
