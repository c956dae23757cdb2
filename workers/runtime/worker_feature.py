"""Features that work beside the compute loop of one worker: they wrap computations, write to the disk, and are awaited.

    WorkerPlace ──factory──> WorkerFeature        once per worker, for each feature that the plan asks for

A feature registers itself in `REGISTERED` under its name, with the place of its factory: the worker that runs it does
not know its module. The factory returns None where the plan does not ask for it, or this worker has no part in it.
"""

from collections.abc import Callable, Hashable, Sequence
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
    "recorder": "stageline.workers.extras.replay.recorder:recorder",
    "taps": "stageline.workers.extras.taps.tap_writer:taps",
    "stage bytes": "stageline.workers.runtime.stage_memory:stage_bytes",
    "skipping": "stageline.workers.runtime.skipping:skipping",
    "offload": "stageline.workers.runtime.stage_memory:offload",
    "metrics": "stageline.workers.runtime.worker_feature:metrics",
}


@dataclass(frozen=True)
class WorkerPlace:
    """One worker of a run, from which its features are made.

    Args:
        job: The run's model, data and program.
        folder: The run's.
        worker: The worker's index.
        run: The run's id.
        incarnation: Under which it works.
        start: The training steps that come before.
        executor: Computes its stages.
        queues: Carry its messages.
        progress: Is told of faults and waiting.
        serve: Waits so many seconds, and goes on serving the other workers and the broker.
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
        """Writes snapshots, and what has to be on the disk before them, in the order in which it was handed over."""
        return BackgroundWriter(SNAPSHOTS, limit=1, note=self.progress.noting(SNAPSHOTS))


class WorkerFeature(Feature, AbstractContextManager["WorkerFeature"]):
    """Hooks that do nothing. A subclass overrides those that it needs; it is closed at the end of the worker."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Ends what the feature does beside the loop."""

    def measured(self, line: MetricsLine) -> None:
        """Take the metrics of a training step or an evaluation, on the worker of the last stage."""

    def settle(self, stage: int) -> None:
        """Return once all that a worker needs which begins at the next snapshot of `stage` is on the disk.

        Called by the thread that writes the snapshot. Raises `OSError` for a fault that may pass.
        """

    def forget(self, step: int) -> None:
        """Snapshots of steps before `step` need not be kept. Returns at once."""

    def finish(self) -> None:
        """Return once all is on the disk: the program is over."""

    def cached_input(self, instruction: Instruction) -> Tree:
        """Return the input of the forward `instruction` if that comes from this feature, and from no queue."""
        return None

    def explain(self, error: ComputeFailed, features: Sequence["WorkerFeature"]) -> str:
        """Return a sentence on the failure that stops the run, after keeping what it came from; "" for none."""
        return ""


class Measuring(WorkerFeature):
    """Writes the metrics of the run at `place`, the worker of the last stage."""

    def __init__(self, place: WorkerPlace) -> None:
        self._file = MetricsFile(place.folder, place.start, place.progress.noting("metrics"))
        self._last, self._wait = place.executor.last, place.serve

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._file.close()

    def measured(self, line: MetricsLine) -> None:
        self._file.add(line)

    def settle(self, stage: int) -> None:
        if stage == self._last:
            self._file.flush()

    def finish(self) -> None:
        self._file.finish(self._wait)


def metrics(place: WorkerPlace) -> Measuring | None:
    """Return the feature that writes metrics, for the worker of the last stage."""
    return Measuring(place) if place.has_last_stage else None


def features_of(place: WorkerPlace, enter: Callable[[WorkerFeature], WorkerFeature]) -> list[WorkerFeature]:
    """Open the features that the plan asks for at `place`, each within `enter`.

    Raises what opening them raises.
    """
    made = (resolve_name(factory)(place) for factory in REGISTERED.values())
    return [enter(feature) for feature in made if feature is not None]


def explained(features: Sequence[WorkerFeature], error: ComputeFailed) -> str:
    """Return the error's text, and on lines of their own what `features` add to it."""
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
        place: The worker's.
        features: Its features, which also take the metrics.
        calls: The run's.
        keep: As the loop takes it.
        save: Likewise.
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
    )


def has_room(writer: BackgroundWriter, key: Hashable, progress: Progress, what: str, longest: float) -> bool:
    """Whether `writer` has room under `key`; waits for that up to `longest` seconds. `what` continues "waits until"
    and is continued by "written"."""
    return _told(lambda timeout: writer.has_room(key, timeout), progress, what, longest)


def is_written(
    writer: BackgroundWriter,
    key: Hashable,
    progress: Progress,
    what: str,
    longest: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> bool:
    """Whether all that `writer` was given under `key` is done; waits as `has_room` does, and calls `meanwhile` now and
    then."""
    return _told(lambda timeout: writer.is_done(key, timeout), progress, what, longest, meanwhile)


def in_turns(wait: Callable[[float], bool], longest: float, meanwhile: Callable[[], None]) -> bool:
    """What `wait` returns once it is true, or after `longest` seconds; calls `meanwhile` every `PATIENCE` seconds."""
    while longest > PATIENCE:
        meanwhile()
        if wait(PATIENCE):
            return True
        longest -= PATIENCE
    return wait(longest)


def _told(
    wait: Callable[[float], bool],
    progress: Progress,
    what: str,
    longest: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> bool:
    if wait(PATIENCE):
        return True
    with progress.writing(what):
        return in_turns(wait, longest, meanwhile)
