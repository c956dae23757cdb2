"""Names of the modules whose places in a model make them layers, if its forward calls them.

The places do not depend on where the model is cut:

    model
      stem          a layer
      blocks        a list of modules: not a layer itself, since the modules in it are
        0, 1, ...   layers, whatever is in them
      encoder       has a list in it: not a layer itself either
        embed       a layer
        blocks
          0, 1, ... layers
      head          a layer
"""

from collections.abc import Iterator, Sequence

import torch

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model_names import near
from stageline.pipeline.stage.layers.layer import joined


def layer_names(model: torch.nn.Module, within: Sequence[str] = ()) -> list[str]:
    """Return the names of the modules that are layers of `model`, if its forward calls them.

    The modules called `within` are no layers: their children are. A module with several names has the first of them.
    Raises `ModelRefused` if there is no module of a name in `within`.
    """
    there = [name for name, _ in model.named_modules()][1:]
    for name in within:
        if name not in there:
            raise ModelRefused(
                f"within = {list(within)}: the {type(model).__name__} has no module {name}; its names include "
                f"{near(name, there)}"
            )
    opened = {name[:end] for name in within for end in (*_dots(name), len(name))}
    first: dict[int, str] = {}
    for name in _layers_in(model, "", opened, listed=False):
        first.setdefault(id(model.get_submodule(name)), name)
    return list(first.values())


def _layers_in(module: torch.nn.Module, name: str, opened: set[str], *, listed: bool) -> Iterator[str]:
    """Yield the names of the layers in `module`, which is called `name`.

    `listed` is True if the module is in a list, or in a module that is.
    """
    for key, child in module.named_children():
        path = joined(name, key)
        if _is_list(child):
            yield from _layers_in(child, path, opened, listed=True)
        elif path in opened or (not listed and any(map(_is_list, child.modules()))):
            yield from _layers_in(child, path, opened, listed=listed)
        else:
            yield path


def _is_list(module: torch.nn.Module) -> bool:
    if isinstance(module, torch.nn.Sequential):
        return len(module) > 0 and type(module).forward is torch.nn.Sequential.forward
    return isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict)


def _dots(name: str) -> Iterator[int]:
    return (place for place, sign in enumerate(name) if sign == ".")
