"""`stageline status`: the progress of a run, and what every worker does."""

from pathlib import Path

import click
import msgspec

from stageline.workers.cli import options
from stageline.workers.cli.ask import ask, run_or_newest
from stageline.workers.cli.display.tables import duration, share, show, summary
from stageline.workers.runs import folder as runs
from stageline.workers.runs.result import Facts


@click.command(epilog="Example: stageline status --broker tcp://10.0.0.4:5600")
@options.where
@options.broker
@options.as_json
def status(where: str | None, broker: str | None, as_json: bool) -> None:
    """Show the progress of a run, and what its workers do.

    WHERE is a run's folder, or a plan, whose broker.url is queried. Default: the newest run in ./runs. A run that has
    finished is shown with its result.
    """
    where = where if broker else run_or_newest(where)
    if where and not broker and (result := runs.result_in(Path(where))) is not None:
        click.echo(msgspec.json.encode(result) if as_json else summary(result, Path(where)))
        return
    facts = ask("status", where, broker, as_json=as_json)
    if facts is None:
        return
    click.echo(_headline(facts))
    show("workers", ("worker", "stages", "is", "process", "heard", "idle", "actions", "does now"), _rows(facts))


def _headline(facts: Facts) -> str:
    total = facts["training_steps"]
    steps = (
        f"{facts['finished_floor'] if total is None else min(facts['finished_floor'], total)} of {total or '?'} steps"
    )
    loss = facts["last_loss"] and facts["last_loss"]["loss"]
    known = (
        f"run {facts['run']}: {facts['phase']}",
        "broker restarted: waiting for running workers to reconnect" if facts["listening"] else "",
        "the broker's records are lost: asking the workers how far the run is" if facts["recollecting"] else "",
        f"waits for worker {', '.join(map(str, facts['missing']))}" if facts["missing"] else "",
        facts["reason"] or "",
        *facts["damaged"],
        steps,
        "" if loss is None else f"loss {loss:.6g}",
        *(f"{name} {float(value):.6g}" for name, value in facts["metrics"].items()),
        f"weights_sha256 {facts['weights_sha256']}" if facts["weights_sha256"] else "",
    )
    return "\n  ".join(part for part in known if part)


def _rows(facts: Facts) -> list[tuple[object, ...]]:
    return [_row(worker) for worker in facts["workers"]]


def _row(worker: Facts) -> tuple[object, ...]:
    place = (worker["index"], ", ".join(map(str, worker["stages"])), worker["standing"])
    if worker["standing"] == "missing":
        return (*place, "-", "-", "-", "-", "-")
    process = f"{worker['name']}, pid {worker['pid']} on {worker['host']}"
    idle = "-" if worker["idle"] is None else share(worker["idle"])
    return (*place, process, f"{duration(worker['heard'])} ago", idle, worker["actions"], worker["now"])
