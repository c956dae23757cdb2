"""A scripted run without processes: the workers of a schedule in one thread, over queues in memory, and a script that
calls them.

run = ScriptedRun(RECIPE, cut=[2], placement=((0,), (1,)))
run.train(x, y)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from stageline.broker.codec.message import Message
from stageline.broker.queues.base import QueueKey
from stageline.broker.queues.memory import MemoryQueues
from stageline.pipeline.model.cut import cut_model
from stageline.pipeline.schedule import Placement, make_schedule
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.stage.state import StageState
from stageline.pipeline.tree import Tree
from stageline.workers.runtime.calls import Call, CallFeed, CallKind, Position, encode_call
from stageline.workers.runtime.executor import Executor, Metric
from stageline.workers.runtime.loop import WorkerLoop, take_turns
from stageline.workers.runtime.program import ENDLESS, Program, call_key, reply_key
from support.reference import Recipe

RUN = "scripted"


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
        self.program = Program(made, ENDLESS, scripted=True)
        self.queues = MemoryQueues(RUN, microbatches)
        self.position = Position()
        self.incarnation = 1
        self.executors = [self._executor(worker) for worker in range(len(self.placement))]
        self.loops = [self._loop(worker) for worker in range(len(self.placement))]

    @property
    def stages(self) -> dict[int, Stage]:
        return {index: stage for executor in self.executors for index, stage in executor.stages.items()}

    def train(self, x: Tree, y: Tree) -> float | None:
        """The loss."""
        return self.reply(self.put(CallKind.TRAIN, x, y), of_last_stage=True)

    def evaluate(self, x: Tree, y: Tree) -> dict[str, float]:
        return self.reply(self.put(CallKind.EVALUATE, x, y), of_last_stage=True)

    def predict(self, x: Tree) -> tuple[Tree, ...]:
        return self.reply(self.put(CallKind.PREDICT, x), of_last_stage=True)

    def state(self) -> dict[str, Tensor]:
        number = self.put(CallKind.STATE)
        return {name: tensor for worker in range(len(self.loops)) for name, tensor in self.take(worker, number).items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.reply(self.put(CallKind.LOAD, state=state))

    def stop(self) -> None:
        self.reply(self.put(CallKind.STOP))

    def put(self, kind: CallKind, x: Tree = None, y: Tree = None, state: Mapping[str, Tensor] | None = None) -> int:
        """Calls all workers, and waits for nothing. The number of the call."""
        number, first, last = self.position.calls, self._owner(0), self._owner(self.program.last)
        for worker, executor in enumerate(self.executors):
            names = [name for stage in executor.stages.values() for name in stage.state_dict()]
            own = None if state is None else {name: state[name] for name in names if name in state}
            inputs, targets = x if worker == first else None, y if worker == last else None
            call = Call(kind, number, self.position.step, self.position.evaluations, inputs, targets, own)
            self.put_payload(worker, number, encode_call(call))
        self.position = self.position.after(kind)
        return number

    def put_payload(self, worker: int, number: int, payload: Tree) -> None:
        key = call_key(worker)
        self.queues.outbound(key).put(Message(RUN, key.flow, number, 0, key.stage, 1, number, payload))

    def reply(self, number: int, *, of_last_stage: bool = False) -> Tree:
        """All workers' replies to call `number`; of the one that says something, if `of_last_stage`."""
        replies = [self.take(worker, number) for worker in range(len(self.loops))]
        others = [reply for worker, reply in enumerate(replies) if worker != self._owner(self.program.last)]
        assert all(reply is None for reply in others), others
        return replies[self._owner(self.program.last)] if of_last_stage else None

    def take(self, worker: int, number: int) -> Tree:
        """The reply of `worker` to call `number`, which must be the next one."""
        queue = self.queues.inbound(reply_key(worker))
        self.turns(lambda: queue.depth().ready > 0)
        message = queue.take(0)
        assert message is not None
        assert message.step == message.sequence == number
        return message.payload

    def turns(self, until: Callable[[], bool]) -> None:
        take_turns(self.loops, lambda loop: until())

    def rounds(self, count: int) -> None:
        """So many turns of every worker, whether or not they can go on."""
        for _ in range(count):
            for loop in self.loops:
                loop.poll(0)

    def save(self) -> SavedState:
        """A checkpoint. Only between two calls."""
        return SavedState(self.position, {index: stage.snapshot() for index, stage in self.stages.items()})

    def lose(self, worker: int, saved: SavedState) -> None:
        """The worker is gone; another begins at the checkpoint `saved`, with the same queues."""
        self.incarnation += 1
        self.executors[worker] = self._executor(worker)
        for index, stage in self.executors[worker].stages.items():
            stage.restore(saved.states[index])
        loop = self.loops[worker] = self._loop(worker, saved.position.step)
        loop.begin_at(saved.position)
        for key in self.program.inbound(worker):
            self.queues.inbound(key).rewind(saved.position.of(key.flow))

    def retained(self, key: QueueKey) -> int:
        return self.queues.outbound(key).depth().retained

    def _owner(self, stage: int) -> int:
        return self.program.schedule.owner(stage)

    def _loop(self, worker: int, start: int = 0) -> WorkerLoop:
        executor, incarnation = self.executors[worker], self.incarnation
        return WorkerLoop(self.program, worker, executor, self.queues, run=RUN, incarnation=incarnation, start=start)

    def _executor(self, worker: int) -> Executor:
        recipe, last = self.recipe, self.program.last
        torch.manual_seed(recipe.seed)
        parts = cut_model(recipe.build(), self.cut)
        make = partial(Stage, seed=recipe.seed, optimizer=recipe.optimizer, lr_scheduler=recipe.lr_scheduler)
        stages = {
            part.index: make(
                part.layers,
                index=part.index,
                first_layer=part.first_layer,
                names=part.names,
                loss=recipe.loss if part.index == last else None,
            )
            for part in parts
            if part.index in self.placement[worker]
        }
        return Executor(stages, CallFeed(recipe.microbatches), last, self.metrics, evaluates_loss=True)
