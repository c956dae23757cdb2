"""A schedule as a value: who does what in which order, and the program that repeats it over a run."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .action import Action
from .alternating import pipedream
from .merge import Run, merge

Mode = Literal["sync", "async"]
Placement = tuple[tuple[int, ...], ...]  # the stages of each worker


class ScheduleRefused(Exception):
    """A schedule cannot be made for a shape: the text names the schedule, the shape, the reason and the way out."""


@dataclass(frozen=True)
class Schedule:
    """For every worker, its list of actions for a step.

    `workers[w]` is one step of worker w and ends each of its stages with the stage's `U`. Stages below
    `first_trainable` run forward only; their `U` marks the end of the step there.
    In asynchronous mode a step is one microbatch, and steps overlap: only `program` tells how.
    """

    name: str
    mode: Mode
    placement: Placement
    microbatches: int
    workers: tuple[tuple[Action, ...], ...]
    first_trainable: int = 0

    @property
    def stages(self) -> int:
        return sum(len(stages) for stages in self.placement)

    def owner(self, stage: int) -> int:
        """The worker that owns `stage`. Raises ValueError if no worker does."""
        for worker, stages in enumerate(self.placement):
            if stage in stages:
                return worker
        raise ValueError(f"no worker owns stage {stage}: stages are numbered 0 to {self.stages - 1}")

    def program(self, worker: int, steps: range) -> Iterator[tuple[int, Action]]:
        """What `worker` does over `steps`, in order, each action with the step it belongs to.

        Synchronous: the step's list again and again. Asynchronous: one list over all steps, in which the microbatch
        is always 0, since the step is the microbatch's number.
        """
        match self.mode:
            case "sync":
                return ((step, action) for step in steps for action in self.workers[worker])
            case "async":
                return self._overlapping(worker, steps)

    def _overlapping(self, worker: int, steps: range) -> Iterator[Run]:
        lists = [pipedream(stage, self.stages, steps, self.first_trainable) for stage in range(self.stages)]
        if len(self.placement[worker]) == 1:
            return lists[self.placement[worker][0]]
        return (run for who, run in merge(lists, self.placement, self.first_trainable) if who == worker)
