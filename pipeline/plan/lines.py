"""On which line of a TOML file a key stands, so that an error can say so (tomllib does not tell)."""

import re
from collections.abc import Mapping

from .tables import Key

_HEADER = re.compile(r"\s*\[([^\[\]]+)]\s*(?:#.*)?$")
_ASSIGNMENT = re.compile(r"""\s*([\w"'-]+(?:\s*\.\s*[\w"'-]+)*)\s*=""")


def lines_of(text: str) -> dict[Key, int]:
    """The line, from 1, on which each table and key begins. One that a simple look does not find is not there."""
    lines: dict[Key, int] = {}
    table: Key = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = _parts(header[1])
            lines.setdefault(table, number)
        elif assignment := _ASSIGNMENT.match(line):
            lines.setdefault((*table, *_parts(assignment[1])), number)
    return lines


def place(file: str, lines: Mapping[Key, int], key: Key) -> str:
    """`file:line` of `key`, or of the innermost table around it that has a line; `file` alone if none has."""
    around = (key[:length] for length in range(len(key), 0, -1))
    line = next((lines[each] for each in around if each in lines), None)
    return file if line is None else f"{file}:{line}"


def _parts(dotted: str) -> Key:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))
