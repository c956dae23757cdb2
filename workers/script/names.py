"""A script's model and functions by names that other machines can import, and the files that they are in.

build                         "model.build"
partial(SGD, lr=0.1)          "torch.optim.SGD" and {"lr": 0.1}
a module, lambda, closure     refused: nothing is pickled

The plan of such a run names them, and `ScriptCode` has the user's files that they need: their own, and those of all
that statements in these import, also inside functions. Imports by other means are not seen.
"""

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import resolve_name
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import torch

from stageline.broker.coordinator.run import ScriptCode
from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.feature import Feature
from stageline.pipeline.model.layered.layers import Layers
from stageline.pipeline.model.object_names import defines, torch_name
from stageline.workers.runs.records import hashes_of

from .arguments import FeatureMaker, LineOptions, Model
from .checks import check_address, queues_beside

INSTALLED = ("site-packages", "dist-packages")  # folders in which packages are
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


def files_of(modules: Iterable[str], root: Path) -> set[str]:
    """Return the paths of the files that define the imported `modules`, and of all files that these import.

    Paths are relative to the folder `root`; files outside it and installed packages are left out.
    """
    found: dict[str, ModuleType] = {}
    left = list(modules)
    while left:
        name = left.pop()
        module = sys.modules.get(name)
        if name not in found and module is not None and _is_in(root, module):
            found[name] = module
            left += _imports(module)
    return {_file(module).relative_to(root).as_posix() for module in found.values()}


def is_installed(file: Path) -> bool:
    """Return True if `file` belongs to an installed package, which has a version, and not to the user."""
    return any(part in INSTALLED for part in file.parts)


def _imports(module: ModuleType) -> Iterator[str]:
    """Yield the names that `module` imports, and all packages around these and around itself.

    A name may be a module's, or that of an object in a module.
    """
    for name in (module.__name__, *_named(module)):
        parts = name.split(".")
        yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _named(module: ModuleType) -> Iterator[str]:
    package = module.__package__ or ""
    for node in ast.walk(ast.parse(_file(module).read_bytes())):
        match node:
            case ast.Import(names=names):
                yield from (each.name for each in names)
            case ast.ImportFrom(module=source, names=names, level=level):
                base = resolve_name("." * level + (source or ""), package) if level else str(source)
                yield from (f"{base}.{each.name}" for each in names)


def _is_in(root: Path, module: ModuleType) -> bool:
    file = _file(module)
    return file.suffix == ".py" and file.is_relative_to(root) and not is_installed(file)


def _file(module: ModuleType) -> Path:
    return Path(getattr(module, "__file__", None) or "").absolute()


@dataclass(frozen=True, slots=True)
class Named:
    """Name of an object in a plan, and the keyword arguments that it is called with."""

    reference: str
    options: Mapping[str, object]

    @property
    def table(self) -> dict[str, object]:
        """Entry in the plan's tables of factories."""
        return {**self.options, "factory": self.reference}


def named(argument: str, value: Any, *, factory: bool = True) -> Named:
    """Return the name of `value`, which is the `Line` argument `argument`. Raises `ModelRefused` if it has none.

    Args:
        argument: Name of the argument, for errors.
        value: Function, class, or partial of one.
        factory: True if a plan calls `value` with options. Otherwise it may be neither a class nor have options.
    """
    if isinstance(value, partial):
        inner = named(argument, value.func, factory=factory)
        if reason := _unfit(value, inner, factory=factory):
            raise _refused(argument, value, reason)
        return Named(inner.reference, {**inner.options, **value.keywords})
    if reason := _nameless(value, factory=factory):
        raise _refused(argument, value, reason)
    return Named(torch_name(value) or f"{value.__module__}.{value.__name__}", {})


def code_of_names(names: Iterable[Named]) -> ScriptCode:
    """Return the code of the modules that define `names`, and of all that these import from their folder.

    Raises `ModelRefused` if the modules are in several folders.
    """
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
    """Return why no other machine could import `value`; "" if it could."""
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
    """Return why `name` could not be imported from `module` elsewhere; "" if it could."""
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
    """Return why the arguments of the partial `value` cannot be written into a plan; "" if they can."""
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
    """Return True if a plan carries `value` unchanged; with `tuples`, a tuple may arrive as a list."""
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
    """Return the folder from which `module` is imported by its name."""
    file = Path(str(module.__file__)).absolute()
    depth = module.__name__.count(".") + (file.name == "__init__.py")
    return file.parents[depth]


@dataclass(frozen=True, slots=True)
class RemotePlan:
    """Keys of the plan that differ from a run on this machine, by table, and the code of the objects that they name."""

    tables: Mapping[str, object]
    code: ScriptCode


def remote_plan(model: Model, options: LineOptions, broker: str) -> RemotePlan:
    """Return the plan of a run whose workers find the broker at `broker`.

    Args:
        model: Model of the line.
        options: Other arguments of the line.
        broker: Address that workers on other machines dial.

    Raises:
        ModelRefused: An object has no name that can be sent.
        ValueError: Other machines cannot dial the address.
    """
    check_address(broker)
    features = [_named_feature(place, each) for place, each in enumerate(options.features)]
    factory = named("model", model)
    loss = named("loss", options.loss, factory=False)
    metrics = [named("metrics", metric, factory=False) for metric in options.metrics]
    optimizer = named("optimizer", options.optimizer)
    scheduler = None if options.lr_scheduler is None else named("lr_scheduler", options.lr_scheduler)
    tables: dict[str, object] = {
        "model": {
            "factory": factory.reference,
            "options": factory.options,
            "loss": loss.reference,
            "metrics": [metric.reference for metric in metrics],
        },
        "optimizer": optimizer.table,
        "broker": {"url": broker},
        "queues": {"url": queues_beside(broker)},
    }
    if scheduler is not None:
        tables["lr_scheduler"] = scheduler.table
    if features:
        tables["features"] = [each.reference for each in features]
    names = [factory, loss, optimizer, *metrics, *features, *([] if scheduler is None else [scheduler])]
    return RemotePlan(tables, code_of_names(names))


def _named_feature(place: int, feature: FeatureMaker) -> Named:
    """Return the name of a feature's class, or of the function that makes it. Raises `ModelRefused`."""
    argument = f"features[{place}]"
    if isinstance(feature, Feature):
        kind = type(feature).__name__
        reason = f"an object of {kind} has no name; give the class {kind} itself, or a function that makes the object"
        raise _refused(argument, feature, reason)
    found = named(argument, feature)
    if found.options:
        raise _refused(argument, feature, "a plan has no arguments for it; give a function that makes the object")
    return found
