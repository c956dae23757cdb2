"""Stages as chains of hashes: the order and the number of all that ever had an effect show in one digest.

forward    H(version, moving, place, input)          moving: like BatchNorm's, changed by every forward
backward   H(version, moving, input, gradient)       version, moving: those that the forward has read; in two halves, it
                                                     counts with the second
update     weights = H(weights, gradients in order)
           where weights are delayed, forwards of step s read those after s - 1 updates
shared     T = H(result of backward, the later stage's T); both update with all that the earlier one has of it
           or, per step, H(all that it has, the later stage's)
clip       N = H(gradients, the later stage's N); the first stage's is the total, by which all change their gradients
evaluate   H(weights, moving, place, input), and nothing changes

Where a script calls, inputs and targets are texts that it has put into its calls.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from hashlib import blake2b

from stageline.broker.codec.message import Message
from stageline.broker.codec.structure import emptied, is_emptied
from stageline.broker.control.records import EvaluationRecord
from stageline.pipeline.digest import TensorDigest
from stageline.pipeline.evaluation import Criterion, Rounds, Standing
from stageline.pipeline.program import Instruction, Pass
from stageline.pipeline.schedule import Kind, Schedule
from stageline.pipeline.tree import Tree
from stageline.workers.runtime.call_sequence import CallSequence
from stageline.workers.runtime.calls import Call, CallFeed, CallKind, Position, answers, encode_call
from stageline.workers.runtime.executor import Sums
from stageline.workers.runtime.plan_calls import NO_ROUNDS
from support.programs import calls_of, queued_calls

Key = tuple[int, int]  # step, microbatch


@dataclass(frozen=True, slots=True)
class Read:
    """Values that a forward has read besides its input."""

    weights: str
    moving: str


@dataclass(frozen=True, slots=True)
class State:
    """A stage between two steps; `in_flight` is what the forwards have read whose backwards are to come."""

    weights: str = "initial"
    moving: str = "still"
    in_flight: tuple[tuple[Key, Read], ...] = ()
    before: str = "initial"  # the weights before the newest update
    updates: int = 0


@dataclass(slots=True)
class Chain:
    """One stage, trained or `frozen`. `delays`: forwards read the weights before the newest update."""

    index: int
    frozen: bool
    delays: bool = False
    state: State = field(default_factory=State)
    gradient: str = ""
    totals: str = ""  # of the parameters that it shares with a later stage
    leaving: str = ""  # the gradient of what it shares with an earlier stage
    norms: str = ""  # of its gradients and those of later stages
    stash: dict[Key, tuple[Read, str]] = field(default_factory=dict)
    halves: dict[Key, str] = field(default_factory=dict)  # results of backwards whose second half is to come
    again: dict[Key, Read] = field(default_factory=dict)

    def forward(self, key: Key, received: str) -> str:
        read = self.again.pop(key, None)
        if read is None:
            read = Read(self._weights_for(key[0]), self.state.moving)
            self.state = replace(self.state, moving=mixed("moving", read.moving, received))
        if not self.frozen:
            self.stash[key] = read, received
        return mixed("F", self.index, read.weights, read.moving, key, received)

    def evaluate(self, key: Key, received: str) -> str:
        return mixed("E", self.index, self.state.weights, self.state.moving, key, received)

    def backward(self, key: Key, gradient: str, *tied: str) -> str:
        result = self.backward_input(key, gradient)
        self.backward_weight(key, *tied)
        return result

    def backward_input(self, key: Key, gradient: str) -> str:
        read, received = self.stash.pop(key)
        self.halves[key] = mixed("B", self.index, read.weights, read.moving, received, gradient)
        return self.halves[key]

    def backward_weight(self, key: Key, *tied: str) -> None:
        result = self.halves.pop(key)
        self.gradient = mixed(self.gradient, result)
        self.leaving = mixed("T", result, *tied)
        self.totals = mixed(self.totals, self.leaving)

    def subtotal(self, *later: str) -> str:
        self.totals = mixed("S", self.totals, *later)
        return self.totals

    def gather(self, *later: str) -> str:
        self.norms = mixed("N", self.gradient, self.totals, *later)
        return self.norms

    def clip(self, *total: str) -> str:
        norm = total[0] if total else self.norms
        self.gradient = mixed("C", self.gradient, norm)
        self.totals = mixed("C", self.totals, norm)
        return norm

    def update(self, *totals: str) -> str:
        total = totals[0] if totals else self.totals
        if not self.frozen:
            weights = mixed("U", self.state.weights, self.gradient, total)
            updates = self.state.updates + 1
            self.state = replace(self.state, weights=weights, before=self.state.weights, updates=updates)
        self.gradient = self.totals = ""
        return total

    def snapshot(self) -> State:
        in_flight = {key: read for key, (read, _) in self.stash.items()} | self.again
        return replace(self.state, in_flight=tuple(in_flight.items()))

    def restore(self, state: State) -> None:
        self.state, self.again = replace(state, in_flight=()), dict(state.in_flight)

    def _weights_for(self, step: int) -> str:
        return self.state.before if self.delays and step == self.state.updates else self.state.weights


class ChainFeed(CallFeed):
    """Batches that are texts: there is nothing to cut."""

    def __init__(self) -> None:
        super().__init__(1)
        self.call: Call | None = None

    def open(self, call: Call) -> None:
        self.call = call

    def close(self) -> None:
        self.call = None


class ChainExecutor:
    """An executor for the stages of one worker. `compute` is called first, and takes time. `feed`: of a script."""

    def __init__(
        self,
        schedule: Schedule,
        worker: int,
        compute: Callable[[Instruction], None] = lambda instruction: None,
        feed: ChainFeed | None = None,
    ) -> None:
        frozen, delays = range(schedule.first_trainable), schedule.delays
        self.stages = {stage: Chain(stage, stage in frozen, delays) for stage in schedule.placement[worker]}
        self.loss: float | None = None
        self.gradient_norm: float | None = None
        self.learning_rates: tuple[float, ...] = ()
        self.rows = 0
        self.feed = feed
        self.sums = Sums()
        self.gives_up = False
        self._compute = compute
        self._last = schedule.stages - 1
        self._sum = 0.0

    def begin_call(self, *, ema: bool, settled: bool, epoch: int) -> None:
        self.sums, self.gives_up = Sums(), settled

    def evaluated(self, step: int) -> EvaluationRecord:
        sums, self.sums = self.sums, Sums()
        return EvaluationRecord(step, sums.rows, None if sums.loss is None else sums.loss / sums.rows)

    def carry_out(self, instruction: Instruction, received: Sequence[Tree]) -> Tree:
        self._compute(instruction)
        action = instruction.action
        stage, key = self.stages[action.stage], (instruction.step, action.microbatch)
        call = self.feed.call if self.feed is not None else None
        match action.kind:
            case Kind.FORWARD if instruction.evaluates and (self.gives_up or any(map(is_emptied, received))):
                self.gives_up = True
                return emptied()
            case Kind.FORWARD if instruction.evaluates:
                result = stage.evaluate(key, str(received[0]) if received else mixed(call and call.inputs, key))
                if stage.index == self._last:
                    self.sums.rows += 1
                    self.sums.loss = (self.sums.loss or 0.0) + int(result, 16) / 2**64
                return result
            case Kind.FORWARD:
                given = mixed("batch", key) if call is None else mixed(call.inputs, key)
                result = stage.forward(key, str(received[0]) if received else given)
                if stage.index == self._last:
                    self._sum += int(result, 16) / 2**64
                return result
            case Kind.BACKWARD:
                wanted = mixed("loss", key) if call is None else mixed(call.targets, key)
                return stage.backward(key, *(map(str, received) if received else [wanted]))
            case Kind.INPUT:
                wanted = mixed("loss", key) if call is None else mixed(call.targets, key)
                return stage.backward_input(key, *(map(str, received) if received else [wanted]))
            case Kind.WEIGHT:
                return stage.backward_weight(key, *map(str, received))
            case Kind.TIED:
                return stage.leaving
            case Kind.SUBTOTAL:
                return stage.subtotal(*map(str, received))
            case Kind.NORMS:
                return stage.gather(*map(str, received))
            case Kind.CLIP:
                return stage.clip(*map(str, received))
            case _:
                if stage.index == self._last:
                    self.loss, self._sum = self._sum, 0.0
                return stage.update(*map(str, received))


@dataclass(frozen=True, slots=True)
class ChainResult:
    """Result of a run: each stage's digest, each step's loss."""

    digests: tuple[str, ...]
    losses: tuple[float, ...]
    replies: tuple[Mapping[int, Tree], ...] = ()  # to each call, by worker
    evaluations: tuple[EvaluationRecord, ...] = ()


@cache
def undisturbed(
    schedule: Schedule,
    steps: int,
    rounds: Rounds = NO_ROUNDS,
    criterion: Criterion | None = None,
    replayed_from: int | None = None,
    passes: tuple[Pass, ...] = (),
) -> ChainResult:
    """The result of all programs run in turn, with nothing between the workers but lists."""
    calls = calls_of(schedule, steps, rounds, passes=passes, criterion=criterion, replayed_from=replayed_from)
    program, found, losses = calls.program, list[EvaluationRecord](), list[float]()
    workers = range(len(schedule.placement))
    executors, start = [ChainExecutor(schedule, worker) for worker in workers], 0

    def trained(worker: int, instruction: Instruction, result: object) -> None:
        if (instruction.kind, instruction.stage) == (Kind.UPDATE, program.last):
            losses.append(executors[worker].loss)

    for end in calls.rounds.ends(start):
        _run_in_turn(executors, [program.instructions(worker, range(start, end)) for worker in workers], trained)
        batches = calls.rounds.batches_of(end)
        _run_in_turn(executors, [program.evaluation(worker, batches) for worker in workers])
        if batches:
            found.append(executors[schedule.owner(program.last)].evaluated(end))
        standing = Standing(calls.criterion).after_all((each.step, each.values) for each in found)
        if standing.stops:
            break
        start = end
    stages = {index: stage for executor in executors for index, stage in executor.stages.items()}
    digests = tuple(digest(stages[index]) for index in range(len(stages)))
    return ChainResult(digests, tuple(losses), evaluations=tuple(found))


@cache
def undisturbed_script(schedule: Schedule, kinds: tuple[CallKind, ...], passes: tuple[Pass, ...] = ()) -> ChainResult:
    """The same of a script that makes calls of these `kinds`, one after the other."""
    program, workers = queued_calls(schedule, passes=passes).program, range(len(schedule.placement))
    executors = [ChainExecutor(schedule, worker, feed=ChainFeed()) for worker in workers]
    sequences = [CallSequence(program, worker, executors[worker], Position()) for worker in workers]
    replies: list[Mapping[int, Tree]] = []
    for number, kind in enumerate(kinds):
        call = made_call(kind, sequences[0].position)
        sent = [Message("", f"call-{worker}", number, 1, encode_call(call)) for worker in workers]
        programs = [each.begin(sent[k]) for k, each in enumerate(sequences)]
        _run_in_turn(executors, programs, partial(_tell, sequences))
        found = {worker: sequences[worker].reply() for worker in workers}
        replies.append({queue.producer: found[queue.producer] for queue in answers(program, kind)})
        for sequence in sequences:
            sequence.close()
    stages = {index: stage for executor in executors for index, stage in executor.stages.items()}
    last = schedule.owner(program.last)
    losses = [reply[last][0] for kind, reply in zip(kinds, replies, strict=True) if kind is CallKind.TRAIN]
    return ChainResult(tuple(digest(stages[index]) for index in range(len(stages))), tuple(losses), tuple(replies))


def _tell(sequences: Sequence[CallSequence], worker: int, instruction: Instruction, result: object) -> None:
    if instruction.evaluates:
        sequences[worker].evaluated(instruction.stage, result)  # type: ignore[arg-type]


def _run_in_turn(
    executors: Sequence[ChainExecutor],
    programs: Sequence[Iterator[Instruction]],
    done: Callable[[int, Instruction, object], None] = lambda worker, instruction, result: None,
) -> None:
    """Run the programs of all workers in turn, and tell `done` of each instruction at a worker."""
    queues: dict[object, list[str]] = {}
    lists = [list(each)[::-1] for each in programs]
    while any(lists):
        for worker, left in enumerate(lists):
            while left and all(queues.get(key) for key in left[-1].takes):
                instruction = left.pop()
                result = executors[worker].carry_out(instruction, [queues[key].pop(0) for key in instruction.takes])
                for key in instruction.gives:
                    queues.setdefault(key, []).append(result)
                done(worker, instruction, result)


def made_call(kind: CallKind, at: Position) -> Call:
    """The script's call at that position: its batch is a text, and the same whenever it is made."""
    batch = (None, None) if kind is CallKind.STOP else (f"inputs {at.calls}", f"targets {at.calls}")
    return Call(kind, at.calls, at.step, at.evaluations, *batch)


def digest(stage: Chain) -> str:
    """Of all that a stage has at the end of a run."""
    return mixed(stage.state.weights, stage.state.moving) * 4


def named(digests: Mapping[int, str]) -> dict[str, TensorDigest]:
    """The digests of stages as if each had one tensor."""
    return {f"{index}.weight": ("float32", (1,), digest) for index, digest in digests.items()}


def mixed(*parts: object) -> str:
    return blake2b(repr(parts).encode(), digest_size=8).hexdigest()
