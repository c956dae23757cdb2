"""Loads what the plan names: objects from the user's own files, or by dotted names.

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
from stageline.pipeline.feature import Feature, naming, ordered
from stageline.pipeline.features import BUILT_IN
from stageline.pipeline.model_names import near
from stageline.pipeline.plan import Plan, PlanError, PlanRefused

from .object_names import is_of_script, script_object

_LISTED = 12  # names in an error


def factory_of(plan: Plan) -> Callable[[], Any]:
    """Return a call of the plan's factory, with its options. Raises `ModelRefused`, also when it is called."""
    factory = load_object(plan.model.factory, base_folder(plan), "model.factory")
    return partial(call, factory, f'model.factory = "{plan.model.factory}"', **plan.model.options)


def load_object(reference: str, base: Path, key: str) -> Any:
    """Imports the object `file.py:name` (the file relative to the folder `base`) or `package.module.name`. What
    `script:name` names is there already: it is an object of the script that this process was forked from.

    `key` is the plan's key that holds `reference`, for errors. Raises `ModelRefused`.
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
    """What `module` has to call: all names, or where they are many, those nearest to `name`."""
    there = sorted(each for each, value in vars(module).items() if callable(value) and not each.startswith("_"))
    if len(there) > _LISTED:
        return f"Its names include {near(name, there)}."
    return f"It has: {', '.join(there) or 'nothing to call'}."


def call(function: Callable[..., Any], key: str, **options: Any) -> Any:
    """Calls a user's factory. Raises `ModelRefused`, which names the user's line, if the factory raises anything."""
    try:
        made = function(**options)
    except BaseException as error:  # user code may raise anything; the cause is chained
        if not raised_by_user_code(error):
            raise
        raise ModelRefused(f"{key}: {describe_error(error)}") from error
    demand_default_device(key)
    return made


def demand_default_device(of: str) -> None:
    """Raises `ModelRefused` if user code, which `of` names, has changed torch's default device: the memory for messages
    and snapshots would be made there too."""
    if (device := torch.get_default_device()).type != "cpu":
        raise ModelRefused(
            f"{of}: torch's default device is {device.type} afterwards (torch.set_default_device), where messages "
            f'cannot be received. Use "with torch.device(...):" around what is to be made there; stages compute where '
            f"workers.N.device says"
        )


def load_function(reference: str, base: Path, key: str) -> Callable[..., Any]:
    """Imports a function, or makes an object of a class such as `torch.nn.BCELoss`. Raises `ModelRefused`."""
    found = load_object(reference, base, key)
    made = call(found, key) if isinstance(found, type) else found
    if not callable(made):
        raise ModelRefused(f'{key} = "{reference}" is a {type(made).__name__}, which cannot be called')
    return made  # type: ignore[no-any-return]


def load_features(plan: Plan) -> list[Feature]:
    """Make the plan's features, in their order. Raises `ModelRefused`, and `FeatureRefused` for that order."""
    return ordered([_load_feature(plan, reference) for reference in plan.features], BUILT_IN)


def _load_feature(plan: Plan, reference: str) -> Feature:
    found = load_object(reference, base_folder(plan), "features")
    made = found if isinstance(found, Feature) else call(found, f'features = ["{reference}"]')
    if not isinstance(made, Feature):
        raise ModelRefused(
            f'features = ["{reference}"] is a {type(made).__name__}; expected a subclass of stageline.Feature, an '
            f"object of one, or a function that returns one"
        )
    return made


def demand_features(plan: Plan) -> None:
    """Raise `PlanRefused` for what the plan's features refuse of it, and what `load_features` raises."""
    wrong: list[PlanError] = []
    for feature in load_features(plan):
        with naming(feature, "refuses()"):
            wrong += feature.refuses(plan)
    if wrong:
        raise PlanRefused(wrong)


def load_source(plan: Plan) -> Source:
    """Makes the plan's data source; where the plan has another for targets, of both. Raises `ModelRefused` if that
    fails, or if one does not implement `Source`."""
    inputs = load_inputs(plan)
    if plan.data.targets is None:
        return inputs
    try:
        return OwnTargets(inputs, load_targets(plan))
    except DataError as error:
        raise ModelRefused(f'data.targets = "{plan.data.targets}": {error}') from error


def load_inputs(plan: Plan) -> Source:
    """Makes the source whose inputs the first stage is given. Raises `ModelRefused`, as `load_source` does."""
    if plan.data.dataset is not None:
        return _load_loader(plan)
    return _load_source(plan, "data.source", plan.data.source or "")


def load_targets(plan: Plan) -> Source:
    """Makes the source that `data.targets` names. Raises `ModelRefused`, as `load_source` does."""
    return _load_source(plan, "data.targets", plan.data.targets or "")


def _load_source(plan: Plan, name: str, reference: str) -> Source:
    key = f'{name} = "{reference}"'
    factory = load_object(reference, base_folder(plan), name)
    source = call(factory, key, batch_size=plan.data.batch_size, seed=plan.run.seed, **plan.data.options)
    if not all(hasattr(source, name) for name in ("batch", "held_out", "steps_per_epoch")):
        dataset = ': for a Dataset, write dataset = "..." instead' if hasattr(source, "__getitem__") else ""
        raise ModelRefused(
            f"{key} returned a {type(source).__name__}; expected an object with batch(step), held_out() and "
            f"steps_per_epoch, such as stageline.Rows(inputs, targets, batch_size, seed){dataset}"
        )
    steps = call(lambda: source.steps_per_epoch, f"{key}: steps_per_epoch")
    if not isinstance(steps, int) or steps < 1:
        raise ModelRefused(f"{key}: steps_per_epoch is {steps!r}; expected a whole number of at least 1")
    call(source.held_out, f"{key}: held_out()")
    return source  # type: ignore[no-any-return]  # its attributes were checked above


def _load_loader(plan: Plan) -> Loader:
    """The plan's datasets as a source. Raises `ModelRefused`."""
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
            held_out=_load_dataset(plan, "held_out", data.held_out),
        )
    except DataError as error:
        raise ModelRefused(f"{data.origin}: {error}") from error


def _load_dataset(plan: Plan, name: str, reference: str | None) -> Any:
    """A dataset, or what a function or class returns when it is called with `data.options`."""
    if reference is None:
        return None
    key = f'data.{name} = "{reference}"'
    found = load_object(reference, base_folder(plan), f"data.{name}")
    if isinstance(found, type) or not hasattr(found, "__getitem__"):
        return call(found, key, **plan.data.options)
    if plan.data.options:
        raise ModelRefused(
            f"{key} is a {type(found).__name__}, which takes no data.options: leave them out, or name what makes it"
        )
    return found


def code_of(plan: Plan) -> list[str]:
    """What `load_object` executes for `plan`, each once: files by their absolute path, modules by their name. The
    objects of a script are there already."""
    found = (
        str((base_folder(plan) / file).resolve()) if colon else reference.rpartition(".")[0]
        for _, reference in references_of(plan)
        if not is_of_script(reference)
        for file, colon, _ in [reference.rpartition(":")]
    )
    return list(dict.fromkeys(found))


def references_of(plan: Plan) -> list[tuple[str, str]]:
    """All that `plan` names for `load_object`, each with its key."""
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
    """Whether a text that may name something else too names an object in a file or a package."""
    return ":" in text or "." in text


def base_folder(plan: Plan) -> Path:
    """The folder that file names in the plan are relative to: the plan file's, or the current one."""
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
    spec = importlib.util.spec_from_file_location(name, resolved)
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
