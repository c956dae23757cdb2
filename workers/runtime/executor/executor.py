"""Carries out instructions: gives the right inputs to the right stage, adds up losses and metrics in order."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Protocol

from torch import Tensor

from stageline.broker.codec.structure import emptied, is_emptied
from stageline.broker.control.records import EvaluationRecord
from stageline.pipeline.data import Microbatch
from stageline.pipeline.errors import (
    DataError,
    GroupLost,
    ModelRefused,
    StagelineError,
    describe_error,
    raised_by_user_code,
)
from stageline.pipeline.model.load import demand_default_device
from stageline.pipeline.schedule import ONCE_PER_STEP, Action, Kind
from stageline.pipeline.schedule.replicas import Replicas
from stageline.pipeline.stage.replica import MicrobatchLoss, ReplicaSums, changes_of, losses_of, total_of
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.stage.tied_stage import TiedStage
from stageline.pipeline.tree import Tree, map_tensors
from stageline.workers.disk.background_writer import WriteFailed
from stageline.workers.runtime.program.instruction import Instruction

from .forked_copy import without_copies
from .metric_value import Metric, metric_value

DATA = "the data source"  # in place of a layer's name, as those of a stage


class MicrobatchSource(Protocol):
    """Where the first stage has its inputs from, and the last its targets; a `Feed` is one."""

    def microbatch(self, step: int, microbatch: int) -> Microbatch:
        """Of a training step. Raises `DataError` if there is none to be had."""

    def held_out_microbatch(self, batch: int, microbatch: int) -> Microbatch:
        """The same of evaluated batch `batch` of the run."""

    def samples(self, step: int, microbatch: int) -> Tensor | None:
        """The numbers of its rows in the data set, int64 [rows]; None if they are not known. Raises `DataError`."""

    def held_out_samples(self, batch: int, microbatch: int) -> Tensor | None:
        """The same of an evaluated batch."""


class PrefixRows(Protocol):
    """What leaves the frozen first stages, kept by sample."""

    def keep(self, step: int, microbatch: int, received: Tree) -> None:
        """Copies the rows of a microbatch. Raises `ComputeFailed` if they cannot be kept."""

    def rows(self, step: int, microbatch: int) -> Tree:
        """The rows of a microbatch's samples, in memory of their own. Raises `ComputeFailed` if one is not there."""

    def sync(self) -> None:
        """When this returns, all that was kept before survives a power failure. For any thread. Raises `OSError`."""


@dataclass(slots=True)
class Sums:
    """What was evaluated, added up over `rows`: the loss, None before the first row, and the metrics by name."""

    rows: int = 0
    loss: float | None = None
    metrics: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


@dataclass(frozen=True, slots=True)
class Culprit:
    """The microbatch that failed: which stage failed in which of its actions on it, and what that `gave`."""

    step: int
    action: Action
    gave: Tree = None


class ComputeFailed(StagelineError):
    """The user's model, loss or data raised; the text names the stage, the action and the layer."""

    def __init__(self, reason: str, culprit: Culprit | None = None) -> None:
        super().__init__(reason)
        self.culprit = culprit


class BadMicrobatch(ComputeFailed):
    """A microbatch's loss is not a finite number."""


@dataclass
class Executor:
    """The stages of one worker with what they need besides messages.

    `last` is the number of the model's last stage, the one with the loss. `metrics` are means over rows, by name.
    `ema`: evaluation measures the averages of the weights.
    """

    stages: Mapping[int, Stage]
    feed: MicrobatchSource | None  # None for a worker that has neither the first stage nor the last
    last: int
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    ema: bool = False
    loss: float | None = None  # of the last step, on the worker that has the last stage
    gradient_norm: float | None = None  # likewise, if gradients are clipped
    rows: int = 0  # likewise
    learning_rates: tuple[float, ...] = ()  # likewise, of the last stage's groups
    replicas: Replicas | None = None  # of which copies `stages` are, where stages have several
    sums: Sums = field(default_factory=Sums)  # of what was evaluated so far
    prefix: PrefixRows | None = None  # on the worker that has the first stage that trains, if they are kept
    gives_up: bool = False  # the batch that is evaluated: its script has the result already
    _begun: dict[int, dict[str, tuple[int, int]]] = field(default_factory=dict)  # replicas' weights in the open step
    _losses: list[Tensor | None] = field(default_factory=list)  # of the open step; None for one that does not count
    _rows: list[int] = field(default_factory=list)  # likewise; 0 for one that does not count

    @without_copies
    def carry_out(self, instruction: Instruction, received: Sequence[Tree]) -> Tree:
        """What `instruction` gives, computed from what it `received` from its queues.

        Raises `ComputeFailed` with the user code's exception as its cause.
        """
        stage, kind = self.stages[instruction.action.stage], instruction.action.kind
        if self.replicas is not None and kind in (Kind.ADD, Kind.UPDATE):
            received = self._of_replicas(self.replicas, stage, instruction, received)
            if kind is Kind.ADD:
                return received[0]
        try:
            match kind:
                case Kind.FORWARD if instruction.evaluates:
                    return self._evaluate(stage, instruction, received)
                case Kind.FORWARD:
                    return self._forward(stage, instruction, received)
                case Kind.BACKWARD:
                    return self._backward(stage, instruction, received)
                case Kind.INPUT:
                    return self._backward_input(stage, instruction, received)
                case Kind.WEIGHT:
                    _backward_weight(stage, instruction, received)
                    return None
                case Kind.TIED | Kind.SUBTOTAL:
                    return _sent(stage, kind, received)
                case Kind.NORMS:
                    if stage.index == self.last:
                        self._summed_loss(instruction.step)  # a bad microbatch is named before its gradients are
                    return stage.norms(*received)
                case Kind.CLIP:
                    return stage.clip(*received)
                case _:
                    if stage.index == self.last:
                        self._end_step(stage, instruction.step)
                    if isinstance(stage, TiedStage):
                        return stage.exchange(*received, step=instruction.step)
                    stage.update(instruction.step)
                    return None
        except (ComputeFailed, DataError, ModelRefused, GroupLost):
            raise
        except WriteFailed:  # activations that are offloaded
            raise
        except BaseException as error:  # user code may raise anything; the cause is handed on
            if not raised_by_user_code(error):
                raise
            alone = not instruction.evaluates and kind not in ONCE_PER_STEP  # can be run again, without others
            raise ComputeFailed(
                f"stage {stage.index} failed in {instruction}, {stage.where}: {describe_error(error)}",
                Culprit(instruction.step, instruction.action) if alone else None,
            ) from error

    def _of_replicas(
        self, replicas: Replicas, stage: Stage, instruction: Instruction, received: Sequence[Tree]
    ) -> Sequence[Tree]:
        """What a replica sends to the others, or, before its update, nothing more: what it `received` from them is
        added to its own, in their order."""
        copy = instruction.action.stage
        own = ReplicaSums(stage.gradients(), self._own_losses(replicas.groups[copy]) if self._is_last(stage) else ())
        if instruction.action.kind is Kind.ADD:
            self._demand_finite(stage, replicas.groups[copy], instruction.step)
            self._demand_unchanged(stage, copy, instruction.step)
            return (own.tree,)
        if received:
            others = [own.other(stage.index, each) for each in received]
            parts = dict(zip(replicas.others(copy), others, strict=True)) | {copy: own}
            ordered = [parts[each] for each in replicas.of_stage[stage.index]]
            stage.set_gradients(total_of(ordered, own.gradients))
            if self._is_last(stage):
                found = losses_of(ordered)
                self._losses, self._rows = [each.loss for each in found], [each.rows for each in found]
        elif replicas.is_replicated(stage.index):  # it is frozen, and sends no sums
            self._demand_unchanged(stage, copy, instruction.step)
        return ()

    def _own_losses(self, group: Sequence[int]) -> tuple[MicrobatchLoss, ...]:
        return tuple(map(MicrobatchLoss, group, self._losses, self._rows))

    def _demand_finite(self, stage: Stage, group: Sequence[int], step: int) -> None:
        """Raises `BadMicrobatch` where it can be recorded: at the replica of the last stage that has it."""
        if self._is_last(stage):
            self._blame_one(step, zip(group, self._losses, strict=False))  # a trial has one microbatch

    def _demand_unchanged(self, stage: Stage, copy: int, step: int) -> None:
        """Raises `ComputeFailed` if forwards and backwards have changed what only updates may."""
        now = changes_of(stage.variables())
        before = self._begun.pop(copy, now)
        if changed := [name for name in before | now if now.get(name) != before.get(name)]:
            raise ComputeFailed(
                f"stage {stage.index} has changed {', '.join(changed)} while it computed step {step}; its replicas see "
                f"other microbatches, and would come to differ. Use stage.{stage.index}.replicas = 1, or layers "
                "without such buffers"
            )

    def _is_last(self, stage: Stage) -> bool:
        return stage.index == self.last

    def _end_step(self, last: Stage, step: int) -> None:
        """What the step came to, before the update of the last stage."""
        self.loss, self.gradient_norm = self._summed_loss(step), last.gradient_norm
        self.rows, self.learning_rates = sum(self._rows), last.learning_rates
        self._losses.clear()
        self._rows.clear()

    def _summed_loss(self, step: int) -> float | None:
        """The loss of the step that ends now, None if it had no rows. Raises `BadMicrobatch`."""
        counted = [loss for loss in self._losses if loss is not None]
        value = reduce(add, counted).item() if counted else None
        if value is not None and not math.isfinite(value):
            self._blame(step)
        return value

    def evaluated(self, step: int) -> EvaluationRecord:
        """What the round of evaluation after `step` steps found, which ends now: means over its rows."""
        sums, self.sums = self.sums, Sums()
        rows, loss = sums.rows, sums.loss
        metrics = {name: sums.metrics[name] / rows if rows else math.nan for name in self.metrics}
        return EvaluationRecord(step, rows, None if loss is None else loss / rows, metrics)

    def _forward(self, stage: Stage, instruction: Instruction, received: Sequence[Tree]) -> Tree:
        if self.replicas is not None and self.replicas.is_replicated(stage.index):
            self._begun.setdefault(instruction.action.stage, changes_of(stage.variables()))
        given = self._given(stage, instruction, received)
        output = stage.forward(
            given.inputs,
            given.targets,
            step=instruction.step,
            microbatch=instruction.action.microbatch,
            share=given.share,
            owned=bool(received),
        )
        demand_default_device(f"stage {stage.index} in {instruction}, a layer's forward")
        if stage.index == self.last:
            self._losses.append(output if given.rows and isinstance(output, Tensor) else None)
            self._rows.append(given.rows)
        return output

    def _given(self, stage: Stage, instruction: Instruction, received: Sequence[Tree]) -> Microbatch:
        """What a forward works on: inputs from a queue or, on the first stage, from the supply; targets on the last."""
        first, last = stage.index == 0, stage.index == self.last
        if self.feed is None or not (first or last):
            return Microbatch(received[0], None, 0, 1.0)
        stage.now_at(DATA)
        ask = self.feed.held_out_microbatch if instruction.evaluates else self.feed.microbatch
        supplied = ask(instruction.step, instruction.action.microbatch)
        inputs = supplied.inputs if first else received[0]
        return Microbatch(inputs, supplied.targets if last else None, supplied.rows, supplied.share)

    def _backward(self, stage: Stage, instruction: Instruction, received: Sequence[Tree]) -> Tree:
        step, number = instruction.step, instruction.action.microbatch
        if stage.index == self.last:
            return stage.backward(step=step, microbatch=number)
        if isinstance(stage, TiedStage):
            gradient, *tied = received
            return stage.backward(gradient, step=step, microbatch=number, owned=True, tied=tied[0] if tied else None)
        return stage.backward(received[0], step=step, microbatch=number, owned=True)

    def _backward_input(self, stage: Stage, instruction: Instruction, received: Sequence[Tree]) -> Tree:
        step, number = instruction.step, instruction.action.microbatch
        if stage.index == self.last:
            return stage.backward_input(step=step, microbatch=number)
        return stage.backward_input(received[0], step=step, microbatch=number, owned=True)

    def _evaluate(self, stage: Stage, instruction: Instruction, received: Sequence[Tree]) -> Tree:
        self.gives_up = self.gives_up or any(map(is_emptied, received))
        if self.gives_up:
            return emptied()
        given = self._given(stage, instruction, received)
        step, number = instruction.step, instruction.action.microbatch
        output = stage.evaluate(given.inputs, step=step, microbatch=number, owned=bool(received), ema=self.ema)
        if stage.index == self.last and given.rows:
            self._measure(stage, output, given)
        return output

    def _measure(self, stage: Stage, output: Tree, given: Microbatch) -> None:
        sums = self.sums
        sums.loss = (sums.loss or 0.0) + stage.evaluate_loss(output, given.targets) * given.rows
        targets = map_tensors(lambda t: t.to(stage.device), given.targets)
        for name, metric in self.metrics.items():
            stage.now_at(f"the metric {name}")
            sums.metrics[name] += metric_value(metric, output, targets) * given.rows
        sums.rows += given.rows

    def _culprit(self, step: int, number: int, loss: Tensor) -> Culprit | None:
        """The microbatch whose loss is not finite; None if another replica has it."""
        copy = self.last if self.replicas is None else self.replicas.having(self.last, number)
        return Culprit(step, Action(Kind.FORWARD, copy, number), loss) if copy in self.stages else None

    def _blame(self, step: int) -> None:
        self._blame_one(step, enumerate(self._losses))
        raise BadMicrobatch(f"the loss of step {step} is not finite although each microbatch's is: they overflow")

    def _blame_one(self, step: int, losses: Iterable[tuple[int, Tensor | None]]) -> None:
        """Raises `BadMicrobatch` for the first of the `losses`, each with its microbatch, that is not finite."""
        for number, loss in losses:
            if loss is not None and not math.isfinite(loss.item()):
                raise BadMicrobatch(
                    f"the loss of microbatch {number} of step {step} is {loss.item()} on stage {self.last}: the run "
                    f"stops before the update that would spread it. Look at that batch, or lower the learning rate.",
                    self._culprit(step, number, loss),
                )


def _backward_weight(stage: Stage, instruction: Instruction, received: Sequence[Tree]) -> None:
    step, number = instruction.step, instruction.action.microbatch
    if isinstance(stage, TiedStage):
        stage.backward_weight(step=step, microbatch=number, tied=received[0] if received else None)
    else:
        stage.backward_weight(step=step, microbatch=number)


def _sent(stage: Stage, kind: Kind, received: Sequence[Tree]) -> Tree:
    """What an earlier stage is sent of the gradients of parameters that both use: of a microbatch, or of the step."""
    if not isinstance(stage, TiedStage):
        return None
    return stage.leaving() if kind is Kind.TIED else stage.subtotal(*received)
