"""Drawings of steps, planned over measured."""

from xml.etree import ElementTree

import pytest

from stageline.broker.slowness.steps import Clocks
from stageline.broker.slowness.timetable import tables
from stageline.pipeline.schedule import make_schedule
from stageline.workers.extras.drawn_steps import CAUSES, DrawnStep, draw_svg, draw_text
from support.shapes import line
from support.slow_steps import SlowRun


def step(stages: int = 3, **changes: object) -> DrawnStep:
    schedule = make_schedule("1f1b", line(stages), 4)
    run = SlowRun(schedule, (0.01,) * stages, (0.02,) * (stages - 1), **changes)
    return DrawnStep.of(tables(run.records(3, 0), lambda step: schedule, Clocks())["steps"][-1])


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("stages", [1, 2, 6])
def test_a_drawing_has_two_rows_for_each_worker_and_fits_the_width(stages: int, width: int) -> None:
    lines = draw_text(step(stages), width=width).splitlines()
    assert sum(" planned  " in each for each in lines) == sum(" measured  " in each for each in lines) == stages
    title, *others = lines
    assert all(len(each) <= width for each in others)
    assert "step 2 by 1f1b" in title


def test_a_stretch_on_the_wire_has_its_sign_and_is_said_in_words() -> None:
    drawn = draw_text(step(2), ascii_only=True)
    assert drawn.isascii()
    measured = [each for each in drawn.splitlines() if " measured " in each]
    assert all(CAUSES["wire"][0] in each for each in measured)
    planned = [each for each in drawn.splitlines() if " planned " in each]
    assert not any(CAUSES["wire"][0] in each for each in planned)
    assert "for messages of stage 0 on their way" in " ".join(drawn.split())


def test_an_image_has_every_action_twice_and_every_wait_once() -> None:
    drawn = step(3, data=0.1)
    image = ElementTree.fromstring(draw_svg(drawn))  # noqa: S314 (our own)
    titles = [each.text or "" for each in image.iter("{http://www.w3.org/2000/svg}title")]
    assert sum(each.startswith("1F2\n") for each in titles) == 2
    waits = sum(len(row) for row in drawn.idle.values())
    assert sum(each.startswith("waits ") for each in titles) == waits
    assert any(each.startswith("waits for data\n") for each in titles)


def test_a_pause_before_a_step_is_said() -> None:
    drawn = draw_text(step(2, every=2, evaluation=0.5, noise=0.0))
    assert "before it, workers waited 500 ms for evaluation" in drawn
    assert "before it" not in draw_text(step(2))
