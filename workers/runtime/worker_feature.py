"""Features that work beside the compute loop of one worker: they wrap computations, write to the disk, and are awaited.

    WorkerPlace ──factory──> WorkerFeature        once per worker, for each feature that the plan asks for

A feature registers itself in `REGISTERED` under its name, with the place of its factory: the worker that runs it does
not know its module. The factory returns None where the plan does not ask for it, or this worker has no part in it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import Self

from stageline.broker.queues.base import Queues
from stageline.pipeline.feature import Feature
from stageline.pipeline.program import Instruction
from stageline.pipeline.tree import Tree
from stageline.workers.disk.background_writer import BackgroundWriter
from stageline.workers.runs.metrics import MetricsFile, MetricsLine

from .call_source import Keep, SaveStages
from .executor import Executor
from .job import Job
from .loop import PATIENCE, Calls, WorkerLoop
from .losses import ComputeFailed
from .progress import Progress

SNAPSHOTS = "snapshots"  # the source of the faults of the writer that snapshots go through

REGISTERED = {  # the factory of each feature by its name, in the order in which they are opened, the outermost first
    "prefix cache": "stageline.workers.extras.prefix_cache.opening:prefix_cache",
    "recorder": "stageline.workers.extras.recording.recorder:recorder",
    "taps": "stageline.workers.extras.recording.taps:taps",
    "stage bytes": "stageline.workers.runtime.stage_memory:stage_bytes",
    "skipping": "stageline.workers.extras.recording.skipping:skipping",
    "metrics": "stageline.workers.runtime.worker_feature:metrics",
    "data use": "stageline.workers.extras.consent.guard:data_use",
}


@dataclass(frozen=True)
class WorkerPlace:
    """The place of one worker in a run, from which its features are made.

    Args:
        job: The run's model, data and program.
        folder: The run's folder.
        worker: The worker's index.
        run: The run's id.
        incarnation: Number of the incarnation under which the worker works.
        start: Training steps that come before.
        executor: Computes the worker's stages.
        queues: Carry the worker's messages.
        progress: Notes faults and waiting.
        serve: Waits so many seconds, while it serves the other workers and the broker.
    """

    job: Job
    folder: Path
    worker: int
    run: str
    incarnation: int
    start: int
    executor: Executor
    queues: Queues
    progress: Progress
    serve: Callable[[float], object]

    @property
    def has_last_stage(self) -> bool:
        """True for the worker that has the loss, and with it the metrics."""
        return self.executor.last in self.executor.stages

    @cached_property
    def writer(self) -> BackgroundWriter:
        """The writer of snapshots and of files that must be on the disk before them, in the order of submission."""
        return BackgroundWriter(SNAPSHOTS, limit=1, note=self.progress.noting(SNAPSHOTS))


class WorkerFeature(Feature, AbstractContextManager["WorkerFeature"]):
    """A feature of one worker, whose hooks do nothing.

    A subclass overrides the hooks that it needs. The feature is closed at the end of the worker.
    """

    def __enter__(self) -> Self:
        """Return this feature."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """End the work that the feature does beside the loop."""

    def measured(self, line: MetricsLine) -> None:
        """Take the metrics of a training step or an evaluation, on the worker of the last stage."""

    def settle(self, stage: int) -> None:
        """Return once everything that a worker needs to begin at the next snapshot of `stage` is on the disk.

        Called by the thread that writes the snapshot. Raises `OSError` for a fault that may pass.
        """

    def forget(self, step: int) -> None:
        """Note that snapshots of steps before `step` need not be kept. Returns at once."""

    def finish(self) -> None:
        """Return once everything is on the disk, since the program is over."""

    def cached_input(self, instruction: Instruction) -> Tree:
        """Return the input of the forward `instruction` if this feature has it; None if it comes from a queue."""
        return None

    def explain(self, error: ComputeFailed, features: Sequence["WorkerFeature"]) -> str:
        """Return a sentence on the failure `error` that stops the run; "" for none.

        A feature first keeps what the failure came from. `features` are all features of the worker.
        """
        return ""


class Measuring(WorkerFeature):
    """The feature that writes the metrics of a run, on the worker of the last stage."""

    def __init__(self, place: WorkerPlace) -> None:
        """Open the file of metrics of the run at `place`."""
        self._file = MetricsFile(place.folder, place.start, place.progress.noting("metrics"))
        self._last, self._wait = place.executor.last, place.serve

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Close the file."""
        self._file.close()

    def measured(self, line: MetricsLine) -> None:
        """Add a line to the file."""
        self._file.add(line)

    def settle(self, stage: int) -> None:
        """Write all lines to the disk, if `stage` is the last one."""
        if stage == self._last:
            self._file.flush()

    def finish(self) -> None:
        """Write all lines to the disk. After a fault that may pass, this is tried again for a minute."""
        self._file.finish(self._wait)


def metrics(place: WorkerPlace) -> Measuring | None:
    """Return the feature that writes metrics; None for a worker without the last stage."""
    return Measuring(place) if place.has_last_stage else None


def features_of(place: WorkerPlace, enter: Callable[[WorkerFeature], WorkerFeature]) -> list[WorkerFeature]:
    """Return the features that the plan asks for at `place`, each opened by `enter`.

    Exceptions from opening them pass.
    """
    made = (resolve_name(factory)(place) for factory in REGISTERED.values())
    return [enter(feature) for feature in made if feature is not None]


def explained(features: Sequence[WorkerFeature], error: ComputeFailed) -> str:
    """Return the error's text, and on lines of their own the sentences that `features` add to it."""
    return "\n".join([str(error), *filter(None, (feature.explain(error, features) for feature in features))])


def loop_of(
    place: WorkerPlace,
    features: Sequence[WorkerFeature],
    calls: Calls,
    *,
    keep: Keep = lambda step: None,
    save: SaveStages = lambda folder, position: None,
) -> WorkerLoop:
    """Return the loop of the worker at `place`, whose computations are within `features`.

    Args:
        place: Place of the worker.
        features: Features of the worker, which also take the metrics.
        calls: Calls of the run.
        keep: Saves the state after so many steps.
        save: Carries out a script's call to save the worker's stages.
    """

    def measured(line: MetricsLine) -> None:
        for feature in features:
            feature.measured(line)

    return WorkerLoop(
        calls,
        place.worker,
        place.executor,
        place.queues,
        carry_out=place.executor.within(features),
        run=place.run,
        incarnation=place.incarnation,
        start=place.start,
        progress=place.progress,
        measured=measured if place.has_last_stage else None,
        keep=keep,
        save=save,
        drawn=place.executor.take_drawn,
    )


def in_turns(wait: Callable[[float], bool], longest: float, meanwhile: Callable[[], None]) -> bool:
    """Return the result of `wait` as soon as it is true, or after `longest` seconds.

    Args:
        wait: Waits up to so many seconds, and returns True if the wait is over.
        longest: Longest wait, in seconds.
        meanwhile: Called every `PATIENCE` seconds.
    """
    while longest > PATIENCE:
        meanwhile()
        if wait(PATIENCE):
            return True
        longest -= PATIENCE
    return wait(longest)


def awaited(
    wait: Callable[[float], bool],
    progress: Progress,
    what: str,
    longest: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> bool:
    """Return the result of `wait` as `in_turns` does. After the first turn, the worker's reports tell of the wait.

    Args:
        wait: Waits up to so many seconds, such as for room in a writer, and returns True if the wait is over.
        progress: Notes that the worker waits.
        what: Text between "waits until" and "written", such as "a snapshot is".
        longest: Longest wait, in seconds.
        meanwhile: Called now and then during the wait.
    """
    if wait(PATIENCE):
        return True
    with progress.writing(what):
        return in_turns(wait, longest, meanwhile)
