"""Names of a user's objects, by which another process finds them.

    script:model            `OBJECTS["model"]` of a script, in processes that were forked from it; nothing is pickled
    torch.optim.SGD         a class or function of one of `TORCH`, under a name there that begins with no underscore
    model.build             a class or function that the module `model` defines under that name

The process that sends a name and the one that imports it check it with the functions here.
"""

from importlib import import_module
from typing import Any

from stageline.pipeline.errors import ModelRefused

PREFIX = "script:"

OBJECTS: dict[str, Any] = {}


TORCH = ("torch.nn.functional", "torch.optim", "torch.optim.lr_scheduler", "torch.nn")


def is_of_script(reference: str) -> bool:
    """Return True if `reference` names an object of a script, not of a file or a package."""
    return reference.startswith(PREFIX)


def script_object(reference: str, key: str) -> Any:
    """Return the object of a script that `reference` names.

    Args:
        reference: Name that begins with `PREFIX`.
        key: The plan's key that holds `reference`, for errors.

    Raises:
        ModelRefused: This process was not forked from the script that has the object.
    """
    name = reference.removeprefix(PREFIX)
    if name not in OBJECTS:
        raise ModelRefused(
            f'{key} = "{reference}" belongs to a script: only the processes that were forked from that script have it. '
            f'Run the script again, or name something that can be imported, such as "model.py:build".'
        )
    return OBJECTS[name]


def torch_name(value: Any) -> str | None:
    """Return the public name of a class or function of torch; None if it has none."""
    name = getattr(value, "__name__", "")
    found = (f"{module}.{name}" for module in TORCH if getattr(import_module(module), name or "_", None) is value)
    return next((each for each in found if is_torch_name(each)), None)


def is_torch_name(reference: str) -> bool:
    """Return True if `reference` is a public class or function of one of `TORCH`."""
    module, _, name = reference.rpartition(".")
    if module not in TORCH or name.startswith("_"):
        return False
    value = getattr(import_module(module), name, None)
    return callable(value) and (getattr(value, "__module__", None) or "").split(".")[0] == "torch"


def defines(module: Any, name: str) -> bool:
    """Return True if `module` itself defines the class or function that it has under `name`.

    A function of another module that it imports does not count.
    """
    value = getattr(module, name, None)
    return (
        callable(value)
        and getattr(value, "__module__", None) == module.__name__
        and getattr(value, "__qualname__", None) == name
    )
