"""Opens a worker's queues by what the plan's `queues.url` says."""

import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from stageline.broker.control.open import REDIS
from stageline.broker.control.protocol import Assigned
from stageline.broker.queues.base import QueueKey, Queues, Trouble
from stageline.broker.queues.ends import QueueOptions
from stageline.broker.queues.zeromq.queues import ZeroMQQueues
from stageline.workers.runtime.job import Job

if TYPE_CHECKING:
    from stageline.broker.queues.redis.queues import RedisQueues

_REDIS_PORT = 6379  # where an address names none


class WorkerQueues(Queues, Protocol):
    """The queue ends of one worker among several processes."""

    @property
    def endpoint(self) -> str:
        """Where other workers find these ends, or a name for where everybody meets."""

    @property
    def trouble(self) -> Trouble | None:
        """What keeps messages from moving, if it is known. For any thread."""

    def connect(self, peers: Mapping[QueueKey, str]) -> None:
        """Take each of these queues from its producer's endpoint, from now on."""

    def ring(self) -> None:
        """Lets whoever waits in `take` or `pump` return early. For any thread, and for signal handlers."""


def open_queues(job: Job, assigned: Assigned, folder: Path, waiting: Callable[[str], None]) -> WorkerQueues:
    """The queues of the worker that `assigned` names. Sockets go into `folder`; `waiting` hears why a `put` waits.

    Raises `BrokerError`: the address is taken, the server cannot be reached or is not fit.
    """
    url = job.plan.queues.url
    return _kind(url, assigned)(
        assigned.run,
        assigned.incarnation,
        f"ipc://{folder}/queues" if url.startswith("ipc://") else url,
        QueueOptions(
            microbatches=job.schedule.microbatches,
            windows=job.windows(),
            local=local_queues(job, assigned.index),
            retain_bytes=job.plan.queues.retain_bytes,
            waiting=waiting,
        ),
    )


def _kind(url: str, assigned: Assigned) -> "Callable[..., RedisQueues | ZeroMQQueues]":
    if not url.startswith(REDIS):
        return ZeroMQQueues
    from stageline.broker.queues.redis.queues import RedisQueues  # takes time to load

    return partial(RedisQueues, since=assigned.since)


def reachable(endpoint: str, broker: str) -> str:
    """`endpoint` as others can dial it: one that is bound to all interfaces is named by the address that this machine
    has towards the broker."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or host not in ("0.0.0.0", "[::]", "*"):  # noqa: S104  # looked for, not bound
        return endpoint
    return f"tcp://{_address_towards(broker)}:{port}"


def _address_towards(broker: str) -> str:
    """The broker may be met at a Redis server: then it is this machine's address towards that."""
    there = urlsplit(broker)
    if not there.hostname:
        return "127.0.0.1"
    found = socket.getaddrinfo(there.hostname, there.port or _REDIS_PORT, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing: it only chooses the way
        mine = str(probe.getsockname()[0])
    return f"[{mine}]" if ":" in mine else mine


def local_queues(job: Job, worker: int) -> set[QueueKey]:
    """The queues that begin and end on this worker."""
    mine = job.plan.workers[worker].stages
    return {key for key in job.route.queues() if key.stage in mine and job.route.producer(key) in mine}
