"""All rows, by kind, and their place in docs/project/promises.md.

python -m misuse.pages      writes the tables again; with PYTHONPATH=tests
"""

from collections.abc import Iterable, Mapping, Sequence

from misuse import commands, data, mid_run, models, plans, servers, training
from misuse.case import Misuse
from support.paths import DOCS

PAGE = DOCS / "project/promises.md"
BEGIN, END = "<!-- misuse: begin -->", "<!-- misuse: end -->"
KINDS: Mapping[str, Sequence[Misuse]] = {
    "In the plan": plans.ROWS,
    "In the model": models.ROWS,
    "In loss, metrics, optimizer and learning rate": training.ROWS,
    "In the data": data.ROWS,
    "In a worker at step 3": mid_run.ROWS,
    "In commands": commands.ROWS,
    "In a Redis server": servers.ROWS,
}


def written() -> str:
    """Text between the page's markers."""
    return PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].strip()


def tables() -> str:
    """Text that is to stand there: a table for each kind."""
    return "\n\n".join(_table(kind, rows) for kind, rows in KINDS.items())


def write() -> None:
    """Puts it there."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{tables()}\n{END}{after}", encoding="utf-8")


def _table(kind: str, rows: Iterable[Misuse]) -> str:
    head = [f"| {kind.lower()} | is said | code |", "| --- | --- | ---: |"]
    return "\n".join([*head, *(f"| {row.what} | {_said(row)} | {row.code} |" for row in rows)])


def _said(row: Misuse) -> str:
    return " ... ".join(_code(part.strip()) for part in row.said)


def _code(text: str) -> str:
    marks = "``" if "`" in text else "`"
    space = " " if marks != "`" else ""
    return f"{marks}{space}{text}{space}{marks}".replace("|", "\\|")


if __name__ == "__main__":
    write()
