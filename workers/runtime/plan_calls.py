"""What a worker does in a run whose length a plan says: training steps, and rounds of evaluation between them.

In a scripted run nothing is known beforehand: each call of the script brings the instructions of one step, or of one
evaluated batch (`call_sequence.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from stageline.pipeline.evaluation import Criterion, Rounds
from stageline.pipeline.program import Instruction, Op, Program
from stageline.pipeline.schedule import Action, Kind

from .calls import Position
from .orders import StepOrders

ENDLESS = 2**62  # steps: a script says when it is over
NO_ROUNDS = Rounds()


@dataclass(frozen=True)
class PlanCalls:
    """A program over the steps of a run.

    Attributes:
        program: What each worker does in a step, and in an evaluated batch.
        steps: Training steps; `ENDLESS` in a scripted run.
        rounds: When the run evaluates.
        criterion: What the last stage's worker decides by after each round whether the run goes on.
    """

    program: Program
    steps: int
    rounds: Rounds = NO_ROUNDS
    criterion: Criterion | None = None

    @property
    def scripted(self) -> bool:
        """True if the calls of a script bring the batches, until it ends the run."""
        return self.program.scripted

    def instructions(self, worker: int, start: int = 0, orders: StepOrders | None = None) -> Iterator[Instruction]:
        """Return everything that `worker` does from step `start` on: nothing in a scripted run.

        Instructions of a step are made at once, ahead of their use. With `orders`, each step begins with an instruction
        that waits for its order, and what follows is made after that.
        """
        if self.scripted:
            return iter(())
        return chain.from_iterable(self._parts(worker, start, orders))

    def position(self, step: int) -> Position:
        """Return the position after `step` steps, before the round of evaluation that follows them."""
        return Position(step, evaluations=self.rounds.batches_before(step), rounds=self.rounds.before(step))

    def step_at(self, instruction: Instruction) -> int:
        """Return how many training steps come before `instruction`."""
        if instruction.action.kind == Kind.VERDICT:
            return self.rounds.step_of_round(instruction.step)
        return instruction.step if instruction.counted else self.rounds.step_of(instruction.step)

    def _parts(self, worker: int, start: int, orders: StepOrders | None) -> Iterator[Iterator[Instruction]]:
        """Training up to each round of evaluation, and the round. No worker waits for another between them, unless the
        run may end there: then for the verdict."""
        for end in self.rounds.ends(start) if self.rounds.batches else (self.steps,):
            if orders is None:
                yield self.program.instructions(worker, range(start, end))
            else:
                yield from self._ordered(worker, range(start, end), orders)
            yield self.program.evaluation(worker, self.rounds.batches_of(end))
            if self.program.verdicts and self.rounds.every is not None and end < self.steps:
                number = self.rounds.before(end)
                yield iter([Instruction(number, op) for op in self.program.verdicts[worker]])
            start = end

    def _ordered(self, worker: int, steps: range, orders: StepOrders) -> Iterator[Iterator[Instruction]]:
        action = Action(Kind.ORDER, min(self.program.schedule.placement[worker]))
        for step in steps:
            yield iter([Instruction(step, Op(action, str(action)))])
            yield orders.begin(step).instructions(worker, range(step, step + 1))  # not before the loop has come here
