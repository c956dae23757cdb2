"""Stages as chains of hashes: the order and the number of all that ever had an effect show in one digest.

forward    H(version, moving, place, input)          moving: like BatchNorm's, changed by every forward
backward   H(version, moving, input, gradient)       version, moving: those that the forward has read
update     weights = H(weights, gradients in order)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import blake2b

from stageline.pipeline.digest import TensorDigest
from stageline.pipeline.schedule import Kind, Schedule
from stageline.pipeline.tree import Tree
from stageline.workers.runtime.program import Instruction, Program

Key = tuple[int, int]  # step, microbatch


@dataclass(frozen=True, slots=True)
class Read:
    """What a forward has read besides its input."""

    weights: str
    moving: str


@dataclass(frozen=True, slots=True)
class State:
    """A stage between two steps; `in_flight` is what the forwards have read whose backwards are to come."""

    weights: str = "initial"
    moving: str = "still"
    in_flight: tuple[tuple[Key, Read], ...] = ()


@dataclass(slots=True)
class Chain:
    """One stage, trained or `frozen`."""

    index: int
    frozen: bool
    state: State = field(default_factory=State)
    gradient: str = ""
    stash: dict[Key, tuple[Read, str]] = field(default_factory=dict)
    again: dict[Key, Read] = field(default_factory=dict)

    def forward(self, key: Key, received: str) -> str:
        read = self.again.pop(key, None)
        if read is None:
            read = Read(self.state.weights, self.state.moving)
            self.state = replace(self.state, moving=mixed("moving", read.moving, received))
        if not self.frozen:
            self.stash[key] = read, received
        return mixed("F", self.index, read.weights, read.moving, key, received)

    def backward(self, key: Key, gradient: str) -> str:
        read, received = self.stash.pop(key)
        result = mixed("B", self.index, read.weights, read.moving, received, gradient)
        self.gradient = mixed(self.gradient, result)
        return result

    def update(self) -> None:
        if not self.frozen:
            self.state = replace(self.state, weights=mixed("U", self.state.weights, self.gradient))
        self.gradient = ""

    def snapshot(self) -> State:
        in_flight = {key: read for key, (read, _) in self.stash.items()} | self.again
        return replace(self.state, in_flight=tuple(in_flight.items()))

    def restore(self, state: State) -> None:
        self.state, self.again = replace(state, in_flight=()), dict(state.in_flight)


class ChainExecutor:
    """An executor for the stages of one worker. `compute` is called first, and takes time."""

    def __init__(
        self, schedule: Schedule, worker: int, compute: Callable[[Instruction], None] = lambda instruction: None
    ) -> None:
        self.stages = {stage: Chain(stage, stage < schedule.first_trainable) for stage in schedule.placement[worker]}
        self.loss: float | None = None
        self._compute = compute
        self._last = schedule.stages - 1
        self._sum = 0.0

    def measured(self) -> dict[str, float]:
        return {}

    def carry_out(self, instruction: Instruction, received: Sequence[Tree]) -> str:
        self._compute(instruction)
        action = instruction.action
        stage, key = self.stages[action.stage], (instruction.step, action.microbatch)
        match action.kind:
            case Kind.FORWARD:
                result = stage.forward(key, str(received[0]) if received else mixed("batch", key))
                if stage.index == self._last:
                    self._sum += int(result, 16) / 2**64
                return result
            case Kind.BACKWARD:
                return stage.backward(key, str(received[0]) if received else mixed("loss", key))
            case _:
                if stage.index == self._last:
                    self.loss, self._sum = self._sum, 0.0
                stage.update()
                return ""


@dataclass(frozen=True, slots=True)
class ChainResult:
    """What a run ends with: each stage's digest, each step's loss."""

    digests: tuple[str, ...]
    losses: tuple[float, ...]


@cache
def undisturbed(schedule: Schedule, steps: int) -> ChainResult:
    """The result of all programs run in turn, with nothing between the workers but lists."""
    program = Program(schedule, steps)
    queues: dict[object, list[str]] = {}
    executors = [ChainExecutor(schedule, worker) for worker in range(len(schedule.placement))]
    programs = [list(program.instructions(worker))[::-1] for worker in range(len(executors))]
    losses: list[float] = []
    while any(programs):
        for executor, left in zip(executors, programs, strict=True):
            while left and all(queues.get(key) for key in left[-1].takes):
                instruction = left.pop()
                result = executor.carry_out(instruction, [queues[key].pop(0) for key in instruction.takes])
                queues.setdefault(instruction.gives, []).append(result)
                if instruction.action.kind is Kind.UPDATE and instruction.action.stage == program.last:
                    losses.append(executor.loss)
    stages = {index: stage for executor in executors for index, stage in executor.stages.items()}
    return ChainResult(tuple(digest(stages[index]) for index in range(len(stages))), tuple(losses))


def digest(stage: Chain) -> str:
    """Of all that a stage has at the end of a run."""
    return mixed(stage.state.weights, stage.state.moving) * 4


def named(digests: Mapping[int, str]) -> dict[str, TensorDigest]:
    """The digests of stages as if each had one tensor."""
    return {f"{index}.weight": ("float32", (1,), digest) for index, digest in digests.items()}


def mixed(*parts: object) -> str:
    return blake2b(repr(parts).encode(), digest_size=8).hexdigest()
