"""A worker process that produces the messages of `queue_pair.py` from a step on, until it is killed or its input ends.

python producer_process.py URL INCARNATION STEP END
"""

import sys
import threading

from stageline.broker.queues.ends import QueueOptions
from stageline.broker.queues.zeromq.queues import ZeroMQQueues
from support.queue_pair import KEY, QueuePair


def main(url: str, incarnation: int, step: int, end: int) -> None:
    queues = ZeroMQQueues("line-run", incarnation, url, QueueOptions(microbatches=4, windows={}))
    line = QueuePair(queues, queues, 4)
    print(queues.endpoint, flush=True)
    for number in range(4 * step, end):
        queues.outbound(KEY).put(line.message(number, incarnation=incarnation))
    done = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), done.set(), queues.ring())).start()
    while not done.is_set():
        queues.pump(10)
    queues.close()


if __name__ == "__main__":
    main(sys.argv[1], *(int(word) for word in sys.argv[2:]))
