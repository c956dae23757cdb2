"""Commands that ask about a run and print the answer: `status`, `why`, `story` and `queue ls`; `run ls` lists runs.

The run's broker answers, or when it is gone the run's records: `options.py` finds them.
"""

import re
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from time import time
from typing import TYPE_CHECKING

import click
import msgspec

from stageline.pipeline.errors import ExitCode
from stageline.workers.cli import broker_address, completion, options
from stageline.workers.cli.help import Command, CommandGroup, codes
from stageline.workers.cli.options import RUNS, answer_about
from stageline.workers.cli.output import (
    CommandFailed,
    answer,
    best_of,
    counted,
    duration,
    say,
    share,
    show,
    show_evaluations,
    size,
    summary,
)
from stageline.workers.runs.folder import Facts, Result

if TYPE_CHECKING:
    from stageline.workers.runs.listing import RunRow

_PLACE = re.compile(r"(\d{1,15})/(\d{1,15})", re.ASCII)
_LONGEST = 60  # characters of a reason that the table shows


def _step_and_microbatch(ctx: click.Context, parameter: click.Parameter, value: str) -> tuple[str, str]:
    found = _PLACE.fullmatch(value)
    if found is None:
        raise click.BadParameter(f"{value!r} is not STEP/MICROBATCH: write 118/5, both counted from 0")
    return found[1], found[2]


@click.command(
    cls=Command,
    examples=(
        "stageline status runs/digits-20260131-101500-1f0c --json",
        "stageline status --broker tcp://10.0.0.4:5600",
    ),
    codes=codes(ExitCode.NO_BROKER, ExitCode.REFUSED),
)
@options.where
@broker_address.broker
@options.as_json
def status(where: str | None, broker: str | None, as_json: bool) -> None:
    """Show the progress of a run, and what its workers do.

    WHERE is a run's folder, or a plan, whose newest run is meant. Default: the newest run in ./runs. A run that is over
    is shown from its records; if it has finished, with its result.
    """
    _ask("status", where, broker, as_json, _show_status)


@click.command(
    cls=Command,
    examples=("stageline why runs/digits-20260131-101500-1f0c --stage 1", "stageline why --broker tcp://10.0.0.4:5600"),
    groups={"Run": ("--stage",)},
    codes=codes(ExitCode.NO_BROKER, ExitCode.REFUSED),
)
@options.where
@broker_address.broker
@click.option(
    "--stage",
    callback=options.stage_label,
    shell_complete=completion.stages,
    help="Explain the wait of this stage or replica. Default: the longest one.",
)
@options.as_json
def why(where: str | None, broker: str | None, stage: str | None, as_json: bool) -> None:
    """Explain what a run waits for, and what to do about it.

    The answer says which worker waits for which, down to the cause; of a run that is over, why it ended. WHERE is a
    run's folder, or a plan, whose newest run is meant. Default: the newest run in ./runs.
    """
    arguments = {} if stage is None else {"stage": stage}
    _ask("why", where, broker, as_json, _show_cause, **arguments)


@click.command(
    cls=Command,
    examples=(
        "stageline story 118/5 runs/digits-20260131-101500-1f0c",
        "stageline story 118/5 --broker tcp://10.0.0.4:5600",
    ),
    codes=codes(ExitCode.NO_BROKER, ExitCode.REFUSED, usage="an option is wrong, or there is no such microbatch"),
)
@click.argument("microbatch", metavar="STEP/MICROBATCH", callback=_step_and_microbatch)
@options.where
@broker_address.broker
@options.as_json
def story(microbatch: tuple[str, str], where: str | None, broker: str | None, as_json: bool) -> None:
    """Show the history of one microbatch, stage by stage.

    The table has every attempt, its worker, and when each action ran. WHERE is a run's folder, or a plan, whose newest
    run is meant. Default: the newest run in ./runs.
    """
    _ask("story", where, broker, as_json, _show_history, step=microbatch[0], microbatch=microbatch[1])


@click.group(cls=CommandGroup)
def queue() -> None:
    """Inspect the queues of a run."""


@queue.command(
    examples=("stageline queue ls runs/digits-20260131-101500-1f0c", "stageline queue ls --broker tcp://10.0.0.4:5600"),
    codes=codes(ExitCode.NO_BROKER, ExitCode.REFUSED),
)
@options.where
@broker_address.broker
@options.as_json
def ls(where: str | None, broker: str | None, as_json: bool) -> None:
    """List the queues and their contents, as their producers last reported them.

    WHERE is a run's folder, or a plan, whose newest run is meant. Default: the newest run in ./runs.
    """
    _ask("queues", where, broker, as_json, _show_queues)


def _ask(
    query: str,
    where: str | None,
    broker: str | None,
    as_json: bool,
    show_answer: Callable[[Facts], None],
    **arguments: str,
) -> None:
    """Print the answer to a question: as JSON with `as_json`, otherwise by `show_answer`, and its time."""
    facts = answer_about(where, broker, query, **arguments)
    if facts["source"] == "records" and not as_json:
        ago = duration(max(0.0, time() - facts["as_of"]))
        say(f"from the records of the run, as of {datetime.fromtimestamp(facts['as_of']):%F %T}, {ago} ago")
    answer(facts, as_json, partial(show_answer, facts))


def _show_status(facts: Facts) -> None:
    total = facts["training_steps"]
    if facts.get("result"):
        say(summary(msgspec.convert(facts["result"], Result), Path(facts["folder"])))
        show_evaluations(facts["evaluations"], facts["best"])
        return
    steps = facts["finished_floor"] if total is None else min(facts["finished_floor"], total)
    loss = facts["finished_loss"] and facts["finished_loss"]["loss"]
    callers = _callers(facts)
    awaited = [f"worker {', '.join(map(str, facts['missing']))}"] if facts["missing"] else []
    if facts["phase"] == "waiting":
        awaited += ["the script" for each in callers if each["standing"] == "missing"]
    known = (
        f"run {facts['run']}: {facts.get('state', facts['phase'])}",
        "broker restarted: waiting for running workers to reconnect" if facts["listening"] else "",
        "the broker has no records of the run: asking the workers how far it is" if facts["recollecting"] else "",
        f"waits for {' and '.join(awaited)}" if awaited else "",
        facts["reason"] or "",
        *facts["damaged"],
        f"step {steps}" if callers and total is None else f"{steps} of {total or '?'} steps",
        "" if loss is None else f"loss {loss:.6g}",
        *(f"{name} {float(value):.6g}" for name, value in facts["metrics"].items()),
        "" if facts["best"] is None else f"best {best_of(facts['best'])}",
        f"weights_sha256 {facts['weights_sha256']}" if facts["weights_sha256"] else "",
        *_chosen(facts.get("orders")),
        *_admission(facts.get("keys")),
    )
    say("\n  ".join(part for part in known if part))
    show_evaluations(facts["evaluations"], facts["best"])
    columns = ("worker", "stages", "is", "process", "reported", "idle", "actions", "now")
    rows = [_worker_row(worker["index"], worker) for worker in facts["workers"]]
    show("workers", columns, [*rows, *(_worker_row("script", each) for each in callers)])


def _chosen(orders: Facts | None) -> list[str]:
    """Return the schedule of the run, and why it was chosen, if the run chooses it."""
    if orders is None:
        return []
    given, review = orders["orders"], orders["review"]
    name, window, since = orders["begins_with"], None, 0
    if given:
        name, window, since = given[-1]["name"], given[-1]["window"], given[-1]["step"]
    sized = "" if window is None else f" {','.join(map(str, window))}"
    return [f"schedule {name}{sized} since step {since}", "" if review is None else review["why"]]


def _admission(keys: Facts | None) -> list[str]:
    """Return who may speak to the broker, and the keys that knocked in vain; nothing if only this machine does."""
    if keys is None:
        return []
    if keys["insecure"]:
        return ["insecure: every process that reaches the broker can read and change the run (broker.insecure = true)"]
    knocks = [f"{key} knocked: `stageline keys admit {key}` admits it" for key in keys["knocks"]]
    return [f"{counted(keys['admitted'], 'key')} admitted; the broker is trusted with what the queues carry", *knocks]


def _callers(facts: Facts) -> list[Facts]:
    """Return the row of the script that calls the workers; no row for a run without a script."""
    return list(filter(None, [facts.get("script")]))


def _worker_row(name: object, worker: Facts) -> tuple[object, ...]:
    stages = worker["labels"] if "labels" in worker else worker["stages"]
    place = (name, ", ".join(map(str, stages)) or "-", worker["standing"])
    if worker["standing"] == "missing":
        return (*place, "-", "-", "-", "-", "-")
    process = f"{worker['name']}, pid {worker['pid']} on {worker['host']}"
    idle = "-" if worker["idle"] is None else share(worker["idle"])
    return (*place, process, f"{duration(worker['heard'])} ago", idle, worker["actions"], worker["now"])


def _show_cause(facts: Facts) -> None:
    ages = ", ".join(f"{each['name']} {duration(each['heard'])} ago" for each in facts["reports"])
    lines = (facts["text"], ages and f"as reported by {ages}", f"what to do: {facts['action']}")
    say("\n  ".join([f"run {facts['run']}: {facts.get('state', facts['phase'])}", *filter(None, lines)]))


def _show_history(facts: Facts) -> None:
    starts = [action["start"] for stage in facts["stages"] for action in stage["actions"]]
    rows = [row for stage in facts["stages"] for row in _attempts(stage, min(starts, default=0.0))]
    title = f"microbatch {facts['microbatch']} of step {facts['step']} of run {facts['run']}"
    show(title, ("stage", "worker", "attempt", "state", "by", "began at, took"), rows)


def _attempts(found: Facts, beginning: float) -> Iterator[tuple[object, ...]]:
    """Yield a row for each attempt of a stage, of which the last counts. Times are relative to `beginning`."""
    stage, worker, before = found.get("label", found["stage"]), found["worker"], found["attempts"]
    for number, lost in enumerate(before, start=1):
        yield stage, worker, number, f"lost ({lost['state']})", _name(lost), lost["why"]
    actions = "; ".join(
        f"{each['action']} {duration(each['start'] - beginning)}, {duration(each['end'] - each['start'])}"
        for each in found["actions"]
    )
    yield stage, worker, len(before) + 1, found["state"], _name(found["holder"]), actions or "-"


def _name(worker: Facts | None) -> str:
    if worker is None:
        return "-"
    return f"{worker['name']}, generation {worker['generation']}" if worker["generation"] else str(worker["name"])


def _show_queues(facts: Facts) -> None:
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
    columns = ("queue", "worker", "ready", "in flight", "retained", "size", "oldest")
    show(f"queues of run {facts['run']}", columns, rows)


@click.group(cls=CommandGroup)
def run() -> None:
    """List runs."""


@run.command("ls", examples=("stageline run ls", "stageline run ls /data/runs --json"))
@click.argument("folder", metavar="[DIR]", type=click.Path(), default=RUNS)
@options.as_json
def list_runs(folder: str | Path, as_json: bool) -> None:
    """List the runs in DIR: how far each came, what became of it.

    Runs are ordered by the time at which each was begun or resumed. Their records are read; no broker is asked.
    Default: ./runs.
    """
    from stageline.workers.runs.listing import run_rows

    if not Path(folder).is_dir():
        raise CommandFailed(f"there is no folder {folder}: name the one in which the runs are", ExitCode.USAGE)
    rows = list(run_rows(Path(folder)))
    facts = {"schema": "run-ls/1", "folder": str(folder), "runs": rows}
    columns = ("run", "plan", "began", "state", "steps", "loss", "checkpoint", "weights", "reason")
    answer(facts, as_json, lambda: show(f"runs in {folder}", columns, [_cells(each) for each in rows]))


def _cells(row: "RunRow") -> tuple[object, ...]:
    reason = (row.reason or "-").splitlines()[0]
    unknown = {True: "", False: " of ?"}[row.script]  # a script may end anywhere
    return (
        row.run,
        row.name or "-",
        "-" if row.began is None else f"{datetime.fromtimestamp(row.began):%F %T}",
        row.state,
        f"{row.steps}{unknown}" if row.total is None else f"{row.steps} of {row.total}",
        "-" if row.loss is None else f"{row.loss:.4g}",
        "-" if row.checkpoint is None else row.checkpoint,
        (row.weights_sha256 or "-")[:12],
        reason if len(reason) <= _LONGEST else f"{reason[: _LONGEST - 3]}...",
    )
