"""Making of the stage that a plan wants of a segment: with its optimizer, learning rate scheduler and loss.

Patterns of the plan match names in the cut model:

model.trainable    ["encoder.layer.40.*"]      parameters that are trained; all others are frozen
optimizer.groups   [{match = ["*.bias"]}]      parameters that get settings of the optimizer
taps.layers        ["encoder.layer.4?"]        layers: encoder.layer.40 to encoder.layer.49, on any stage
stage.N.recompute  ["transformer.h.*.mlp"]     layers, and modules in them
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.features.offload import Offload
from stageline.pipeline.features.recompute import recomputable
from stageline.pipeline.model_names import hint, matches, near, unmatched
from stageline.pipeline.plan import Plan, PlanError
from stageline.pipeline.plan.errors import Setting
from stageline.pipeline.plan.keys.training import LrSchedulerPlan, OptimizerPlan
from stageline.pipeline.stage.layers.layer import joined
from stageline.pipeline.stage.settings import StageSettings
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.stage.stage_update import LrSchedulerFactory, OptimizerFactory, ParameterGroup
from stageline.pipeline.tree import describe

from .load import base_folder, call, load_features, load_function, load_object
from .object_names import is_of_script
from .segment import Segment
from .split import demand_splittable, split, watch_draws


def groups_of(plan: Plan) -> tuple[ParameterGroup, ...]:
    """Return the plan's groups of parameters, as stages take them."""
    return tuple(map(_group, plan.optimizer.groups or ()))


def demand_matched(plan: Plan, segments: Sequence[Segment]) -> None:
    """Raise `PlanRefused` for a pattern in `optimizer.groups` that matches no parameter of the model."""
    names = list(dict.fromkeys(title for part in segments for title in part.titles.values()))
    for place, group in enumerate(groups_of(plan)):
        for pattern in unmatched(group.match, names):
            raise plan.refused(
                "optimizer.groups",
                f'no parameter of the model matches "{pattern}" of group {place}. {hint(pattern, names)}',
            )


def _group(given: Mapping[str, object]) -> ParameterGroup:
    match given:
        case {"match": [*patterns], **settings}:
            return ParameterGroup(tuple(map(str, patterns)), settings)
        case _:
            raise ValueError(f"{given} is no group of parameters")  # the plan has refused it


def demand_recomputable(plan: Plan, segments: Sequence[Segment]) -> None:
    """Raise `PlanRefused` for a pattern of recomputation that matches no layer and no module that a layer calls."""
    tables = {f"stage.{name}": table.recompute for name, table in (plan.stage or {}).items()}
    wanted = {"memory": None if plan.memory is None else plan.memory.recompute, **tables}
    wrong: list[PlanError] = []
    for table, patterns in wanted.items():
        here = [part for part in segments if table in ("memory", f"stage.{part.index}")]
        if isinstance(patterns, tuple) and (reasons := list(_reasons(patterns, here))):
            wrong.append(PlanError(f"{table}.recompute", "; ".join(reasons)))
    plan.demand_none(wrong)


def _reasons(patterns: Sequence[str], parts: Sequence[Segment]) -> Iterator[str]:
    names = [name for part in parts for name in recomputable(part.names, part.layers)]
    for pattern in unmatched(patterns, names):
        yield f'no layer or module of one matches "{pattern}"; there are {near(pattern, names)}'


def tapped_layers(plan: Plan, segments: Sequence[Segment]) -> dict[int, tuple[str, ...]]:
    """Return the names of the tapped layers, by stage, in the model's order; stages without any are left out.

    Raises:
        PlanRefused: A pattern matches no layer.
    """
    if plan.taps is None:
        return {}
    patterns, names = plan.taps.layers, [name for part in segments for name in part.names]
    if wrong := unmatched(patterns, names):
        reasons = (f'no layer of the model matches "{each}"; {_hint(each, names)}' for each in wrong)
        raise plan.refused("taps.layers", "; ".join(reasons))
    found = {part.index: tuple(name for name in part.names if matches(name, patterns)) for part in segments}
    return {stage: layers for stage, layers in found.items() if layers}


def _hint(pattern: str, names: Sequence[str]) -> str:
    holder = next((name for name in names if pattern.startswith(f"{name}.")), None)
    if holder is not None:
        return f"it names a part of layer {holder}, and only what whole layers return is stored"
    return f"layers have names such as {near(pattern, names)}"


def train_only(segments: Sequence[Segment], patterns: Sequence[str]) -> None:
    """Set `requires_grad` of each parameter: True if a name of it in the unsplit model matches a pattern, else False.

    A parameter that several layers use has several names, and is trained if any of them matches.

    Args:
        segments: The stages of the model.
        patterns: Patterns as `fnmatch.fnmatchcase` has them: `*` matches dots too.

    Raises:
        ModelRefused: A pattern matches nothing, or a parameter cannot be trained. Nothing has changed then.
    """
    named = [(name, parameter) for part in segments for name, parameter in _named_parameters(part)]
    matching = {id(each): (name, each) for name, each in named if matches(name, patterns)}
    if wrong := [*_unmatched(patterns, [name for name, _ in named]), *_untrainable(matching.values())]:
        raise ModelRefused(Setting("model.trainable"), f": {'; '.join(wrong)}")
    for _, parameter in named:
        parameter.requires_grad_(id(parameter) in matching)


def _named_parameters(part: Segment) -> Iterable[tuple[str, torch.nn.Parameter]]:
    for name, module in part.parts:
        for key, parameter in module.named_parameters(remove_duplicate=False):
            yield joined(name, key), parameter


def _unmatched(patterns: Sequence[str], names: Sequence[str]) -> Iterable[str]:
    for pattern in unmatched(patterns, names):
        yield f'no parameter of the model matches "{pattern}". {hint(pattern, names)}'


def _untrainable(matching: Iterable[tuple[str, torch.nn.Parameter]]) -> Iterable[str]:
    for name, parameter in matching:
        if not (parameter.is_floating_point() or parameter.is_complex()):
            yield (
                f"{name} is {describe(parameter)}, and only numbers with a fraction can be trained: "
                "leave it out of the patterns"
            )


if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_LR_SCHEDULER = ("step", "state_dict", "load_state_dict")  # attributes that a stage uses
_OPTIMIZER = (*_LR_SCHEDULER, "zero_grad", "param_groups")


def make_stage(
    plan: Plan,
    part: Segment,
    *,
    last: bool,
    device: str,
    stash_weights: bool,
    delay_weights: bool,
    epoch: int,
    mesh: "DeviceMesh | None",
    offload: Offload,
) -> Stage:
    """Make the stage that computes `part`, with the plan's optimizer, and read its weights if they are in files.

    Args:
        plan: The plan.
        part: The stage's part of the model.
        last: True for the last stage, which gets the plan's loss.
        device: Name of the device on which the stage lives, as torch has it.
        stash_weights: As for `StageSettings`.
        delay_weights: As for `StageSettings`.
        epoch: Number of steps in an epoch.
        mesh: Processes over which the stage's layers are split; None for one process.
        offload: Moves the stage's tensors to files and back.

    Raises:
        ModelRefused: The device cannot be used, or the weights, the optimizer, the scheduler or the loss cannot be
            made.
        FeatureRefused: The plan's features cannot be in their order.
        PlanRefused: The optimizer cannot compute of parts of parameters.
    """
    base = base_folder(plan)
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
            lr_scheduler=lr_scheduler_of(plan),
            lr_every=steps_between(plan.lr_scheduler, epoch),
            groups=groups_of(plan),
            stash_weights=stash_weights,
            delay_weights=delay_weights,
            clip_norm=plan.optimizer.clip_norm,
            ema_decay=plan.optimizer.ema_decay,
            autocast=plan.model.autocast,
            recompute=plan.recompute_of(part.index),
            offload=offload,
        ),
        load_features(plan),
    )
    if plan.stage_plan(part.index).processes > 1:
        demand_splittable(stage.optimizer, plan, part.index)
    return stage


def optimizer_of(plan: Plan) -> OptimizerFactory:
    """Return a function that makes the plan's optimizer of a stage's parameters.

    Raises:
        ModelRefused: The factory cannot be loaded. The returned function raises it if the factory fails, or does not
            return an optimizer.
    """
    return _made(plan.optimizer, "optimizer", base_folder(plan), _OPTIMIZER)


def lr_scheduler_of(plan: Plan) -> LrSchedulerFactory | None:
    """Return a function that makes the plan's learning rate scheduler of an optimizer; None without a scheduler.

    Raises:
        ModelRefused: The factory cannot be loaded. The returned function raises it if the factory fails.
    """
    scheduler = plan.lr_scheduler
    return None if scheduler is None else _made(scheduler, "lr_scheduler", base_folder(plan), _LR_SCHEDULER)


def steps_between(scheduler: LrSchedulerPlan | None, epoch: int) -> int | None:
    """Return the number of steps between two of a learning rate scheduler's, where an epoch has `epoch` steps.

    Returns None for a scheduler that follows evaluations.
    """
    match scheduler and scheduler.every:
        case int(steps):
            return steps
        case "epoch":
            return epoch
        case "evaluation":
            return None
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
    """Raise `ModelRefused` for an option that `factory` does not take; the error names the options that it takes."""
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
    """Return a function that calls the factory in a table of the plan.

    The function raises `ModelRefused` if the result lacks an attribute in `needed`.
    """
    factory = load_object(section.factory, base, f"{table}.factory")

    def make(argument: Any) -> Any:
        _demand_options(factory, section, table)
        made = call(partial(factory, argument, **section.options), table)
        if missing := [name for name in needed if not hasattr(made, name)]:
            named = f'{table}.factory = "{section.factory}"'
            raise ModelRefused(
                f"{table if is_of_script(section.factory) else named} returned an object of type {type(made).__name__} "
                f"without {missing[0]}; expected what those of torch.optim return"
            )
        return made

    return make
