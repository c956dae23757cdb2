"""Features for the memory of stages: what the plan offloads into files, and the measure of what each stage takes.

The meter measures in the first step: see `pipeline/stage/held.py`.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from torch.autograd.graph import saved_tensors_hooks

from stageline.pipeline.feature import Compute
from stageline.pipeline.plan import Plan
from stageline.pipeline.program import Instruction
from stageline.pipeline.retry import Note
from stageline.pipeline.schedule import Kind
from stageline.pipeline.stage.held import SavedBytes, lasting_bytes
from stageline.pipeline.stage.layers.file_memory import FileMemory
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.tree import Tree, tensors
from stageline.workers.disk.background_writer import LONGEST_WRITE, BackgroundWriter
from stageline.workers.disk.memory import MappedFiles, ScratchFiles, give_back_memory

from .progress import HeldBytes
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


class StageBytesMeter(WorkerFeature):
    """Measures each stage: in the first forward that is trained, and in the first update. `found` is told of each."""

    def __init__(self, found: Callable[[int, HeldBytes], object]) -> None:
        self._found = found
        self._microbatch: dict[int, tuple[int, int | None]] = {}  # by stage, until its first update
        self._over: set[int] = set()  # stages that are measured

    def around(self, stage: Stage, kind: str, compute: Compute) -> Compute:
        def forward(instruction: Instruction, received: Sequence[Tree]) -> Tree:
            index = instruction.action.stage
            if index in self._over or index in self._microbatch or instruction.evaluates:
                return compute(instruction, received)
            saved = SavedBytes(stage)
            with saved_tensors_hooks(saved.note, lambda tensor: tensor):
                output = compute(instruction, received)
            for tensor in tensors(output):
                saved.note(tensor)
            self._microbatch[index] = (saved.bytes, stage.halfway_bytes()) if stage.in_flight else (0, 0)
            return output

        def update(instruction: Instruction, received: Sequence[Tree]) -> Tree:
            result, index = compute(instruction, received), instruction.action.stage
            if index not in self._over:
                self._over.add(index)
                self._found(index, (sum(lasting_bytes(stage).values()), *self._microbatch.pop(index, (0, 0))))
            return result

        return {Kind.FORWARD: forward, Kind.UPDATE: update}.get(Kind(kind), compute)


def stage_bytes(place: WorkerPlace) -> StageBytesMeter | None:
    """Return the meter of a run that chooses its schedule."""
    return StageBytesMeter(place.progress.takes) if place.job.plan.schedule.is_auto else None
