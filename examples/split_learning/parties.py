"""Parties that send each other trees of tensors, each a process: what the loops in this folder stand on.

Each listens at a port of its own and dials those that it takes from, with stageline's queues: what is sent is kept
until it has arrived, and sent again if a connection breaks. On machines of their own, give each `Party` the endpoint of
the others, such as tcp://clinic:7001; `together` starts all of them on this machine.
"""

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from time import monotonic
from types import TracebackType
from typing import Self

from stageline.broker.codec.message import Message
from stageline.broker.queues.ends import QueueOptions
from stageline.broker.transports.sockets.zeromq_queues import ZeroMQQueues
from stageline.pipeline.program import Queue
from stageline.pipeline.tree import Tree

RUN = "split-learning"
PATIENCE = 300.0  # seconds that a party waits for another


class Party:
    """One of `names`. `connect` tells it where the others listen; then it can `send` and `receive`."""

    def __init__(self, name: str, names: Sequence[str], url: str = "tcp://127.0.0.1:0") -> None:
        self.name = name
        self._names = list(names)
        self._queues = ZeroMQQueues(RUN, 1, url, QueueOptions())
        self._sent = dict.fromkeys(names, 0)
        self.endpoint = self._queues.endpoint

    def connect(self, endpoints: Mapping[str, str]) -> None:
        """Returns once all others have connected to this party. Raises `TimeoutError`."""
        others = {name: endpoint for name, endpoint in endpoints.items() if name != self.name}
        self._queues.connect({self._queue(other, self.name): endpoint for other, endpoint in others.items()})
        for other in others:
            if not self._queues.outbound(self._queue(self.name, other)).has_credit(0, PATIENCE):
                raise TimeoutError(f"{other} has not connected to {self.name} in {PATIENCE:g} s")

    def send(self, to: str, content: Tree) -> None:
        """Returns at once. Nothing may write to the tensors afterwards. Those that `to` has received are forgotten."""
        where, number = self._queue(self.name, to), self._sent[to]
        queue = self._queues.outbound(where)
        if number and self._arrived(to):
            queue.trim(number)
        queue.put(Message(RUN, where.name, number, 1, content))
        self._sent[to] += 1

    def receive(self, sender: str) -> Tree:
        """The next of what `sender` has sent to this party. Raises `TimeoutError`."""
        message = self._queues.inbound(self._queue(sender, self.name)).take(PATIENCE)
        if message is None:
            raise TimeoutError(f"{self.name} has waited {PATIENCE:g} s for {sender}")
        return message.payload

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Stays until the others have received everything."""
        until = monotonic() + PATIENCE
        while kind is None and not all(map(self._arrived, self._names)) and monotonic() < until:
            self._queues.pump(0.1)
        self._queues.close()

    def _arrived(self, to: str) -> bool:
        if not self._sent[to]:
            return True
        depth = self._queues.outbound(self._queue(self.name, to)).depth()
        return not depth.ready and not depth.in_flight

    def _queue(self, sender: str, receiver: str) -> Queue:
        """A queue for each pair; a party may send two messages ahead of what is taken."""
        places = self._names.index(sender), self._names.index(receiver)
        return Queue(name=f"{sender}-{receiver}", producer=places[0], consumer=places[1], window=2)


def together(
    work: Mapping[str, Callable[[Party], object]], dialled: Callable[[str], str] = lambda endpoint: endpoint
) -> None:
    """Runs each party's work in a process of its own. `dialled` may put something between: it gives the endpoint at
    which the others dial one that listens at its argument. Raises `RuntimeError` if one of them fails."""
    context = multiprocessing.get_context("fork")  # nothing was computed before: no thread is left behind
    ends = {name: context.Pipe() for name in work}
    processes = {
        name: context.Process(target=_work, args=(name, list(work), each, ends[name][1])) for name, each in work.items()
    }
    for process in processes.values():
        process.start()
    endpoints = {name: dialled(str(own.recv())) for name, (own, _) in ends.items()}
    for own, _ in ends.values():
        own.send(endpoints)
    for process in processes.values():
        process.join()
    if failed := [name for name, process in processes.items() if process.exitcode]:
        raise RuntimeError(f"{', '.join(failed)} failed")


def _work(name: str, names: Sequence[str], work: Callable[[Party], object], launcher: Connection) -> None:
    with Party(name, names) as party:
        launcher.send(party.endpoint)
        party.connect(launcher.recv())
        work(party)
