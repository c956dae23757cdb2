"""Rounds of evaluation, the best of them, and early stops, decided by figures alone.

    every = 100, 250 steps, 3 batches are held out

    training             steps 0-99       steps 100-199       steps 200-249
    round                           0                    1                   2
    after step                    100                  200                 250
    evaluated batches           0 1 2                3 4 5               6 7 8

Evaluated batches are numbered over the whole run. A worker that begins at a checkpoint runs the round after the
checkpoint's step again: "before" a step are the rounds that lie before the state after so many steps.

    step       100   200   300   400   500   600        criterion: accuracy, higher is better, patience 3
    accuracy   .81   .90   .93   .92   .93   nan
    best       100   200   300   300   300   300
    since        0     0     0     1     2     3        stops after step 600

A standing depends on the figures alone, never on when they arrive: every process that is told the same figures in the
same order comes to the same decision.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import isfinite


@dataclass(frozen=True, slots=True)
class Rounds:
    """The rounds of a run that trains `steps` steps. Each takes `batches` batches forward; 0: the run never evaluates.
    `every`: after how many steps, None: only after the last."""

    steps: int = 0
    batches: int = 0
    every: int | None = None

    def ends(self, start: int) -> Iterator[int]:
        """The steps after which training is interrupted, or over, from `start` on; the last is `steps`."""
        every = self.every if self.batches else None
        if every is not None:
            yield from range(max(1, -(-start // every)) * every, self.steps, every)
        yield self.steps

    def due(self, step: int) -> bool:
        """Whether a round comes after `step` steps."""
        between = self.every is not None and 0 < step < self.steps and step % self.every == 0
        return self.batches > 0 and (between or step == self.steps)

    def before(self, step: int) -> int:
        """How many rounds come before the state after `step` steps."""
        return 0 if not self.batches or self.every is None or step == 0 else (min(step, self.steps) - 1) // self.every

    def batches_before(self, step: int) -> int:
        """How many evaluated batches come before the state after `step` steps."""
        return self.before(step) * self.batches

    def batches_of(self, step: int) -> range:
        """The evaluated batches of the round after `step` steps; none if there is no such round."""
        first = self.batches_before(step)
        return range(first, first + self.batches if self.due(step) else first)

    def step_of(self, batch: int) -> int:
        """After how many steps evaluated batch `batch` comes."""
        return self.step_of_round(batch // self.batches)

    def step_of_round(self, number: int) -> int:
        """After how many steps round `number` comes."""
        return self.steps if self.every is None else min((number + 1) * self.every, self.steps)

    def ends_round(self, batch: int) -> bool:
        """Whether evaluated batch `batch` is the last of its round."""
        return (batch + 1) % self.batches == 0


class Better(StrEnum):
    """Which of two values of a metric is better."""

    LOWER = "lower"
    HIGHER = "higher"


@dataclass(frozen=True, slots=True)
class Criterion:
    """What evaluations are compared by: the value of `metric`, of which the lower or the higher is better.

    `patience`: after so many evaluations in a row without a better one, 1 or more, a run stops; None: it never does.
    """

    metric: str = "loss"
    better: Better = Better.LOWER
    patience: int | None = None

    def prefers(self, value: float, other: float) -> bool:
        """Whether `value` is better than `other`. Equal values are not."""
        return value < other if self.better is Better.LOWER else value > other


@dataclass(frozen=True, slots=True)
class Score:
    """The value of the metric after `step` training steps: those before it are steps 0 to `step` - 1."""

    step: int
    value: float


@dataclass(frozen=True, slots=True)
class Standing:
    """How a run stands after its evaluations so far. `best` is None before the first that has a finite value; `since`
    counts the evaluations in a row that were not better than it; `step` is the newest evaluation's."""

    criterion: Criterion
    best: Score | None = None
    since: int = 0
    step: int = 0

    def after(self, step: int, found: Mapping[str, float | None]) -> "Standing":
        """The standing after an evaluation of `step` training steps that has `found` these values, by metric.

        A value that is None, infinite or no number is not better than any. Raises `KeyError` if the criterion's metric
        is not among them.
        """
        value = found[self.criterion.metric]
        if value is not None and isfinite(value) and (self.best is None or self._beats(value, self.best)):
            return replace(self, best=Score(step, value), since=0, step=step)
        return replace(self, since=self.since + 1, step=step)

    def after_all(self, found: Iterable[tuple[int, Mapping[str, float | None]]]) -> "Standing":
        """The standing after several evaluations: (step, values), in their order."""
        standing = self
        for step, values in found:
            standing = standing.after(step, values)
        return standing

    @property
    def improved(self) -> bool:
        """Whether the newest evaluation is the best so far."""
        return self.best is not None and self.best.step == self.step

    @property
    def stops(self) -> bool:
        """Whether the run stops early, after `step`."""
        patience = self.criterion.patience
        return patience is not None and self.since >= patience

    @property
    def reason(self) -> str:
        """Why it stops: "stopped early after step 1200: accuracy was not better than 0.93 (step 700) in 5
        evaluations"."""
        count = f"{self.since} evaluation{'s' if self.since > 1 else ''}"
        if self.best is None:
            return f"stopped early after step {self.step}: {self.criterion.metric} was no finite number in {count}"
        return (
            f"stopped early after step {self.step}: {self.criterion.metric} was not better than "
            f"{self.best.value:.6g} (step {self.best.step}) in {count}"
        )

    def _beats(self, value: float, best: Score) -> bool:
        return self.criterion.prefers(value, best.value)
