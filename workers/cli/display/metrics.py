"""The metrics of a run as rows of a table, and as CSV."""

import csv
import io
from collections.abc import Iterable
from datetime import datetime

import msgspec
from msgspec import UNSET

from stageline.workers.runs.metrics import EvaluationMetrics, MetricsLine, StepMetrics

ROWS = 30  # of steps, that a table has unless more are wanted
COLUMNS = ("step", "loss", "gradient norm", "learning rates", "rows", "time", "evaluation after so many steps")
_WIDTHS = (9, 12, 13, 14, 6, 19, 0)  # characters, of rows that are printed one by one


def every_for(steps: int) -> int:
    """Which steps a table shows: each 1st, 2nd, 5th, 10th, ... so that there are about `ROWS`."""
    power = 1
    while power * 10 * ROWS < steps:
        power *= 10
    return next(each * power for each in (1, 2, 5, 10) if each * power * ROWS >= steps)


def cells(line: MetricsLine) -> tuple[str, ...]:
    """One row of the table."""
    time = f"{datetime.fromtimestamp(line.time):%F %T}"
    if isinstance(line, EvaluationMetrics):
        found = ", ".join(f"{name} {_number(value)}" for name, value in line.values.items())
        return (str(line.step), "", "", "", "", time, found)
    norm = "" if line.gradient_norm is UNSET else _number(line.gradient_norm)
    rates = " ".join(f"{rate:g}" for rate in line.learning_rates)
    return (str(line.step), _number(line.loss), norm, rates, str(line.rows), time, "")


def row(of: Iterable[str]) -> str:
    """A row by itself, of a table whose other rows are not known."""
    return "  ".join(cell.rjust(width) for cell, width in zip(of, _WIDTHS, strict=True)).rstrip()


def as_csv(lines: Iterable[MetricsLine]) -> str:
    """A row for each line; a column for each learning rate and each metric."""
    every = list(lines)
    most = max((len(line.learning_rates) for line in every if isinstance(line, StepMetrics)), default=0)
    rates = [f"learning_rate_{group}" for group in range(most)]
    names = {name: None for line in every if isinstance(line, EvaluationMetrics) for name in line.metrics}
    columns = ["kind", "step", "loss", "gradient_norm", *rates, "rows", "time", "fit", *names]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for line in every:
        facts = msgspec.to_builtins(line)
        of_groups = zip(rates, facts.pop("learning_rates", ()), strict=False)
        evaluated = facts.pop("metrics", {})
        writer.writerow({**facts, **dict(of_groups), **evaluated})
    return text.getvalue()


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
