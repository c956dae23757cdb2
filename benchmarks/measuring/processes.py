"""Fresh processes for every measurement, forked from a server that has only imported torch."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

R = TypeVar("R")

PATIENCE = 60.0  # seconds a process waits for its partner before it gives up

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch.distributed.pipelining", "zmq"])


def together(*tasks: Callable[[], R]) -> list[R]:
    """Run `tasks` at the same time, each in a process of its own, and return their results in order.

    An exception of a task is raised here; its partners end after their own `PATIENCE`.
    """
    with ProcessPoolExecutor(len(tasks), mp_context=CONTEXT) as pool:
        return [future.result() for future in [pool.submit(task) for task in tasks]]
