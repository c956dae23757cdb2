"""A worker process that produces the messages of `queue_pair.py` from a step on, until it is killed."""

from time import monotonic

from stageline.broker.queues.ends import QueueOptions
from stageline.broker.transports.sockets.zeromq_queues import ZeroMQQueues
from support.queue_pair import KEY, QueuePair

LIFE = 60.0  # seconds after which it ends if the test that should have killed it is gone


def main(url: str, incarnation: str, step: str, end: str) -> None:
    queues = ZeroMQQueues("line-run", int(incarnation), url, QueueOptions())
    line = QueuePair(queues, queues)
    print(queues.endpoint, flush=True)
    for number in range(4 * int(step), int(end)):
        queues.outbound(KEY).put(line.message(number, incarnation=int(incarnation)))
    until = monotonic() + LIFE
    while monotonic() < until:
        queues.pump(LIFE)
