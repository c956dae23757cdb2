"""Gradients clipped by their norm over all stages: which actions and queues that needs, and that no worker waits for
ever."""

from dataclasses import replace
from itertools import pairwise

import pytest

from stageline.pipeline.program import (
    Costs,
    NormClipping,
    Op,
    Program,
    TiedStages,
    Ties,
    UnsoundSchedule,
    check_schedule,
    compile_program,
)
from stageline.pipeline.schedule import (
    Action,
    Kind,
    Placement,
    Schedule,
    ScheduleRefused,
    make_schedule,
    schedule_names,
)
from support.shapes import accepted, line, looped, scattered

SHAPES: list[Placement] = [((0,),), line(2), line(4), looped(2, 2), ((0, 3), (1,), (2,)), scattered(5, 1)]


def clipped(schedule: Schedule) -> Program:
    return compile_program(schedule, [NormClipping()])


def test_a_worker_takes_the_norms_of_its_last_stage_first_and_clips_its_first_stage_first() -> None:
    schedule = clipped(make_schedule("gpipe", ((0, 2), (1, 3)), 1))
    ends = [" ".join(op.name for op in ops[4:]) for ops in schedule.step]
    assert ends == ["2N 0N 0C 2C 0U 2U", "3N 1N 1C 3C 1U 3U"]


def test_norms_go_down_the_pipeline_and_their_total_comes_up_as_far_as_stages_train() -> None:
    schedule = clipped(make_schedule("gpipe", line(4), 2, first_trainable=1))
    found = {op.name: (op.takes, op.gives) for op in sum(schedule.step, ())}
    assert not {"0N", "0C"} & found.keys()
    assert [found[name] for name in ("3N", "2N", "1N")] == [
        ((), ("norms-2",)),
        (("norms-2",), ("norms-1",)),
        (("norms-1",), ()),
    ]
    assert [found[name] for name in ("1C", "2C", "3C")] == [
        ((), ("clip-2",)),
        (("clip-2",), ("clip-3",)),
        (("clip-3",), ()),
    ]
    assert [(schedule.queues[name].source, schedule.queues[name].target) for name in ("norms-1", "clip-3")] == [
        (2, 1),
        (2, 3),
    ]


@pytest.mark.parametrize("name", [name for name in schedule_names() if name != "window"])
@pytest.mark.parametrize("placement", SHAPES, ids=str)
def test_no_schedule_deadlocks_over_norms(name: str, placement: Placement) -> None:
    stages = range(sum(map(len, placement)))
    shared: set[Ties] = {(), *(tuple(pairwise(sharing)) for sharing in ([0, stages[-1]], stages) if len(stages) > 1)}
    for ties in shared:
        for tied in ("microbatch", "step"):
            for made in accepted(name, placement, 4):
                schedule = compile_program(made, [TiedStages(ties, tied), NormClipping()])
                bound = check_schedule(schedule, steps=2).queue_bound
                assert all(bound[f"norms-{stage}"] == bound[f"clip-{stage + 1}"] == 1 for stage in stages[:-1])


def test_a_step_that_clips_takes_no_trip_more() -> None:
    """Stage 0 is the last to end its backwards, and the first to begin the next step."""
    costs = replace(Costs.even(4), latency=(5.0, 7.0, 3.0))
    spans = [
        check_schedule(compile_program(make_schedule("1f1b", line(4), 8), passes), costs, steps=3).timed
        for passes in ([], [NormClipping()])
    ]
    begun, clipped = ([each.start for each in timed if each.action == Action(Kind.FORWARD, 3)] for timed in spans)
    assert begun == clipped


def test_a_worker_that_clips_before_it_has_all_norms_is_found() -> None:
    program = clipped(make_schedule("gpipe", line(2), 1))

    def turned(worker: int, ops: tuple[Op, ...]) -> tuple[Op, ...]:
        return (*ops[:2], ops[3], ops[2], *ops[4:]) if worker else ops

    with pytest.raises(UnsoundSchedule, match="1C of step 0 before 1N of step 0"):
        check_schedule(program.with_lists(turned))


def test_asynchronous_mode_is_refused() -> None:
    with pytest.raises(ScheduleRefused, match="clipped by their norm over all stages, and in asynchronous mode"):
        clipped(make_schedule("1f1b", line(2), 1, mode="async"))
