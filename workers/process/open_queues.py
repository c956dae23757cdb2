"""Opening of a worker's queues at the plan's `queues.url`, and the choice of where their sockets go."""

import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from stageline.broker.control.messages import Assigned
from stageline.broker.keys.pairs import KeyPair
from stageline.broker.queues.base import WorkerQueues
from stageline.broker.queues.ends import QueueOptions
from stageline.broker.queues.secrets import secrets_of
from stageline.broker.transports.base import backend_of
from stageline.pipeline.addresses import EVERY_INTERFACE, dialled, host_of
from stageline.pipeline.plan import Plan
from stageline.pipeline.program import Program
from stageline.workers.control.party_trust import PartiesDiffer

_ANY_PORT = 9  # where an address names none


def open_queues(
    plan: Plan,
    program: Program,
    assigned: Assigned,
    folder: Path,
    waiting: Callable[[str], None],
    *,
    pair: KeyPair | None,
    wakes_at_once: bool = False,
) -> WorkerQueues:
    """Return the queues of the worker that `assigned` names.

    Args:
        plan: Names the address of the queues and the bytes that may be retained.
        program: Has the queues as data.
        assigned: Names the worker and the run.
        folder: Folder for sockets.
        waiting: Called with the reason for which a `put` waits.
        pair: Pair by which the broker knows this process; None for a broker that other machines do not reach.
        wakes_at_once: See `QueueOptions`.

    Raises:
        PartiesDiffer: The run has parties, and the place has no secrets.
        BrokerError: The address is taken, or the server cannot be reached or is not fit.
    """
    url = plan.queues.url
    if pair is not None and plan.parties is not None and not (assigned.keys.links and assigned.keys.salt):
        raise PartiesDiffer(f"worker {assigned.index} has no secrets for its queues: use another broker")
    options = QueueOptions(
        ahead=sum(queue.window or 0 for queue in program.queues.values()),
        retain_bytes=plan.queues.retain_bytes,
        waiting=waiting,
        secrets=secrets_of(program.queues.values(), assigned),
        is_padded=plan.queues.padding == "padme",
        wakes_at_once=wakes_at_once,
    )
    return backend_of(url).open_queues(
        url, assigned.run, assigned.incarnation, options, folder=folder, since=assigned.since
    )


def reachable(endpoint: str, broker: str) -> str:
    """Return `endpoint` as other machines can dial it.

    An endpoint that is bound to all interfaces is named by the address that this machine has towards the broker.
    """
    return dialled(endpoint, address_towards(broker)) if host_of(endpoint) in EVERY_INTERFACE else endpoint


def address_towards(broker: str) -> str:
    """Return the address that this machine has towards `broker`.

    A broker that is met at a server is taken to be there: the result is the address towards the server.
    """
    there = urlsplit(broker)
    if not there.hostname:
        return "127.0.0.1"
    found = socket.getaddrinfo(there.hostname, there.port or _ANY_PORT, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing: it only chooses the way
        mine = str(probe.getsockname()[0])
    return f"[{mine}]" if ":" in mine else mine
