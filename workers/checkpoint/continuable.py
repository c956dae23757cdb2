"""Plans that may continue a run in another layout or beyond its planned end, to the bits of a run that began with them.

The steps before are the same with more steps, since nothing in a step depends on the number of all steps, with one
exception: a learning rate schedule that was told the total.

    StepLR step_size = 40            goes on as it is
    CosineAnnealingLR T_max = 400    is refused: its rate is 0 by now
    the same with T_max = 800        goes on with the rates that this schedule has from here on
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from stageline.pipeline.model.plan_stage import groups_of, lr_scheduler_of, optimizer_of
from stageline.pipeline.model.stage_layout import StageLayout
from stageline.pipeline.plan import Plan, PlanError, PlanRefused, differences
from stageline.pipeline.plan.difference import LAYOUT, Difference
from stageline.pipeline.plan.errors import OTHER_SETTINGS, RESUME_AS_BEGUN, Afresh, EachOnce, ForEach, Setting
from stageline.pipeline.schedule import DELAYED
from stageline.pipeline.stage.stage_state import Settings, StageState
from stageline.pipeline.stage.stage_update import make_optimizer
from stageline.workers.runs import folder as runs

from .source import CheckpointSource

_TORCH = "torch.optim.lr_scheduler."
_ENDLESS = (
    "StepLR",
    "MultiStepLR",
    "ExponentialLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "ReduceLROnPlateau",
)  # know no total


_CUT = ("model.cut", "model.stages")
_BEGUN = ForEach("the plan that it began with", "the arguments that it began with")
_CUTS = ForEach("this plan cuts the model", "these arguments cut the model")
_LAYS = ForEach("this plan lays it out", "these arguments lay it out")


def needs_recut(plan: Plan, source: CheckpointSource) -> bool:
    """Return True if `plan` lays the work of the run in `source` out differently, or has more steps.

    `plan` has its stages and workers filled in. Raises `PlanRefused` if it also computes something else, or if the run
    cannot go on in another layout or with more steps.
    """
    found = differences(plan.as_mapping(), source.plan.as_mapping())
    if not found:
        return False
    longer = any(each.lengthens for each in found)
    schedules = plan.lr_scheduler, source.plan.lr_scheduler
    renewed = longer and all(each is not None and each.every != "evaluation" for each in schedules)
    replicated = plan.shares or source.plan.shares
    moved = [each for each in found if each.of_layout]
    if others := [each for each in found if not (each.of_layout or each.lengthens or (renewed and each.of_rates))]:
        but = (" only, since a stage has replicas",) if replicated else (", but for ", LAYOUT)
        raise _refused(
            *(f"run {source.run} was begun with ", OTHER_SETTINGS, ": ", EachOnce(tuple(others))),
            *(RESUME_AS_BEGUN, *but, ", or ", Afresh()),
        )
    for is_so, has, so, cut_alone in _hindrances(plan, source):
        differ = tuple(each for each in moved if each.key in _CUT or not cut_alone)
        if is_so and differ:
            what = (f"run {source.run} ", *has, ", and ", _CUTS if cut_alone else _LAYS, " in another way: ")
            raise _refused(*what, EachOnce(differ), ". ", *so)
    if longer:
        _demand_longer(plan, source, found)
    if not plan.recovery.on or plan.queues.in_one_process:
        how = "with more steps" if longer else "in another layout"
        raise _refused(
            f"run {source.run} goes on {how} from a checkpoint, and none is read with ",
            *(Setting("recovery.restarts"), " = 0, ", Setting("recovery.snapshot_every"), " = 0 or "),
            *(Setting("queues.url", "memory://"), ": set the first two above 0, and another url"),
        )
    return True


def _hindrances(
    plan: Plan, source: CheckpointSource
) -> Iterator[tuple[object, Sequence[object], Sequence[object], bool]]:
    """Yield the conditions that keep a run in its layout.

    Each is a tuple: the condition, what the run has, why that is a hindrance, and True if only the cut is bound.
    """
    delayed = "What its checkpoints have of microbatches in flight is for the stages that it had"
    stashed = "Which weights a microbatch reads follows from the stages"
    why = delayed if source.plan.schedule.name == DELAYED else stashed
    only = ("so it goes on with ", _BEGUN, " only")
    kept = "the bits follow from the cut, so it goes on with the cut that it began with"
    as_begun = ("It goes on with ", _BEGUN, "; ", Setting("queues.url"), " may be another")
    yield plan.shares or source.plan.shares, ["has replicas of a stage, here or there"], as_begun, False
    move = ("Its weights would have to come to other machines, ", *only)
    yield plan.data.stays is not None, ("has ", Setting("data.stays")), move, False
    yield plan.schedule.mode != "sync", ["is asynchronous"], (f"{why}, ", *only), False
    tied = Setting("schedule.tied", "step")
    shared = "adds up gradients of what stages share once per step"
    yield plan.schedule.tied == "step", [shared], ("With ", tied, f" {kept}"), True
    yield plan.queues.lossy, ("has ", Setting("queues.codec", plan.queues.codec)), [f"With a codec {kept}"], True


def _refused(*reason: object) -> PlanRefused:
    return PlanRefused([PlanError("", reason)])


def _demand_longer(plan: Plan, source: CheckpointSource, found: Sequence[Difference]) -> None:
    """Raise `PlanRefused` if the run in `source` cannot go on with the greater number of steps of `plan`.

    Args:
        plan: Plan with more steps.
        source: Checkpoints of the run.
        found: Differences from the run's plan.
    """
    result = runs.result_in(source.folder)
    if result is not None and result.stopped_early:
        raise _ends(
            source,
            f"it was {result.stopped_early}, as a longer run would have been; begin another run without patience",
        )
    if plan.schedule.mode != "sync":
        raise _ends(
            source,
            "it is asynchronous, and no microbatch was in flight at its end, as in a longer run; begin another run",
        )
    scheduler, renewed = plan.lr_scheduler, any(each.of_rates for each in found)
    if renewed and scheduler is not None and scheduler.every == "evaluation":
        raise _ends(source, "its learning rates would follow evaluations of before; leave lr_scheduler as it was")
    if renewed or scheduler is None or scheduler.every == "evaluation":
        return
    if scheduler.factory.removeprefix(_TORCH) in _ENDLESS:
        return
    settings = ", ".join(f"{key} = {value!r}" for key, value in scheduler.options.items())
    raise _ends(
        source,
        f'lr_scheduler.factory = "{scheduler.factory}"{f" ({settings})" if settings else ""} may have been told the '
        "number of steps: name the schedule of the longer run, such as --set lr_scheduler.T_max=800 or --set "
        "lr_scheduler.factory=...; from here on, its rates are taken",
    )


def keeps_layout(plan: Plan, before: Plan) -> bool:
    """Return True if `plan` lays the work out as the plan of the run that goes on."""
    return not any(each.of_layout for each in differences(plan.as_mapping(), before.as_mapping()))


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


def _ends(source: CheckpointSource, why: str) -> PlanRefused:
    return _refused(f"run {source.run} cannot go on with more steps: {why}")
