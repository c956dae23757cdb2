"""Reference of errors: every code that a message may end with, read from the docstrings of the classes that have one.

The sources are parsed and not imported, so that an answer does not wait for torch. A docstring has this form:

    Error that a queue holds as much as it may.

    Mend: Resume the run with a larger `queues.retain_bytes`.

    Example: forward-1 retains 120 messages
"""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

_PACKAGE = Path(__file__).parents[2]
_TOPS = ("pipeline", "broker", "workers")
_MARK = 'error_code = "SL'  # with this text, a source has a class with a code
_PARTS = {
    "1": "Plan, schedule and features",
    "2": "Model and data",
    "3": "Queues and transports",
    "4": "Checkpoints and recovery",
    "5": "Runs and commands",
    "6": "Keys and consent",
    "9": "Bugs in stageline",
}
_INTRODUCTION = """\
# Errors

Every expected error has a code, such as `[SL101]`, at the end of its message, or in the middle, where the message
quotes another error. This page explains each, and so does

    stageline errors SL101
    stageline errors --search "disk"

The code is part of the text of the exception, `str(error)`: so a traceback of a script, the error line of a command,
the log of a worker, the reason that `stageline status` shows and the lines of your own logger all have it, and a
reason that one process tells another keeps it. An error that quotes another one has the code of that, which is nearer
to the cause, where the quoted message ends, and no second one. In Python, `error.error_code` is the code of the class,
and `error.args[0]` the text without it.

| codes | errors of |
|---|---|
{parts}

A code belongs to one error for ever: scripts may look for it. Usage errors, such as a wrong flag or a `ValueError` of
`fit`, and errors of the system, such as a full disk under stdout, have messages without a code.
[Troubleshooting](../guides/troubleshooting.md) begins from symptoms. `stageline errors --page` prints this page.
"""


@dataclass(frozen=True, slots=True)
class ErrorPage:
    """Explanation of the errors of one code.

    Attributes:
        code: Code, such as "SL101".
        name: Name of the class.
        cause: What went wrong, a sentence.
        mend: What the user can do, sentences.
        example: Example of a message, without the code.
    """

    code: str
    name: str
    cause: str
    mend: str
    example: str

    @property
    def message(self) -> str:
        """The example with the code, as it is printed."""
        return f"{self.example} [{self.code}]"

    @property
    def text(self) -> str:
        """The explanation for a terminal."""
        rows = (("cause", self.cause), ("mend", self.mend), ("example", self.message))
        return "\n".join([f"{self.code} {self.name}", *(f"  {title:7}  {text}" for title, text in rows)])


def error_pages() -> dict[str, ErrorPage]:
    """Return the explanation of every code, by code and sorted."""
    return {page.code: page for page in sorted(_read(), key=lambda page: page.code)}


def reference(pages: Iterable[ErrorPage]) -> str:
    """Return the page of the documentation that explains `pages`."""
    parts = "\n".join(f"| SL{part}xx | {title} |" for part, title in _PARTS.items())
    sections = [_INTRODUCTION.format(parts=parts)]
    for part, of_part in groupby(pages, key=lambda page: page.code[2]):
        sections += [f"## {_PARTS[part]}\n", *map(_section, of_part)]
    return "\n".join(sections)


def _section(page: ErrorPage) -> str:
    mend = re.sub(r"docs/([\w/-]+/([\w-]+)\.md)", r"[\2](../\1)", page.mend)
    return f"### {page.code}\n\n`{page.name}`: {page.cause}\n\nMend: {mend}\n\n```text\n{page.message}\n```\n"


def _read() -> Iterator[ErrorPage]:
    """Yield the explanation of each class with a code, in any order."""
    for file in (file for top in _TOPS for file in (_PACKAGE / top).rglob("*.py")):
        source = file.read_text(encoding="utf-8")
        for each in ast.parse(source).body if _MARK in source else ():
            if isinstance(each, ast.ClassDef) and (code := _code_of(each)):
                yield _page(code, each)


def _code_of(defined: ast.ClassDef) -> str:
    """Return the `error_code` that the class is given, "" if it has none of its own."""
    for line in defined.body:
        match line:
            case ast.Assign(targets=[ast.Name(id="error_code")], value=ast.Constant(value=str(code))):
                return code
    return ""


def _page(code: str, defined: ast.ClassDef) -> ErrorPage:
    paragraphs = [" ".join(each.split()) for each in (ast.get_docstring(defined) or "").split("\n\n")]
    titled = dict(each.split(": ", 1) for each in paragraphs[1:] if each.startswith(("Mend: ", "Example: ")))
    cause = paragraphs[0].removeprefix("Error that ")
    return ErrorPage(code, defined.name, cause[:1].upper() + cause[1:], titled["Mend"], titled["Example"])
