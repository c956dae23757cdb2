"""Calls of a run whose length a plan says: training steps, rounds of evaluation, and verdicts on them.

    steps 0-99 ──> round 0 ──> verdict 0 ──> steps 100-199 ──> round 1 ──> ...

No worker waits for another between two calls, with two exceptions. In a run that chooses its schedule, each step is a
call that waits for the broker's order (`orders.py`). In a run that may end early, or whose learning rates follow
evaluations, the worker of the last stage gives a verdict after each round: a retained message to each other worker, so
that a replacement learns it again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from stageline.broker.control.records import ScheduleOrder
from stageline.broker.ledger.times import WaitCause
from stageline.pipeline.evaluation import Criterion, Rounds, Standing
from stageline.pipeline.program import Instruction, Per, Program
from stageline.workers.runs.metrics import evaluation_line

from .call_source import CallSource, LoopParts
from .calls import Position
from .idle import CallWait
from .machine import OutOfPlace
from .orders import LONGEST, FixedSchedule, OrderMissing

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

    @property
    def has_verdicts(self) -> bool:
        """True if the steps after a round of evaluation wait for what follows from it."""
        return self.criterion.is_told and self.rounds.every is not None

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


Verdict = tuple[bool, float | None]  # whether the run ends, and the value that schedulers step by
Begin = Callable[[float], Iterator[Instruction] | None]  # returns None if the call has not come after so many seconds


class PlanCallSource(CallSource):
    """The calls to one worker, made from the steps and rounds of a plan."""

    def __init__(self, calls: PlanCalls, parts: LoopParts) -> None:
        """Begin at step `parts.start`.

        Args:
            calls: Calls of the run.
            parts: Parts of the worker's loop.
        """
        self._calls, self._parts = calls, parts
        self._standing = Standing(calls.criterion)
        self._judged = 0  # rounds of evaluation that the standing is of
        inbound, outbound = calls.program.inbound(parts.worker), calls.program.outbound(parts.worker)
        self._verdicts = [queue.name for queue in inbound if queue.per is Per.ROUND]  # one, or none
        self._told = [queue.name for queue in outbound if queue.per is Per.ROUND]
        self._telling: CallWait | None = None  # the verdict that was put last
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
        if self._telling is not None:
            self._parts.progress.lacks_room_for(self._telling, now)

    def learn(self, orders: Sequence[ScheduleOrder], closed: int | None) -> None:
        """Note the broker's orders; steps from `closed` on wait for another one."""
        self._calls.orders.learn(orders, closed)

    def _from(self, start: int) -> Iterator[tuple[int, Begin]]:
        """Yield each call with the number of training steps before it."""
        calls, rounds = self._calls, self._calls.rounds
        for end in rounds.ends(start):
            for steps in calls.orders.parts(range(start, end)):
                yield steps.start, partial(self._train, steps)
            if rounds.due(end):
                yield end, partial(self._evaluate, end)
            if calls.has_verdicts and end < rounds.steps:
                yield end, partial(self._judge, end)
            start = end

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

    def _evaluate(self, step: int, timeout: float) -> Iterator[Instruction]:
        """Yield this worker's instructions for the round after `step` steps.

        A request for more shows that it has computed all of them: then the round's results are noted.
        """
        parts, calls = self._parts, self._calls
        yield from calls.program.evaluation(parts.worker, calls.rounds.batches_of(step))
        if calls.program.last in calls.program.schedule.placement[parts.worker]:
            found = parts.executor.evaluated(step)
            parts.progress.found(found)
            parts.measured(evaluation_line(found.step, found.values, parts.now(), None))

    def _judge(self, step: int, timeout: float) -> Iterator[Instruction] | None:
        """End the run after step `step` if the verdict on the round says so, or give schedulers the round's value.

        The worker of the last stage decides by the figures of all rounds, and tells the others. Nothing else decides:
        each time, the step is the same. Schedulers step with the next update: a snapshot of this step is of before.
        """
        parts, number = self._parts, self._calls.rounds.before(step)
        verdict = self._take_verdict(number, timeout) if self._verdicts else self._decided()
        if verdict is None:
            return None
        ends, value = verdict
        for name in self._told:
            said, called = f"room in {name} for the verdict on round {number}", f"verdict {number}"
            self._telling = CallWait(said, name, number, called, cause=WaitCause.EVALUATION)
            parts.put_reply(name, number, ends if value is None else verdict)
        parts.progress.judged(number, parts.now())
        if ends:
            parts.keep(step)
            self._left = iter(())
        if value is not None:
            parts.executor.told(step, value)
        parts.pump(0)
        return iter(())

    def _take_verdict(self, number: int, timeout: float) -> Verdict | None:
        (name,) = self._verdicts
        said, called = f"the verdict on round {number} of evaluation", f"verdict {number}"
        wait = CallWait(said, name, number, called, cause=WaitCause.EVALUATION)
        self._parts.progress.waiting_for_call(wait, self._parts.now())
        message = self._parts.inbound(name).take(timeout)
        if message is None:
            return None
        if message.number != number:
            raise OutOfPlace(f"the verdict on round {message.number} arrived on {name}, and round {number} is over")
        match message.payload:
            case (bool(ends), float(value)):
                return ends, value
            case ends:
                return bool(ends), None

    def _decided(self) -> Verdict:
        for record in self._parts.progress.evaluations[self._judged :]:
            self._standing = self._standing.after(record.step, record.values)
        self._judged = len(self._parts.progress.evaluations)
        criterion, newest = self._calls.criterion, self._parts.progress.evaluations[-1]
        return self._standing.stops, criterion.value(newest.values) if criterion.rates else None
