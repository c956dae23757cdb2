"""The blocks of code that pages of the documentation show.

A block's fence names its language, and in `title="..."` the file that it is, or the terminal or machine of its
commands. A comment of one line before the fence says what a test has to know:

    <!-- not run: needs Docker -->
    <!-- output varies -->            of each line shown, only the first words are compared
    <!-- example output: it is measured -->
    <!-- with: model.stages=3 -->     what else the plan has, over which the tables of the block are read
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(
    r"(?:^[ ]*<!-- (?P<note>[^\n]*?) -->\n+)?"
    r'^(?P<indent> *)```(?P<kind>[\w-]*)(?: title="(?P<title>[^"\n]*)")?\n(?P<text>.*?)^(?P=indent)```$',
    re.MULTILINE | re.DOTALL,
)
_NOT_RUN = "not run: "
_TERMINALS = "console"


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block: its language, its title, the comment before it, its text, and the line at which it begins."""

    kind: str
    title: str
    note: str
    text: str
    line: int

    @property
    def not_run(self) -> str:
        """Why no test runs it, "" if one does."""
        return self.note.removeprefix(_NOT_RUN) if self.note.startswith(_NOT_RUN) else ""

    @property
    def varies(self) -> bool:
        """Whether the output that it shows differs between two runs."""
        return self.note == "output varies"

    @property
    def is_example(self) -> bool:
        """Whether the output that it shows is only an example."""
        return self.note.startswith("example output: ")

    @property
    def is_file(self) -> bool:
        return bool(self.title) and self.kind != _TERMINALS


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        code = re.sub(f"^{found['indent']}", "", found["text"], flags=re.MULTILINE)
        line = text.count("\n", 0, found.start("kind")) + 1
        yield Block(found["kind"], found["title"] or "", found["note"] or "", code, line)


def outside_blocks(page: Path) -> str:
    return _BLOCK.sub("", page.read_text(encoding="utf-8"))


def code_blocks(page: Path) -> list[str]:
    return [block.text for block in blocks(page) if block.kind == "python" and not block.is_file]


def named_files(page: Path) -> dict[str, str]:
    """The files that a page shows whole, by their names."""
    return {block.title: block.text for block in blocks(page) if block.is_file}
