"""`stageline story`: the history of one microbatch."""

import re
from collections.abc import Iterator

import click

from stageline.workers.cli import options
from stageline.workers.cli.ask import ask
from stageline.workers.cli.display.tables import duration, show
from stageline.workers.runs.result import Facts

_PLACE = re.compile(r"(\d{1,15})/(\d{1,15})", re.ASCII)


def _step_and_microbatch(ctx: click.Context, parameter: click.Parameter, value: str) -> tuple[str, str]:
    found = _PLACE.fullmatch(value)
    if found is None:
        raise click.BadParameter(f"{value!r} is not STEP/MICROBATCH: write 118/5, both counted from 0")
    return found[1], found[2]


@click.command(epilog="Example: stageline story 118/5 --broker tcp://10.0.0.4:5600")
@click.argument("microbatch", metavar="STEP/MICROBATCH", callback=_step_and_microbatch)
@options.where
@options.broker
@options.as_json
def story(microbatch: tuple[str, str], where: str | None, broker: str | None, as_json: bool) -> None:
    """Show the history of one microbatch, stage by stage: every attempt, its worker, and when each action ran.

    WHERE is a run's folder, or a plan, whose broker.url is queried. Default: the newest run in ./runs.
    """
    step, number = microbatch
    facts = ask("story", where, broker, as_json=as_json, step=step, microbatch=number)
    if facts is None:
        return
    starts = [action["start"] for stage in facts["stages"] for action in stage["actions"]]
    rows = [row for stage in facts["stages"] for row in _rows(stage, min(starts, default=0.0))]
    title = f"microbatch {facts['microbatch']} of step {facts['step']} of run {facts['run']}"
    show(title, ("stage", "worker", "attempt", "state", "by", "began at, took"), rows)


def _rows(found: Facts, beginning: float) -> Iterator[tuple[object, ...]]:
    """A row for each attempt; the last is the one that counts."""
    stage, worker, before = found["stage"], found["worker"], found["attempts"]
    for number, lost in enumerate(before, start=1):
        yield stage, worker, number, f"lost ({lost['state']})", _worker(lost), lost["why"]
    actions = "; ".join(_timing(action, beginning) for action in found["actions"])
    yield stage, worker, len(before) + 1, found["state"], _worker(found["holder"]), actions or "-"


def _worker(worker: Facts | None) -> str:
    if worker is None:
        return "-"
    return f"{worker['name']}, life {worker['life']}" if worker["life"] else str(worker["name"])


def _timing(action: Facts, beginning: float) -> str:
    return f"{action['action']} {duration(action['start'] - beginning)}, {duration(action['end'] - action['start'])}"
