"""Puts what the plan offloads into files: activations in flight, and what stages hold from step to step."""

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from stageline.pipeline.plan import Plan
from stageline.pipeline.retry import Note
from stageline.pipeline.stage.layers.file_memory import FileMemory
from stageline.pipeline.stage.stage import Stage
from stageline.workers.disk.background_writer import LONGEST_WRITE, BackgroundWriter
from stageline.workers.disk.freed_memory import give_back_memory
from stageline.workers.disk.offload_files import MappedFiles, ScratchFiles

from .worker_feature import WorkerFeature, WorkerPlace, has_room


def offload_state(plan: Plan, stages: Iterable[Stage], folder: Path, note: Note | None) -> None:
    """Put weights and optimizers into files in `folder`, as `plan` says; if it offloads anything, memory that is freed
    goes back to the system from now on.

    Args:
        plan: Says what is offloaded of each stage.
        stages: Those of this process.
        folder: On the disk that is meant; it is made.
        note: Takes faults of the disk that may pass; without it, they are not waited for.

    Raises `WriteFailed` for a fault that did not pass.
    """
    memory = FileMemory(MappedFiles(folder, note))
    by_stage = [(stage, {*plan.offloaded_of(stage.index)}) for stage in stages]
    for stage, wanted in by_stage:
        if wanted & {"weights", "optimizer"}:
            stage.offload_state(memory, weights="weights" in wanted, optimizer="optimizer" in wanted)
    if any(wanted for _, wanted in by_stage):
        give_back_memory()


class Offload(WorkerFeature):
    """Files of the stages at `place`, in the run's folder."""

    def __init__(self, place: WorkerPlace) -> None:
        plan, stages, note = place.job.plan, place.executor.stages.values(), place.progress.noting("offload")
        self._progress = place.progress
        self._open = ExitStack()
        if offloaded := [stage for stage in stages if "activations" in plan.offloaded_of(stage.index)]:
            scratch = self._open.enter_context(ScratchFiles(place.folder / "offload", note, self._wait_for_room))
            for stage in offloaded:
                stage.offload_activations(scratch)
        offload_state(plan, stages, place.folder / "offload", note)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._open.close()

    def _wait_for_room(self, writer: BackgroundWriter) -> None:
        writer.demand(has_room(writer, None, self._progress, "activations are", LONGEST_WRITE), LONGEST_WRITE)


def offload(place: WorkerPlace) -> Offload | None:
    """Return the feature that offloads what the plan says of the stages at `place`."""
    stages = place.executor.stages.values()
    return Offload(place) if any(place.job.plan.offloaded_of(stage.index) for stage in stages) else None
