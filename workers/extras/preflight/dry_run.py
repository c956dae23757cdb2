"""Trains one microbatch through all stages in this process, with the metrics, and measures what they take.

forward 0, 1, 2, ...    with evaluation
backward ..., 2, 1, 0   with update

A stage whose weights are in files has memory only while it computes: it is made for its forward, and made again for its
backward, after the same forward. So the peak is that of one stage. Those that share parameters stay until all of them
have gone backward.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
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
from .trial_stages import LiveBytes, TrialStages, demand_changed

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
_FLOWS = {
    Kind.TIED: "tied",
    Kind.SUBTOTAL: "subtotal",
    Kind.ADD: "sum",
    Kind.NORMS: "norms",
    Kind.CLIP: "clip",
}


def _ignore(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class TrialWatch:
    """Is told what a trial does next, in words, and what it gave: a name and a tree."""

    doing: Callable[[str], None] = _ignore
    gave: Callable[[str, Tree], None] = _ignore


UNWATCHED = TrialWatch()


class Carried(NamedTuple):
    """The bytes of one message, header included, and those of tensors that its stage has received as they are."""

    bytes: int
    passed_on: int


def dry_run(
    job: Job, watch: TrialWatch = UNWATCHED, counts: Sequence[AbstractContextManager[object]] = ()
) -> tuple[list[StageEstimate], dict[str, Carried]]:
    """Each stage, and by queue what one message takes. Each stage's forward and backward are in its context of
    `counts`, if there are any.

    Trains the first microbatch of `job`, whose stages are used up by it: prepare the job again to train it. Raises
    `ModelRefused` or `DataError` for what could not be trained.
    """
    tried = _DryRun(job, watch, counts)
    try:
        tried.forward()
        stages = tried.train()
    except (ComputeFailed, Unsendable) as error:
        raise ModelRefused(f"a dry run of the first microbatch failed: {error}") from error
    return stages, tried.messages


class _DryRun:
    """One microbatch on its way through all stages."""

    def __init__(self, job: Job, watch: TrialWatch, counts: Sequence[AbstractContextManager[object]]) -> None:
        self.messages: dict[str, Carried] = {}
        self._job = job
        self._watch = watch
        self._counts = counts
        self._received: list[list[Tree]] = []  # by stage: what its forward was given
        self._kept: list[int] = []  # by stage: bytes that autograd keeps
        self._large: list[int] = []  # by stage: those of them that can be in files
        self._live: dict[int, LiveBytes] = {}  # by stage
        self._working: dict[int, int] = {}  # by stage: bytes that are there for a moment
        self._tapped: dict[int, int] = {}  # by stage: bytes that its tapped layers return
        self._backward: set[int] = set()  # stages that have one
        self._halfway: dict[int, int | None] = {}  # by stage: bytes between the halves of a backward
        self._tied: dict[str, Tree] = {}  # what was given last
        self._estimates: dict[int, StageEstimate] = {}
        watch.doing("the weights")
        for part in job.segments:
            part.check()
        self._stages = TrialStages(job, watch.doing, offloads=True)

    def forward(self) -> None:
        output: Tree = None
        evaluated: Tree = None
        for index in range(self._job.schedule.stages):
            with self._stages.there(index):
                output = self._first_forward(index, [output] if index else [])
                if self._job.rounds.batches:  # a wrong metric would show in the first round of evaluation
                    received = [evaluated] if index else []
                    evaluated = self._carry_out(Kind.FORWARD, index, received, evaluates=True)

    def train(self) -> list[StageEstimate]:
        """Each stage, with its optimizer's state."""
        gradient: Tree = None
        sharing = _sharing(self._job)  # they stay until all have gone backward
        for index in reversed(range(self._job.schedule.stages)):
            with self._stages.there(index, stays=index in sharing):
                if index in self._backward | sharing:
                    self._forward_again(index)
                    received = [] if index == self._job.program.last else [gradient]
                    gradient = self._gradient(index, received)
                    self._send(Kind.TIED, index, [])
                    self._send(Kind.ADD, index, [])
                self._clip(index)
                if index not in sharing:
                    self._update(index)
        for index in sorted(sharing, reverse=True):
            self._send(Kind.SUBTOTAL, index, self._of_neighbour("subtotal", index))
        for index in sorted(sharing):
            with self._stages.there(index):
                self._update(index)
        return [self._estimates[index] for index in sorted(self._estimates)]

    def _gradient(self, index: int, received: list[Tree]) -> Tree:
        """Runs backward, in two halves where the schedule does."""
        shared = self._of_neighbour("tied", index)
        if not self._job.program.splits(index):
            return self._carry_out(Kind.BACKWARD, index, received + shared)
        gradient = self._carry_out(Kind.INPUT, index, received)
        self._carry_out(Kind.WEIGHT, index, shared)
        return gradient

    def _stage(self, index: int) -> Stage:
        return self._stages[index].stages[index]

    def _first_forward(self, index: int, received: Sequence[Tree]) -> Tree:
        self._received.append([map_tensors(own_copy, tree) for tree in received] if self._stages.come_and_go else [])
        stage = self._stage(index)
        self._gave_weights(stage, "as model.factory made it")
        saved = SavedBytes(stage)
        stage.tap = partial(self._note_tapped, index)
        with saved_tensors_hooks(saved.note, lambda tensor: tensor):
            output = self._carry_out(Kind.FORWARD, index, received)
        stage.tap = None
        if self._job.plan.data.stays:
            demand_changed(self._job, index, output)
        for tensor in tensors(output):  # which is kept as a message, too
            saved.note(tensor)
            saved.large.pop(tensor.untyped_storage().data_ptr(), None)
        self._large.append(sum(saved.large.values()))
        self._kept.append(saved.bytes)
        if stage.in_flight:
            self._backward.add(index)
            self._halfway[index] = stage.halfway_bytes()
        return output

    def _note_tapped(self, index: int, layer: str, output: Tree) -> None:
        if layer in self._job.tapped.get(index, ()):
            self._tapped[index] = self._tapped.get(index, 0) + total_bytes(tensors(output))

    def _forward_again(self, index: int) -> None:
        """Of a stage that was not there in between."""
        if index in self._backward and not self._stage(index).in_flight:
            self._watch.doing(f"the trial of one microbatch: stage {index}, forward, once more for its backward")
            instruction = self._job.program.instruction(0, Action(Kind.FORWARD, index))
            given = self._received[index]
            self._measured(index, Kind.FORWARD, lambda: self._stages[index].carry_out(instruction, given))

    def _update(self, index: int) -> None:
        stage = self._stage(index)
        for parameter in trained_parameters(stage):
            if parameter.grad is None:  # this microbatch did not use it; others may
                parameter.grad = torch.zeros_like(parameter)
        given = self._carry_out(Kind.UPDATE, index, self._of_neighbour("total", index))
        if given is not None:
            self._tied["total"] = given
        self._gave_weights(stage, "after the update")
        estimate = _estimate(self._job, stage, self._kept[index], self._tapped.get(index, 0))
        estimate = replace(
            estimate,
            working=self._working.get(index, 0),
            movable={**_movable(self._job, stage), "activations": self._large[index] * estimate.in_flight},
            halfway=self._halfway.get(index, 0),
        )
        self._estimates[index] = estimate.with_files(self._job.plan.offloaded_of(index))

    def _clip(self, index: int) -> None:
        """A stage does not stay until those before it have gone backward: all but the first clip by some norm."""
        self._tied.setdefault("clip", torch.ones(()))
        self._send(Kind.NORMS, index, self._of_neighbour("norms", index))
        self._send(Kind.CLIP, index, self._of_neighbour("clip", index))

    def _of_neighbour(self, flow: str, stage: int) -> list[Tree]:
        """What `stage` is given by a stage that it shares parameters or norms with: what the last of those gave."""
        return [self._tied[flow]] if f"{flow}-{stage}" in self._job.program.queues else []

    def _send(self, kind: Kind, stage: int, received: Sequence[Tree]) -> None:
        """What `stage` gives to one that it shares parameters or norms with, if its schedule has that."""
        of_worker = self._job.program.step[self._job.schedule.owner(stage)]
        if any(op.action == Action(kind, stage) for op in of_worker):
            self._tied[_FLOWS[kind]] = self._carry_out(kind, stage, received)

    def _gave_weights(self, stage: Stage, when: str) -> None:
        for name, tensor in stage.state_dict().items():
            self._watch.gave(f"{name} of stage {stage.index} {when}", tensor)

    def _carry_out(self, kind: Kind, index: int, received: Sequence[Tree], *, evaluates: bool = False) -> Tree:
        action = Action(kind, index)
        word = "evaluation and metrics" if evaluates else _WORDS[kind]
        self._watch.doing(f"the trial of one microbatch: stage {index}, {word}")
        instruction = self._job.program.instruction(0, action, evaluates=evaluates)
        before = {tensor.data_ptr(): tensor.clone() for tensor in tensors([*received])}
        if evaluates:
            result = self._stages[index].carry_out(instruction, received)
        else:
            result = self._measured(index, kind, lambda: self._stages[index].carry_out(instruction, received))
        self._watch.gave(f"what stage {index} gave in its {word}", result)
        if not evaluates:
            self.messages |= _message(self._job, instruction, result, before)
        return result

    def _measured(self, index: int, kind: Kind, compute: Callable[[], Tree]) -> Tree:
        """What `compute` gives, while the memory is noted that it takes besides what the stage holds."""
        live, stage = self._live.setdefault(index, LiveBytes()), self._stage(index)
        before, gradients = live.now, _gradients(stage)
        counts = self._counts if kind is not Kind.UPDATE else ()
        with live.watched(), counts[index] if counts else nullcontext():
            result = compute()
        match kind:
            case Kind.FORWARD:
                kept = live.now
            case Kind.UPDATE:  # no microbatch is in flight then: what those hold is free
                stashed = self._kept[index] * self._job.verdict.stage_peak[index]
                made = in_memory(stage, [*optimizer_tensors(stage), *stage.averages.values()])
                kept = before + total_bytes(made) + stashed
                if self._job.schedule.delays:  # the version before the update, which has its memory from here on
                    kept += total_bytes(trained_parameters(stage))
            case _:
                kept = before + sum(_gradients(stage)) - sum(gradients)
                if self._job.schedule.microbatches > 1:  # a later one's gradients are added to those that are there
                    kept -= max(_gradients(stage), default=0)
        self._working[index] = max(self._working.get(index, 0), live.peak - kept)
        return result


def _message(
    job: Job, instruction: Instruction, payload: Tree, before: Mapping[int, torch.Tensor]
) -> dict[str, Carried]:
    """`before`: what the stage had received, by its address."""
    if not instruction.gives:
        return {}
    queue = job.program.queues[instruction.gives[0]]
    codec = Codec[queue.codec.upper()]
    frames = encode(Message("dry-run", queue.name, 0, 1, coded(payload, codec) if codec else payload))
    same = [t for t in tensors(payload) if t.data_ptr() in before and torch.equal(t, before[t.data_ptr()])]
    carried = Carried(sum(memoryview(frame).nbytes for frame in frames), total_bytes(same))
    return dict.fromkeys(_queues_like(job, queue), carried)


def _sharing(job: Job) -> set[int]:
    """The stages that share parameters."""
    totals = (queue for queue in job.program.queues.values() if queue.flow == "total")
    return {stage for queue in totals for stage in (queue.source, queue.target) if stage is not None}


def _queues_like(job: Job, queue: Queue) -> list[str]:
    """The queues from and to the same stages as `queue`: several where these have replicas."""

    def ends(each: Queue) -> tuple[str, *tuple[int | None, ...]]:
        copies = (each.source, each.target)
        return each.flow, *(None if copy is None else job.schedule.replicas.stage(copy) for copy in copies)

    return [name for name, other in job.program.queues.items() if ends(other) == ends(queue)]


def _movable(job: Job, stage: Stage) -> dict[str, int]:
    """Bytes of what lasts in the stage that can be memory of files. Not the gradients of versions of the weights, which
    asynchronous mode has, nor sums of replicas' gradients."""
    files = stage.file_memory
    found = lasting_bytes(stage, _is_large if files is None else files.has)
    stay = job.schedule.mode == "async" or job.schedule.replicas.is_replicated(stage.index)
    return {**found, "gradients": 0} if stay else found


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() >= LEAST


def _estimate(job: Job, stage: Stage, activations: int, tapped: int) -> StageEstimate:
    """Of a stage after its first update. `activations`: bytes that one microbatch keeps alive between its forward and
    its backward; `tapped`: those of it that are stored."""
    index = stage.index
    in_flight = job.verdict.stage_peak[index]
    held = {
        **lasting_bytes(stage),
        "activations": activations * in_flight,
        # Only what is trained has versions.
        "stashed_weights": total_bytes(trained_parameters(stage)) * _versions(job, index),
    }
    return StageEstimate(
        stage=index,
        label=job.schedule.label(index),
        worker=job.schedule.owner(index),
        layers=job.segments[index].names,
        parameters=job.segments[index].parameters,
        trained=job.segments[index].trained,
        in_flight=in_flight,
        bytes=held,
        total=sum(held.values()),
        tapped=tapped,
        group=job.plan.stage_plan(index).processes,
    )


def _versions(job: Job, stage: int) -> int:
    """How many versions of its weights a stage keeps besides the newest."""
    if job.schedule.delays:
        return 1
    return job.verdict.stage_peak[stage] if job.schedule.mode == "async" and stage < job.program.last else 0


def further_copies(job: Job, estimates: Sequence[StageEstimate]) -> Iterator[StageEstimate]:
    """The stages' further replicas, which hold what the first does, but for how many microbatches are in flight."""
    for copy in range(job.schedule.stages, job.schedule.copies):
        first, in_flight = estimates[job.schedule.replicas.stage(copy)], job.verdict.stage_peak[copy]
        held = {**first.bytes, "activations": first.bytes["activations"] // max(1, first.in_flight) * in_flight}
        large = first.movable["activations"] // max(1, first.in_flight) * in_flight
        copied = replace(
            first,
            stage=copy,
            label=job.schedule.label(copy),
            worker=job.schedule.owner(copy),
            in_flight=in_flight,
            bytes=held,
            total=sum(held.values()),
            movable={**first.movable, "activations": large},
        )
        yield copied.with_files(job.plan.offloaded_of(first.stage))


def _gradients(stage: Stage) -> list[int]:
    """The bytes of each that is there, in memory."""
    there = [each.grad for each in trained_parameters(stage) if each.grad is not None]
    return [each.nbytes for each in in_memory(stage, there)]
