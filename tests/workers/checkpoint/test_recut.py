"""Which plans a run goes on with in another layout."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stageline.pipeline.plan import Plan, PlanRefused, read_plan
from stageline.workers.checkpoint.recut import needs_recut
from support import reference

TIED = Path(reference.__file__).parent / "tied"


def plan(stages: int, *sets: str) -> Plan:
    return read_plan(TIED, sets=sets, environment={}).resolved(stages)


def test_gradients_that_stages_add_up_once_per_step_keep_the_cut_and_may_change_workers() -> None:
    source: Any = SimpleNamespace(run="tied-1", plan=plan(4, "schedule.tied=step"))
    assert needs_recut(plan(4, "schedule.tied=step", "workers.0.stages=[0, 1]", "workers.1.stages=[2, 3]"), source)
    with pytest.raises(
        PlanRefused, match=r"run tied-1 adds up .* once per step, .*: model.cut: \[4\] here, \[1, 3, 5\] the"
    ):
        needs_recut(plan(2, "schedule.tied=step", "model.cut=[4]"), source)
    with pytest.raises(PlanRefused, match=r'begun with another plan: schedule.tied: "microbatch" here, "step" there'):
        needs_recut(plan(4), source)
    source = SimpleNamespace(run="tied-1", plan=plan(4))
    assert needs_recut(plan(2, "model.cut=[4]"), source)
