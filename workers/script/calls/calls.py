"""A script's calls, numbered; each worker's part of a call; the replies, and a step's loss, read when it is needed.

calls            0 TRAIN   1 TRAIN   2 EVALUATE   3 TRAIN   4 STOP
step             0         1         2            2         3
evaluation       0         0         0            1         1
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Self

from stageline.broker.codec.message import Message
from stageline.pipeline.errors import DataError
from stageline.pipeline.program import Program, Queue
from stageline.pipeline.tree import Tree, map_tensors
from stageline.workers.runtime.calls import UNDER_WAY, Call, CallKind, Position, encode_call

MOST = 2 * UNDER_WAY  # calls without replies
WeightNames = Sequence[frozenset[str]]  # by worker: those of its stages' state_dict entries; in no order: hashes differ


class CallLog:
    """Numbered calls of a script, and the positions after its steps. For any thread."""

    def __init__(self, start: Position) -> None:
        """Begin the log at `start`, the position of the newest checkpoint."""
        self._lock = threading.Lock()
        self._next = start
        self._after = {start.step: start}  # the position after so many steps, from the newest checkpoint on

    @property
    def position(self) -> Position:
        """Position after all calls so far."""
        return self._next

    def numbered(self, call: Call) -> Call:
        """Return the next call: `call` with its number and position."""
        with self._lock:
            here, self._next = self._next, self._next.after(call.kind)
            if call.kind is CallKind.TRAIN:
                self._after[self._next.step] = self._next
        return replace(call, number=here.calls, step=here.step, evaluation=here.evaluations)

    def trim(self, step: int) -> Position | None:
        """Return the position of the checkpoint of `step`, None if the log lacks it; older positions are dropped."""
        with self._lock:
            self._after = {each: position for each, position in self._after.items() if each >= step}
            return self._after.get(step)


def messages(call: Call, program: Program, names: WeightNames, run: str, incarnation: int) -> Iterator[Message]:
    """Yield the messages of a call, one for each worker: a batch goes only where it is needed.

    Args:
        call: Numbered call.
        program: Program of the workers.
        names: Names of the weights that each worker has; of a state to load, it gets only these.
        run: Id of the run.
        incarnation: Incarnation of the script.
    """
    for worker, copies in enumerate(program.schedule.placement):
        owned = {*map(program.schedule.replicas.stage, copies)}
        addressed = replace(
            call,
            inputs=call.inputs if 0 in owned or not call.kind.takes_batch else None,
            targets=call.targets if program.last in owned else None,
            state=None if call.state is None else {name: call.state[name] for name in sorted(names[worker])},
        )
        yield Message(run, f"call-{worker}", call.number, incarnation, encode_call(addressed))


Replies = Mapping[int, Tree]  # to one call, by worker


class UnansweredCalls:
    """Calls of a script without replies.

    A script that has `MOST` of them sleeps until only `UNDER_WAY` are left, and not after each call.
    """

    def __init__(self) -> None:
        """Begin without calls."""
        self._futures: list[Future[Replies]] = []

    def submit(self, submit: "Callable[[Call], Future[Replies]]", call: Call) -> "Future[Replies]":
        """Make room, then submit `call` with the function `submit`, and return the future of its replies."""
        if len(self._futures) >= MOST:
            while len(self._futures) > UNDER_WAY:
                self._futures.pop(0).result()
        self._futures.append(submit(call))
        return self._futures[-1]


@dataclass(slots=True)
class OpenCall:
    """Call that was put, and the replies that have come; `done` gets all of them in the end."""

    call: Call
    missing: deque[Queue]  # the queues of the replies that have not come yet, in the order in which they are taken
    replies: dict[int, Tree] = field(default_factory=dict)
    done: "Future[Replies]" = field(default_factory=Future)


def only(replies: Replies) -> Any:
    """Return the only reply that is not None: the one from the owner of the last stage."""
    return next((reply for reply in replies.values() if reply is not None), None)


def copied(tree: Tree) -> Tree:
    """Return a copy of `tree`: retained calls must not change, and a loader may fill the same memory again."""
    return map_tensors(lambda tensor: tensor.detach().clone(), tree)


def total(replies: Iterable[Replies]) -> dict[str, float]:
    """Return the sums of evaluated batches over all their rows: "rows", "loss", and the metrics.

    Raises `DataError` if there are no rows.
    """
    sums: dict[str, float] = {}
    for each in replies:
        found: Mapping[str, float | None] = only(each)
        for name, value in found.items():
            if value is not None:  # in a batch without rows there is nothing to measure
                sums[name] = sums.get(name, 0.0) + value
    if not sums.get("rows"):
        raise DataError("there are no rows to evaluate. Give at least one batch with rows")
    return sums


class StepLoss:
    """Loss of a training step. `item()`, `float(loss)`, `print(loss)` and `f"{loss:.4f}"` wait for it.

    A batch without rows has no loss: `item()` is None, `float(loss)` is nan. When the loss is known, workers without
    the last stage may still compute the step. Reading it raises the error that ended the run before; a later error of
    one of those workers is raised by a later call, or by `close`. Inline, the step is over when it is returned.
    """

    __slots__ = ("_found", "_wait")

    def __init__(self, wait: Callable[[], tuple[float | None, float | None]]) -> None:
        """Take `wait`, which waits for the step and returns its loss and gradient norm."""
        self._wait: Callable[[], tuple[float | None, float | None]] | None = wait
        self._found: tuple[float | None, float | None] = None, None

    @classmethod
    def of(cls, done: "Future[Replies]") -> Self:
        """Return the loss of a step whose replies `done` will have."""

        def wait() -> tuple[float | None, float | None]:
            loss, norm, _, _ = only(done.result())
            return loss, norm

        return cls(wait)

    def item(self) -> float | None:
        """Return the loss as a float, None for a batch without rows. Waits for the step."""
        return self._measured()[0]

    @property
    def gradient_norm(self) -> float | None:
        """Norm of all gradients before clipping, None without `clip_norm`. Waits like `item()`."""
        return self._measured()[1]

    def _measured(self) -> tuple[float | None, float | None]:
        if self._wait is not None:
            self._found = self._wait()
            self._wait = None
        return self._found

    def __float__(self) -> float:
        """Return the loss, nan for a batch without rows."""
        value = self.item()
        return math.nan if value is None else value

    def __format__(self, spec: str) -> str:
        """Return the loss formatted by `spec`."""
        return format(float(self), spec) if spec else str(self)

    def __str__(self) -> str:
        """Return the loss as text, "None" for a batch without rows."""
        return str(self.item())

    def __repr__(self) -> str:
        """Return "StepLoss(0.25)" for a loss of 0.25."""
        return f"StepLoss({self.item()})"

    def __eq__(self, other: object) -> bool:
        """Return True if the losses are equal; `other` may be a number."""
        return self.item() == (other.item() if isinstance(other, StepLoss) else other)

    def __lt__(self, other: "float | StepLoss") -> bool:
        """Return True if the loss is less than `other`."""
        return float(self) < float(other)

    def __gt__(self, other: "float | StepLoss") -> bool:
        """Return True if the loss is greater than `other`."""
        return float(self) > float(other)

    __hash__ = None  # type: ignore[assignment]  # equal to a number, whose hash would need the value
