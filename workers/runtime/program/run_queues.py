"""The queues of a run: which there are, which workers they join, which of them an action touches, what is in them.

between stages   forward-1, backward-0, ...       the schedule names them, also those of ties, replicas and clipping
evaluation       evaluation-1, ..., verdict-0     they number their batches, or rounds, over the whole run
replays          replayed-0                       from the step on from which frozen first stages are not computed
a script's       call-0, reply-0, loss-1          between the script and each worker
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

from stageline.broker.codec.message import Flow, message_number
from stageline.broker.queues.base import QueueKey, QueuePart
from stageline.pipeline.schedule import Action, Schedule
from stageline.pipeline.schedule.ties import tied_queues

from .calls import CallKind
from .instruction import Instruction
from .queue_keys import call_key, evaluation_key, loss_key, queue_key, reply_key, verdict_key
from .replays import Replays


@dataclass(frozen=True)
class RunQueues:
    """Those of a run by `schedule`. `evaluates`: it has rounds of evaluation, after which the workers in `told` get the
    verdict, whether it goes on. `scripted` and `replays` as a `Program` has them."""

    schedule: Schedule
    scripted: bool
    evaluates: bool
    told: tuple[int, ...]
    replays: Replays | None

    @cached_property
    def all(self) -> tuple[QueueKey, ...]:
        """Every queue between stages, and between script and workers."""
        between_stages = tuple(map(self._key, self.schedule.routes))
        evaluates = self.scripted or self.evaluates
        evaluation = [evaluation_key(stage) for stage in range(1, self.schedule.stages) if evaluates]
        if not self.scripted:
            replayed = () if self.replays is None else self.replays.queues
            return (*between_stages, *evaluation, *replayed, *map(verdict_key, self.told))
        calls = [key(worker) for worker in range(self._script) for key in (call_key, reply_key)]
        return (*between_stages, *evaluation, *calls, self._losses)

    def inbound(self, worker: int) -> list[QueueKey]:
        """The queues that `worker` takes from."""
        return [key for key in self.all if self.consumer(key) == worker]

    def outbound(self, worker: int) -> list[QueueKey]:
        """The queues that `worker` puts into."""
        return [key for key in self.all if self.producer(key) == worker]

    def local(self, worker: int) -> set[QueueKey]:
        """The queues that begin and end at `worker`."""
        return {*self.inbound(worker)} & {*self.outbound(worker)}

    def producers(self, worker: int) -> dict[QueueKey, int]:
        """The queues that `worker` takes from others, each with the worker that puts into it."""
        return {key: self.producer(key) for key in self.inbound(worker) if self.producer(key) != worker}

    def consumer(self, key: QueueKey) -> int:
        """The worker that takes from `key`; the script's place for a loss or a reply."""
        match key.flow:
            case Flow.CALL | Flow.VERDICT:
                return key.stage
            case Flow.LOSS | Flow.REPLY:
                return self._script
            case _:
                return self.schedule.owner(key.stage)

    def producer(self, key: QueueKey) -> int:
        """The worker that puts into `key`; the script's place for a call."""
        match key.flow:
            case Flow.CALL:
                return self._script
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
                return self.schedule.stages - 1
            case _:
                return self.schedule.routes[str(key)][0]

    @cached_property
    def tied_sources(self) -> dict[QueueKey, int]:
        """The stages that put into the queues between stages that share parameters."""
        queues = tied_queues(self.schedule.ties, self.schedule.tied)
        return {queue_key(name): source for name, (source, _) in queues.items()}

    def answers(self, kind: CallKind) -> tuple[QueueKey, ...]:
        """The queues that bring the script what came of a call of `kind`: of a training step its loss alone, for which
        the backwards and updates of other workers need not be waited for; else replies of all workers, first the one
        that says something."""
        if kind is CallKind.TRAIN:
            return (self._losses,)
        last = self._losses.stage
        return tuple(reply_key(worker) for worker in sorted(range(self._script), key=lambda worker: worker != last))

    def takes(self, action: Action) -> tuple[QueueKey, ...]:
        """The queues whose next messages `action` needs."""
        return tuple(map(self._key, self.schedule.takes(action)))

    def gives(self, action: Action) -> QueueKey | None:
        """The queue that the result of `action` is put into."""
        name = self.schedule.gives(action)
        return None if name is None else self._key(name)

    @cached_property
    def also_gives(self) -> Callable[[Action], tuple[QueueKey, ...]]:
        """Further queues that get the same."""
        if not self.schedule.shares:
            return lambda action: ()
        return cache(lambda action: tuple(map(self._key, self.schedule.also_gives(action))))

    def number_in(self, key: QueueKey, instruction: Instruction) -> int:
        """The number, in `key`, of the message that `instruction` takes from there, or puts there."""
        if key.part is None or key.part.places is None:
            return instruction.number
        count, place = key.per_step(self.schedule.microbatches), key.place(instruction.action.microbatch)
        return message_number(instruction.step, place, count)

    def first_step(self, key: QueueKey) -> int:
        """The step with which the messages of `key` begin."""
        return 0 if self.replays is None or key.flow is not Flow.REPLAYED else self.replays.first

    def within(self, key: QueueKey, floor: int) -> int:
        """`floor`, before which messages of `key` are forgotten, or the first or last step of those if it lies beyond
        them: a consumer that takes no more stays where it is, and would be told of messages that were never there."""
        if self.replays is not None and key.flow is Flow.FORWARD and key.stage <= self.schedule.first_trainable:
            return min(floor, self.replays.first)
        return max(floor, self.first_step(key))

    def _key(self, name: str) -> QueueKey:
        """The queue that the schedule calls `name`."""
        if not self.schedule.shares:
            return queue_key(name)
        flow, _, label = name.partition("-")
        carried, (_, consumer) = self.schedule.carried(name), self.schedule.routes[name]
        places = None if carried is None else {microbatch: place for place, microbatch in enumerate(carried)}
        return QueueKey(Flow(flow), consumer, QueuePart(label, places))

    @property
    def _script(self) -> int:
        return len(self.schedule.placement)

    @cached_property
    def _losses(self) -> QueueKey:
        return loss_key(self.schedule.owner(self.schedule.stages - 1))
