"""Runs one microbatch of a job in this process before the run: through all stages, with an update and the metrics.

Errors of a user's model, loss, optimizer or metric show here, before any other process starts. The bytes that stages
and messages take are measured on the way.
"""

from collections.abc import Iterable, Sequence

import msgspec
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from stageline.broker.codec.message import Message, encode
from stageline.broker.errors import Unsendable
from stageline.broker.queues.base import QueueKey
from stageline.pipeline.model.load import ModelRefused
from stageline.pipeline.schedule import Action, Kind
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.tree import Leaf, Tree, map_leaves, tensors
from stageline.workers.runtime.executor import ComputeFailed, Executor
from stageline.workers.runtime.job import Job
from stageline.workers.runtime.program import Instruction


class StageEstimate(msgspec.Struct, frozen=True):
    """One stage. `in_flight` microbatches are held at most; `bytes` says what takes how much, `total` all of it."""

    stage: int
    worker: int
    layers: tuple[str, ...]
    parameters: int
    in_flight: int
    bytes: dict[str, int]
    total: int


def dry_run(job: Job) -> tuple[list[StageEstimate], dict[QueueKey, int]]:
    """Each stage, and by queue the bytes of one message, header included.

    Runs the first microbatch of `job`, whose stages are used up by it: prepare the job again to train it. Raises
    `ModelRefused` or `DataError` for what could not be trained.
    """
    stages: list[StageEstimate] = []
    messages: dict[QueueKey, int] = {}
    by_worker = [_executor(job, worker) for worker in range(len(job.plan.workers))]
    executors = [by_worker[job.schedule.owner(index)] for index in range(job.schedule.stages)]
    try:
        output: Tree = None
        for index, executor in enumerate(executors):
            messages |= _message(job, Action(Kind.BACKWARD, index), map_leaves(_as_gradient, output))
            saved = _Saved(executor.stages[index])
            with saved_tensors_hooks(saved.note, lambda tensor: tensor):
                output = executor.carry_out(_forward(job, index), [output] if index else [])
            for tensor in tensors(output):
                saved.note(tensor)
            messages |= _message(job, Action(Kind.FORWARD, index), output)
            stages.append(_estimate(job, executor, index, saved.bytes))
        _demand_gradient(executors)
        _evaluate(job, executors)
    except (ComputeFailed, Unsendable) as error:
        raise ModelRefused(f"a dry run of the first microbatch failed: {error}") from error
    return stages, messages


def _demand_gradient(executors: Sequence[Executor]) -> None:
    trains = any(stage.optimizer for executor in executors for stage in executor.stages.values())
    if trains and not executors[-1].stages[len(executors) - 1].in_flight:
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


def _as_gradient(leaf: Leaf) -> Leaf:
    return leaf if isinstance(leaf, Tensor) and leaf.requires_grad else None


def _message(job: Job, action: Action, payload: Tree) -> dict[QueueKey, int]:
    key = job.program.gives(action)
    if key is None:
        return {}
    frames = encode(Message("dry-run", key.flow, 0, 0, key.stage, 1, 0, payload))
    return {key: sum(memoryview(frame).nbytes for frame in frames)}


def _estimate(job: Job, executor: Executor, index: int, activations: int) -> StageEstimate:
    """Computes an update, for the optimizer's state. `activations`: bytes that one microbatch keeps alive between its
    forward and its backward."""
    stage, in_flight = executor.stages[index], job.verdict.stage_peak[index]
    trainable = [] if stage.optimizer is None else [p for g in stage.optimizer.param_groups for p in g["params"]]
    for parameter in trainable:
        parameter.grad = torch.zeros_like(parameter)
    executor.carry_out(job.program.instruction(0, Action(Kind.UPDATE, index)), [])
    state = [] if stage.optimizer is None else list(stage.optimizer.state.values())
    versions = in_flight if job.schedule.mode == "async" and index < job.program.last else 0
    held = {
        "weights": _total(stage.state_dict().values()),
        "gradients": _total(trainable),
        "optimizer": _total(value for entry in state for value in entry.values() if isinstance(value, Tensor)),
        "activations": activations * in_flight,
        "stashed_weights": _total(trainable) * versions,  # only what is trained has versions
    }
    return StageEstimate(
        stage=index,
        worker=job.schedule.owner(index),
        layers=job.segments[index].names,
        parameters=sum(p.numel() for layer in job.segments[index].layers for p in layer.parameters()),
        in_flight=in_flight,
        bytes=held,
        total=sum(held.values()),
    )


def _total(held: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in held)


def _evaluate(job: Job, executors: Sequence[Executor]) -> None:
    """Runs the metrics: a wrong one would otherwise show after the last step."""
    output: Tree = None
    for index, executor in enumerate(executors if job.evaluation else ()):
        output = executor.carry_out(_forward(job, index, evaluates=True), [output] if index else [])
