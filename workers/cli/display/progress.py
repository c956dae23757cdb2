"""The progress of a run on stderr: bars on a terminal, otherwise a line every few seconds."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import monotonic
from types import TracebackType
from typing import Self

import click
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from stageline.workers.launch.launch import Launch
from stageline.workers.runs.result import Facts

from .pace import Pace, last_loss, stage_activity
from .tables import share

INTERVAL = 5.0  # seconds between two lines


def progress_of(launch: Launch) -> AbstractContextManager[Callable[[Facts], None]]:
    """A context whose value is called with each new status of the broker."""
    return Bars(launch) if sys.stderr.isatty() else nullcontext(Lines(launch))


class Lines:
    """`step 120 of 460, loss 0.1234, 3456 samples/s, idle 12 %, 30 %`."""

    def __init__(self, launch: Launch) -> None:
        self._pace = Pace(launch)
        self._printed = monotonic()
        self._phase = ""

    def __call__(self, facts: Facts) -> None:
        for damage in self._pace.record(facts):
            _print(damage)
        now, phase = monotonic(), self._pace.phase(facts)
        if phase != self._phase:
            self._phase = phase
            _print(phase)
        elif facts["phase"] == "running" and now - self._printed >= INTERVAL:
            self._printed = now
            _print(self._progress(facts))

    def _progress(self, facts: Facts) -> str:
        parts = (
            f"step {self._pace.finished(facts)} of {self._pace.steps}",
            last_loss(facts),
            self._pace.rate,
            f"idle {', '.join(map(share, self._pace.idle))}",
        )
        return ", ".join(part for part in parts if part)


def _print(text: str) -> None:
    click.echo(f"stageline: {text}", err=True)


class Bars:
    """A bar for the steps, and a line for each stage."""

    def __init__(self, launch: Launch) -> None:
        self._pace = Pace(launch)
        self._stages = range(launch.schedule.stages)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._task = self._progress.add_task("waiting for the broker", total=launch.steps, loss="", rate="")
        self._live = Live(self._progress, console=Console(stderr=True), refresh_per_second=8, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._live.stop()

    def __call__(self, facts: Facts) -> None:
        for damage in self._pace.record(facts):
            self._live.console.print(f"stageline: {damage}", markup=False, highlight=False, soft_wrap=True)
        self._progress.update(
            self._task,
            description=self._pace.phase(facts),
            completed=self._pace.finished(facts),
            loss=last_loss(facts),
            rate=self._pace.rate,
        )
        self._live.update(Group(self._progress, self._stage_table(facts)))

    def _stage_table(self, facts: Facts) -> Table:
        table = Table.grid(padding=(0, 2))
        for stage in self._stages:
            worker, activity = stage_activity(facts, stage)
            idle = f"idle {share(self._pace.idle[worker]):>5}"
            table.add_row(*map(Text, (f"stage {stage}", f"worker {worker}", idle, activity)))
        return table
