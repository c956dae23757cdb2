"""Queues of two workers over real sockets, with or without a faulty network between them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

from stageline.broker.queues.ends import QueueOptions
from stageline.broker.transports.sockets.zeromq_queues import ZeroMQQueues
from support.fork_server import ForkedCommand, ForkServer
from support.proxy import Proxy
from support.queue_pair import KEY, RUN, QueuePair

LOOPBACK = "tcp://127.0.0.1:0"


def worker(stack: ExitStack, incarnation: int, url: str = LOOPBACK, **changed: Any) -> ZeroMQQueues:
    terms = QueueOptions(**{"patience": 0.0, **changed})
    return stack.enter_context(closing(ZeroMQQueues(RUN, incarnation, url, terms)))


def line_of(producer: ZeroMQQueues, consumer: ZeroMQQueues) -> QueuePair:
    consumer.connect({KEY: producer.endpoint})
    return QueuePair(producer, consumer)


@contextmanager
def producer_process(
    fork_server: ForkServer, url: str, incarnation: int, step: int, end: int
) -> Iterator[tuple[str, ForkedCommand]]:
    with closing(fork_server.call("support.producer_process:main", url, incarnation, step, end)) as process:
        try:
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


def proxied(stack: ExitStack) -> tuple[QueuePair, Proxy, Callable[[], None]]:
    """A line, a proxy on its way, and what connects its consumer to that."""
    producer, consumer = worker(stack, 1), worker(stack, 2)
    proxy = stack.enter_context(Proxy(producer.endpoint))
    return QueuePair(producer, consumer), proxy, lambda: consumer.connect({KEY: proxy.endpoint})
