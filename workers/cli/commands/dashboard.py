"""`stageline dashboard`: the page of a run in a browser, live."""

import os
import socket
from functools import partial

import click

from stageline.pipeline.errors import ExitCode
from stageline.pipeline.process.lifeline import NONE, Lifeline
from stageline.workers.cli import broker_address, options
from stageline.workers.cli.asking.looking import view_of
from stageline.workers.cli.help import Command, codes
from stageline.workers.cli.monitoring.dashboards import TOKEN
from stageline.workers.cli.output import CommandFailed, say

_LOCAL = ("127.0.0.1", "::1", "localhost")


@click.command(
    cls=Command,
    examples=(
        "stageline dashboard runs/digits-20260131-101500-1f0c",
        "stageline dashboard --broker tcp://10.0.0.4:5600 --port 8642",
    ),
    groups={"Server": ("--host", "--port", "--allow-host")},
    codes=codes(ExitCode.NO_BROKER, ExitCode.REFUSED),
)
@options.where
@broker_address.broker
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of this machine to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port to listen at. Default: a free one.")
@click.option(
    "--allow-host",
    "names",
    metavar="NAME",
    multiple=True,
    help="Further name or address by which browsers may call this machine; the first one stands in the link.",
)
@options.lifeline
@click.option("--listening", type=int, default=-1, hidden=True, help="Descriptor of a socket that listens.")
def dashboard(
    where: str | None, broker: str | None, host: str, port: int, names: tuple[str, ...], lifeline: int, listening: int
) -> None:
    """Show a run in a browser, live, until Ctrl-C. Changes nothing.

    Prints a link with a token. The page is that of `stageline report`, and follows the run. WHERE is a run's folder, or
    a plan, whose newest run is meant. Default: the newest run in ./runs. Needs pip install "stageline[dashboard]".
    """
    from stageline.workers.extras.report.access import new_token
    from stageline.workers.extras.report.dashboard import demand_packages, link_of, listen, names_of, server_of
    from stageline.workers.extras.report.following import FollowedRun

    demand_packages()
    Lifeline(lifeline).end_process_when_cut(after=0.0)
    run = FollowedRun(partial(view_of, where, broker))
    if listening != NONE:  # beside a run that begins at this moment
        taken = socket.socket(fileno=listening)
        token = os.environ.pop(TOKEN, "") or new_token()
        server_of(run, taken.getsockname()[1], names_of(host, names), token).run(sockets=[taken])
        return
    run.look()
    try:
        bound = listen(host, port)
    except OSError as error:
        reason = f"cannot listen at {host}, port {port}: {error.strerror or error}. Use --port 0 for a free one"
        raise CommandFailed(reason, ExitCode.USAGE) from error
    if host not in _LOCAL:
        options.warn([f"the page travels from {host} without encryption; `ssh -L` to this machine would encrypt it"])
    token, taken_port = new_token(), bound.getsockname()[1]
    say(link_of(names_of(host, names)[0], taken_port, token))
    server_of(run, taken_port, names_of(host, names), token).run(sockets=[bound])
