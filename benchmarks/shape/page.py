"""The tables of ARCHITECTURE.md that are made of the code: each stands between two marks.

    <!-- shape: rooms -->           every room with the first line of its docstring, by the ladder of test_layering.py
    <!-- shape: microbatch -->      the files that a microbatch passes, in this order, with the first line of each
    <!-- shape: heartbeat -->       the files that a heartbeat passes, likewise
    <!-- end -->

A first line is read from the code at once; which files there are on a way, only a traced run can tell.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

PAGE, LADDER = "ARCHITECTURE.md", "tests/test_layering.py"
WITHOUT_DOCSTRING = {"workers/cli/templates": "Files that `stageline init` writes."}

_BLOCK = re.compile(r"(<!-- shape: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_ROW = re.compile(r"^\| \d+ \| `([^`]+)`", re.MULTILINE)


def written(text: str, root: Path, ways: Mapping[str, Sequence[str]]) -> str:
    """Return `text` of the page with tables made of the code at `root`; `ways` has the files of each way, in order."""
    tables = {"rooms": _rooms(root)} | {kind: _way(root, files) for kind, files in ways.items()}
    return _BLOCK.sub(lambda block: block[1] + _lines(tables[block[2]]) + block[3], text)


def listed(text: str) -> dict[str, list[str]]:
    """Return the files of each way that `text` of the page lists, in its order."""
    return {block[2]: _ROW.findall(block[0]) for block in _BLOCK.finditer(text) if block[2] != "rooms"}


def first_line(path: Path) -> str:
    """Return the first line of the docstring of the file at `path`; "" without a docstring."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def _rooms(root: Path) -> Iterator[str]:
    yield "| room | |"
    yield "|---|---|"
    for room, kind in reversed(_ladder(root).items()):
        sentence = WITHOUT_DOCSTRING.get(room) or first_line(root / room / "__init__.py")
        yield f"| `{room}`{'' if kind == 'DOING' else ' *'} | {sentence} |"


def _way(root: Path, files: Iterable[str]) -> Iterator[str]:
    yield "| | file | |"
    yield "|---|---|---|"
    for number, name in enumerate(files, 1):
        yield f"| {number} | `{name}` | {first_line(root / name)} |"


def _lines(rows: Iterable[str]) -> str:
    return "".join(f"{row}\n" for row in rows)


def _ladder(root: Path) -> dict[str, str]:
    """Return the rooms from the bottom to the top, each with the name of its kind: PURE, TENSORS or DOING."""
    constants: dict[str, str] = {}
    for node in ast.parse((root / LADDER).read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(value))):
                constants[name] = value
            case ast.Assign(targets=[ast.Name(id="LADDER")], value=ast.Dict(keys=keys, values=values)):
                return {_said(key, constants): ast.unparse(kind) for key, kind in zip(keys, values, strict=True)}
            case _:
                pass
    raise LookupError(f"{LADDER} has no dictionary LADDER, which lists the rooms")


def _said(key: ast.expr | None, constants: Mapping[str, str]) -> str:
    match key:
        case ast.Constant(value=str(room)):
            return room
        case ast.Name(id=name):
            return constants[name]
        case _:
            raise LookupError(f"LADDER in {LADDER} has a key that is neither a name nor a text")
