"""Simulation of a schedule's workers, given the costs of actions and messages.

It tells when each action starts, and if any worker waits for ever. Each worker runs its list in order. It waits for the
message that an action takes and, if the queue of the result has a window, for room in it. The result does not depend on
the order in which the workers are visited.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Self

from stageline.pipeline.program.complete import UnsoundSchedule
from stageline.pipeline.schedule import Action, Kind, Schedule

from .operations import Op, Queue
from .program import Program


@dataclass(frozen=True, slots=True)
class Costs:
    """Times, all in one unit: of each stage's actions for one microbatch, and of a message over each hop.

    A backward takes as long as its two halves, `input` and `weight`. Sending and adding gradients of shared parameters,
    and clipping, take no time.

    Attributes:
        forward: Time of a forward, by stage.
        input: Time of the first half of a backward, by stage.
        weight: Time of the second half of a backward, by stage.
        update: Time of an update, by stage.
        latency: `latency[h]` is the one-way latency of a message between stages h and h+1. Messages between two stages
            of one worker take no time, whatever this value is. Messages between stages that share parameters take as
            long as over the slowest hop on the way.
    """

    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    update: tuple[float, ...]
    latency: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raise `ValueError` unless all times are for the same stages."""
        lengths = [len(each) for each in (self.forward, self.input, self.weight, self.update)]
        if set(lengths) != {self.stages} or len(self.latency) != max(0, self.stages - 1):
            raise ValueError(
                f"costs are needed for every stage, and latencies for one hop less; forward, input, weight and update "
                f"have {lengths}, latency has {len(self.latency)}"
            )

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.forward)

    @classmethod
    def even(
        cls,
        stages: int,
        *,
        forward: float = 1,
        backward: float = 2,
        update: float = 0,
        latency: float = 0,
        frozen: Collection[int] = (),
    ) -> Self:
        """Return equal times for every stage and every hop. The halves of a backward take equally long.

        Args:
            stages: Number of stages.
            forward: Time of a forward.
            backward: Time of a whole backward.
            update: Time of an update.
            latency: One-way latency of a message.
            frozen: Stages without a trainable parameter, whose backwards have no second half.
        """
        half = (backward / 2,) * stages
        weight = tuple(0 if stage in frozen else each for stage, each in enumerate(half))
        return cls((forward,) * stages, half, weight, (update,) * stages, (latency,) * (stages - 1))

    def of(self, action: Action) -> float:
        """Return the time that `action` takes."""
        match action.kind:
            case Kind.FORWARD:
                return self.forward[action.stage]
            case Kind.BACKWARD:
                return self.input[action.stage] + self.weight[action.stage]
            case Kind.INPUT:
                return self.input[action.stage]
            case Kind.WEIGHT:
                return self.weight[action.stage]
            case Kind.UPDATE:
                return self.update[action.stage]
            case _:
                return 0


class Deadlock(UnsoundSchedule):
    """Error that the workers of a schedule wait for each other for ever.

    Mend: Reorder the actions that the message names: one of them has to come before what its worker waits for.

    Example: schedule mine.py:reverse deadlocks: worker 0 waits at 1F0 of step 0 for room in forward-1
    """

    error_code = "SL106"


@dataclass(frozen=True, slots=True)
class Timed:
    """An action that `worker` ran from `start` to `end`, planned or measured."""

    worker: int
    action: Action
    start: float
    end: float
    step: int = 0


def simulate(
    program: Program, costs: Costs, steps: range, windows: Mapping[str, int]
) -> tuple[list[Timed], dict[str, int]]:
    """Simulate the workers of a program over `steps`.

    The times are for these costs; the numbers of messages hold for any costs, since they follow from the order of
    actions alone.

    Args:
        program: Program to simulate.
        costs: Times of actions and messages.
        steps: Training steps.
        windows: Limits of the messages in a queue, by the queue's name ("forward-1", "backward-0": what it carries, and
            the stage that takes from it). A worker that would put more waits.

    Returns:
        Every action with its times, in the order of their start; and for each queue the most messages that can be put
        and not yet taken.

    Raises:
        Deadlock: A worker waits for ever.
        ValueError: The costs or windows do not fit the schedule.
    """
    pipeline = _Pipeline(program, costs, windows)
    pipeline.run(steps)
    return (
        sorted(pipeline.timed, key=lambda timed: timed.start),
        {name: queue.most for name, queue in pipeline.queues.items()},
    )


_Wait = tuple[int, Op, str]  # a step and its operation, and the queue that it can neither take from nor put into yet


@dataclass(slots=True)
class _TimedQueue:
    """The messages that a queue has carried, numbered by their place in the lists."""

    number: int  # among the queues
    latency: float
    window: int | None
    puts: list[tuple[float, list[int]]] = field(default_factory=list)  # time, and the takes that the producer knew of
    takes: list[float] = field(default_factory=list)
    most: int = 0

    def put(self, time: float, known: list[int]) -> None:
        """Put a message at `time`, by a producer that knows of the takes `known`."""
        self.puts.append((time, known))
        self.most = max(self.most, len(self.puts) - known[self.number])


@dataclass(slots=True)
class _Worker:
    """State of a worker: its time, and the number of takes of each queue that it knows of."""

    number: int
    known: list[int]
    time: float = 0

    def spend(self, seconds: float) -> tuple[float, float]:
        """Work for `seconds`; return the times of begin and end."""
        start, self.time = self.time, self.time + seconds
        return start, self.time

    def take(self, queue: _TimedQueue) -> bool:
        """Take the next message of `queue` as soon as it is there; return False if it has not been put yet."""
        if len(queue.takes) == len(queue.puts):
            return False
        put_at, known = queue.puts[len(queue.takes)]
        self.time = max(self.time, put_at + queue.latency)
        queue.takes.append(self.time)
        self.known = list(map(max, self.known, known))
        self.known[queue.number] = len(queue.takes)
        return True

    def put(self, queue: _TimedQueue) -> bool:
        """Put a message into `queue` as soon as it has room; return False if no take has made room yet."""
        if queue.window is not None and (taken := len(queue.puts) + 1 - queue.window) > 0:
            if len(queue.takes) < taken:
                return False
            self.time = max(self.time, queue.takes[taken - 1] + queue.latency)
            self.known[queue.number] = max(self.known[queue.number], taken)
        queue.put(self.time, self.known.copy())
        return True


class _Pipeline:
    def __init__(self, program: Program, costs: Costs, windows: Mapping[str, int]) -> None:
        self._program = program
        self._schedule = program.schedule
        self._costs = costs
        used = {name for op in chain.from_iterable(program.step) for name in (*op.takes, *op.gives)}
        queues = [queue for name, queue in program.queues.items() if name in used]
        _check_fit(program.schedule, costs, windows, [queue.name for queue in queues])
        self.queues = {
            queue.name: _TimedQueue(
                number,
                latency=latency_of(costs, program.schedule, queue),
                window=windows.get(queue.name),
            )
            for number, queue in enumerate(queues)
        }
        self._stage = program.schedule.replicas.stage
        self.timed: list[Timed] = []

    def run(self, steps: range) -> None:
        """Run all workers over `steps`. Raises `Deadlock` if some of them wait for ever."""
        workers = range(len(self._schedule.placement))
        runs = [self._run(_Worker(number, [0] * len(self.queues)), steps) for number in workers]
        waits: list[_Wait | tuple[()] | None] = [() for _ in workers]  # (): not begun yet, None: at its end

        def advances(worker: int) -> bool:
            before = waits[worker]
            waits[worker] = next(runs[worker], None)
            return waits[worker] != before

        while any(map(advances, workers)):
            pass
        if found := [self._described(worker, *wait) for worker, wait in enumerate(waits) if wait]:
            raise Deadlock(f"schedule {self._schedule.name} deadlocks: {'; '.join(found)}")

    def _run(self, worker: _Worker, steps: range) -> Iterator[_Wait]:
        """Run the worker's list; yield whenever it has to wait."""
        for step, op in self._program.ops(worker.number, steps):
            action = op.action
            for wanted in op.takes:
                while not worker.take(self.queues[wanted]):
                    yield step, op, wanted
            start, end = worker.spend(self._costs.of(action._replace(stage=self._stage(action.stage))))
            self.timed.append(Timed(worker.number, action, start, end, step))
            for target in op.gives:
                while not worker.put(self.queues[target]):
                    yield step, op, target

    def _described(self, worker: int, step: int, op: Op, name: str) -> str:
        queue = self._program.queues[name]
        at = f"worker {worker} waits at {op.name} of step {step}"
        if name in op.takes:
            return f"{at} for the {_CARRIED.get(queue.flow, f'message of {name}')} from {self._at(queue.source)}"
        taken = len(self.queues[name].takes)
        return f"{at} for room in {name}, of which {self._at(queue.target)} has taken {taken} messages"

    def _at(self, stage: int | None) -> str:
        if stage is None:
            return "the script"
        return f"stage {self._schedule.label(stage)} on worker {self._schedule.owner(stage)}"


_CARRIED = {
    "forward": "activation",
    "backward": "gradient",
    "tied": "gradient of shared parameters",
    "subtotal": "gradient of shared parameters",
    "sum": "sums of gradients",
    "total": "total gradient of shared parameters",
    "norms": "norms of gradients",
    "clip": "norm to clip by",
}


def latency_of(costs: Costs, schedule: Schedule, queue: Queue) -> float:
    """Return the latency of a message of `queue`.

    A message within a worker takes no time; one between replicas as long as over the slowest hop of their stage.
    """
    if queue.producer == queue.consumer or queue.source is None or queue.target is None:
        return 0
    one, other = schedule.replicas.stage(queue.source), schedule.replicas.stage(queue.target)
    if one == other:
        return max(costs.latency[max(0, one - 1) : one + 1], default=0)
    return max(costs.latency[min(one, other) : max(one, other)])


def _check_fit(schedule: Schedule, costs: Costs, windows: Mapping[str, int], queues: Sequence[str]) -> None:
    """Raise `ValueError` unless the costs are for the schedule's stages and the windows for its queues."""
    if costs.stages != schedule.stages:
        raise ValueError(f"schedule {schedule.name} has {schedule.stages} stages, and the costs are for {costs.stages}")
    for name, window in windows.items():
        if name not in queues:
            raise ValueError(f"there is a window for {name}, and the only queues are: {', '.join(queues) or 'none'}")
        if window < 1:
            raise ValueError(f"the window of {name} is {window}; nothing moves with less than 1")
