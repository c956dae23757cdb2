"""`stageline schedule`: lists and draws."""

import json
from xml.etree import ElementTree

import pytest

from stageline.pipeline import schedule
from stageline.pipeline.schedule.check import check_schedule
from stageline.workers.cli.app import run
from stageline.workers.cli.commands.planning.schedule import ABOUT


def output_of(capsys, *arguments):
    """What a command of this process writes to stdout; it must end well."""
    code = run(arguments)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def test_the_schedules_are_listed_each_with_a_sentence(capsys):
    assert tuple(ABOUT) == schedule.schedule_names()
    listed = output_of(capsys, "schedule", "list").splitlines()[2:]
    assert [line.split()[0] for line in listed] == list(schedule.schedule_names())
    facts = json.loads(output_of(capsys, "schedule", "list", "--json"))
    assert [each["name"] for each in facts["schedules"]] == list(schedule.schedule_names())


def test_a_schedule_is_drawn_and_measured(capsys, tmp_path):
    picture = tmp_path / "1f1b.svg"
    said = output_of(capsys, "schedule", "show", "1f1b", "--stages", "2", "--microbatches", "2", "--svg", str(picture))
    assert said.splitlines()[0] == "1f1b, 2 stages on 2 workers, 2 microbatches"
    assert "bubble 3 of 9 (33 %); in flight at most 2 on stage 0, 1 on stage 1" in said
    assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")  # noqa: S314  # our own


def test_stages_below_the_first_that_trains_are_drawn_without_backwards(capsys):
    shape = ("1f1b", "--stages", "3", "--microbatches", "2", "--first-trainable", "2", "--json")
    facts = json.loads(output_of(capsys, "schedule", "show", *shape))
    assert facts["actions"][:2] == [["0F0", "0F1", "0U"], ["1F0", "1F1", "1U"]]
    assert facts["stage_peak"] == [0, 0, 1]
    assert run(["schedule", "show", *shape[:5], "--first-trainable", "4"]) == 2
    assert "its first trainable stage is 4; use one of 0 to 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "placement"),
    [
        (["gpipe", "--stages", "3"], ((0,), (1,), (2,))),
        (["1f1b", "--stages", "4", "--workers", "2"], ((0, 1), (2, 3))),
        (["interleaved-1f1b", "--stages", "4", "--workers", "2"], ((0, 2), (1, 3))),
        (["1f1b", "--placement", "0,3;1,2"], ((0, 3), (1, 2))),
    ],
)
def test_the_json_of_a_schedule_holds_what_the_checker_found(arguments, placement, capsys):
    facts = json.loads(output_of(capsys, "schedule", "show", *arguments, "--microbatches", "4", "--json"))
    made = schedule.make_schedule(arguments[0], placement, 4)
    verdict = check_schedule(made)
    assert facts["placement"] == [list(stages) for stages in placement]
    assert facts["actions"] == [[str(action) for action in actions] for actions in made.workers]
    assert (facts["span"], facts["bubble"]) == (verdict.span, verdict.bubble)
    assert facts["stage_peak"] == list(verdict.stage_peak)
