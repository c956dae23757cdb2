"""Runs one microbatch of a job in this process before the run: through all stages, with an update and the metrics.

Errors of a user's model, loss, optimizer or metric show here, before any other process starts. The bytes that stages
and messages take are measured on the way.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from stageline.broker.codec.message import Message, encode
from stageline.broker.errors import Unsendable
from stageline.broker.queues.base import QueueKey
from stageline.pipeline.model.load import ModelRefused
from stageline.pipeline.schedule import Action, Kind
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.tree import Tree, map_leaves, tensors
from stageline.workers.runtime.executor import ComputeFailed, Executor
from stageline.workers.runtime.job import Job
from stageline.workers.runtime.program import Instruction


@dataclass(frozen=True, slots=True)
class StageSize:
    """What a stage holds. All but `parameters`, their number, are bytes.

    `optimizer` is the optimizer's state after one update; `activations` is what one microbatch keeps alive between its
    forward and its backward.
    """

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """By stage, what it holds; by queue, the bytes of one message, header included."""

    stages: list[StageSize]
    messages: dict[QueueKey, int]


def dry_run(job: Job) -> Sizes:
    """Runs the first microbatch of `job`, whose stages are used up by it: prepare the job again to train it.

    Raises `ModelRefused` or `DataError` for what could not be trained.
    """
    stages: list[StageSize] = []
    messages: dict[QueueKey, int] = {}
    executors = [_executor(job, worker) for worker in range(len(job.plan.workers))]
    try:
        trained: Tree = None
        for index in range(job.schedule.stages):
            executor = executors[job.schedule.owner(index)]
            messages |= _gradient_message(job, index, trained)
            saved = _Saved(executor.stages[index])
            with saved_tensors_hooks(saved.note, lambda tensor: tensor):
                trained = executor.carry_out(_forward(job, index), _received(index, trained))
            saved.note_all(tensors(trained))
            messages |= _activation_message(job, index, trained)
            stages.append(_measured(job, executor, index, saved.bytes))
        _demand_gradient(job, executors)
        _evaluate(job, executors)
    except (ComputeFailed, Unsendable) as error:
        raise ModelRefused(f"a dry run of the first microbatch failed: {error}") from error
    return Sizes(stages, messages)


def _demand_gradient(job: Job, executors: list[Executor]) -> None:
    last = job.program.last
    trains = any(stage.optimizer for executor in executors for stage in executor.stages.values())
    if trains and not executors[job.schedule.owner(last)].stages[last].in_flight:
        raise ModelRefused(
            "the loss has no gradient, so nothing would be trained: between the weights and the loss there is a "
            "detach(), a no_grad(), or an operation without a derivative such as argmax()"
        )


class _Saved:
    """Counts the memory that autograd keeps for a backward, without that of the weights."""

    def __init__(self, stage: Stage) -> None:
        self.bytes = 0
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in stage.state_dict().values()}

    def note(self, tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in self._seen:
            self._seen.add(memory.data_ptr())
            self.bytes += memory.nbytes()
        return tensor

    def note_all(self, kept: Iterable[Tensor]) -> None:
        for tensor in kept:
            self.note(tensor)


def _executor(job: Job, worker: int) -> Executor:
    device = job.plan.workers[worker].device
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
        reason = str(error).partition("\n")[0]
        raise ModelRefused(f'workers.{worker}.device = "{device}" cannot be used here: {reason}') from error
    return job.executor(job.schedule.placement[worker])


def _forward(job: Job, stage: int, *, evaluates: bool = False) -> Instruction:
    step = job.feed.evaluation.start if evaluates else 0
    return job.program.instruction(step, Action(Kind.FORWARD, stage), evaluates=evaluates)


def _received(stage: int, sent: Tree) -> list[Tree]:
    return [sent] if stage else []


def _activation_message(job: Job, stage: int, sent: Tree) -> dict[QueueKey, int]:
    key = job.program.gives(Action(Kind.FORWARD, stage, 0))
    return {} if key is None else {key: _bytes_of(key, sent)}


def _gradient_message(job: Job, stage: int, received: Tree) -> dict[QueueKey, int]:
    key = job.program.gives(Action(Kind.BACKWARD, stage, 0))
    gradient = map_leaves(lambda leaf: leaf if isinstance(leaf, Tensor) and leaf.requires_grad else None, received)
    return {} if key is None else {key: _bytes_of(key, gradient)}


def _bytes_of(key: QueueKey, payload: Tree) -> int:
    frames = encode(Message("dry-run", key.flow, 0, 0, key.stage, 1, 0, payload))
    return sum(memoryview(frame).nbytes for frame in frames)


def _measured(job: Job, executor: Executor, index: int, activations: int) -> StageSize:
    stage = executor.stages[index]
    weights = stage.state_dict()
    trainable = [] if stage.optimizer is None else [p for g in stage.optimizer.param_groups for p in g["params"]]
    for parameter in trainable:
        parameter.grad = torch.zeros_like(parameter)
    executor.carry_out(job.program.instruction(0, Action(Kind.UPDATE, index)), [])
    state = [] if stage.optimizer is None else list(stage.optimizer.state.values())
    return StageSize(
        parameters=sum(p.numel() for layer in job.segments[index].layers for p in layer.parameters()),
        weights=_total(weights.values()),
        gradients=_total(trainable),
        optimizer=_total(value for entry in state for value in entry.values() if isinstance(value, Tensor)),
        activations=activations,
    )


def _total(held: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in held)


def _evaluate(job: Job, executors: list[Executor]) -> None:
    """Runs the metrics: a wrong one would otherwise show after the last step."""
    if not job.metrics or not job.feed.evaluation:
        return
    sent: Tree = None
    for index in range(job.schedule.stages):
        executor = executors[job.schedule.owner(index)]
        sent = executor.carry_out(_forward(job, index, evaluates=True), _received(index, sent))
