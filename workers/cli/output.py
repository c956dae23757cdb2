"""Output of commands: text, tables, amounts and results for people, log lines, and errors.

A table is drawn for a terminal, and stands in plain aligned columns otherwise. Answers as JSON keep their exact text.
A log event is a line on stderr, `01:02:03 assigned: worker 0, incarnation 1`; an error begins with `stageline:`.
"""

import difflib
import errno
import logging
import re
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import click
import msgspec

from stageline.pipeline.errors import StagelineError
from stageline.pipeline.plan.errors import PlanError, PlanRefused
from stageline.pipeline.printable import printable, printable_line
from stageline.pipeline.process.steady_clock import STEADY
from stageline.pipeline.process.streams import lose_output
from stageline.workers.control.kept_log import LOGGED
from stageline.workers.runs.folder import Result
from stageline.workers.runs.logs import stamped

LONGEST = 1_000_000  # characters; a table may be long
_AMOUNT = re.compile(r"-?|[\d.]+( [\w.%]+)*")  # "", "-", "12", "4.2 s", "12 %", "3 min 20 s"
_NEWEST = 20  # rounds of evaluation that are shown
_BYTES = ("B", "kB", "MB", "GB", "TB")
Event = MutableMapping[str, Any]

_PREFIXES = {"critical": "stageline:", "error": "stageline:", "warning": "stageline: warning:"}  # others: the time
_LINE = re.compile(r"(?!--|STAGELINE_)(.+?)(?::(\d+))?", re.DOTALL)  # the place of a fault in a file
_NO_FOLDER = "No usable temporary directory"  # as the module tempfile says it
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def say(text: str, *, err: bool = False, file: IO[Any] | None = None) -> None:
    """Print `text`; control characters are made visible.

    Args:
        text: Text.
        err: Print on stderr instead of stdout.
        file: File to print to instead.
    """
    click.echo(printable(text, most=LONGEST), err=err, file=file)


def answer(facts: object, as_json: bool, show_facts: Callable[[], object]) -> None:
    """Print the result of a command.

    Args:
        facts: Result, printed as one line of JSON if `as_json`.
        as_json: Print JSON.
        show_facts: Prints the result for people.
    """
    if as_json:
        click.echo(msgspec.json.encode(facts))
    else:
        show_facts()


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table under its title; columns of numbers are right-aligned.

    Args:
        title: Title.
        columns: Names of the columns.
        rows: Cells of each row.
    """
    cells = [[printable_line(str(cell)) for cell in row] for row in rows]
    right = [bool(cells) and all(_AMOUNT.fullmatch(row[place]) for row in cells) for place in range(len(columns))]
    if sys.stdout.isatty():
        _draw(title, columns, cells, right)
    else:
        say("\n".join([title, *aligned([list(columns), *cells], right)]))


def summary(result: Result, folder: Path) -> str:
    """Return the result of the finished run in `folder`, one line for each value."""
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
    """Return the best evaluation as text: `accuracy 0.93 after step 700`."""
    return f"{best['metric']} {best['value']:.6g} after step {best['step']}"


def show_evaluations(found: Sequence[Mapping[str, Any]], best: Mapping[str, Any] | None) -> None:
    """Print a table of the newest rounds of evaluation; nothing for fewer than two, whose metrics are shown anyway."""
    if len(found) < 2:
        return
    shown = found[-_NEWEST:]
    names = list(shown[-1]["metrics"])
    rows = [
        (
            each["step"],
            each["rows"],
            *(
                "" if value is None else f"{float(value):.6g}"
                for value in (each["loss"], *map(each["metrics"].get, names))
            ),
            "best" if best is not None and best["step"] == each["step"] else "",
        )
        for each in shown
    ]
    title = "evaluations" if len(shown) == len(found) else f"evaluations, the newest {len(shown)} of {len(found)}"
    show(title, ("after step", "rows", "loss", *names, ""), rows)


def size(count: float) -> str:
    """Return a number of bytes as text: `49.2 kB`."""
    for unit in _BYTES[:-1]:
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} {_BYTES[-1]}"


def share(part: float) -> str:
    """Return a part of 1 as text: `12 %`."""
    return f"{part:.0%}".replace("%", " %")


def duration(seconds: float) -> str:
    """Return seconds as text: `350 ms`, `4.2 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def span(layers: Sequence[str]) -> str:
    """Return the names of consecutive layers as text: `encoder.4`, or `encoder.4 to encoder.7`."""
    return layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun: `1 worker`, `2 workers`.

    Args:
        number: Number.
        one: Noun in the singular.
        many: Noun in the plural; "" appends an s.
    """
    return f"{number} {one if number == 1 else many or one + 's'}"


def aligned(lines: Sequence[Sequence[str]], right: Sequence[bool]) -> list[str]:
    """Return the cells of each line as text, in aligned columns; those in `right` are flush right."""
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


def log_to_stderr(*, to_file: bool = False) -> None:
    """Configure structlog for this process, which from now on survives a closed or full stdout.

    Args:
        to_file: True if stderr is the log of a run's process: each line then begins with its whole time.
    """
    import structlog  # takes longer than a command that only asks

    lose_output()
    LOGGED.clear()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            _keep,
            structlog.processors.format_exc_info,
            render_to_file if to_file else render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _keep(_: object, __: str, event: Event) -> Event:
    LOGGED.note(STEADY.time(), event.get("level", "info"), _message(event))
    return event


def _message(event: Event) -> str:
    """Return what a log event says, without a traceback."""
    beside = ("level", "event", "exception", "exc_info", "reason")
    details = ", ".join(f"{name} {value}" for name, value in event.items() if name not in beside)
    said = (str(event["event"]), str(event.get("reason", "")), details)
    return printable(": ".join(part for part in said if part))


def render(_: object, __: str, event: Event) -> str:
    """Return one log event as text.

    A traceback comes first: the last line of a log states what went wrong.
    """
    prefix = _PREFIXES.get(event.get("level", "info")) or f"{datetime.now():%H:%M:%S}"
    return _rendered(event, f"{prefix} {_message(event)}")


def render_to_file(_: object, __: str, event: Event) -> str:
    """Return one log event as text, as `render` does; each part begins with its whole time."""
    level, now = event.get("level", "info"), STEADY.time()
    if event.get("exception"):
        event["exception"] = stamped(now, event["exception"])
    return _rendered(event, stamped(now, f"{_PREFIXES.get(level, '')} {_message(event)}".lstrip()))


def _rendered(event: Event, line: str) -> str:
    line = line.replace("\n", "\n    ")  # no text can begin a line that looks like another event
    return "\n".join(part for part in (printable(event.get("exception", "")), line) if part)


class CommandFailed(StagelineError):
    """Error that ends the command with a message for the user and an exit code."""

    def __init__(self, message: str, exit_code: int, *, answered: bool = False) -> None:
        """Take the message.

        Args:
            message: Message for the user.
            exit_code: Exit code of the command.
            answered: True if the command's result has been printed.
        """
        super().__init__(message)
        self.exit_code = exit_code
        self.answered = answered


def message_of(error: Exception) -> str:
    """Return the message for the user about an expected error.

    The message of an `OSError` names the file or the disk that caused it.
    """
    if not isinstance(error, OSError) or isinstance(error, StagelineError):
        return str(error)
    reason = error.strerror or str(error)
    if error.filename is not None:
        return f"cannot use {error.filename}: {reason}"
    if error.errno in _FULL:  # the system does not say of which file
        return f"cannot write to stdout, or to the run's folder: {reason}"
    if reason.startswith(_NO_FOLDER):
        return f"{reason}. Sockets and files of a process need one: make /tmp writable, or name a folder in TMPDIR"
    return reason


def as_facts(error: Exception, message: str, exit_code: int) -> dict[str, object]:
    """Return the error as schema error/1, which `--json` prints in place of a result.

    `errors` has all faults of a plan, each with its place; it is empty for any other error.

    Args:
        error: Error that ended the command.
        message: Message for the user.
        exit_code: Exit code of the command.
    """
    errors = [_plan_fault(each) for each in error.errors] if isinstance(error, PlanRefused) else []
    return {"schema": "error/1", "exit_code": int(exit_code), "message": message, "errors": errors}


def _plan_fault(fault: PlanError) -> dict[str, object]:
    """Return a fault of a plan with its place.

    `file` and `line` are None for a value from no file: `where` is then "--set", or a variable of the environment.
    """
    file, line = _LINE.fullmatch(fault.where), None
    if file is not None:
        line = int(file[2]) if file[2] else None
    return {
        "where": fault.where,
        "file": None if file is None else file[1],
        "line": line,
        "key": fault.key,
        "value": fault.value,
        "message": fault.reason,
    }


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown word: the nearest known one, or all of them."""
    words = list(known)
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(words)}"
