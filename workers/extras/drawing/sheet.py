"""The contents of a timetable, whatever draws it: each worker's actions, their labels, and a scale of round times."""

import math
from collections.abc import Callable, Sequence

from stageline.pipeline.program import Timed
from stageline.pipeline.schedule import ONCE_PER_STEP, Kind

WORDS: dict[str, str] = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "input gradient",
    Kind.WEIGHT: "weight gradient",
    Kind.TIED: "gradients of shared parameters",
    Kind.SUBTOTAL: "sum of gradients of shared parameters",
    Kind.ADD: "sums for other replicas",
    Kind.NORMS: "norms of gradients",
    Kind.CLIP: "clipping",
    Kind.UPDATE: "update",
}
OTHER = "an operation of a feature"


class Sheet:
    """A timetable to draw. Its times are in seconds if `seconds` is set, else in the unit of a plan's costs.

    `rows` holds each worker's actions by start, without those that take no time; `stages` the stages of each worker
    that have run; `shortest` is the duration of the shortest action. `stage` names a stage, of which several workers
    may have replicas.
    """

    def __init__(self, timed: Sequence[Timed], *, seconds: bool, stage: Callable[[int], str] = str) -> None:
        self.stage = stage
        self.seconds = seconds
        workers = range(max((each.worker for each in timed), default=-1) + 1)
        seen = sorted((each for each in timed if each.end > each.start), key=lambda each: each.start)
        self.rows = [[each for each in seen if each.worker == worker] for worker in workers]
        self.stages = [sorted({each.action.stage for each in timed if each.worker == worker}) for worker in workers]
        kinds = {each.action.kind for each in seen}
        self.kinds = [*(kind for kind in WORDS if kind in kinds), *sorted(kinds - WORDS.keys())]
        self.start = min((each.start for each in timed), default=0.0)
        self.span = max((each.end for each in timed), default=0.0) - self.start
        self.shortest = min((each.end - each.start for each in seen), default=1.0)
        self._several_stages = any(len(stages) > 1 for stages in self.stages)
        self._steps_of_one = all(each.action.microbatch == 0 for each in timed)

    def idle(self, worker: int) -> float:
        """The share of the span in which `worker` computes nothing."""
        return 1 - sum(each.end - each.start for each in self.rows[worker]) / self.span if self.span else 0.0

    def label(self, each: Timed) -> str:
        """`F3`, or `2F3` where a worker has more than one stage; the number is the step's where each has but one."""
        stage = self.stage(each.action.stage) if self._several_stages else ""
        number = "" if each.action.kind in ONCE_PER_STEP else str(self.number(each))
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
