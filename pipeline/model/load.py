"""Loading of what the plan names: objects from the user's own files, or by dotted names.

User code is loaded by file path under a module name of its own, so that a user's `pipeline.py` never shadows another
module. Its folder comes last on the import path, so that the file can import its neighbours.
"""

import importlib.util
import os
import sys
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from stageline.pipeline.data import Source
from stageline.pipeline.data.loader import Loader
from stageline.pipeline.data.source import OwnTargets
from stageline.pipeline.errors import DataError, ModelRefused, describe_error, raised_by_user_code
from stageline.pipeline.feature import Feature, FeatureRefused, demand_hooks, naming, ordered
from stageline.pipeline.features import BUILT_IN
from stageline.pipeline.model_names import near
from stageline.pipeline.plan import Plan, PlanError, PlanRefused

from .consent import opened, spec_of_file
from .object_names import is_of_script, script_object

_LISTED = 12  # names in an error


def factory_of(plan: Plan) -> Callable[[], Any]:
    """Return a function that calls the plan's factory with its options.

    Raises:
        ModelRefused: The factory cannot be loaded. The returned function raises it if the factory fails.
    """
    factory = load_object(plan.model.factory, base_folder(plan), "model.factory")
    return partial(call, factory, f'model.factory = "{plan.model.factory}"', **plan.model.options)


def load_object(reference: str, base: Path, key: str) -> Any:
    """Import the object `file.py:name` or `package.module.name`, or return the object `script:name`.

    An object of a script is there already: this process was forked from the script.

    Args:
        reference: The name of the object.
        base: Folder that the file is relative to.
        key: The plan's key that holds `reference`, for errors.

    Raises:
        ModelRefused: There is no such object, its file or module cannot be loaded, or loading it has changed torch's
            default device.
    """
    if is_of_script(reference):
        return script_object(reference, key)
    where, colon, name = reference.rpartition(":")
    if not colon:
        where, _, name = reference.rpartition(".")
    if not where or not name:
        raise ModelRefused(f'{key} = "{reference}" names nothing. Write "file.py:name" or "package.module.name".')
    if name == "py":
        raise ModelRefused(f'{key} = "{reference}" is a file: write "{reference}:NAME" for a NAME in it.')
    if colon:
        module = _load_file(base / where, key, reference)
    else:
        module = call(partial(importlib.import_module, where), f'{key} = "{reference}": cannot import {where}')
    if not hasattr(module, name):
        raise ModelRefused(f'{key} = "{reference}": {where} has no {name!r}. {_callables(module, name)}')
    demand_default_device(f'{key} = "{reference}"')
    return getattr(module, name)


def _callables(module: ModuleType, name: str) -> str:
    """Return text that lists what `module` has to call: all names, or the nearest to `name` where there are many."""
    there = sorted(each for each, value in vars(module).items() if callable(value) and not each.startswith("_"))
    if len(there) > _LISTED:
        return f"Its names include {near(name, there)}."
    return f"It has: {', '.join(there) or 'nothing to call'}."


def call(function: Callable[..., Any], key: str, **options: Any) -> Any:
    """Call a user's factory and return what it makes.

    Args:
        function: The factory.
        key: The plan's key and value that name it, for errors.
        **options: Keyword arguments for the factory.

    Raises:
        ModelRefused: The factory raises anything, and the error names the user's line; or it has changed torch's
            default device.
    """
    try:
        made = function(**options)
    except BaseException as error:  # user code may raise anything; the cause is chained
        if not raised_by_user_code(error):
            raise
        raise ModelRefused(f"{key}: {describe_error(error)}") from error
    demand_default_device(key)
    return made


def demand_default_device(of: str) -> None:
    """Raise `ModelRefused` if user code, which `of` names, has changed torch's default device.

    The memory for messages and snapshots would be made on that device too.
    """
    if (device := torch.get_default_device()).type != "cpu":
        raise ModelRefused(
            f"{of}: torch's default device is {device.type} afterwards (torch.set_default_device), where messages "
            f'cannot be received. Use "with torch.device(...):" around what is to be made there; stages compute where '
            f"workers.N.device says"
        )


def load_function(reference: str, base: Path, key: str) -> Callable[..., Any]:
    """Import a function, or make an object of a class such as `torch.nn.BCELoss`.

    Args:
        reference: The name of the function or class, as `load_object` takes it.
        base: Folder that files are relative to.
        key: The plan's key that holds `reference`, for errors.

    Raises:
        ModelRefused: The object cannot be loaded, or cannot be called.
    """
    found = load_object(reference, base, key)
    made = call(found, key) if isinstance(found, type) else found
    if not callable(made):
        raise ModelRefused(f'{key} = "{reference}" is of type {type(made).__name__}, which cannot be called')
    return made  # type: ignore[no-any-return]


def load_features(plan: Plan) -> list[Feature]:
    """Make the plan's features, in their order.

    Raises:
        ModelRefused: A feature cannot be loaded or made.
        FeatureRefused: The features cannot be in this order, one has a built-in's name, or a hook is misspelled.
    """
    return ordered([_load_feature(plan, reference) for reference in plan.features], BUILT_IN)


def _load_feature(plan: Plan, reference: str) -> Feature:
    found = load_object(reference, base_folder(plan), "features")
    made = found if isinstance(found, Feature) else call(found, f'features = ["{reference}"]')
    if not isinstance(made, Feature):
        raise ModelRefused(
            f'features = ["{reference}"] is of type {type(made).__name__}; expected a subclass of '
            f"stageline.Feature, an "
            f"object of one, or a function that returns one"
        )
    demand_hooks(made)
    if made.name in BUILT_IN:
        raise FeatureRefused(f"the feature {made.name} has the name of one of stageline's own; give it another name")
    return made


def demand_features(plan: Plan) -> None:
    """Raise `PlanRefused` if a feature of the plan refuses the plan. Raises what `load_features` raises, too."""
    wrong: list[PlanError] = []
    for feature in load_features(plan):
        with naming(feature, "refuses()"):
            wrong += feature.refuses(plan)
    if wrong:
        raise PlanRefused(wrong)


def load_source(plan: Plan) -> Source:
    """Make the plan's data source; with `data.targets`, one that takes its targets from a second source.

    Raises:
        ModelRefused: A source cannot be made, or does not implement `Source`.
    """
    inputs = load_inputs(plan)
    if plan.data.targets is None:
        return inputs
    try:
        return OwnTargets(inputs, load_targets(plan))
    except DataError as error:
        raise ModelRefused(f'data.targets = "{plan.data.targets}": {error}') from error


def load_inputs(plan: Plan) -> Source:
    """Make the source of the first stage's inputs. Raises `ModelRefused` if it fails or is no `Source`."""
    data = plan.data
    if data.dataset is not None:
        return opened(plan, [data.dataset, data.held_out], partial(_load_loader, plan))
    return opened(plan, [data.source], partial(_load_source, plan, "data.source", data.source or ""))


def load_targets(plan: Plan) -> Source:
    """Make the source that `data.targets` names. Raises `ModelRefused` if it fails or is no `Source`."""
    reference = plan.data.targets
    return opened(plan, [reference], partial(_load_source, plan, "data.targets", reference or ""))


def _load_source(plan: Plan, name: str, reference: str) -> Source:
    key = f'{name} = "{reference}"'
    factory = load_object(reference, base_folder(plan), name)
    source = call(factory, key, batch_size=plan.data.batch_size, seed=plan.run.seed, **plan.data.options)
    if not all(hasattr(source, name) for name in ("batch", "held_out", "steps_per_epoch")):
        dataset = ': for a Dataset, write dataset = "..." instead' if hasattr(source, "__getitem__") else ""
        raise ModelRefused(
            f"{key} returned an object of type {type(source).__name__}; expected an object with batch(step), "
            f"held_out() and steps_per_epoch, such as stageline.Rows(inputs, targets, batch_size, seed){dataset}"
        )
    steps = call(lambda: source.steps_per_epoch, f"{key}: steps_per_epoch")
    if not isinstance(steps, int) or steps < 1:
        raise ModelRefused(f"{key}: steps_per_epoch is {steps!r}; expected a whole number of at least 1")
    call(source.held_out, f"{key}: held_out()")
    return source  # type: ignore[no-any-return]  # its attributes were checked above


def _load_loader(plan: Plan) -> Loader:
    """Return the plan's datasets as a source. Raises `ModelRefused`."""
    data, base = plan.data, base_folder(plan)
    target, collate = data.target, data.collate
    function = isinstance(target, str) and is_reference(target)
    try:
        return Loader(
            _load_dataset(plan, "dataset", data.dataset),
            data.batch_size,
            plan.run.seed,
            collate_fn=None if collate is None else load_function(collate, base, "data.collate"),
            num_workers=data.num_workers or 0,
            target=load_function(str(target), base, "data.target") if function else target,
            shuffle=data.shuffle is not False,
            drop_last=data.drop_last is True,
            held_out=_load_dataset(plan, "held_out", data.held_out),
        )
    except DataError as error:
        raise ModelRefused(f"{data.origin}: {error}") from error


def _load_dataset(plan: Plan, name: str, reference: str | None) -> Any:
    """Return a dataset, or what a function or class returns when it is called with `data.options`."""
    if reference is None:
        return None
    key = f'data.{name} = "{reference}"'
    found = load_object(reference, base_folder(plan), f"data.{name}")
    if isinstance(found, type) or not hasattr(found, "__getitem__"):
        return call(found, key, **plan.data.options)
    if plan.data.options:
        raise ModelRefused(
            f"{key} is of type {type(found).__name__}, which takes no data.options: leave them out, or name what "
            f"makes it"
        )
    return found


def code_of(plan: Plan) -> list[str]:
    """Return what `load_object` executes for `plan`, each once: files by absolute path, modules by name.

    Objects of a script are left out, since they are there already.
    """
    found = (
        str((base_folder(plan) / file).resolve()) if colon else reference.rpartition(".")[0]
        for _, reference in references_of(plan)
        if not is_of_script(reference)
        for file, colon, _ in [reference.rpartition(":")]
    )
    return list(dict.fromkeys(found))


def references_of(plan: Plan) -> list[tuple[str, str]]:
    """Return each key of `plan` that names an object for `load_object`, with the name."""
    data, scheduler = plan.data, plan.lr_scheduler
    target = data.target if isinstance(data.target, str) and is_reference(data.target) else None
    named = [
        ("model.factory", plan.model.factory),
        ("model.loss", plan.model.loss),
        *(("model.metrics", metric) for metric in plan.model.metrics),
        ("data.source", data.source),
        ("data.targets", data.targets),
        ("data.dataset", data.dataset),
        ("data.held_out", data.held_out),
        ("data.target", target),
        ("data.collate", data.collate),
        ("optimizer.factory", plan.optimizer.factory),
        ("lr_scheduler.factory", None if scheduler is None else scheduler.factory),
        *(("features", feature) for feature in plan.features),
    ]
    return [(key, reference) for key, reference in named if reference is not None]


def is_reference(text: str) -> bool:
    """Return True if `text`, which may name something else too, names an object in a file or a package."""
    return ":" in text or "." in text


def base_folder(plan: Plan) -> Path:
    """Return the folder that file names in the plan are relative to: the plan file's, or the current one."""
    return plan.file.parent if plan.file else Path()


def _python_files(folder: Path) -> str:
    there = sorted(each.name for each in folder.glob("*.py"))[:_LISTED]
    return f". That folder has {', '.join(there)}" if there else ""


def _load_file(path: Path, key: str, reference: str) -> ModuleType:
    resolved = path.resolve()
    name = f"stageline_user_{sha256(os.fsencode(resolved)).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    if not resolved.is_file():
        raise ModelRefused(f'{key} = "{reference}": there is no file {path}{_python_files(path.parent)}')
    if (folder := str(resolved.parent)) not in sys.path:
        sys.path.append(folder)
    spec = spec_of_file(name, resolved)
    if spec is None or spec.loader is None:
        raise ModelRefused(f"{key}: {path} is not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # user code may raise anything; the cause is chained
        del sys.modules[name]
        if not raised_by_user_code(error):
            raise
        raise ModelRefused(f"{key}: {path} could not be loaded: {describe_error(error)}") from error
    return module
