"""Progress of a run on stderr: bars on a terminal, otherwise a line every few seconds.

Between them stands the news since the last status, each told once: losses, stalls, damages, evaluations.
"""

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from stageline.broker.control.messages import WAITS
from stageline.broker.ledger.evaluations import record_of, told
from stageline.broker.ledger.wait_graph import HARMLESS
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.printable import printable_line
from stageline.pipeline.retry import TRIED
from stageline.workers.cli.output import say, share
from stageline.workers.keys.keyring import pair_towards
from stageline.workers.launch.launch import Launch
from stageline.workers.runs.folder import Facts, read_broker_url
from stageline.workers.runs.pauses import PauseNews
from stageline.workers.script.calls.news import LostWorkers, ask

from .stalls import NO_COMMAND, OnStall, SlowedPace, Stall, StallCommand, StallKind

STALL = 5.0  # seconds without a finished step, and
SLOW = 3  # times as long as a step has taken of late, before it is told what the run waits for
INTERVAL = 5.0  # seconds between two lines
WINDOW = 3.0  # seconds over which the rate is measured
_INTERRUPTED = (ExitCode.SAVED, ExitCode.INTERRUPTED)


class News:
    """Source of news of a run, as lines for people."""

    def __init__(self, start: str, why: Callable[[], Facts | None], command: StallCommand = NO_COMMAND) -> None:
        """Start without news.

        Args:
            start: Text on how a replacement is started.
            why: Asks what the run waits for, and what limits it.
            command: Started at each stall.
        """
        self._lost = LostWorkers(start)
        self._pauses = PauseNews()
        self._command = command
        self._stalled = StalledSteps(why, lambda stall: command.start(stall, monotonic()))
        self._damages = 0
        self._evaluated: int | None = None  # steps before the newest evaluation that was told; None before a status

    def lines(self, facts: Facts) -> Iterator[str]:
        """Yield the news in a status that were not told before."""
        new = facts["damaged"][self._damages :]
        self._damages += len(new)
        yield from new
        yield from self._lost.lines(facts)
        yield from self._pauses.lines(facts)
        yield from self._stalled.lines(facts)
        yield from self._command.look(monotonic())
        yield from self._evaluations(facts)

    def _evaluations(self, facts: Facts) -> list[str]:
        """Return lines for new evaluations: several, if they follow faster than statuses.

        Of the evaluations before a run was resumed, only the last is told.
        """
        told = self._evaluated
        found = facts["evaluations"][-1:] if told is None else [e for e in facts["evaluations"] if e["step"] > told]
        self._evaluated = found[-1]["step"] if found else told or 0
        return [evaluation_told(each, facts["best"]) for each in found]


class StalledSteps:
    """Detector of a run that finishes no step although no known loss or fault explains it, or slows down."""

    def __init__(self, why: Callable[[], Facts | None], on_stall: OnStall) -> None:
        """Take `why`, which asks the broker what the run waits for, and what is called once at each stall."""
        self._why = why
        self._on_stall = on_stall
        self._pace = SlowedPace(why, on_stall)
        self._even = 0.0  # since when steps have been finished without a pause
        self._finished: int | None = None  # steps, as of the last status of a run without a known cause to wait
        self._since = 0.0  # when that became so
        self._asked = 0.0
        self._took = 0.0  # seconds of a step, the last ones above all
        self._told: set[tuple[str, object]] = set()  # causes, with the worker that is to blame

    def lines(self, facts: Facts) -> Iterator[str]:
        """Yield each cause once until a step is finished, and then a line that the run continues."""
        now, finished = monotonic(), facts["finished_floor"]
        faulty = facts.get("fault") or any(row.get("fault") or row.get("trouble") for row in facts["workers"])
        if facts["phase"] != "running" or facts["recovering"] or faulty or facts.get("paused"):
            self._finished = None
            self._told.clear()
        elif finished != self._finished:
            self._even = now if self._finished is None or now - self._since >= self._longest else self._even
            yield from self._moved(finished, now)
            yield from self._pace.lines(facts, now - self._even)
        elif now - max(self._since, self._asked) >= self._longest:
            self._asked = now
            yield from self._cause(now)

    @property
    def _longest(self) -> float:
        """Seconds without a finished step that are no pause."""
        return max(STALL, SLOW * self._took)

    def _moved(self, finished: int, now: float) -> Iterator[str]:
        if self._told:
            yield f"the run goes on, after {now - self._since:.0f} s without a finished step"
        elif self._finished is not None and finished > self._finished:
            self._took += ((now - self._since) / (finished - self._finished) - self._took) / 2
        self._told.clear()
        self._finished, self._since = finished, now

    def _cause(self, now: float) -> Iterator[str]:
        facts = self._why()
        if facts is None or facts["root"] is None or facts["root"]["cause"] in HARMLESS:
            return
        worker = facts["root"]["worker"]
        cause = facts["root"]["cause"], worker and worker["index"]
        if cause not in self._told:
            first = not self._told
            self._told.add(cause)
            yield f"no step was finished for {now - self._since:.0f} s: {facts['text']}. What to do: {facts['action']}"
            if first:
                stall = Stall(StallKind.STALLED, cause[0], facts["text"], facts["action"], self._finished or 0)
                yield from self._on_stall(stall)


def evaluation_told(found: Facts, best: Facts | None) -> str:
    """Return a line such as `evaluation after step 100: loss 0.1234, accuracy 0.93, the best so far`."""
    text = f"evaluation after step {found['step']}: {told(record_of(found))}"
    return f"{text}, the best so far" if best is not None and best["step"] == found["step"] else text


@contextmanager
def progress_of(launch: Launch, on_stall: Sequence[str] = ()) -> Iterator[Callable[[Facts], None]]:
    """Return a context whose value is to be called with each new status of the broker.

    Args:
        launch: Run that is to be followed.
        on_stall: Words of the command line that is started at each stall; none for no command.
    """
    with StallCommand(on_stall, launch.folder) as command:
        start = f"Its process was started again; see its log in {launch.folder}"
        news = News(start, partial(_why, launch.folder), command)
        if not sys.stderr.isatty():
            yield Lines(launch, news)
            return
        with Live(console=Console(stderr=True), refresh_per_second=8, transient=True) as live:
            yield Bars(launch, news, live)


def _why(folder: Path) -> Facts | None:
    """Return the broker's answer on what the run in `folder` waits for; None if no broker answers."""
    url = read_broker_url(folder)
    return None if url is None else ask(url, "why", pair_towards(url, os.environ))


class Lines:
    """Progress as lines: `step 120 of 460, loss 0.1234, 3456 samples/s, idle 12 %, 30 %`."""

    def __init__(self, launch: Launch, news: News) -> None:
        """Follow the run of `launch`, and print `news` of it."""
        self._pace = Pace(launch)
        self._news = news
        self._printed = monotonic(), 0  # when progress was printed, and how many steps were finished then
        self._phase = ""

    def __call__(self, facts: Facts) -> None:
        """Print the news in a status, and progress if the phase has changed or `INTERVAL` has passed."""
        self._pace.record(facts)
        for news in self._news.lines(facts):
            say(f"stageline: {news}", err=True)
        now, phase, finished = monotonic(), self._pace.phase(facts), self._pace.finished(facts)
        printed, before = self._printed
        if phase != self._phase:
            self._phase = phase
            say(f"stageline: {phase}", err=True)
        elif facts["phase"] == "running" and now - printed >= INTERVAL and finished != before:
            self._printed = now, finished
            parts = (
                f"step {finished} of {self._pace.steps}",
                finished_loss(facts),
                self._pace.rate,
                f"idle {', '.join(map(share, self._pace.idle))}",
            )
            say(f"stageline: {', '.join(part for part in parts if part)}", err=True)


class Bars:
    """Progress as a bar for the steps, and a line for each stage."""

    def __init__(self, launch: Launch, news: News, live: Live) -> None:
        """Follow the run of `launch`, print `news` of it, and draw in `live`."""
        self._pace = Pace(launch)
        self._news = news
        self._label = launch.schedule.label
        self._stages = range(launch.schedule.copies)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),  # it may contain what a worker says
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._task = self._progress.add_task("waiting for the broker", total=launch.steps, loss="", rate="")
        self._live = live
        live.update(self._progress)

    def __call__(self, facts: Facts) -> None:
        """Print the news in a status, and draw it."""
        self._pace.record(facts)
        for news in self._news.lines(facts):
            self._live.console.print(
                printable_line(f"stageline: {news}"), markup=False, highlight=False, soft_wrap=True
            )
        self._progress.update(
            self._task,
            description=printable_line(self._pace.phase(facts)),
            completed=self._pace.finished(facts),
            loss=finished_loss(facts),
            rate=self._pace.rate,
        )
        self._live.update(Group(self._progress, self._stage_table(facts)))

    def _stage_table(self, facts: Facts) -> Table:
        table = Table.grid(padding=(0, 2))
        for stage in self._stages:
            worker, activity = stage_activity(facts, stage)
            idle = f"idle {share(self._pace.idle[worker]):>5}"
            table.add_row(
                *map(Text, (f"stage {self._label(stage)}", f"worker {worker}", idle, printable_line(activity)))
            )
        return table


class Pace:
    """Rates over a few seconds, which a single status does not hold."""

    def __init__(self, launch: Launch) -> None:
        """Measure the run of `launch`."""
        self._rows = launch.plan.data.batch_size * launch.plan.schedule.accumulate
        self._history: deque[tuple[float, int]] = deque()  # time in seconds, steps finished
        self.steps = launch.steps
        self.idle = [0.0] * len(launch.plan.workers)  # each worker's share of idle time, 0 to 1

    def record(self, facts: Facts) -> None:
        """Update the rates with a status."""
        now = monotonic()
        finished = self.finished(facts)
        if self._history and finished < self._history[-1][1]:  # a lost stage does steps again
            self._history.clear()
        self._history.append((now, finished))
        while now - self._history[0][0] > WINDOW and len(self._history) > 2:
            self._history.popleft()
        for worker in facts["workers"]:
            if (idle := worker.get("idle")) is not None:
                self.idle[worker["index"]] += (idle - self.idle[worker["index"]]) * 0.2

    def finished(self, facts: Facts) -> int:
        """Return the number of training steps that every stage has finished."""
        return min(int(facts["finished_floor"]), self.steps)

    @property
    def rate(self) -> str:
        """Rate as text: `3456 samples/s`."""
        (earlier, before), (later, after) = self._history[0], self._history[-1]
        rate = (after - before) * self._rows / (later - earlier) if later > earlier else 0.0
        return f"{rate:.4g} samples/s"

    def phase(self, facts: Facts) -> str:
        """Return the activity of the run as a whole."""
        if facts["phase"] in ("waiting", "running") and (blocked := _waiting_for_server(facts) or _fault(facts)):
            return blocked
        if facts.get("listening"):
            return "the broker was started again: waiting for the workers to reconnect"
        if facts["recollecting"]:
            return "the broker has no records of the run: asking the workers how far it is"
        if facts["missing"]:
            return f"waiting for {_workers(facts['missing'])}"
        if (facts.get("paused") or {}).get("in_effect"):
            return "paused"
        if facts["phase"] == "running" and facts["finished_floor"] >= self.steps:
            return "evaluating"
        if facts["phase"] == "waiting":
            return "waiting for the workers to connect their queues"
        if facts["phase"] == "failed" and facts.get("code") in _INTERRUPTED:
            return "interrupted"
        return str(facts["phase"])


def _workers(indices: Sequence[int]) -> str:
    """Return the workers as text: `worker 1`, `workers 0, 1 and 3`."""
    *others, last = map(str, indices)
    return f"workers {', '.join(others)} and {last}" if others else f"worker {last}"


def finished_loss(facts: Facts) -> str:
    """Return `loss 0.1234`, of the newest step that every stage has finished; "" before the first, and without rows.

    If gradients are clipped, their norm is added.
    """
    last, norm = facts["finished_loss"], facts.get("gradient_norm")
    loss = f"loss {last['loss']:.4g}" if last and last["loss"] is not None else ""
    return f"{loss}, gradient norm {norm['norm']:.4g}" if loss and norm else loss


def stage_activity(facts: Facts, stage: int) -> tuple[int, str]:
    """Return the worker of a stage and its activity for that stage; "" while it computes another of its stages."""
    worker = next(worker for worker in facts["workers"] if stage in worker["stages"])
    now = str(worker.get("now", "starts"))
    action = now.partition(" ")[0]
    elsewhere = action[:1].isdigit() and not action.startswith(f"{stage}{action.lstrip('0123456789')[:1]}")
    return worker["index"], "" if elsewhere else now


def _waiting_for_server(facts: Facts) -> str:
    """Return which worker waits for the server of its queues, and why; "" if none does."""
    waits = ((row["index"], row["now"]) for row in facts["workers"] if row.get("trouble"))
    return next((f"worker {index} {now}" for index, now in waits if now.startswith(WAITS)), "")


def _fault(facts: Facts) -> str:
    """Return the present fault of the broker, or else of the first worker that has one; "" if there is none.

    The fault's seconds, which change, are left out, so that it is told once.
    """
    faults = [
        ("the broker", facts.get("fault")),
        *((f"worker {row['index']}", row.get("fault")) for row in facts["workers"]),
    ]
    lacking = (f"{who} {str(fault).partition(TRIED)[0]}, and tries again" for who, fault in faults if fault)
    return next(lacking, "")
