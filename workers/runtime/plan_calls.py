"""Calls of a run whose length a plan says: training steps, and after them rounds of evaluation and verdicts.

    steps 0-99 ──> round 0 ──> verdict 0 ──> steps 100-199 ──> round 1 ──> ...

No worker waits for another between two calls, with two exceptions. In a run that chooses its schedule, each step is a
call that waits for the broker's order (`orders.py`). Verdicts are waited for: see `rounds.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from stageline.broker.control.records import ScheduleOrder
from stageline.broker.ledger.times import WaitCause
from stageline.pipeline.evaluation import Criterion, Rounds
from stageline.pipeline.program import Instruction, Program

from .call_source import CallSource, LoopParts
from .calls import Position
from .idle import CallWait
from .orders import LONGEST, FixedSchedule, OrderMissing
from .rounds import Begin, RoundCalls

ENDLESS = 2**62  # steps: a script says when it is over
NO_ROUNDS = Rounds()


@dataclass(frozen=True)
class PlanCalls:
    """The calls that a plan's steps and rounds of evaluation make.

    Attributes:
        program: Operations of each worker in a step, and in an evaluated batch.
        rounds: The training steps, and the rounds of evaluation between them.
        criterion: Measure by which the last stage's worker decides after each round if the run goes on.
        orders: Schedules of the steps.
    """

    program: Program
    rounds: Rounds
    criterion: Criterion = field(default_factory=Criterion)
    orders: FixedSchedule = field(default_factory=FixedSchedule)

    def instructions(self, worker: int, start: int = 0) -> Iterator[Instruction]:
        """Yield everything that `worker` computes from step `start` on, if the run does not end early."""
        for end in self.rounds.ends(start):
            yield from self.program.instructions(worker, range(start, end))
            yield from self.program.evaluation(worker, self.rounds.batches_of(end))
            start = end

    def position(self, step: int) -> Position:
        """Return the position after `step` steps, before the round of evaluation that follows them."""
        return Position(step, evaluations=self.rounds.batches_before(step), rounds=self.rounds.before(step))

    def step_at(self, instruction: Instruction) -> int:
        """Return the number of training steps that come before `instruction`."""
        return instruction.step if instruction.counted else self.rounds.step_of(instruction.step)

    def source(self, parts: LoopParts) -> "PlanCallSource":
        """Return the calls to the worker that `parts` belong to."""
        return PlanCallSource(self, parts)


class PlanCallSource(CallSource):
    """The calls to one worker, made from the steps and rounds of a plan."""

    def __init__(self, calls: PlanCalls, parts: LoopParts) -> None:
        """Begin at step `parts.start`.

        Args:
            calls: Calls of the run.
            parts: Parts of the worker's loop.
        """
        self._calls, self._parts = calls, parts
        self._rounds = RoundCalls(calls.program, calls.rounds, calls.criterion, parts, self._end)
        self._left = self._from(parts.start)
        self._next: tuple[int, Begin] | None = next(self._left, None)

    @property
    def over(self) -> bool:
        """True if no call is left."""
        return self._next is None

    @property
    def doing(self) -> str:
        """The state between two calls, in words."""
        waits = self._parts.progress.call
        return f"step {self.step(None)} begins" if waits is None else f"waits for {waits.said}"

    def next(self, timeout: float) -> Iterator[Instruction] | None:
        """Return the instructions of the next call; None if it did not come in `timeout` seconds, or all are over."""
        if self._next is None:
            return None
        instructions = self._next[1](timeout)
        if instructions is not None:
            self._next = next(self._left, None)
        return instructions

    def step(self, instruction: Instruction | None) -> int | None:
        """Return the number of training steps before `instruction`, or before the next call; None if all are over."""
        if instruction is not None:
            return self._calls.step_at(instruction)
        return None if self._next is None else self._next[0]

    def lacks_room(self, now: float) -> None:
        """Note at `now`, in seconds since the epoch, that a verdict finds no room."""
        self._rounds.lacks_room(now)

    def learn(self, orders: Sequence[ScheduleOrder], closed: int | None) -> None:
        """Note the broker's orders; steps from `closed` on wait for another one."""
        self._calls.orders.learn(orders, closed)

    def _from(self, start: int) -> Iterator[tuple[int, Begin]]:
        """Yield each call with the number of training steps before it."""
        calls, rounds = self._calls, self._calls.rounds
        for end in rounds.ends(start):
            for steps in calls.orders.parts(range(start, end)):
                yield steps.start, partial(self._train, steps)
            for begin in self._rounds.after(end):
                yield end, begin
            start = end

    def _end(self) -> None:
        """Make no more calls."""
        self._left = iter(())

    def _train(self, steps: range, timeout: float) -> Iterator[Instruction] | None:
        parts, orders, step = self._parts, self._calls.orders, steps.start
        if not orders.is_open(step):
            now = parts.now()
            said = f"the broker to tell by which schedule step {step} goes"
            parts.progress.waiting_for_call(CallWait(said, cause=WaitCause.SWITCHING), now)
            if now - parts.progress.since > LONGEST:
                raise OrderMissing(
                    f"no schedule for step {step} from the broker within {LONGEST:g} s: run `stageline status`"
                )
            parts.pump(timeout)
            return None
        parts.progress.called_to(None, parts.now())
        return orders.begin(step, self._calls.program).instructions(parts.worker, steps)
