"""Commands that ask about a run and print the answer: `status`, `why` and `story`."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import msgspec

from stageline.broker.keys.parties import way_in
from stageline.pipeline.errors import ExitCode
from stageline.workers.cli import broker_address, completion, options
from stageline.workers.cli.asking.looking import look, watched
from stageline.workers.cli.help import Command, codes
from stageline.workers.cli.output import (
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
from stageline.workers.cli.tables import answers
from stageline.workers.cli.tables.answers import history, trusted
from stageline.workers.runs.folder import Facts, Result
from stageline.workers.runs.pauses import paused_text

_PLACE = re.compile(r"(\d{1,15})/(\d{1,15})", re.ASCII)


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
@watched
@broker_address.broker
@options.as_json
def status(where: str | None, watch: float | None, broker: str | None, as_json: bool) -> None:
    """Show the progress of a run, and what its workers do.

    WHERE is a run's folder, or a plan, whose newest run is meant. Default: the newest run in ./runs. A run that is over
    is shown from its records; if it has finished, with its result.
    """
    look("status", where, broker, as_json, show_status, watch)


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
    """Explain what a run waits for, or why it is slow, and what to do.

    The answer says which worker waits for which, down to the cause; of a run that is over, why it ended. Of a run that
    makes progress, it says what limits its steps per second, since when, and what to do. WHERE is a run's folder, or a
    plan, whose newest run is meant. Default: the newest run in ./runs.
    """
    arguments = {} if stage is None else {"stage": stage}
    look("why", where, broker, as_json, show_cause, of=arguments)


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
    look("story", where, broker, as_json, _show_history, of={"step": microbatch[0], "microbatch": microbatch[1]})


def show_status(facts: Facts) -> None:
    """Print the status of a run."""
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
        paused_text(facts.get("paused")),
        "broker restarted: waiting for running workers to reconnect" if facts["listening"] else "",
        "the broker has no records of the run: asking the workers how far it is" if facts["recollecting"] else "",
        f"waits for {' and '.join(awaited)}" if awaited else "",
        facts["reason"] or "",
        *facts["damaged"],
        f"step {steps}" if callers and total is None else f"{steps} of {total or '?'} steps",
        "" if loss is None else f"loss {loss:.6g}",
        *(f"{name} {float(value):.6g}" for name, value in facts["metrics"].items()),
        "" if facts["best"] is None else f"best {best_of(facts['best'])}",
        *_copied(facts.get("copies") or ()),
        f"weights_sha256 {facts['weights_sha256']}" if facts["weights_sha256"] else "",
        *_free(facts),
        *answers.pace(facts),
        *_chosen(facts.get("orders")),
        *_admission(facts.get("keys")),
    )
    say("\n  ".join(part for part in known if part))
    show_evaluations(facts["evaluations"], facts["best"])
    columns = ("worker", "stages", "is", "process", "reported", "idle", "memory", "actions", "now")
    rows = [_worker_row(worker["index"], worker) for worker in facts["workers"]]
    show("workers", columns, [*rows, *(_worker_row("script", each) for each in callers)])


def _free(facts: Facts) -> Iterator[str]:
    """Yield the places that workers have left on notice, and no other has taken."""
    for each in facts["recovering"]:
        if each.get("on_notice") and not each["given"]:
            since = f"its worker left {duration(each['since'])} ago ({each['how']})"
            yield f"the place of worker {each['index']} is free: {since}; a spare or a new worker takes it"


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


def _copied(copies: Iterable[Facts]) -> Iterator[str]:
    """Yield how far the copies of the snapshots of each stage are behind."""
    for each in copies:
        stage, step, newest = f"stage {each['stage']}", each["step"], each["newest"]
        if each["holder"] is None:
            yield f"{stage} has no copy: no other worker has another disk and a queue for copies"
        elif newest and step != newest:
            at = "no copy yet" if step is None else f"its copy is of step {step}"
            yield f"{stage} has a snapshot of step {newest}; {at}, at worker {each['holder']}"


def _admission(keys: Facts | None) -> list[str]:
    """Return who may speak to the broker, and the keys that knocked in vain; nothing if only this machine does."""
    if keys is None:
        return []
    if keys["insecure"]:
        return ["insecure: every process that reaches the broker can read and change the run (broker.insecure = true)"]
    knocks = [f"{key} knocked: {way_in(key, keys.get('parties') or ())}" for key in keys["knocks"]]
    return [f"{counted(keys['admitted'], 'key')} admitted; {trusted(keys)}", *knocks]


def _callers(facts: Facts) -> list[Facts]:
    """Return the row of the script that calls the workers; no row for a run without a script."""
    return list(filter(None, [facts.get("script")]))


def _worker_row(name: object, worker: Facts) -> tuple[object, ...]:
    stages = worker["labels"] if "labels" in worker else worker["stages"]
    place = (name, ", ".join(map(str, stages)) or "-", worker["standing"])
    if worker["standing"] == "missing":
        return (*place, "-", "-", "-", "-", "-", "-")
    process = f"{worker['name']}, pid {worker['pid']} on {worker['host']}"
    idle = "-" if worker["idle"] is None else share(worker["idle"])
    memory = size(worker["memory"]) if worker.get("memory") else "-"
    return (*place, process, f"{duration(worker['heard'])} ago", idle, memory, worker["actions"], worker["now"])


def show_cause(facts: Facts) -> None:
    """Print what a run waits for, or what limits it."""
    ages = ", ".join(f"{each['name']} {duration(each['heard'])} ago" for each in facts["reports"])
    lines = (
        facts["text"],
        ages and f"as reported by {ages}",
        f"what to do: {facts['action']}",
        *answers.limits(facts),
        *answers.lost(facts.get("recovery")),
    )
    say("\n  ".join([f"run {facts['run']}: {facts.get('state', facts['phase'])}", *filter(None, lines)]))


def _show_history(facts: Facts) -> None:
    title, columns, rows = history(facts)
    show(title, columns, rows)
