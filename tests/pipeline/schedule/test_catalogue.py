"""The catalogue: what holds for every schedule and shape, and what is refused and how."""

from typing import Any

import pytest

from stageline.pipeline.schedule import (
    ENDS_MICROBATCH,
    Action,
    Kind,
    Schedule,
    ScheduleRefused,
    forward_only,
    make_schedule,
    schedule_names,
    v_shaped,
)
from support.shapes import accepted, line, looped, scattered


def lists(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, actions)) for actions in schedule.workers]


def test_stages_below_the_first_trainable_run_forward_only_and_still_end_their_step() -> None:
    assert lists(make_schedule("1f1b", line(3), 3, first_trainable=1)) == [
        "0F0 0F1 0F2 0U",
        "1F0 1F1 1B0 1F2 1B1 1B2 1U",
        "2F0 2B0 2F1 2B1 2F2 2B2 2U",
    ]


def test_every_worker_ends_its_step_with_the_updates_of_its_stages() -> None:
    for name in schedule_names():
        placement = v_shaped(2) if name in ("zb-v", "dualpipe-v") else looped(2, 2)
        schedule = make_schedule(name, placement, 4, window=(4, 3, 2, 1) if name == "window" else None)
        assert [actions[-2:] for actions in schedule.workers] == [
            tuple(Action(Kind.UPDATE, stage) for stage in stages) for stages in placement
        ]


def test_evaluation_runs_every_microbatch_forward_and_updates_nothing() -> None:
    assert lists(forward_only(((0, 2), (1,)), 2)) == ["0F0 0F1 2F0 2F1", "1F0 1F1"]


@pytest.mark.parametrize("first_trainable", [0, 1, 2])
@pytest.mark.parametrize("name", schedule_names())
def test_backward_runs_in_ascending_order_whatever_the_shape(name: str, first_trainable: int) -> None:
    for placement in (line(1), line(2), line(5), looped(2, 2), looped(3, 4), scattered(5, seed=1)):
        stages = sum(map(len, placement))
        window = tuple(range(stages + 2, 2, -1)) if name == "window" else None
        for schedule in accepted(name, placement, 16, window=window, first_trainable=min(first_trainable, stages)):
            for stage in range(min(first_trainable, stages), stages):
                actions = schedule.workers[schedule.owner(stage)]
                for kinds in ((Kind.BACKWARD, Kind.INPUT), ENDS_MICROBATCH):
                    order = [each.microbatch for each in actions if each.kind in kinds and each.stage == stage]
                    assert order == list(range(schedule.microbatches))


@pytest.mark.parametrize(
    ("arguments", "options", "reason"),
    [
        (("1f2b", line(2), 4), {}, "no schedule named '1f2b'; did you mean 1f1b?"),
        (("interleaved", line(2), 4), {}, "did you mean interleaved-1f1b?"),
        (("zigzag", line(2), 4), {}, "no schedule named 'zigzag'; the names are: gpipe, 1f1b"),
        (("gpipe", line(2), 4), {"mode": "later"}, 'no mode \'later\'; use "sync" or "async"'),
        (("gpipe", line(2), 1), {"mode": "async"}, 'gpipe cannot .* for 1f1b and 2bw .* or mode = "sync"'),
        (("1f1b", line(2), 4), {"mode": "async"}, "with 4 microbatches: .* set microbatches = 1"),
        (("2bw", line(3), 2), {"mode": "async"}, "two versions of the weights.*; set microbatches = 3 or more"),
        (("2bw", line(2), 4), {}, 'read the weights before the newest update.* use mode = "async", or name = "1f1b"'),
        (("1f1b", line(2), 4), {"window": (2, 1)}, 'for the schedules "window" and "zb-h1" alone'),
        (("zb-h1", line(2), 4), {"window": (2,)}, "one number for each stage, and there are 1"),
        (("window", line(3), 4), {}, "one number for each stage, and none is given; 1F1B's would be 3, 2, 1"),
        (("window", line(3), 4), {"window": (2, 1)}, "one number for each stage, and there are 2"),
        (("window", line(2), 4), {"window": (1, 0)}, "window of stage 1 is 0"),
        (("window", line(2), 4), {"window": (1, 3)}, "stage 0 would wait .* raise the window of stage 0 to 3"),
        (("interleaved-1f1b", ((0, 1), (2, 3)), 4), {}, r"place the stages as \[\[0, 2\], \[1, 3\]\], or use 1f1b"),
        (("interleaved-1f1b", ((0, 2), (1,)), 4), {}, "use a multiple of 2 stages, or use 1f1b"),
        (("interleaved-1f1b", looped(4, 2), 9), {}, "9 microbatches: .* 2 equal groups; .* on 4 workers are 8 and 10"),
    ],
)
def test_a_refusal_names_the_schedule_the_reason_and_the_way_out(
    arguments: tuple[Any, ...], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ScheduleRefused, match=reason):
        make_schedule(*arguments, **options)
