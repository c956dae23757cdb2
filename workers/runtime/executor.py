"""Execution of instructions: inputs go to the right stage; losses and metrics are added in order."""

import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from stageline.broker.codec.message import LIMITS
from stageline.broker.codec.structure import emptied, flatten, is_emptied
from stageline.broker.control.records import EvaluationRecord
from stageline.broker.errors import Unsendable
from stageline.pipeline.data import Microbatch
from stageline.pipeline.errors import (
    DataError,
    GroupLost,
    ModelRefused,
    cause_of,
    describe_error,
    raised_by_user_code,
)
from stageline.pipeline.feature import Compute, Feature, FeatureFailed, all_handlers, compose, ordered
from stageline.pipeline.features import BUILT_IN
from stageline.pipeline.features.clipping import ClippedGradients
from stageline.pipeline.features.halves import Root
from stageline.pipeline.features.ties import SharedGradients
from stageline.pipeline.model.load import demand_default_device
from stageline.pipeline.printable import bounded
from stageline.pipeline.program import Instruction
from stageline.pipeline.schedule import PER_MICROBATCH
from stageline.pipeline.schedule.replicas import Replicas
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.tree import Tree, describe, describe_values, map_tensors
from stageline.workers.disk.background_writer import WriteFailed

from .forked_copy import end_copy
from .left_out import LeftOut
from .losses import ComputeFailed, Culprit, StepLosses
from .replicas import SummedReplicas

Metric = Callable[[Tree, Tree], Tensor | float]
DATA = "the data source"  # in place of a layer's name, as those of a stage
CarryOut = Callable[[Instruction, Sequence[Tree]], Tree]  # of what the instruction received from its queues


def metric_value(metric: Metric, outputs: Tree, targets: Tree) -> float:
    """Return the value of `metric` for the rows of a microbatch: one number.

    Args:
        metric: Computes the metric.
        outputs: Outputs of the last stage.
        targets: Targets of the same rows.

    Raises:
        ValueError: `metric` returned something else than one number. Exceptions of `metric` pass.
    """
    found: Any = metric(outputs, targets)
    if isinstance(found, Tensor) and found.numel() == 1:
        return float(found)
    with suppress(TypeError, ValueError, RuntimeError):
        if not isinstance(found, str):
            return float(found)
    what = f"{describe(found)}. Take its mean()" if isinstance(found, Tensor) else f"{found!r:.80}"
    raise ValueError(f"a metric must return one number, the mean over rows; it returned {what}")


class MicrobatchSource(Protocol):
    """A source of inputs for the first stage, and of targets for the last. A `Feed` is one."""

    def microbatch(self, step: int, microbatch: int) -> Microbatch:
        """Return a microbatch of training step `step`. Raises `DataError` if the source cannot give it."""

    def held_out_microbatch(self, batch: int, microbatch: int) -> Microbatch:
        """Return a microbatch of evaluated batch `batch` of the run. Raises `DataError` if there is none."""

    def samples(self, step: int, microbatch: int) -> Tensor | None:
        """Return the numbers of a microbatch's rows in the data set, int64 [rows]; None if they are not known.

        Raises `DataError` if the source cannot give them.
        """

    def held_out_samples(self, batch: int, microbatch: int) -> Tensor | None:
        """Return the numbers of the rows of an evaluated microbatch, int64 [rows]; None if they are not known."""


@dataclass(slots=True)
class Sums:
    """Results of evaluation, added up over rows.

    Attributes:
        rows: Rows that were evaluated.
        loss: Sum of the losses, each weighted by its rows; None before the first row.
        metrics: Sums of the metrics, each weighted by its rows, by name.
    """

    rows: int = 0
    loss: float | None = None
    metrics: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add_loss(self, loss: float, rows: int) -> None:
        """Add the mean loss of `rows` rows."""
        self.loss = (self.loss or 0.0) + loss * rows

    def add_metric(self, name: str, value: float, rows: int) -> None:
        """Add the mean of a metric over `rows` rows."""
        self.metrics[name] += value * rows

    def add_rows(self, rows: int) -> None:
        """Count rows whose loss and metrics are all added."""
        self.rows += rows


class Executor:
    """The stages of one worker with what they need besides messages."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        feed: MicrobatchSource | None,
        last: int,
        metrics: Mapping[str, Metric] = MappingProxyType({}),
        *,
        ema: bool = False,
        replicas: Replicas | None = None,
    ) -> None:
        """Take the stages and compose their computations.

        Args:
            stages: Stages by their copies' numbers.
            feed: Inputs and targets; None for a worker that has neither the first stage nor the last.
            last: Number of the model's last stage, the one with the loss.
            metrics: Functions of outputs and targets, by name. Evaluation reports means over rows.
            ema: True if evaluation measures the averages of the weights.
            replicas: All copies of stages, of which `stages` are some; by default each stage has one.
        """
        self.stages = stages
        self.feed = feed
        self.last = last
        self.metrics = metrics
        self._replicas = replicas or Replicas.single(last + 1)
        self.losses = StepLosses(last, stages, self._replicas)
        self.left_out = LeftOut(last, self.losses)
        self.loss: float | None = None  # of the last step, on the worker that has the last stage
        self.gradient_norm: float | None = None  # likewise, if gradients are clipped
        self.rows = 0  # likewise
        self.learning_rates: tuple[float, ...] = ()  # likewise, of the last stage's groups
        self.drawn = 0.0  # seconds of the present action in which the feed drew rows
        self._asked: tuple[Instruction, Microbatch] | None = None  # to see if there are rows; the forward takes it
        self.sums = Sums()  # of what was evaluated so far
        self.gives_up = False  # the batch that is evaluated: its script has the result already
        self._ema = ema
        self._epoch = 0
        self._value: tuple[int, float] | None = None  # steps before the newest evaluation, and what it has found
        self.computes: dict[
            tuple[int, str], Compute
        ] = {}  # by copy and kind of operation, within the built-in features
        for copy, stage in stages.items():
            inner = ordered([*self._built_in(), *stage.features], BUILT_IN)
            for kind, compute in all_handlers(inner, stage, self._core(stage), _demand_sendable).items():
                self.computes[copy, kind] = compute
        self.carry_out = self.within(())

    def within(self, features: Sequence[Feature]) -> CarryOut:
        """Return the function that carries out an instruction on the stages, within `features` of the worker.

        The first feature is the outermost. Outside of the users' features and the built-in ones, an exception of user
        code becomes a `ComputeFailed`, which the worker's features see. All are composed here, once for each stage and
        kind of operation.
        """
        table: dict[tuple[int, str], Compute] = {}
        for (copy, kind), compute in self.computes.items():
            stage = self.stages[copy]
            within_rows = self.left_out.around(stage, kind, compute, partial(self._is_empty, stage))
            table[copy, kind] = compose(features, stage, kind, _naming_failures(stage, within_rows))

        def carry_out(instruction: Instruction, received: Sequence[Tree]) -> Tree:
            action = instruction.op.action
            return table[action.stage, action.kind](instruction, received)

        return carry_out

    def begin_call(self, *, ema: bool, settled: bool, epoch: int) -> None:
        """Begin a call of a script.

        Args:
            ema: True if the averages of the weights are measured.
            settled: True if the script has the result already, and nothing is to be computed.
            epoch: Steps of an epoch; 0 if the script does not say.
        """
        self.sums = Sums()
        self.gives_up = settled
        self._ema, self._epoch = ema, epoch

    def take_drawn(self) -> float:
        """Return the seconds in which the feed drew rows since this was last called."""
        drawn, self.drawn = self.drawn, 0.0
        return drawn

    def told(self, step: int, value: float) -> None:
        """Note the value of the evaluation after `step` steps: schedulers that follow evaluations step by it."""
        self._value = step, value

    def evaluated(self, step: int) -> EvaluationRecord:
        """Return means over the rows of the round of evaluation after `step` steps, and end the round."""
        sums, self.sums = self.sums, Sums()
        rows, loss = sums.rows, sums.loss
        metrics = {name: sums.metrics[name] / rows if rows else math.nan for name in self.metrics}
        return EvaluationRecord(step, rows, None if loss is None else loss / rows, metrics)

    def _built_in(self) -> list[Feature]:
        """Return the features that any run may need. They wrap nothing where a stage has no use for them."""
        sums = SummedReplicas(self._replicas, self.losses)
        return [sums, SharedGradients(), ClippedGradients(self.last, self.losses.total)]

    def _core(self, stage: Stage) -> dict[str, Compute]:
        """Return the functions by which `stage` computes each kind of operation by itself."""
        is_last = stage.index == self.last

        def forward(instruction: Instruction, received: Sequence[Tree]) -> Tree:
            if instruction.evaluates:
                return self._evaluate(stage, instruction, received)
            given = self._given(stage, instruction, received)
            output = stage.forward(
                given.inputs,
                given.targets,
                step=instruction.step,
                microbatch=instruction.op.action.microbatch,
                share=given.share,
                owned=bool(received),
            )
            if torch._C._len_torch_function_stack():  # a default device other than the first is such a function
                demand_default_device(f"stage {stage.index} in {instruction}, a layer's forward")
            if is_last:
                self.losses.add(output, given.rows)
            return output

        def backward(instruction: Instruction, received: Sequence[Tree]) -> Tree:
            step, number = instruction.step, instruction.op.action.microbatch
            if is_last:
                return stage.backward(step=step, microbatch=number)
            gradient, *roots = received
            return stage.backward(gradient, step=step, microbatch=number, owned=True, roots=_roots(roots))

        def backward_input(instruction: Instruction, received: Sequence[Tree]) -> Tree:
            step, number = instruction.step, instruction.op.action.microbatch
            if is_last:
                return stage.backward_input(step=step, microbatch=number)
            return stage.backward_input(received[0], step=step, microbatch=number, owned=True)

        def backward_weight(instruction: Instruction, received: Sequence[Tree]) -> Tree:
            number = instruction.op.action.microbatch
            stage.backward_weight(step=instruction.step, microbatch=number, roots=_roots(received))
            return None

        def update(instruction: Instruction, received: Sequence[Tree]) -> Tree:
            if self._value is not None and self._value[0] == instruction.step:
                stage.evaluated(self._value[1])
            if is_last:
                self._end_step(stage, instruction.step)
            stage.update(instruction.step, self._epoch)
            return None

        return {"F": forward, "B": backward, "I": backward_input, "W": backward_weight, "U": update}

    def _end_step(self, last: Stage, step: int) -> None:
        """Note the results of the step, before the update of the last stage."""
        self.loss, self.gradient_norm = self.losses.total(step), last.gradient_norm
        self.rows, self.learning_rates = self.losses.rows, last.learning_rates
        self.losses.clear()

    def _given(self, stage: Stage, instruction: Instruction, received: Sequence[Tree]) -> Microbatch:
        """Return the input of a forward, on the last stage with targets.

        It comes from a queue or, on the first stage, from the feed.
        """
        first, last = stage.index == 0, stage.index == self.last
        if self.feed is None or not (first or last):
            return Microbatch(received[0], None, 0, 1.0)
        asked, self._asked = self._asked, None
        supplied = asked[1] if asked and asked[0] is instruction else self._supplied(self.feed, stage, instruction)
        inputs = supplied.inputs if first else received[0]
        return Microbatch(inputs, supplied.targets if last else None, supplied.rows, supplied.share)

    def _supplied(self, feed: MicrobatchSource, stage: Stage, instruction: Instruction) -> Microbatch:
        stage.now_at(DATA)
        ask = feed.held_out_microbatch if instruction.evaluates else feed.microbatch
        began = perf_counter()
        given = ask(instruction.step, instruction.op.action.microbatch)
        self.drawn += perf_counter() - began
        return given

    def _is_empty(self, stage: Stage, instruction: Instruction) -> bool:
        """Return True if the feed gives the microbatch of a first stage's forward without rows."""
        if self.feed is None or (instruction.evaluates and self.gives_up):
            return False
        supplied = self._supplied(self.feed, stage, instruction)
        self._asked = instruction, supplied
        return not supplied.rows

    def _evaluate(self, stage: Stage, instruction: Instruction, received: Sequence[Tree]) -> Tree:
        self.gives_up = self.gives_up or any(map(is_emptied, received))
        if self.gives_up:
            return emptied()
        given = self._given(stage, instruction, received)
        step, number = instruction.step, instruction.op.action.microbatch
        output = stage.evaluate(given.inputs, step=step, microbatch=number, owned=bool(received), ema=self._ema)
        if stage.index == self.last and given.targets is not None and given.rows:
            self._measure(stage, output, given)
        return output

    def _measure(self, stage: Stage, output: Tree, given: Microbatch) -> None:
        sums = self.sums
        sums.add_loss(stage.evaluate_loss(output, given.targets), given.rows)
        targets = map_tensors(lambda t: t.to(stage.device), given.targets)
        for name, metric in self.metrics.items():
            stage.now_at(f"the metric {name}")
            try:
                sums.add_metric(name, metric_value(metric, output, targets), given.rows)
            except Exception:
                stage.now_at(stage.where, f"outputs {describe_values(output)} and targets {describe_values(targets)}")
                raise
        sums.add_rows(given.rows)


def _demand_sendable(instruction: Instruction, result: Tree) -> None:
    if instruction.gives:
        try:
            flatten(result, LIMITS.depth)
        except Unsendable as error:
            raise TypeError(f"for {', '.join(instruction.gives)}, the {error}") from error


def _naming_failures(stage: Stage, compute: Compute) -> Compute:
    """Return `compute` with each exception of the user's code turned into a `ComputeFailed` that has it as its cause.

    A copy of this process that the user's code has forked ends in the returned function.
    """

    def named(instruction: Instruction, received: Sequence[Tree]) -> Tree:
        process = os.getpid()
        try:
            result = compute(instruction, received)
        except BaseException as error:  # user code may raise anything; the cause is handed on
            if os.getpid() != process:
                end_copy(process, error)
            # One that is not of the user's code keeps its class; `WriteFailed` is of activations that are offloaded.
            passes = (ComputeFailed, DataError, ModelRefused, GroupLost, WriteFailed)
            if issubclass(type(error), passes) or not raised_by_user_code(error):  # it may lie about its class
                raise
            raise _failure(stage, instruction, error) from _cause(error)
        if os.getpid() != process:
            end_copy(process)
        return result

    return named


def _failure(stage: Stage, instruction: Instruction, error: BaseException) -> ComputeFailed:
    failed = f"failed in {instruction}, {stage.where}: {describe_error(error)}"
    if stage.given:
        failed = f"{failed.removesuffix('.')}. It was given {bounded(stage.given, 500)}"
    if issubclass(type(error), FeatureFailed):
        failed = f"stopped: {error}"
    action = instruction.op.action
    alone = not instruction.evaluates and action.kind in PER_MICROBATCH  # can be run again, without others
    return ComputeFailed(f"stage {stage.index} {failed}", Culprit(instruction.step, action) if alone else None)


def _cause(error: BaseException) -> BaseException:
    """Return the failure itself, in place of a feature's account of it."""
    return (cause_of(error) if issubclass(type(error), FeatureFailed) else None) or error


def _roots(received: Sequence[Any]) -> Sequence[Root]:
    """Return the gradients of weights that a feature has put behind the tensors that an operation received."""
    return received[0] if received else ()
