"""A stage's part of the unsplit model, and the stage that computes it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from stageline.pipeline.feature import Feature
from stageline.pipeline.features.ties import SharedParameters
from stageline.pipeline.stage.layers.layer import BatchCheck, BoundLayer, joined, named_state, parts_of
from stageline.pipeline.stage.layers.loss import Loss
from stageline.pipeline.stage.settings import StageSettings
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.stage.stage_update import OptimizerFactory, ParameterGroup, make_optimizer

from .stage_layout import Form, StageLayout
from .stage_weights import StageWeights


@dataclass(frozen=True, slots=True)
class Segment:
    """One stage's part of the unsplit model: its layers, their names there, and the number of the first layer.

    If its weights are `stored` in files, its parameters have no memory before `load`. `shared` are parameters that are
    trained and that other stages use too, with a copy each; `copies` are the names of what an earlier stage has, each
    with that in the first stage. `order` has the number of each parameter among those of the unsplit model, by name,
    and `titles` its name among those: stages that share one may call it otherwise.
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
        """Raises `ModelRefused` if the files do not have the stage's weights. Reads no more than their headers."""
        if self.stored is not None:
            self.stored.check(self.parts)

    @property
    def check_inputs(self) -> BatchCheck:
        """Raises `DataError` for a batch's inputs that the stage, as the first one, is known not to take in so many
        microbatches. It keeps no weights in memory."""
        first = self.layers[0]
        return first.check_inputs if isinstance(first, BoundLayer) else BoundLayer.check_inputs

    @property
    def refuses_inputs(self) -> bool:
        """Whether there are any that `check_inputs` refuses."""
        return self.check_inputs is not BoundLayer.check_inputs

    def load(self) -> None:
        """Reads the stage's weights, if they are in files. Raises `ModelRefused`."""
        if self.stored is not None:
            self.stored.load(self.parts)

    def unload(self) -> None:
        """Gives the memory of weights that are in files back; `load` reads them again."""
        if self.stored is not None:
            self.stored.unload(self.parts)

    @property
    def trainable(self) -> bool:
        return any(p.requires_grad for layer in self.layers for p in layer.parameters())

    @property
    def parameters(self) -> int:
        """How many numbers its parameters have; what layers share counts once, for the first stage that uses it."""
        return sum(each.numel() for each in self._own_parameters)

    @property
    def trained(self) -> int:
        """How many of these are trained."""
        return sum(each.numel() for each in self._own_parameters if each.requires_grad)

    @property
    def _own_parameters(self) -> list[torch.nn.Parameter]:
        """Each once, without those that an earlier stage has."""
        weights = self.variables
        borrowed = {id(weights[name]) for name in self.copies}
        every = {id(each): each for layer in self.layers for each in layer.parameters()}
        return [each for key, each in every.items() if key not in borrowed]

    @property
    def weight_names(self) -> frozenset[str]:
        """The entries of the unsplit model's `state_dict` that are the stage's."""
        return frozenset(self.weights)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The same, with their tensors."""
        return {joined(name, key): tensor for name, part in self.parts for key, tensor in part.state_dict().items()}

    @property
    def variables(self) -> dict[str, torch.Tensor]:
        """The same, the parameters and buffers themselves."""
        found = ((name, part.state_dict(keep_vars=True)) for name, part in self.parts)
        return {joined(name, key): tensor for name, state in found for key, tensor in state.items()}

    @property
    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters and buffers, by their names in the unsplit model; each layer's once."""
        for name, layer in zip(self.names, self.layers, strict=True):
            yield from named_state(layer, name)

    def layer_with(self, parameter: str) -> str:
        """The name of the first layer that has what is called `parameter` in the unsplit model."""
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
        *,
        kind: Callable[..., Stage] = Stage,
    ) -> Stage:
        """Return the stage that computes it.

        Args:
            optimizer: As a `Stage` takes it.
            loss: Likewise.
            settings: Likewise, without the names, the order and the titles, which the segment knows.
            features: Likewise.
            kind: Makes the stage.
        """
        return kind(
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
        """The modules of the unsplit model that have the stage's state, by their names there."""
        return [part for name, layer in zip(self.names, self.layers, strict=True) for part in parts_of(layer, name)]


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
