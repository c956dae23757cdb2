"""Worker processes with queues over `shm://`, which tests kill."""

from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch

from stageline.broker.queues.ends import QueueOptions
from stageline.broker.transports.sockets.shm_queues import ShmQueues
from support.fork_server import ForkedCommand, ForkServer
from support.queue_pair import KEY, LIMIT, RUN, QueuePair

WINDOW = 8


def payload_of(number: int, elements: int) -> torch.Tensor:
    return torch.arange(number, number + elements, dtype=torch.float32)


def produce(url: str, incarnation: str, step: str, end: str, elements: str) -> None:
    """Puts the messages of `step` on up to `end`, and serves them until it is killed."""
    queues = ShmQueues(RUN, int(incarnation), url, QueueOptions())
    line = QueuePair(queues, queues)
    print(queues.endpoint, flush=True)
    for number in range(4 * int(step), int(end)):
        payload = payload_of(number, int(elements))
        queues.outbound(KEY).put(line.message(number, payload, incarnation=int(incarnation)))
    queues.pump(3 * LIMIT)
    while queues.outbound(KEY).depth().retained:
        queues.pump(3 * LIMIT)


def consume(url: str, incarnation: str, endpoint: str) -> None:
    """Takes messages and prints their numbers until it is killed."""
    queues = ShmQueues(RUN, int(incarnation), url, QueueOptions())
    queues.connect({KEY: endpoint})
    while (message := queues.inbound(KEY).take(LIMIT)) is not None:
        print(message.number, flush=True)


@contextmanager
def process(fork_server: ForkServer, function: str, *arguments: object) -> Iterator[ForkedCommand]:
    with closing(fork_server.call(f"support.shm_processes:{function}", *arguments)) as started:
        try:
            yield started
        finally:
            started.kill()
