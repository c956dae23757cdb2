"""A shape that no schedule can run is refused with the reason, whichever schedule is asked for."""

from typing import Any

import pytest

from stageline.pipeline.schedule import ScheduleRefused, forward_only, make_schedule
from support.shapes import line


@pytest.mark.parametrize(
    ("arguments", "options", "reason"),
    [
        ((line(2), 0), {}, "cannot run 2 stages on 2 workers with 0 microbatches: .* at least one"),
        (((), 1), {}, "no worker"),
        ((((0,), ()), 1), {}, "worker 1 owns no stage"),
        ((((0,), (2,)), 1), {}, "own stages 0, 2, but each of 0 to 2 needs exactly one owner"),
        ((((0, 1), (1,)), 1), {}, "own stages 0, 1, 1, but each of 0 to 1 needs exactly one owner"),
        ((line(2), 4), {"first_trainable": 3}, "first trainable stage is 3; use one of 0 to 2"),
    ],
)
@pytest.mark.parametrize("name", ["gpipe", "interleaved-1f1b"])
def test_a_shape_that_cannot_work_is_refused(
    name: str, arguments: tuple[Any, ...], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ScheduleRefused, match=reason):
        make_schedule(name, *arguments, **options)


def test_evaluation_wants_every_stage_owned_too() -> None:
    with pytest.raises(ScheduleRefused, match="forward-only cannot run 1 stage on 1 worker with 1 microbatch"):
        forward_only(((1,),), 1)
