"""The verdicts of trials that take long: printed as they come, and kept, so that interrupted trials go on."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar

import click


class KillVerdict(Protocol):
    """The result of a trial. `wrong`: each broken promise."""

    trial: str
    wrong: list[str]

    def facts(self) -> dict[str, Any]:
        """Its fields, JSON-ready."""


AnyVerdict = TypeVar("AnyVerdict", bound=KillVerdict)


class VerdictLog(Generic[AnyVerdict]):
    """The verdicts in the file `path`, a JSON object in each line, which `parse` takes as keyword arguments."""

    def __init__(self, path: Path, parse: Callable[..., AnyVerdict]) -> None:
        self._path = path
        self._parse = parse

    def read(self) -> dict[str, AnyVerdict]:
        """The verdicts of before by their trials, without failures."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        verdicts = (self._parse(**json.loads(line)) for line in lines)
        return {verdict.trial: verdict for verdict in verdicts if not verdict.wrong}

    def append(self, verdict: AnyVerdict) -> None:
        self._path.parent.mkdir(exist_ok=True)
        with self._path.open("a") as file:
            file.write(f"{json.dumps(verdict.facts())}\n")

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)


def shown(verdicts: Iterable[AnyVerdict], count: int, command: str, every: int) -> Iterator[AnyVerdict]:
    """Passes verdicts on; prints each failure with the `command` that repeats it, and after `every` so many the
    progress."""
    started = monotonic()
    for number, verdict in enumerate(verdicts, 1):
        if verdict.wrong:
            click.echo(f"FAILED  PYTHONPATH=tests .venv/bin/python -m {command} --only {verdict.trial}")
            click.echo("".join(f"        {reason}\n" for reason in verdict.wrong))
        if number % every == 0 or number == count:
            click.echo(f"{number} of {count}, {(monotonic() - started) / number:.2f} s each")
        yield verdict
