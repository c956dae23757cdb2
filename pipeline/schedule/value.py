"""A schedule as a value: the actions of each worker in order, and the program that repeats them over a run."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat

from .action import Action, Kind, Lists
from .replicas import Replicas, Shares, replicas_of
from .shape import Placement, ScheduleRefused, Shape
from .versions import DELAYED, Mode, overlapping


@dataclass(frozen=True)  # without slots, for its cached properties: they are read for every action
class Schedule:
    """Lists of actions of every worker for a step.

    In asynchronous mode steps overlap as `program` orders them, and a step is one microbatch, but for `DELAYED`.

    Attributes:
        name: Name in the catalogue, or of the file that the schedule is from.
        mode: "sync" if a step ends before the next begins, else "async".
        placement: Stages of each worker; of replicated stages, copies as `replicas.py` numbers them.
        microbatches: Microbatches of a step.
        workers: One step of each worker, in which each of its stages ends with a `U`.
        first_trainable: First stage that trains. Stages below it run forward only; their `U` marks the end of the step.
        shares: Share of the microbatches that each replica of each stage has. Empty where no stage has several.
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
        """Number of stages of the model."""
        return len(self.shares) or self.copies

    @cached_property
    def copies(self) -> int:
        """Number of copies of stages; equal to the number of stages if none has replicas."""
        return sum(len(stages) for stages in self.placement)

    @cached_property
    def replicas(self) -> Replicas:
        """The copies of each stage, and the microbatches of each copy."""
        return replicas_of(self.shares or ((1,),) * self.copies, self.microbatches)

    @property
    def shape(self) -> Shape:
        """The shape that the schedule was made for."""
        return Shape(self.name, self.placement, self.microbatches, self.first_trainable)

    def refused(self, reason: str) -> ScheduleRefused:
        """Return the error that refuses a feature's addition to this schedule, for `reason`."""
        return self.shape.refused(reason)

    def label(self, copy: int) -> str:
        """Return a copy's name for people: "1", "1.0"."""
        return self.replicas.label(copy)

    def name_of(self, action: Action) -> str:
        """Return an action for people: "1F3", "1.0F3"."""
        return f"{self.label(action.stage)}{action.name}"

    def trains(self, copy: int) -> bool:
        """Return True if the copy runs backwards."""
        return self.replicas.stage(copy) >= self.first_trainable

    @property
    def delays(self) -> bool:
        """True if all stages read the weights before the newest update (PipeDream-2BW, arXiv 2006.09503)."""
        return self.name == DELAYED

    @property
    def halves_backwards(self) -> bool:
        """True if backwards run in two halves."""
        return any(action.kind is Kind.INPUT for actions in self.workers for action in actions)

    def owner(self, stage: int) -> int:
        """Return the worker that owns `stage`. Raises `ValueError` if no worker does."""
        for worker, stages in enumerate(self.placement):
            if stage in stages:
                return worker
        raise ValueError(f"no worker owns stage {stage}: stages are numbered 0 to {self.stages - 1}")

    def program(self, worker: int, steps: range) -> Iterator[tuple[int, Action]]:
        """Return the actions of `worker` over `steps`, in order, each with its step.

        In synchronous mode the step's list is repeated. In asynchronous mode it is one list over all steps.
        """
        match self.mode:
            case "sync":
                actions = self.workers[worker]
                return chain.from_iterable(zip(repeat(step), actions, strict=False) for step in steps)
            case "async":
                return overlapping(self.shape, worker, steps)
