"""Two runs that are alive at once and go on in turn: while one has its window, all processes of the other are stopped.

    first     ####      ####      ####
    second         ####      ####      ####

What slows the machine for longer than a window slows both alike, so that the ratio of neighbouring windows tells 1 %
where whole runs in turn cannot tell 5 %. `windows.py` does the same with functions that return when they have ended;
here the runs are started by the caller, in any way, and go on for as long as they are measured.

    with started(plan, sets) as first, started(plan, other) as second:
        print(take_turns(first, second, windows=40))
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from stageline import make_schedule
from stageline.broker.control.sqlite_store import SqliteReader
from stageline.pipeline.schedule import Kind
from stageline.workers.runs.folder import STORE
from stageline.workers.runs.metrics import StepMetrics, metrics_in
from stageline.workers.runs.records import measured

from .rounds import FEWEST, PROGRESS, Spread
from .usage import nothing, tree
from .windows import SETTLING, TooFewWindows, Window, rates_in, ratios

SECONDS = 0.8  # of a window
PATIENCE = 120.0  # seconds for a run to end its first steps


@dataclass(frozen=True, slots=True)
class StartedRun:
    """A run that goes on by itself.

    Attributes:
        group: Its process group, by the process that leads it; what that has started belongs to the run as well.
        ends: Returns when each of the steps ended that are finished by now, in seconds of `time.time`. Where few steps
            fit into a window, when their parts ended.
        parts: Ends in a step.
        runs: Folder of runs that the run's folder is in.
    """

    group: int
    ends: Callable[[], Sequence[float]]
    parts: int = 1
    runs: Path = Path("runs")

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all processes, also to those in sessions of their own."""
        every: list[psutil.Process] = []  # first: of a process that was killed, none is a child any more
        with suppress(psutil.NoSuchProcess):
            every += tree(psutil.Process(self.group))
        with suppress(ProcessLookupError):
            os.killpg(self.group, number)
        for each in every:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(number)

    @property
    def is_alive(self) -> bool:
        """True while the process that leads the group runs, or is stopped."""
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.group).status() != psutil.STATUS_ZOMBIE
        return False


@dataclass(frozen=True, slots=True)
class PairedRates:
    """Rates of two runs in their windows.

    Attributes:
        first: Steps per second of the first run in each of its windows; 0 where there was hardly a step.
        second: The same of the second run.
        ratios: The second's rate in each window to the mean of the first's two around it.
    """

    first: tuple[float, ...]
    second: tuple[float, ...]
    ratios: Spread

    @classmethod
    def of(cls, first: Sequence[float], second: Sequence[float]) -> "PairedRates":
        """Return the rates of windows that took turns. Raises `TooFewWindows` if too few of them had steps."""
        found = ratios(first, second)
        if len(found.rounds) < FEWEST:
            raise TooFewWindows(
                f"{len(found.rounds)} windows had enough steps: give them more seconds, or more windows"
            )
        return cls(tuple(first), tuple(second), found)

    @property
    def rates(self) -> tuple[Spread, Spread]:
        """Rates of both runs, without windows that had hardly a step."""
        first, second = (Spread(tuple(rate for rate in each if rate)) for each in (self.first, self.second))
        return first, second

    def __str__(self) -> str:
        """Median of the ratios, and their quartiles."""
        low, middle, high = self.ratios.quartiles
        return f"{middle:.3f} ({low:.3f} to {high:.3f}, {len(self.ratios.rounds)} pairs)"


def take_turns(first: StartedRun, second: StartedRun, windows: int, seconds: float = SECONDS) -> PairedRates:
    """Let two runs go on in turn, and return their rates. Both are stopped (SIGSTOP) at the end.

    Args:
        first: Run that the other is compared with.
        second: The other run.
        windows: Number of windows of each run.
        seconds: Length of a window, for `LEAST` steps at least.

    Raises:
        TooFewWindows: A run had ended before, or there were hardly any steps in its windows.
    """
    both = first, second
    had: tuple[list[Window], list[Window]] = ([], [])
    for each in both:
        each.send(signal.SIGSTOP)
    for number in range(windows):
        for run, mine in zip(both, had, strict=True):
            mine.append(_window(run, seconds))
            PROGRESS.tell(f"window {number + 1} of {windows}", run.group, seconds=mine[-1].end - mine[-1].begin)
            if not run.is_alive:
                raise TooFewWindows(f"a run ended in its window {number + 1} of {windows}: give it more steps")
    return PairedRates.of(*(_rates(run, mine) for run, mine in zip(both, had, strict=True)))


def _rates(run: StartedRun, windows: Sequence[Window]) -> list[float]:
    run.send(signal.SIGCONT)  # its files are read while it goes on: it may have been stopped in the middle of a write
    try:
        return [rate / run.parts for rate in rates_in(run.ends(), windows)]
    finally:
        run.send(signal.SIGSTOP)


def _window(run: StartedRun, seconds: float) -> Window:
    run.send(signal.SIGCONT)
    try:
        time.sleep(SETTLING)
        begin = time.time()
        time.sleep(seconds)
        return Window(begin, time.time(), nothing())
    finally:
        run.send(signal.SIGSTOP)


@contextmanager
def started(plan: Path, sets: Sequence[str] = (), past: int = 8, microbatches: int = 0) -> Iterator[StartedRun]:
    """Yield a run of `stageline train`, stopped (SIGSTOP) once its first steps are over; it is killed at the end.

    Args:
        plan: File of the plan, with far more steps than are measured.
        sets: Settings, each as `--set` takes it.
        past: Number of steps that do not count.
        microbatches: Number in a step, to count these; 0 to count steps.

    Raises:
        TooFewWindows: The run ended, or did not finish these steps within `PATIENCE` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="paired-") as folder, open(f"{folder}/log", "w+b") as log:
        words = [each for setting in (f"run.dir={folder}/runs", *sets) for each in ("--set", setting)]
        command = [sys.executable, "-P", "-m", "stageline", "train", str(plan), *words]
        environment = {**os.environ, "STAGELINE_KEY_FILE": f"{folder}/own.key"}
        with subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment) as process:
            runs = Path(folder, "runs")
            steps = StartedRun(process.pid, lambda: step_ends(runs), runs=runs)
            parts = StartedRun(process.pid, lambda: microbatch_ends(runs, microbatches), microbatches, runs)
            run = parts if microbatches else steps
            try:
                _await_steps(steps, past, Path(folder, "log"))
                run.send(signal.SIGSTOP)
                yield run
            finally:
                run.send(signal.SIGKILL)


def step_ends(runs: Path) -> list[float]:
    """Return when the steps ended that the files of metrics in a folder of runs have, in the order of training."""
    found = (each for folder in sorted(runs.glob("*/metrics.jsonl")) for each in metrics_in(folder.parent))
    return [each.time for each in found if isinstance(each, StepMetrics)]


def microbatch_ends(runs: Path, microbatches: int) -> list[float]:
    """Return when the first stage's backward of each microbatch ended, by the broker's records.

    Args:
        runs: Folder with one run, of two stages by 1F1B.
        microbatches: Number of microbatches in a step.
    """
    (records,) = runs.glob(f"*/{STORE}")
    schedule = make_schedule("1f1b", [(0,), (1,)], microbatches)
    with closing(SqliteReader(records)) as store:
        timed = measured(store, schedule, range(len(step_ends(runs)) + 1))
    return sorted(each.end for each in timed if each.worker == 0 and each.action.kind is Kind.BACKWARD)


def _await_steps(run: StartedRun, count: int, log: Path) -> None:
    until = time.monotonic() + PATIENCE
    while len(run.ends()) < count:
        if not run.is_alive or time.monotonic() > until:
            raise TooFewWindows(f"a run has not finished {count} steps: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.1)
