"""What every worker does in a run: the schedule's actions, step after step, each with the queues that it touches.

schedule of worker 1    1F0 1F1 1B0 1B1 1U
its program             step 0: 1F0 takes forward-1 and gives forward-2, ..., 1U; step 1: 1F0, ...

In a scripted run there is no program beforehand: each call of the script brings the instructions of one step, or of one
evaluated batch. Evaluation then has queues of its own (evaluation-1, ...), which number its batches. So it has where
what leaves the frozen first stages is replayed: in their other queues the numbers of those steps would be missing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, islice

import msgspec

from stageline.broker.codec.message import Flow, message_number
from stageline.broker.queues.base import QueueKey
from stageline.pipeline.schedule import ONCE_PER_STEP, Action, Kind, Schedule, forward_only
from stageline.pipeline.schedule.ties import tied_queues

from .calls import Call, CallKind
from .replays import CacheUse, Replays

CHUNK = 64  # instructions that are made at once
ENDLESS = 2**62  # steps: a script says when it is over
AHEAD = 2  # calls that a script may be ahead of the replies that it has; a worker relies on it

_Touched = tuple[str, tuple[QueueKey, ...], QueueKey | None]  # an action's name, what it takes from, what it gives to
_Touch = Callable[[Action], _Touched]


class Instruction(msgspec.Struct, frozen=True):
    """An action of one step with the queues it takes from and gives to. `evaluates`: no stash, no gradient.
    `needs_credit`: no gradient comes back for what it gives, so the consumer says when it may be computed.

    `name` is the action's, as in "1F0"; its messages have `number` in their queues. `counted`: its step is one of the
    run's, which the ledger knows; the evaluated batches of a script are not, and `step` then numbers those. `cache`:
    what is done with the cache of what leaves the frozen first stages.
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
    cache: CacheUse | None = None

    @property
    def inputs(self) -> tuple[QueueKey, ...]:
        """The queues that bring what it computes from, or once did: what is replayed is what one of them brought."""
        if self.cache is CacheUse.REPLAYED:
            return (QueueKey(Flow.FORWARD, self.action.stage),)
        return self.takes

    def __str__(self) -> str:
        return f"{self.name} of {'step' if self.counted else 'evaluated batch'} {self.step}"


@dataclass(frozen=True)
class Program:
    """`schedule` over `steps` steps, then forward only over the steps of `evaluation`.

    `scripted` says that the calls of a script bring the batches, for as long as it likes. What leaves the frozen first
    stages is kept, and from step `replayed_from` on replayed; None: it is computed in every step.
    """

    schedule: Schedule
    steps: int
    evaluation: range = range(0)
    scripted: bool = False
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
        between_stages = tuple(map(queue_key, self.schedule.routes))
        evaluation = [QueueKey(Flow.EVALUATION, stage) for stage in range(1, self.schedule.stages)]
        if not self.scripted:
            return between_stages if self.replays is None else (*between_stages, *evaluation, *self.replays.queues)
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

    def instructions(self, worker: int, start: int = 0) -> Iterator[Instruction]:
        """Everything that `worker` does from step `start` on, known beforehand: nothing in a scripted run. They are
        made some at a time, ahead of their use."""
        if self.scripted:
            return iter(())
        ordered = self.schedule if self.replays is None else self.replays
        training = ordered.program(worker, range(start, self.steps))
        return chain(
            self._instructions(training, evaluates=False),
            self._instructions(self._forward_only.program(worker, self.evaluation), evaluates=True),
        )

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
        return tuple(map(queue_key, self.schedule.takes(action)))

    def gives(self, action: Action) -> QueueKey | None:
        """The queue that the result of `action` is put into."""
        name = self.schedule.gives(action)
        return None if name is None else queue_key(name)

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
            case Flow.CALL:
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
        """The stage that puts into `key`, a queue between stages."""
        match key.flow:
            case Flow.EVALUATION:
                return key.stage - 1
            case Flow.REPLAYED:
                return key.stage + 1
            case _:
                return self.schedule.routes[str(key)][0]

    @cached_property
    def tied_sources(self) -> dict[QueueKey, int]:
        """The stages that put into the queues between stages that share parameters."""
        queues = tied_queues(self.schedule.ties, self.schedule.tied)
        return {queue_key(name): source for name, (source, _) in queues.items()}

    def steps_of(self, key: QueueKey) -> int:
        """The step from which on `key` carries nothing: evaluation has no gradients."""
        if self.scripted:
            return ENDLESS
        if self.replays is not None and key.flow is Flow.FORWARD:
            return self.steps if key.stage > self.schedule.first_trainable else self.replays.first
        return self.steps + (len(self.evaluation) if key.flow in (Flow.FORWARD, Flow.EVALUATION) else 0)

    def first_step(self, key: QueueKey) -> int:
        """The step with which the messages of `key` begin."""
        if self.replays is None:
            return 0
        return {Flow.EVALUATION: self.steps, Flow.REPLAYED: self.replays.first}.get(key.flow, 0)

    @cached_property
    def replays(self) -> Replays | None:
        """What is left to do where what leaves the frozen first stages is there."""
        first = self.replayed_from
        return None if first is None or first >= self.steps else Replays(self.schedule, first)

    @cached_property
    def _runs_ahead(self) -> Callable[[Action], bool]:
        ahead = self.schedule.ahead
        return lambda action: action.outbound in ahead and action.kind is Kind.FORWARD

    @cached_property
    def _losses(self) -> QueueKey:
        return loss_key(self.schedule.owner(self.last))

    @cached_property
    def _forward_only(self) -> Schedule:
        return forward_only(self.schedule.placement, self.schedule.microbatches)

    @cached_property
    def _in_training(self) -> _Touch:
        return cache(lambda action: (str(action), self.takes(action), self.gives(action)))

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
            name, takes, gives = self._in_training(action)
            return name, tuple(map(_evaluating, takes)), None if gives is None else _evaluating(gives)

        return cache(touched)

    def _instructions(self, actions: Iterator[tuple[int, Action]], *, evaluates: bool) -> Iterator[Instruction]:
        replays = None if evaluates else self.replays
        aside = evaluates and (self.scripted or self.replays is not None)
        of_every_step = self._in_evaluation if aside else self._in_training
        later = of_every_step if replays is None else self._in_replay
        until = ENDLESS if replays is None else replays.first
        count, counted = self.schedule.microbatches, not (evaluates and self.scripted)
        # Messages of which a step has one are numbered by the step.
        once = ONCE_PER_STEP if self.schedule.ties or self.schedule.clips or replays else ()

        def chunks() -> Iterator[list[Instruction]]:
            while chunk := [
                Instruction(
                    step,
                    each,
                    step if each.kind in once else message_number(step, each.microbatch, count),
                    *(of_every_step if step < until else later)(each),
                    evaluates,
                    counted,
                    not evaluates and self._runs_ahead(each),
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


def reply_key(worker: int) -> QueueKey:
    """The queue of the replies of `worker` to the script's other calls."""
    return QueueKey(Flow.REPLY, worker)


def _evaluating(key: QueueKey) -> QueueKey:
    return QueueKey(Flow.EVALUATION, key.stage)
