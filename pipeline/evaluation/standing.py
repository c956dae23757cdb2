"""The best of a run's evaluations, and when to stop early.

    step       100   200   300   400   500   600        criterion: accuracy, higher is better, patience 3
    accuracy   .81   .90   .93   .92   .93   nan
    best       100   200   300   300   300   300
    since        0     0     0     1     2     3        stops after step 600

What comes out depends on the figures alone, never on when they arrive: every process that is told the same figures in
the same order comes to the same decision.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import isfinite


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
