"""Splitting of a stage over a group of processes, as the plan's table [stage.N] has it, and checks that this works."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from stageline.pipeline.model_names import matches, near, unmatched
from stageline.pipeline.plan import Plan, PlanError
from stageline.pipeline.stage.layers.layer import joined

from .layered.traced_layer import TracedLayer
from .segment import Segment

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_CAN_BE_SPLIT = torch.nn.Linear, torch.nn.Embedding  # torch splits them by columns or rows
# Optimizers whose step changes each number of a parameter by its own gradient, and that torch computes of parts.
_BY_NUMBER = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "ASGD")


def demand_splits(plan: Plan, segments: Sequence[Segment]) -> None:
    """Raise `PlanRefused`, with all reasons, if stages cannot be split as the plan wants it."""
    plan.demand_none(
        PlanError(f"stage.{part.index}.{key}", reason)
        for part in segments
        for table in [plan.stage_plan(part.index)]
        if table.processes > 1
        for key, reason in _reasons(part, table.styles)
    )


def demand_splittable(optimizer: torch.optim.Optimizer | None, plan: Plan, stage: int) -> None:
    """Raise `PlanRefused` for an optimizer that does not update each number of a parameter by itself.

    Args:
        optimizer: The optimizer of the stage; None if the stage trains nothing.
        plan: The plan.
        stage: Number of the stage.
    """
    kinds = tuple(getattr(torch.optim, name) for name in _BY_NUMBER)
    if optimizer is not None and not isinstance(optimizer, kinds):
        table = plan.stage_plan(stage)
        raise plan.refused(
            f"stage.{stage}.{'tensor' if table.tensor > 1 else 'shard'}",
            f"the optimizer {type(optimizer).__name__} is not known to compute of parts of parameters what it computes "
            f"of all; use one of {', '.join(_BY_NUMBER)}, or one process",
        )


def styles_of(part: Segment, styles: Mapping[str, str] | None) -> dict[str, tuple[torch.nn.Module, str]]:
    """Return the modules that patterns of `styles` match, each with its style, by their names in the unsplit model."""
    found = _splittable(part)
    return {
        name: (module, style)
        for name, module in found.items()
        for style in dict.fromkeys(style for pattern, style in (styles or {}).items() if matches(name, [pattern]))
    }


def split(part: Segment, plan: Plan, mesh: "DeviceMesh", device: torch.device) -> None:
    """Split the layers of `part`, whose weights are loaded, over the processes of `mesh`.

    Args:
        part: The stage's part of the model.
        plan: The plan, which says how to split the stage.
        mesh: The processes.
        device: Device to which the layers are moved first.
    """
    from stageline.pipeline.stage.splitting import shard_layers, split_by_styles

    for layer in part.layers:
        layer.to(device)
    table = plan.stage_plan(part.index)
    if table.tensor > 1:
        split_by_styles(styles_of(part, table.styles), mesh)
    else:
        shard_layers(part.layers, mesh)


def watch_draws(part: Segment, plan: Plan, device: torch.device) -> None:
    """Make the layers of `part` raise, from now on, if random numbers are drawn for a split module.

    Args:
        part: The stage's part of the model.
        plan: The plan, which says which modules are split.
        device: Device of the stage.
    """
    from stageline.pipeline.stage.draws import DrawWatch

    found = styles_of(part, plan.stage_plan(part.index).styles)
    DrawWatch(part.layers, found, device)


def _reasons(part: Segment, styles: Mapping[str, str] | None) -> Iterator[tuple[str, str]]:
    """Yield each reason why `part` cannot be split, with its key in the table [stage.N]."""
    if part.shared:
        yield "shard" if styles is None else "tensor", "it shares parameters with another stage; cut both into one"
    if styles is None:
        yield from (("shard", reason) for reason in __why_not_one(part))
        return
    names = list(_splittable(part))
    for pattern in unmatched(list(styles), names):
        there = f"they have names such as {near(pattern, names)}" if names else "it has none"
        yield "styles", f'no linear or embedding layer of the stage matches "{pattern}"; {there}'
    for name in names:
        if len(set(_styles(name, styles))) > 1:
            yield "styles", f"{name} is matched by patterns of both styles; give it one"
    if any(isinstance(layer, TracedLayer) for layer in part.layers):
        yield "styles", "a traced model calls no layers that could be split; use shard, or return an nn.Sequential"
    for name in _shared_in(part, [name for name in names if _styles(name, styles)]):
        yield "styles", f"{name} shares a parameter with another module, which would not be split; leave it out"


def __why_not_one(part: Segment) -> Iterator[str]:
    for name, layer in zip(part.names, part.layers, strict=True):
        if reason := _why_not_one((joined(name, key), each) for key, each in layer.named_parameters()):
            yield reason
    uses = Counter(id(each) for layer in part.layers for each in {*layer.parameters()})
    for name, layer in zip(part.names, part.layers, strict=True):
        if any(uses[id(each)] > 1 for each in layer.parameters()):
            yield f"layer {name} shares a parameter with another layer, and each gathers its own; make them one layer"


def _styles(name: str, styles: Mapping[str, str]) -> list[str]:
    return [style for pattern, style in styles.items() if matches(name, [pattern])]


def _splittable(part: Segment) -> dict[str, torch.nn.Module]:
    """Return the linear and embedding layers of the stage, by their names in the unsplit model.

    The linear layer of torch's MultiheadAttention is left out: its weights are used without a call of it.
    """
    modules = ((joined(name, path), each) for name, of in part.parts for path, each in of.named_modules())
    return {
        name.rstrip("."): module
        for name, module in modules
        if isinstance(module, _CAN_BE_SPLIT) and not isinstance(module, NonDynamicallyQuantizableLinear)
    }


def _shared_in(part: Segment, names: Collection[str]) -> list[str]:
    """Return those of `names` whose modules have a parameter that another module has too."""
    every = {id(module): module for _, of in part.parts for module in of.modules()}
    uses = Counter(id(each) for module in every.values() for each in module.parameters(recurse=False))
    modules = _splittable(part)
    return [name for name in names if any(uses[id(each)] > 1 for each in modules[name].parameters())]


def _why_not_one(parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return why torch cannot shard a layer with these parameters, given by name; "" if it can."""
    dtypes: dict[torch.dtype, str] = {}
    for name, parameter in parameters:
        if not parameter.is_contiguous():
            return f"{name} is not contiguous: call .contiguous() where the model is made"
        if parameter.requires_grad:
            dtypes.setdefault(parameter.dtype, name)
    if len(dtypes) > 1:
        return f"{' and '.join(dtypes.values())} are of one layer and have unlike dtypes: give them one dtype"
    return ""
