"""Which entries a consumer reads, and what it announces."""

from contextlib import ExitStack, closing
from time import monotonic

import pytest

from stageline.broker.errors import QueueGap
from support.queue_pair import KEY, QueuePair, queue_of, wait_for
from support.redis_queues import STREAM, line_at, worker
from support.redis_server import shared_server

pytestmark = pytest.mark.usefixtures("each_form")


def at_step(stack: ExitStack, url: str, step: int) -> None:
    """A line whose queue is trimmed to `step`, and whose workers are gone then."""
    with ExitStack() as workers:
        line = line_at(workers, url)
        line.put(*range(4 * step + 6))
        line.take_numbers(4 * step + 4)
        line.outbound.trim(step)
        line.settle()


@pytest.mark.parametrize("first", ["producer", "consumer"])
def test_a_run_that_goes_back_finds_a_queue_that_was_trimmed_further(stack: ExitStack, hasty: None, first: str) -> None:
    """The announcement of the former producer (messages from step 4 on) must not end the consumer that comes first."""
    url = shared_server().own_database()
    at_step(stack, url, 4)
    producer = worker(stack, 3, url, since=2) if first == "producer" else None
    if producer is not None:
        producer.outbound(KEY).trim(2)
    consumer = worker(stack, 4, url, since=2)
    consumer.inbound(KEY).rewind(2)
    until = monotonic() + 0.5
    while monotonic() < until:
        assert consumer.inbound(KEY).take(0.1) is None
    line = QueuePair(producer or worker(stack, 3, url, since=2), consumer)
    line.outbound.trim(2)
    for number in range(8, 40):
        line.outbound.put(line.message(number, incarnation=3))
    assert line.take_numbers(32) == list(range(8, 40))
    line.settle()


def test_without_going_back_a_queue_that_was_trimmed_further_is_an_error(stack: ExitStack, hasty: None) -> None:
    url = shared_server().own_database()
    at_step(stack, url, 4)
    consumer = worker(stack, 4, url)
    consumer.inbound(KEY).rewind(2)
    with pytest.raises(QueueGap, match="message 8 of forward-1 is no longer available"):
        wait_for(lambda: consumer.inbound(KEY).take(0.1))


def test_a_producer_does_not_run_ahead_of_its_consumers_window(stack: ExitStack) -> None:
    server = shared_server()
    database = server.own_number()
    line = line_at(stack, server.url_of(database), queue_of("forward-1", window=3))
    line.settle()
    line.put(*range(20))
    client = stack.enter_context(closing(server.client(database)))
    lengths = []
    for number in range(20):
        assert line.take().number == number
        lengths.append(client.xlen(STREAM) - number)
    assert max(lengths) <= 1 + 3
