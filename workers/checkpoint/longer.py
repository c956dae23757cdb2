"""Runs that go on beyond the steps that they were planned with, to the bits of a run that was planned so long.

The steps before are the same in both, since nothing in a step depends on the number of all steps, with one exception:
a learning rate schedule that was told the total.

    StepLR step_size = 40            goes on as it is
    CosineAnnealingLR T_max = 400    is refused: its rate is 0 by now
    the same with T_max = 800        goes on with the rates that this schedule has from here on
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from stageline.pipeline.model.plan_stage import groups_of, lr_scheduler_of, optimizer_of
from stageline.pipeline.model.stage_layout import StageLayout
from stageline.pipeline.plan import Plan, PlanError, PlanRefused, differences
from stageline.pipeline.plan.difference import Difference
from stageline.pipeline.stage.stage_state import Settings, StageState
from stageline.pipeline.stage.stage_update import make_optimizer
from stageline.workers.runs import folder as runs

from .source import CheckpointSource

_TORCH = "torch.optim.lr_scheduler."
_ENDLESS = ("StepLR", "MultiStepLR", "ExponentialLR", "CosineAnnealingWarmRestarts", "CyclicLR")  # know no total


def demand_continuable(plan: Plan, source: CheckpointSource, found: Sequence[Difference]) -> None:
    """Raise `PlanRefused` if the run in `source` cannot go on with the greater number of steps of `plan`.

    Args:
        plan: Plan with more steps.
        source: Checkpoints of the run.
        found: Differences from the run's plan.
    """
    result = runs.result_in(source.folder)
    if result is not None and result.stopped_early:
        raise _refused(
            source,
            f"it was {result.stopped_early}, as a longer run would have been; begin another run without patience",
        )
    if plan.schedule.mode != "sync":
        raise _refused(
            source,
            "it is asynchronous, and no microbatch was in flight at its end, as in a longer run; begin another run",
        )
    if plan.shares or source.plan.shares:
        raise _refused(source, "it has replicas of a stage; begin another run")
    scheduler = plan.lr_scheduler
    renewed = any(each.of_rates for each in found)
    if renewed and scheduler is not None and scheduler.every == "evaluation":
        raise _refused(source, "its learning rates would follow evaluations of before; leave lr_scheduler as it was")
    if renewed or scheduler is None or scheduler.every == "evaluation":
        return
    if scheduler.factory.removeprefix(_TORCH) in _ENDLESS:
        return
    settings = ", ".join(f"{key} = {value!r}" for key, value in scheduler.options.items())
    raise _refused(
        source,
        f'lr_scheduler.factory = "{scheduler.factory}"{f" ({settings})" if settings else ""} may have been told the '
        "number of steps: name the schedule of the longer run, such as --set lr_scheduler.T_max=800 or --set "
        "lr_scheduler.factory=...; from here on, its rates are taken",
    )


def renews_rates(plan: Plan, before: Plan) -> bool:
    """Return True if `plan` has another learning rate schedule than the plan of the run that goes on."""
    return any(each.of_rates for each in differences(plan.as_mapping(), before.as_mapping()))


def with_rates_of(plan: Plan, layout: StageLayout, state: StageState) -> StageState:
    """Return the state of a stage with the plan's learning rate schedule, at the place where the former one was.

    A new optimizer and its scheduler take as many steps as the former scheduler did, without any parameter's change.

    Args:
        plan: Plan with the new schedule.
        layout: Layout of the stage.
        state: State with the former schedule.
    """
    names = [name for group in layout.groups or () for name in group]
    parameters = {name: torch.nn.Parameter(torch.zeros(1)) for name in names}
    make, optimizer = lr_scheduler_of(plan), make_optimizer(optimizer_of(plan), parameters, groups_of(plan))
    if make is None or optimizer is None or state.optimizer is None or state.lr_scheduler is None:
        return state
    without = _options(optimizer)
    scheduler = make(optimizer)
    for _ in range(state.lr_scheduler["last_epoch"]):
        optimizer.step()
        scheduler.step()
    groups = zip(state.optimizer["param_groups"], without, _options(optimizer), strict=True)
    changed = [{**group, **_changed(before, after)} for group, before, after in groups]
    return replace(
        state, optimizer={**state.optimizer, "param_groups": changed}, lr_scheduler=dict(scheduler.state_dict())
    )


def _options(optimizer: torch.optim.Optimizer) -> list[Settings]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _changed(before: Settings, after: Settings) -> dict[str, Any]:
    """Return the options that a scheduler has set, and the rate, which it may have set to the value of before."""
    return {name: value for name, value in after.items() if name == "lr" or before.get(name) != value}


def _refused(source: CheckpointSource, why: str) -> PlanRefused:
    return PlanRefused([PlanError("", f"run {source.run} cannot go on with more steps: {why}")])
