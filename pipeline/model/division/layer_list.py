"""A model as an ordered list of layers: what it can be cut into."""

import torch

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model.families.known import FAMILIES, known_layers
from stageline.pipeline.model.families.layers import Layers
from stageline.pipeline.stage.layers.skipped_calls import demand_plain

from .edges import Cut

_NamedLayers = tuple[list[str], list[torch.nn.Module]]


def layers_of(model: object, cut: Cut) -> _NamedLayers:
    """The names of the layers of `model`, and the layers; `cut` may name some. Raises `ModelRefused` for a model of
    which it is not known how to cut it, for what a call of it does that calls of its layers do not, and for a name of
    which it is known why no layer begins there."""
    if isinstance(model, torch.nn.Sequential) and type(model).forward is torch.nn.Sequential.forward:
        return _children(model)
    listed = model if isinstance(model, Layers) else known_layers(model) if isinstance(model, torch.nn.Module) else None
    if listed is None:
        raise _unknown(model)
    listed.check_calls()
    if cut is not None and not isinstance(cut, str):
        listed.check_cut(cut)
    return listed.names, list(listed.bound)


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
    if hasattr(model, "get_base_model"):
        return ModelRefused(
            f"the model is a {type(model).__name__} of peft, which wraps the model that has the adapters: give its "
            f"get_base_model(), and save the adapters with the wrapper's save_pretrained (docs/lora.md)"
        )
    families = ", ".join(family.class_name for family in FAMILIES)
    return ModelRefused(
        f"the model is a {type(model).__name__}; expected an nn.Sequential, a model of a known family "
        f"({families}), stageline.Layers, which say where another can be cut, stageline.traced, which finds "
        f"that out (docs/models.md), or a list with one module for each stage"
    )
