"""Answers to commands."""

import dataclasses

import msgspec
import pytest

from stageline.broker.control.history_answers import StoryFacts
from stageline.broker.control.messages import Answer, Ask, Declined, Refused, StopRun
from stageline.broker.control.records import EvaluationRecord, Event, StepRecord
from stageline.broker.coordinator.run import ScriptCode
from support.conversation import Conversation, hello, name, report, steps


@pytest.fixture
def talk() -> Conversation:
    """A run that has just begun: both workers are there."""
    talk = Conversation()
    talk.join(0), talk.join(1)
    return talk


def test_status_names_run_workers_and_progress(talk: Conversation):
    found = EvaluationRecord(1, 8, 0.5, {"accuracy": 0.5, "bad": float("-inf")})
    talk.send(name(0), report(0, actions=18, steps=steps(0, 0, 1)))
    told = report(1, now="1F3 of step 1", steps=steps(1, 0, loss=0.25), training_steps=100, evaluations=[found])
    talk.send(name(1), told)
    talk.now += 2.0
    status = talk.status()
    assert (status["run"], status["name"], status["phase"], status["missing"]) == ("run-1", "digits", "running", [])
    assert (status["finished"], status["finished_floor"], status["training_steps"]) == ([2, 1], 1, 100)
    assert (status["last_loss"], status["losses"]) == ({"step": 0, "loss": 0.25}, {"0": 0.25})
    assert status["finished_loss"] == {"step": 0, "loss": 0.25}
    assert status["metrics"] == {"accuracy": 0.5, "bad": "-inf"}
    told = {"step": 1, "rows": 8, "loss": 0.5, "metrics": {"accuracy": 0.5, "bad": "-inf"}}
    assert (status["evaluations"], status["last_evaluation"]) == ([told], told)
    assert status["workers"][1] == {
        "index": 1,
        "stages": [1],
        "standing": "present",
        "name": "worker-1",
        "host": "desk",
        "pid": 101,
        "endpoint": "ipc://1",
        "incarnation": 2,
        "generation": 1,
        "heard": 2.0,
        "now": "1F3 of step 1",
        "trouble": "",
        "fault": "",
        "since": 999.0,
        "idle": 0.25,
        "layer": "",
        "actions": 0,
        "retained_bytes": 0,
        "memory": None,
        "clock": None,
    }


def test_status_has_the_losses_from_a_step_on(talk: Conversation):
    talk.send(name(1), report(1, steps=[record for step in range(41) for record in steps(1, step, loss=float(step))]))
    assert talk.status(losses_from="20")["losses"] == {"20": 20.0, "30": 30.0, "40": 40.0}


def test_a_missing_worker_is_in_the_status():
    assert Conversation().status()["workers"] == [
        {"index": 0, "stages": [0], "standing": "missing"},
        {"index": 1, "stages": [1], "standing": "missing"},
    ]


def test_a_script_with_named_code_tells_who_joins_what_to_compare(talk: Conversation):
    refused = talk.send(b"me", Ask("join"))[0][1]
    assert isinstance(refused, Refused)
    assert "stageline worker CONFIG" in refused.reason
    config = talk.core.run.config
    talk.core.run.config = dataclasses.replace(config, code=ScriptCode("2.13.0", {"model.py": "5fa0"}))
    ((_, answer),) = talk.send(b"me", Ask("join"))
    facts = {"run": "run-1", "settings": config.settings, "torch": "2.13.0", "files": {"model.py": "5fa0"}}
    assert answer == Answer("join/1", {**facts, "over": False})
    talk.send(b"me", StopRun("interrupted"))
    ((_, answer),) = talk.send(b"me", Ask("join"))
    assert answer == Answer("join/1", {**facts, "over": True})


def test_who_cannot_join_is_named_with_the_reason_whether_it_says_so_or_was_refused(talk: Conversation):
    declined = Declined("edge", 77, "model.py differs")
    for _ in range(2):
        assert talk.send(b"edge", declined) == [(b"edge", Answer("declined/1", {}))]
    talk.send(b"x", msgspec.structs.replace(hello(0), version=1, host="old", pid=78))
    first, second = talk.status()["declined"]  # type: ignore[misc]
    assert first == {"host": "edge", "pid": 77, "reason": "model.py differs"}
    assert (second["host"], second["pid"]) == ("old", 78)
    assert "control protocol version 1" in second["reason"]


def test_the_story_of_a_microbatch_joins_records_and_open_steps(talk: Conversation):
    talk.send(name(0), report(0, events=[Event(0, 7, 2, "stashed", 1002.0)]))
    talk.send(name(1), report(1, steps=steps(1, *range(8))))
    ((_, answer),) = talk.send(b"me", Ask("story", {"step": "7", "microbatch": "2"}))
    assert isinstance(answer, Answer)
    assert answer.schema == "story/1"
    msgspec.convert(answer.facts, StoryFacts)
    stashed, done = answer.facts["stages"]
    holder = {"name": "worker-0", "generation": 1, "incarnation": 1}
    assert stashed == {
        "stage": 0, "worker": 0, "attempts": [], "state": "stashed", "since": 1002.0, "holder": holder, "actions": []
    }  # fmt: skip
    assert (done["state"], done["since"]) == ("done", 17.0)
    assert done["actions"] == [  # the last stage runs F0 B0 F1 B1 F2 B2 F3 B3 U, each action a second long from 0 on
        {"action": "1F2", "start": 8.0, "end": 9.0},
        {"action": "1B2", "start": 10.0, "end": 11.0},
        {"action": "1U", "start": 16.0, "end": 17.0},
    ]


def test_the_timetable_is_of_the_newest_step_whose_times_all_stages_have_reported(talk: Conversation):
    talk.send(name(0), report(0, steps=[*steps(0, 0, 1), StepRecord(0, 2, b""), *steps(0, 3)]))  # of step 2, none
    ((_, nothing),) = talk.send(b"me", Ask("timetable"))
    assert isinstance(nothing, Answer)
    assert (nothing.facts["step"], nothing.facts["actions"], nothing.facts["steps"]) == (None, [], [])
    talk.send(name(1), report(1, steps=steps(1, 0, 1, 2)))
    ((_, answer),) = talk.send(b"me", Ask("timetable"))
    assert isinstance(answer, Answer)
    assert (answer.facts["step"], len(answer.facts["actions"])) == (1, 18)
    assert answer.facts["actions"][9:11] == [
        {"kind": "F", "stage": 1, "microbatch": 0, "worker": 1, "start": 0.0, "end": 1.0},
        {"kind": "B", "stage": 1, "microbatch": 0, "worker": 1, "start": 2.0, "end": 3.0},
    ]


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (
            Ask("weather"),
            "no answer to 'weather'; ask for status, queues, queue, peek, export, stack, log, microbatches, story",
        ),
        (Ask("story"), "step must be a number from 0 on, not ''"),
        (Ask("story", {"step": "1", "microbatch": "four"}), "microbatch must be a number from 0 on, not 'four'"),
        (Ask("story", {"step": "1", "microbatch": "4"}), "there is no microbatch 4: a step has 4"),
        (Ask("why", {"stage": "9"}), "there is no stage 9: the plan has stages 0 to "),
    ],
)
def test_a_query_without_an_answer_is_refused_with_what_can_be_asked(talk: Conversation, ask: Ask, words: str):
    ((_, refused),) = talk.send(b"me", ask)
    assert isinstance(refused, Refused)
    assert words in refused.reason
    assert refused.code == 2


def test_the_story_of_a_step_that_the_run_does_not_have_is_refused_with_the_steps_that_it_has(talk: Conversation):
    asked = Ask("story", {"step": "9999999", "microbatch": "1"})
    ((_, unknown),) = talk.send(b"me", asked)
    assert isinstance(unknown, Answer)  # no worker has told how many steps there are
    talk.send(name(1), report(1, training_steps=100))
    ((_, refused),) = talk.send(b"me", asked)
    assert refused == Refused(
        "story: there is no step 9999999: run run-1 has 100 training steps; ask for 0 to 99", code=2
    )
    talk.send(name(1), report(1, number=1, steps=steps(1, *range(102))))  # evaluation follows them
    ((_, evaluated),) = talk.send(b"me", Ask("story", {"step": "101", "microbatch": "1"}))
    assert isinstance(evaluated, Answer)


def test_an_explanation_tells_how_old_each_report_in_it_is(talk: Conversation):
    talk.send(name(0), report(0))
    talk.now += 0.75
    talk.send(name(1), report(1, now="1F0 of step 0"))
    ((_, answer),) = talk.send(b"me", Ask("why", {"stage": "0"}))
    assert isinstance(answer, Answer)
    assert answer.facts["reports"] == [{"worker": 0, "name": "worker-0", "heard": 0.75}]
