"""Several workers in one thread: each gets a turn of its loop, again and again, over queues in memory."""

from collections.abc import Callable, Sequence

from stageline.broker.queues.memory import MemoryQueues
from stageline.pipeline.program import Program

from .calls import Position
from .loop import WorkerLoop


class Stuck(Exception):
    """No worker can go on: they wait for each other in a circle. The text says what each one waits for."""


class SharedQueues(MemoryQueues):
    """The queues of `program` for all of its workers, which share a thread: each begins where the program says."""

    def __init__(self, program: Program, run: str) -> None:
        super().__init__(run)
        self._all = tuple(program.queues.values())
        for queue in self._all:
            self.inbound(queue).rewind(queue.begins)

    def trim(self, position: Position) -> None:
        """Let all messages before `position` go."""
        for queue in self._all:
            self.outbound(queue).trim(queue.within(position.of(queue.per)))


def take_turns(workers: Sequence[WorkerLoop], until: Callable[[WorkerLoop], bool]) -> None:
    """Gives each worker a turn in this thread, again and again until `until` holds for all of them.

    Raises `Stuck` when a whole round changes nothing: within one thread, no message can still be on its way.
    """
    while waiting := [worker for worker in workers if not until(worker)]:
        if not sum(worker.poll(0) for worker in waiting):
            raise Stuck(f"no worker can go on: {'; '.join(worker.doing for worker in waiting)}")
