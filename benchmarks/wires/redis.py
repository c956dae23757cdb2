"""redis-py alone and the queues over Redis: a stream for each direction, CRC-32 at both ends.

redis-py hands out the bytes it received; they become a tensor that may not be written to, which costs nothing.
"""

import logging
import warnings
from types import TracebackType
from typing import Self

import redis
import structlog
import torch
from torch import Tensor
from zlib_ng.zlib_ng import crc32

from benchmarks.measuring.processes import PATIENCE
from stageline.broker.queues import delivery as looking
from stageline.broker.queues.ends import QueueOptions
from stageline.broker.transports.redis.queues import RedisQueues
from stageline.workers.disk.memory import keep_freed_memory

from .ours import ROUND, TERMS, OurWire


class BareRedisWire:
    """Each end adds to one stream and reads from the other, a command at a time."""

    def __init__(self, url: str, end: int, nbytes: int) -> None:
        self._client = redis.Redis.from_url(url, socket_timeout=PATIENCE, protocol=2)
        self._out, self._in = ("there", "back")[:: 1 - 2 * end]
        self._sent = self._received = 0

    def send(self, tensor: Tensor) -> None:
        self._sent += 1
        data = tensor.numpy().data.cast("B")
        self._client.xadd(self._out, {"crc": crc32(data), "data": data}, id=f"{self._sent}-1")

    def receive(self) -> Tensor:
        after = f"{self._received}-1"
        [[_, [[_, fields]]]] = self._client.xread({self._in: after}, count=1, block=int(1000 * PATIENCE))
        data = fields[b"data"]
        assert crc32(data) == int(fields[b"crc"])
        self._received += 1
        if self._received % ROUND == 0:
            self._client.xtrim(self._in, minid=self._received, approximate=False)
        with warnings.catch_warnings(action="ignore"):
            return torch.frombuffer(data, dtype=torch.float32)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()


def open_sleeping_wire(url: str, end: int, nbytes: int) -> OurWire:
    """The same without looking for messages: each wait sleeps at once. For a process of its own."""
    looking.LOOK = 0.0
    return open_wire(url, end, nbytes)


def open_wire(url: str, end: int, nbytes: int) -> OurWire:
    """Our queues over the server at `url`."""
    return wire_over(url, end, TERMS)


def wire_over(url: str, end: int, terms: QueueOptions) -> OurWire:
    """Our queues with these options; their processes keep memory as workers do."""
    # Else each warns that the server keeps nothing on disk, as it is meant to.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    keep_freed_memory()
    return OurWire(RedisQueues("wire", end + 1, url, terms), end)
