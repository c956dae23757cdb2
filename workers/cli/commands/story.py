"""`stageline story`: where one microbatch has been, or is."""

import re
from collections.abc import Iterator
from typing import Any

import click

from stageline.workers.cli import options
from stageline.workers.cli.ask import ask
from stageline.workers.cli.display.tables import duration, show

Facts = dict[str, Any]

_PLACE = re.compile(r"(\d{1,15})/(\d{1,15})", re.ASCII)


def _parsed(ctx: click.Context, parameter: click.Parameter, value: str) -> tuple[str, str]:
    found = _PLACE.fullmatch(value)
    if found is None:
        raise click.BadParameter(f"{value!r} is no microbatch of a step: write 118/5, both counted from 0")
    return found[1], found[2]


@click.command(epilog="Example: stageline story 118/5 --broker tcp://10.0.0.4:5600")
@click.argument("microbatch", metavar="STEP/MICROBATCH", callback=_parsed)
@options.where
@options.broker
@options.as_json
def story(microbatch: tuple[str, str], where: str | None, broker: str | None, as_json: bool) -> None:
    """Tell where one microbatch has been, stage by stage: who computed it, in vain too, and when each action on it ran.

    WHERE is a plan, whose broker.url is asked, or a run's folder. Without it and --broker, the newest run in ./runs.
    """
    step, number = microbatch
    facts = ask("story", where, broker, as_json=as_json, step=step, microbatch=number)
    if facts is None:
        return
    starts = [action["start"] for chapter in facts["stages"] for action in chapter["actions"]]
    rows = [row for chapter in facts["stages"] for row in _rows(chapter, min(starts, default=0.0))]
    title = f"microbatch {facts['microbatch']} of step {facts['step']} of run {facts['run']}"
    show(title, ("stage", "worker", "attempt", "state", "by", "began at, took"), rows)


def _rows(chapter: Facts, beginning: float) -> Iterator[tuple[object, ...]]:
    """A row for each attempt, the one that counts last."""
    stage, worker, before = chapter["stage"], chapter["worker"], chapter["attempts"]
    for number, lost in enumerate(before, start=1):
        yield stage, worker, number, f"lost ({lost['state']})", _who(lost), lost["why"]
    actions = "; ".join(_in_words(action, beginning) for action in chapter["actions"])
    yield stage, worker, len(before) + 1, chapter["state"], _who(chapter["holder"]), actions or "-"


def _who(worker: Facts | None) -> str:
    if worker is None:
        return "-"
    return f"{worker['name']}, life {worker['life']}" if worker["life"] else str(worker["name"])


def _in_words(action: Facts, beginning: float) -> str:
    return f"{action['action']} {duration(action['start'] - beginning)}, {duration(action['end'] - action['start'])}"
