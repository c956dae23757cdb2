"""Carries out instructions: gives the right inputs to the right stage, adds up losses and metrics in order."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from pipeline.feed import Microbatch
from pipeline.schedule import Kind
from pipeline.stage import Stage
from pipeline.tree import Tree, map_tensors

from .machine import Instruction

Metric = Callable[[Tree, Tree], Tensor | float]


class ComputeFailed(Exception):
    """The user's model, loss or data raised; the text names the stage, the action and the layer."""


class BadMicrobatch(ComputeFailed):
    """A microbatch's loss is not a finite number."""


class Supply(Protocol):
    """Where the batches' side of a microbatch comes from: the plan's data source, or a user's own loader."""

    def microbatch(self, step: int, microbatch: int) -> Microbatch: ...


class Executor:
    """The stages of one worker with what they need besides messages.

    `last` is the number of the model's last stage, the one with the loss. `metrics` are means over rows, by name.
    """

    def __init__(
        self, stages: Mapping[int, Stage], supply: Supply, last: int, metrics: Mapping[str, Metric] | None = None
    ) -> None:
        self.stages = stages
        self._supply = supply
        self._last = last
        self._metrics = dict(metrics or {})
        self._losses: list[Tensor | None] = []
        self._sums: dict[str, float] = dict.fromkeys(self._metrics, 0.0)
        self._measured = 0

    def carry_out(self, instruction: Instruction, received: Sequence[Tree]) -> Tree:
        """What `instruction` gives, computed from what it `received` from its queues.

        Raises `ComputeFailed` with the user code's exception as its cause.
        """
        stage = self.stages[instruction.action.stage]
        try:
            match instruction.action.kind:
                case Kind.FORWARD if instruction.evaluates:
                    return self._evaluate(stage, instruction, received)
                case Kind.FORWARD:
                    return self._forward(stage, instruction, received)
                case Kind.BACKWARD:
                    return self._backward(stage, instruction, received)
                case _:
                    stage.update()
                    return None
        except ComputeFailed:
            raise
        except Exception as error:  # user code may raise anything; the cause is handed on
            raise ComputeFailed(
                f"stage {stage.index} failed in {instruction}, layer {stage.at_layer}: {type(error).__name__}: {error}"
            ) from error

    def step_loss(self, step: int) -> float | None:
        """The loss of the step that just ended on the last stage, None if it had no rows. Raises `BadMicrobatch`."""
        counted = [loss for loss in self._losses if loss is not None]
        if not counted:
            self._losses.clear()
            return None
        total = counted[0]
        for loss in counted[1:]:
            total = total + loss
        value = total.item()
        if not math.isfinite(value):
            self._blame(step)
        self._losses.clear()
        return value

    def measured(self) -> dict[str, float]:
        """The metrics over all rows evaluated so far; nothing before the first."""
        if not self._measured:
            return {}
        return {name: total / self._measured for name, total in self._sums.items()}

    def _forward(self, stage: Stage, instruction: Instruction, received: Sequence[Tree]) -> Tree:
        step, number = instruction.step, instruction.action.microbatch
        first, last = stage.index == 0, stage.index == self._last
        if not (first or last):
            return stage.forward(received[0], step=step, microbatch=number, owned=True)
        supplied = self._supply.microbatch(step, number)
        x = supplied.inputs if first else received[0]
        if not last:
            return stage.forward(x, step=step, microbatch=number, owned=not first)
        loss = stage.forward(x, supplied.targets, step=step, microbatch=number, share=supplied.share, owned=not first)
        self._losses.append(loss.detach() if supplied.rows and isinstance(loss, Tensor) else None)
        return loss

    def _backward(self, stage: Stage, instruction: Instruction, received: Sequence[Tree]) -> Tree:
        step, number = instruction.step, instruction.action.microbatch
        if stage.index == self._last:
            return stage.backward(step=step, microbatch=number)
        return stage.backward(received[0], step=step, microbatch=number)

    def _evaluate(self, stage: Stage, instruction: Instruction, received: Sequence[Tree]) -> Tree:
        step, number = instruction.step, instruction.action.microbatch
        supplied = self._supply.microbatch(step, number) if stage.index in (0, self._last) else None
        x = supplied.inputs if supplied is not None and stage.index == 0 else received[0]
        output = stage.evaluate(x, step=step, microbatch=number)
        if supplied is not None and stage.index == self._last and supplied.rows:
            targets = map_tensors(lambda t: t.to(stage.device), supplied.targets)
            for name, metric in self._metrics.items():
                self._sums[name] += float(metric(output, targets)) * supplied.rows
            self._measured += supplied.rows
        return output

    def _blame(self, step: int) -> None:
        for number, loss in enumerate(self._losses):
            if loss is not None and not math.isfinite(loss.item()):
                raise BadMicrobatch(
                    f"the loss of microbatch {number} of step {step} is {loss.item()} on stage {self._last}: the run "
                    f"stops before the update that would spread it. Look at that batch, or lower the learning rate."
                )
        raise BadMicrobatch(f"the loss of step {step} is not finite although each microbatch's is: they overflow")
