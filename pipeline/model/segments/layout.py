"""Makes the layouts of a cut model's stages: by their names, other stages can go on from a checkpoint of it."""

from collections.abc import Mapping, Sequence

import torch

from stageline.pipeline.stage.layers.layer import parts_of
from stageline.pipeline.stage.update.optimizer import OptimizerFactory, ParameterGroup, make_optimizer

from .segment import Segment
from .stage_layout import Form, StageLayout


def layouts_of(
    segments: Sequence[Segment], optimizer: OptimizerFactory, groups: Sequence[ParameterGroup] = ()
) -> list[StageLayout]:
    """Of all stages of a model. `optimizer` is called with each stage's parameters, in their `groups`. Raises what that
    raises, and as `make_optimizer` does."""
    twins = _twins(segments)
    return [_layout(part, optimizer, groups, twins) for part in segments]


def _layout(
    part: Segment,
    optimizer: OptimizerFactory,
    groups: Sequence[ParameterGroup],
    twins: Mapping[str, tuple[str, ...]],
) -> StageLayout:
    names: dict[int, str] = {}
    for name, state in part.state:
        names.setdefault(id(state), name)
    body = torch.nn.ModuleList(part.layers)
    named = ((names[id(each)], each) for each in body.parameters())  # in the order in which a stage has them
    trainable = {part.titles.get(name, name): each for name, each in named if each.requires_grad}
    made = make_optimizer(optimizer, trainable, groups)
    entries = tuple(part.weights)
    return StageLayout(
        part.index,
        part.names,
        tuple(name for layer, of in zip(part.layers, part.names, strict=True) for name, _ in parts_of(layer, of)),
        entries,
        tuple(name for name, state in part.state if name not in entries and not isinstance(state, torch.nn.Parameter)),
        {name: _form(state) for name, state in part.state if isinstance(state, torch.nn.Parameter)},
        None if made is None else tuple(tuple(names[id(p)] for p in group["params"]) for group in made.param_groups),
        {name: twins[name] for name in entries if name in twins},
    )


def _form(tensor: torch.Tensor) -> Form:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def _twins(segments: Sequence[Segment]) -> dict[str, tuple[str, ...]]:
    """The names that one parameter of the unsplit model has, by each of them; stages that share it have copies."""
    found: dict[str | int, list[str]] = {}
    for part in segments:
        titles = {here: title for title, here in part.shared.own.items()}
        variables = [(name, state) for name, state in part.state if isinstance(state, torch.nn.Parameter)]
        shared = {id(state): titles[name] for name, state in variables if name in titles}
        for name, state in variables:
            found.setdefault(shared.get(id(state), id(state)), []).append(name)
    return {name: tuple(names) for names in found.values() if len(names) > 1 for name in names}
