"""`stageline run`: lists, shows, compares, pauses, stops and removes runs, and has workers leave them."""

import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING

import click
import msgspec

from stageline.broker.control.leaves import LONGEST_NOTICE
from stageline.pipeline.errors import ExitCode
from stageline.workers.cli import broker_address, completion, options
from stageline.workers.cli.asking.commanding import commanded
from stageline.workers.cli.asking.looking import number_and_run
from stageline.workers.cli.help import CommandGroup, codes
from stageline.workers.cli.options import PATIENCE, RUNS, answer_about
from stageline.workers.cli.output import CommandFailed, answer, counted, say, show, size
from stageline.workers.cli.printed import RemovedRun, RemovedRuns, StoppedRun
from stageline.workers.control.client import BrokerUnreachable, Client, KeyRefused
from stageline.workers.runs import folder as runs
from stageline.workers.runs.folder import Facts
from stageline.workers.runs.pauses import paused_text

if TYPE_CHECKING:
    from stageline.workers.runs.account import RunAccount
    from stageline.workers.runs.listing import RunRow
    from stageline.workers.runs.removal import Removable

_LONGEST = 60  # characters of a reason that the table shows
_LOOK = 0.2  # seconds between two looks at a run that is to stop


@click.group(cls=CommandGroup)
def run() -> None:
    """List, show, compare, pause, stop and remove runs; drain workers."""


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


@run.command(
    "show",
    examples=("stageline run show", "stageline run show digits-20260131-101500-1f0c --json"),
    codes=codes(usage="there is no such run"),
)
@click.argument("named", metavar="[RUN]", required=False, shell_complete=completion.runs)
@options.as_json
def show_run(named: str | None, as_json: bool) -> None:
    """Show one run: its plan in short, steps, pace, losses of workers, files.

    RUN is the id of a run in ./runs, its folder, or the name or file of a plan, whose newest run is meant. Default: the
    newest run in ./runs.
    """
    from stageline.workers.cli.tables.accounts import account_lines

    account = _account(options.folder_of(None) if named is None else _folder(named))
    answer(_versioned("run-show/1", account), as_json, lambda: say("\n".join(account_lines(account))))


def _account(folder: Path) -> "RunAccount":
    from stageline.workers.runs.account import account_of, paced
    from stageline.workers.runs.records import RecordedState, explained, recorded_run

    with recorded_run(folder) as recorded, explained(str(folder)):
        found = account_of(recorded)
    if found.state not in (RecordedState.RUNNING, RecordedState.PAUSED):
        return found
    status = answer_about(str(folder), None, "status")
    return paced(found, status.get("pace"))


def _versioned(schema: str, facts: object) -> Facts:
    """Return the facts as a command prints them: with the name of their schema."""
    return {"schema": schema, **msgspec.to_builtins(facts)}


def _folder(named: str) -> Path:
    """Return the folder of the run with this id, folder, or name of a plan. Raises `CommandFailed`."""
    given = Path(named)
    for folder in (given, RUNS / named):
        if runs.is_known(folder):
            return folder
    of_plan = [each for each in runs.all_in(RUNS) if each.name.startswith(f"{named}-")]
    if of_plan:
        return of_plan[-1]
    if given.exists():
        return options.folder_of(named)
    raise CommandFailed(f"there is no run {named}, here or in ./runs: `stageline run ls` lists them", ExitCode.USAGE)


@run.command(
    examples=(
        "stageline run diff digits-20260131-101500-1f0c digits-20260131-110318-c04e",
        "stageline run diff /data/runs/line-20260131-110318-c04e runs/line-20260201-081500-77b1 --json",
    ),
    codes=codes(usage="there is no such run, or both are one"),
)
@click.argument("a", shell_complete=completion.runs)
@click.argument("b", shell_complete=completion.runs)
@options.as_json
def diff(a: str, b: str, as_json: bool) -> None:
    """Compare two runs: plans key by key, pace, losses by step, weights, lost workers.

    A and B are as RUN of `run show`. Their records are read; no broker is asked.
    """
    from stageline.workers.cli.tables.accounts import difference_lines
    from stageline.workers.runs.comparison import difference_of
    from stageline.workers.runs.records import recorded_run

    first, second = _folder(a), _folder(b)
    if first.resolve() == second.resolve():
        raise CommandFailed(f"A and B are both {first}: name two runs; `stageline run ls` lists them", ExitCode.USAGE)
    with recorded_run(first) as of_a, recorded_run(second) as of_b:
        found = difference_of(of_a, of_b)
    answer(_versioned("run-diff/1", found), as_json, lambda: say("\n".join(difference_lines(found))))


@run.command(
    examples=(
        "stageline run rm digits-20260131-094210-77b1",
        "stageline run rm /data/runs/line-20260131-110318-c04e --yes",
    ),
    groups={"Run": ("--yes",)},
    codes=codes(failed="a run goes on, or a file cannot be deleted", usage="there is no such run, or --yes is missing"),
)
@click.argument("named", metavar="RUN...", nargs=-1, required=True, shell_complete=completion.runs)
@click.option("--yes", is_flag=True, help="Do not ask.")
@options.as_json
def rm(named: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Delete the folders of runs that are over, with their weights and snapshots.

    RUN is a run's folder, or the id of one in ./runs. Nothing is deleted if one of them cannot be. Give the command
    again if it was interrupted.
    """
    from stageline.workers.runs.removal import removable, remove

    found = [removable(_folder_to_remove(each)) for each in dict.fromkeys(named)]
    if not yes:
        _ask(found, as_json)
        found = [removable(each.folder) for each in found]  # one may have been resumed since
    for each in found:
        remove(each)
    rows = [RemovedRun(run=each.folder.name, folder=str(each.folder), bytes=each.size) for each in found]
    answer(_versioned("run-rm/1", RemovedRuns(removed=rows)), as_json, lambda: _tell_removed(found))


def _folder_to_remove(named: str) -> Path:
    from stageline.workers.runs.removal import half_removed

    places = (Path(named), RUNS / named)
    known = (each for each in places if each.is_symlink() or runs.is_known(each) or half_removed(each))
    found = next(known, None)
    if found is None:
        raise CommandFailed(
            f"there is no run {named}, here or in ./runs: `stageline run ls` lists them", ExitCode.USAGE
        )
    return found


def _ask(found: Sequence["Removable"], as_json: bool) -> None:
    """Ask for consent. Raises `CommandFailed` if there is none, or no terminal to ask at."""
    total = f"{counted(len(found), 'run')}, {size(sum(each.size for each in found))}"
    if as_json or not sys.stdin.isatty():
        raise CommandFailed(
            f"nothing is deleted: {total}; there is no terminal to ask at, so add --yes", ExitCode.USAGE
        )
    rows = [(each.folder, each.state, each.steps, size(each.size)) for each in found]
    show("to be deleted", ("run", "state", "steps", "size"), rows)
    if not click.confirm(f"Delete {total}?"):
        raise CommandFailed("nothing is deleted", ExitCode.INTERRUPTED)


def _tell_removed(found: Sequence["Removable"]) -> None:
    say(f"deleted {counted(len(found), 'run')}, {size(sum(each.size for each in found))}")
    for each in found:
        if each.store:
            say(f"the records of {each.folder.name} at {each.store} stay")


@run.command(
    examples=(
        "stageline run stop runs/digits-20260131-101500-1f0c",
        "stageline run stop --broker tcp://desk:7000#k1.... --reason 'the machine is needed'",
    ),
    groups={"Run": ("--reason", "--now", "--patience")},
    codes=codes(ExitCode.NO_BROKER, ExitCode.NOT_ADMITTED, failed="the run did not stop in time", usage="it is over"),
)
@options.where
@broker_address.broker
@click.option("--reason", default="stopped by a command", metavar="TEXT", help="Reason, for people.")
@click.option("--now", "at_once", is_flag=True, help="Do not finish a step: what is not saved yet is lost.")
@click.option(
    "--patience",
    type=options.Finite(min=0),
    default=120.0,
    show_default=True,
    help="Seconds for the step to end and its snapshots to be written.",
)
@options.as_json
def stop(where: str | None, broker: str | None, reason: str, at_once: bool, patience: float, as_json: bool) -> None:
    """Stop a run at the end of a step, with a checkpoint if its plan has any.

    `train --resume` continues it. WHERE is a run's folder, or a plan, whose newest run is meant. Default: the newest
    run in ./runs. From another machine, --broker is the broker's address, and the key of this machine needs the right
    to stop (`stageline keys invite --right stop`).
    """
    with commanded(where, broker) as (client, look):
        facts = _stopped(client, look, reason[:1000], not at_once, patience)
    answer(_versioned("run-stop/1", facts), as_json, lambda: say(f"run {facts.run}: {facts.reason}"))


@run.command(
    examples=(
        "stageline run pause runs/digits-20260131-101500-1f0c",
        "stageline run pause --reason 'backup of the disk'",
    ),
    groups={"Run": ("--reason", "--patience")},
    codes=codes(
        ExitCode.NO_BROKER, ExitCode.NOT_ADMITTED, failed="not every worker came to the step", usage="it is over"
    ),
)
@options.where
@broker_address.broker
@click.option("--reason", default="", metavar="TEXT", help="Reason, for people.")
@click.option(
    "--patience",
    type=options.Finite(min=0),
    default=120.0,
    show_default=True,
    help="Seconds for all workers to come to the step; the pause is ordered all the same.",
)
@options.as_json
def pause(where: str | None, broker: str | None, reason: str, patience: float, as_json: bool) -> None:
    """Pause a run at the end of a step, until `run resume`.

    All workers stop before the same step, take a snapshot if the plan has any, and keep their memory. The broker keeps
    the pause: lost processes are replaced, and wait as well. The weights become those of a run that was never paused.
    The rights are those of `run stop`. WHERE is a run's folder, or a plan, whose newest run is meant. Default: the
    newest run in ./runs.
    """
    from stageline.workers.cli.asking.pausing import paused

    with commanded(where, broker) as (client, look):
        facts = paused(client, look, reason, patience)
    answer(
        {**facts, "schema": "run-pause/1"}, as_json, lambda: say(f"run {facts['run']}: {paused_text(facts['paused'])}")
    )


@run.command(
    examples=("stageline run resume runs/digits-20260131-101500-1f0c", "stageline run resume --json"),
    codes=codes(ExitCode.NO_BROKER, ExitCode.NOT_ADMITTED, usage="it is over"),
)
@options.where
@broker_address.broker
@options.as_json
def resume(where: str | None, broker: str | None, as_json: bool) -> None:
    """Have a paused run go on.

    A run that was stopped, or whose processes are gone, is continued by `train --resume`. The rights are those of
    `run stop`. WHERE is a run's folder, or a plan, whose newest run is meant. Default: the newest run in ./runs.
    """
    from stageline.workers.cli.asking.pausing import resumed

    with commanded(where, broker) as (client, _):
        facts = resumed(client)
    told = "goes on" if facts["changed"] else "was not paused"
    answer({**facts, "schema": "run-resume/1"}, as_json, lambda: say(f"run {facts['run']} {told}"))


@run.command(
    examples=(
        "stageline run leave 1 runs/digits-20260131-101500-1f0c",
        "stageline run leave 1 --reason 'the machine is needed' --seconds 120",
    ),
    groups={"Run": ("--seconds", "--reason")},
    codes=codes(
        ExitCode.NO_BROKER,
        ExitCode.NOT_ADMITTED,
        failed="the worker has not left in time",
        usage="no such worker, none can be replaced, or the run is over",
    ),
)
@click.argument("more", metavar="WORKER [WHERE]", nargs=-1, required=True, shell_complete=completion.runs_and_plans)
@broker_address.broker
@click.option("--seconds", type=options.Finite(0, LONGEST_NOTICE), default=60.0, show_default=True, help="The notice.")
@click.option("--reason", default="", metavar="TEXT", help="Reason, for people.")
@options.as_json
def leave(more: tuple[str, ...], broker: str | None, seconds: float, reason: str, as_json: bool) -> None:
    """Have a worker leave a run, which goes on without it.

    The run stops before a step until its checkpoint is complete; then the worker ends with exit code 76, and its place
    is free: a spare takes it, or a new worker. If that takes longer than --seconds, the worker leaves without the
    checkpoint. The rights are those of `run stop`. WORKER is a worker's number, WHERE a run's folder, or a plan, whose
    newest run is meant. Default: the newest run in ./runs.
    """
    from stageline.workers.cli.asking.leaving import left

    worker, where = number_and_run(more, "the number of a worker")
    if worker is None:
        raise click.UsageError(f"which worker? {more[0]} is no number of a worker")
    with commanded(where, broker) as (client, look):
        facts = left(client, look, worker, seconds, reason)
    free = "its place is free" if facts.process is None else f"its place has {facts.process}"
    answer(_versioned("run-leave/1", facts), as_json, lambda: say(f"run {facts.run}: worker {worker} has left; {free}"))


def _stopped(client: Client, look: Callable[[], Facts], reason: str, at_step_end: bool, patience: float) -> StoppedRun:
    """Have the broker stop its run; return the facts of its end. Raises `CommandFailed`, `BrokerUnreachable`."""
    found = client.ask("status", PATIENCE)
    if found["reason"] is not None:
        raise CommandFailed(f"run {found['run']} is over: {found['reason']}", ExitCode.USAGE)
    try:
        found = client.request_stop(reason, at_step_end=at_step_end, timeout=PATIENCE)
    except ValueError as refusal:
        raise CommandFailed(str(refusal), ExitCode.NOT_ADMITTED) from refusal
    except KeyRefused:
        raise
    except BrokerUnreachable as error:
        raise _gone(found["run"]) from error
    begun = monotonic()
    while (found["reason"] is None or found.get("saving")) and monotonic() < begun + patience:
        sleep(_LOOK)
        try:
            found = look()
        except KeyRefused:
            raise
        except BrokerUnreachable as error:
            if found["reason"] is None:
                raise _gone(found["run"]) from error
            break  # it has told the end, and is gone with its run
    if found["reason"] is None:
        raise CommandFailed(
            f"run {found['run']} goes on after {patience:g} s: a step takes longer, or workers are lost; it stops once "
            "that ends. `stageline why` tells more",
            ExitCode.FAILED,
        )
    return StoppedRun(**{key: found[key] for key in StoppedRun.__struct_fields__})


def _gone(run: str) -> CommandFailed:
    """Return the error that a broker does not answer after it was asked to stop its run: it may have ended with it."""
    return CommandFailed(
        f"the broker of run {run} was asked to stop it, and does not answer any more: the run has ended, or the broker "
        f"is lost. `stageline run show {run}`, on the broker's machine, tells which",
        ExitCode.NO_BROKER,
    )
