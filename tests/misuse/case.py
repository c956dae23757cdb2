"""One kind of misuse as a value: what is done, and what must come of it.

docs/project/promises.md has a row for each.
"""

import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from support.workspace import Command, Workspace

BOUND = 50.0  # seconds, after which a command counts as hanging; also on a machine that is busy
Ended = subprocess.CompletedProcess[str]


def train_with(sets: Iterable[str]) -> tuple[str, ...]:
    """The command, with values after --set."""
    return ("train", ".", *(word for each in sets for word in ("--set", each)))


@dataclass(frozen=True, slots=True)
class Change:
    """`before` becomes `after` in a file of the workspace, which must hold it; without `before`, `after` is all of
    the file, and None as `after` deletes it."""

    file: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class Misuse:
    """`what` is wrong, in words; the exit `code`; and what is `said`: parts of what the command prints, in their order.

    `changes` are made in the workspace first. Then `command` runs with `environment`, unless `play` does all of it and
    returns how the command that counts has ended. `slow`: only `make test-all` does it. `finishes`: a run finishes,
    before that command or in spite of all, and leaves its result. `bits`: with the weights of a run without all that.
    """

    what: str
    code: int
    said: tuple[str, ...]
    changes: tuple[Change, ...] = ()
    command: tuple[str, ...] = ("train", ".")
    environment: Mapping[str, str] = field(default_factory=dict)
    play: Callable[[Workspace], Ended] | None = None
    slow: bool = False
    finishes: bool = False
    bits: bool = False

    def run(self, workspace: Workspace) -> Ended:
        """How it ended. Raises AssertionError, and ends all its processes, if it has not within `BOUND` seconds."""
        for change in self.changes:
            _apply(change, workspace)
        with Bound(workspace, BOUND * (2 if self.slow else 1)) as bound:
            ended = self.play(workspace) if self.play else workspace.command(*self.command, **self.environment)
        assert not bound.passed, f"it hung, and said: {ended.stderr}"
        return ended


class Bound:
    """A time limit: ends every process of a workspace when it has `passed`, so that the test goes on, and can fail."""

    def __init__(self, workspace: Workspace, seconds: float) -> None:
        self._workspace = workspace
        self._timer = threading.Timer(seconds, self._end)
        self.passed = False

    def __enter__(self) -> "Bound":
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._timer.join()

    def _end(self) -> None:
        self.passed = True
        self._workspace.kill()


def ended(command: Command) -> Ended:
    """How a command that was started has ended, once it has."""
    stdout, stderr = command.communicate()
    return subprocess.CompletedProcess((), command.wait(), stdout, stderr)


def interrupted(command: Command) -> Ended:
    """The same, after a Ctrl-C."""
    with suppress(ProcessLookupError):
        command.send_signal(signal.SIGINT)
    return ended(command)


def _apply(change: Change, workspace: Workspace) -> None:
    path = workspace.folder / change.file
    if change.after is None:
        path.unlink()
    elif change.before is None:
        path.write_text(change.after)
    else:
        text = path.read_text()
        assert change.before in text, f"{change.file} does not hold {change.before!r}"
        path.write_text(text.replace(change.before, change.after, 1))
