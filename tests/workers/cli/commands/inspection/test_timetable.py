"""`stageline timetable`, and what `why` and `status` say about the pace of a run that was trained."""

import json

import jsonschema
import msgspec
import pytest

from stageline.broker.control.messages import Answer, Ask
from stageline.workers.cli.schemas import schema_of
from support.conversation import Conversation, name, report, steps


@pytest.fixture
def trained(workspace, capsys):
    assert workspace.here("train", ".", "--set", "queues.url=memory://") == 0
    capsys.readouterr()
    return workspace


def test_a_step_is_drawn_with_what_each_worker_waited_for_and_as_an_image(trained, capsys):
    assert trained.here("timetable", "--svg", "step.svg") == 0
    title, first, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("run small-")
    assert first.startswith("step 5 by 1f1b: ")
    assert sum(" measured " in each for each in lines) == 2
    assert (trained.folder / "step.svg").read_text().startswith("<svg ")
    assert trained.here("timetable", "--steps", "2..4", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["schema"], [each["step"] for each in facts["steps"]]) == ("timetable/1", [2, 3, 4])
    kinds = {each["kind"] for each in facts["steps"][0]["actions"]}
    assert kinds == {"F", "B", "U"}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--step", "6"), "steps 0 to 5 are finished"),
        (("--steps", "4..2"), "4..2"),
        (("--steps", "0..99"), "64"),
        (("--steps", "four"), "A..B"),
        (("--step", "1", "--steps", "1..2"), "--steps"),
    ],
)
def test_steps_that_cannot_be_drawn_are_refused_with_what_can(trained, capsys, arguments, named):
    assert trained.here("timetable", *arguments) == 2
    assert named in capsys.readouterr().err


def test_a_run_tells_its_pace_and_what_limits_it_after_its_end_too(trained, capsys):
    assert trained.here("why", "--json") == 0
    slow = json.loads(capsys.readouterr().out)["slow"]
    assert slow["steps"] == [1, 5]
    assert 0 <= slow["bubble"]["measured"] < 1
    assert slow["bubble"]["planned"] == pytest.approx(0.25)
    assert trained.here("why") == 0
    assert "one process computes all stages in turn" in capsys.readouterr().out
    assert not {each["cause"] for each in slow["findings"]} & {"wire", "window", "credit"}


@pytest.mark.parametrize("query", ["status", "why", "timetable"])
def test_an_answer_from_records_and_one_of_a_broker_are_as_their_schema_says(query, trained, capsys):
    assert trained.here(query, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    jsonschema.validate(facts, schema_of(f"{query}/1"))
    talk = Conversation()
    for index in range(2):
        talk.join(index)
        talk.send(name(index), report(index, steps=steps(index, *range(6)), memory=2**28, clock=(0.5, 0.01)))
    ((_, answer),) = talk.send(b"me", Ask(query))
    assert isinstance(answer, Answer)
    envelope = {"schema": answer.schema, "source": "broker", "as_of": 1.0}
    jsonschema.validate(msgspec.json.decode(msgspec.json.encode(answer.facts | envelope)), schema_of(f"{query}/1"))


def test_a_status_before_the_first_worker_is_as_its_schema_says():
    facts = msgspec.json.decode(msgspec.json.encode(Conversation().status()))
    envelope = {"schema": "status/1", "source": "broker", "as_of": 1.0}
    jsonschema.validate(facts | envelope, schema_of("status/1"))
