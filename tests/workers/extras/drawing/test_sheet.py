"""Labels and times are the same in every drawing."""

import pytest

from stageline.pipeline.program import Timed, check_schedule
from stageline.pipeline.schedule import Action, Kind, make_schedule
from stageline.workers.extras.drawing import draw_text
from support.shapes import line, looped


def test_labels_name_the_stage_where_a_worker_has_several() -> None:
    drawing = draw_text(check_schedule(make_schedule("interleaved-1f1b", looped(2, 2), 2)).timed)
    assert drawing.splitlines()[1].startswith("worker 0  0F0 0F1 2F0 2F1 ")


def test_labels_count_steps_where_a_step_is_one_microbatch() -> None:
    drawing = draw_text(check_schedule(make_schedule("1f1b", line(2), 1, mode="async"), steps=3).timed)
    assert drawing.splitlines()[2].startswith("worker 1     F0 B0███ F1 B1███ F2 B2███")


@pytest.mark.parametrize(("scale", "unit"), [(1, "s"), (1e-3, "ms"), (1e-6, "µs")])
def test_times_have_the_unit_that_suits_them(scale: float, unit: str) -> None:
    timed = [
        Timed(0, Action(Kind.FORWARD, 0, microbatch), microbatch * scale, (microbatch + 1) * scale)
        for microbatch in range(9)
    ]
    assert f"5 {unit}" in draw_text(timed, seconds=True)
