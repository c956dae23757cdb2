"""The pause of a run, asked of its broker by a command, and the wait until every worker has come to it."""

import getpass
import os
import socket
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

from stageline.broker.control.pauses import LONGEST_REASON, PauseRun
from stageline.broker.control.records import LONGEST_NAME
from stageline.pipeline.errors import ExitCode, documented
from stageline.workers.cli.options import PATIENCE
from stageline.workers.cli.output import CommandFailed
from stageline.workers.control.client import Client, RequestRefused
from stageline.workers.runs.folder import Facts

_LOOK = 0.2  # seconds between two looks at a run that is to pause


def paused(client: Client, look: Callable[[], Facts], reason: str, patience: float) -> Facts:
    """Have a run pause; return the facts of the answer once every worker has come to the step of the pause.

    Args:
        client: Connection to the broker.
        look: Returns the status of the run.
        reason: Why, for people.
        patience: Seconds for the workers to come there.

    Raises:
        CommandFailed: They do not in time, or the run is over, or goes on, before they do.
        BrokerUnreachable: The broker does not answer.
    """
    found = _request(client, PauseRun(who(), reason[:LONGEST_REASON]))
    deadline = monotonic() + patience
    while not found["paused"]["in_effect"]:
        status = look()
        if status["reason"] is not None:
            raise CommandFailed(f"run {found['run']} is over: {status['reason']}", ExitCode.USAGE)
        if (now := status["paused"]) is None:
            raise CommandFailed(f"run {found['run']} goes on: another command has ended the pause", ExitCode.FAILED)
        found = {**found, "paused": now}
        if not now["in_effect"] and monotonic() >= deadline:
            raise CommandFailed(
                f"run {found['run']} has not come to a pause within {patience:g} s: a step takes longer, or workers "
                "are lost; it pauses once that ends. `stageline why` tells more, and `stageline run resume` ends it",
                ExitCode.FAILED,
            )
        sleep(_LOOK)
    return found


def resumed(client: Client) -> Facts:
    """Have a run go on; return the facts of the answer. Raises `CommandFailed`, `BrokerUnreachable`."""
    return _request(client, PauseRun(who(), resumes=True))


def _request(client: Client, request: PauseRun) -> dict[str, Any]:
    try:
        return client.request_pause(request, PATIENCE)
    except RequestRefused as refusal:
        raise CommandFailed(str(refusal), documented(refusal.code)) from refusal


def who() -> str:
    """Return the user and the machine of this process."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # no user has that number here
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"[:LONGEST_NAME]
