"""Prints for people on stdout: text, tables, amounts, the summary of a result. Answers as JSON keep their exact text.

A table is drawn for a terminal, and stands in plain aligned columns otherwise.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import click

from stageline.pipeline.printable import printable, printable_line
from stageline.workers.runs.result import Result

LONGEST = 1_000_000  # characters; a table may be long
_AMOUNT = re.compile(r"-?|[\d.]+( [\w.%]+)*")  # "", "-", "12", "4.2 s", "12 %", "3 min 20 s"
_NEWEST = 20  # rounds of evaluation that are shown
_BYTES = ("B", "kB", "MB", "GB", "TB")


def say(text: str, *, err: bool = False, file: IO[Any] | None = None) -> None:
    """Prints `text` on stdout, or on stderr or to `file`. What would control a terminal is shown instead."""
    click.echo(printable(text, most=LONGEST), err=err, file=file)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints a table under its title. Columns of numbers are right-aligned."""
    cells = [[printable_line(str(cell)) for cell in row] for row in rows]
    right = [bool(cells) and all(_AMOUNT.fullmatch(row[place]) for row in cells) for place in range(len(columns))]
    if sys.stdout.isatty():
        _draw(title, columns, cells, right)
    else:
        say("\n".join([title, *_aligned([list(columns), *cells], right)]))


def summary(result: Result, folder: Path) -> str:
    """What the finished run in `folder` came to: one line each."""
    rows = {
        "run": str(folder),
        "steps": str(result.steps) if result.stopped_early is None else f"{result.steps}, {result.stopped_early}",
        "loss": "no rows in the last step" if result.loss is None else f"{result.loss:.6g}",
        **{name: f"{float(value):.6g}" for name, value in result.metrics.items()},
        **({"best": best_of(result.best)} if result.best is not None else {}),
        "weights_sha256": result.weights_sha256,
        "time": duration(result.seconds),
        "restarts": str(result.restarts),
    }
    widest = max(map(len, rows))
    return "\n".join(f"{name:{widest}}  {value}" for name, value in rows.items())


def best_of(best: Mapping[str, Any]) -> str:
    """`accuracy 0.93 after step 700`."""
    return f"{best['metric']} {best['value']:.6g} after step {best['step']}"


def show_evaluations(rounds: Sequence[Mapping[str, Any]], best: Mapping[str, Any] | None) -> None:
    """A table of the newest rounds of evaluation; nothing if there was one at most: its metrics are told anyway."""
    if len(rounds) < 2:
        return
    shown = rounds[-_NEWEST:]
    names = list(shown[-1]["metrics"])
    rows = [
        (
            each["step"],
            each["rows"],
            *(_value(value) for value in (each["loss"], *(each["metrics"].get(name) for name in names))),
            "best" if best is not None and best["step"] == each["step"] else "",
        )
        for each in shown
    ]
    title = "evaluations" if len(shown) == len(rounds) else f"evaluations, the newest {len(shown)} of {len(rounds)}"
    show(title, ("after step", "rows", "loss", *names, ""), rows)


def _value(value: float | str | None) -> str:
    return "" if value is None else f"{float(value):.6g}"


def size(count: float) -> str:
    """`49.2 kB`, of bytes."""
    for unit in _BYTES[:-1]:
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} {_BYTES[-1]}"


def share(part: float) -> str:
    """`12 %`."""
    return f"{part:.0%}".replace("%", " %")


def duration(seconds: float) -> str:
    """`350 ms`, `4.2 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def span(layers: Sequence[str]) -> str:
    """Return `encoder.4`, or `encoder.4 to encoder.7`, of the names of layers in order."""
    return layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"


def steps_of(steps: int, total: int | None, *, script: bool) -> str:
    """`12 of 460`, `12 of ?`; `12` of a script's run, which may end anywhere."""
    if total is None:
        return str(steps) if script else f"{steps} of ?"
    return f"{steps} of {total}"


def counted(number: int, one: str, many: str = "") -> str:
    """`1 worker`, `2 workers`."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def _aligned(lines: Sequence[Sequence[str]], right: Sequence[bool]) -> list[str]:
    widths = [max(len(line[place]) for line in lines) for place in range(len(right))]
    padded = (
        [
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(line, widths, right, strict=True)
        ]
        for line in lines
    )
    return ["  ".join(line).rstrip() for line in padded]


def _draw(title: str, columns: Sequence[str], cells: Sequence[Sequence[str]], right: Sequence[bool]) -> None:
    from rich import box, console, table, text

    drawn = table.Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, flush in zip(columns, right, strict=True):
        drawn.add_column(name, justify="right" if flush else "left")
    for row in cells:
        drawn.add_row(*map(text.Text, row))
    console.Console().print(drawn)
