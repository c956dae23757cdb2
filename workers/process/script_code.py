"""Which of what a script's plan names a worker on another machine may import: nothing but what its own folder has, too.

Before anything is imported, every file must be there with the content that the script has, and every name must lead to
one of these files, or be a public one of torch. Afterwards, every name must be a class or function that its module
itself defines: `model.system` is refused also where model.py imports it from `os`.
"""

import sys
from collections.abc import Iterator
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from pathlib import Path, PurePosixPath

import torch

from stageline.broker.coordinator.run import ScriptCode
from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model.load import load_object, references_of
from stageline.pipeline.model.names import defines, is_torch_name
from stageline.pipeline.plan import Plan
from stageline.pipeline.plan.models import SCRIPT_BATCHES
from stageline.workers.runs.code import hashes_of, public_version

_SHOWN = 12  # digits of a hash
_LOADERS = (  # in the order in which Python looks
    (ExtensionFileLoader, EXTENSION_SUFFIXES),
    (SourceFileLoader, SOURCE_SUFFIXES),
    (SourcelessFileLoader, BYTECODE_SUFFIXES),
)


def demand_same_code(plan: Plan, code: ScriptCode, folder: Path, host: str) -> None:
    """Imports what `plan` names from `folder`, which comes first on the import path, if that is allowed and the code
    there, on `host`, is the script's `code`. Raises `ModelRefused`, which names all that is not."""
    folder = folder.resolve()
    if public_version(torch.__version__) != public_version(code.torch):
        raise ModelRefused(
            f"{host} has torch {torch.__version__}, the script's machine {code.torch}: the weights could differ. "
            "Install the same version on both"
        )
    if wrong := [*_different_files(code, folder)]:
        raise ModelRefused(
            f"the code in {folder} on {host} is not the script's: {'; '.join(wrong)}. "
            "Copy the files from the script's folder"
        )
    modules = _modules(plan, code, folder)
    if str(folder) not in sys.path[:1]:
        sys.path.insert(0, str(folder))
    for key, module, name in modules:
        load_object(f"{module}.{name}", folder, key)
        if not defines(sys.modules[module], name):
            raise _refused(key, f"{module}.{name}", f"{module} does not itself define such a class or function")


def _different_files(code: ScriptCode, folder: Path) -> Iterator[str]:
    """What is wrong with the files in `folder`."""
    for file, wanted in code.files.items():
        path = PurePosixPath(file)
        if (
            path.is_absolute()
            or ".." in path.parts
            or path.suffix != ".py"
            or (folder / file).resolve() != folder / file
        ):
            yield f"{file} leads out of the folder"
        elif not (folder / file).is_file():
            yield f"{file} is not there"
        elif (found := hashes_of(folder, [file])[file]) != wanted:
            yield f"{file} differs (SHA-256 {found[:_SHOWN]} here, {wanted[:_SHOWN]} there)"


def _modules(plan: Plan, code: ScriptCode, folder: Path) -> list[tuple[str, str, str]]:
    """Key, module and name of all that is to be imported from `folder`. Raises `ModelRefused`."""
    found = []
    for key, reference in references_of(plan):
        if (key, reference) == ("data.source", SCRIPT_BATCHES) or is_torch_name(reference):
            continue
        module, _, name = reference.rpartition(".")
        files = [] if ":" in reference else _files_of(module, folder)
        if not files or not set(files) <= code.files.keys():
            raise _refused(
                key,
                reference,
                "a worker that joins a script imports public names of torch, and names in those files of its own "
                f"folder that the script has, too: {', '.join(code.files) or 'none'}",
            )
        if (taken := _taken(module.split(".")[0], folder)) is not None:
            raise _refused(key, reference, f"{taken} has that name here; rename the file, or its folder")
        found.append((key, module, name))
    return found


def _files_of(module: str, folder: Path) -> list[str]:
    """The paths in `folder` of the files that an import of `module` would execute, its packages' first; [] if there is
    no such module."""
    found, where = [], folder
    *packages, last = module.split(".")
    for package in packages:
        origin = _origin(package, where)
        where = where / package
        found += [] if origin is None else [origin]
    origin = _origin(last, where)
    files = [*found, origin] if origin is not None else []
    return [Path(file).relative_to(folder).as_posix() for file in files]


def _origin(name: str, folder: Path) -> str | None:
    """The file that an import of `name` from `folder` executes; None for a package that has none, or nothing."""
    spec = FileFinder(str(folder), *_LOADERS).find_spec(name)
    return None if spec is None else spec.origin


def _taken(top: str, folder: Path) -> str | None:
    """What this process has imported, or builtin, under the name `top`, from elsewhere than `folder`."""
    if top in sys.stdlib_module_names:
        return f"Python's own module {top}"
    there = getattr(sys.modules.get(top), "__file__", None)
    if top not in sys.modules or (there is not None and Path(there).is_relative_to(folder)):
        return None
    return f"{there or 'a package that is loaded'}"


def _refused(key: str, reference: str, reason: str) -> ModelRefused:
    return ModelRefused(f'{key} = "{reference}" is not imported: {reason}')
