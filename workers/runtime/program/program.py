"""What every worker does in a run: the schedule's actions, step after step, each with the queues that it touches.

schedule of worker 1    1F0 1F1 1B0 1B1 1U
its program             step 0: 1F0 takes forward-1 and gives forward-2, ..., 1U; step 1: 1F0, ...

In a scripted run there is no program beforehand: each call of the script brings the instructions of one step, or of one
evaluated batch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain, islice

from stageline.broker.codec.message import message_number
from stageline.broker.queues.base import QueueKey
from stageline.pipeline.evaluation import Criterion, Rounds
from stageline.pipeline.schedule import ONCE_PER_STEP, Action, Kind, Schedule, forward_only
from stageline.workers.runtime.calls import Call, CallKind, Position
from stageline.workers.runtime.orders import StepOrders

from .instruction import Instruction
from .queue_keys import evaluation_key, verdict_key
from .replays import Replays
from .run_queues import RunQueues

CHUNK = 64  # instructions that are made at once
ENDLESS = 2**62  # steps: a script says when it is over
NO_ROUNDS = Rounds()
AHEAD = 2  # calls that a script may be ahead of the replies that it has; a worker relies on it

_Touched = tuple[str, tuple[QueueKey, ...], QueueKey | None]  # an action's name, what it takes from, what it gives to
_Touch = Callable[[Action], _Touched]


@dataclass(frozen=True)
class Program:
    """`schedule` over `steps` steps, with `rounds` of evaluation between them, forward only. By the `criterion`, the
    last stage's worker decides after each whether the run goes on, and tells the others; None: it always does.

    `scripted` says that the calls of a script bring the batches, until it ends the run. What leaves the frozen first
    stages is kept, and from step `replayed_from` on replayed; None: it is computed in every step.
    """

    schedule: Schedule
    steps: int
    rounds: Rounds = NO_ROUNDS
    scripted: bool = False
    criterion: Criterion | None = None
    replayed_from: int | None = None

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return self.schedule.stages - 1

    @property
    def script(self) -> int:
        """The script's place among the workers: after the last of them."""
        return len(self.schedule.placement)

    @cached_property
    def batch_owners(self) -> frozenset[int]:
        """The workers that a call's batch goes to: of the first stage and of the last."""
        return frozenset({self.schedule.owner(0), self.schedule.owner(self.last)})

    @cached_property
    def queues(self) -> RunQueues:
        """All queues of the run."""
        return RunQueues(self.schedule, self.scripted, bool(self.rounds.batches), self._told, self.replays)

    def instructions(self, worker: int, start: int = 0, orders: StepOrders | None = None) -> Iterator[Instruction]:
        """Everything that `worker` does from step `start` on, known beforehand: nothing in a scripted run. They are
        made some at a time, ahead of their use. With `orders`, each step begins with an instruction that waits for its
        order, and what follows is made after that."""
        if self.scripted:
            return iter(())
        return chain.from_iterable(self._parts(worker, start, orders))

    def instructions_of(self, call: Call, worker: int) -> Iterator[Instruction]:
        """What `worker` computes for a call of the script."""
        if call.kind is CallKind.TRAIN:
            training = self.schedule.program(worker, range(call.step, call.step + 1))
            return self._instructions(training, evaluates=False)
        if call.kind.runs_forward_only:
            batch = range(call.evaluation, call.evaluation + 1)
            return self._instructions(self._forward_only.program(worker, batch), evaluates=True)
        return iter(())

    def instruction(self, step: int, action: Action, *, evaluates: bool = False) -> Instruction:
        """One of them."""
        return next(self._instructions(iter([(step, action)]), evaluates=evaluates))

    @cached_property
    def replays(self) -> Replays | None:
        """What is left to do where what leaves the frozen first stages is there."""
        first = self.replayed_from
        return None if first is None or first >= self.steps else Replays(self.schedule, first)

    def position(self, step: int) -> Position:
        """Where a run that no script calls is after `step` steps, before the round of evaluation that follows them."""
        return Position(step, evaluations=self.rounds.batches_before(step), rounds=self.rounds.before(step))

    def step_at(self, instruction: Instruction) -> int:
        """How many training steps come before `instruction`, in a run that no script calls."""
        if instruction.action.kind is Kind.VERDICT:
            return self.rounds.step_of_round(instruction.step)
        return instruction.step if instruction.counted else self.rounds.step_of(instruction.step)

    @cached_property
    def _runs_ahead(self) -> Callable[[Action], bool]:
        ahead = self.schedule.ahead
        if self.schedule.shares:
            return lambda action: action.kind is Kind.FORWARD and self.schedule.gives(action) in ahead
        return lambda action: action.outbound in ahead and action.kind is Kind.FORWARD

    @property
    def _may_end(self) -> bool:
        """Whether the run may end early."""
        return self.criterion is not None and self.criterion.patience is not None and self.rounds.every is not None

    @cached_property
    def _told(self) -> tuple[int, ...]:
        """The workers that are told whether a run that may end early goes on."""
        others = (worker for worker in range(self.script) if worker != self.schedule.owner(self.last))
        return tuple(others) if self._may_end else ()

    def _verdict(self, worker: int, number: int) -> Iterator[Instruction]:
        """After round `number`, and before any further step: the last stage's worker tells each other one, then goes by
        its verdict, as they do."""
        stages = self.schedule.placement[worker]
        action = Action(Kind.VERDICT, self.last if self.last in stages else min(stages))

        def instruction(takes: tuple[QueueKey, ...], gives: QueueKey | None) -> Instruction:
            return Instruction(number, action, number, str(action), takes, gives, counted=False)

        if self.last not in stages:
            yield instruction((verdict_key(worker),), None)
            return
        for other in self._told:
            yield instruction((), verdict_key(other))
        yield instruction((), None)

    @cached_property
    def _forward_only(self) -> Schedule:
        return forward_only(self.schedule.placement, self.schedule.microbatches, self.schedule.shares)

    @cached_property
    def _in_training(self) -> _Touch:
        queues = self.queues
        return cache(lambda action: (self.schedule.name_of(action), queues.takes(action), queues.gives(action)))

    @cached_property
    def _in_replay(self) -> _Touch:
        """In the steps that replay what leaves the frozen first stages."""
        replays = self.replays

        def touched(action: Action) -> _Touched:
            name, takes, gives = self._in_training(action)
            return (
                (name, takes, gives)
                if replays is None
                else (name, replays.takes(action, takes), replays.gives(action, gives))
            )

        return cache(touched)

    @cached_property
    def _in_evaluation(self) -> _Touch:
        """The same as in training, but through queues of its own."""

        def touched(action: Action) -> _Touched:
            if self.schedule.shares:  # the first copies alone
                before, after = action.stage > 0, action.stage < self.last
                gives = evaluation_key(action.stage + 1) if after else None
                return self.schedule.name_of(action), (evaluation_key(action.stage),) * before, gives
            name, takes, gives = self._in_training(action)
            evaluated = None if gives is None else evaluation_key(gives.stage)
            return name, tuple(evaluation_key(key.stage) for key in takes), evaluated

        return cache(touched)

    def _parts(self, worker: int, start: int, orders: StepOrders | None) -> Iterator[Iterator[Instruction]]:
        """Training up to each round of evaluation, and the round. No worker waits for another between them, unless the
        run may end there: then for the verdict."""
        for end in self.rounds.ends(start) if self.rounds.batches else (self.steps,):
            yield from self._training(worker, range(start, end), orders)
            yield self._instructions(self._forward_only.program(worker, self.rounds.batches_of(end)), evaluates=True)
            if self._may_end and end < self.steps:
                yield self._verdict(worker, self.rounds.before(end))
            start = end

    def _training(self, worker: int, steps: range, orders: StepOrders | None) -> Iterator[Iterator[Instruction]]:
        if orders is None:
            ordered = self.replays or self.schedule
            yield self._instructions(ordered.program(worker, steps), evaluates=False)
            return
        action = Action(Kind.ORDER, min(self.schedule.placement[worker]))
        for step in steps:
            yield iter([Instruction(step, action, step, str(action), (), None)])
            schedule = orders.begin(step)  # not before the loop has come here
            by_order = schedule if self.replays is None else replace(self.replays, schedule=schedule)
            yield self._instructions(by_order.program(worker, range(step, step + 1)), evaluates=False)

    def _instructions(self, actions: Iterator[tuple[int, Action]], *, evaluates: bool) -> Iterator[Instruction]:
        replays = None if evaluates else self.replays
        of_every_step = self._in_evaluation if evaluates else self._in_training
        later = of_every_step if replays is None else self._in_replay
        until = ENDLESS if replays is None else replays.first
        count, counted, throttled = self.schedule.microbatches, not evaluates, not self.scripted
        # Messages of which a step has one are numbered by the step.
        once = ONCE_PER_STEP if self.schedule.ties or self.schedule.clips or self.schedule.shares or replays else ()

        def chunks() -> Iterator[list[Instruction]]:
            while chunk := [
                Instruction(
                    step,
                    each,
                    step if each.kind in once else message_number(step, each.microbatch, count),
                    *(of_every_step if step < until else later)(each),
                    evaluates,
                    counted,
                    throttled if evaluates else self._runs_ahead(each),
                    self.queues.also_gives(each) if counted else (),
                    None if replays is None else replays.use(step, each),
                )
                for step, each in islice(actions, CHUNK)
            ]:
                yield chunk

        return chain.from_iterable(chunks())
