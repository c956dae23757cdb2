"""Which modules and tensors of the model each of its layers has: all that its pieces need, under the model's names.

A layer has its own module. What it needs of elsewhere, such as a parameter that belongs to the model itself, it has as
single tensors; the last layer also has what no layer needs, since the model's state has it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The `names` of a layer's parts; by names in the model, the number of the part and the rest of the name."""

    names: tuple[str, ...]
    places: Mapping[str, tuple[int, str]]


def parts_of_layers(model: torch.nn.Module, names: Sequence[str], needed: Sequence[frozenset[str]]) -> list[LayerParts]:
    """The parts of the layers called `names`, which need these parameters and buffers."""
    aliases = _aliases(model)
    found = [_parts(name, sorted(keys), aliases) for name, keys in zip(names, needed, strict=True)]
    held = [part for parts in found for part in parts.names]
    left = tuple(key for key in aliases if not any(key == part or key.startswith(f"{part}.") for part in held))
    return [*found[:-1], LayerParts((*found[-1].names, *left), found[-1].places)]


def _parts(name: str, needed: Sequence[str], aliases: Mapping[str, Sequence[str]]) -> LayerParts:
    own = {
        key: alias.removeprefix(f"{name}.") for key in needed for alias in aliases[key] if alias.startswith(f"{name}.")
    }
    others = [key for key in needed if key not in own]
    places = {key: (0, rest) for key, rest in own.items()}
    return LayerParts((name, *others), places | {key: (number, "") for number, key in enumerate(others, 1)})


def _aliases(model: torch.nn.Module) -> dict[str, list[str]]:
    """All names of the parameter or buffer that has a name."""
    names: dict[int, list[str]] = {}
    for name, tensor in _state(model):
        names.setdefault(id(tensor), []).append(name)
    return {name: names[id(tensor)] for name, tensor in _state(model)}


def _state(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
