"""Waits for the end of what a killed script has left: its launcher, broker and workers stay for a lease, as in a pause.

Then the run goes on in processes of the script that resumes it.
"""

import socket
from pathlib import Path
from time import monotonic, sleep

import psutil

from stageline.workers.control.client import BrokerUnreachable, Client
from stageline.workers.runs.folder import read_broker_url
from stageline.workers.runs.owner import RunGoesOn, require_free

LOOK = 0.1  # seconds between two looks
ENDS = 30.0  # seconds for the processes of a run to end, after the lease


def await_former_processes(folder: Path, lease: float) -> None:
    """Returns once no process runs the run in `folder`. Raises `RunGoesOn` at once if its script is there, and after
    `lease` and `ENDS` seconds in any case."""
    deadline = monotonic() + lease + ENDS
    while True:
        try:
            require_free(folder)
        except RunGoesOn:
            if monotonic() > deadline or _script_is_there(folder):
                raise
            sleep(LOOK)
        else:
            return


def _script_is_there(folder: Path) -> bool:
    """As far as the broker knows it, and on this machine the system."""
    if (url := read_broker_url(folder)) is None:
        return False
    try:
        with Client(url) as client:
            script = client.ask("status", timeout=1.0)["script"] or {}
    except (BrokerUnreachable, ValueError):
        return False
    here = script.get("host") == socket.gethostname()
    return script.get("standing") == "present" and (not here or psutil.pid_exists(script["pid"]))
