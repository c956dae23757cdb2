"""Measures what each stage of a worker takes in memory, in its first step: see `pipeline/stage/held.py`."""

from collections.abc import Callable, Sequence

from torch.autograd.graph import saved_tensors_hooks

from stageline.pipeline.feature import Compute
from stageline.pipeline.schedule import Kind
from stageline.pipeline.stage.held import SavedBytes, lasting_bytes
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.tree import Tree, tensors
from stageline.workers.runtime.program.instruction import Instruction
from stageline.workers.runtime.progress import HeldBytes
from stageline.workers.runtime.worker_feature import WorkerFeature, WorkerPlace


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
