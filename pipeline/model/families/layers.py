"""A model that is not an nn.Sequential, written as the list of its layers.

Layers(model, [
    Layer(("wte", "wpe"), embed),           embed(x, wte, wpe), of the batch and of two modules of the model
    Layer("blocks.0"),                      blocks.0(x), of what embed returned
    Layer("blocks.1"),
    Layer(("head", "drop"), classify),
])

What a layer returns goes to the next one, in the same stage or across a cut.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model_names import near
from stageline.pipeline.stage.layers.layer import BoundLayer, HeldTensor, LayerFunction
from stageline.pipeline.stage.layers.skipped_calls import demand_no_hooks
from stageline.pipeline.tree import Tree

_SHOWN = 4  # names in an error


def _call(x: Tree, module: torch.nn.Module) -> Tree:
    return module(x)  # type: ignore[no-any-return]


class Layer:
    """One step of a model, before which it can be cut.

    `names`: modules of the model, or parameters and buffers of one whose other parts are elsewhere. The first names the
    layer. `function(x, *parts)` is given what the layer before returned, or the batch's inputs, and the named modules
    and tensors; it returns what the next layer is given: tensors, None, numbers, bools and texts, nested in tuples,
    lists and dicts. Without it the one module is called with `x`.
    """

    def __init__(self, names: str | Sequence[str], function: LayerFunction | None = None) -> None:
        self.names = (names,) if isinstance(names, str) else tuple(names)
        if not self.names or (function is None and len(self.names) > 1):
            raise ModelRefused(
                f"Layer({names!r}) needs {'a function of its parts' if self.names else 'a module'}: "
                f"Layer((name, other), lambda x, part, other: other(part(x)))"
            )
        self.function = function or _call

    def bind(self, parts: Mapping[str, torch.nn.Module]) -> BoundLayer:
        """The module that computes the layer, of `parts` of the model by their names."""
        return BoundLayer(self.function, parts)

    def __repr__(self) -> str:
        return f"Layer({self.names if len(self.names) > 1 else self.names[0]!r})"


class Layers:
    """`model` as the `layers` that its forward goes through, in order. `bound` are the modules that compute them;
    `parameters` are those of the model, by name, in its own order. `difference` is the reason why it should not be
    trained: that in which the layers are known to compute something other than the model; "" if there is none.

    Raises `ModelRefused` if a name is not the model's, two layers have one name, or a parameter or buffer of the model
    is in no layer.
    """

    difference: str = ""

    def __init__(self, model: torch.nn.Module, layers: Sequence[Layer]) -> None:
        self.model = model
        self.names = [layer.names[0] for layer in layers]
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
        """Raise `ModelRefused` for a hook of a module that no layer calls, since each layer calls its own parts."""
        called = {id(each) for layer in self.bound for each in layer.modules()}
        demand_no_hooks([(name, each) for name, each in self.model.named_modules() if id(each) not in called])

    def check_cut(self, cut: Sequence[int | str]) -> None:
        """Raise `ModelRefused` for a name in `cut` of which it is known why no layer begins there."""


def _part(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """The module called `name`, or its parameter or buffer as a module. Raises `ModelRefused`."""
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
    """Yield what no layer has: all of it, even if it is the same tensor as another's that one has, since both have
    names."""
    for key, _ in _state(model):
        if not any(key == name or key.startswith(f"{name}.") for name in names):
            yield key


def _state(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
