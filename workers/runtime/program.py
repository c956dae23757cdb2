"""What every worker does in a run: the schedule's actions, step after step, each with the queues that it touches.

schedule of worker 1    1F0 1F1 1B0 1B1 1U
its program             step 0: 1F0 takes forward-1 and gives forward-2, ..., 1U; step 1: 1F0, ...

In a scripted run there is no program beforehand: each call of the script brings the instructions of one step, or of one
evaluated batch. Evaluation has queues of its own (evaluation-1, ...), which number its batches over the whole run.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain, islice

import msgspec

from stageline.broker.codec.message import Flow, message_number
from stageline.broker.queues.base import QueueKey, QueuePart
from stageline.pipeline.evaluation import Criterion, Rounds
from stageline.pipeline.schedule import ONCE_PER_STEP, Action, Kind, Schedule, forward_only
from stageline.pipeline.schedule.ties import tied_queues

from .calls import Call, CallKind, Position
from .orders import StepOrders
from .replays import CacheUse, Replays

CHUNK = 64  # instructions that are made at once
ENDLESS = 2**62  # steps: a script says when it is over
NO_ROUNDS = Rounds()
AHEAD = 2  # calls that a script may be ahead of the replies that it has; a worker relies on it

_Touched = tuple[str, tuple[QueueKey, ...], QueueKey | None]  # an action's name, what it takes from, what it gives to
_Touch = Callable[[Action], _Touched]


class Instruction(msgspec.Struct, frozen=True):
    """An action of one step with the queues it takes from and gives to. `evaluates`: no stash, no gradient.
    `needs_credit`: no gradient comes back for what it gives, so the consumer says when it may be computed.

    `also`: further queues that get the same.

    `name` is the action's, as in "1F0"; its messages have `number` in their queues. `counted`: its step is one of the
    run's, which the ledger knows; evaluated batches are not, and `step` then numbers those. `cache`: what is done with
    the cache of what leaves the frozen first stages.
    """

    step: int
    action: Action
    number: int
    name: str
    takes: tuple[QueueKey, ...]
    gives: QueueKey | None
    evaluates: bool = False
    counted: bool = True
    needs_credit: bool = False
    also: tuple[QueueKey, ...] = ()
    cache: CacheUse | None = None

    @property
    def inputs(self) -> tuple[QueueKey, ...]:
        """The queues that bring what it computes from, or once did: what is replayed is what one of them brought."""
        if self.cache is CacheUse.REPLAYED:
            return (QueueKey(Flow.FORWARD, self.action.stage),)
        return self.takes

    def __str__(self) -> str:
        if self.action.kind is Kind.VERDICT:
            return f"{self.name} of round {self.step} of evaluation"
        return f"{self.name} of {'step' if self.counted else 'evaluated batch'} {self.step}"


@dataclass(frozen=True)
class Program:
    """`schedule` over `steps` steps, with `rounds` of evaluation between them, forward only. By the `criterion`, the
    last stage's worker decides after each whether the run goes on, and tells the others; None: it always does.

    `scripted` says that the calls of a script bring the batches, for as long as it likes. What leaves the frozen first
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
    def queues(self) -> tuple[QueueKey, ...]:
        """Every queue between stages, and between script and workers."""
        between_stages = tuple(map(self._key, self.schedule.routes))
        evaluates = self.scripted or self.rounds.batches
        evaluation = [QueueKey(Flow.EVALUATION, stage) for stage in range(1, self.schedule.stages) if evaluates]
        if not self.scripted:
            replayed = () if self.replays is None else self.replays.queues
            return (*between_stages, *evaluation, *replayed, *map(verdict_key, self._told))
        calls = [key(worker) for worker in range(self.script) for key in (call_key, reply_key)]
        return (*between_stages, *evaluation, *calls, self._losses)

    def answers(self, kind: CallKind) -> tuple[QueueKey, ...]:
        """The queues that bring the script what came of a call of `kind`: of a training step its loss alone, for which
        the backwards and updates of other workers need not be waited for; else replies of all workers, first the one
        that says something."""
        if kind is CallKind.TRAIN:
            return (self._losses,)
        last = self._losses.stage
        return tuple(reply_key(worker) for worker in sorted(range(self.script), key=lambda worker: worker != last))

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

    def takes(self, action: Action) -> tuple[QueueKey, ...]:
        """The queues whose next messages `action` needs."""
        return tuple(map(self._key, self.schedule.takes(action)))

    def gives(self, action: Action) -> QueueKey | None:
        """The queue that the result of `action` is put into."""
        name = self.schedule.gives(action)
        return None if name is None else self._key(name)

    def _key(self, name: str) -> QueueKey:
        """The queue that the schedule calls `name`."""
        if not self.schedule.shares:
            return queue_key(name)
        flow, _, label = name.partition("-")
        carried, (_, consumer) = self.schedule.carried(name), self.schedule.routes[name]
        places = None if carried is None else {microbatch: place for place, microbatch in enumerate(carried)}
        return QueueKey(Flow(flow), consumer, QueuePart(label, places))

    def number_in(self, key: QueueKey, instruction: Instruction) -> int:
        """The number, in `key`, of the message that `instruction` takes from there, or puts there."""
        if key.part is None or key.part.places is None:
            return instruction.number
        count, place = key.per_step(self.schedule.microbatches), key.place(instruction.action.microbatch)
        return message_number(instruction.step, place, count)

    @cached_property
    def _also(self) -> Callable[[Action], tuple[QueueKey, ...]]:
        if not self.schedule.shares:
            return lambda action: ()
        return cache(lambda action: tuple(map(self._key, self.schedule.also_gives(action))))

    def inbound(self, worker: int) -> list[QueueKey]:
        """The queues that `worker` takes from."""
        return [key for key in self.queues if self.consumer(key) == worker]

    def outbound(self, worker: int) -> list[QueueKey]:
        """The queues that `worker` puts into."""
        return [key for key in self.queues if self.producer(key) == worker]

    def local(self, worker: int) -> set[QueueKey]:
        """The queues that begin and end at `worker`."""
        return {*self.inbound(worker)} & {*self.outbound(worker)}

    def producers(self, worker: int) -> dict[QueueKey, int]:
        """The queues that `worker` takes from others, each with the worker that puts into it."""
        return {key: self.producer(key) for key in self.inbound(worker) if self.producer(key) != worker}

    def consumer(self, key: QueueKey) -> int:
        """The worker that takes from `key`; `script` for a loss or a reply."""
        match key.flow:
            case Flow.CALL | Flow.VERDICT:
                return key.stage
            case Flow.LOSS | Flow.REPLY:
                return self.script
            case _:
                return self.schedule.owner(key.stage)

    def producer(self, key: QueueKey) -> int:
        """The worker that puts into `key`; `script` for a call."""
        match key.flow:
            case Flow.CALL:
                return self.script
            case Flow.LOSS | Flow.REPLY:
                return key.stage
            case _:
                return self.schedule.owner(self.source(key))

    def source(self, key: QueueKey) -> int:
        """The stage that puts into `key`, a queue between stages, or of what the last one decides."""
        match key.flow:
            case Flow.EVALUATION:
                return key.stage - 1
            case Flow.REPLAYED:
                return key.stage + 1
            case Flow.VERDICT:
                return self.last
            case _:
                return self.schedule.routes[str(key)][0]

    @cached_property
    def tied_sources(self) -> dict[QueueKey, int]:
        """The stages that put into the queues between stages that share parameters."""
        queues = tied_queues(self.schedule.ties, self.schedule.tied)
        return {queue_key(name): source for name, (source, _) in queues.items()}

    def first_step(self, key: QueueKey) -> int:
        """The step with which the messages of `key` begin."""
        return 0 if self.replays is None or key.flow is not Flow.REPLAYED else self.replays.first

    def within(self, key: QueueKey, floor: int) -> int:
        """`floor`, before which messages of `key` are forgotten, or the first or last step of those if it lies beyond
        them: a consumer that takes no more stays where it is, and would be told of messages that were never there."""
        if self.replays is not None and key.flow is Flow.FORWARD and key.stage <= self.schedule.first_trainable:
            return min(floor, self.replays.first)
        return max(floor, self.first_step(key))

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
    def _losses(self) -> QueueKey:
        return loss_key(self.schedule.owner(self.last))

    @cached_property
    def _forward_only(self) -> Schedule:
        return forward_only(self.schedule.placement, self.schedule.microbatches, self.schedule.shares)

    @cached_property
    def _in_training(self) -> _Touch:
        return cache(lambda action: (self.schedule.name_of(action), self.takes(action), self.gives(action)))

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
                takes, gives = (_evaluation(action.stage),) * before, _evaluation(action.stage + 1) if after else None
                return self.schedule.name_of(action), takes, gives
            name, takes, gives = self._in_training(action)
            return name, tuple(map(_evaluating, takes)), None if gives is None else _evaluating(gives)

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
                    self._also(each) if counted else (),
                    None if replays is None else replays.use(step, each),
                )
                for step, each in islice(actions, CHUNK)
            ]:
                yield chunk

        return chain.from_iterable(chunks())


def queue_key(name: str) -> QueueKey:
    """The queue that a schedule calls `name`, as in "forward-1"."""
    flow, _, stage = name.partition("-")
    return QueueKey(Flow(flow), int(stage))


def call_key(worker: int) -> QueueKey:
    """The queue of the script's calls to `worker`."""
    return QueueKey(Flow.CALL, worker)


def loss_key(worker: int) -> QueueKey:
    """The queue of the training steps' losses, from `worker`, which has the last stage, to the script."""
    return QueueKey(Flow.LOSS, worker)


def verdict_key(worker: int) -> QueueKey:
    """The queue of the verdicts on rounds of evaluation, to `worker`."""
    return QueueKey(Flow.VERDICT, worker)


def reply_key(worker: int) -> QueueKey:
    """The queue of the replies of `worker` to the script's other calls."""
    return QueueKey(Flow.REPLY, worker)


def _evaluating(key: QueueKey) -> QueueKey:
    return _evaluation(key.stage)


def _evaluation(stage: int) -> QueueKey:
    return QueueKey(Flow.EVALUATION, stage)
