"""Looks at a run: a question to it is asked once, or with --watch again and again until the run is over.

`RunView` is a run for commands that put it on a page: they ask it much, and read its folder.

The run's broker answers, or when it is gone the run's records: `options.py` finds them.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from time import sleep, time
from types import MappingProxyType
from typing import Any, TypeVar

import click

from stageline.workers.cli import options
from stageline.workers.cli.output import CommandFailed, answer, duration, say
from stageline.workers.runs.folder import Facts

AnyCommand = TypeVar("AnyCommand", bound=Callable[..., Any])

NOTHING: Mapping[str, str] = MappingProxyType({})  # to ask by
EVERY = 1.0  # seconds from one look to the next
_NO_LOSSES = str(10**14)  # a step from which on no run has losses
_GOES_ON = (
    "starting",
    "running",
    "paused",
)  # states of a run whose broker does not answer, so that its records do


def watched(command: AnyCommand) -> AnyCommand:
    """Give a command the options --watch and --every, which it gets as `watch`: seconds, or None for one look."""
    every = click.option(
        "--every",
        type=options.Finite(min=0.1),
        default=EVERY,
        expose_value=False,
        is_eager=True,
        help=f"Seconds from one look of --watch to the next. Default: {EVERY:g}.",
        callback=_note_every,
    )
    watch = click.option(
        "--watch",
        is_flag=True,
        help="Look again and again, until the run is over. With --json, a line for each look.",
        callback=_seconds,
    )
    return watch(every(command))


def _note_every(ctx: click.Context, parameter: click.Parameter, value: float) -> None:
    ctx.meta[__name__] = value


def _seconds(ctx: click.Context, parameter: click.Parameter, value: bool) -> float | None:
    return float(ctx.meta[__name__]) if value else None


def look(
    query: str,
    where: str | None,
    broker: str | None,
    as_json: bool,
    show_facts: Callable[[Facts], None],
    watch: float | None = None,
    of: Mapping[str, str] = NOTHING,
) -> None:
    """Print the answer to a question, and how old it is.

    Args:
        query: Question, such as "status".
        where: Folder of a run, or a plan; None for the newest run in ./runs.
        broker: Address of the only broker to ask.
        as_json: Print JSON, one line for each look.
        show_facts: Prints the answer for people.
        watch: Seconds from one look to the next; None for one look.
        of: Parameters of the question.
    """
    while True:
        facts = options.answer_about(where, broker, query, **of)
        if watch is not None and not as_json:
            click.clear()  # nothing where stdout is no terminal
        if facts["source"] == "records" and not as_json:
            ago = duration(max(0.0, time() - facts["as_of"]))
            say(f"from the records of the run, as of {datetime.fromtimestamp(facts['as_of']):%F %T}, {ago} ago")
        answer(facts, as_json, partial(show_facts, facts))
        if watch is None or not goes_on(facts):
            return
        sleep(watch)


def goes_on(facts: Facts) -> bool:
    """Return True if the run that an answer is about may go on."""
    return facts["source"] == "broker" or facts["state"] in _GOES_ON


def number_and_run(words: Sequence[str], number: str) -> tuple[int | None, str | None]:
    """Return the number and the run that a command line names, each None if it does not.

    Args:
        words: Words of the command line.
        number: Noun phrase for the number, for the error that there are too many words.

    Raises:
        click.UsageError: There are more words than these two.
    """
    found = list(words)
    first = int(found.pop(0)) if found and re.fullmatch("[0-9]{1,9}", found[0]) else None
    if len(found) > 1:
        raise click.UsageError(f"{found[1]!r} is one word too many: {number} and a run are taken")
    return first, found[0] if found else None


@dataclass(frozen=True, slots=True)
class RunView:
    """A run that can be asked.

    Attributes:
        ask: Asks a question by its name.
        folder: Folder of the run; None if it is not on this machine.
        source: "broker" or "records".
        as_of: Time at which the answers are true, in seconds since the epoch.
    """

    ask: Callable[..., Facts]
    folder: Path | None
    source: str
    as_of: float


@contextmanager
def view_of(where: str | None, broker: str | None) -> Iterator[RunView]:
    """Return a context whose value is the run that `where` names, or that of the `broker`.

    Raises the errors of `options.answer_about`.
    """
    status = options.answer_about(where, broker, "status", losses_from=_NO_LOSSES)
    with options.questioning(where, broker) as ask:
        yield RunView(ask, _folder(where, broker), status["source"], status["as_of"])


def _folder(where: str | None, broker: str | None) -> Path | None:
    if broker is not None:
        return None
    try:
        return options.folder_of(where)
    except CommandFailed:  # its plan is here, and its broker elsewhere
        return None
