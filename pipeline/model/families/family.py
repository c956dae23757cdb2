"""A family of models, and the names of its weights in files; recognised without importing the library it is from."""

import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from stageline.pipeline.errors import DataError, ModelRefused
from stageline.pipeline.tree import Tree, describe

from .layers import Layers

POSITIONS = r"(^|\.)position_ids$"
# As TensorFlow called them.
LAYER_NORMS = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))


@dataclass(frozen=True, slots=True)
class StoredNames:
    """The names that files have for the weights of a family, where those are not the names in the model.

    transformers changes names from version to version, and converts them when it loads a file and when it saves one.
    Here are the same rules, without its code: the name in a file is the first of these that the model has.

        vit.encoder.layer.0.attention.attention.query.weight     as it is
        vit.layers.0.attention.q_proj.weight                     renamed
        h.0.ln_1.weight -> transformer.h.0.ln_1.weight           with the base model's name in front

    Args:
        renamed: Regular expressions and replacements, applied one after the other, each once in a name.
        base: Name of the base model in the model.
        unused: Regular expression of entries that older files have, and that the model computes.
    """

    renamed: tuple[tuple[str, str], ...] = ()
    base: str = ""
    unused: str = r"(?!)"

    def in_model(self, name: str, known: Collection[str]) -> str | None:
        """What the model, whose names are `known`, calls the entry `name` of a file: `name` itself if it knows none;
        None for an entry that it does not use."""
        renamed = name
        for pattern, replacement in self.renamed:
            renamed = re.sub(pattern, replacement, renamed, count=1)
        found = next((each for each in (name, renamed, f"{self.base}.{renamed}") if each in known), None)
        return found or (None if re.search(self.unused, name) else name)


SAME = StoredNames()


@dataclass(frozen=True, slots=True)
class Family:
    """Models of one class of `module`, which is imported where there is such a model.

    `replaced` are the parts whose forward is not called, since `layers` does what it does: class names by the parts'
    names, of `module` or of torch; that of "" is the model's own. `stored`: what files call the weights.
    """

    module: str
    replaced: Mapping[str, str]
    layers: Callable[[torch.nn.Module], Layers]
    stored: StoredNames = SAME

    @property
    def class_name(self) -> str:
        return self.replaced[""]

    def has(self, model: object) -> bool:
        """Whether `model` is of the class, or of one derived from it."""
        return self._class_of(model, self.class_name) is not None

    def layers_of(self, model: torch.nn.Module) -> Layers:
        """The layers of `model`, which the family `has`. Raises `ModelRefused` if a part has a forward of its own."""
        for path, name in self.replaced.items():
            part = model.get_submodule(path)
            known = self._class_of(part, name)
            own = getattr(part.forward, "__func__", None), type(part).__call__
            if known is None or own != (known.forward, known.__call__):
                raise ModelRefused(
                    f"{path or 'the model'} is a {type(part).__name__} whose forward is not that of {name}: which "
                    f"layers it has is not known. Say so with stageline.Layers: docs/models.md"
                )
        return self.layers(model)

    def _class_of(self, part: object, name: str) -> type[torch.nn.Module] | None:
        places = (self.module, torch.nn.Sequential.__module__)
        found = (each for each in type(part).__mro__ if each.__module__ in places and each.__name__ == name)
        return next(found, None)


def library(model: torch.nn.Module) -> ModuleType:
    """The imported module that `model`'s forward was written in: what it calls there can be called too."""
    return sys.modules[type(model).forward.__module__]


def taken(inputs: Tree, names: Sequence[str]) -> list[Any]:
    """The parts of a batch's inputs by `names`, None for those left out: of a dict, as `model(**inputs)` has them; a
    tensor is the first. Raises `DataError` for others, and without the first."""
    if isinstance(inputs, torch.Tensor):
        inputs = {names[0]: inputs}
    if not isinstance(inputs, dict) or names[0] not in inputs or inputs.keys() - set(names):
        raise DataError(
            f"the inputs of a batch are {describe(inputs)}; expected a tensor, {names[0]}, or a dict of it and any of "
            f"{', '.join(names[1:])}. What else a batch has, such as labels, is its target"
        )
    return [inputs.get(name) for name in names]


def of_hidden(x: Any, module: torch.nn.Module) -> Tree:
    """A layer of the hidden states alone, such as a last normalization."""
    return module(x["hidden"])  # type: ignore[no-any-return]


def masked_block(x: Any, block: torch.nn.Module) -> Tree:
    """A block that is called with the hidden states and the mask."""
    return {**x, "hidden": block(x["hidden"], x["mask"])}
