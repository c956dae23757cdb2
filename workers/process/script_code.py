"""Code of a script that workers on other machines import: the same files, compared before any is imported.

This machine imports only what its own folder has, too, and public names of torch. Before any import, every file
must be there with the script's content, and Python must find every name in one of these files. Afterwards, every module
must come from its file, and every name must be a class or function that its module itself defines: `model.system` is
refused also where model.py imports it from `os`.
"""

import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    PathFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from pathlib import Path, PurePosixPath

import torch

from stageline.broker.coordinator.run import ScriptCode
from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model.load import load_object, references_of
from stageline.pipeline.model.object_names import defines, is_torch_name
from stageline.pipeline.plan import Plan
from stageline.pipeline.plan.keys.models import SCRIPT_BATCHES
from stageline.workers.runs.records import hashes_of, public_version

_SHOWN = 12  # digits of a hash
_LONGEST = 100  # characters of a name in a refusal
_LISTED = 5  # differences that a refusal names
_LOADERS = (  # in the order in which Python looks
    (ExtensionFileLoader, EXTENSION_SUFFIXES),
    (SourceFileLoader, SOURCE_SUFFIXES),
    (SourcelessFileLoader, BYTECODE_SUFFIXES),
)


def demand_same_code(plan: Plan, code: ScriptCode, folder: Path, host: str) -> None:
    """Import the names in `plan` from `folder`, put first on the import path, if its code on `host` equals `code`.

    Raises `ModelRefused`, which names everything that is not allowed or not the script's.
    """
    folder = folder.resolve()
    if public_version(torch.__version__) != public_version(code.torch):
        raise ModelRefused(
            f"{host} has torch {torch.__version__}, the script's machine {code.torch}: the weights could differ. "
            "Install the same version on both"
        )
    if wrong := [*_different_files(code, folder)]:
        raise ModelRefused(
            f"the code in {folder} on {host} is not the script's: {listed(wrong, '; ')}. "
            "Copy the files from the script's folder"
        )
    modules = _modules(plan, code, folder)
    if str(folder) not in sys.path[:1]:
        sys.path.insert(0, str(folder))
    for key, module, name in modules:
        load_object(f"{module}.{name}", folder, key)
        if (other := _other_file(module, [folder / file for file in _files_of(module, folder)])) is not None:
            raise _refused(key, f"{module}.{name}", f"{other} was imported, which is not the file that was compared")
        if not defines(sys.modules[module], name):
            raise _refused(key, f"{module}.{name}", f"{module} does not itself define such a class or function")


def _different_files(code: ScriptCode, folder: Path) -> Iterator[str]:
    """Yield the faults of the files in `folder`."""
    for file, wanted in code.files.items():
        try:
            wrong = _difference(file, wanted, folder)
        except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL in it, links in a circle, not readable
            wrong = f"cannot be read ({getattr(error, 'strerror', None) or type(error).__name__})"
        if wrong is not None:
            yield f"{_named(file)} {wrong}"


def _difference(file: str, wanted: str, folder: Path) -> str | None:
    """Return a file's fault, None if it has none. Raises `OSError`, `ValueError` or `RuntimeError` for a bad name."""
    path = PurePosixPath(file)
    if path.is_absolute() or ".." in path.parts or path.suffix != ".py" or (folder / file).resolve() != folder / file:
        return "leads out of the folder"
    if not (folder / file).is_file():
        return "is not there"
    if (found := hashes_of(folder, [file])[file]) != wanted:
        return f"differs (SHA-256 {found[:_SHOWN]} here, {_named(wanted[:_SHOWN])} there)"
    return None


def _named(file: str) -> str:
    """Return a name from the broker as messages show it: shortened, and quoted with escapes if not printable."""
    short = file if len(file) <= _LONGEST else f"{file[:_LONGEST]}..."
    return short if short.isprintable() and short else repr(short)


def listed(each: Sequence[str], separator: str) -> str:
    """Return the first few entries, followed by the number of the others."""
    more = f"{separator}and {len(each) - _LISTED} more" if len(each) > _LISTED else ""
    return separator.join(each[:_LISTED]) + more


def _modules(plan: Plan, code: ScriptCode, folder: Path) -> list[tuple[str, str, str]]:
    """Return key, module and name of everything to import from `folder`. Raises `ModelRefused`."""
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
                f"folder that the script has, too: {listed([*map(_named, code.files)], ', ') or 'none'}",
            )
        if (taken := _taken(module, [folder / file for file in files], folder)) is not None:
            reason = f"{taken} has that name here, as {folder / files[-1]} has; rename the file, or its folder"
            raise _refused(key, reference, reason)
        found.append((key, module, name))
    return found


def _files_of(module: str, folder: Path) -> list[str]:
    """Return the files in `folder` that an import of `module` executes, packages first; [] if there is no module."""
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
    """Return the file that importing `name` from `folder` executes, None if there is none, as for a bare package."""
    spec = FileFinder(str(folder), *_LOADERS).find_spec(name)
    return None if spec is None else spec.origin


def _taken(module: str, compared: Sequence[Path], folder: Path) -> str | None:
    """Return what Python imports under the name of `module` or its packages in place of `compared`, None if nothing."""
    top = module.split(".")[0]
    if top in sys.stdlib_module_names:
        return f"Python's own module {top}"
    if top in sys.modules and not _is_file(there := getattr(sys.modules[top], "__file__", None), compared[0]):
        return f"{there or 'a package that is loaded'}"
    found = _found(module, [str(folder), *sys.path])
    return None if _is_file(found, compared[-1]) else f"{found or 'a package elsewhere'}"


def _found(module: str, path: Sequence[str]) -> str | None:
    """Return the file that importing `module` leads to. A package without `__init__.py` comes after all others."""
    origin = None
    for name in module.split("."):
        spec = PathFinder.find_spec(name, path)
        if spec is None:
            return None
        origin, path = spec.origin, list(spec.submodule_search_locations or ())
    return origin


def _other_file(module: str, compared: Sequence[Path]) -> str | None:
    """Return the first file that `module` or its packages were imported from that was not compared, None if none is."""
    names = [module.rsplit(".", up)[0] for up in range(module.count(".") + 1)]
    own, *packages = (getattr(sys.modules[name], "__file__", None) for name in names)
    if not _is_file(own, compared[-1]):
        return own or "something without a file"
    return next((file for file in packages if file is not None and Path(file).resolve() not in compared), None)


def _is_file(found: str | None, wanted: Path) -> bool:
    return found is not None and Path(found).resolve() == wanted


def _refused(key: str, reference: str, reason: str) -> ModelRefused:
    return ModelRefused(f'{key} = "{reference}" is not imported: {reason}')
