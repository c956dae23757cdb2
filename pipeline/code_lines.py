"""Search for the user's line in a stack: the innermost in a file that is neither stageline's nor a library's."""

import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from traceback import walk_tb
from types import FrameType, TracebackType

from .printable import printable_line

_INSTALLED = frozenset({"site-packages", "dist-packages"})  # folders
_TYPED_IN = ("<stdin>", "<ipython-input")  # the user's code without a file; what else has no file is generated


@dataclass(frozen=True, slots=True)
class CodeLine:
    """Line of code. As text: `forward (/home/anna/net/model.py, line 12)`.

    The file has its whole path: stageline, torch and the user may each have a file of that name.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """Return function, file and line: `forward (/home/anna/net/model.py, line 12)`."""
        return f"{self.function} ({self.place})"

    @property
    def place(self) -> str:
        """File and line, in characters that any message can hold."""
        return f"{printable_line(self.file)}, line {self.line}"


def stack_of(frame: FrameType | None) -> Iterator[CodeLine]:
    """Yield the lines that a thread is in, the innermost first."""
    while frame is not None:
        yield CodeLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back


def users_line(stack: Iterable[CodeLine]) -> CodeLine | None:
    """Return the first of the user's lines in `stack`, None if it has none; `stack` begins with the innermost line."""
    return next((line for line in stack if is_users(line.file)), None)


def innermost(stack: Iterable[CodeLine]) -> CodeLine | None:
    """Return the user's innermost line, else the innermost of a library that stageline has called, else None.

    Lines that have called stageline, such as click's, are ignored: they tell nothing.
    """
    lines = list(stack)
    called = takewhile(lambda line: not is_stagelines(line.file), lines)
    return users_line(lines) or next((line for line in called if not _is_own(line.file)), None)


def raised_at(traceback: TracebackType | None) -> CodeLine | None:
    """Return the user's innermost line of those that an exception came through, None if there is none."""
    lines = [CodeLine(f.f_code.co_filename, number, f.f_code.co_name) for f, number in walk_tb(traceback)]
    return users_line(reversed(lines))


def is_stagelines(file: str) -> bool:
    """Return True if a file of code is part of stageline."""
    return file.startswith(_own_folders())


def is_users(file: str) -> bool:
    """Return True if a file of code is the user's: neither stageline's, nor Python's, nor an installed package's."""
    return not (_is_own(file) or _is_library(file))


def _is_own(file: str) -> bool:
    return file.startswith("<frozen ") or is_stagelines(file)


def _is_library(file: str) -> bool:
    if file.startswith("<"):
        return not file.startswith(_TYPED_IN)
    return file.startswith(_libraries()) or not _INSTALLED.isdisjoint(Path(file).parts)


@cache
def _own_folders() -> tuple[str, ...]:
    """Return the prefixes of the package's files: by the names they are imported by, and in the checkout."""
    package = Path(__file__).parent.parent
    return tuple(_with_links([package, *(package / top for top in ("pipeline", "broker", "workers"))]))


@cache
def _libraries() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple(_with_links(Path(sysconfig.get_path(name)) for name in names))


def _with_links(folders: Iterable[Path]) -> Iterator[str]:
    """Yield the prefixes of the names of files in `folders`, as given and with links resolved."""
    for folder in folders:
        yield from {f"{folder}/", f"{folder.resolve()}/"}
