"""A script's model and functions by names that other machines can import, and the files that they are in.

build                         "model.build"
partial(SGD, lr=0.1)          "torch.optim.SGD" and {"lr": 0.1}
a module, lambda, closure     refused: nothing is pickled
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import torch

from stageline.broker.coordinator.run import ScriptCode
from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model.families.layers import Layers
from stageline.pipeline.model.object_names import defines, torch_name
from stageline.workers.runs.notes import hashes_of

from .import_graph import files_of, is_installed

_FUNCTIONS = {  # of torch's losses, by their classes
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "L1Loss": "l1_loss",
    "MSELoss": "mse_loss",
    "NLLLoss": "nll_loss",
}
_WAY_OUT = (
    "The workers on other machines import it by its name: put a function into a file beside the script that they have "
    "too, such as model.py, and pass that one"
)


@dataclass(frozen=True, slots=True)
class Named:
    """How a plan names an object, and the keyword arguments that it is called with."""

    reference: str
    options: Mapping[str, object]

    @property
    def table(self) -> dict[str, object]:
        """As the plan's tables of factories have it."""
        return {**self.options, "factory": self.reference}


def named(argument: str, value: Any, *, factory: bool = True) -> Named:
    """The name of `value`, which `Line` was given as `argument`; one that is no `factory` has neither options nor a
    class. Raises `ModelRefused`."""
    if isinstance(value, partial):
        inner = named(argument, value.func, factory=factory)
        if reason := _unfit(value, inner, factory=factory):
            raise _refused(argument, value, reason)
        return Named(inner.reference, {**inner.options, **value.keywords})
    if reason := _nameless(value, factory=factory):
        raise _refused(argument, value, reason)
    return Named(torch_name(value) or f"{value.__module__}.{value.__name__}", {})


def code_of_names(names: Iterable[Named]) -> ScriptCode:
    """Of the modules that `names` are in, and of all that those import from their folder. Raises `ModelRefused` if they
    are in several folders."""
    modules = {name.reference.rpartition(".")[0] for name in names if not name.reference.startswith("torch.")}
    roots = {_root(sys.modules[module]) for module in modules}
    if len(roots) > 1:
        folders = " and ".join(sorted(map(str, roots)))
        raise ModelRefused(
            f"the modules {', '.join(sorted(modules))} are in {folders}: the workers on other machines have one folder "
            "with all of them. Put them beside the script"
        )
    root = next(iter(roots), Path.cwd())
    return ScriptCode(str(torch.__version__), hashes_of(root, files_of(modules, root)))


def _nameless(value: Any, *, factory: bool) -> str:
    """Why no other machine could import `value`; "" if it could."""
    if torch_name(value) is not None and (factory or not isinstance(value, type)):
        return ""
    if isinstance(value, torch.nn.Module | Layers | list | tuple):
        return _of_object(value, factory=factory)
    if isinstance(value, MethodType):
        return "it is a method of an object, which has no name"
    name, module = getattr(value, "__qualname__", None), getattr(value, "__module__", None)
    if not name or not module:
        return f"an object of {type(value).__name__} has no name"
    if isinstance(value, type) and not factory:
        return "it is a class; expected a function of (outputs, targets)"
    if "<lambda>" in name:
        return "a lambda has no name"
    if "." in name:
        return "it is defined inside a function or a class"
    if module in ("__main__", "__mp_main__"):
        return "it is defined in the script itself, which the other machines do not import"
    return _unimportable(sys.modules.get(module), name)


def _of_object(value: object, *, factory: bool) -> str:
    kind = type(value).__name__
    if factory:
        return f"a model object, here an object of {kind}, cannot be sent; give the function that makes it"
    function = _FUNCTIONS.get(kind, "cross_entropy")
    return f"an object of {kind} has no name; give a function, such as nn.functional.{function}"


def _unimportable(module: ModuleType | None, name: str) -> str:
    """Why `name` could not be imported from `module` elsewhere; "" if it could."""
    if module is None or not defines(module, name):
        return f"its module has something else under the name {name}"
    file = Path(getattr(module, "__file__", None) or "").absolute()
    if file.suffix != ".py":
        return f"its module, {module.__name__}, is no Python file"
    if is_installed(file):
        return f"its module, {module.__name__}, is an installed package, whose version is not compared"
    wanted = module.__name__.replace(".", "/")
    if file.with_suffix("").as_posix().removesuffix("/__init__").endswith(f"/{wanted}"):
        return ""
    return f"its module, {module.__name__}, was not imported by that name from {file}"


def _unfit(value: "partial[Any]", inner: Named, *, factory: bool) -> str:
    """Why a plan cannot say with which arguments `value` calls; "" if it can."""
    if value.args:
        return "its partial has arguments without names; write them as name=value"
    if value.keywords and not factory:
        return "a partial of it has arguments, which cannot be sent"
    if "factory" in value.keywords:
        return "its partial has an argument named factory, which is a key of the plan"
    of_torch = inner.reference.startswith("torch.")
    wrong = [name for name, argument in value.keywords.items() if not _is_plain(argument, tuples=of_torch)]
    if wrong:
        kind = type(value.keywords[wrong[0]]).__name__
        return f"the argument {wrong[0]} of its partial is a {kind}; numbers, texts, lists and dicts can be sent"
    return ""


def _is_plain(value: object, *, tuples: bool) -> bool:
    """Whether it arrives as it is; where `tuples` may, as lists."""
    match value:
        case bool() | int() | float() | str():
            return type(value) in (bool, int, float, str)
        case tuple() if not tuples:
            return False
        case list() | tuple():
            return all(_is_plain(each, tuples=tuples) for each in value)
        case dict():
            return all(isinstance(name, str) and _is_plain(each, tuples=tuples) for name, each in value.items())
        case _:
            return False


def _refused(argument: str, value: object, reason: str) -> ModelRefused:
    shown = getattr(value, "__qualname__", None) or type(value).__name__
    return ModelRefused(f"{argument} ({shown}) cannot be sent to workers on other machines: {reason}. {_WAY_OUT}")


def _root(module: ModuleType) -> Path:
    """The folder from which `module` is imported by its name."""
    file = Path(str(module.__file__)).absolute()
    depth = module.__name__.count(".") + (file.name == "__init__.py")
    return file.parents[depth]
