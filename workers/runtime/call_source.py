"""Sources of a worker's calls: a plan's are made from its steps and rounds, a script's come in a queue.

    next call ──> its instructions ──> computed by the loop ──> next call ...

A call may have to be waited for: a step for the broker's order, a step after a round for the verdict on that, and each
call of a script for the script.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stageline.broker.control.records import ScheduleOrder
from stageline.broker.queues.base import Inbound, Outbound
from stageline.pipeline.program import Instruction
from stageline.pipeline.tree import Tree
from stageline.workers.runs.metrics import MetricsLine

from .calls import Position
from .executor import Executor
from .progress import Progress

SaveStages = Callable[[Path, Position], Tree]  # into a folder, which lacks a stage if that could not be done; a reply
Keep = Callable[[int], object]  # saves the state after so many steps
Measured = Callable[[MetricsLine], object]


@dataclass(frozen=True, slots=True)
class LoopParts:
    """The parts of a worker's loop that its source of calls works with.

    Attributes:
        worker: Place of the worker.
        start: Training steps before the loop begins.
        executor: Computes what a call asks for.
        inbound: Returns a queue that the worker takes from, by its name.
        opened: Queues that it puts into and that are open, by name.
        outbound: Returns a queue that it puts into, by its name.
        put_reply: Puts a reply with a number into the queue of this name.
        progress: Notes which call is waited for.
        now: Returns the seconds since the epoch.
        pump: Moves messages of all queues, for so many seconds.
        measured: Takes the metrics of a round of evaluation.
        keep: Saves the state after so many steps.
        save: Writes the worker's stages into a folder.
    """

    worker: int
    start: int
    executor: Executor
    inbound: Callable[[str], Inbound]
    opened: Mapping[str, Outbound]
    outbound: Callable[[str], Outbound]
    put_reply: Callable[[str, int, Tree], None]
    progress: Progress
    now: Callable[[], float]
    pump: Callable[[float], None]
    measured: Measured
    keep: Keep
    save: SaveStages


class CallSource(Protocol):
    """The calls to one worker, in order. The methods with a body are for sources that need no other."""

    @property
    @abstractmethod
    def over(self) -> bool:
        """True if no call is left, and none is open."""

    @property
    @abstractmethod
    def doing(self) -> str:
        """The state between two calls, in words."""

    @property
    def done(self) -> int:
        """The number of calls of the script that have been carried out; 0 in a run that no script calls."""
        return 0

    @abstractmethod
    def next(self, timeout: float) -> Iterator[Instruction] | None:
        """Return the instructions of the next call; none if the open call was only to be answered.

        Returns None if no call has come within about `timeout` seconds, or all are over.
        """

    @abstractmethod
    def step(self, instruction: Instruction | None) -> int | None:
        """Return the number of training steps before `instruction`; without one, before the next call.

        Returns None if all calls are over.
        """

    def around(self, inbound: Inbound) -> Inbound:
        """Return the queue that instructions take from, made of `inbound`. Called once for each queue."""
        return inbound

    def evaluated(self, stage: int, output: Tree) -> None:
        """Note that `stage` has run a microbatch of the open call forward."""
        return

    def begin_at(self, position: Position) -> None:
        """Continue from `position`, whose checkpoint has been restored."""
        return

    def note_answered(self) -> None:
        """Note which replies have arrived at the script."""
        return

    def lacks_room(self, now: float) -> None:
        """Note that a message of the source itself cannot be put yet."""
        return

    def learn(self, orders: Sequence[ScheduleOrder], closed: int | None) -> None:
        """Note the broker's orders; steps from `closed` on wait for another one."""
        return
