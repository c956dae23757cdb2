"""Refuses what runs only when a module itself is called, where the modules in it are called one by one.

model = nn.Sequential(a, b)
model.register_forward_hook(double)      model(x) is double(b(a(x))), and the layers of its stages are a and b
"""

from collections.abc import Iterator, Sequence

import torch
from torch.nn.modules import module as modules

from stageline.pipeline.errors import ModelRefused

_HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
    "_state_dict_pre_hooks": "state_dict pre-hook",
    "_state_dict_hooks": "state_dict hook",
    "_load_state_dict_pre_hooks": "load_state_dict pre-hook",
    "_load_state_dict_post_hooks": "load_state_dict post-hook",
}
_GLOBAL_HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
_CALL = ("__call__", "_call_impl", "_wrapped_call_impl", "_slow_forward", "forward", "__iter__")
_STATE = ("state_dict", "_save_to_state_dict", "get_extra_state", "load_state_dict", "_load_from_state_dict")


def plain_layers(layers: torch.nn.Module | Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the modules of `layers` to call in order. Raises `ModelRefused` as `demand_plain` does."""
    if isinstance(layers, torch.nn.Sequential):
        demand_plain(layers)
        return list(layers)
    return [layers] if isinstance(layers, torch.nn.Module) else list(layers)


def demand_plain(container: torch.nn.Sequential) -> None:
    """Raises `ModelRefused` if a call of `container` is not the calls of its modules, in their order, or its state dict
    is not that of its modules."""
    kind, names = type(container), (*_CALL, *_STATE)
    inherited = {name: getattr(torch.nn.Sequential, name) for name in names}
    own = [f"the {name} of its own" for name in names if name in vars(container)]
    own += [f"the {name} of {kind.__name__}" for name in names if getattr(kind, name) is not inherited[name]]
    demand_no_hooks([("", container)], own)


def demand_no_hooks(uncalled: Sequence[tuple[str, torch.nn.Module]], others: Sequence[str] = ()) -> None:
    """Raises `ModelRefused` if one of the modules `uncalled`, by their names in the model, has a hook; or for `others`
    that would be lost."""
    lost = [*others, *_global_hooks()]
    lost += [f"{hook} of {name or 'the model itself'}" for name, module in uncalled for hook in hooks_of(module)]
    if lost:
        raise ModelRefused(
            f"{', '.join(lost)} would be ignored: stages call the model's layers one by one, and not the modules that "
            f"contain them. Put it on a layer, remove it before the model is cut, or let traced() find the layers "
            f"(docs/models.md)"
        )


def hooks_of(module: torch.nn.Module) -> list[str]:
    """List the hooks of `module` itself, and its `compile()`, which a call uses too: "the forward hook double"."""
    tables = ((title, getattr(module, table, {})) for table, title in _HOOKS.items())
    hooks = [f"the {title} {_name(hook)}" for title, table in tables for hook in table.values()]
    return hooks if module._compiled_call_impl is None else [*hooks, "the compile()"]


def _global_hooks() -> Iterator[str]:
    for table in _GLOBAL_HOOKS:
        for hook in getattr(modules, f"_global_{table}").values():
            yield f"the {table[:-1].replace('_', ' ')} {_name(hook)} of all modules"


def _name(hook: object) -> str:
    hook = getattr(hook, "hook", hook)  # of a load_state_dict pre-hook
    return str(getattr(hook, "__qualname__", type(hook).__name__))
