"""Runs several workers in one thread, one turn after another: what a run in one process is made of."""

from collections.abc import Callable, Sequence

from stageline.workers.runtime.loop import WorkerLoop


class Stuck(Exception):
    """No worker can go on: they wait for each other in a circle. The text says what each one waits for."""


def take_turns(workers: Sequence[WorkerLoop], until: Callable[[WorkerLoop], bool]) -> None:
    """Gives a turn to each worker that is not there yet, again and again until `until` holds for all of them.

    Raises `Stuck` when a whole round changes nothing: in one process, nothing can still be on its way.
    """
    while waiting := [worker for worker in workers if not until(worker)]:
        if not sum(worker.poll(0) for worker in waiting):
            raise Stuck(f"no worker can go on: {'; '.join(worker.doing for worker in waiting)}")
