"""Layers of a stage, and the modules of the unsplit model that they are made of, which name their weights.

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
    """A layer that computes `function(x, *parts)` from what travels and from modules or tensors of the model.

    Attributes:
        check_inputs: Raises `DataError` for a batch's inputs that the layer, as the first one, is known not to take in
            so many microbatches.
        no_cut: Reason why no stage can begin with the layer; "" if there is none.
        calls_parts: True if the function calls the parts that are modules.
        parts: The model's own modules, and `HeldTensor`s.
        names: Name in the model of each part; of a `HeldTensor`, the name of the module that owns the tensor.
    """

    check_inputs: BatchCheck = staticmethod(lambda inputs, microbatches: None)
    no_cut: str = ""
    calls_parts: bool = True

    def __init__(self, function: LayerFunction, parts: Mapping[str, torch.nn.Module]) -> None:
        """Take the function and its parts.

        Args:
            function: Computes the layer's output from what travels and from the parts.
            parts: The model's own modules by their names in it, or `HeldTensor`s by the names of their tensors.
        """
        super().__init__()
        self._function = function
        self.parts = torch.nn.ModuleList(parts.values())
        self.names = [name.rpartition(".")[0] if isinstance(part, HeldTensor) else name for name, part in parts.items()]

    def forward(self, x: Tree) -> Tree:
        """Return the function's output for `x`."""
        return self._function(x, *self.arguments())

    def arguments(self) -> list[Any]:
        """Return the parts as the function is given them: modules and tensors."""
        return [part() if isinstance(part, HeldTensor) else part for part in self.parts]


class HeldTensor(torch.nn.Module):
    """A parameter or buffer of a module whose other parts are in other layers.

    It is a module of its own, so that `functional_call` can replace the tensor.
    """

    def __init__(self, owner: torch.nn.Module, key: str) -> None:
        """Take the parameter or buffer `key` of the module `owner`."""
        super().__init__()
        self._key = key
        if key in owner._parameters:
            self.register_parameter(key, owner._parameters[key])
        else:
            self.register_buffer(key, owner._buffers[key], persistent=key not in owner._non_persistent_buffers_set)

    def forward(self) -> torch.Tensor:
        """Return the tensor."""
        return getattr(self, self._key)  # type: ignore[no-any-return]


def parts_of(layer: torch.nn.Module, name: str) -> list[tuple[str, torch.nn.Module]]:
    """Return the modules that hold the state of `layer`, called `name`, by their names in the unsplit model."""
    return list(zip(layer.names, layer.parts, strict=True)) if isinstance(layer, BoundLayer) else [(name, layer)]


def joined(name: str, key: str) -> str:
    """Return the name in the unsplit model of `key` in the module `name`, which is "" for the model itself."""
    return f"{name}.{key}" if name else key


def unsplit_name(layer: torch.nn.Module, name: str, key: str) -> str:
    """Return the name in the unsplit model of a parameter or buffer of a layer.

    Args:
        layer: The layer.
        name: Name of the layer.
        key: Name of the parameter or buffer in the layer.
    """
    if not isinstance(layer, BoundLayer):
        return joined(name, key)
    _, number, rest = key.split(".", 2)  # "parts.1.weight"
    return joined(layer.names[int(number)], rest)


def named_state(layer: torch.nn.Module, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of `layer`, called `name`, by their names in the unsplit model.

    Each is yielded once.
    """
    for key, state in (*layer.named_parameters(), *layer.named_buffers()):
        yield unsplit_name(layer, name, key), state


def state_of(part: torch.nn.Module, name: str, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the part of a state dict that belongs to one module, by the names in that module.

    Args:
        part: The module.
        name: Name of the module in the unsplit model.
        state: Tensors by their names in the unsplit model.
    """
    if isinstance(part, HeldTensor):
        return {key: state[joined(name, key)] for key in part.state_dict() if joined(name, key) in state}
    beginning = f"{name}."
    return {key.removeprefix(beginning): value for key, value in state.items() if key.startswith(beginning)}
