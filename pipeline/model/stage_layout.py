"""The layout of a stage of a cut model, by the unsplit model's names, as a value that crosses between processes.

cut = [2]        stage 0: 0.weight 0.bias          stage 1: 2.weight 2.bias 4.weight 4.bias
cut = [1, 4]     stage 0: 0.weight 0.bias          stage 1: 2.weight 2.bias          stage 2: 4.weight 4.bias

By these names, other stages can go on from a checkpoint of this model.
"""

from collections.abc import Mapping, Sequence

import msgspec
import torch

from stageline.pipeline.stage.layers.layer import parts_of
from stageline.pipeline.stage.update.optimizer import OptimizerFactory, ParameterGroup, make_optimizer

from .segment import Segment

Form = tuple[str, tuple[int, ...]]  # dtype without "torch.", shape


class StageLayout(msgspec.Struct, frozen=True):
    """Stage number `stage`, of the layers `layers`.

    `entries` are the names of its part of the model's `state_dict`; `buffers` those that this leaves out. `modules` are
    the modules that have them. `forms` are those of its parameters. `groups` are the names of the parameters in each
    group of its optimizer, None without one. `twins`: of a name, all names in the model of the same parameter, if there
    are several.
    """

    stage: int
    layers: tuple[str, ...]
    modules: tuple[str, ...]
    entries: tuple[str, ...]
    buffers: tuple[str, ...]
    forms: Mapping[str, Form]
    groups: tuple[tuple[str, ...], ...] | None
    twins: Mapping[str, tuple[str, ...]]

    def named(self, name: str) -> tuple[str, ...]:
        """Under which names the entry `name` may be stored."""
        return (name, *(each for each in self.twins.get(name, ()) if each != name))

    def depth(self, name: str) -> int:
        """How many characters of `name` are a module of the stage; 0 if none is."""
        return max((len(each) for each in self.modules if name.startswith(f"{each}.")), default=0)

    def layers_of(self, names: Sequence[str]) -> list[str]:
        """The layers in which the entries `names` are, as far as their names tell."""
        within = [layer for layer in self.layers if any(name.startswith(f"{layer}.") for name in names)]
        return within or list(self.layers)


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
