"""A schedule as a value: what each worker does in which order, and the program that repeats it over a run."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Literal

from .action import Action, Kind, Lists
from .alternating import alternate, merge, one_f_one_b
from .replicas import Replicas, Shares, replicas_of
from .shape import Placement, ScheduleRefused, Shape

Mode = Literal["sync", "async"]

DELAYED = "2bw"  # the name of the asynchronous schedule whose steps have several microbatches

_AHEAD = 2  # microbatches by which the merged lists of asynchronous mode let a stage without backwards be ahead


@dataclass(frozen=True, slots=True)
class Schedule:
    """For every worker, its list of actions for a step.

    In asynchronous mode steps overlap as `program` orders them, and a step is one microbatch, but for `DELAYED`.

    Attributes:
        name: Name in the catalogue, or of the file that it is from.
        mode: Whether a step ends before the next begins.
        placement: Stages of each worker; of replicated stages, copies as `replicas.py` numbers them.
        microbatches: Microbatches of a step.
        workers: One step of each worker, in which each of its stages ends with a `U`.
        first_trainable: First stage that trains. Those below run forward only; their `U` marks the end of the step.
        shares: Part of the microbatches that each replica of each stage has. Empty where no stage has several.
        descends: True if stages run the backwards of a step in descending order of microbatches.
    """

    name: str
    mode: Mode
    placement: Placement
    microbatches: int
    workers: Lists
    first_trainable: int = 0
    shares: Shares = ()
    descends: bool = False

    @property
    def stages(self) -> int:
        """Of the model."""
        return len(self.shares) or self.copies

    @property
    def copies(self) -> int:
        """Of stages: as many as there are stages, where none has replicas."""
        return sum(len(stages) for stages in self.placement)

    @property
    def replicas(self) -> Replicas:
        """Which stage each copy is of, and which microbatches it has."""
        return replicas_of(self.shares or ((1,),) * self.copies, self.microbatches)

    def refused(self, reason: str) -> ScheduleRefused:
        """Return the error that refuses what a feature adds to this schedule, for `reason`."""
        return Shape(self.name, self.placement, self.microbatches, self.first_trainable).refused(reason)

    def label(self, copy: int) -> str:
        """Return a copy's name for people: "1", "1.0"."""
        return self.replicas.label(copy)

    def name_of(self, action: Action) -> str:
        """An action for people: "1F3", "1.0F3"."""
        return f"{self.label(action.stage)}{action.name}"

    def trains(self, copy: int) -> bool:
        """Return True if the copy runs backwards."""
        return self.replicas.stage(copy) >= self.first_trainable

    @property
    def delays(self) -> bool:
        """Whether the microbatches of a step read the weights before the newest update, in all stages
        (PipeDream-2BW, arXiv 2006.09503)."""
        return self.name == DELAYED

    @property
    def halves_backwards(self) -> bool:
        """Whether backwards run in two halves."""
        return any(action.kind is Kind.INPUT for actions in self.workers for action in actions)

    def owner(self, stage: int) -> int:
        """The worker that owns `stage`. Raises `ValueError` if no worker does."""
        for worker, stages in enumerate(self.placement):
            if stage in stages:
                return worker
        raise ValueError(f"no worker owns stage {stage}: stages are numbered 0 to {self.stages - 1}")

    def program(self, worker: int, steps: range) -> Iterator[tuple[int, Action]]:
        """The actions of `worker` over `steps`, in order, each with its step.

        In synchronous mode the step's list is repeated. In asynchronous mode it is one list over all steps.
        """
        match self.mode:
            case "sync":
                actions = self.workers[worker]
                return chain.from_iterable(zip(repeat(step), actions, strict=False) for step in steps)
            case "async":
                return self._overlapping(worker, steps)

    def _overlapping(self, worker: int, steps: range) -> Iterator[tuple[int, Action]]:
        """1F1B over the microbatches of all steps without a flush, with an update right after the last backward of each
        step: of every microbatch in PipeDream (SOSP'19), of several in PipeDream-2BW (arXiv 2006.09503).

        A stage that is not trained ends its steps with the forward.
        """
        count = self.microbatches
        for kind, stage, number in self._one_f_one_b(worker, range(steps.start * count, steps.stop * count)):
            step, microbatch = divmod(number, count)
            yield step, Action(kind, stage, microbatch)
            if microbatch == count - 1 and (kind is Kind.BACKWARD or stage < self.first_trainable):
                yield step, Action(Kind.UPDATE, stage)

    def _one_f_one_b(self, worker: int, numbers: range) -> Iterator[Action]:
        """The actions of `worker` on these microbatches, which are numbered over the whole run."""
        own = self.placement[worker]
        lists = [
            alternate(stage, numbers, warm_up, self.first_trainable)
            for stage, warm_up in enumerate(one_f_one_b(self.stages))
        ]
        if len(own) == 1:
            return lists[own[0]]
        merged = merge(lists, self.first_trainable, ahead=_AHEAD)
        return (action for action in merged if action.stage in own)
