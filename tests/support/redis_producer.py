"""A worker process that puts the messages of `queue_pair.py` into Redis from a step on, until it is killed."""

from stageline.broker.queues.ends import QueueOptions
from stageline.broker.queues.secrets import QueueSecrets
from stageline.broker.transports.redis.queues import RedisQueues
from support.queue_pair import KEY, RUN, QueuePair
from support.sealed import sealing_since

LIFE = 60.0  # seconds after which it ends if the test that should have killed it is gone


def main(url: str, incarnation: str, step: str, end: str, *form: str) -> None:
    options = QueueOptions(secrets=sealing_since(0) if form == ("sealed",) else QueueSecrets())
    queues = RedisQueues(RUN, int(incarnation), url, options)
    line = QueuePair(queues, queues)
    for number in range(4 * int(step), int(end)):
        queues.outbound(KEY).put(line.message(number, incarnation=int(incarnation)))
    queues.pump(LIFE)
