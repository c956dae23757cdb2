"""Connections to a broker that obeys the command: by the secret in a run's folder, or by the key of this machine."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from stageline.pipeline.addresses import masked
from stageline.pipeline.errors import ExitCode
from stageline.workers.cli import options
from stageline.workers.cli.broker_address import given
from stageline.workers.cli.options import PATIENCE, answer_about
from stageline.workers.cli.output import CommandFailed
from stageline.workers.control.client import Client
from stageline.workers.control.enrolling import entered
from stageline.workers.runs import folder as runs
from stageline.workers.runs.folder import Facts


@contextmanager
def commanded(where: str | None, broker: str | None) -> Iterator[tuple[Client, Callable[[], Facts]]]:
    """Return a context with a connection to a run's broker, and a function that looks at the run's status."""
    with _of_folder(options.folder_of(where)) if broker is None else _at_address(broker) as found:
        yield found


@contextmanager
def _of_folder(folder: Path) -> Iterator[tuple[Client, Callable[[], Facts]]]:
    """Connect to the broker of the run in a folder of this machine, whose secret is there."""
    url = runs.read_broker_url(folder)
    if url is None:
        raise CommandFailed(
            f"run {folder.name} has no broker at present: it is over, or starts; see `stageline status {folder}`",
            ExitCode.NO_BROKER,
        )
    from stageline.workers.keys.keyring import pair_towards

    look = partial(answer_about, str(folder), None, "status")
    with Client(url, lambda: runs.read_control_secret(folder), pair_towards(url, os.environ)) as client:
        yield client, look


@contextmanager
def _at_address(broker: str) -> Iterator[tuple[Client, Callable[[], Facts]]]:
    """Connect to a broker that knows this machine by its key."""
    url, pair = entered(given(broker), os.environ, "stageline", PATIENCE)
    if pair is None:
        raise CommandFailed(
            f"the broker at {masked(url)} has no keys, by which it would know who may stop or pause its run: give the "
            "command on its machine, with the run's folder",
            ExitCode.NOT_ADMITTED,
        )
    with Client(url, bytes, pair) as client:
        yield client, partial(client.ask, "status", PATIENCE)
