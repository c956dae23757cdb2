"""`stageline schedule`: lists and draws."""

from xml.etree import ElementTree

import pytest

from stageline.pipeline import schedule
from stageline.pipeline.program import check_schedule
from stageline.workers.cli.app import run
from stageline.workers.cli.commands.schedule import ABOUT
from support.answers import conforming


def output_of(capsys, *arguments):
    """Text that a command of this process writes to stdout; it must end well."""
    code = run(arguments)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def test_the_schedules_are_listed_each_with_a_sentence(capsys):
    names = [*schedule.schedule_names(), "2bw"]
    assert [*ABOUT] == names
    assert {*schedule.schedule_names("async")} <= {*names}
    listed = output_of(capsys, "schedule", "list").splitlines()[2:]
    assert [line.split()[0] for line in listed] == names
    facts = conforming(output_of(capsys, "schedule", "list", "--json"))
    assert [each["name"] for each in facts["schedules"]] == names


def test_a_schedule_is_drawn_and_measured(capsys, tmp_path):
    picture = tmp_path / "1f1b.svg"
    said = output_of(capsys, "schedule", "show", "1f1b", "--stages", "2", "--microbatches", "2", "--svg", str(picture))
    assert said.splitlines()[0] == "1f1b, 2 stages on 2 workers, 2 microbatches"
    assert "bubble 3 of 9 (33 %); in flight at most 2 on stage 0, 1 on stage 1" in said
    assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")  # noqa: S314  # our own


def test_stages_below_the_first_that_trains_are_drawn_without_backwards(capsys):
    shape = ("1f1b", "--stages", "3", "--microbatches", "2", "--first-trainable", "2", "--json")
    facts = conforming(output_of(capsys, "schedule", "show", *shape))
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
    facts = conforming(output_of(capsys, "schedule", "show", *arguments, "--microbatches", "4", "--json"))
    made = schedule.make_schedule(arguments[0], placement, 4)
    verdict = check_schedule(made)
    assert facts["placement"] == [list(stages) for stages in placement]
    assert facts["actions"] == [[str(action) for action in actions] for actions in made.workers]
    assert (facts["span"], facts["bubble"]) == (verdict.span, verdict.bubble)
    assert facts["stage_peak"] == list(verdict.stage_peak)


def test_a_schedule_from_a_file_is_checked_and_drawn(capsys, tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n")
    said = output_of(capsys, "schedule", "show", "--file", str(file))
    assert said.splitlines()[0] == "csv, 2 stages on 2 workers, 2 microbatches"
    assert "bubble 3 of 9 (33 %); in flight at most 2 on stage 0, 1 on stage 1" in said


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (
            b"0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
            "mine.csv: line 1, cell 2: 0B0 waits for 1B0, which comes after 1F1 on",
        ),
        (b"0F0,0X1\n", 'mine.csv: line 1, cell 2: "0X1" is no action'),
        (b"0F0,0B0\n0F1,0B1\n", "mine.csv: line 2, cell 1: 0F1: stage 0 is on line 1, too"),
        (b"0F0,0B0\n2F0,2B0\n", "mine.csv: the workers own stages 0, 2, but each of 0 to 2 needs exactly one owner"),
        (b"0F0,0F1,0B0\n", "mine.csv: line 1: 0B1 is missing"),
        (b"\n", "mine.csv: there is no worker"),
        (b"\xff", "mine.csv: byte 0 is not UTF-8"),
    ],
)
def test_a_file_that_cannot_be_run_is_refused_by_its_name(rows, reason, capsys, tmp_path):
    (tmp_path / "mine.csv").write_bytes(rows)
    assert run(["schedule", "show", "--file", str(tmp_path / "mine.csv")]) == 2
    assert reason in capsys.readouterr().err.replace("\n", " ")


def test_a_file_says_its_shape_itself_and_a_name_needs_one(capsys, tmp_path):
    (tmp_path / "mine.csv").write_text("0F0,0B0\n")
    assert run(["schedule", "show", "1f1b", "--file", str(tmp_path / "mine.csv"), "--stages", "2"]) == 2
    assert "--file says NAME, --stages itself: leave one of the two out" in capsys.readouterr().err
    assert run(["schedule", "show", "--microbatches", "2"]) == 2
    assert "give the NAME of a schedule, or a --file" in capsys.readouterr().err
    assert run(["schedule", "show", "1f1b", "--stages", "2"]) == 2
    assert "give the number of --microbatches" in capsys.readouterr().err
