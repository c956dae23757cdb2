"""Opens a worker's queues at the plan's `queues.url`, and chooses where their sockets go."""

import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import zmq

from stageline.broker.control.open import REDIS
from stageline.broker.control.protocol import Assigned
from stageline.broker.queues.base import WorkerQueues
from stageline.broker.queues.ends import QueueOptions
from stageline.broker.queues.zeromq.queues import ZeroMQQueues
from stageline.pipeline.errors import StagelineError
from stageline.workers.runtime.job import Job

_REDIS_PORT = 6379  # where an address names none
# What a worker that `train` started adds to the folder for temporary files: the run's folder, its own in it, a socket.
_DEEPEST = "stageline-xxxxxxxx/stageline-xxxxxxxx/queues"


class TooDeep(StagelineError):
    """The folder for temporary files has too long a path for sockets in it."""


def open_queues(job: Job, assigned: Assigned, folder: Path, waiting: Callable[[str], None]) -> WorkerQueues:
    """The queues of the worker that `assigned` names. Sockets go into `folder`; `waiting` is called
    with the reason for which a `put` waits.

    Raises `BrokerError`: the address is taken, the server cannot be reached or is not fit.
    """
    url = job.plan.queues.url
    options = QueueOptions(
        microbatches=job.schedule.microbatches,
        windows=job.windows(),
        local=job.program.local(assigned.index),
        retain_bytes=job.plan.queues.retain_bytes,
        waiting=waiting,
        key=assigned.queue_key,
    )
    if url.startswith(REDIS):
        from stageline.broker.queues.redis.queues import RedisQueues  # takes time to load

        return RedisQueues(assigned.run, assigned.incarnation, url, options, since=assigned.since)
    bound = f"ipc://{folder}/queues" if url.startswith("ipc://") else url
    return ZeroMQQueues(assigned.run, assigned.incarnation, bound, options)


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


def longest_socket_path() -> int:
    """The bytes of the longest path that a socket gets; the system allows about a hundred."""
    return len(os.fsencode(os.path.join(tempfile.gettempdir(), _DEEPEST)))


def demand_short_socket_paths() -> None:
    """Raises `TooDeep` if a socket cannot be made in the folder for temporary files."""
    if longest_socket_path() > zmq.IPC_PATH_MAX_LEN:
        raise TooDeep(
            f"the path of the folder for temporary files, {tempfile.gettempdir()}, is too long for sockets: they would "
            f"have paths of {longest_socket_path()} bytes, {zmq.IPC_PATH_MAX_LEN} are the most. Set TMPDIR to a "
            f"shorter folder"
        )
