"""`Line`'s broker=: the addresses at which workers on other machines can join, and what to run there."""

import socket

from stageline.broker.transports.open import REDIS
from stageline.pipeline.addresses import EVERY_INTERFACE, fault, host_of, masked

_SCHEMES = ("tcp", "redis", "rediss", "unix")


def check_address(broker: str) -> None:
    """Raises `ValueError` for what no worker on another machine could dial."""
    found = fault(broker, _SCHEMES)
    if found is None and broker.startswith("tcp://") and broker.rpartition(":")[2].strip("0") in ("", "*"):
        found = "the port must be one that the other machines can be told"
    if found is None and broker.startswith("tcp://") and not _is_own(host_of(broker)):
        raise ValueError(
            f"broker = {broker!r}: this machine has no address {host_of(broker)}, and the broker listens on it. Write "
            f"tcp://0.0.0.0:{broker.rpartition(':')[2]} to listen at all that it has"
        )
    if found is not None:
        raise ValueError(
            f"broker = {masked(broker)!r} is not an address that workers on other machines can reach: "
            f"{found or 'it is of another kind'}. Write tcp://0.0.0.0:7000 to listen there, or redis://host:6379/0"
        )


def _is_own(host: str) -> bool:
    """True if a process on this machine can listen at `host`."""
    if host in EVERY_INTERFACE:
        return True
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.bind(address)
    except OSError:
        return False
    return True


def queues_beside(broker: str) -> str:
    """Where the script's own queues are: at the same server, or at another port of the same interface."""
    return broker.partition("#")[0] if broker.startswith(REDIS) else f"{broker.rpartition(':')[0]}:0"


def command_there(broker: str) -> str:
    """What to run on the other machines."""
    shown = masked(broker)
    if shown != broker:
        return f"stageline worker --join, with STAGELINE_BROKER__URL={shown} and its password in the environment"
    if host_of(broker) in EVERY_INTERFACE:
        shown = f"tcp://{socket.gethostname()}:{broker.rpartition(':')[2]}"
    return f"stageline worker --join {shown}"
