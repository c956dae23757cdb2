"""A scripted run without processes: the workers of a schedule in one thread, over queues in memory or sockets, and a
script that calls them.

run = ScriptedRun(RECIPE, cut=[2], placement=((0,), (1,)))
run.train(x, y)
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

import torch
from torch import Tensor

from stageline.broker.codec.message import Message
from stageline.broker.queues.base import Queues, WorkerQueues
from stageline.broker.queues.ends import QueueOptions
from stageline.broker.queues.log import UNLIMITED
from stageline.broker.queues.memory import MemoryQueues
from stageline.pipeline.model.cut import cut_model
from stageline.pipeline.program import Instruction, Queue
from stageline.pipeline.schedule import Kind, Placement, make_schedule
from stageline.pipeline.stage.settings import StageSettings
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.stage.stage_state import StageState
from stageline.pipeline.tree import Tree
from stageline.workers.process.in_process import take_turns
from stageline.workers.runtime.calls import (
    UNDER_WAY,
    Call,
    CallFeed,
    CallKind,
    Position,
    answers,
    encode_call,
    settled_call,
)
from stageline.workers.runtime.executor import CarryOut, Executor, Metric
from stageline.workers.runtime.loop import WorkerLoop
from support.programs import queued_calls, with_windows
from support.reference import Recipe

RUN = "scripted"
LIMIT = 30.0  # seconds that a test over sockets waits for what must come


@dataclass(frozen=True)
class SavedState:
    """All stages' states at one position."""

    position: Position
    states: Mapping[int, StageState]


@dataclass
class ScriptedRun:
    """`cut`: the layers that stages 1, 2, ... begin with. `position`: of the script, after what it has called for."""

    recipe: Recipe
    cut: Sequence[int]
    placement: Placement
    schedule: str = "1f1b"
    window: Sequence[int] | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)

    def __post_init__(self) -> None:
        microbatches = self.recipe.microbatches
        made = make_schedule(self.schedule, self.placement, microbatches, window=self.window)
        many = 2 * microbatches
        self.calls = with_windows(queued_calls(made), lambda queue: many if queue.per.many else UNDER_WAY)
        self.program = self.calls.program
        self.position = Position()
        self.incarnation = 1
        self.snapshots: dict[int, dict[int, StageState]] = defaultdict(dict)  # by step and stage
        self.ends: list[Queues] = self._open_all()  # of each worker, then of the script
        self.executors = [self._executor(worker) for worker in range(len(self.placement))]
        self.loops = [self._loop(worker) for worker in range(len(self.placement))]
        self._unsettled: dict[int, tuple[Call, dict[int, Tree]]] = {}  # by number, with the replies that have come
        self._initial = self.save()

    @property
    def stages(self) -> dict[int, Stage]:
        return {index: stage for executor in self.executors for index, stage in executor.stages.items()}

    @property
    def queues(self) -> Queues:
        """The script's."""
        return self.ends[self.program.script]

    def close(self) -> None:
        for ends in self.ends:
            ends.close()

    def train(self, x: Tree, y: Tree) -> float | None:
        """The loss."""
        loss, *_ = self.reply(self.put(CallKind.TRAIN, x, y), of_last_stage=True)
        return loss

    def evaluate(self, x: Tree, y: Tree) -> dict[str, float]:
        return self.reply(self.put(CallKind.EVALUATE, x, y), of_last_stage=True)

    def predict(self, x: Tree) -> tuple[Tree, ...]:
        return self.reply(self.put(CallKind.PREDICT, x), of_last_stage=True)

    def state(self) -> dict[str, Tensor]:
        number = self.put(CallKind.STATE)
        parts = [self.take(key, number) for key in self.answers(CallKind.STATE)]
        return {name: tensor for part in parts for name, tensor in part.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.reply(self.put(CallKind.LOAD, state=state))

    def stop(self) -> None:
        self.reply(self.put(CallKind.STOP))

    def put(self, kind: CallKind, x: Tree = None, y: Tree = None, state: Mapping[str, Tensor] | None = None) -> int:
        """Calls all workers, and waits for nothing. The number of the call."""
        number, first, last = self.position.calls, self._owner(0), self._owner(self.program.last)
        self._unsettled[number] = Call(kind, number, self.position.step, self.position.evaluations), {}
        for worker, executor in enumerate(self.executors):
            names = [name for stage in executor.stages.values() for name in stage.state_dict()]
            own = None if state is None else {name: state[name] for name in names if name in state}
            inputs, targets = x if worker == first else None, y if worker == last else None
            call = Call(kind, number, self.position.step, self.position.evaluations, inputs, targets, own)
            self.put_payload(worker, number, encode_call(call))
        self.position = self.position.after(kind)
        return number

    def put_payload(self, worker: int, number: int, payload: Tree) -> None:
        key = self.program.queues[f"call-{worker}"]
        self.queues.outbound(key).put(Message(RUN, key.name, number, 1, payload))

    def reply(self, number: int, *, of_last_stage: bool = False) -> Tree:
        """All replies to call `number`, once it is done; of the one that says something, if `of_last_stage`."""
        call, _ = self._unsettled[number]
        found, *others = [self.take(key, number) for key in self.answers(call.kind)]
        assert all(reply is None for reply in others), others
        self.turns(lambda: all(loop.calls > number for loop in self.loops))
        return found if of_last_stage else None

    def take(self, key: Queue, number: int) -> Tree:
        """Result of call `number`, which must be the next one that `key` brings a result of."""
        reply = self.receive(key, number)
        self.note_reply(key.producer, number, reply)
        return reply

    def receive(self, key: Queue, number: int) -> Tree:
        """The same, of which the script makes nothing yet."""
        queue, found = self.queues.inbound(key), list[Message]()
        call, _ = self._unsettled[number]

        def look() -> bool:
            if not found and (message := queue.take(0)) is not None:
                found.append(message)
            return bool(found)

        self.turns(look)
        assert found[0].number == call.position.of(key.per)
        return found[0].payload

    def note_reply(self, worker: int, number: int, reply: Tree) -> None:
        """As a script's driver does: what was only run forward, and is answered, is forgotten."""
        call, replies = self._unsettled[number]
        replies[worker] = reply
        if len(replies) == len(self.answers(call.kind)):
            del self._unsettled[number]
            for owner in {self._owner(0), self._owner(self.program.last)} if call.kind.runs_forward_only else ():
                self.queues.outbound(self.program.queues[f"call-{owner}"]).empty(
                    number, settled_call(call, replies[owner])
                )

    def turns(self, until: Callable[[], bool]) -> None:
        take_turns(self.loops, lambda loop: until())

    def rounds(self, count: int) -> int:
        """So many turns of every worker, whether or not they can go on. In how many of them one could."""
        return sum(loop.poll(0) for _ in range(count) for loop in self.loops)

    def save(self) -> SavedState:
        """A checkpoint. Only between two calls."""
        return SavedState(self.position, {index: stage.snapshot() for index, stage in self.stages.items()})

    def checkpoint(self) -> SavedState:
        """The newest step of which all stages have snapshots that may be reported; the beginning, if there is none."""
        for loop in self.loops:
            loop.note_answered()
        complete = [step for step, states in self.snapshots.items() if len(states) == self.program.schedule.stages]
        ready = [step for step in complete if all(loop.progress.may_report(step) for loop in self.loops)]
        if not ready:
            return self._initial
        step = max(ready)
        positions = {loop.progress.positions[step] for loop in self.loops if step in loop.progress.positions}
        assert len(positions) == 1, positions
        return SavedState(positions.pop(), self.snapshots[step])

    def trim(self, saved: SavedState) -> None:
        """The checkpoint `saved` is complete: nothing before it is needed any more."""
        for place, ends in enumerate(self.ends):
            for queue in self.program.outbound(place):
                ends.outbound(queue).trim(saved.position.of(queue.per))

    def lose(self, worker: int, saved: SavedState) -> None:
        """The worker is gone; another begins at the checkpoint `saved`."""
        self.incarnation += 1
        self._reopen(worker)
        self.executors[worker] = self._executor(worker)
        for index, stage in self.executors[worker].stages.items():
            stage.restore(saved.states[index])
            for step in self.snapshots:
                if step > saved.position.step:  # they are another incarnation's
                    self.snapshots[step].pop(index, None)
        loop = self.loops[worker] = self._loop(worker, saved.position.step)
        loop.begin_at(saved.position)
        for queue in self.program.inbound(worker):
            self.ends[worker].inbound(queue).rewind(saved.position.of(queue.per))

    def retained(self, key: Queue) -> int:
        return self.ends[key.producer].outbound(key).depth().retained

    def answers(self, kind: CallKind) -> list[Queue]:
        """The queues of the replies to a call."""
        return list(answers(self.program, kind))

    def _open_all(self) -> list[Queues]:
        return [MemoryQueues(RUN)] * (self.program.script + 1)

    def _reopen(self, worker: int) -> None:
        """Queues in memory outlive the worker."""

    def _owner(self, stage: int) -> int:
        return self.program.schedule.owner(stage)

    def _loop(self, worker: int, start: int = 0) -> WorkerLoop:
        executor, incarnation, ends = self.executors[worker], self.incarnation, self.ends[worker]
        return WorkerLoop(
            self.calls,
            worker,
            executor,
            ends,
            carry_out=self._snapping(executor),
            run=RUN,
            incarnation=incarnation,
            start=start,
        )

    def _snapping(self, executor: Executor) -> CarryOut:
        """As a worker's hooks do: a snapshot of each stage after every step."""

        def carry_out(instruction: Instruction, received: Sequence[Tree]) -> Tree:
            result = executor.carry_out(instruction, received)
            if instruction.action.kind is Kind.UPDATE:
                stage = instruction.action.stage
                self.snapshots[instruction.step + 1][stage] = executor.stages[stage].snapshot()
            return result

        return carry_out

    def _executor(self, worker: int) -> Executor:
        recipe, last = self.recipe, self.program.last
        torch.manual_seed(recipe.seed)
        parts = cut_model(recipe.build(), self.cut)
        settings = StageSettings(seed=recipe.seed, lr_scheduler=recipe.lr_scheduler)
        stages = {
            part.index: part.stage(recipe.optimizer, recipe.loss if part.index == last else None, settings)
            for part in parts
            if part.index in self.placement[worker]
        }
        return Executor(stages, CallFeed(recipe.microbatches), last, self.metrics)


@dataclass
class WiredScriptedRun(ScriptedRun):
    """Over queues that `open_queues(place, incarnation, options)` opens: those of a lost worker are lost with it."""

    open_queues: Callable[[int, int, QueueOptions], WorkerQueues] = field(kw_only=True)
    retain_bytes: int = field(default=UNLIMITED, kw_only=True)  # in memory; nothing on the disk

    def turns(self, until: Callable[[], bool]) -> None:
        deadline = monotonic() + LIMIT
        while not until():
            assert monotonic() < deadline, [loop.doing for loop in self.loops]
            moved = self.rounds(1)
            for ends in self.ends:
                ends.pump(0 if moved else 0.001)

    def _open_all(self) -> list[Queues]:
        self.ends = [self._open(place) for place in range(self.program.script + 1)]
        self._connect()
        return self.ends

    def _reopen(self, worker: int) -> None:
        self.ends[worker].close()
        self.ends[worker] = self._open(worker)
        self._connect()

    def _open(self, place: int) -> WorkerQueues:
        options = QueueOptions(retain_bytes=self.retain_bytes, spill_bytes=0, patience=0.1)
        return self.open_queues(place, self.incarnation, options)

    def _connect(self) -> None:
        for place, ends in enumerate(self.ends):
            others = (each for each in self.program.inbound(place) if each.producer != place)
            ends.connect({each: self.ends[each.producer].endpoint for each in others})
