"""A worker process that puts the messages of `queue_pair.py` into Redis from a step on, until it is killed.

python redis_producer.py URL INCARNATION STEP END
"""

import sys

from stageline.broker.queues.ends import QueueOptions
from stageline.broker.queues.redis.queues import RedisQueues
from support.queue_pair import KEY, RUN, QueuePair


def main(url: str, incarnation: int, step: int, end: int) -> None:
    queues = RedisQueues(RUN, incarnation, url, QueueOptions(microbatches=4, windows={}))
    line = QueuePair(queues, queues, 4)
    for number in range(4 * step, end):
        queues.outbound(KEY).put(line.message(number, incarnation=incarnation))
    queues.pump(1000)


if __name__ == "__main__":
    main(sys.argv[1], *(int(word) for word in sys.argv[2:]))
