"""Files of a plan, read with bounds, and their nested tables, seen as one list of keys with line numbers.

The bounds are needed because a file may have no end, be a pipe, or be nested too deeply.
"""

import json
import re
import stat
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Key = tuple[str, ...]  # ("schedule", "microbatches")

_HEADER = re.compile(r"\s*\[{1,2}([^\[\]]+)]{1,2}\s*(?:#.*)?$")
_ASSIGNMENT = re.compile(r"""\s*([\w"'-]+(?:\s*\.\s*[\w"'-]+)*)\s*=""")


def leaves(tables: Mapping[str, object]) -> Iterator[tuple[Key, object]]:
    """Yield every value of nested tables, with its key. An empty table is a value."""
    for name, value in tables.items():
        if isinstance(value, Mapping) and value:
            yield from (((str(name), *key), leaf) for key, leaf in leaves(value))
        else:
            yield (str(name),), value


def nested(pairs: Iterable[tuple[Key, object]]) -> dict[str, Any]:
    """Return the nested tables that keys and their values make: the inverse of `leaves`."""
    tables: dict[str, Any] = {}
    for (*path, last), value in pairs:
        table = tables
        for name in path:
            table = table.setdefault(name, {})
        table[last] = value
    return tables


def flat(tables: Mapping[str, object]) -> dict[str, object]:
    """Return nested tables as one table, by dotted key."""
    return {dotted(key): value for key, value in leaves(tables)}


def dotted(key: Iterable[str]) -> str:
    """Return a key as TOML writes it: names that hold a dot are quoted, so that no two keys look alike."""
    return ".".join(f'"{name}"' if "." in name else name for name in key)


def canonical(value: object) -> str:
    """Return `value` as JSON in one fixed spelling: sorted keys, no spaces, `1` apart from `1.0`."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def lines_of(text: str) -> dict[Key, int]:
    """Return the line, from 1, on which each table and key of a TOML text begins, as far as a simple look finds it.

    tomllib does not report lines.
    """
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
    """Return `file:line` of `key`, or of the innermost table around it that has a line; `file` alone if none has.

    Args:
        file: Name of the plan file.
        lines: Line of each key and table, as `lines_of` returns them.
        key: The key.
    """
    around = (key[:length] for length in range(len(key), 0, -1))
    line = next((lines[each] for each in around if each in lines), None)
    return file if line is None else f"{file}:{line}"


def _parts(dotted: str) -> Key:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


LONGEST_PLAN = 2**20  # bytes of a plan file
LONGEST_SCHEDULE = 2**24  # bytes of a schedule's file
DEEPEST = 32  # tables and lists in one another


class FileUnreadable(ValueError):
    """The error of a file that cannot be read as a plan or a schedule. The text is the reason."""


def read_text(file: Path, longest: int) -> str:
    """Return the text of `file`, without a byte order mark and with line feeds as line ends.

    Args:
        file: The file.
        longest: Most bytes that the file may have.

    Raises:
        FileNotFoundError: There is no such file.
        FileUnreadable: The file is no regular file, has more than `longest` bytes, or is not UTF-8.
    """
    try:
        kind = file.stat().st_mode
        if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):  # to open a pipe may take for ever
            raise FileUnreadable("it is no regular file. Save what it gives as a file: it is read more than once")
        with file.open("rb") as opened:
            content = opened.read(longest + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise FileUnreadable(f"it cannot be read: {error.strerror}") from error
    if len(content) > longest:
        raise FileUnreadable(f"it has more than {longest} bytes, which is the most that is read of it")
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise FileUnreadable(f"byte {error.start} is not UTF-8. Save the file as UTF-8") from error


def tables_in(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text.

    Raises:
        FileUnreadable: The text is not TOML, is nested too deeply, or has a number with thousands of digits.
    """
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise FileUnreadable(_too_deep()) from None
    except tomllib.TOMLDecodeError as error:
        raise FileUnreadable(f"this is not TOML: {error}") from error
    except ValueError:  # Python converts no more digits
        raise FileUnreadable("a number in it has thousands of digits") from None
    if is_deeper(tables, DEEPEST):
        raise FileUnreadable(_too_deep())
    return tables


def is_deeper(value: object, most: int) -> bool:
    """Return True if there are more than `most` dicts and lists in one another in `value`."""
    level: list[Any] = [[value]]
    for _ in range(most + 1):
        inside = (each for table in level for each in (table.values() if isinstance(table, dict) else table))
        level = [each for each in inside if isinstance(each, dict | list)]
    return bool(level)


def _too_deep() -> str:
    return f"its tables and lists are nested too deeply: {DEEPEST} in one another are the most"
