"""`schedule.file`: read with the plan file, part of the plan and its digest, and what is refused."""

from pathlib import Path

import pytest

from stageline.pipeline.plan import Plan, PlanRefused, differences, from_mapping, read_plan
from support.small_plans import SMALLEST, plan, the_error

ROWS = ["0F0,0F1,,0B0,0B1", ",1F0,1B0,1F1,1B1"]
LISTED = {"schedule__name": "csv", "schedule__microbatches": 2}
TABLE = '[schedule]\nname = "csv"\nmicrobatches = 2\nfile = "lists/mine.csv"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "mine.csv").write_text("\n".join(ROWS) + "\n")
    (tmp_path / "stageline.toml").write_text(f"{SMALLEST}\n{TABLE}")
    return tmp_path / "stageline.toml"


def refused(file: Path, *sets: str) -> list[str]:
    with pytest.raises(PlanRefused) as found:
        read_plan(file, sets=sets)
    return [str(error) for error in found.value.errors]


def actions(read: Plan) -> list[str]:
    return [" ".join(map(str, row)) for row in read.make_schedule().workers]


def test_the_file_lies_beside_the_plan_and_becomes_part_of_it(file: Path) -> None:
    read = read_plan(file)
    assert list(read.schedule.rows or ()) == ROWS
    assert actions(read) == ["0F0 0F1 0B0 0B1 0U", "1F0 1B0 1F1 1B1 1U"]
    assert read.origins["schedule.rows"] == read.origins["schedule.file"] == "file"
    again = from_mapping(read.as_mapping())
    assert again == read
    assert actions(again) == actions(read)


def test_plans_with_unlike_files_differ_and_those_with_the_same_under_other_names_do_not(file: Path) -> None:
    first = read_plan(file)
    (file.parent / "other.csv").write_text("\r\n".join(ROWS))
    assert read_plan(file, sets=["schedule.file=other.csv"]).digest() == first.digest()
    (file.parent / "other.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n")
    other = read_plan(file, sets=["schedule.file=other.csv"])
    assert other.digest() != first.digest()
    (found,) = differences(first.as_mapping(), other.as_mapping())
    assert found.key == "schedule.rows"
    assert found.of_layout


def test_rows_may_be_given_in_place_of_a_file() -> None:
    assert actions(plan(**LISTED, schedule__rows=ROWS))[1] == "1F0 1B0 1F1 1B1 1U"


def test_all_faults_of_the_file_are_told_with_the_place_of_the_key(file: Path) -> None:
    (file.parent / "lists" / "mine.csv").write_text("0F0,0X1\n1F0,,1Q0\n")
    where = f'{file}:{len(SMALLEST.splitlines()) + 5}: schedule.file = "lists/mine.csv": '
    first, second = refused(file)
    assert first.startswith(f'{where}line 1, cell 2: "0X1" is no action')
    assert second.startswith(f'{where}line 2, cell 3: "1Q0" is no action')
    (file.parent / "lists" / "mine.csv").write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    (deadlock,) = refused(file)
    assert "0B0 waits for 1B0, which comes after 1F1 on worker 1, which waits for 0F1, which comes after" in deadlock


def test_many_faults_are_counted_after_the_first_twenty(file: Path) -> None:
    (file.parent / "lists" / "mine.csv").write_text(",".join(["x"] * 30))
    found = refused(file)
    assert len(found) == 21
    assert found[-1].endswith("and 10 more")


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "cannot be read: No such file or directory"), (b"\xff", "byte 0 is not UTF-8")]
)
def test_a_file_that_cannot_be_read_is_named(file: Path, content: bytes | None, reason: str) -> None:
    listed = file.parent / "lists" / "mine.csv"
    listed.unlink() if content is None else listed.write_bytes(content)
    (found,) = refused(file)
    assert f"{listed}" in found
    assert reason in found


def test_rows_and_a_file_are_not_both_given(file: Path) -> None:
    file.write_text(f"{SMALLEST}\n{TABLE}rows = []\n")
    (found,) = refused(file)
    assert "schedule.rows is given too; keep one of the two" in found
    assert list(read_plan(file, sets=[f"schedule.rows={ROWS}"]).schedule.rows or ()) == ROWS


@pytest.mark.parametrize(
    ("changes", "key", "reason"),
    [
        (LISTED, "schedule.file", 'name = "csv" requires it: a row of actions for each worker'),
        ({**LISTED, "schedule__file": "a.csv"}, "schedule.file", "it is read only for a plan that is a file itself"),
        ({"schedule__rows": ROWS}, "schedule.rows", 'name = "1f1b" does not use it; use name = "csv", or leave it out'),
        ({**LISTED, "schedule__rows": ROWS, "schedule__microbatches": 1}, "schedule.rows", "set schedule.microbatches"),
        ({**LISTED, "schedule__rows": [",", "1F0"]}, "schedule.rows", "its rows have the stages [[], [1]]"),
        ({**LISTED, "schedule__rows": [*ROWS, ""]}, "schedule.rows", "its rows have the stages [[0], [1], []]"),
        ({**LISTED, "schedule__rows": ["," * 50_000]}, "schedule.rows", "expected rows of at most 48000 characters"),
        (
            {**LISTED, "schedule__rows": ROWS, "schedule__microbatches": 1, "schedule__mode": "async"},
            "schedule.name",
            'mode = "async" supports only name = "1f1b"',
        ),
        (
            {**LISTED, "schedule__rows": ROWS, "stage": {"1": {"replicas": 2}}},
            "stage.1.replicas",
            'schedule.name = "csv" does not support replicas',
        ),
        (
            {
                **LISTED,
                "schedule__rows": ["0F0,0F1,0I0,0W0,0B1", ROWS[1]],
                "memory": {"recompute": "stage"},
            },
            "memory.recompute",
            'schedule.name = "csv" splits backwards in two',
        ),
        (
            {
                **LISTED,
                "schedule__rows": ["0F0,0F1,0I0,0W0,0B1", ROWS[1]],
                "stage": {"1": {"shard": 2}},
            },
            "stage.1.shard",
            'schedule.name = "csv" splits backwards in two',
        ),
    ],
)
def test_what_does_not_go_with_rows_is_refused(changes: dict, key: str, reason: str) -> None:
    error = the_error(**changes)
    assert error.key == key
    assert reason in error.reason


def test_batches_that_are_accumulated_are_counted_in_the_file() -> None:
    assert (
        len(plan(**{**LISTED, "schedule__microbatches": 1}, schedule__accumulate=2, schedule__rows=ROWS).workers) == 2
    )
