"""Steps as a schedule plans them: the lean simulation for answers agrees with the one that checks schedules."""

from random import Random

import pytest

from stageline.broker.slowness import planned
from stageline.broker.slowness.planned import PlannedSteps, planned_bubble
from stageline.broker.slowness.steps import Clocks
from stageline.broker.slowness.told import slowness
from stageline.pipeline.program import Costs, check_schedule, compile_program
from stageline.pipeline.program.timing import simulate
from stageline.pipeline.schedule import Schedule, make_schedule
from support.shapes import line
from support.slow_steps import SlowRun

SCHEDULES = [
    make_schedule("gpipe", line(2), 4),
    make_schedule("1f1b", line(4), 8),
    make_schedule("1f1b", line(3), 4, first_trainable=1),
    make_schedule("window", line(3), 6, window=[1, 1, 1]),
    make_schedule("zb-h1", line(4), 8),
    make_schedule("1f1b", ((0, 2), (1, 3)), 4),
    make_schedule("1f1b", ((0,), (1,), (2,), (3,)), 6, shares=((1,), (2, 1), (1,))),
    make_schedule("1f1b", line(3), 1, mode="async"),
    make_schedule("2bw", line(3), 6, mode="async"),
]


def drawn_costs(stages: int) -> Costs:
    random = Random(stages)
    forward, first, second, update = (tuple(random.random() for _ in range(stages)) for _ in range(4))
    return Costs(forward, first, second, update, tuple(random.random() for _ in range(stages - 1)))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda each: f"{each.name}-{each.stages}-{each.mode}")
def test_actions_have_the_times_of_the_simulation_that_also_counts_messages(schedule: Schedule) -> None:
    costs = drawn_costs(schedule.stages)
    counted, _ = simulate(compile_program(schedule), costs, range(3), {})
    lean = PlannedSteps(schedule, 3).timed(costs)
    times = [{(each.step, each.action): pytest.approx(each.end) for each in found} for found in (counted, lean)]
    assert len(counted) == len(lean)
    assert times[0].keys() == times[1].keys()
    assert {(each.step, each.action): each.end for each in lean} == times[0]
    verdict = check_schedule(schedule)
    assert planned_bubble(schedule) == pytest.approx(verdict.bubble / verdict.span)


def test_the_present_schedule_is_compiled_once_for_all_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each remedy compiled and simulated it again: 6 s at 64 stages."""
    planned.planned_steps.cache_clear()
    compiled = []
    plain = planned.compile_program
    monkeypatch.setattr(planned, "compile_program", lambda each: compiled.append(each) or plain(each))
    run = SlowRun(make_schedule("1f1b", line(3), 8), (0.01, 0.03, 0.01), (0.0001, 0.0001))
    facts = slowness(run.schedule, run.pace(12, 0), since=0, settings={}, clocks=Clocks(), planned=None)
    assert facts is not None
    (found,) = facts["findings"]  # type: ignore[misc, attr-defined]
    assert len(found["remedies"]) == 2
    assert len(compiled) == 1
    assert planned_bubble(run.schedule) is not None
    assert len(compiled) == 1
