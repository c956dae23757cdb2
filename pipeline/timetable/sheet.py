"""The contents of a timetable, whatever draws it: each worker's actions, their labels, and a scale of round times."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from stageline.pipeline.schedule import Kind
from stageline.pipeline.schedule.check import Timed

WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "input gradient",
    Kind.WEIGHT: "weight gradient",
    Kind.UPDATE: "update",
}


@dataclass(frozen=True)
class Sheet:
    """A timetable to draw. Its times are in seconds if `seconds` is set, else in the unit of a plan's costs."""

    timed: Sequence[Timed]
    seconds: bool

    @cached_property
    def rows(self) -> list[list[Timed]]:
        """Each worker's actions by start, without those that take no time."""
        seen = sorted((each for each in self.timed if each.end > each.start), key=lambda each: each.start)
        return [[each for each in seen if each.worker == worker] for worker in range(self._workers)]

    @cached_property
    def start(self) -> float:
        return min((each.start for each in self.timed), default=0)

    @cached_property
    def span(self) -> float:
        return max((each.end for each in self.timed), default=0) - self.start

    @cached_property
    def shortest(self) -> float:
        """The duration of the shortest action."""
        return min((each.end - each.start for row in self.rows for each in row), default=1)

    @cached_property
    def kinds(self) -> list[Kind]:
        seen = {each.action.kind for row in self.rows for each in row}
        return [kind for kind in Kind if kind in seen]

    @cached_property
    def stages(self) -> list[list[int]]:
        """The stages of each worker that have run."""
        return [
            sorted({each.action.stage for each in self.timed if each.worker == worker})
            for worker in range(self._workers)
        ]

    def idle(self, worker: int) -> float:
        """The share of the span in which `worker` computes nothing."""
        return 1 - sum(each.end - each.start for each in self.rows[worker]) / self.span if self.span else 0.0

    def label(self, each: Timed) -> str:
        """`F3`, or `2F3` where a worker has more than one stage; the number is the step's where each has but one."""
        stage = str(each.action.stage) if self._several_stages else ""
        number = "" if each.action.kind is Kind.UPDATE else str(self.number(each))
        return f"{stage}{each.action.kind}{number}"

    def number(self, each: Timed) -> int:
        """The number of an action's microbatch, or of its step where each step has one microbatch."""
        return each.step if self._steps_of_one else each.action.microbatch

    def ticks(self, most: int) -> list[float]:
        """Round times since the start, at most about `most` of them, one or two or five times a power of ten apart."""
        if not self.span:
            return [0.0]
        apart = 10 ** math.floor(math.log10(self.span / most))
        apart *= next(factor for factor in (1, 2, 5, 10, 20) if self.span / (apart * factor) <= most)
        return [apart * tick for tick in range(math.floor(self.span / apart + 1e-9) + 1)]

    def time(self, time: float) -> str:
        """A time since the start, with its unit."""
        if not self.seconds:
            return f"{time:.6g}"
        for unit, factor in (("s", 1), ("ms", 1e3)):
            if self.span * factor >= 1:
                return f"{time * factor:.4g} {unit}"
        return f"{time * 1e6:.4g} µs"

    @cached_property
    def _workers(self) -> int:
        return max((each.worker for each in self.timed), default=-1) + 1

    @cached_property
    def _several_stages(self) -> bool:
        return any(len(stages) > 1 for stages in self.stages)

    @cached_property
    def _steps_of_one(self) -> bool:
        return all(each.action.microbatch == 0 for each in self.timed)
