"""Schedules that are written down as rows of cells: torch's own, and everything that is refused."""

import csv
from pathlib import Path

import pytest

from stageline.pipeline.program import NormClipping, TiedStages, check_schedule, compile_program
from stageline.pipeline.schedule import (
    Kind,
    Schedule,
    ScheduleRefused,
    Shape,
    make_schedule,
    rows_of,
    told_by,
    v_shaped,
)
from stageline.pipeline.schedule.listed import faults
from support.shapes import looped
from support.torch_schedules import TORCHS, dumped

CATALOGUE = {
    "ScheduleZBVZeroBubble": "zb-v",
    "ScheduleDualPipeV": "dualpipe-v",
    "ScheduleInterleaved1F1B": "interleaved-1f1b",
}
TWO = ((0,), (1,))
ROWS = ("0F0,0F1,,0B0,0B1", ",1F0,1B0,1F1,1B1")


def without_ends(schedule: Schedule) -> list[list[str]]:
    return [[str(action) for action in row if action.kind is not Kind.UPDATE] for row in schedule.workers]


def refused(*rows: str, placement: tuple[tuple[int, ...], ...] = TWO, microbatches: int = 2) -> list[str]:
    return faults(rows, Shape("csv", placement, microbatches))


@pytest.mark.parametrize("theirs", TORCHS)
@pytest.mark.parametrize("microbatches", [4, 8])
def test_a_file_that_torch_writes_is_the_schedule_of_the_catalogue(
    theirs: str, microbatches: int, tmp_path: Path
) -> None:
    file = dumped(theirs, 2, microbatches, tmp_path / "theirs.csv")
    rows = rows_of(file.read_text())
    placement, there = told_by(rows)
    assert there == microbatches
    made, name = make_schedule("csv", placement, microbatches, rows=rows), CATALOGUE[theirs]
    ours = make_schedule(name, looped(2, 2) if name == "interleaved-1f1b" else v_shaped(2), microbatches)
    assert without_ends(made) == without_ends(ours)
    assert made.workers[0][-1].kind is Kind.UPDATE
    check_schedule(made)


def test_a_schedule_of_the_catalogue_comes_back_from_a_file(tmp_path: Path) -> None:
    for name, placement in (("1f1b", TWO), ("zb-h1", TWO), ("1f1b", ((0, 3), (1, 2))), ("looped-bfs", looped(2, 2))):
        ours = make_schedule(name, placement, 4)
        file = tmp_path / "ours.csv"
        with file.open("w", newline="") as opened:
            csv.writer(opened).writerows(without_ends(ours))
        made = make_schedule("csv", placement, 4, rows=rows_of(file.read_text()))
        assert made.workers == ours.workers


def test_lines_end_as_any_system_ends_them_and_cells_may_have_quotes_and_spaces() -> None:
    assert rows_of('"0F0", 0B0,\r\n,1F0,"1B0"\r\n\r\n,,\n') == ("0F0,0B0,", ",1F0,1B0")


def test_the_reduction_with_which_torch_ends_some_lists_counts_as_empty() -> None:
    rows = ("0F0,0F1,0B0,0B1,0REDUCE_GRAD", f"{ROWS[1]},1REDUCE_GRAD")
    assert make_schedule("csv", TWO, 2, rows=rows) == make_schedule("csv", TWO, 2, rows=ROWS)


def test_backwards_of_stages_that_do_not_train_are_left_out() -> None:
    made = make_schedule("csv", TWO, 2, rows=ROWS, first_trainable=1)
    assert [str(action) for action in made.workers[0]] == ["0F0", "0F1", "0U"]
    check_schedule(made)


def test_what_ends_a_step_is_added_as_for_other_schedules() -> None:
    made = compile_program(make_schedule("csv", TWO, 2, rows=ROWS), [TiedStages(((0, 1),)), NormClipping()])
    assert " ".join(op.name for op in made.step[1]) == "1F0 1B0 1T0 1F1 1B1 1T1 1N 1C 1U"
    check_schedule(made)


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (("0F0,0X1", "1F0"), ['line 1, cell 2: "0X1" is no action; write the stage, one of F, B, I and W, and the']),
        (("0F0;0F1", "F1,1F0"), ['line 1, cell 1: "0F0;0F1" is no action', 'line 2, cell 1: "F1" is no action']),
        (("0F0,0SEND_F0", "1F0"), ['line 1, cell 2: "0SEND_F0" is a communication, which follows from the comput']),
        (("0F0,(0F1;0Q0)OVERLAP_F_B",), ['line 1, cell 2: "(0F1;0Q0)OVERLAP_F_B" is no action']),
        (("0F0,0B0", "1F0,0F1"), ["line 2, cell 2: 0F1: stage 0 is on line 1, too (0F0 in cell 1); a stage has one"]),
        (("0F0,2F0", "1F0"), ["its rows have the stages [[0, 2], [1]], and the workers [[0], [1]]: there is a row"]),
        (("0F0",), ["its rows have the stages [[0]], and the workers [[0], [1]]"]),
        ((), ["its rows have the stages [], and the workers [[0], [1]]"]),
        (
            ("0F0,0F7", "1F0"),
            ["line 1, cell 2: 0F7: a step has 2 microbatches, and they are numbered from 0; for this"],
        ),
        (("0F0,0F0", "1F0"), ["line 1, cell 2: 0F0 stands in cell 1, too; it runs once"]),
        (("0F0,0B0,0I0", "1F0"), ["line 1, cell 3: 0I0 is a half of 0B0 in cell 2; keep the halves, or the whole"]),
        (("0F0,0I0,0W0,0B0", "1F0"), ["line 1, cell 4: 0B0 has its half 0I0 in cell 2", "0B0 has its half 0W0"]),
        (("0F0,0F1,0B1", ROWS[1]), ["line 1: 0B0 is missing; a step has microbatches 0 to 1, each with F and B, or"]),
        (("0F0,0F1,0I0,0B1", "1F0"), ["line 1: 0W0 is missing", "line 2: 1B0, 1F1, 1B1 are missing"]),
        (("0F0", ROWS[1]), ["line 1: 0B0, 0F1, 0B1 are missing"]),
        (("0F1,0F0,0B0,0B1", ROWS[1]), ["line 1, cell 1: 0F1 comes before 0F0 (line 1, cell 2), and messages are num"]),
        (("0F0,0F1,0B1,0B0", ROWS[1]), ["cell 3: 0B1 comes before 0B0 (line 1, cell 4), and gradients are added in"]),
        (("0F0,0B0,0B1,0F1", ROWS[1]), ["cell 3: 0B1 comes before 0F1 (line 1, cell 4), which it builds on"]),
        (("0F0,0F1,0I0,0I1,0W1,0W0", ROWS[1]), ["line 1, cell 5: 0W1 comes before 0W0 (line 1, cell 6), and gradi"]),
    ],
)
def test_what_is_wrong_is_named_with_its_line_and_cell(rows: tuple[str, ...], found: list[str]) -> None:
    said = refused(*rows)
    assert len(said) == len(found), said
    assert all(part in each for part, each in zip(found, said, strict=True)), said
    with pytest.raises(ScheduleRefused, match="schedule csv cannot run 2 stages on 2 workers with 2 microbatches: "):
        make_schedule("csv", TWO, 2, rows=rows)


def test_workers_that_wait_for_each_other_are_named_in_a_circle() -> None:
    assert refused("0F0,0B0,0F1,0B1", "1F0,1F1,1B0,1B1") == [
        "line 1, cell 2: 0B0 waits for 1B0, which comes after 1F1 on worker 1, which waits for 0F1, which comes after "
        "0B0 on worker 0: none of them ever runs; change their order"
    ]


def test_a_worker_that_waits_for_itself_is_named() -> None:
    (said,) = refused("1F0,0F0,1B0,0B0", placement=((0, 1),), microbatches=1)
    assert said.startswith("line 1, cell 1: 1F0 waits for 0F0, which comes after 1F0 on worker 0: ")


def test_who_waits_only_behind_the_circle_is_not_in_it() -> None:
    (said,) = refused("0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1", "2F0,2F1,2B0,2B1", placement=((0,), (1,), (2,)))
    assert said == (
        "line 2, cell 2: 1B0 waits for 2B0, which comes after 2F1 on worker 2, which waits for 1F1, which comes after "
        "1B0 on worker 1: none of them ever runs; change their order"
    )


@pytest.mark.parametrize("theirs", ["ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble"])
def test_of_torchs_lists_the_backwards_may_descend_in_all_stages(theirs: str, tmp_path: Path) -> None:
    rows = rows_of(dumped(theirs, 2, 4, tmp_path / "theirs.csv").read_text())
    placement, _ = told_by(rows)
    made = make_schedule("csv", placement, 4, rows=rows)
    assert made.descends == (theirs == "ScheduleLoopedBFS")
    check_schedule(made, steps=2)


def test_backwards_that_descend_in_one_stage_alone_are_refused() -> None:
    (said,) = refused("0F0,0F1,,0B1,0B0", ",1F0,1F1,1B0,1B1")
    assert "gradients are added in one order of microbatches" in said


def test_rows_go_with_the_name_csv_alone() -> None:
    with pytest.raises(ScheduleRefused, match='rows are for the schedule "csv"'):
        make_schedule("1f1b", TWO, 2, rows=ROWS)
    with pytest.raises(ScheduleRefused, match='rows are for the schedule "csv"'):
        make_schedule("csv", TWO, 2)
