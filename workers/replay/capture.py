"""Records what a worker's stages take and give, so that every microbatch of the last steps can be run again alone.

RecordingExecutor    runs an executor; passes its inputs and results to the record writer
RecordingHooks       are snapshot hooks that delete records together with snapshots
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from torch import Tensor

from stageline.broker.codec.message import Flow, Message
from stageline.broker.queues.base import QueueKey
from stageline.pipeline.numbering import message_number
from stageline.pipeline.plan import Plan
from stageline.pipeline.schedule import Action, Kind
from stageline.pipeline.stage.placing import copied
from stageline.pipeline.tree import Tree, map_tensors
from stageline.workers.checkpoint.hooks import SnapshotHooks
from stageline.workers.runtime.loop import PATIENCE, ActionExecutor
from stageline.workers.runtime.program import Instruction

from .record_file import Direction
from .record_writer import RecordWriter


def record_writer(plan: Plan, worker: int, run: str, incarnation: int, start: int) -> RecordWriter | None:
    """The record writer of a worker that begins at step `start`, if the plan records every microbatch."""
    if plan.recovery.record != "all":
        return None
    return RecordWriter(plan, run, plan.workers[worker].stages, incarnation, start)


class RecordingExecutor:
    """Records what `executor` does. `run`, `incarnation` and `microbatches` go into the recorded messages."""

    def __init__(
        self, executor: ActionExecutor, writer: RecordWriter, *, run: str, incarnation: int, microbatches: int
    ) -> None:
        self._executor = executor
        self._writer = writer
        self._run = run
        self._incarnation = incarnation
        self._microbatches = microbatches

    @property
    def loss(self) -> float | None:
        return self._executor.loss

    def measured(self) -> dict[str, float]:
        return self._executor.measured()

    def carry_out(self, instruction: Instruction, received: Sequence[Tree]) -> Tree:
        if instruction.evaluates or instruction.action.kind is Kind.UPDATE:
            return self._executor.carry_out(instruction, received)
        for key, payload in zip(instruction.takes, received, strict=True):
            before = map_tensors(_copied, payload)  # a layer may write to its input
            self._record(instruction, Direction.TAKEN, key, before)
        result = self._executor.carry_out(instruction, received)
        if (key_of_result := output_key(instruction.action)) is not None:
            self._record(instruction, Direction.GIVEN, key_of_result, result)
        return result

    def _record(self, instruction: Instruction, direction: Direction, key: QueueKey, payload: Tree) -> None:
        step, microbatch = instruction.step, instruction.action.microbatch
        number = message_number(step, microbatch, self._microbatches)
        message = Message(self._run, key.flow, step, microbatch, key.stage, self._incarnation, number, payload)
        self._writer.record(instruction.action.stage, direction, message)


class RecordingHooks(SnapshotHooks):
    """Keeps records for as long as snapshots: since the complete checkpoint before the newest.

    So a run that has just completed a checkpoint, or has finished, can still be replayed.
    """

    def __init__(self, records: RecordWriter, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._records = records

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        super().__exit__(kind, error, at)
        self._records.close(PATIENCE if error is None else 4 * PATIENCE)

    def delete_before(self, step: int) -> None:
        super().delete_before(step)
        self._records.delete_before(step)


def output_key(action: Action) -> QueueKey | None:
    """The queue that an action's result goes to, under which it is recorded. The loss is recorded as if a stage came
    after the last. None for the first stage's backward, which has no result."""
    if action.kind is Kind.FORWARD:
        return QueueKey(Flow.FORWARD, action.stage + 1)
    return QueueKey(Flow.BACKWARD, action.stage - 1) if action.stage else None


def _copied(tensor: Tensor) -> Tensor:
    copy = copied(tensor.detach())
    return copy.requires_grad_() if tensor.requires_grad else copy
