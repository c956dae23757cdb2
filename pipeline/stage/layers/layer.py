"""What a layer of a stage is made of: modules of the unsplit model, which its weights have their names by.

a module, such as a child of an nn.Sequential      that module
several modules and a function of them             each of them, also tensors that belong to a container
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from stageline.pipeline.tree import Tree

LayerFunction = Callable[..., Tree]  # of what travels, then of the layer's parts
BatchCheck = Callable[[Tree, int], object]  # of a batch's inputs, and of how many microbatches it is cut into


class BoundLayer(torch.nn.Module):
    """One cuttable step of a model: `function(x, *parts)`, of what travels and of modules or tensors of the model.

    `parts` are the model's own modules by their names in it, or `HeldTensor`s by the names of their tensors.
    `check_inputs` raises `DataError` for a batch's inputs that the layer, as the first one, is known not to take in so
    many microbatches. `no_cut` is the reason why no stage can begin with the layer, "" if there is none.
    """

    check_inputs: BatchCheck = staticmethod(lambda inputs, microbatches: None)
    no_cut: str = ""
    calls_parts: bool = True

    def __init__(self, function: LayerFunction, parts: Mapping[str, torch.nn.Module]) -> None:
        super().__init__()
        self._function = function
        self.parts = torch.nn.ModuleList(parts.values())
        self.names = [name.rpartition(".")[0] if isinstance(part, HeldTensor) else name for name, part in parts.items()]

    def forward(self, x: Tree) -> Tree:
        return self._function(x, *self.arguments())

    def arguments(self) -> list[Any]:
        """The parts as its function is given them: modules and tensors."""
        return [part() if isinstance(part, HeldTensor) else part for part in self.parts]


class HeldTensor(torch.nn.Module):
    """The parameter or buffer `key` of a module whose other parts are in other layers.

    As a module of its own, so that `functional_call` can replace it.
    """

    def __init__(self, owner: torch.nn.Module, key: str) -> None:
        super().__init__()
        self._key = key
        if key in owner._parameters:
            self.register_parameter(key, owner._parameters[key])
        else:
            self.register_buffer(key, owner._buffers[key], persistent=key not in owner._non_persistent_buffers_set)

    def forward(self) -> torch.Tensor:
        return getattr(self, self._key)  # type: ignore[no-any-return]


def parts_of(layer: torch.nn.Module, name: str) -> list[tuple[str, torch.nn.Module]]:
    """The modules that hold the state of `layer`, which is called `name`, by their names in the unsplit model."""
    return list(zip(layer.names, layer.parts, strict=True)) if isinstance(layer, BoundLayer) else [(name, layer)]


def joined(name: str, key: str) -> str:
    """The name in the unsplit model of what is called `key` in its module `name`, which is "" for the model itself."""
    return f"{name}.{key}" if name else key


def unsplit_name(layer: torch.nn.Module, name: str, key: str) -> str:
    """The name in the unsplit model of what is called `key` in `layer`, which is called `name`."""
    if not isinstance(layer, BoundLayer):
        return joined(name, key)
    _, number, rest = key.split(".", 2)  # "parts.1.weight"
    return joined(layer.names[int(number)], rest)


def named_state(layer: torch.nn.Module, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers of `layer`, by their names in the unsplit model; each once."""
    for key, state in (*layer.named_parameters(), *layer.named_buffers()):
        yield unsplit_name(layer, name, key), state


def state_of(part: torch.nn.Module, name: str, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What `state`, by unsplit names, has for module `name` of the model, by the names in it."""
    if isinstance(part, HeldTensor):
        return {key: state[joined(name, key)] for key in part.state_dict() if joined(name, key) in state}
    prefix = f"{name}."
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
