"""The memory of stages: what the plan offloads into files, and a feature that measures what each stage takes.

The meter measures in the first step: see `pipeline/stage/held.py`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter

from torch.autograd.graph import saved_tensors_hooks

from stageline.pipeline.feature import Compute
from stageline.pipeline.features.offload import Offload
from stageline.pipeline.plan import Plan
from stageline.pipeline.program import Instruction
from stageline.pipeline.schedule import Kind
from stageline.pipeline.stage.held import SavedBytes, lasting_bytes
from stageline.pipeline.stage.layers.file_memory import FileMemory
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.tree import Tree, tensors
from stageline.workers.disk.background_writer import LONGEST_WRITE, BackgroundWriter
from stageline.workers.disk.memory import MappedFiles, ScratchFiles, give_back_memory

from .progress import HeldBytes, Progress
from .worker_feature import WorkerFeature, WorkerPlace, awaited


class OffloadFiles(AbstractContextManager["OffloadFiles"]):
    """The files of what a plan offloads. The scratch for activations is closed at the end of the context."""

    def __init__(self, plan: Plan, folder: Path, progress: Progress | None) -> None:
        """Take the folder; files are made when they are needed.

        Args:
            plan: Says what is offloaded of each stage.
            folder: Folder for the files, on the disk that is meant. It is made.
            progress: Notes faults of the disk that may pass, and waiting. Without it, faults are not waited for, and
                activations stay in memory.
        """
        self._plan = plan
        self._folder = folder
        self._progress = progress
        self._note = None if progress is None else progress.noting("offload")
        self._memory = FileMemory(MappedFiles(folder, self._note))
        self._open = ExitStack()
        self._given = False

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Close the scratch."""
        self._open.close()

    def of(self, stage: int) -> Offload:
        """Return the offload of `stage`. Moving a tensor into it raises `WriteFailed` for a fault that did not pass."""
        wanted = {*self._plan.offloaded_of(stage)}
        self._given = self._given or bool(wanted)
        scratch = self._scratch if "activations" in wanted else None
        memory = self._memory if wanted & {"weights", "optimizer"} else None
        return Offload(scratch, memory, weights="weights" in wanted, optimizer="optimizer" in wanted)

    def give_back(self) -> None:
        """Give memory that stages have left for the files back to the system, and what is freed from now on, too."""
        if self._given:
            give_back_memory()

    @cached_property
    def _scratch(self) -> ScratchFiles | None:
        progress, note = self._progress, self._note
        if progress is None or note is None:
            return None

        def wait_for_room(writer: BackgroundWriter) -> None:
            room = partial(writer.has_room, None)
            if not (there := room(0.0)):
                began = perf_counter()
                there = awaited(room, progress, "activations are", LONGEST_WRITE)
                progress.offloaded(perf_counter() - began)
            writer.demand(there, LONGEST_WRITE)

        return self._open.enter_context(ScratchFiles(self._folder, note, wait_for_room, progress.offloaded))


class StageBytesMeter(WorkerFeature):
    """The feature that measures the memory of each stage: in its first trained forward, and in its first update."""

    only_trains = True

    def __init__(self, found: Callable[[int, HeldBytes], object]) -> None:
        """Begin without measurements. `found` is called with each stage and its bytes."""
        self._found = found
        self._microbatch: dict[int, tuple[int, int | None]] = {}  # by stage, until its first update
        self._over: set[int] = set()  # stages that are measured

    def around(self, stage: Stage, kind: str, compute: Compute) -> Compute:
        """Return `compute` with a measurement, for forwards and updates; others are unchanged."""

        def forward(instruction: Instruction, received: Sequence[Tree]) -> Tree:
            index = instruction.action.stage
            if index in self._over or index in self._microbatch:
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
    """Return the meter of a run that chooses its schedule; None in another run."""
    return StageBytesMeter(place.progress.takes) if place.job.plan.schedule.is_auto else None
