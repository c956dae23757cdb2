"""What changes at the end of a step: the optimizer steps, gradients are cleared, averages and the rate change.

step                      0   1   2   3   4   5         lr_every = 3
optimizer                 x   x   x   x   x   x
averages of weights       x   x   x   x   x   x
learning rate scheduler           x           x
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from stageline.pipeline.stage.layers.activity import LR_SCHEDULER, OPTIMIZER, Activity
from stageline.pipeline.stage.layers.memory import copied

from .average import WeightAverage
from .optimizer import OptimizerFactory, ParameterGroup, make_optimizer
from .partial_steps import UpdatedFiles

LrSchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


class StageUpdate:
    """Of `parameters`, by their names in the unsplit model; without any there is no `optimizer`, and nothing to do.

    The learning rate scheduler steps after every `lr_every` steps; `average` is that of the weights, None if there is
    none.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        optimizer: OptimizerFactory | None,
        groups: Sequence[ParameterGroup],
        lr_scheduler: LrSchedulerFactory | None,
        lr_every: int,
        average: WeightAverage | None,
        activity: Activity,
    ) -> None:
        self.optimizer = None if optimizer is None else make_optimizer(optimizer, parameters, groups)
        self.lr_scheduler = None if lr_scheduler is None or not self.optimizer else lr_scheduler(self.optimizer)
        self._lr_every = lr_every
        self.average = average
        self._activity = activity
        self.files: UpdatedFiles | None = None  # which have weights, or what the optimizer keeps

    @property
    def copied_state(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Copies a tensor to where those are that the optimizer keeps."""
        return copied if self.files is None else self.files.copied_state

    def __call__(self, step: int | None) -> bool:
        """Updates with the gradients that are there, after `step`, counted from 0; None counts as the last of some
        `lr_every`. Whether there is anything to update."""
        if self.optimizer is None:
            return False
        self._activity.at = OPTIMIZER
        if self.files is None:
            self.optimizer.step()
        else:
            self.files.step(self.optimizer)
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update()
        if self.lr_scheduler is not None and (step is None or (step + 1) % self._lr_every == 0):
            self._activity.at = LR_SCHEDULER
            self.lr_scheduler.step()
        return True
