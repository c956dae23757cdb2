"""The progress of a run on a terminal: a bar for the steps, and a line for each stage."""

from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from stageline.workers.launch.launch import Launch

from .progress import Pace, doing, phase
from .tables import share

Facts = dict[str, Any]


class Bars:
    """See `progress.display`."""

    def __init__(self, launch: Launch) -> None:
        self._pace = Pace(launch)
        self._stages = range(launch.schedule.stages)
        self._told = 0  # damages
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
        self._pace.note(facts)
        for damage in facts["damaged"][self._told :]:
            self._live.console.print(f"stageline: {damage}", markup=False, highlight=False, soft_wrap=True)
        self._told = len(facts["damaged"])
        last = facts["last_loss"]
        self._progress.update(
            self._task,
            description=phase(facts, self._pace.steps),
            completed=min(facts["finished_floor"], self._pace.steps),
            loss="" if not last or last["loss"] is None else f"loss {last['loss']:.4g}",
            rate=f"{self._pace.rate:.4g} samples/s",
        )
        self._live.update(Group(self._progress, self._of_stages(facts)))

    def _of_stages(self, facts: Facts) -> Table:
        table = Table.grid(padding=(0, 2))
        for stage in self._stages:
            worker, now = doing(facts, stage)
            idle = f"idle {share(self._pace.idle[worker]):>5}"
            table.add_row(*map(Text, (f"stage {stage}", f"worker {worker}", idle, now)))
        return table
