"""redis-py alone and the queues over Redis: a stream for each direction, CRC-32 at both ends.

redis-py hands out the bytes it received; they become a tensor that may not be written to, which costs nothing.
"""

import warnings
import zlib
from types import TracebackType
from typing import Self, cast

import redis
import torch
from torch import Tensor

from broker.message import Flow, Message
from broker.queue import QueueKey
from broker.queues.redis import RedisQueues

from ..processes import PATIENCE

ROUND = 8  # messages after which those received are trimmed
WINDOW = 16  # messages that our queues read ahead
_KEYS = (QueueKey(Flow.FORWARD, 1), QueueKey(Flow.BACKWARD, 0))


class BareRedisWire:
    """Each end adds to one stream and reads from the other, a command at a time."""

    def __init__(self, url: str, end: int, nbytes: int) -> None:
        self._client = redis.Redis.from_url(url, socket_timeout=PATIENCE, protocol=2)
        self._out, self._in = ("there", "back")[:: 1 - 2 * end]
        self._sent = self._received = 0

    def send(self, tensor: Tensor) -> None:
        self._sent += 1
        data = tensor.numpy().data.cast("B")
        self._client.xadd(self._out, {"crc": zlib.crc32(data), "data": data}, id=f"{self._sent}-1")

    def receive(self) -> Tensor:
        after = f"{self._received}-1"
        [[_, [[_, fields]]]] = self._client.xread({self._in: after}, count=1, block=int(1000 * PATIENCE))
        data = fields[b"data"]
        assert zlib.crc32(data) == int(fields[b"crc"])
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


class OurRedisWire:
    """The queues of two workers."""

    def __init__(self, url: str, end: int, nbytes: int) -> None:
        self._queues = RedisQueues(
            "wire", end + 1, url, microbatches=ROUND, windows=dict.fromkeys(_KEYS, WINDOW), patience=PATIENCE
        )
        self._out, self._in = (self._queues.outbound(_KEYS[end]), self._queues.inbound(_KEYS[1 - end]))
        self._end = end
        self._sent = 0

    def send(self, tensor: Tensor) -> None:
        key, (step, microbatch) = self._out.key, divmod(self._sent, ROUND)
        self._out.put(Message("wire", key.flow, step, microbatch, key.stage, self._end + 1, self._sent, tensor))
        self._sent += 1
        if self._sent % ROUND == 0:
            depth = self._out.depth()
            self._out.trim((self._sent - depth.ready - depth.in_flight) // ROUND)

    def receive(self) -> Tensor:
        message = self._in.take(PATIENCE)
        assert message is not None, "the other end is gone"
        return cast(Tensor, message.payload)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._queues.close()
