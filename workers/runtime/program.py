"""What every worker does in a run: the schedule's actions, step after step, each with the queues that it touches.

schedule of worker 1    1F0 1F1 1B0 1B1 1U
its program             step 0: 1F0 takes forward-1 and gives forward-2, ..., 1U; step 1: 1F0, ...
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, islice

import msgspec

from stageline.broker.codec.message import Flow, message_number
from stageline.broker.queues.base import QueueKey
from stageline.pipeline.schedule import Action, Kind, Schedule, forward_only

CHUNK = 64  # instructions that are made at once


class Instruction(msgspec.Struct, frozen=True):
    """An action of one step with the queues it takes from and gives to. `evaluates`: no stash, no gradient.

    `name` is the action's, as in "1F0"; its messages have `number` in their queues.
    """

    step: int
    action: Action
    number: int
    name: str
    takes: tuple[QueueKey, ...]
    gives: QueueKey | None
    evaluates: bool = False

    def __str__(self) -> str:
        return f"{self.name} of step {self.step}"


@dataclass(frozen=True)
class Program:
    """`schedule` over `steps` steps, then forward only over the steps of `evaluation`.

    `fed` says that batches and targets come through queues from a user's own loader, not from data sources; what the
    last stage computes then goes back to that loader, as if to a stage after it.
    """

    schedule: Schedule
    steps: int
    evaluation: range = range(0)
    fed: bool = False

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return self.schedule.stages - 1

    @cached_property
    def queues(self) -> tuple[QueueKey, ...]:
        """Every queue between stages; those that a user's loader fills are not among them."""
        return tuple(map(queue_key, self.schedule.hops))

    def instructions(self, worker: int, start: int = 0) -> Iterator[Instruction]:
        """Everything that `worker` does from step `start` on. They are made some at a time, ahead of their use."""
        evaluating = forward_only(self.schedule.placement, self.schedule.microbatches)
        training = self.schedule.program(worker, range(start, self.steps))
        return chain(
            self._instructions(training, evaluates=False),
            self._instructions(evaluating.program(worker, self.evaluation), evaluates=True),
        )

    def instruction(self, step: int, action: Action, *, evaluates: bool = False) -> Instruction:
        """One of them."""
        return next(self._instructions(iter([(step, action)]), evaluates=evaluates))

    def takes(self, action: Action) -> tuple[QueueKey, ...]:
        """The queues whose next messages `action` needs."""
        keys = self._existing(action.inbound)
        if self.fed and action.kind is Kind.FORWARD and action.stage == self.last:
            return (*keys, QueueKey(Flow.TARGET, action.stage))
        return keys

    def gives(self, action: Action) -> QueueKey | None:
        """The queue that the result of `action` is put into."""
        return next(iter(self._existing(action.outbound)), None)

    def inbound(self, worker: int) -> list[QueueKey]:
        """The queues that `worker` takes from."""
        return [key for key in self.queues if key.stage in self.schedule.placement[worker]]

    def outbound(self, worker: int) -> list[QueueKey]:
        """The queues that `worker` puts into."""
        return [key for key in self.queues if producer(key) in self.schedule.placement[worker]]

    def local(self, worker: int) -> set[QueueKey]:
        """The queues that begin and end at `worker`."""
        return {*self.inbound(worker)} & {*self.outbound(worker)}

    def producers(self, worker: int) -> dict[QueueKey, int]:
        """The queues that `worker` takes from others, each with the worker that puts into it."""
        others = (key for key in self.inbound(worker) if key not in self.local(worker))
        return {key: self.schedule.owner(producer(key)) for key in others}

    def steps_of(self, key: QueueKey) -> int:
        """The step from which on `key` carries nothing: evaluation has no gradients."""
        return self.steps + (len(self.evaluation) if key.flow is Flow.FORWARD else 0)

    def _existing(self, name: str) -> tuple[QueueKey, ...]:
        """The queue of that name, if the run has it."""
        ends = ("forward-0", f"forward-{self.schedule.stages}") if self.fed else ()
        return (queue_key(name),) if name in self.schedule.hops or name in ends else ()

    def _instructions(self, actions: Iterator[tuple[int, Action]], *, evaluates: bool) -> Iterator[Instruction]:
        of_every_step = cache(lambda action: (str(action), self.takes(action), self.gives(action)))
        count = self.schedule.microbatches

        def chunks() -> Iterator[list[Instruction]]:
            while chunk := [
                Instruction(step, each, message_number(step, each.microbatch, count), *of_every_step(each), evaluates)
                for step, each in islice(actions, CHUNK)
            ]:
                yield chunk

        return chain.from_iterable(chunks())


def queue_key(name: str) -> QueueKey:
    """The queue that a schedule calls `name`, as in "forward-1"."""
    flow, _, stage = name.partition("-")
    return QueueKey(Flow(flow), int(stage))


def producer(key: QueueKey) -> int:
    """The stage that puts into `key`."""
    return key.stage - 1 if key.flow is Flow.FORWARD else key.stage + 1
