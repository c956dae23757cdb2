"""Refusal of code that runs only when a module itself is called, where its modules are called one by one.

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
}  # without those of load_state_dict, which `model.load_state_dict(line.state_dict())` calls
_GLOBAL_HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
_CALL = ("__call__", "_call_impl", "_wrapped_call_impl", "_slow_forward", "forward", "__iter__")
_STATE = ("state_dict", "_save_to_state_dict", "get_extra_state", "load_state_dict", "_load_from_state_dict")


_WAY_OUT = (
    "Put it on a layer, remove it before the model is cut, or let traced() find the layers (docs/guides/models.md)"
)


def plain_layers(layers: torch.nn.Module | Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the modules of `layers` to call in order. Raises `ModelRefused` as `demand_plain` does."""
    if isinstance(layers, torch.nn.Sequential):
        demand_plain(layers, "Stage([model]) takes the whole model as one layer, which is called itself")
        return list(layers)
    return [layers] if isinstance(layers, torch.nn.Module) else list(layers)


def demand_plain(container: torch.nn.Sequential, way_out: str = _WAY_OUT) -> None:
    """Raise `ModelRefused` if a call of `container` is not the calls of its modules in their order.

    Raises it also if the container has hooks, or a state dict that is not that of its modules.

    Args:
        container: The container, which stages do not call.
        way_out: End of the error's text.
    """
    kind, names = type(container), (*_CALL, *_STATE)
    inherited = {name: getattr(torch.nn.Sequential, name) for name in names}
    own = [f"the {name} of its own" for name in names if name in vars(container)]
    own += [f"the {name} of {kind.__name__}" for name in names if getattr(kind, name) is not inherited[name]]
    demand_no_hooks([("", container)], own, way_out)


def demand_no_hooks(
    uncalled: Sequence[tuple[str, torch.nn.Module]], others: Sequence[str] = (), way_out: str = _WAY_OUT
) -> None:
    """Raise `ModelRefused` if something would be lost because stages call the model's layers one by one.

    Args:
        uncalled: Modules that are not called, by their names in the model. None of them may have a hook, nor may all
            modules have one.
        others: Titles of other things that would be lost.
        way_out: End of the error's text.
    """
    if of_all := [title for title, _ in _global_hooks()]:
        raise ModelRefused(
            f"{', '.join(of_all)} would be called for the model's layers only, and not for the modules that contain "
            f"them. Make the line or the stage outside of the `with` that registers it, such as FlopCounterMode(), or "
            f"remove it before"
        )
    lost = [*others, *(title for title, _ in hooks_in(uncalled))]
    if lost:
        raise ModelRefused(
            f"{', '.join(lost)} would be ignored: stages call the model's layers one by one, and not the modules that "
            f"contain them. {way_out}"
        )


def all_hooks(model: torch.nn.Module) -> list[tuple[str, object]]:
    """Return the hooks that a call of `model` or of a module in it uses, each with a title."""
    return [*hooks_in(list(model.named_modules())), *_global_hooks()]


def hooks_in(named: Sequence[tuple[str, torch.nn.Module]]) -> Iterator[tuple[str, object]]:
    """Yield the hooks of the modules themselves, each with a title such as "the forward hook double of layer2".

    The modules' `compile()`, which a call uses too, is yielded with None.
    """
    for name, module in named:
        of = name or "the model itself"
        for table, title in _HOOKS.items():
            for hook in getattr(module, table, {}).values():
                yield f"the {title} {_name(hook)} of {of}", hook
        if module._compiled_call_impl is not None:
            yield f"the compile() of {of}", None


def _global_hooks() -> Iterator[tuple[str, object]]:
    for table in _GLOBAL_HOOKS:
        for hook in getattr(modules, f"_global_{table}").values():
            yield f"the {table[:-1].replace('_', ' ')} {_name(hook)} of all modules", hook


def _name(hook: object) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__name__))
