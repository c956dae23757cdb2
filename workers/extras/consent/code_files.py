"""Files of code that a plan imports: those that it names, and the user's files that these import; none is executed.

    data.source = "data.py:batches"   ->   data.py   ->   import helper   ->   helper.py   ->   torch: not the user's

Where an import is not found by reading, as one by a name that is computed, the file is missing here, and `ListedLoader`
refuses it when it is imported.
"""

import ast
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from itertools import accumulate
from pathlib import Path
from types import CodeType, ModuleType

from stageline.pipeline.code_lines import is_stagelines, is_users
from stageline.pipeline.model.load import base_folder, references_of
from stageline.pipeline.plan import Plan

Demand = Callable[[Path, bytes], None]  # raises an error unless the file with this content may be executed
Import = tuple[str, Sequence[str]]  # name of a module, and the folders in which it is looked for


@dataclass(frozen=True, slots=True)
class CodeFile:
    """File of code with its SHA-256 (hex), None if it cannot be read."""

    path: Path
    sha256: str | None


def code_files(plan: Plan) -> dict[str, CodeFile]:
    """Return the user's files that `plan` imports, by name: paths from the plan's folder, if they are in there."""
    folder = base_folder(plan).resolve()
    found: dict[Path, CodeFile] = {}
    waiting = [*_named_by(plan, folder)]
    while waiting:
        path = waiting.pop().resolve()
        if path not in found:
            content = _content(path)
            found[path] = CodeFile(path, None if content is None else sha256(content).hexdigest())
            waiting += _imported_by(path, content or b"", folder)
    names = {_name(path, folder): file for path, file in found.items()}
    return dict(sorted(names.items()))


def _name(path: Path, folder: Path) -> str:
    return (path.relative_to(folder) if path.is_relative_to(folder) else path).as_posix()


def _content(path: Path) -> bytes | None:
    with suppress(OSError, ValueError):
        return path.read_bytes()
    return None


def _named_by(plan: Plan, folder: Path) -> Iterator[Path]:
    """Yield the files in which the objects are that `plan` names."""
    for _, reference in references_of(plan):
        where, colon, _ = reference.rpartition(":")
        if not colon:
            yield from _files_of((reference.rpartition(".")[0], [*sys.path, str(folder)]), folder)
        elif where.endswith(".py"):
            yield folder / where


def _imported_by(file: Path, content: bytes, folder: Path) -> Iterator[Path]:
    """Yield the user's files that `file` imports anywhere in it; nothing if it is no Python, which its import tells."""
    with suppress(SyntaxError, ValueError, RecursionError, LookupError):
        for node in ast.walk(ast.parse(content)):
            for each in _imports(node, file.parent, folder):
                yield from _files_of(each, folder)


def _imports(node: ast.AST, here: Path, folder: Path) -> Iterator[Import]:
    match node:
        case ast.Import(names):
            yield from ((each.name, [*sys.path, str(folder), str(here)]) for each in names)
        case ast.ImportFrom(module, names, level):
            around = [str([here, *here.parents][level - 1])] if level else [*sys.path, str(folder), str(here)]
            yield from ((f"{module}.{each.name}" if module else each.name, around) for each in names)


def _files_of(each: Import, folder: Path) -> Iterator[Path]:
    """Yield the user's files that an import executes, packages first; what is no module ends it."""
    name, path = each
    for part in accumulate(name.split("."), "{}.{}".format):
        spec = _spec(part, path)
        if spec is None:
            return
        if spec.origin is not None and is_own(spec.origin, folder):
            yield Path(spec.origin)
        path = [*(spec.submodule_search_locations or ())]


def _spec(name: str, path: Sequence[str]) -> ModuleSpec | None:
    with suppress(ImportError, ValueError, AttributeError):
        return PathFinder.find_spec(name, path)
    return None


def is_own(file: str, folder: Path) -> bool:
    """Return True if `file` is the user's code. In the plan's `folder`, one in a site-packages is the user's, too."""
    path = Path(file).resolve()
    if is_users(str(path)):
        return True
    installed = any(path.is_relative_to(each) for each in _installed())
    return path.is_relative_to(folder) and not installed and not is_stagelines(str(path))


@cache
def _installed() -> tuple[Path, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple(Path(sysconfig.get_path(name)).resolve() for name in names)


class ListedLoader(SourceFileLoader):
    """Loader that executes the text of a file only after `demand` has seen it. Bytecode beside the file is not used."""

    def __init__(self, name: str, path: str, demand: Demand) -> None:
        """Create the loader of the module `name`, whose file is `path`."""
        super().__init__(name, path)
        self._demand = demand

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the module. Raises what `demand` raises."""
        content = self.get_data(self.path)
        self._demand(Path(self.path), content)
        made: CodeType = self.source_to_code(content, self.path)
        return made


class ListedFinder(MetaPathFinder):
    """Finder that gives the user's modules a `ListedLoader`, and leaves all others to the finders after it."""

    def __init__(self, folder: Callable[[], Path], demand: Demand) -> None:
        """Create the finder.

        Args:
            folder: Returns the folder of the plan.
            demand: Raises an error unless a file may be executed.
        """
        self._folder, self._demand = folder, demand

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of the user; None for any other."""
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin is None or not is_own(spec.origin, self._folder()):
            return None
        if isinstance(spec.loader, SourceFileLoader):
            loader = ListedLoader(name, spec.origin, self._demand)
            inside = spec.submodule_search_locations
            return spec_from_file_location(name, spec.origin, loader=loader, submodule_search_locations=inside)
        self._demand(Path(spec.origin), _content(Path(spec.origin)) or b"")  # compiled
        return spec
