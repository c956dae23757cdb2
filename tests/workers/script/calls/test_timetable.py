"""The timetable that a script sees."""

import base64
import re

from stageline.pipeline.program import check_schedule
from stageline.pipeline.schedule import make_schedule
from stageline.workers.script.calls.page import planned, timed_in, timetable_of

SCHEDULE = make_schedule("1f1b", placement=[[0], [1]], microbatches=2)


def test_without_times_it_is_the_plan_and_says_so():
    found = timetable_of(SCHEDULE, [])
    assert found == planned(SCHEDULE)
    assert not found.measured
    assert str(found).startswith("1f1b as it is planned:\n")
    assert "worker 1" in str(found)


def test_what_the_broker_answers_becomes_the_timetable_of_that_step():
    rows = [
        {"kind": str(each.action.kind), "stage": each.action.stage, "microbatch": each.action.microbatch}
        | {"start": each.start, "end": each.end}
        for each in check_schedule(SCHEDULE).timed
    ]
    found = timetable_of(SCHEDULE, timed_in(SCHEDULE, {"step": 7, "actions": rows}))
    assert found.title == "1f1b as it ran, step 7"
    assert [(each.worker, each.action, each.start, each.end) for each in found.timed] == [
        (each.worker, each.action, each.start, each.end) for each in planned(SCHEDULE).timed
    ]


def test_in_a_notebook_it_is_an_image_that_leaves_the_pages_styles_alone():
    html = planned(SCHEDULE)._repr_html_()
    assert "<style" not in html
    (data,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
    assert base64.b64decode(data).decode() == planned(SCHEDULE).svg
