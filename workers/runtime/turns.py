"""Several workers in one thread: each gets a turn of its loop, again and again."""

from collections.abc import Callable, Sequence

from .loop import WorkerLoop


class Stuck(Exception):
    """No worker can go on: they wait for each other in a circle. The text says what each one waits for."""


def take_turns(workers: Sequence[WorkerLoop], until: Callable[[WorkerLoop], bool]) -> None:
    """Gives each worker a turn in this thread, again and again until `until` holds for all of them.

    Raises `Stuck` when a whole round changes nothing: within one thread, no message can still be on its way.
    """
    while waiting := [worker for worker in workers if not until(worker)]:
        if not sum(worker.poll(0) for worker in waiting):
            raise Stuck(f"no worker can go on: {'; '.join(worker.doing for worker in waiting)}")
