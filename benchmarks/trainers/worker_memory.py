"""How much memory the workers of a run take: anonymous pages, as Linux counts them for each process."""

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread

import psutil

from benchmarks.measuring.usage import tree
from stageline.pipeline.plan import read_plan
from stageline.workers.launch.launch import prepare_launch, run_launch
from stageline.workers.launch.template import Template
from stageline.workers.runs.folder import Facts

from .ours import unfinished

INTERVAL = 0.005  # seconds between two looks


@dataclass(slots=True)
class MemoryRun:
    """A run that has ended: of each worker, the most bytes over those that its process had when it was forked, with
    all imported. `sha256` is that of the weights."""

    sha256: str
    seconds: float
    peaks: tuple[int, ...]


def train_and_watch(plan: Path, sets: Sequence[str]) -> MemoryRun:
    """Trains the plan in a folder that is removed. No worker may be replaced."""
    with tempfile.TemporaryDirectory() as folder:
        sets = [f"run.dir={folder}", *sets]
        arguments = [str(plan), *(argument for each in sets for argument in ("--set", each))]
        with Template() as template, _WorkerWatch() as watch:
            launch = prepare_launch(read_plan(plan, sets=sets, environment=os.environ), arguments, template)
            ended = run_launch(launch, arguments, watch, template)
        if ended.result is None:
            raise unfinished(plan, sets, ended)
        return MemoryRun(ended.result.weights_sha256, ended.result.seconds, watch.peaks())


@dataclass
class _WorkerWatch:
    """Looks at all processes of this one; told of a run's workers, it knows which they are."""

    first: dict[int, int] = field(default_factory=dict)  # by process
    most: dict[int, int] = field(default_factory=dict)
    workers: dict[int, int] = field(default_factory=dict)  # the process of each
    over: Event = field(default_factory=Event)

    def __call__(self, facts: Facts) -> None:
        self.workers |= {each["index"]: each["pid"] for each in facts["workers"] if "pid" in each}

    def __enter__(self) -> "_WorkerWatch":
        self._thread = Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._thread.join()

    def peaks(self) -> tuple[int, ...]:
        return tuple(self.most[self.workers[index]] - self.first[self.workers[index]] for index in sorted(self.workers))

    def _look(self) -> None:
        own = psutil.Process()
        while not self.over.wait(INTERVAL):
            for process in tree(own):
                if (size := _anonymous(process.pid)) is not None:
                    self.first.setdefault(process.pid, size)
                    self.most[process.pid] = max(self.most.get(process.pid, 0), size)


def _anonymous(pid: int) -> int | None:
    """RssAnon in bytes; None if the process has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return None
