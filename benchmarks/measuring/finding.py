"""The result of a benchmark: tables for people, facts for programs, and the file that they are written to."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text; the first column names the row, the others hold figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        """As Markdown, aligned so that it reads in a terminal too."""
        widths = [max(map(len, column)) for column in zip(self.columns, *self.rows, strict=True)]
        rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
        lines = [_line(cells, widths) for cells in (self.columns, rule, *self.rows)]
        return "\n".join([f"**{self.title}**", "", *lines] if self.title else lines)


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """One claim's measurement. `about` describes what was measured and how; `facts` are JSON-ready."""

    title: str
    about: str
    tables: tuple[Table, ...]
    facts: dict[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n\n".join([f"## {self.title}", self.about, *map(str, self.tables)])

    def write(self, path: Path, machine: dict[str, object]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": machine, **self.facts}, indent=1) + "\n", encoding="utf-8")


def _line(cells: Sequence[str], widths: list[int]) -> str:
    name, *figures = cells
    padded = [name.ljust(widths[0]), *(text.rjust(width) for text, width in zip(figures, widths[1:], strict=True))]
    return f"| {' | '.join(padded)} |"
