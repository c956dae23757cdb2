"""What a plan comes to before it runs: the split, memory by stage, bytes by queue, idle time; or why it cannot work.

One microbatch is trained by all stages in this process, with an update and the metrics: errors of a user's model, loss,
optimizer or metric show here, before the run begins. The bytes that stages and messages take are measured on the way.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from stageline.broker.codec.message import Flow, Message, encode, messages_per_step
from stageline.broker.errors import Unsendable
from stageline.broker.queues.base import QueueKey
from stageline.broker.queues.log import SPILL
from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.plan import Plan, PlanError, PlanRefused
from stageline.pipeline.schedule import Action, Kind
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.stage.tied_stage import TiedStage
from stageline.pipeline.tree import Tree, tensors
from stageline.workers.runtime.executor import ComputeFailed, Executor
from stageline.workers.runtime.job import Job, prepare

from .trial_result import Estimate, QueueEstimate, StageEstimate

_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.TIED: "gradients of what stages share",
    Kind.SUBTOTAL: "sums of gradients of what stages share",
    Kind.UPDATE: "update",
}
_FLOWS = {Kind.TIED: Flow.TIED, Kind.SUBTOTAL: Flow.SUBTOTAL}


def _ignore(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class TrialWatch:
    """Is told what a trial does next, in words, and what it gave: a name and a tree."""

    doing: Callable[[str], None] = _ignore
    gave: Callable[[str, Tree], None] = _ignore


UNWATCHED = TrialWatch()


def estimate(plan: Plan) -> Estimate:
    """Loads model and data and runs a microbatch.

    Raises `PlanRefused`, `ModelRefused` or `DataError` if the plan cannot work.
    """
    return estimate_of(prepare(plan))


def estimate_of(job: Job, watch: TrialWatch = UNWATCHED) -> Estimate:
    """`estimate` for a job that is loaded. Its stages cannot be trained afterwards: see `dry_run`."""
    plan = job.plan
    stages, messages = dry_run(job, watch)
    queues = [
        QueueEstimate(
            queue=str(key),
            producer=job.program.source(key),
            consumer=key.stage,
            message=message.bytes,
            passed_on=message.passed_on,
            in_flight=job.verdict.queue_bound[str(key)],
            retained=message.bytes * messages_per_step(key.flow, job.schedule.microbatches) * _steps_kept(job),
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


class Carried(NamedTuple):
    """The bytes of one message, header included, and those of tensors that its stage has received as they are."""

    bytes: int
    passed_on: int


def dry_run(job: Job, watch: TrialWatch = UNWATCHED) -> tuple[list[StageEstimate], dict[QueueKey, Carried]]:
    """Each stage, and by queue what one message takes.

    Trains the first microbatch of `job`, whose stages are used up by it: prepare the job again to train it. Raises
    `ModelRefused` or `DataError` for what could not be trained.
    """
    tried = _DryRun(job, watch)
    try:
        tried.forward()
        tried.backward()
        stages = tried.update()
        tried.evaluate()  # a wrong metric would show at the end of the run
    except (ComputeFailed, Unsendable) as error:
        raise ModelRefused(f"a dry run of the first microbatch failed: {error}") from error
    return stages, tried.messages


class _DryRun:
    """One microbatch on its way through all stages."""

    def __init__(self, job: Job, watch: TrialWatch) -> None:
        self.messages: dict[QueueKey, Carried] = {}
        self._job = job
        self._watch = watch
        self._kept: list[int] = []  # by stage: bytes that autograd keeps
        self._tied: dict[Flow, Tree] = {}  # what was given last
        watch.doing("the weights")
        for part in job.segments:
            part.check()
        watch.doing("the loss, the metrics, the optimizer")
        by_worker = [_executor(job, worker) for worker in range(len(job.plan.workers))]
        self._executors = [by_worker[job.schedule.owner(index)] for index in range(job.schedule.stages)]
        for stage in self._stages:
            self._gave_weights(stage, "as model.factory made it")

    @property
    def _stages(self) -> list[Stage]:
        return [executor.stages[index] for index, executor in enumerate(self._executors)]

    def forward(self) -> None:
        """Raises `ModelRefused` if nothing would be trained."""
        output: Tree = None
        for index, stage in enumerate(self._stages):
            saved = _Saved(stage)
            with saved_tensors_hooks(saved.note, lambda tensor: tensor):
                output = self._carry_out(Kind.FORWARD, index, [output] if index else [])
            for tensor in tensors(output):
                saved.note(tensor)
            self._kept.append(saved.bytes)
        if any(stage.optimizer for stage in self._stages) and not self._stages[-1].in_flight:
            raise ModelRefused(
                "the loss has no gradient, so nothing would be trained: between the weights and the loss there is a "
                "detach(), a no_grad(), or an operation without a derivative such as argmax()"
            )

    def backward(self) -> None:
        gradient: Tree = None
        for index, stage in reversed(list(enumerate(self._stages))):
            if stage.in_flight or isinstance(stage, TiedStage):
                received = [] if index == len(self._stages) - 1 else [gradient]
                gradient = self._carry_out(Kind.BACKWARD, index, received + self._of_neighbour(Flow.TIED, index))
                self._send(Kind.TIED, index, [])
        for index in reversed(range(len(self._stages))):
            self._send(Kind.SUBTOTAL, index, self._of_neighbour(Flow.SUBTOTAL, index))

    def update(self) -> list[StageEstimate]:
        """Each stage, with its optimizer's state."""
        for index, stage in enumerate(self._stages):
            for parameter in _trainable(stage):
                if parameter.grad is None:  # this microbatch did not use it; others may
                    parameter.grad = torch.zeros_like(parameter)
            given = self._carry_out(Kind.UPDATE, index, self._of_neighbour(Flow.TOTAL, index))
            if given is not None:
                self._tied[Flow.TOTAL] = given
            self._gave_weights(stage, "after the update")
        return [_estimate(self._job, stage, kept) for stage, kept in zip(self._stages, self._kept, strict=True)]

    def evaluate(self) -> None:
        output: Tree = None
        for index in range(len(self._executors) if self._job.evaluation else 0):
            output = self._carry_out(Kind.FORWARD, index, [output] if index else [], evaluates=True)

    def _of_neighbour(self, flow: Flow, stage: int) -> list[Tree]:
        """What `stage` is given by a stage that it shares parameters with: what the last of those gave."""
        return [self._tied[flow]] if str(QueueKey(flow, stage)) in self._job.schedule.routes else []

    def _send(self, kind: Kind, stage: int, received: Sequence[Tree]) -> None:
        """Gradients of what `stage` shares with an earlier one, if its schedule has that."""
        schedule, action = self._job.schedule, Action(kind, stage)
        if action in schedule.workers[schedule.owner(stage)]:
            self._tied[_FLOWS[kind]] = self._carry_out(kind, stage, received)

    def _gave_weights(self, stage: Stage, when: str) -> None:
        for name, tensor in stage.state_dict().items():
            self._watch.gave(f"{name} of stage {stage.index} {when}", tensor)

    def _carry_out(self, kind: Kind, index: int, received: Sequence[Tree], *, evaluates: bool = False) -> Tree:
        action = Action(kind, index)
        word = "evaluation and metrics" if evaluates else _WORDS[kind]
        self._watch.doing(f"the trial of one microbatch: stage {index}, {word}")
        step = self._job.feed.evaluation.start if evaluates else 0
        instruction = self._job.program.instruction(step, action, evaluates=evaluates)
        before = {tensor.data_ptr(): tensor.clone() for tensor in tensors([*received])}
        result = self._executors[index].carry_out(instruction, received)
        self._watch.gave(f"what stage {index} gave in its {word}", result)
        if not evaluates:
            self.messages |= _message(self._job, action, result, before)
        return result


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


def _message(job: Job, action: Action, payload: Tree, before: Mapping[int, torch.Tensor]) -> dict[QueueKey, Carried]:
    """`before`: what the stage had received, by its address."""
    key = job.program.gives(action)
    if key is None:
        return {}
    frames = encode(Message("dry-run", key.flow, 0, 0, key.stage, 1, 0, payload))
    same = [t for t in tensors(payload) if t.data_ptr() in before and torch.equal(t, before[t.data_ptr()])]
    return {key: Carried(sum(memoryview(frame).nbytes for frame in frames), _total(same))}


def _trainable(stage: Stage) -> list[torch.Tensor]:
    return [] if stage.optimizer is None else [p for group in stage.optimizer.param_groups for p in group["params"]]


def _estimate(job: Job, stage: Stage, activations: int) -> StageEstimate:
    """Of a stage after its first update. `activations`: bytes that one microbatch keeps alive between its forward and
    its backward."""
    index, trainable = stage.index, _trainable(stage)
    in_flight = job.verdict.stage_peak[index]
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
        parameters=job.segments[index].parameters,
        in_flight=in_flight,
        bytes=held,
        total=sum(held.values()),
    )


def _total(held: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in held)
