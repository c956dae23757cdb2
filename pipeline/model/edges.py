"""The layers of a model, and the layers before which it is cut: by number, by name, or by size."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeGuard

import torch

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model_names import near
from stageline.pipeline.plan.errors import Setting
from stageline.pipeline.stage.layers.layer import joined, parts_of
from stageline.pipeline.stage.layers.skipped_calls import demand_plain

from .layer_costs import best_partition, by_weight
from .layered.families import FAMILIES, known_layers
from .layered.layers import Layers

Cut = Sequence[int | str] | str | None
_OF_PEFT = "get_base_model"  # a method of peft's wrappers, which do not compute by themselves
EACH_LAYER = "each layer"  # a cut that no plan can write: every layer is a stage, to be measured


_NamedLayers = tuple[list[str], list[torch.nn.Module]]


def edges_of(
    names: Sequence[str], layers: Sequence[torch.nn.Module], cut: Cut, stages: int | None, way_out: str = ""
) -> list[int]:
    """Return the number of each stage's first layer, and at the end the number of layers.

    Args:
        names: Names of the layers, in order.
        layers: The layers.
        cut: Numbers or names of the layers with which stages 1, 2, ... begin; None or text cuts by size, and
            `EACH_LAYER` before every layer.
        stages: Number of stages for a cut by size; None is 1.
        way_out: Text about how the model could have more layers.

    Raises:
        ModelRefused: A layer in `cut` is not known, is the first, or is not after the one before; or there are more
            stages than layers.
    """
    if cut == EACH_LAYER:
        return list(range(len(layers) + 1))
    if cut is None or isinstance(cut, str):
        return _balanced(layers, stages or 1, way_out)
    found = [_number(each, names, layers, cut) for each in cut]
    for (before, after), (first, second) in zip(pairwise(found), pairwise(cut), strict=True):
        if before >= after:
            raise ModelRefused(Setting("model.cut", cut), f": {second} is not after {first} in the model")
    return [0, *found, len(layers)]


def _number(place: int | str, names: Sequence[str], layers: Sequence[torch.nn.Module], cut: Sequence[int | str]) -> int:
    """Return the number of the layer that a stage begins with."""
    number = place if isinstance(place, int) else _of_name(place, names, layers, cut)
    if not 0 < number < len(layers):
        which = f"{number} is out of range" if isinstance(place, int) else f"{place} is the first layer"
        raise ModelRefused(Setting("model.cut", cut), f": {which}. {_places(len(layers))}")
    return number


def _places(layers: int) -> str:
    if layers == 1:
        return "The model has 1 layer, so it cannot be cut: leave the cut out, or make it of several layers."
    return f"The model has {layers} layers, so a cut is before layer {'1' if layers == 2 else f'1 to {layers - 1}'}."


def _of_name(name: str, names: Sequence[str], layers: Sequence[torch.nn.Module], cut: Sequence[int | str]) -> int:
    """Return the number of the layer called `name`, or of the first layer in the module called so."""
    within = [number for number, each in enumerate(names) if each == name or each.startswith(f"{name}.")]
    if within:
        return within[0]
    for around, layer in zip(names, layers, strict=True):
        if name in _modules(layer, around):
            raise ModelRefused(
                Setting("model.cut", cut),
                f": {name} is computed together with the rest of layer {around}. Cut before that one, or before the "
                "next.",
            )
    raise ModelRefused(
        Setting("model.cut", cut), f": no layer is named {name}; layers have names such as {near(name, names)}"
    )


def _modules(layer: torch.nn.Module, name: str) -> set[str]:
    """Return the names, in the unsplit model, of the modules in a layer."""
    found = ((part, key) for part, module in parts_of(layer, name) for key, _ in module.named_modules())
    return {joined(part, key) if key else part for part, key in found}


def _balanced(layers: Sequence[torch.nn.Module], stages: int, way_out: str) -> list[int]:
    """Return the edges of `stages` contiguous parts whose largest has as few parameters as possible.

    Of several such cuts it is the earliest. A layer counts one more than its parameters, so that layers without any are
    spread too.
    """
    if not 0 < stages <= len(layers):
        counted = "1 layer" if len(layers) == 1 else f"{len(layers)} layers"
        raise ModelRefused(
            Setting("model.stages", stages), f", but the model has {counted}: at most one stage each{way_out}"
        )
    weights = [1 + sum(p.numel() for p in layer.parameters()) for layer in layers]
    return best_partition(len(layers), stages, by_weight(weights)) or []


def layers_of(model: object, cut: Cut) -> _NamedLayers:
    """Return the names of the layers of `model`, and the layers.

    Args:
        model: The model.
        cut: The wished cut, which may name layers.

    Raises:
        ModelRefused: How to cut the model is not known; a call of the model does more than calls of its layers; or
            `cut` has a name of which it is known why no layer begins there.
    """
    if _is_sequential(model):
        return _children(model)
    listed = model if isinstance(model, Layers) else known_layers(model) if isinstance(model, torch.nn.Module) else None
    if listed is None:
        raise _unknown(model)
    listed.check_calls()
    if cut is not None and not isinstance(cut, str):
        listed.check_cut(cut)
    return listed.names, list(listed.bound)


def must_be_traced(model: object) -> bool:
    """Return True if only a trace can find the layers of `model`: a torch module of no known family.

    Raises:
        ModelRefused: A part of a model of a known family has a forward of its own.
    """
    if not isinstance(model, torch.nn.Module) or _is_sequential(model) or hasattr(model, _OF_PEFT):
        return False
    return known_layers(model) is None


def _is_sequential(model: object) -> TypeGuard[torch.nn.Sequential]:
    return isinstance(model, torch.nn.Sequential) and type(model).forward is torch.nn.Sequential.forward


def _children(model: torch.nn.Sequential) -> _NamedLayers:
    if own := [name for name, _ in (*model.named_parameters(recurse=False), *model.named_buffers(recurse=False))]:
        raise ModelRefused(
            f"{', '.join(own)} belong to the model itself, not to one of its layers: give them to a layer"
        )
    demand_plain(model)
    children = list(model.named_children())
    if len(children) != len(model):  # named_children leaves out repetitions
        raise ModelRefused("the same module stands twice in the model: make two, or put both uses into one layer")
    return [name for name, _ in children], [child for _, child in children]


def _unknown(model: object) -> ModelRefused:
    if hasattr(model, _OF_PEFT):
        return ModelRefused(
            f"the model is of type {type(model).__name__}, of peft, which wraps the model that has the adapters: "
            f"give its get_base_model(), and save the adapters with the wrapper's save_pretrained (docs/guides/lora.md)"
        )
    families = near(type(model).__name__, [family.class_name for family in FAMILIES])
    return ModelRefused(
        f"the model is of type {type(model).__name__}; expected an nn.Sequential, a model of a known family "
        f"(such as {families}), stageline.Layers, which say where another can be cut, stageline.traced, which finds "
        f"that out (docs/guides/models.md), or a list with one module for each stage"
    )
