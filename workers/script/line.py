"""Trains a line of stages from a user's script, one batch at a time.

with Line([front, back], loss=loss, optimizer=partial(SGD, lr=0.1), schedule="1f1b", microbatches=8) as line:
    for x, y in loader:
        loss = line.step(x, y)
model.load_state_dict(line.state_dict())
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch

from stageline.broker.codec.message import Flow, Message, message_number
from stageline.broker.queues.base import QueueKey
from stageline.broker.queues.memory import MemoryQueues
from stageline.pipeline.data import Microbatch
from stageline.pipeline.data import cut as cut_batch
from stageline.pipeline.errors import StagelineError
from stageline.pipeline.model.cut import Segment, cut_model, first_trainable
from stageline.pipeline.schedule import make_schedule
from stageline.pipeline.stage.generators import generators_kept
from stageline.pipeline.stage.stage import Loss, LrSchedulerFactory, OptimizerFactory, Stage
from stageline.pipeline.tree import Tree
from stageline.workers.runtime.executor import ComputeFailed, Executor, delivery
from stageline.workers.runtime.loop import WorkerLoop, take_turns
from stageline.workers.runtime.program import Program

RUN = "line"
ENDLESS = 2**62  # steps


class LineClosed(StagelineError):
    """The line was closed, so it neither trains nor evaluates; its weights can still be read."""


class Line(AbstractContextManager["Line"]):
    """The stages of a model as workers of a schedule, in this process, trained with a loader of one's own.

    `model`: an `nn.Sequential` with `cut` (the layers that stages 1, 2, ... begin with) or `stages` (their number), or
    a list with one module for each stage. `placement`: the stages of each worker, by default one worker each. `loss`
    is a mean over rows; `optimizer` makes an optimizer from a stage's parameters. The names of a schedule are
    `schedule_names()`; `window` goes with "window". Equal, bit for bit, to the unsplit model under the same
    microbatches, loss shares and layer seeding. A script may have several lines, each with a model of its own. torch's
    default generators are in the script what they would be without the line. Raises `ModelRefused` or
    `ScheduleRefused` for what cannot work.
    """

    def __init__(
        self,
        model: torch.nn.Sequential | Sequence[torch.nn.Module],
        *,
        loss: Loss,
        optimizer: OptimizerFactory,
        lr_scheduler: LrSchedulerFactory | None = None,
        cut: Sequence[int] | None = None,
        stages: int | None = None,
        placement: Sequence[Sequence[int]] | None = None,
        schedule: str = "1f1b",
        microbatches: int = 1,
        window: Sequence[int] | None = None,
        seed: int = 0,
        device: str | torch.device = "cpu",
    ) -> None:
        segments = cut_model(model, cut, stages)
        last = len(segments) - 1
        self._schedule = make_schedule(
            schedule,
            placement or [(index,) for index in range(len(segments))],
            microbatches,
            window=window,
            first_trainable=first_trainable(segments),
        )
        self._program = Program(self._schedule, ENDLESS, fed=True)
        self._queues = MemoryQueues(RUN, microbatches)
        stage = partial(Stage, seed=seed, optimizer=optimizer, lr_scheduler=lr_scheduler, device=device)
        self._stages = [_stage_of(part, stage, loss if part.index == last else None) for part in segments]
        self._executors = [
            Executor({stage: self._stages[stage] for stage in owned}, None, last) for owned in self._schedule.placement
        ]
        self._workers = [
            WorkerLoop(self._program, index, executor, self._queues, run=RUN, incarnation=1)
            for index, executor in enumerate(self._executors)
        ]
        self._device = torch.device(device)
        self._step = 0
        self._broken = ""
        self._closed = False

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self, x: Tree, y: Tree) -> float | None:
        """Trains on one batch and returns its loss; None for a batch without rows.

        `x` and `y` are trees of tensors whose dimension 0 counts the batch's rows. Raises `DataError` for a batch that
        cannot be cut into microbatches, which changes nothing; `ComputeFailed`, after which the line cannot be used
        any more; and `LineClosed`.
        """
        self._require_open("train")
        if self._broken:
            raise ComputeFailed(f"this line cannot go on: an earlier step failed ({self._broken}). Make a new one")
        microbatches = cut_batch(x, y, self._schedule.microbatches)
        try:
            with generators_kept(self._device):
                return self._train(microbatches)
        except BaseException as error:  # Ctrl-C too: messages of the step remain in the queues
            self._broken = str(error) or type(error).__name__
            raise

    def _train(self, microbatches: Sequence[Microbatch]) -> float | None:
        step, last = self._step, self._program.last
        inputs, targets = QueueKey(Flow.FORWARD, 0), QueueKey(Flow.TARGET, last)
        for number, microbatch in enumerate(microbatches):
            self._put(inputs, number, microbatch.inputs)
            self._put(targets, number, delivery(microbatch))
        take_turns(self._workers, lambda worker: worker.step is None or worker.step > step)
        self._step += 1
        for key in (inputs, targets, QueueKey(Flow.FORWARD, last + 1), *self._program.queues):
            self._queues.outbound(key).trim(self._step)
        for worker in self._workers:
            worker.progress.steps.clear()
        return self._executors[self._schedule.owner(last)].loss

    def evaluate(self, x: Tree) -> Tree:
        """The model's output for `x`, in evaluation mode and without gradients; trees of tensors of any dtype.

        The modules' modes are afterwards what they were before. Raises `LineClosed`.
        """
        self._require_open("evaluate")
        with generators_kept(self._device):
            for stage in self._stages:
                x = stage.evaluate(x, step=self._step)
        return x

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy of the weights under the unsplit model's names (as `nn.Sequential(*model)` has them for a list)."""
        parts = (stage.state_dict() for stage in self._stages)
        return {name: tensor.detach().clone() for part in parts for name, tensor in part.items()}

    def close(self) -> None:
        """Releases the queues; `state_dict` still works. Closing twice changes nothing."""
        self._closed = True
        self._queues.close()

    def _require_open(self, what: str) -> None:
        if self._closed:
            raise LineClosed(
                f"this line is closed, as it is at the end of its `with`: it cannot {what} any more. Do that before, "
                f"or make a new line; state_dict() still has the weights"
            )

    def _put(self, key: QueueKey, microbatch: int, payload: Tree) -> None:
        number = message_number(self._step, microbatch, self._schedule.microbatches)
        message = Message(RUN, key.flow, self._step, microbatch, key.stage, 1, number, payload)
        self._queues.outbound(key).put(message)


def _stage_of(part: Segment, make: Callable[..., Stage], loss: Loss | None) -> Stage:
    """The stage that computes `part`; only the last stage has a loss."""
    return make(part.layers, index=part.index, first_layer=part.first_layer, names=part.names, loss=loss)
