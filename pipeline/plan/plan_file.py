"""Reads the files that a plan is made of, with bounds: a file may have no end, be a pipe, or be nested too deeply."""

import stat
import tomllib
from pathlib import Path
from typing import Any

LONGEST_PLAN = 2**20  # bytes of a plan file
LONGEST_SCHEDULE = 2**24  # bytes of a schedule's file
DEEPEST = 32  # tables and lists in one another


class FileUnreadable(ValueError):
    """A file is not what a plan can be made of. The text is the reason."""


def read_text(file: Path, longest: int) -> str:
    """Return the text of `file`, without a byte order mark.

    Raises:
        FileNotFoundError: There is no such file.
        FileUnreadable: It is no regular file, has more than `longest` bytes, or is not UTF-8.
    """
    try:
        mode = file.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # to open a pipe may take for ever
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
    """Return the tables of a TOML text. Raises `FileUnreadable`."""
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise FileUnreadable(_too_deep()) from None
    except tomllib.TOMLDecodeError as error:
        raise FileUnreadable(f"this is not TOML: {error}") from error
    except ValueError:  # Python converts no more digits
        raise FileUnreadable("a number in it has thousands of digits") from None
    level: list[Any] = [tables]
    for _ in range(DEEPEST):
        inside = (value for each in level for value in (each.values() if isinstance(each, dict) else each))
        level = [value for value in inside if isinstance(value, dict | list)]
    if level:
        raise FileUnreadable(_too_deep())
    return tables


def _too_deep() -> str:
    return f"its tables and lists are nested too deeply: {DEEPEST} in one another are the most"
