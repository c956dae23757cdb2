"""The losses that a script has seen."""

import math
from concurrent.futures import Future
from xml.etree import ElementTree

import pytest

from stageline.workers.script.calls.page import MOST, LossCurve, Seen, draw_losses


def test_a_long_run_keeps_few_points_evenly_and_its_newest():
    curve = LossCurve()
    for step in range(100_001):
        curve.add(step, 1 / (step + 1))
    *kept, newest = curve.points
    assert len(kept) <= MOST
    assert [step for step, _ in kept] == list(range(0, 100_001, curve.stride))[: len(kept)]
    assert newest == (100_000, 1 / 100_001)


@pytest.mark.parametrize("points", [[(0, 0.5)], [(7, 2.0), (8, 2.0)], [(0, -1e-9), (1, 3e8)], [(3, 0.0), (900, -4.25)]])
def test_every_point_is_drawn_within_the_image(points):
    drawing = ElementTree.fromstring(draw_losses(points))  # noqa: S314  # our own
    (curve,) = (each for each in drawing if each.get("class") == "curve")
    found = [tuple(map(float, point.split(","))) for point in curve.attrib["points"].split()]
    assert len(found) == len(points)
    assert all(64 <= x <= 616 and 36 <= y <= 186 for x, y in found)


def test_a_failed_step_is_not_counted_and_a_loss_that_is_no_number_not_drawn():
    seen = Seen(start=4)
    for reply in ({0: None, 1: 0.5}, {0: None, 1: None}, {0: None, 1: math.inf}):
        done: Future[dict[int, float | None]] = Future()
        done.set_result(reply)
        seen.step_ended(done)
    failed: Future[dict[int, float | None]] = Future()
    failed.set_exception(ValueError())
    seen.step_ended(failed)
    assert (seen.steps, seen.loss, seen.curve.points) == (7, math.inf, [(4, 0.5)])
