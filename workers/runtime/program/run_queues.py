"""The queues of a run as data: where each begins and ends, which steps' messages it carries, how far it may run ahead.

between stages   forward-1, backward-0, ...       the schedule names them, also those of ties, replicas and clipping
evaluation       evaluation-1, ..., verdict-0     they number their batches, or rounds, over the whole run
replays          replayed-0                       from the step on from which frozen first stages are not computed
a script's       call-0, reply-0, loss-1          between the script and each worker
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property

from stageline.broker.codec.message import Flow, message_number
from stageline.broker.queues.base import QueueKey, QueuePart
from stageline.pipeline.schedule import Action, Schedule
from stageline.workers.runtime.calls import CallKind

from .instruction import Instruction
from .queue_keys import call_key, evaluation_key, loss_key, queue_key, reply_key, verdict_key
from .replays import Replays

_FEW = 16  # messages that are small and come one a call, round or step: more than are under way, to spare requests
_TIED = (Flow.TIED, Flow.SUBTOTAL, Flow.TOTAL)


@dataclass(frozen=True, slots=True)
class RunQueue:
    """One queue of a run.

    Attributes:
        key: Name of the queue.
        producer: Place of the process that puts messages: the index of a worker, or the place of the script.
        consumer: Place of the process that takes messages.
        source: Stage whose results the queue carries, a replica where stages have several. None for calls, losses and
            replies.
        window: Messages that the consumer lets the producer send ahead. None if the schedule bounds them.
        begins: First step that has messages in the queue.
        ends: Step from which on no message is put. None if all steps have messages.
    """

    key: QueueKey
    producer: int
    consumer: int
    source: int | None = None
    window: int | None = None
    begins: int = 0
    ends: int | None = None

    def within(self, floor: int) -> int:
        """Return the step nearest to `floor` that bounds messages of this queue.

        A consumer that takes no more messages stays where it is, so that it is not told of messages that never came.
        """
        return max(self.begins, floor if self.ends is None else min(floor, self.ends))


@dataclass(frozen=True)
class RunQueues:
    """The queues of a run by `schedule`.

    Attributes:
        schedule: Schedule of the run.
        scripted: True if a script calls the workers.
        evaluates: True if the run has rounds of evaluation.
        told: Workers that are told after each round whether the run goes on.
        replays: Steps that replay what leaves the frozen first stages. None if there are none.
    """

    schedule: Schedule
    scripted: bool
    evaluates: bool
    told: tuple[int, ...]
    replays: Replays | None

    @cached_property
    def table(self) -> dict[QueueKey, RunQueue]:
        """Every queue between stages, and between script and workers, by its name."""
        parts = [self._between_stages(), self._of_evaluation(), self._of_replays(), self._of_script()]
        return {queue.key: queue for part in parts for queue in part}

    @cached_property
    def all(self) -> tuple[QueueKey, ...]:
        """The names of all queues."""
        return tuple(self.table)

    def inbound(self, worker: int) -> list[QueueKey]:
        """Return the queues that `worker` takes from."""
        return [key for key, queue in self.table.items() if queue.consumer == worker]

    def outbound(self, worker: int) -> list[QueueKey]:
        """Return the queues that `worker` puts into."""
        return [key for key, queue in self.table.items() if queue.producer == worker]

    def local(self, worker: int) -> set[QueueKey]:
        """Return the queues that begin and end at `worker`."""
        return {key for key, queue in self.table.items() if queue.producer == queue.consumer == worker}

    def producers(self, worker: int) -> dict[QueueKey, int]:
        """Return the queues that `worker` takes from other workers, each with the worker that puts into it."""
        taken = (queue for queue in self.table.values() if queue.consumer == worker)
        return {queue.key: queue.producer for queue in taken if queue.producer != worker}

    @cached_property
    def tied_sources(self) -> dict[QueueKey, int]:
        """The stages that put into the queues between stages that share parameters."""
        tied = (queue for queue in self.table.values() if queue.key.flow in _TIED)
        return {queue.key: queue.source for queue in tied if queue.source is not None}

    def answers(self, kind: CallKind) -> tuple[QueueKey, ...]:
        """Return the queues that bring the script the results of a call of `kind`.

        A training step brings its loss alone, so that the script does not wait for the backwards and updates of other
        workers. Any other call brings the replies of all workers, first that of the worker with the last stage.
        """
        if kind is CallKind.TRAIN:
            return (loss_key(self._last),)
        return tuple(reply_key(worker) for worker in sorted(range(self._script), key=lambda each: each != self._last))

    def takes(self, action: Action) -> tuple[QueueKey, ...]:
        """Return the queues whose next messages `action` needs."""
        return tuple(map(self._key, self.schedule.takes(action)))

    def gives(self, action: Action) -> QueueKey | None:
        """Return the queue that the result of `action` is put into."""
        name = self.schedule.gives(action)
        return None if name is None else self._key(name)

    @cached_property
    def also_gives(self) -> Callable[[Action], tuple[QueueKey, ...]]:
        """A function that returns further queues which get the result of an action."""
        if not self.schedule.shares:
            return lambda action: ()
        return cache(lambda action: tuple(map(self._key, self.schedule.also_gives(action))))

    def number_in(self, key: QueueKey, instruction: Instruction) -> int:
        """Return the number, in `key`, of the message that `instruction` takes from there, or puts there."""
        if key.part is None or key.part.places is None:
            return instruction.number
        count, place = key.per_step(self.schedule.microbatches), key.place(instruction.action.microbatch)
        return message_number(instruction.step, place, count)

    def _between_stages(self) -> Iterator[RunQueue]:
        owner = self.schedule.owner
        for name, (source, to) in self.schedule.routes.items():
            key = self._key(name)
            yield RunQueue(key, owner(source), owner(to), source, ends=self._replayed_from(key))

    def _replayed_from(self, key: QueueKey) -> int | None:
        """Return the step from which on replayed rows take the place of the messages in `key`."""
        if self.replays is None or key.flow is not Flow.FORWARD or key.stage > self.schedule.first_trainable:
            return None
        return self.replays.first

    def _of_evaluation(self) -> Iterator[RunQueue]:
        owner = self.schedule.owner
        two_batches = 2 * self.schedule.microbatches + 2  # one may wait while the next one is computed
        for stage in range(1, self.schedule.stages) if self.scripted or self.evaluates else ():
            yield RunQueue(evaluation_key(stage), owner(stage - 1), owner(stage), stage - 1, two_batches)
        for worker in () if self.scripted else self.told:
            yield RunQueue(verdict_key(worker), self._last, worker, self.schedule.stages - 1, _FEW)

    def _of_replays(self) -> Iterator[RunQueue]:
        replays, owner = self.replays, self.schedule.owner
        if replays is not None and not self.scripted:
            for key in replays.queues:
                source = key.stage + 1
                yield RunQueue(key, owner(source), owner(key.stage), source, _FEW, begins=replays.first)

    def _of_script(self) -> Iterator[RunQueue]:
        for worker in range(self._script) if self.scripted else ():
            yield RunQueue(call_key(worker), self._script, worker, window=_FEW)
            yield RunQueue(reply_key(worker), worker, self._script, window=_FEW)
        if self.scripted:
            yield RunQueue(loss_key(self._last), self._last, self._script, window=_FEW)

    def _key(self, name: str) -> QueueKey:
        """Return the queue that the schedule calls `name`."""
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
    def _last(self) -> int:
        """The worker that owns the last stage."""
        return self.schedule.owner(self.schedule.stages - 1)
