"""Queues of two workers over a Redis server, and what tests do with them."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import torch

from stageline.broker.queues.ends import QueueOptions
from stageline.broker.queues.secrets import QueueSecrets
from stageline.broker.transports.redis.queues import RedisQueues
from stageline.pipeline.program import Queue
from support.fork_server import ForkedCommand, ForkServer
from support.queue_pair import KEY, RUN, QueuePair, wait_for
from support.sealed import sealing_since

STREAM = "stageline:{line-run}:forward-1"


SEALS = [False]  # whether the queues of these tests are sealed: the fixture `each_form` sets it


def worker(stack: ExitStack, incarnation: int, url: str, since: int = 0, **changed: Any) -> RedisQueues:
    secrets = sealing_since(since) if SEALS[0] else QueueSecrets()
    terms = QueueOptions(**{"patience": 20.0, "secrets": secrets, **changed})
    return stack.enter_context(closing(RedisQueues(RUN, incarnation, url, terms, since=since)))


def use(queues: RedisQueues) -> None:
    """Until what is wrong with the server is raised."""
    wait_for(lambda: queues.pump(0.01))


def line_at(stack: ExitStack, url: str, key: Queue = KEY, **terms: Any) -> QueuePair:
    return QueuePair(worker(stack, 1, url, **terms), worker(stack, 2, url, **terms), key)


@contextmanager
def producer_process(
    fork_server: ForkServer, url: str, incarnation: int, step: int, end: int
) -> Iterator[ForkedCommand]:
    arguments = url, incarnation, step, end, *(["sealed"] if SEALS[0] else [])
    with closing(fork_server.call("support.redis_producer:main", *arguments)) as process:
        try:
            yield process
        finally:
            process.kill()


def payloads(count: int, elements: int = 50) -> list[torch.Tensor]:
    return [torch.randn(elements) for _ in range(count)]


def put_all(line: QueuePair, tensors: list[torch.Tensor], first: int = 0) -> None:
    for number, tensor in enumerate(tensors, start=first):
        line.outbound.put(line.message(number, tensor))


def take_all(line: QueuePair, tensors: list[torch.Tensor]) -> None:
    """Takes a message for each of them, in order, and checks that it is the one."""
    for tensor in tensors:
        assert torch.equal(line.take().payload, tensor)


def acl(client: Any, *rules: str) -> None:
    """Makes `client`'s server know a user with these rights."""
    client.execute_command("ACL", "SETUSER", "trainer", "reset", "on", ">secret", *rules)
