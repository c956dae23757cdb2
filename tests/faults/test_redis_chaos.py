"""One queue over a real Redis server while everything around it breaks, in an order drawn from a seed.

Two workers, a checkpoint that grows, and at any moment: connections cut, the server killed and restarted (with what it
has, with what it once had, with nothing), emptied, frozen; either worker replaced, its zombie going on for a while.
"""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress

import pytest
import torch

from stageline.broker.errors import Fenced
from stageline.broker.queues.ends import QueueOptions
from stageline.broker.queues.secrets import QueueSecrets
from stageline.broker.transports.redis import connection as redis_connection
from stageline.broker.transports.redis import sender_thread as sender_module
from stageline.broker.transports.redis import threads
from stageline.broker.transports.redis.queues import RedisQueues
from support.proxy import Proxy
from support.queue_pair import RUN, QueuePair, wait_for
from support.redis_server import RedisServer
from support.sealed import sealing_since

MICROBATCHES = 4
END = 200


class Chaos:
    """The line, its server, and what may happen to them."""

    def __init__(self, seed: int, stack: ExitStack, *, seals: bool = False) -> None:
        self.seals = seals
        self.dice = random.Random(seed)
        self.fired: Counter[str] = Counter()
        self.checkpoint = 0
        self.put = self.taken = 0
        self._incarnation = 0
        self._stack = stack
        self._server = stack.enter_context(RedisServer(appendonly="no"))
        self._proxy = stack.enter_context(Proxy(f"tcp://127.0.0.1:{self._server.port}"))
        self._zombies: list[tuple[QueuePair, int]] = []
        self._saved = False
        self.line = QueuePair(self._worker(), self._worker())

    def go(self) -> None:
        """Until all messages have been taken, each as it was put."""
        while self.taken < END:
            match self.dice.choices(["put", "take", "fault"], [10, 10, self.dice.choice([0, 1])])[0]:
                case "put" if self.put < min(END, self.checkpoint * MICROBATCHES + 60):
                    self._put(self.line, self.put)
                    self.put += 1
                case "take" if self.taken < self.put:
                    self._take()
                case "fault":
                    self._fault()
                case _:
                    self._grow()

    def cut(self) -> None:
        self._proxy.cut()

    def flush(self) -> None:
        with closing(self._server.client()) as client:
            client.flushall()

    def save(self) -> None:
        with closing(self._server.client()) as client:
            client.save()
        self._saved = True

    def restart(self) -> None:
        """It comes back with what was saved last, if anything ever was."""
        self._server.kill()
        self._server.start()

    def freeze(self) -> None:
        self._server.freeze()
        for number in range(self.put, min(self.put + 3, END)):
            self._put(self.line, number)
            self.put = number + 1
        if self.dice.random() < 0.5:
            wait_for(lambda: self.line.producer.pump(0.01) or self.line.producer.trouble)
        self._server.thaw()

    def replace_producer(self) -> None:
        self._zombies.append((self.line, self.put))
        self.line = QueuePair(self._worker(), self.line.consumer)
        self.put = self.checkpoint * MICROBATCHES

    def replace_consumer(self) -> None:
        self.line = QueuePair(self.line.producer, self._worker())
        self.line.inbound.rewind(self.checkpoint)
        self.taken = self.checkpoint * MICROBATCHES

    def wake_zombie(self) -> None:
        """A producer that does not know yet that it has been replaced puts a few more."""
        if self._zombies:
            line, put = self._zombies.pop()
            with suppress(Fenced):
                for number in range(put, min(put + 5, END)):
                    self._put(line, number)
                line.producer.flush(0.05)

    def _fault(self) -> None:
        faults = [self.cut, self.flush, self.save, self.restart, self.freeze]
        fault = self.dice.choice([*faults, self.replace_producer, self.replace_consumer, self.wake_zombie])
        fault()
        self.fired[fault.__name__] += 1

    def _put(self, line: QueuePair, number: int) -> None:
        size = 400_000 if number % 37 == 5 else 5
        line.outbound.put(line.message(number, torch.full((size,), float(number))))

    def _take(self) -> None:
        message = self.line.take()
        assert message.number == self.taken
        assert bool((message.payload == float(self.taken)).all())
        self.taken += 1

    def _grow(self) -> None:
        """Both have done some steps more, and have snapshots of them."""
        done = min(self.put, self.taken) // MICROBATCHES
        if done > self.checkpoint:
            self.checkpoint = self.dice.randint(self.checkpoint + 1, done)
            self.line.outbound.trim(self.checkpoint)

    def _worker(self) -> RedisQueues:
        self._incarnation += 1
        url = f"redis://{self._proxy.endpoint.removeprefix('tcp://')}"
        terms = QueueOptions(secrets=sealing_since(0) if self.seals else QueueSecrets())
        queues = RedisQueues(RUN, self._incarnation, url, terms)
        self._stack.callback(lambda: _close(queues))
        return queues


def _close(queues: RedisQueues) -> None:
    with suppress(Fenced):
        queues.close()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sender_module, "IDLE", 0.05)
    monkeypatch.setattr(threads, "LONGEST_RETRY", 0.1)
    monkeypatch.setattr(redis_connection, "SILENCE", 0.3)
    return


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("seals", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_whatever_happens_each_message_is_taken_once_and_in_order(hasty: None, seed: int, seals: bool) -> None:
    with ExitStack() as stack:
        chaos = Chaos(seed, stack, seals=seals)
        chaos.go()
        assert sum(chaos.fired.values()) > 3
