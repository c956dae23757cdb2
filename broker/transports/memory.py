"""Transport `memory://`: all workers of a run in one process."""

from collections.abc import Mapping
from typing import ClassVar

from stageline.pipeline.addresses import Reach, register

from .base import Backend


class MemoryBackend(Backend):
    """Queues in memory: `MemoryQueues` of `broker/queues/memory.py`, which all workers of the process share."""

    schemes: ClassVar[Mapping[str, str]] = {"memory": "memory://"}
    reach = Reach.PROCESS

    def hides(self, url: str) -> bool:
        """Return False: such an address has no password."""
        return False


register(MemoryBackend())
