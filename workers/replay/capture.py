"""Records what a worker's stages take and give, so that every microbatch of the last steps can be run again alone.

RecordingExecutor    carries out as an executor does; what goes in and what comes out goes to the recorder too
Recording            a recovery that keeps one complete checkpoint more than the newest, with all messages since
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from torch import Tensor

from stageline.broker.codec.message import Flow, Message
from stageline.broker.queues.base import QueueKey
from stageline.pipeline.plan import Plan
from stageline.pipeline.schedule import Action, Kind
from stageline.pipeline.stage.placing import copied
from stageline.pipeline.tree import Tree, map_tensors
from stageline.workers.checkpoint.hooks import CheckpointHooks
from stageline.workers.runtime.loop import PATIENCE, ActionExecutor
from stageline.workers.runtime.machine import Instruction

from .record_file import Direction
from .recorder import RecordWriter


def recorder_of(plan: Plan, worker: int, run: str, incarnation: int, start: int) -> RecordWriter | None:
    """The recorder of a worker that begins at step `start`, if the plan wants every microbatch recorded."""
    if plan.recovery.record != "all":
        return None
    return RecordWriter(plan, run, plan.workers[worker].stages, incarnation, start)


class RecordingExecutor:
    """An `executor` that is watched. `run`, `incarnation` and `microbatches` are those of the messages."""

    def __init__(
        self, executor: ActionExecutor, recorder: RecordWriter, *, run: str, incarnation: int, microbatches: int
    ) -> None:
        self._executor = executor
        self._recorder = recorder
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
            self._keep(
                instruction, Direction.TAKEN, key, map_tensors(_copied, payload)
            )  # a layer may write to its input
        result = self._executor.carry_out(instruction, received)
        if (place := gives(instruction.action)) is not None:
            self._keep(instruction, Direction.GIVEN, place, result)
        return result

    def _keep(self, instruction: Instruction, way: Direction, key: QueueKey, payload: Tree) -> None:
        step, microbatch = instruction.step, instruction.action.microbatch
        number = step * self._microbatches + microbatch
        message = Message(self._run, key.flow, step, microbatch, key.stage, self._incarnation, number, payload)
        self._recorder.keep(instruction.action.stage, way, message)


class RecordingHooks:
    """Records beside what the checkpoint hooks `recovery` do, from checkpoint `start` on."""

    def __init__(self, recovery: CheckpointHooks, recorder: RecordWriter, start: int) -> None:
        self._recovery = recovery
        self._recorder = recorder
        self._newest = start

    def __enter__(self) -> Self:
        self._recovery.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._recovery.__exit__(kind, error, at)
        self._recorder.close(PATIENCE if error is None else 4 * PATIENCE)

    def stepped(self, stage: int, step: int, loss: float | None) -> None:
        self._recovery.stepped(stage, step, loss)

    def forget(self, complete: int) -> None:
        """What is older than the checkpoint before `complete` is forgotten: a run that has just completed one, or has
        finished, can still be looked into."""
        self._recovery.forget(complete)
        if complete > self._newest:
            self._recorder.forget(self._newest)
            self._newest = complete

    def flush(self) -> None:
        self._recovery.flush()

    def stop_at(self, step: int) -> None:
        self._recovery.stop_at(step)


def gives(action: Action) -> QueueKey | None:
    """Where what an action gives is recorded: in the queue that it goes to. The loss is recorded as if there was a
    stage after the last. None for what is nothing: the first stage's gradient."""
    if action.kind is Kind.FORWARD:
        return QueueKey(Flow.FORWARD, action.stage + 1)
    return QueueKey(Flow.BACKWARD, action.stage - 1) if action.stage else None


def _copied(tensor: Tensor) -> Tensor:
    copy = copied(tensor.detach())
    return copy.requires_grad_() if tensor.requires_grad else copy
