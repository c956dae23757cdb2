"""The files of a user's folder that some modules need: their own, and those of all that their statements import.

Statements inside functions count too. What a module imports by other means is not seen.
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType

INSTALLED = ("site-packages", "dist-packages")  # folders in which packages are


def files_of(modules: Iterable[str], root: Path) -> set[str]:
    """The paths in the folder `root` of what the imported `modules` are and need; without what is installed."""
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
    """Whether it is a package's, which has a version instead of being the user's."""
    return any(part in INSTALLED for part in file.parts)


def _imports(module: ModuleType) -> Iterator[str]:
    """What its statements import, and the packages around that and around itself: names of modules, and of what is in
    modules."""
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
