"""A model that is not an nn.Sequential, written as the list of its layers.

Layers(model, [
    Layer(("wte", "wpe"), embed),           embed(x, wte, wpe), of the batch and of two modules of the model
    Layer("blocks.0"),                      blocks.0(x), of what embed returned
    Layer("blocks.1"),
    Layer(("head", "drop"), classify),
])

What a layer returns goes to the next one, in the same stage or across a cut.

A `Family` knows the layers of the models of one class, and the names of their weights in files. A model's family is
recognised without importing the library that the class is from.
"""

import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from stageline.pipeline.errors import DataError, ModelRefused
from stageline.pipeline.model_names import near
from stageline.pipeline.stage.layers.layer import BoundLayer, HeldTensor, LayerFunction
from stageline.pipeline.stage.layers.skipped_calls import demand_no_hooks
from stageline.pipeline.tree import Tree, describe

_SHOWN = 4  # names in an error
POSITIONS = r"(^|\.)position_ids$"
# Names of TensorFlow's checkpoints, with torch's.
LAYER_NORMS = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))


def _call(x: Tree, module: torch.nn.Module) -> Tree:
    return module(x)  # type: ignore[no-any-return]


class Layer:
    """A step of a model, before which the model can be cut.

    Args:
        names: Names of modules of the model, or of parameters and buffers of a module whose other parts are elsewhere.
            The first one names the layer.
        function: Called as `function(x, *parts)` with the output of the layer before, or the batch's inputs, and the
            named modules and tensors. Returns the input of the next layer: tensors, None, numbers, bools and texts,
            nested in tuples, lists and dicts. Without a function the one module is called with `x`.
    """

    def __init__(self, names: str | Sequence[str], function: LayerFunction | None = None) -> None:
        """Make the layer. Raises `ModelRefused` without names, or with several names and no function."""
        self.names = (names,) if isinstance(names, str) else tuple(names)
        if not self.names or (function is None and len(self.names) > 1):
            raise ModelRefused(
                f"Layer({names!r}) needs {'a function of its parts' if self.names else 'a module'}: "
                f"Layer((name, other), lambda x, part, other: other(part(x)))"
            )
        self.function = function or _call

    @property
    def name(self) -> str:
        """Name of the layer: that of its first part."""
        return self.names[0]

    def bind(self, parts: Mapping[str, torch.nn.Module]) -> BoundLayer:
        """Return the module that computes the layer from `parts` of the model, given by their names."""
        return BoundLayer(self.function, parts)

    def __repr__(self) -> str:
        """Return the layer as `Layer` with its names."""
        return f"Layer({self.names if len(self.names) > 1 else self.names[0]!r})"


class Layers:
    """A model as the layers that its forward goes through, in order.

    Attributes:
        model: The model.
        names: The name of each layer.
        bound: The modules that compute the layers.
        parameters: The model's parameters by name, in its own order.
        difference: The reason why the layers should not be trained: in what they are known to compute something other
            than the model; "" if there is none.
    """

    difference: str = ""

    def __init__(self, model: torch.nn.Module, layers: Sequence[Layer]) -> None:
        """Make the list of `layers` of `model`.

        Raises:
            ModelRefused: A name is not the model's, two layers have one name, or a parameter or buffer of the model is
                in no layer.
        """
        self.model = model
        self.names = [layer.name for layer in layers]
        self.parameters = dict(model.named_parameters())
        if twice := [name for name in self.names if self.names.count(name) > 1]:
            raise ModelRefused(f"two layers are called {twice[0]}, which their first names must tell apart")
        self.bound = [each.bind({name: _part(model, name) for name in each.names}) for each in layers]
        if left := list(_in_none(model, [name for layer in layers for name in layer.names])):
            more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
            raise ModelRefused(
                f"{', '.join(left[:_SHOWN])}{more} of the {type(model).__name__} would be in no stage: name them, or "
                f"the modules they belong to, in a Layer"
            )

    def check_calls(self) -> None:
        """Raise `ModelRefused` for a hook of a module that no layer calls: each layer calls only its own parts."""
        called = {id(each) for layer in self.bound for each in layer.modules()}
        demand_no_hooks([(name, each) for name, each in self.model.named_modules() if id(each) not in called])

    def more_layers(self) -> str:
        """Return how the model could have more layers, as the end of an error's text; "" if nothing is known."""
        return ""

    def check_cut(self, cut: Sequence[int | str]) -> None:
        """Raise `ModelRefused` for a name in `cut` at which no layer begins, if the reason is known. Here none is."""


def _part(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """Return the module called `name`, or the parameter or buffer so called as a module. Raises `ModelRefused`."""
    modules: dict[str, torch.nn.Module] = dict(model.named_modules(remove_duplicate=False))
    if name and name in modules:
        return modules[name]
    path, _, key = name.rpartition(".")
    owner = modules.get(path)
    if owner is not None and (owner._parameters.get(key) is not None or owner._buffers.get(key) is not None):
        return HeldTensor(owner, key)
    there = [*list(modules)[1:], *(key for key, _ in _state(model))]
    raise ModelRefused(
        f"the {type(model).__name__} has no module, parameter or buffer {name!r}; its names include {near(name, there)}"
    )


def _in_none(model: torch.nn.Module, names: Sequence[str]) -> Iterator[str]:
    """Yield the names of parameters and buffers that no layer has.

    A name counts even if a layer has the same tensor under another name, since both names are in the state.
    """
    for key, _ in _state(model):
        if not any(key == name or key.startswith(f"{name}.") for name in names):
            yield key


def _state(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


@dataclass(frozen=True, slots=True)
class StoredNames:
    """Names that files have for the weights of a family, where those are not the names in the model.

    transformers changes names from version to version, and converts them when it loads a file and when it saves one.
    The same rules are here, without its code. A name in a file means the first of these that the model has:

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
        """Return the model's name of the entry `name` of a file.

        Returns `name` itself if no name in `known` fits, and None for an entry that the model does not use.

        Args:
            name: Name of the entry in the file.
            known: Names of the model's own entries.
        """
        renamed = name
        for pattern, replacement in self.renamed:
            renamed = re.sub(pattern, replacement, renamed, count=1)
        found = next((each for each in (name, renamed, f"{self.base}.{renamed}") if each in known), None)
        return found or (None if re.search(self.unused, name) else name)


SAME = StoredNames()


@dataclass(frozen=True, slots=True)
class Family:
    """A family: the models of one class.

    Attributes:
        module: Name of the module of the class, which is imported where there is such a model.
        replaced: Class names of the parts whose forward is not called, since `layers` does the same, by the parts'
            names; "" is the model itself. The classes are of `module` or of torch.
        layers: Returns the layers of a model.
        stored: Names that files have for the weights.
    """

    module: str
    replaced: Mapping[str, str]
    layers: Callable[[torch.nn.Module], Layers]
    stored: StoredNames = SAME

    @property
    def class_name(self) -> str:
        """Name of the models' class."""
        return self.replaced[""]

    def has(self, model: object) -> bool:
        """Return True if `model` is of the family's class, or of a class derived from it."""
        return self._class_of(model, self.class_name) is not None

    def layers_of(self, model: torch.nn.Module) -> Layers:
        """Return the layers of `model`, a model of the family.

        Raises:
            ModelRefused: A part of the model has a forward of its own.
        """
        for path, name in self.replaced.items():
            part = model.get_submodule(path)
            known = self._class_of(part, name)
            own = getattr(part.forward, "__func__", None), type(part).__call__
            if known is None or own != (known.forward, known.__call__):
                raise ModelRefused(
                    f"{path or 'the model'} is of type {type(part).__name__}, whose forward is not that of {name}: "
                    f"which layers it has is not known. Say so with stageline.Layers: docs/guides/models.md"
                )
        return self.layers(model)

    def _class_of(self, part: object, name: str) -> type[torch.nn.Module] | None:
        places = (self.module, torch.nn.Sequential.__module__)
        found = (each for each in type(part).__mro__ if each.__module__ in places and each.__name__ == name)
        return next(found, None)


def library(model: torch.nn.Module) -> ModuleType:
    """Return the imported module that `model`'s forward was written in, whose functions can be called too."""
    return sys.modules[type(model).forward.__module__]


def taken(inputs: Tree, names: Sequence[str]) -> list[Any]:
    """Return the parts of a batch's inputs by `names`; None stands for each part left out.

    Args:
        inputs: A dict, as `model(**inputs)` takes it, or a tensor, which is the first part.
        names: Names of the parts; the first one is required.

    Raises:
        DataError: The inputs have other parts, or lack the first.
    """
    if isinstance(inputs, torch.Tensor):
        inputs = {names[0]: inputs}
    if not isinstance(inputs, dict) or names[0] not in inputs or inputs.keys() - set(names):
        raise DataError(
            f"the inputs of a batch are {describe(inputs)}; expected a tensor, {names[0]}, or a dict of it and any of "
            f"{', '.join(names[1:])}. What else a batch has, such as labels, is its target"
        )
    return [inputs.get(name) for name in names]


def of_hidden(x: Any, module: torch.nn.Module) -> Tree:
    """Compute `module` of the hidden states alone, as for a last normalization."""
    return module(x["hidden"])  # type: ignore[no-any-return]


def masked_block(x: Any, block: torch.nn.Module) -> Tree:
    """Call `block` with the hidden states and the mask, and return what travels on."""
    return {**x, "hidden": block(x["hidden"], x["mask"])}
