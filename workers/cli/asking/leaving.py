"""Leave of a worker, asked of the run's broker by a command, and the wait until its place is free."""

from collections.abc import Callable
from time import monotonic, sleep

from stageline.broker.control.leaves import LeaveWorker
from stageline.broker.control.pauses import LONGEST_REASON
from stageline.pipeline.errors import ExitCode, documented
from stageline.workers.cli.options import PATIENCE
from stageline.workers.cli.output import CommandFailed
from stageline.workers.cli.printed import LeftWorker
from stageline.workers.control.client import Client, RequestRefused
from stageline.workers.runs.folder import Facts

from .pausing import who

_LOOK = 0.2  # seconds between two looks at a worker that is to leave
_GRACE = 15.0  # seconds beyond its notice, in which a worker that does not answer is declared lost


def left(client: Client, look: Callable[[], Facts], worker: int, seconds: float, reason: str) -> LeftWorker:
    """Have a worker leave; return the facts of the place once the worker has left it.

    Args:
        client: Connection to the broker.
        look: Returns the status of the run.
        worker: Number of the worker.
        seconds: Notice for the worker.
        reason: Why, for people.

    Raises:
        CommandFailed: The broker refuses, the worker has not left in time, or the run is over before it has.
        BrokerUnreachable: The broker does not answer.
    """
    try:
        asked = client.request_leave(LeaveWorker(who(), worker, seconds, reason[:LONGEST_REASON]), PATIENCE)
    except RequestRefused as refusal:
        raise CommandFailed(str(refusal), documented(refusal.code)) from refusal
    deadline = monotonic() + seconds + _GRACE
    while (row := _row(status := look(), worker)).get("incarnation") == asked["incarnation"]:
        if status["reason"] is not None:
            raise CommandFailed(f"run {asked['run']} is over: {status['reason']}", ExitCode.USAGE)
        if monotonic() >= deadline:
            raise CommandFailed(
                f"worker {worker} of run {asked['run']} has not left within {seconds + _GRACE:g} s: `stageline status` "
                "tells what it does",
                ExitCode.FAILED,
            )
        sleep(_LOOK)
    process = f"{row['name']}, pid {row['pid']} on {row['host']}" if "pid" in row else None
    return LeftWorker(run=asked["run"], worker=worker, changed=asked["changed"], process=process)


def _row(status: Facts, worker: int) -> Facts:
    row: Facts = next(each for each in status["workers"] if each["index"] == worker)
    return row
