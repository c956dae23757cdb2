"""What every worker does in a run: the schedule's actions, step after step, each with the queues that it touches.

schedule of worker 1    1F0 1F1 1B0 1B1 1U
its program             step 0: 1F0 takes forward-1 and gives forward-2, ..., 1U; step 1: 1F0, ...
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice

import msgspec

from stageline.broker.codec.message import Flow
from stageline.broker.queues.base import QueueKey
from stageline.pipeline.schedule import Action, Kind, Schedule, forward_only

CHUNK = 64  # instructions that are made at once


class Instruction(msgspec.Struct, frozen=True):
    """An action of one step with the queues it takes from and gives to. `evaluates`: no stash, no gradient."""

    step: int
    action: Action
    takes: tuple[QueueKey, ...]
    gives: QueueKey | None
    evaluates: bool = False

    def __str__(self) -> str:
        return f"{self.action} of step {self.step}"


@dataclass(frozen=True, slots=True)
class Route:
    """How the stages of a run are joined: what every instruction takes and gives follows from it.

    `fed` says that batches and targets come through queues from a user's own loader, not from data sources; what the
    last stage computes then goes back to that loader, as if to a stage after it.
    """

    stages: int
    first_trainable: int = 0
    fed: bool = False

    def takes(self, action: Action) -> tuple[QueueKey, ...]:
        last = action.stage == self.stages - 1
        match action.kind:
            case Kind.FORWARD:
                inputs = (QueueKey(Flow.FORWARD, action.stage),) if action.stage or self.fed else ()
                targets = (QueueKey(Flow.TARGET, action.stage),) if last and self.fed else ()
                return inputs + targets
            case Kind.BACKWARD:
                return () if last else (QueueKey(Flow.BACKWARD, action.stage),)
            case _:
                return ()

    def gives(self, action: Action) -> QueueKey | None:
        if action.kind is Kind.FORWARD and (self.fed or action.stage < self.stages - 1):
            return QueueKey(Flow.FORWARD, action.stage + 1)
        if action.kind is Kind.BACKWARD and action.stage > self.first_trainable:
            return QueueKey(Flow.BACKWARD, action.stage - 1)
        return None

    def queues(self) -> list[QueueKey]:
        """Every queue between stages; those that a user's loader fills are not among them."""
        forward = [QueueKey(Flow.FORWARD, stage) for stage in range(1, self.stages)]
        backward = [QueueKey(Flow.BACKWARD, stage) for stage in range(self.first_trainable, self.stages - 1)]
        return forward + backward

    @staticmethod
    def producer(key: QueueKey) -> int:
        """The stage that puts into `key`."""
        return key.stage - 1 if key.flow is Flow.FORWARD else key.stage + 1


@dataclass(frozen=True)
class Program:
    """`schedule` over `steps` steps, then forward only over the steps of `evaluation`."""

    schedule: Schedule
    steps: int
    evaluation: range = range(0)
    fed: bool = False

    @property
    def route(self) -> Route:
        return Route(self.schedule.stages, self.schedule.first_trainable, self.fed)

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return self.schedule.stages - 1

    def instructions(self, worker: int, start: int = 0) -> Iterator[Instruction]:
        """Everything that `worker` does from step `start` on. They are made some at a time, ahead of their use."""
        evaluating = forward_only(self.schedule.placement, self.schedule.microbatches)
        training = self.schedule.program(worker, range(start, self.steps))
        return chain(
            self._instructions(training, evaluates=False),
            self._instructions(evaluating.program(worker, self.evaluation), evaluates=True),
        )

    def stages(self, worker: int) -> tuple[int, ...]:
        return self.schedule.placement[worker]

    def inbound(self, worker: int) -> list[QueueKey]:
        """The queues that `worker` takes from."""
        return [key for key in self.route.queues() if key.stage in self.stages(worker)]

    def outbound(self, worker: int) -> list[QueueKey]:
        """The queues that `worker` puts into."""
        return [key for key in self.route.queues() if self.route.producer(key) in self.stages(worker)]

    def local(self, worker: int) -> set[QueueKey]:
        """The queues that begin and end at `worker`."""
        return {*self.inbound(worker)} & {*self.outbound(worker)}

    def producers(self, worker: int) -> dict[QueueKey, int]:
        """The queues that `worker` takes from others, each with the worker that puts into it."""
        owner, route = self.schedule.owner, self.route
        return {key: owner(route.producer(key)) for key in self.inbound(worker) if key not in self.local(worker)}

    def steps_of(self, key: QueueKey) -> int:
        """The step from which on `key` carries nothing: evaluation has no gradients."""
        return self.steps + (len(self.evaluation) if key.flow is Flow.FORWARD else 0)

    def _instructions(self, actions: Iterator[tuple[int, Action]], *, evaluates: bool) -> Iterator[Instruction]:
        routed = cache(lambda action: (self.route.takes(action), self.route.gives(action)))

        def chunks() -> Iterator[list[Instruction]]:
            while chunk := [Instruction(step, each, *routed(each), evaluates) for step, each in islice(actions, CHUNK)]:
                yield chunk

        return chain.from_iterable(chunks())
