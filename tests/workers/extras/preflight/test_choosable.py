"""Between which schedules a run can choose, and what it is told where it cannot, before it runs."""

import pytest

from stageline.pipeline.plan import PlanRefused, read_plan
from stageline.workers.extras.preflight.trial import estimate
from stageline.workers.extras.preflight.trial_result import ScheduleEstimate
from support.workspace import Workspace


def schedules(workspace: Workspace, memory: int, *sets: str) -> dict[str, ScheduleEstimate]:
    auto = ("schedule.name=auto", f"schedule.memory={memory}")
    found = estimate(read_plan(workspace.folder, sets=[*auto, *sets]))
    return {each.name: each for each in found.schedules}


def test_backwards_in_halves_are_among_them_with_what_waits_between_the_halves(workspace: Workspace) -> None:
    found = schedules(workspace, 2**30)
    assert found["zb-h1"].reason == found["1f1b"].reason == ""
    assert (found["zb-h1"].halves, found["1f1b"].halves) == (True, False)
    assert found["zb-h1"].bytes > found["1f1b"].bytes


def test_a_limit_for_1f1b_alone_leaves_out_what_takes_more(workspace: Workspace) -> None:
    limit = schedules(workspace, 2**30)["1f1b"].bytes
    found = schedules(workspace, limit)
    assert found["1f1b"].reason == ""
    assert found["zb-h1"].reason == found["gpipe"].reason == "takes more than schedule.memory"


def test_stages_that_cannot_split_a_backward_are_named(workspace: Workspace) -> None:
    found = schedules(workspace, 2**30, "stage.1.recompute=stage")
    assert found["zb-h1"].reason == (
        "splits backwards in two halves, and stage 1 cannot, since activations are recomputed there"
    )
    assert found["gpipe"].reason == ""


def test_a_limit_that_nothing_fits_is_refused_with_one_that_is_enough(workspace: Workspace) -> None:
    needed = schedules(workspace, 2**30)["1f1b"].bytes
    enough = rf'a worker takes {needed} bytes with 1f1b, .* Use "1MiB" or more'
    with pytest.raises(PlanRefused, match=rf"schedule\.memory = {needed - 1}: {enough}"):
        schedules(workspace, needed - 1)
