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
from math import isfinite, nan


@dataclass(frozen=True, slots=True)
class Rounds:
    """Rounds of evaluation of a run that trains `steps` steps.

    Each round takes `batches` batches forward; with 0 the run never evaluates. `every` is the number of steps from one
    round to the next; None: the only round comes after the last step.
    """

    steps: int = 0
    batches: int = 0
    every: int | None = None

    def ends(self, start: int) -> Iterator[int]:
        """Yield the steps from `start` on after which training is interrupted or over; the last is `steps`."""
        every = self.every if self.batches else None
        if every is not None:
            yield from range(max(1, -(-start // every)) * every, self.steps, every)
        yield self.steps

    def due(self, step: int) -> bool:
        """Return True if a round comes after `step` steps."""
        between = self.every is not None and 0 < step < self.steps and step % self.every == 0
        return self.batches > 0 and (between or step == self.steps)

    def before(self, step: int) -> int:
        """Return the number of rounds before the state after `step` steps."""
        return 0 if not self.batches or self.every is None or step == 0 else (min(step, self.steps) - 1) // self.every

    def batches_before(self, step: int) -> int:
        """Return the number of evaluated batches before the state after `step` steps."""
        return self.before(step) * self.batches

    def batches_of(self, step: int) -> range:
        """Return the numbers of the evaluated batches of the round after `step` steps; empty without such a round."""
        first = self.batches_before(step)
        return range(first, first + self.batches if self.due(step) else first)

    def step_of(self, batch: int) -> int:
        """Return the number of steps after which evaluated batch `batch` comes."""
        return self.step_of_round(batch // self.batches)

    def step_of_round(self, number: int) -> int:
        """Return the number of steps after which round `number` comes."""
        return self.steps if self.every is None else min((number + 1) * self.every, self.steps)

    def ends_round(self, batch: int) -> bool:
        """Return True if evaluated batch `batch` is the last of its round."""
        return (batch + 1) % self.batches == 0


class Better(StrEnum):
    """Direction in which a metric's values become better."""

    LOWER = "lower"
    HIGHER = "higher"

    def contradiction(self, direction: object, metric: str) -> str:
        """Return why a `ReduceLROnPlateau` of mode `direction` is not for the values of `metric`; "" if it is."""
        wanted, better = ("min", "falls") if self is Better.LOWER else ("max", "rises")
        if direction not in {"min", "max"} - {wanted}:
            return ""
        return (
            f'ReduceLROnPlateau has mode = "{direction}", by which the rate is lowered while {metric} {better}; use '
            f'mode = "{wanted}"'
        )


@dataclass(frozen=True, slots=True)
class Criterion:
    """Criterion by which evaluations are compared: the value of `metric`, of which the lower or the higher is better.

    `patience`: a run stops after so many evaluations in a row without a better one, 1 or more; None: it never does.
    `rates`: learning rate schedulers step by the value of each evaluation.
    """

    metric: str = "loss"
    better: Better = Better.LOWER
    patience: int | None = None
    rates: bool = False

    @property
    def is_told(self) -> bool:
        """True if stages need to know what an evaluation has found before they go on."""
        return self.rates or self.patience is not None

    def value(self, found: Mapping[str, float | None]) -> float:
        """Return the value of the metric in the values of an evaluation; nan for None."""
        value = found[self.metric]
        return nan if value is None else value

    def prefers(self, value: float, other: float) -> bool:
        """Return True if `value` is better than `other`. Equal values are not."""
        return value < other if self.better is Better.LOWER else value > other


@dataclass(frozen=True, slots=True)
class Score:
    """Value of the metric after `step` training steps, which are steps 0 to `step` - 1."""

    step: int
    value: float


@dataclass(frozen=True, slots=True)
class Standing:
    """State of a run's evaluations so far.

    Attributes:
        criterion: Criterion by which the evaluations are compared.
        best: Best evaluation; None before the first that has a finite value.
        since: Number of evaluations in a row that were not better than `best`.
        step: Step of the newest evaluation.
    """

    criterion: Criterion
    best: Score | None = None
    since: int = 0
    step: int = 0

    def after(self, step: int, found: Mapping[str, float | None]) -> "Standing":
        """Return the standing after one more evaluation.

        A value that is None, infinite or NaN is not better than any.

        Args:
            step: Number of training steps before the evaluation.
            found: Values of the evaluation, by metric.

        Raises:
            KeyError: The criterion's metric is not among `found`.
        """
        value = found[self.criterion.metric]
        if value is not None and isfinite(value) and (self.best is None or self._beats(value, self.best)):
            return replace(self, best=Score(step, value), since=0, step=step)
        return replace(self, since=self.since + 1, step=step)

    def after_all(self, found: Iterable[tuple[int, Mapping[str, float | None]]]) -> "Standing":
        """Return the standing after several evaluations: (step, values), in their order."""
        standing = self
        for step, values in found:
            standing = standing.after(step, values)
        return standing

    @property
    def improved(self) -> bool:
        """True if the newest evaluation is the best so far."""
        return self.best is not None and self.best.step == self.step

    @property
    def stops(self) -> bool:
        """True if the run stops early, after `step`."""
        patience = self.criterion.patience
        return patience is not None and self.since >= patience

    @property
    def reason(self) -> str:
        """Reason of an early stop, for people.

        Example: "stopped early after step 1200: accuracy was not better than 0.93 (step 700) in 5 evaluations".
        """
        count = f"{self.since} evaluation{'s' if self.since > 1 else ''}"
        if self.best is None:
            return f"stopped early after step {self.step}: {self.criterion.metric} was no finite number in {count}"
        return (
            f"stopped early after step {self.step}: {self.criterion.metric} was not better than "
            f"{self.best.value:.6g} (step {self.best.step}) in {count}"
        )

    def _beats(self, value: float, best: Score) -> bool:
        return self.criterion.prefers(value, best.value)
