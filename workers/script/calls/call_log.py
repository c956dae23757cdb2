"""Numbers a script's calls, knows which of them come before each step, and what each worker is sent of them.

calls            0 TRAIN   1 TRAIN   2 EVALUATE   3 TRAIN   4 STOP
step             0         1         2            2         3
evaluation       0         0         0            1         1
"""

import threading
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from stageline.broker.codec.message import Flow, Message
from stageline.pipeline.tree import Tree
from stageline.workers.runtime.calls import Call, CallKind, Position, encode_call
from stageline.workers.runtime.program.program import Program

WeightNames = Sequence[frozenset[str]]  # by worker: those of its stages' state_dict entries; in no order: hashes differ


class CallLog:
    """Begins at `start`: the position of the checkpoint that the run goes on from. For any thread."""

    def __init__(self, start: Position) -> None:
        self._lock = threading.Lock()
        self._next = start
        self._after = {start.step: start}  # the position after so many steps, from the newest checkpoint on

    @property
    def position(self) -> Position:
        """After all calls so far."""
        return self._next

    def call(
        self,
        kind: CallKind,
        inputs: Tree = None,
        targets: Tree = None,
        state: Mapping[str, Tensor] | None = None,
        *,
        ema: bool = False,
    ) -> Call:
        """The next call, numbered."""
        with self._lock:
            here, self._next = self._next, self._next.after(kind)
            if kind is CallKind.TRAIN:
                self._after[self._next.step] = self._next
        return Call(kind, here.calls, here.step, here.evaluations, inputs, targets, state, ema)

    def trim(self, step: int) -> Position | None:
        """The position of the checkpoint of `step`; older ones are forgotten. None if it is not one of this log."""
        with self._lock:
            self._after = {each: position for each, position in self._after.items() if each >= step}
            return self._after.get(step)


def messages(call: Call, program: Program, names: WeightNames, run: str, incarnation: int) -> Iterator[Message]:
    """`call` as each worker gets it: a batch goes only where it is needed, and of the weights its own."""
    for worker, owned in enumerate(program.schedule.placement):
        addressed = Call(
            call.kind,
            call.number,
            call.step,
            call.evaluation,
            call.inputs if 0 in owned or not call.kind.takes_batch else None,
            call.targets if program.last in owned else None,
            None if call.state is None else {name: call.state[name] for name in sorted(names[worker])},
            call.ema,
        )
        number = call.number
        yield Message(run, Flow.CALL, number, 0, worker, incarnation, number, encode_call(addressed))
