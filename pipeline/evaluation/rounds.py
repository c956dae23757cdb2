"""When a run evaluates: in rounds, after so many training steps and after the last one.

    every = 100, 250 steps, 3 batches are held out

    training             steps 0-99       steps 100-199       steps 200-249
    round                           0                    1                   2
    after step                    100                  200                 250
    evaluated batches           0 1 2                3 4 5               6 7 8

Evaluated batches are numbered over the whole run. A worker that begins at a checkpoint runs the round after the
checkpoint's step again: "before" a step are the rounds that lie before the state after so many steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass


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
