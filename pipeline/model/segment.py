"""Parts of the unsplit model, one for each stage, and the stages that compute them."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace

import torch

from stageline.pipeline.feature import Feature
from stageline.pipeline.features.ties import SharedParameters
from stageline.pipeline.schedule.replicas import Replicas
from stageline.pipeline.stage.layers.layer import BatchCheck, BoundLayer, joined, named_state, parts_of
from stageline.pipeline.stage.layers.loss import Loss
from stageline.pipeline.stage.settings import StageSettings
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.stage.stage_update import OptimizerFactory, ParameterGroup, make_optimizer

from .stage_layout import Form, StageLayout
from .stage_weights import StageWeights


@dataclass(frozen=True, slots=True)
class Segment:
    """A stage's part of the unsplit model.

    Attributes:
        index: Number of the stage.
        first_layer: Number of the first layer in the model.
        names: Names of the layers in the model.
        layers: The layers.
        shared: Parameters that are trained and that other stages use too, each stage with a copy.
        copies: Names of the parameters that an earlier stage has too, each with its name in the first such stage.
        stored: Place of the weights in files; None if they are in memory. Parameters in files have no memory before
            `load`.
        order: Number of each parameter among those of the unsplit model, by name.
        titles: Name of each parameter among those of the unsplit model, by name: stages that share a parameter may call
            it otherwise.
    """

    index: int
    first_layer: int
    names: tuple[str, ...]
    layers: tuple[torch.nn.Module, ...]
    shared: SharedParameters = field(default_factory=SharedParameters)
    copies: Mapping[str, str] = field(default_factory=dict)
    stored: StageWeights | None = None
    order: Mapping[str, int] = field(default_factory=dict)
    titles: Mapping[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """Raise `ModelRefused` if the files do not have the stage's weights. Reads only the headers of the files."""
        if self.stored is not None:
            self.stored.check(self.parts)

    @property
    def check_inputs(self) -> BatchCheck:
        """Function that raises `DataError` if the stage, as the first one, cannot take a batch in so many microbatches.

        It keeps no weights in memory.
        """
        first = self.layers[0]
        return first.check_inputs if isinstance(first, BoundLayer) else BoundLayer.check_inputs

    @property
    def refuses_inputs(self) -> bool:
        """True if `check_inputs` refuses any inputs."""
        return self.check_inputs is not BoundLayer.check_inputs

    def load(self) -> None:
        """Read the stage's weights, if they are in files. Raises `ModelRefused`."""
        if self.stored is not None:
            self.stored.load(self.parts)

    def unload(self) -> None:
        """Give back the memory of weights that are in files; `load` reads them again."""
        if self.stored is not None:
            self.stored.unload(self.parts)

    @property
    def trainable(self) -> bool:
        """True if a parameter of the stage requires a gradient."""
        return any(p.requires_grad for layer in self.layers for p in layer.parameters())

    @property
    def parameters(self) -> int:
        """Number of elements in the stage's parameters.

        A parameter that several layers share counts once, for the first stage that uses it.
        """
        return sum(each.numel() for each in self._own_parameters)

    @property
    def trained(self) -> int:
        """Number of elements in the stage's parameters that are trained, each parameter counted as in `parameters`."""
        return sum(each.numel() for each in self._own_parameters if each.requires_grad)

    @property
    def _own_parameters(self) -> list[torch.nn.Parameter]:
        """The stage's parameters, each once, without those that an earlier stage has."""
        weights = self.variables
        borrowed = {id(weights[name]) for name in self.copies}
        every = {id(each): each for layer in self.layers for each in layer.parameters()}
        return [each for key, each in every.items() if key not in borrowed]

    @property
    def weight_names(self) -> frozenset[str]:
        """Names of the entries of the unsplit model's `state_dict` that belong to the stage."""
        return frozenset(self.weights)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Entries of the unsplit model's `state_dict` that belong to the stage: tensors by name, without gradients."""
        return {joined(name, key): tensor for name, part in self.parts for key, tensor in part.state_dict().items()}

    @property
    def variables(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers that belong to the stage, by their names in the unsplit model's `state_dict`."""
        found = ((name, part.state_dict(keep_vars=True)) for name, part in self.parts)
        return {joined(name, key): tensor for name, state in found for key, tensor in state.items()}

    @property
    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters and buffers, with their names in the unsplit model; once for each layer."""
        for name, layer in zip(self.names, self.layers, strict=True):
            yield from named_state(layer, name)

    def layer_with(self, parameter: str) -> str:
        """Return the name of the first layer that has `parameter`, named as in the unsplit model."""
        return next(
            name
            for name, layer in zip(self.names, self.layers, strict=True)
            if any(parameter == found for found, _ in named_state(layer, name))
        )

    def stage(
        self,
        optimizer: OptimizerFactory | None = None,
        loss: Loss | None = None,
        settings: StageSettings = StageSettings(),  # noqa: B008  # frozen
        features: Sequence[Feature] = (),
    ) -> Stage:
        """Return the stage that computes the segment.

        Args:
            optimizer: Optimizer factory, as a `Stage` takes it.
            loss: Loss, as a `Stage` takes it.
            settings: Settings as a `Stage` takes them, without names, order and titles, which the segment adds.
            features: Features, as a `Stage` takes them.
        """
        return Stage(
            self.layers,
            index=self.index,
            first_layer=self.first_layer,
            optimizer=optimizer,
            loss=loss,
            settings=replace(settings, names=self.names, order=self.order, titles=self.titles),
            shared=self.shared,
            features=features,
        )

    @property
    def parts(self) -> list[tuple[str, torch.nn.Module]]:
        """The modules of the unsplit model that have the stage's state, with their names there."""
        return [part for name, layer in zip(self.names, self.layers, strict=True) for part in parts_of(layer, name)]


def part_of(segments: Sequence[Segment], copy: int, replicas: Replicas) -> Segment:
    """Return the part of the model that a copy of a stage computes.

    A further replica has layers of its own: the workers of a run may be in one process, and replicas share no
    parameters.
    """
    part = segments[replicas.stage(copy)]
    return part if copy == part.index else replace(part, layers=deepcopy(part.layers))


def layouts_of(
    segments: Sequence[Segment], optimizer: OptimizerFactory, groups: Sequence[ParameterGroup] = ()
) -> list[StageLayout]:
    """Return the layouts of all stages of a model.

    Raises what `optimizer` raises, and what `make_optimizer` raises.

    Args:
        segments: The stages.
        optimizer: Called with each stage's parameters, in their groups, to learn their order.
        groups: Groups of parameters with settings of the optimizer.
    """
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
    """Return, for each name of a parameter that has several names in the unsplit model, all its names.

    Stages that share a parameter have copies of it; these count as one parameter.
    """
    found: dict[str | int, list[str]] = {}
    for part in segments:
        titles = {here: title for title, here in part.shared.own.items()}
        variables = [(name, state) for name, state in part.state if isinstance(state, torch.nn.Parameter)]
        shared = {id(state): titles[name] for name, state in variables if name in titles}
        for name, state in variables:
            found.setdefault(shared.get(id(state), id(state)), []).append(name)
    return {name: tuple(names) for names in found.values() if len(names) > 1 for name in names}
