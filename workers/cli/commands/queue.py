"""`stageline queue`: what the queues of a run contain."""

import click

from stageline.workers.cli import options
from stageline.workers.cli.ask import ask
from stageline.workers.cli.display.tables import duration, show, size


@click.group()
def queue() -> None:
    """Inspect the queues of a run."""


@queue.command(epilog="Example: stageline queue ls --broker tcp://10.0.0.4:5600")
@options.where
@options.broker
@options.as_json
def ls(where: str | None, broker: str | None, as_json: bool) -> None:
    """List the queues and their contents, as their producers last reported them.

    WHERE is a run's folder, or a plan, whose broker.url is queried. Default: the newest run in ./runs.
    """
    facts = ask("queues", where, broker, as_json=as_json)
    if facts is None:
        return
    columns = ("queue", "worker", "ready", "in flight", "retained", "size", "oldest")
    rows = [
        (
            each["queue"],
            each["worker"],
            *(int(each[name]) for name in ("ready", "in_flight", "retained")),
            size(each["bytes"]),
            duration(each["oldest"]),
        )
        for each in facts["queues"]
    ]
    show(f"queues of run {facts['run']}", columns, rows)
