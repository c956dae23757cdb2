"""What a plan comes to before it runs: the split, memory by stage, bytes by queue, idle time; or why it cannot work.

One microbatch runs through all stages in this process, with an update and the metrics: errors of a user's model, loss,
optimizer or metric show here, before any other process starts. The bytes that stages and messages take are measured on
the way.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import ceil

import msgspec
import torch
from torch.autograd.graph import saved_tensors_hooks

from stageline.broker.codec.message import Message, encode
from stageline.broker.errors import Unsendable
from stageline.broker.queues.base import QueueKey
from stageline.broker.queues.log import SPILL
from stageline.pipeline.model.load import ModelRefused
from stageline.pipeline.plan import Plan, PlanError, PlanRefused
from stageline.pipeline.schedule import Action, Kind
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.tree import Leaf, Tree, map_leaves, tensors
from stageline.workers.runtime.executor import ComputeFailed, Executor
from stageline.workers.runtime.job import Job, prepare
from stageline.workers.runtime.program import Instruction, producer


class StageEstimate(msgspec.Struct, frozen=True):
    """One stage. `in_flight` microbatches are held at most; `bytes` says what takes how much, `total` all of it."""

    stage: int
    worker: int
    layers: tuple[str, ...]
    parameters: int
    in_flight: int
    bytes: dict[str, int]
    total: int


class QueueEstimate(msgspec.Struct, frozen=True):
    """One queue. `retained` is what the messages take that its producer keeps until they are trimmed: those of one
    step, or, with recovery, of all steps from one complete checkpoint to the next."""

    queue: str
    producer: int  # a stage
    consumer: int
    message: int  # bytes
    in_flight: int  # messages put and not yet taken, at most
    retained: int  # bytes


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Schema plan/1. `idle` is each worker's share of a step, if a backward takes twice a forward, messages no time."""

    schema: str = "plan/1"
    digest: str
    plan: dict[str, object]
    origins: dict[str, str]
    warnings: tuple[str, ...]
    steps: int
    stages: list[StageEstimate]
    queues: list[QueueEstimate]
    idle: tuple[float, ...]


def estimate(plan: Plan) -> Estimate:
    """Loads model and data and runs a microbatch.

    Raises `PlanRefused`, `ModelRefused` or `DataError` if the plan cannot work.
    """
    return estimate_of(prepare(plan))


def estimate_of(job: Job) -> Estimate:
    """`estimate` for a job that is loaded. Its stages cannot be trained afterwards: see `dry_run`."""
    plan = job.plan
    stages, messages = dry_run(job)
    queues = [
        QueueEstimate(
            queue=str(key),
            producer=producer(key),
            consumer=key.stage,
            message=message,
            in_flight=job.verdict.queue_bound[str(key)],
            retained=message * job.schedule.microbatches * _steps_kept(job),
        )
        for key, message in sorted(messages.items())
    ]
    if errors := list(_overflows(job, queues)):
        raise PlanRefused(errors)
    return Estimate(
        digest=plan.digest(),
        plan=plan.as_mapping(),
        origins=dict(plan.origins),
        warnings=(*plan.warnings, *_spills(job, queues)),
        steps=job.steps,
        stages=stages,
        queues=queues,
        idle=job.verdict.idle,
    )


def _steps_kept(job: Job) -> int:
    """How many steps' messages are kept at most: the next checkpoint is complete when all stages have come to it, and
    the first stage is ahead of the last by less than a step; in asynchronous mode, by as many as there are stages."""
    plan = job.plan
    if plan.queues.url == "memory://" or not plan.recovery.on:
        return 1
    ahead = 1 if job.schedule.mode == "sync" else max(1, job.program.last)
    return min(plan.recovery.snapshot_every + ahead, job.steps)


def _spills(job: Job, queues: list[QueueEstimate]) -> Iterator[str]:
    """Warnings of workers whose messages have no room in memory: the rest goes to the disk until it is trimmed."""
    limit = job.plan.queues.retain_bytes
    for worker, needed in enumerate(_by_worker(job, queues)):
        if needed > limit:
            yield (
                f"worker {worker} keeps {needed} bytes of messages, {limit} of them in memory, the rest on disk. Use "
                f'queues.retain_bytes = "{ceil(needed / 2**20)}MiB" or more if there is memory for it.'
            )


def _overflows(job: Job, queues: list[QueueEstimate]) -> Iterator[PlanError]:
    """Where snapshots are written, only a checkpoint lets messages go: all since the last one must have room.

    Without room for the next one's step too, every worker would wait for a checkpoint that none comes to write.
    """
    plan = job.plan
    if plan.queues.url == "memory://":
        return
    steps, every = _steps_kept(job), plan.recovery.snapshot_every
    room = (1 + SPILL) * plan.queues.retain_bytes
    for worker, needed in enumerate(_by_worker(job, queues)):
        if needed > room:
            of = f"{steps} steps (recovery.snapshot_every is {every})" if plan.recovery.on else "one step"
            smaller = ", or a smaller recovery.snapshot_every" if plan.recovery.on else ""
            yield PlanError(
                "queues.retain_bytes",
                f"worker {worker} keeps the messages of {of}, {needed} bytes, and has room for {room} in memory and on "
                f'disk: it would wait for ever. Use "{ceil(needed / (1 + SPILL) / 2**20)}MiB" or more{smaller}',
                value=str(plan.queues.retain_bytes),
            )


def _by_worker(job: Job, queues: list[QueueEstimate]) -> list[int]:
    """The bytes of messages that each worker keeps at most."""
    return [sum(queue.retained for queue in queues if queue.producer in stages) for stages in job.plan.placement]


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
        output = None
        for index, executor in enumerate(executors if job.evaluation else ()):  # a wrong metric would show at the end
            output = executor.carry_out(_forward(job, index, evaluates=True), [output] if index else [])
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

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
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
    return leaf if isinstance(leaf, torch.Tensor) and leaf.requires_grad else None


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
        "optimizer": _total(value for entry in state for value in entry.values() if isinstance(value, torch.Tensor)),
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


def _total(held: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in held)
