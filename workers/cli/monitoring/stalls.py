"""Stalls of a run, and the command that `train --on-stall` runs at each.

A run has stalled if it finishes no step, and nothing that is told otherwise explains that; it has slowed down if it
makes half as many steps per second, or fewer, as at its best. The command is started once for each, and ends nothing.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

import click

from stageline.pipeline.process.child import Child, Fork
from stageline.workers.runs.folder import Facts

LOG = "on-stall.log"
BOUND = 60.0  # seconds for the command
_LAST = 5.0  # seconds for a command that still runs at the end of the run
MINUTE = 60.0  # seconds of steps without a pause, before their pace says something
SLOW_DOWN, BACK = 0.5, 0.75  # shares of the best pace at which a run has slowed down, and is back
_NOT_STARTED = 127  # exit code of a command that the system could not start, as shells have it


class StallKind(StrEnum):
    """Kind of a stall; the value is what the command gets as STAGELINE_EVENT."""

    STALLED = "stalled"
    SLOW = "slow"


@dataclass(frozen=True, slots=True)
class Stall:
    """Stall of a run after `step` finished steps: its cause in one word and in words, and what to do."""

    kind: StallKind
    cause: str
    text: str
    action: str
    step: int


OnStall = Callable[[Stall], Iterable[str]]
"""Called with a stall; returns what is to be told."""


class SlowedPace:
    """Detector of a run that has slowed down."""

    def __init__(self, why: Callable[[], Facts | None], on_stall: OnStall) -> None:
        """Take `why`, which asks the broker what limits the run, and what is called when the run has slowed down."""
        self._why = why
        self._on_stall = on_stall
        self._told = False

    def lines(self, facts: Facts, even: float) -> Iterator[str]:
        """Yield a line once the run has slowed down, and one once it is back.

        Args:
            facts: Status of a run that has just finished a step.
            even: Seconds for which it has finished steps without a pause.
        """
        pace = facts.get("pace") or {}
        rate, best = pace.get("last_minute"), pace.get("best")
        if not rate or not best:
            return
        if self._told and rate >= BACK * best:
            self._told = False
            yield f"the run is as fast as before: {rate:.3g} steps/s in the last minute"
        elif not self._told and even >= MINUTE and rate <= SLOW_DOWN * best:
            self._told = True
            stall = _slow_stall((self._why() or {}).get("slow"), facts["finished_floor"])
            found = f"{rate:.3g} steps/s in the last minute, at best {best:.3g}"
            yield f"the run has slowed down: {found}: {stall.text}. What to do: {stall.action}"
            yield from self._on_stall(stall)


def _slow_stall(slow: Facts | None, step: int) -> Stall:
    """Return the stall of a run that has slowed down; `slow` is what its broker says of that."""
    findings = (slow or {}).get("findings")
    if not slow or not findings:
        return Stall(
            StallKind.SLOW,
            "unknown",
            "no cause is known",
            "see what else runs on the machines, and `stageline why`",
            step,
        )
    found = findings[0]
    remedy = found["remedies"][0]["do"] if found["remedies"] else "`stageline why` tells more"
    return Stall(StallKind.SLOW, found["cause"], found["text"], remedy, step)


def stall_command(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Return the words of a command line, none for None; the callback of --on-stall.

    Raises `click.BadParameter` if it cannot be split into words, or names no program.

    Args:
        ctx: Context of the command.
        parameter: Option.
        value: Given text, or None.
    """
    if value is None:
        return ()
    try:
        words = tuple(shlex.split(value))
    except ValueError as error:
        raise click.BadParameter(f"{value!r} cannot be split into words: {error}") from None
    if not words or shutil.which(words[0]) is None:
        named = f"there is no program {words[0]!r}" if words else "it is empty"
        raise click.BadParameter(
            f"{named}: name one in PATH or by its path. No shell reads the line; --on-stall \"sh -c '...'\" starts one"
        )
    return words


class StallCommand(AbstractContextManager["StallCommand"]):
    """The command of --on-stall: one process at a time, which ends with the run at the latest."""

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        """Take the words of the command line, none for no command, and the folder of the run."""
        self._words = tuple(words)
        self._folder = folder
        self._child: Child | None = None
        self._begun = 0.0

    def start(self, stall: Stall, now: float) -> Iterator[str]:
        """Start the command for a stall; yield what is to be told about it.

        Args:
            stall: The stall.
            now: Seconds of a clock that does not go back.
        """
        if not self._words:
            return
        if self._child is not None:
            yield "--on-stall: the command still runs for the stall before, so it is not started for this one"
            return
        try:
            with (self._folder / LOG).open("ab") as log:
                environment = {**os.environ, **self._variables(stall)}
                become = partial(_become, self._words, environment)
                self._child, self._begun = Fork(become, log.fileno(), dies_with_parent=True), now
        except OSError as error:
            yield f"--on-stall: the command could not be started: {error.strerror or error}"
            return
        yield f"--on-stall: started {shlex.join(self._words)}, pid {self._child.pid}; it writes to {self._folder / LOG}"

    def look(self, now: float) -> Iterator[str]:
        """Yield how the command has ended, if it has failed; end it once its time is over.

        Args:
            now: Seconds of the clock of `start`.
        """
        if self._child is None:
            return
        code = self._child.poll()
        if code is None and now - self._begun < BOUND:
            return
        if code is None:
            self._end(0.0)
            yield f"--on-stall: the command had not ended after {BOUND:g} s and was killed; the run goes on"
        elif code:
            how = "could not be started" if code == _NOT_STARTED else f"failed with exit code {code}"
            yield f"--on-stall: the command {how}; {self._folder / LOG} has what it wrote. The run goes on"
        self._child = None

    def __exit__(self, *_: object) -> None:
        """End the command, after a few seconds in which it may end by itself."""
        self._end(_LAST)

    def _end(self, patience: float) -> None:
        if self._child is None:
            return
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(patience)
        if self._child.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)  # it has a session of its own
        self._child.end()

    def _variables(self, stall: Stall) -> Mapping[str, str]:
        return {
            "STAGELINE_RUN": self._folder.resolve().name,
            "STAGELINE_FOLDER": str(self._folder.resolve()),
            "STAGELINE_EVENT": str(stall.kind),
            "STAGELINE_CAUSE": stall.cause,
            "STAGELINE_TEXT": stall.text,
            "STAGELINE_ACTION": stall.action,
            "STAGELINE_STEP": str(stall.step),
        }


NO_COMMAND = StallCommand((), Path())


def _become(words: tuple[str, ...], environment: Mapping[str, str]) -> int:
    """Become the command, in the process that was started for it; return an exit code if that is impossible."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # which Python ignores
    try:
        os.execvpe(words[0], words, environment)  # noqa: S606  # what the user has named
    except OSError as error:
        print(f"{words[0]}: {error.strerror}", file=sys.stderr)
    return _NOT_STARTED
