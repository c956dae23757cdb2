"""Simulates a schedule's workers, given what actions and messages cost: when does each action start, and does any
worker wait for ever?

Each worker runs its list in order. It waits for the message that an action takes and, if the queue of the result has a
window, for room in it. The result does not depend on the order in which the workers are visited.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Self

from stageline.pipeline.schedule import Action, Kind, Schedule
from stageline.pipeline.schedule.queues import hops, inbound, outbound

from .complete import UnsoundSchedule


@dataclass(frozen=True, slots=True)
class Costs:
    """Times, all in one unit: of each stage's actions for one microbatch, and of a message over each hop.

    A backward takes as long as its two halves, `input` and `weight`. `latency[h]` is the one-way latency between stages
    h and h+1; between two stages of one worker there is none, whatever its value.
    """

    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    update: tuple[float, ...]
    latency: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raises `ValueError` unless all are for the same stages."""
        lengths = [len(each) for each in (self.forward, self.input, self.weight, self.update)]
        if set(lengths) != {self.stages} or len(self.latency) != max(0, self.stages - 1):
            raise ValueError(
                f"costs are needed for every stage, and latencies for one hop less; forward, input, weight and update "
                f"have {lengths}, latency has {len(self.latency)}"
            )

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.forward)

    @classmethod
    def even(
        cls, stages: int, *, forward: float = 1, backward: float = 2, update: float = 0, latency: float = 0
    ) -> Self:
        """The same times for every stage and every hop; the halves of a backward take equally long."""
        half = (backward / 2,) * stages
        return cls((forward,) * stages, half, half, (update,) * stages, (latency,) * (stages - 1))

    def of(self, action: Action) -> float:
        """The time that `action` takes."""
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


class Deadlock(UnsoundSchedule):
    """Workers wait for each other for ever; the text names what each of them waits for."""


@dataclass(frozen=True, slots=True)
class Timed:
    """An action that `worker` ran from `start` to `end`, planned or measured."""

    worker: int
    action: Action
    start: float
    end: float
    step: int = 0


def simulate(
    schedule: Schedule, costs: Costs, steps: range, windows: Mapping[str, int]
) -> tuple[list[Timed], dict[str, int]]:
    """Returns every action with its times, and for each queue the most messages that can be put and not yet taken.

    The times are for these costs; the numbers of messages hold for any costs, since they follow from the order of
    actions alone. `windows` limits the messages in a queue (named "forward-1", "backward-0": what it carries, and the
    stage that takes from it); a worker that would put more waits. Raises `Deadlock` if a worker waits for ever,
    `ValueError` if the costs or windows do not fit the schedule.
    """
    _check_fit(schedule, costs, windows)
    pipeline = _Pipeline(schedule, costs, steps, windows)
    pipeline.run()
    most = {name: queue.most for name, queue in pipeline.queues.items()}
    return sorted(pipeline.timed, key=lambda timed: timed.start), most


class _Move(NamedTuple):
    """An action is up to three moves; a worker may wait where it takes from a `queue` and where it puts into one."""

    does: Literal["take", "run", "put"]
    step: int
    action: Action
    queue: str = ""


@dataclass(slots=True)
class _TimedQueue:
    """The messages that a queue has carried, numbered by their place in the lists."""

    number: int  # among the queues
    latency: float
    window: int | None
    puts: list[tuple[float, list[int]]] = field(default_factory=list)  # time, and the takes that the producer knew of
    takes: list[float] = field(default_factory=list)
    most: int = 0


@dataclass(slots=True)
class _Worker:
    """How far a worker is, and of how many takes of each queue it knows."""

    number: int
    moves: list[_Move]
    known: list[int]
    place: int = 0
    time: float = 0


class _Pipeline:
    def __init__(self, schedule: Schedule, costs: Costs, steps: range, windows: Mapping[str, int]) -> None:
        self._schedule = schedule
        self._costs = costs
        self.queues = {
            name: _TimedQueue(
                number,
                # A message within a worker takes no time.
                latency=0 if schedule.owner(hop) == schedule.owner(hop + 1) else costs.latency[hop],
                window=windows.get(name),
            )
            for number, (name, hop) in enumerate(hops(schedule).items())
        }
        self._workers = [
            _Worker(number, list(self._moves(number, steps)), [0] * len(self.queues))
            for number in range(len(schedule.placement))
        ]
        self.timed: list[Timed] = []

    def run(self) -> None:
        while any(self._advance(worker) for worker in self._workers):
            pass
        waits = [self._wait(worker) for worker in self._workers if worker.place < len(worker.moves)]
        if waits:
            raise Deadlock(f"schedule {self._schedule.name} deadlocks: {'; '.join(waits)}")

    def _moves(self, worker: int, steps: range) -> Iterator[_Move]:
        for step, action in self._schedule.program(worker, steps):
            if (queue := inbound(action)) in self.queues:
                yield _Move("take", step, action, queue)
            yield _Move("run", step, action)
            if (queue := outbound(action)) in self.queues:
                yield _Move("put", step, action, queue)

    def _advance(self, worker: _Worker) -> bool:
        before = worker.place
        while worker.place < len(worker.moves) and self._make(worker, worker.moves[worker.place]):
            worker.place += 1
        return worker.place > before

    def _make(self, worker: _Worker, move: _Move) -> bool:
        match move.does:
            case "take":
                return _take(worker, self.queues[move.queue])
            case "put":
                return _put(worker, self.queues[move.queue])
            case "run":
                end = worker.time + self._costs.of(move.action)
                self.timed.append(Timed(worker.number, move.action, worker.time, end, move.step))
                worker.time = end
                return True

    def _wait(self, worker: _Worker) -> str:
        move = worker.moves[worker.place]
        ahead = 1 if move.action.kind is Kind.FORWARD else -1  # the next stage is the consumer, or the one before
        at = f"worker {worker.number} waits at {move.action} of step {move.step}"
        if move.does == "take":
            what = "activation" if move.action.kind is Kind.FORWARD else "gradient"
            return f"{at} for the {what} from {self._at(move.action.stage - ahead)}"
        taken = len(self.queues[move.queue].takes)
        consumer = self._at(move.action.stage + ahead)
        return f"{at} for room in {move.queue}, of which {consumer} has taken {taken} messages"

    def _at(self, stage: int) -> str:
        return f"stage {stage} on worker {self._schedule.owner(stage)}"


def _take(worker: _Worker, queue: _TimedQueue) -> bool:
    if len(queue.takes) == len(queue.puts):
        return False
    put_at, known = queue.puts[len(queue.takes)]
    worker.time = max(worker.time, put_at + queue.latency)
    queue.takes.append(worker.time)
    worker.known = list(map(max, worker.known, known))
    worker.known[queue.number] = len(queue.takes)
    return True


def _put(worker: _Worker, queue: _TimedQueue) -> bool:
    if queue.window is not None and (taken := len(queue.puts) + 1 - queue.window) > 0:
        if len(queue.takes) < taken:
            return False
        worker.time = max(worker.time, queue.takes[taken - 1] + queue.latency)
        worker.known[queue.number] = max(worker.known[queue.number], taken)
    queue.puts.append((worker.time, worker.known.copy()))
    queue.most = max(queue.most, len(queue.puts) - worker.known[queue.number])
    return True


def _check_fit(schedule: Schedule, costs: Costs, windows: Mapping[str, int]) -> None:
    """Raises `ValueError` unless the costs are for the schedule's stages and the windows for its queues."""
    if costs.stages != schedule.stages:
        raise ValueError(f"schedule {schedule.name} has {schedule.stages} stages, and the costs are for {costs.stages}")
    queues = hops(schedule)
    for name, window in windows.items():
        if name not in queues:
            raise ValueError(f"there is a window for {name}, and the only queues are: {', '.join(queues) or 'none'}")
        if window < 1:
            raise ValueError(f"the window of {name} is {window}; nothing moves with less than 1")
