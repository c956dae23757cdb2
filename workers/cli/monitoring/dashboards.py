"""The dashboard beside a run that is trained: a process of its own, which ends with the one that has started it."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stageline.pipeline.process.child import Interpreter
from stageline.pipeline.process.lifeline import LifelineOwner
from stageline.workers.cli.output import say

TOKEN = "STAGELINE_DASHBOARD_TOKEN"  # noqa: S105 - the name of a variable


def demand_dashboard() -> None:
    """Raise `DashboardMissing` if a package of the dashboard is not installed."""
    from stageline.workers.extras.report.dashboard import demand_packages

    demand_packages()


@contextmanager
def dashboard_beside(folder: Path) -> Iterator[None]:
    """Return a context with a dashboard of the run in `folder`, whose link is printed on stderr. Raises `OSError`."""
    from stageline.workers.extras.report.access import new_token
    from stageline.workers.extras.report.dashboard import link_of, listen

    token, lifeline = new_token(), LifelineOwner()
    with listen("127.0.0.1", 0) as bound:
        link = link_of("127.0.0.1", bound.getsockname()[1], token)
        child = _started(folder, bound, lifeline, token)
    say(f"stageline: dashboard: {link}", err=True)
    try:
        yield
    finally:
        lifeline.close()
        child.end(patience=5.0)


def _started(folder: Path, bound: socket.socket, lifeline: LifelineOwner, token: str) -> Interpreter:
    arguments = ["dashboard", str(folder), "--lifeline", str(lifeline.end), "--listening", str(bound.fileno())]
    log = (folder / "dashboard.log").open("ab")
    with log:
        return Interpreter(
            "stageline",
            arguments,
            [lifeline.end, bound.fileno()],
            env={**os.environ, TOKEN: token},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
