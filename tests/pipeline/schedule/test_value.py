"""A schedule's program over the steps of a run."""

from itertools import islice

import pytest

from stageline.pipeline.schedule import (
    Mode,
    make_schedule,
)
from support.shapes import drawn, line


def picture(text: str) -> str:
    return "\n".join(row.strip() for row in text.strip().splitlines())


def test_asynchronous_1f1b_never_drains_between_steps() -> None:
    assert drawn(make_schedule("1f1b", line(3), 1, mode="async"), steps=5) == picture("""
        F0 F1 F2 .. .. .. .. B0 == F3 B1 == F4 B2 == .. B3 == .. B4 ==
        .. F0 F1 .. .. B0 == F2 B1 == F3 B2 == F4 B3 == .. B4 ==
        .. .. F0 B0 == F1 B1 == F2 B2 == F3 B3 == F4 B4 ==
    """)


def test_a_synchronous_program_repeats_the_step() -> None:
    schedule = make_schedule("1f1b", line(2), 1)
    assert [(step, str(action)) for step, action in schedule.program(1, range(7, 9))] == [
        (7, "1F0"),
        (7, "1B0"),
        (7, "1U"),
        (8, "1F0"),
        (8, "1B0"),
        (8, "1U"),
    ]


def test_an_asynchronous_program_updates_right_after_each_backward() -> None:
    schedule = make_schedule("1f1b", line(2), 1, mode="async")
    assert [f"{action} {step}" for step, action in schedule.program(0, range(3, 6))] == [
        *("0F0 3", "0F0 4", "0B0 3", "0U 3", "0F0 5", "0B0 4", "0U 4", "0B0 5", "0U 5")
    ]


def test_an_untrained_stage_of_an_asynchronous_program_ends_its_steps_with_the_forward() -> None:
    schedule = make_schedule("1f1b", line(2), 1, mode="async", first_trainable=1)
    assert [f"{action} {step}" for step, action in schedule.program(0, range(2))] == ["0F0 0", "0U 0", "0F0 1", "0U 1"]


def test_with_two_versions_a_program_updates_after_the_last_microbatch_of_a_step_and_does_not_drain() -> None:
    schedule = make_schedule("2bw", line(2), 2, mode="async")
    assert [f"{action} {step}" for step, action in schedule.program(0, range(3, 5))] == [
        *("0F0 3", "0F1 3", "0B0 3", "0F0 4", "0B1 3", "0U 3", "0F1 4", "0B0 4", "0B1 4", "0U 4")
    ]
    assert [f"{action} {step}" for step, action in schedule.program(1, range(3, 4))] == [
        *("1F0 3", "1B0 3", "1F1 3", "1B1 3", "1U 3")
    ]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("placement", [line(3), ((0, 2), (1,))])
def test_a_program_begins_at_once_however_long_the_run(placement: tuple[tuple[int, ...], ...], mode: Mode) -> None:
    program = make_schedule("1f1b", placement, 1, mode=mode).program(0, range(10**15))
    assert len(list(islice(program, 30))) == 30


def test_a_stage_has_one_owner() -> None:
    schedule = make_schedule("1f1b", ((0, 3), (1,), (2,)), 3)
    assert [schedule.owner(stage) for stage in range(schedule.stages)] == [0, 1, 2, 0]
    with pytest.raises(ValueError, match="no worker owns stage 4: stages are numbered 0 to 3"):
        schedule.owner(4)
