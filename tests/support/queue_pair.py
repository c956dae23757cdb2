"""A line is one queue between two workers, over each transport: what the queue tests are run on."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import torch

from stageline.broker.codec.message import Flow, Message, messages_per_step
from stageline.broker.queues.base import Inbound, Outbound, QueueKey, Queues
from stageline.broker.queues.ends import QueueOptions
from stageline.broker.queues.log import RetentionBudget
from stageline.broker.queues.memory import MemoryQueues
from stageline.broker.transports.base import Backend
from stageline.broker.transports.redis.queues import RedisQueues
from stageline.pipeline.addresses import Reach
from stageline.pipeline.tree import Tree
from support.transports import queues_url, registered

KEY = QueueKey(Flow.FORWARD, 1)
RUN = "line-run"
Found = TypeVar("Found")
LIMIT = 20.0  # seconds that a test waits for what must come


@dataclass
class QueuePair:
    """Both ends of the queue `key`, and the workers' queues that they are of (the same for memory)."""

    producer: Queues
    consumer: Queues
    microbatches: int
    key: QueueKey = KEY

    @property
    def outbound(self) -> Outbound:
        return self.producer.outbound(self.key)

    @property
    def inbound(self) -> Inbound:
        return self.consumer.inbound(self.key)

    @property
    def kept_by_server(self) -> bool:
        """Whether a message that is wanted again comes from a server, not from its producer."""
        return isinstance(self.producer, RedisQueues)

    def message(self, number: int, payload: Tree = None, **others: Any) -> Message:
        """Message `number` of the queue; its payload is its number unless another is given."""
        step, microbatch = divmod(number, messages_per_step(self.key.flow, self.microbatches))
        content = torch.full((3,), float(number)) if payload is None else payload
        fields = {"run": RUN, "flow": self.key.flow, "stage": self.key.stage, "incarnation": 1, "sequence": number}
        return Message(**{**fields, "step": step, "microbatch": microbatch, **others}, payload=content)

    def put(self, *numbers: int) -> None:
        for number in numbers:
            self.outbound.put(self.message(number))

    def take(self) -> Message:
        """The next message, which must come."""
        return wait_for(self._look)

    def take_numbers(self, count: int) -> list[int]:
        return [self.take().sequence for _ in range(count)]

    def settle(self) -> None:
        """Lets both ends exchange what they have to report."""
        for _ in range(3):
            self.consumer.pump(0.01)
            self.producer.pump(0.01)
        for end in (self.consumer, self.producer):
            assert not isinstance(end, RedisQueues) or end.flush(LIMIT)

    def close(self) -> None:
        self.consumer.close()
        self.producer.close()

    def _look(self) -> Message | None:
        self.producer.pump(0)
        return self.inbound.take(0.01)


def wait_for(look: Callable[[], Found | None]) -> Found:
    until = monotonic() + LIMIT
    while (found := look()) is None:
        assert monotonic() < until, "what was waited for has not come"
    return found


def memory_line(
    folder: Path, *, microbatches: int = 4, window: int = 8, retain_bytes: int = 2**40, key: QueueKey = KEY
) -> QueuePair:
    queues = MemoryQueues(RUN, microbatches, RetentionBudget(retain_bytes), {key: window})
    return QueuePair(queues, queues, microbatches, key)


def line_over(
    backend: Backend, folder: Path, *, microbatches: int = 4, window: int = 8, key: QueueKey = KEY, **retention: Any
) -> QueuePair:
    terms = QueueOptions(microbatches=microbatches, windows={key: window})
    retaining = replace(terms, **{"spill_bytes": 0, "patience": 0.0, **retention})
    url, folders = queues_url(backend), (folder / "0", folder / "1")
    for each in folders:
        each.mkdir()
    producer = backend.open_queues(url, RUN, 1, retaining, folder=folders[0])
    consumer = backend.open_queues(url, RUN, 2, terms, folder=folders[1])
    consumer.connect({key: producer.endpoint})
    return QueuePair(producer, consumer, microbatches, key)


LINES: dict[str, Callable[..., QueuePair]] = {
    scheme: memory_line if backend.reach is Reach.PROCESS else partial(line_over, backend)
    for scheme, backend in registered().items()
}
