"""Dry run: trains one microbatch through all stages in this process, with the metrics, and measures what they take.

forward 0, 1, 2, ...    with evaluation
backward ..., 2, 1, 0   with update

A stage whose weights are in files has memory only while it computes: it is made for its forward, and made again for its
backward, after the same forward. So the peak is that of one stage. Those that share parameters stay until all of them
have gone backward.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch.autograd.graph import saved_tensors_hooks

from stageline.broker.codec.codecs import Codec
from stageline.broker.codec.message import Message, encode
from stageline.broker.codec.tensors import coded
from stageline.broker.errors import Unsendable
from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.program import Instruction, Queue
from stageline.pipeline.schedule import Action, Kind
from stageline.pipeline.stage.held import (
    SavedBytes,
    in_memory,
    lasting_bytes,
    optimizer_tensors,
    total_bytes,
    trained_parameters,
)
from stageline.pipeline.stage.layers.file_memory import LEAST
from stageline.pipeline.stage.layers.memory import own_copy
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.tree import Tree, map_tensors, tensors
from stageline.workers.runtime.job import Job
from stageline.workers.runtime.losses import ComputeFailed

from .trial_result import StageEstimate
from .trial_stages import LiveBytes, TrialStages, demand_changed, with_gradients

_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "backward to its input",
    Kind.WEIGHT: "backward to its weights",
    Kind.TIED: "gradients of what stages share",
    Kind.SUBTOTAL: "sums of gradients of what stages share",
    Kind.ADD: "sums of gradients for other replicas",
    Kind.NORMS: "norms of gradients",
    Kind.CLIP: "clipping of gradients",
    Kind.UPDATE: "update",
}


@dataclass(frozen=True, slots=True)
class TrialWatch:
    """Observer of a trial: `doing` is called with the next action, in words, `gave` with each result and its name."""

    doing: Callable[[str], None] = lambda what: None
    gave: Callable[[str, Tree], None] = lambda name, tree: None


UNWATCHED = TrialWatch()


class Carried(NamedTuple):
    """Size of one message in bytes, header included, and the bytes of tensors in it that its stage only passes on."""

    bytes: int
    passed_on: int


def dry_run(
    job: Job, watch: TrialWatch = UNWATCHED, counts: Sequence[AbstractContextManager[object]] = ()
) -> tuple[list[StageEstimate], dict[str, Carried]]:
    """Train the first microbatch of `job`. Return the estimate of each stage, and by queue the bytes of one message.

    The stages of `job` are used up: prepare the job again to train it.

    Args:
        job: Plan, model and data.
        watch: Called with each action and result.
        counts: For each stage, the context of its forward and backward. Empty for none.

    Raises:
        ModelRefused: The microbatch could not be trained.
        DataError: The data gave no batch.
    """
    watch.doing("the weights")
    for part in job.segments:
        part.check()
    run = _DryRun(job, watch, TrialStages(job, watch.doing, offloads=True))
    contexts = counts or [nullcontext()] * job.schedule.stages
    tried = [_StageTrial(run, index, contexts[index]) for index in range(job.schedule.stages)]
    totals = (queue for queue in job.program.queues.values() if queue.flow == "total")
    sharing = {stage for queue in totals for stage in (queue.source, queue.target)}
    shared = [each for each in tried if each.index in sharing]
    try:
        for each in tried:
            with run.stages.there(each.index):
                each.forward()
        for each in reversed(tried):
            with run.stages.there(each.index, stays=each in shared):
                each.backward(shares=each in shared)
                if each not in shared:
                    each.update()
        for each in reversed(shared):
            each.run(Kind.SUBTOTAL)
        for each in shared:
            with run.stages.there(each.index):
                each.update()
    except (ComputeFailed, Unsendable) as error:
        raise ModelRefused(f"a dry run of the first microbatch failed: {error}") from error
    return [each.estimate for each in tried], run.messages


class _DryRun:
    """Passage of one microbatch through the `stages` of a trial.

    `given` holds the last result for each flow of messages, and values that stand in for results that come later. A
    stage is removed before the stages before it have gone backward, so all stages but the first clip by some norm.
    """

    def __init__(self, job: Job, watch: TrialWatch, stages: TrialStages) -> None:
        self.job, self.watch, self.stages = job, watch, stages
        self.messages: dict[str, Carried] = {}
        self.given: dict[str, Tree] = {"backward": None, "clip": torch.ones(())}

    def received(self, instruction: Instruction) -> list[Tree]:
        """Return the inputs of an instruction. Other replicas are not tried, so sums from them are left out."""
        flows = (name.partition("-")[0] for name in instruction.takes)
        return [self.given[flow] for flow in flows if flow != "sum"]

    def gave(self, instruction: Instruction, result: Tree, before: Mapping[int, torch.Tensor]) -> None:
        """Pass a result on to the next stage, and note the size of its message.

        Args:
            instruction: Instruction that gave the result.
            result: Tensors that the stage gave.
            before: Copies of the stage's inputs, by their addresses.
        """
        if not instruction.gives:
            return
        queue = self.job.program.queues[instruction.gives[0]]
        self.given[queue.flow] = result
        if not instruction.evaluates:
            codec = Codec[queue.codec.upper()]
            payload = coded(result, codec) if codec else result
            frames = encode(Message("dry-run", queue.name, 0, 1, payload))
            same = [t for t in tensors(result) if t.data_ptr() in before and torch.equal(t, before[t.data_ptr()])]
            carried = Carried(sum(memoryview(frame).nbytes for frame in frames), total_bytes(same))
            self.messages |= dict.fromkeys(_queues_like(self.job, queue), carried)


class _StageTrial:
    """Trial of stage `index` in a dry run, and the memory that the stage takes.

    `count` is the context of the stage's forward and backward.
    """

    estimate: StageEstimate

    def __init__(self, run: _DryRun, index: int, count: AbstractContextManager[object]) -> None:
        self.index = index
        self._run, self._job, self._count = run, run.job, count
        self._received: list[Tree] = []  # by its forward
        self._kept = self._large = 0  # bytes that autograd keeps, and those of them that can be in files
        self._live = LiveBytes()
        self._working = 0  # bytes that are there for a moment
        self._tapped = 0  # bytes that its tapped layers return
        self._trains = False
        self._halfway: int | None = 0  # bytes between the halves of a backward

    def forward(self) -> None:
        """Run the forward, then evaluation.

        A wrong metric would otherwise show only in the run's first evaluation.
        """
        instruction = self._job.program.instruction(0, Action(Kind.FORWARD, self.index))
        received = self._run.received(instruction)
        if self._run.stages.come_and_go:
            self._received = [map_tensors(own_copy, tree) for tree in received]
        self._gave_weights("as model.factory made it")
        stage = self._stage
        saved = SavedBytes(stage)
        with stage.tapped(self._note_tapped), saved_tensors_hooks(saved.note, lambda tensor: tensor):
            output = self._carry_out(instruction)
        demand_changed(self._job, self.index, output)
        for tensor in tensors(output):  # which is kept as a message, too
            saved.note(tensor)
            saved.large.pop(tensor.untyped_storage().data_ptr(), None)
        self._large, self._kept = sum(saved.large.values()), saved.bytes
        self._trains = stage.in_flight > 0
        if self._trains:
            self._halfway = stage.halfway_bytes()
        if self._job.rounds.batches:
            self._carry_out(self._job.program.instruction(0, instruction.action, evaluates=True))

    def backward(self, *, shares: bool) -> None:
        """Run the backward, in two halves if the schedule splits it, and clip.

        Args:
            shares: The stage shares parameters; its backward runs even if the stage does not train.
        """
        if self._trains or shares:
            if self._trains and not self._stage.in_flight:  # it was not there in between
                self._run.watch.doing(
                    f"the trial of one microbatch: stage {self.index}, forward, once more for its backward"
                )
                self._measured(self._job.program.instruction(0, Action(Kind.FORWARD, self.index)), self._received)
            halves = self._job.program.splits(self.index)
            self.run(*((Kind.INPUT, Kind.WEIGHT) if halves else (Kind.BACKWARD,)), Kind.TIED, Kind.ADD)
        self.run(Kind.NORMS, Kind.CLIP)

    def run(self, *kinds: Kind) -> None:
        """Carry out the first operation of each of `kinds` that the stage has in a step."""
        of_worker = self._job.program.step[self._job.schedule.owner(self.index)]
        own = {op.action.kind for op in of_worker if op.action.stage == self.index}
        for kind in kinds:
            if kind in own:
                self._carry_out(self._job.program.instruction(0, Action(kind, self.index)))

    def update(self) -> None:
        """Carry out the update, and set `estimate`."""
        stage = self._stage
        with_gradients(stage)
        self.run(Kind.UPDATE)
        self._gave_weights("after the update")
        self.estimate = self._estimated(stage).with_files(self._job.plan.offloaded_of(self.index))

    def _estimated(self, stage: Stage) -> StageEstimate:
        job, index, part = self._job, self.index, self._job.segments[self.index]
        in_flight = job.verdict.stage_peak[index]
        held = {
            **lasting_bytes(stage),
            "activations": self._kept * in_flight,
            # Only what is trained has versions.
            "stashed_weights": total_bytes(trained_parameters(stage)) * _versions(job, index),
        }
        return StageEstimate(
            stage=index,
            label=job.schedule.label(index),
            worker=job.schedule.owner(index),
            layers=part.names,
            parameters=part.parameters,
            trained=part.trained,
            in_flight=in_flight,
            bytes=held,
            total=sum(held.values()),
            tapped=self._tapped,
            working=self._working,
            group=job.plan.stage_plan(index).processes,
            halfway=self._halfway,
            movable={**_movable(job, stage), "activations": self._large * in_flight},
        )

    @property
    def _stage(self) -> Stage:
        return self._run.stages[self.index].stages[self.index]

    def _note_tapped(self, layer: str, output: Tree) -> None:
        if layer in self._job.tapped.get(self.index, ()):
            self._tapped += total_bytes(tensors(output))

    def _gave_weights(self, when: str) -> None:
        for name, tensor in self._stage.state_dict().items():
            self._run.watch.gave(f"{name} of stage {self.index} {when}", tensor)

    def _carry_out(self, instruction: Instruction) -> Tree:
        evaluates, received = instruction.evaluates, self._run.received(instruction)
        measured = _WORDS[Kind(instruction.kind)], self._measured
        word, compute = ("evaluation and metrics", self._run.stages[self.index].carry_out) if evaluates else measured
        self._run.watch.doing(f"the trial of one microbatch: stage {self.index}, {word}")
        before = {tensor.data_ptr(): tensor.clone() for tensor in tensors(received)}
        result = compute(instruction, received)
        self._run.watch.gave(f"what stage {self.index} gave in its {word}", result)
        self._run.gave(instruction, result, before)
        return result

    def _measured(self, instruction: Instruction, received: Sequence[Tree]) -> Tree:
        """Return the stage's result. Note the memory that the operation takes besides what the stage holds."""
        live, stage = self._live, self._stage
        before, gradients = live.now, _gradients(stage)
        updates = instruction.kind == Kind.UPDATE
        with live.watched(), nullcontext() if updates else self._count:
            result = self._run.stages[self.index].carry_out(instruction, received)
        if updates:  # no microbatch is in flight then: what those hold is free
            stashed = self._kept * self._job.verdict.stage_peak[self.index]
            made = in_memory(stage, [*optimizer_tensors(stage), *stage.averages.values()])
            kept = before + total_bytes(made) + stashed
            if self._job.schedule.delays:  # the version before the update, which has its memory from here on
                kept += total_bytes(trained_parameters(stage))
        elif instruction.kind == Kind.FORWARD:
            kept = live.now
        else:
            kept = before + sum(_gradients(stage)) - sum(gradients)
            if self._job.schedule.microbatches > 1:  # a later one's gradients are added to those that are there
                kept -= max(_gradients(stage), default=0)
        self._working = max(self._working, live.peak - kept)
        return result


def _queues_like(job: Job, queue: Queue) -> list[str]:
    """Return the queues between the same stages as `queue`. There are several if these stages have replicas."""

    def ends(each: Queue) -> tuple[str, *tuple[int | None, ...]]:
        copies = (each.source, each.target)
        return each.flow, *(None if copy is None else job.schedule.replicas.stage(copy) for copy in copies)

    return [name for name, other in job.program.queues.items() if ends(other) == ends(queue)]


def _movable(job: Job, stage: Stage) -> dict[str, int]:
    """Return by part how many bytes of a stage's lasting state can be memory of files.

    Gradients cannot if the schedule is asynchronous, where weights have versions, or if gradients of replicas are
    summed.
    """
    files = stage.file_memory
    found = lasting_bytes(stage, files.has if files is not None else lambda tensor: tensor.nbytes >= LEAST)
    stay = job.schedule.mode == "async" or job.schedule.replicas.is_replicated(stage.index)
    return {**found, "gradients": 0} if stay else found


def _versions(job: Job, stage: int) -> int:
    """Return the number of older versions of its weights that a stage keeps besides the newest."""
    if job.schedule.delays:
        return 1
    return job.verdict.stage_peak[stage] if job.schedule.mode == "async" and stage < job.program.last else 0


def further_copies(job: Job, estimates: Sequence[StageEstimate]) -> Iterator[StageEstimate]:
    """Yield the estimates of further replicas of stages.

    Each is that of the first replica, but for the number of microbatches in flight.
    """
    for copy in range(job.schedule.stages, job.schedule.copies):
        first = estimates[job.schedule.replicas.stage(copy)]
        yield replace(
            first.with_in_flight(job.verdict.stage_peak[copy]),
            stage=copy,
            label=job.schedule.label(copy),
            worker=job.schedule.owner(copy),
        ).with_files(job.plan.offloaded_of(first.stage))


def _gradients(stage: Stage) -> list[int]:
    """Return the bytes of each gradient that exists and is in memory, not in a file."""
    there = [each.grad for each in trained_parameters(stage) if each.grad is not None]
    return [each.nbytes for each in in_memory(stage, there)]
