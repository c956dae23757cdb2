"""Rounds of evaluation between the training steps of a plan's run, and the verdicts on them.

In a run that may end early, or whose learning rates follow evaluations, the worker of the last stage gives a verdict
after each round: a retained message to each other worker, so that a replacement learns it again.
"""

from collections.abc import Callable, Iterator
from functools import partial

from stageline.broker.ledger.times import WaitCause
from stageline.pipeline.evaluation import Criterion, Rounds, Standing
from stageline.pipeline.plan import Plan
from stageline.pipeline.program import Instruction, Per, Program
from stageline.workers.runs.metrics import evaluation_line

from .call_source import LoopParts
from .idle import CallWait
from .machine import OutOfPlace

Verdict = tuple[bool, float | None]  # whether the run ends, and the value that schedulers step by
Begin = Callable[[float], Iterator[Instruction] | None]  # returns None if the call has not come after so many seconds


def batches_to_evaluate(plan: Plan, held_out: int) -> int:
    """Return the batches of a round, of the number that the data holds out; 0 without evaluation.

    Raises `PlanRefused` if the plan evaluates, and there are none.
    """
    if plan.evaluation is not None and not held_out:
        raise plan.refused(
            "evaluation" if plan.evaluation.every is None else "evaluation.every",
            f"there are no rows to evaluate: what {plan.data.origin} names holds none back. Have its held_out() "
            "return some, or leave the table [evaluation] out",
        )
    return held_out if plan.evaluates else 0


class RoundCalls:
    """The calls to one worker that evaluate, and that learn what follows from it."""

    def __init__(
        self, program: Program, rounds: Rounds, criterion: Criterion, parts: LoopParts, end: Callable[[], None]
    ) -> None:
        """Begin with the rounds after step `parts.start`.

        Args:
            program: Operations of each worker in an evaluated batch.
            rounds: The training steps, and the rounds between them.
            criterion: Measure by which the last stage's worker decides after each round if the run goes on.
            parts: Parts of the worker's loop.
            end: Ends the run: no calls come after this one.
        """
        self._program, self._rounds, self._criterion, self._parts, self._end = program, rounds, criterion, parts, end
        self._standing = Standing(criterion)
        self._judged = 0  # rounds of evaluation that the standing is of
        self._verdicts = [each.name for each in program.inbound(parts.worker) if each.per is Per.ROUND]  # one, or none
        self._told = [each.name for each in program.outbound(parts.worker) if each.per is Per.ROUND]
        self._telling: CallWait | None = None  # the verdict that was put last

    def after(self, step: int) -> Iterator[Begin]:
        """Yield the calls that follow `step` training steps: a round if one is due, and the verdict on it."""
        if self._rounds.due(step):
            yield partial(self._evaluate, step)
        has_verdicts = self._criterion.is_told and self._rounds.every is not None
        if has_verdicts and step < self._rounds.steps:
            yield partial(self._judge, step)

    def lacks_room(self, now: float) -> None:
        """Note at `now`, in seconds since the epoch, that a verdict finds no room."""
        if self._telling is not None:
            self._parts.progress.lacks_room_for(self._telling, now)

    def _evaluate(self, step: int, timeout: float) -> Iterator[Instruction]:
        """Yield this worker's instructions for the round after `step` steps.

        A request for more shows that it has computed all of them: then the round's results are noted.
        """
        parts = self._parts
        yield from self._program.evaluation(parts.worker, self._rounds.batches_of(step))
        if self._program.last in self._program.schedule.placement[parts.worker]:
            found = parts.executor.evaluated(step)
            parts.progress.found(found)
            parts.measured(evaluation_line(found.step, found.values, parts.now(), None))

    def _judge(self, step: int, timeout: float) -> Iterator[Instruction] | None:
        """End the run after step `step` if the verdict on the round says so, or give schedulers the round's value.

        The worker of the last stage decides by the figures of all rounds, and tells the others. Nothing else decides:
        each time, the step is the same. Schedulers step with the next update: a snapshot of this step is of before.
        """
        parts, number = self._parts, self._rounds.before(step)
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
            self._end()
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
        criterion, newest = self._criterion, self._parts.progress.evaluations[-1]
        return self._standing.stops, criterion.value(newest.values) if criterion.rates else None
