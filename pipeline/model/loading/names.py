"""By which name an object can be found on another machine: a public one of torch, or one at the top of a module.

    torch.optim.SGD         a class or function of one of `TORCH`, under a name there that begins with no underscore
    model.build             a class or function that the module `model` defines under that name

Both ends check with these: the one that sends a name, and the one that imports it.
"""

from importlib import import_module
from typing import Any

TORCH = ("torch.nn.functional", "torch.optim", "torch.optim.lr_scheduler", "torch.nn")


def torch_name(value: Any) -> str | None:
    """The public name of a class or function of torch; None if it has none."""
    name = getattr(value, "__name__", "")
    found = (f"{module}.{name}" for module in TORCH if getattr(import_module(module), name or "_", None) is value)
    return next((each for each in found if is_torch_name(each)), None)


def is_torch_name(reference: str) -> bool:
    """Whether `reference` is a public class or function of one of `TORCH`."""
    module, _, name = reference.rpartition(".")
    if module not in TORCH or name.startswith("_"):
        return False
    value = getattr(import_module(module), name, None)
    return callable(value) and (getattr(value, "__module__", None) or "").split(".")[0] == "torch"


def defines(module: Any, name: str) -> bool:
    """Whether `module` itself defines what it has under `name`: another's function that it imports does not count."""
    value = getattr(module, name, None)
    return (
        callable(value)
        and getattr(value, "__module__", None) == module.__name__
        and getattr(value, "__qualname__", None) == name
    )
