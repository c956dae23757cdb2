"""`stageline relay`: connects machines that can only dial out."""

import asyncio
import os
import shlex
import signal
import socket
from typing import TYPE_CHECKING

import click

from stageline.broker.transports.sockets.relay_address import RelayAddress
from stageline.pipeline.addresses import EVERY_INTERFACE, fault, host_of, parted
from stageline.pipeline.errors import ExitCode
from stageline.workers.cli.help import Command, codes
from stageline.workers.cli.output import log_to_stderr, say
from stageline.workers.keys.keyring import own_pair

if TYPE_CHECKING:
    from stageline.broker.transports.sockets.relay_server import Relay

VARIABLES = ("STAGELINE_BROKER__URL", "STAGELINE_QUEUES__URL")


def _place(ctx: click.Context, parameter: click.Parameter, value: str) -> tuple[str, int]:
    """Return host and port of an address."""
    reason = "it has a key: leave out what follows the port" if parted(value)[1] else fault(value, ["tcp"])
    port = value.rpartition(":")[2]
    if reason is not None or not port.isdigit():
        lacking = "it does not begin with tcp://" if reason == "" else f"its port is {port}, expected a number"
        raise click.BadParameter(
            f"{value!r} is no address of this machine such as tcp://0.0.0.0:7443: {reason or lacking}"
        )
    return host_of(value), int(port)


def _name(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Return a host's name or address."""
    if value is not None and fault(f"tcp://{value}:1", ["tcp"]) is not None:
        raise click.BadParameter(
            f"{value!r} is no host such as relay.example, 10.0.0.4 or [fe80::1]: a port and a scheme are not part of it"
        )
    return value


@click.command(
    cls=Command,
    examples=(
        "stageline relay",
        "stageline relay --bind tcp://0.0.0.0:443 --as relay.example",
    ),
    groups={"Network": ("--bind", "--as", "--admission")},
    codes=codes(
        ExitCode.REFUSED,
        failed="the address is in use",
        ok="it was told to end (SIGTERM)",
        interrupted="interrupted",
    ),
)
@click.option(
    "--bind",
    "place",
    default="tcp://0.0.0.0:7443",
    show_default=True,
    callback=_place,
    metavar="URL",
    help="Address to listen at.",
)
@click.option(
    "--as",
    "name",
    callback=_name,
    metavar="HOST",
    help="Host by which others reach this machine. Default: its own name.",
)
@click.option(
    "--admission",
    "serial",
    type=click.IntRange(min=0),
    default=0,
    help="Number of the secret of admission. With another number, addresses that were printed before are refused.",
)
def relay(place: tuple[str, int], name: str | None, serial: int) -> int:
    """Connect machines that can only dial out, until it is ended.

    Prints the address that broker.url and queues.url have then: who has it may use the relay. Brokers and workers
    prove their keys to each other and encrypt what they send. The relay sees sizes and times, and keeps nothing.
    """
    log_to_stderr()
    from stageline.broker.transports.sockets.relay_handshake import admission_secret, relay_pair
    from stageline.broker.transports.sockets.relay_server import Relay

    own = own_pair(os.environ)
    pair, secret = relay_pair(own), admission_secret(own, serial)
    host, port = place
    serving = Relay("" if host in EVERY_INTERFACE else host.strip("[]"), port, pair, secret)
    shown = name or (socket.gethostname() if host in EVERY_INTERFACE else host)
    address = RelayAddress(shown, serving.port, pair.public, secret=secret)
    say(f"relay at tcp://{host}:{serving.port}; on every machine of a run:", err=True)
    for variable in VARIABLES:
        say(f"export {variable}={shlex.quote(address.url)}")
    asyncio.run(_serve(serving))
    return ExitCode.OK


async def _serve(relay: "Relay") -> None:
    serving = asyncio.ensure_future(relay.serve())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
    await asyncio.wait([serving])
