"""Makes the stage that a plan wants of a segment: with its optimizer, learning rate scheduler and loss."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.plan import Plan
from stageline.pipeline.plan.keys.training import LrSchedulerPlan, OptimizerPlan
from stageline.pipeline.stage.settings import StageSettings
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.stage.stage_update import OptimizerFactory

from .load import base_folder, call, load_features, load_function, load_object
from .patterns import groups_of
from .segment import Segment
from .split import demand_splittable, split, watch_draws

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_LR_SCHEDULER = ("step", "state_dict", "load_state_dict")  # what a stage uses of one
_OPTIMIZER = (*_LR_SCHEDULER, "zero_grad", "param_groups")


def make_stage(
    plan: Plan,
    part: Segment,
    *,
    last: bool,
    device: str,
    stash_weights: bool,
    delay_weights: bool = False,
    epoch: int = 1,
    mesh: "DeviceMesh | None" = None,
    kind: Callable[..., Stage] = Stage,
) -> Stage:
    """Makes the stage that computes `part`, with the plan's optimizer, and the plan's loss if it is the last. Reads its
    weights, if they are in files. An epoch has `epoch` steps. With a `mesh` of processes, its layers are split over
    these, and it is of that `kind`.

    Raises `ModelRefused`, and `PlanRefused` for an optimizer that cannot compute of parts.
    """
    base, scheduler = base_folder(plan), plan.lr_scheduler
    _demand_device(device, part.index)
    part.load()
    if mesh is not None:
        split(part, plan, mesh, torch.device(device))
    if plan.stage_plan(part.index).tensor > 1:
        watch_draws(part, plan, torch.device(device))
    stage = part.stage(
        optimizer_of(plan),
        load_function(plan.model.loss, base, "model.loss") if last else None,
        StageSettings(
            seed=plan.run.seed,
            device=device,
            lr_scheduler=None if scheduler is None else _made(scheduler, "lr_scheduler", base, _LR_SCHEDULER),
            lr_every=1 if scheduler is None else _steps_between(scheduler, epoch),
            groups=groups_of(plan),
            stash_weights=stash_weights,
            delay_weights=delay_weights,
            clip_norm=plan.optimizer.clip_norm,
            ema_decay=plan.optimizer.ema_decay,
            autocast=plan.model.autocast,
            recompute=plan.recompute_of(part.index),
        ),
        load_features(plan),
        kind=kind,
    )
    if plan.stage_plan(part.index).processes > 1:
        demand_splittable(stage.optimizer, plan, part.index)
    return stage


def optimizer_of(plan: Plan) -> OptimizerFactory:
    """Makes the plan's optimizer of a stage's parameters. Raises `ModelRefused`, as does what it returns."""
    return _made(plan.optimizer, "optimizer", base_folder(plan), _OPTIMIZER)


def _steps_between(scheduler: LrSchedulerPlan, epoch: int) -> int:
    match scheduler.every:
        case int(steps):
            return steps
        case "epoch":
            return epoch
        case _:
            return 1


def _demand_device(device: str, stage: int) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch has one for each reason
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelRefused(
            f'device = "{device}" of stage {stage} cannot be used in this process: {reason}. Choose one that is there, '
            'such as "cpu" or "cuda:0"'
        ) from error


def _demand_options(factory: Callable[..., Any], section: OptimizerPlan | LrSchedulerPlan, table: str) -> None:
    """Raises `ModelRefused` for an option that `factory` does not take, with those that it takes."""
    try:
        taken = list(inspect.signature(factory).parameters.values())[1:]  # the first: parameters, or an optimizer
    except (TypeError, ValueError):  # it has no signature: the call tells
        return
    if any(each.kind is each.VAR_KEYWORD for each in taken):
        return
    names = [each.name for each in taken if each.kind is not each.VAR_POSITIONAL]
    for name, value in section.options.items():
        if name not in names:
            raise ModelRefused(
                f'{table}.{name} = {value!r}: {table}.factory = "{section.factory}" takes no {name}; it takes '
                f"{', '.join(names) or 'nothing'}"
            )


def _made(
    section: OptimizerPlan | LrSchedulerPlan, table: str, base: Path, needed: Sequence[str]
) -> Callable[[Any], Any]:
    """Calls the factory of a table of the plan. Raises `ModelRefused` for what does not have all that is `needed`."""
    factory = load_object(section.factory, base, f"{table}.factory")

    def make(argument: Any) -> Any:
        _demand_options(factory, section, table)
        made = call(partial(factory, argument, **section.options), table)
        if missing := [name for name in needed if not hasattr(made, name)]:
            raise ModelRefused(
                f'{table}.factory = "{section.factory}" returned a {type(made).__name__} without {missing[0]}; '
                f"expected what those of torch.optim return"
            )
        return made

    return make
