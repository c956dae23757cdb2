"""A line is one queue between two workers, over each transport: what the queue tests are run on."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import torch

from stageline.broker.codec.message import Message
from stageline.broker.queues.base import Inbound, Outbound, Queues
from stageline.broker.queues.ends import QueueOptions
from stageline.broker.queues.log import RetentionBudget
from stageline.broker.queues.memory import MemoryQueues
from stageline.broker.queues.secrets import QueueSecrets
from stageline.broker.transports.base import Backend
from stageline.broker.transports.redis.queues import RedisQueues
from stageline.pipeline.addresses import Reach
from stageline.pipeline.program import Per, Queue
from stageline.pipeline.tree import Tree
from support.keyed import KEYS, OTHER_KEYS
from support.sealed import sealing_since
from support.transports import queues_url, registered

RUN = "line-run"
Found = TypeVar("Found")
LIMIT = 45.0  # seconds that a test waits for what must come: a damaged length may cost two silences of a connection


def queue_of(name: str, *, count: int = 4, window: int | None = 8, per: Per = Per.MICROBATCH) -> Queue:
    """A queue from one worker to the next, as data."""
    return Queue(name=name, producer=0, consumer=1, source=0, target=1, per=per, count=count, window=window)


PLAIN = QueueOptions()
KEYED = QueueSecrets(curve=KEYS)
KEY, BACK = queue_of("forward-1"), queue_of("backward-0")


@dataclass
class QueuePair:
    """Both ends of the queue `key`, and the workers' queues that they are of (the same for memory)."""

    producer: Queues
    consumer: Queues
    key: Queue = KEY

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
        content = torch.full((3,), float(number)) if payload is None else payload
        fields = {"run": RUN, "queue": self.key.name, "number": number, "incarnation": 1}
        return Message(**{**fields, **others}, payload=content)

    def put(self, *numbers: int) -> None:
        for number in numbers:
            self.outbound.put(self.message(number))

    def take(self) -> Message:
        """The next message, which must come."""
        return wait_for(self._look)

    def take_numbers(self, count: int) -> list[int]:
        return [self.take().number for _ in range(count)]

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


def memory_line(folder: Path, *, key: Queue = KEY, retain_bytes: int = 2**40) -> QueuePair:
    queues = MemoryQueues(RUN, RetentionBudget(retain_bytes))
    return QueuePair(queues, queues, key)


def line_over(
    backend: Backend,
    folder: Path,
    *,
    key: Queue = KEY,
    terms: QueueOptions = PLAIN,
    others: QueueSecrets | None = None,
    **retention: Any,
) -> QueuePair:
    """A producer with the secrets of `terms`, and a consumer with those, or `others`."""
    retaining = replace(terms, **{"spill_bytes": 0, "patience": 0.0, **retention})
    url, folders = queues_url(backend), (folder / "0", folder / "1")
    for each in folders:
        each.mkdir()
    producer = backend.open_queues(url, RUN, 1, retaining, folder=folders[0])
    consuming = replace(terms, secrets=others or terms.secrets)
    consumer = backend.open_queues(url, RUN, 2, consuming, folder=folders[1])
    consumer.connect({key: producer.endpoint})
    return QueuePair(producer, consumer, key)


LINES: dict[str, Callable[..., QueuePair]] = {
    scheme: memory_line if backend.reach is Reach.PROCESS else partial(line_over, backend)
    for scheme, backend in registered().items()
}
LINES["relay"] = partial(
    line_over, registered()["relay"], terms=QueueOptions(secrets=KEYED), others=QueueSecrets(curve=OTHER_KEYS)
)
LINES["tcp with keys"] = partial(line_over, registered()["tcp"], terms=QueueOptions(secrets=KEYED))
LINES["redis, sealed"] = partial(line_over, registered()["redis"], terms=QueueOptions(secrets=sealing_since(0)))
