"""The families of models that are known."""

import torch

from .decoders import GPT2, LLAMA
from .encoders import BERT, LAYOUTLM
from .layers import SAME, Family, Layers, StoredNames
from .vision import RESNET, VIT

FAMILIES: tuple[Family, ...] = (GPT2, LLAMA, BERT, LAYOUTLM, VIT, RESNET)


def known_layers(model: torch.nn.Module) -> Layers | None:
    """The layers of a model of a known family, None for another. Raises `ModelRefused` if it computes otherwise."""
    family = _family_of(model)
    return None if family is None else family.layers_of(model)


def stored_names_of(model: object) -> StoredNames:
    """What files call the weights of `model`."""
    family = _family_of(model)
    return SAME if family is None else family.stored


def _family_of(model: object) -> Family | None:
    return next((each for each in FAMILIES if each.has(model)), None)
